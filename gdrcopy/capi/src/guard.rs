//! What surrounds every call from C: messages, error numbers, and no panic that goes further.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::Result;
use crate::log;

/// Runs a call; its failure is logged under the call's name and comes back as an error number.
pub(crate) fn run<T>(name: &'static str, call: impl FnOnce() -> Result<T>) -> std::result::Result<T, c_int> {
    no_panic(|| {
        log::during(|| {
            no_panic(|| {
                call().map_err(|error| {
                    tracing::error!("{name}: {error}");
                    // A failure must not look like success, whatever a driver said.
                    Some(error.errno()).filter(|&errno| errno > 0).unwrap_or(libc::EIO)
                })
            })
            .inspect_err(|_| tracing::error!("{name}: panicked, which is a defect of this library"))
            .unwrap_or(Err(libc::EIO))
        })
    })
    .unwrap_or(Err(libc::EIO))
}

/// [`run`] for calls that return 0 or an error number.
pub(crate) fn status(name: &'static str, call: impl FnOnce() -> Result<()>) -> c_int {
    run(name, call).err().unwrap_or(0)
}

/// A panic becomes an error; its message has been printed by the panic hook.
#[inline]
pub(crate) fn no_panic<T>(call: impl FnOnce() -> T) -> std::result::Result<T, ()> {
    // Whatever a call was doing is behind locks, which are released; nothing else of it is seen again.
    catch_unwind(AssertUnwindSafe(call)).map_err(std::mem::forget)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::invalid;

    #[test]
    fn failures_become_error_numbers() {
        assert_eq!(status("call", || Ok(())), 0);
        assert_eq!(status("call", || Err(invalid("a", "b", "c"))), libc::EINVAL);
        assert_eq!(status("call", || panic!("on purpose")), libc::EIO);
        // A device that answers a failed call with error 0.
        let source = std::io::Error::from_raw_os_error(0);
        assert_eq!(
            status("call", || Err(gdrcopy::Error::Sys { call: "x".into(), source, fix: "" })),
            libc::EIO
        );
    }
}
