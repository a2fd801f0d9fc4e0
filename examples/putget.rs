//! One-sided access between two ranks, on streams: a put with a signal, the answer's signal, a get; then a remote counter.
//!
//! Started alone it spawns its peer: `cargo run --example putget`

use std::time::Duration;

use gdasync::out;
use gdsync::memory::Memory;
use gdsync::stream::{Cond, HostStreamConfig, Stream};
use mp::{Communicator, Rma, Signal};

const PATIENCE: Duration = Duration::from_secs(10);

/// Where things are in the window of each rank.
const SIGNAL: usize = 0;
const COUNTER: usize = 8;
const TEXT: usize = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // No options; `--help` says what it shows.
    clap::Command::new("putget")
        .about("A put with a signal and a get between two processes, in the order of a stream")
        .get_matches();

    let comm = Communicator::builder().spawn(2).init()?;
    let peer = comm.rank() ^ 1;
    let shared = comm.register(&Memory::alloc(128)?)?;
    let window = comm.window(&shared, 0..128, PATIENCE)?;
    let local = comm.register(&Memory::alloc(64)?)?;
    let stream = Stream::host(HostStreamConfig::default())?;

    if comm.rank() == 0 {
        // The signal arrives behind the data. The stream then waits for the peer's answer; all in stream order.
        local.memory().write(0, b"put, then got back")?;
        let put = Rma::put(&local, 0..18, peer, TEXT).with_signal(Signal::set(SIGNAL, 1));
        // The put itself needs no wait: the answer to its signal implies it.
        let _ = window.start_on_stream(&stream, &put)?;
        window.wait_signal_on_stream(&stream, SIGNAL, 1, Cond::Geq)?;
        let got = window.start_on_stream(&stream, &Rma::get(&local, 32..50, peer, TEXT))?;
        comm.wait_on_stream(&stream, &got)?;
    } else {
        window.wait_signal_on_stream(&stream, SIGNAL, 1, Cond::Geq)?;
        let memory = shared.memory().clone();
        stream.host_fn(move || {
            let mut text = [0; 18];
            memory.read(TEXT, &mut text).expect("the text is in the window");
            memory.write(TEXT, &text.to_ascii_uppercase()).expect("the text is in the window");
        })?;
        let answer = window.start_on_stream(&stream, &Rma::signal(peer, Signal::set(SIGNAL, 1)))?;
        comm.wait_on_stream(&stream, &answer)?;
    }
    stream.synchronize(PATIENCE)?;

    // The CPUs of both ranks count at rank 0, by remote atomics.
    let count = window.start(&Rma::fetch_add(5, 0, COUNTER, &local, 56))?;
    comm.wait(&count, PATIENCE)?;
    comm.barrier(PATIENCE)?;
    let first = comm.rank() == 0;
    let total = window.word64(COUNTER)?.load();
    window.destroy(PATIENCE)?;
    comm.finalize(PATIENCE)?;
    if first {
        let mut text = [0; 18];
        local.memory().read(32, &mut text)?;
        out!("got back: {}", String::from_utf8_lossy(&text))?;
        out!("counter:  {total}")?;
    }
    Ok(())
}
