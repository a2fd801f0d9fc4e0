//! Error numbers, for interfaces of C.

use super::Error;

impl Error {
    /// The number of `errno.h` that says what kind of error it is; never 0.
    ///
    /// `EAGAIN`: a queue or a stream has no room now, or the queue has work of another stream. `ETIMEDOUT`: not done in time. `ECONNRESET`: a rank is lost, or the exchange with
    /// it failed. `EMSGSIZE`: a message is longer than its receive. `ECANCELED`: a receive was cancelled, or what a call waited with was closed. `EBUSY`: something is
    /// still in use. `EACCES`: a call of a forked child. `EINVAL`: an argument is wrong. Others are those of the device or the system.
    pub fn errno(&self) -> i32 {
        let of_system = |cause: &Option<std::sync::Arc<std::io::Error>>, otherwise| {
            cause
                .as_ref()
                .and_then(|error| error.raw_os_error())
                .filter(|&errno| errno > 0)
                .unwrap_or(otherwise)
        };
        match self {
            _ if self.is_full() => libc::EAGAIN,
            Self::Message { cause: gdsync::Error::Busy { .. }, .. }
            | Self::Device(gdsync::Error::Busy { .. }) => libc::EAGAIN,
            Self::Message { cause, .. } | Self::Device(cause) => cause.errno(),
            Self::Bootstrap { cause, .. } => of_system(cause, libc::ECONNRESET),
            Self::Spawn { cause, .. } => of_system(cause, libc::EIO),
            Self::Child { .. } => libc::ECONNRESET,
            Self::Deadline { .. } => libc::ETIMEDOUT,
            Self::Truncated { .. } => libc::EMSGSIZE,
            Self::Cancelled | Self::Closed { .. } => libc::ECANCELED,
            Self::Unfinished { .. } => libc::EBUSY,
            Self::Launch { .. }
            | Self::NoSuchRank { .. }
            | Self::OverlappingReceives { .. }
            | Self::NoFreePlace { .. }
            | Self::NoPostedReceive { .. }
            | Self::OutsideWindow { .. }
            | Self::Collective { .. } => libc::EINVAL,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn numbers_say_what_kind_of_error_it_is() {
        let full = || gdsync::Error::StreamFull { stream: "stream 1".into(), depth: 1 };
        let busy = gdsync::Error::Busy { queue: "send", qpn: 7, owner: "stream 1".into() };
        let refused = std::io::Error::from_raw_os_error(libc::ECONNREFUSED);
        for (error, number) in [
            (Error::message(1, "send", full()), libc::EAGAIN),
            (Error::Device(full()), libc::EAGAIN),
            (Error::message(1, "send", busy), libc::EAGAIN),
            (Error::message(1, "send", gdsync::Error::GivenUp), libc::ECONNRESET),
            (Error::Cancelled, libc::ECANCELED),
            (Error::Truncated { rank: 1, tag: 2, bytes: 3, room: 2 }, libc::EMSGSIZE),
            (Error::Deadline { what: "x".into(), after: Duration::ZERO, fix: "" }, libc::ETIMEDOUT),
            (Error::bootstrap("rank 1", "is gone", ""), libc::ECONNRESET),
            (Error::bootstrap_os("rank 1", "is gone", refused, ""), libc::ECONNREFUSED),
            (Error::NoSuchRank { rank: 2, size: 2 }, libc::EINVAL),
        ] {
            assert_eq!(error.errno(), number, "{error}");
        }
        // An answer of a device that is no error number.
        let none = Some(Arc::new(std::io::Error::from_raw_os_error(0)));
        assert_eq!(Error::Spawn { what: "x".into(), cause: none, fix: "" }.errno(), libc::EIO);
    }
}
