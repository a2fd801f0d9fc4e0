//! One-sided access at the gdsync level: put, get and a remote counter, triggered by a stream; the target does nothing.
//!
//! Two queue pairs of one process talk through the software HCA. `cargo run --example putget`

use std::time::Duration;

use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond, HostStreamConfig, Stream};
use gdsync::verbs::{Access, Device, SendWr};

const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> gdsync::Result<()> {
    let context = Device::find(None)?.open()?;
    let pd = context.alloc_pd()?;
    let (origin, target) = (pd.build_qp().build()?, pd.build_qp().build()?);
    origin.connect(target.address())?;
    target.connect(origin.address())?;

    let local = pd.register(&Memory::alloc(64)?, Access::LOCAL_WRITE)?;
    let window = pd.register(&Memory::alloc(64)?, Access::all())?;
    local.memory().write(0, b"put, then got back")?;

    // Everything in one submission: put 18 bytes, raise a flag behind them, add to a counter, get the bytes back.
    let stream = Stream::host(HostStreamConfig::default())?;
    let mut batch = Batch::new();
    batch.sends(
        &origin,
        &[
            SendWr::write(window.remote(0)?, &[local.sge(0, 18)?]),
            SendWr::write_inline(window.remote(32)?, &1u32.to_le_bytes()),
            SendWr::fetch_add(window.remote(40)?, 5, local.sge(56, 8)?),
            SendWr::read(window.remote(0)?, &[local.sge(32, 18)?]),
        ],
    )?;
    let done = batch.wait_all_sends(&origin)?;
    stream.submit(&mut batch)?;

    // At the target another stream notices the flag. Data written before it on the same queue pair is there then.
    let flag = window.memory().word32(32)?;
    let observer = Stream::host(HostStreamConfig { name: "observer".into(), ..HostStreamConfig::default() })?;
    observer.wait_value32(&flag, 1, Cond::Geq)?;
    observer.synchronize(PATIENCE)?;
    stream.synchronize(PATIENCE)?;

    let mut text = [0; 18];
    local.memory().read(32, &mut text)?;
    println!("got back: {}", String::from_utf8_lossy(&text));
    println!("counter:  {}", window.memory().word64(40)?.load());
    println!("last:     {:?}", done.status()?);
    Ok(())
}
