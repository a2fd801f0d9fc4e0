//! Send and receive at the gdsync level: a kernel-like step, a send and a receive on streams, no CPU between them.
//!
//! Two queue pairs of one process talk through the software HCA. `cargo run --example sendrecv`

use std::time::Duration;

use gdasync::out;
use gdsync::Device;
use gdsync::memory::Memory;
use gdsync::stream::{Batch, HostStreamConfig, Stream};
use gdsync::verbs::{Access, RecvWr, SendWr};

const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // No options; `--help` says what it shows.
    clap::Command::new("sendrecv")
        .about("Two queue pairs: compute, send, receive, compute, in the order of a stream")
        .get_matches();

    // The device, and on it two queue pairs that know each other's address.
    let context = Device::find(None)?.open()?;
    let pd = context.alloc_pd()?;
    let (alice, bob) = (pd.build_qp().build()?, pd.build_qp().build()?);
    alice.connect(bob.address())?;
    bob.connect(alice.address())?;

    // Memory that both sides may name in work requests.
    let outbox = pd.register(&Memory::alloc(64)?, Access::LOCAL_WRITE)?;
    let inbox = pd.register(&Memory::alloc(64)?, Access::LOCAL_WRITE)?;

    // Receives are posted early, by the CPU.
    let received = bob.post_recv(&[RecvWr::new(&[inbox.sge(0, 64)?]).id(1)])?;

    // Bob's stream goes on when the message is in.
    let bobs = Stream::host(HostStreamConfig { name: "bob".into(), ..HostStreamConfig::default() })?;
    let memory = inbox.memory().clone();
    let mut batch = Batch::new();
    batch.wait(&received)?;
    batch.host_fn(move || {
        let mut text = [0; 18];
        memory.read(0, &mut text).expect("the buffer holds 64 bytes");
        // The lines below tell of output that cannot be written; a stream's thread must not panic.
        let _ = out!("Bob's stream got: {}", String::from_utf8_lossy(&text));
    });
    bobs.submit(&mut batch)?;

    // Alice's stream computes the message, sends it, and waits until the buffer is free again: one submission.
    let alices = Stream::host(HostStreamConfig { name: "alice".into(), ..HostStreamConfig::default() })?;
    let memory = outbox.memory().clone();
    batch.host_fn(move || memory.write(0, b"hello from Alice's").expect("the buffer holds 64 bytes"));
    let sent = batch.send(&alice, &SendWr::send(&[outbox.sge(0, 18)?]).id(2))?;
    batch.wait(&sent)?;
    alices.submit(&mut batch)?;

    // The CPU could sleep or work here. A failure of the network would come out of these calls.
    alices.synchronize(PATIENCE)?;
    bobs.synchronize(PATIENCE)?;
    out!("sent:     {:?}", sent.status()?)?;
    out!("received: {:?}", received.status()?)?;
    Ok(())
}
