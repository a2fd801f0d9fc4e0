//! CPU clocks.

use std::time::Duration;

fn clock(id: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing.
    let rc = unsafe { libc::clock_gettime(id, &raw mut time) };
    assert_eq!(rc, 0, "Linux has had the CPU clocks since 2.6.12");
    let part = |value: i64| u64::try_from(value).expect("CPU time is not negative");
    Duration::from_secs(part(time.tv_sec)) + Duration::from_nanos(part(time.tv_nsec))
}

/// CPU time the calling thread has used.
pub fn thread_cpu() -> Duration {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// CPU time all threads of this process have used.
pub fn process_cpu() -> Duration {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}
