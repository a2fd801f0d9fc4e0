//! gdsync and the [`ibverbs`] crate, an independent client of libibverbs, on one RDMA device: both must see the same
//! devices, and queue pairs of one must talk to queue pairs of the other.
//!
//! `gdsync-interop [DEVICE]`; without a name the device that gdsync prefers. Its port 1 must be active. Exit status 1 says that
//! something differed or did not arrive.

mod foreign;
mod tables;
mod traffic;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use gdsync::Device;

/// A failed check, or a failed call of either side.
type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// For everything that must arrive.
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    match run(std::env::args().nth(1).as_deref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(name: Option<&str>) -> Result {
    tables::compare()?;
    let device = Device::find(name)?;
    if device.is_software() {
        return Err("no RDMA device: soft0 is known to gdsync only".into());
    }
    traffic::run(&device)
}

/// Fails with `why` unless `good`.
fn check(good: bool, why: impl FnOnce() -> String) -> Result {
    if good { Ok(()) } else { Err(why().into()) }
}
