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

/// The names of threads that do what a network card would: the software HCA's, and those of the proxy.
pub const SERVICES: [&str; 2] = ["gdsync-hca", "gdsync-proxy"];

/// CPU time that threads of this process with these names have used, those that have ended not counted. The kernel knows
/// the first 15 bytes of a name.
///
/// # Errors
/// Without `/proc`, or where the kernel keeps no such times (`CONFIG_SCHED_INFO`).
pub fn threads_cpu(names: &[&str]) -> std::io::Result<Duration> {
    let mut sum = Duration::ZERO;
    for thread in std::fs::read_dir("/proc/self/task")? {
        let path = thread?.path();
        // A thread may end meanwhile.
        let Ok(name) = std::fs::read_to_string(path.join("comm")) else { continue };
        if !names.contains(&name.trim_end()) {
            continue;
        }
        let path = path.join("schedstat");
        let times = std::fs::read_to_string(&path)
            .map_err(|e| std::io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
        let ran = times.split_whitespace().next().and_then(|ran| ran.parse().ok());
        let missing = || std::io::Error::other(format!("{}: no CPU time in '{times}'", path.display()));
        sum += Duration::from_nanos(ran.ok_or_else(missing)?);
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Of two threads that work until their own clocks say so, the one that is asked for is counted.
    #[test]
    fn threads_are_counted_by_their_names() {
        const WORK: Duration = Duration::from_millis(5);
        let (done, wait) = mpsc::channel();
        let threads = ["clock-test-a", "clock-test-b"].map(|name| {
            let (done, (hold, held)) = (done.clone(), mpsc::channel::<()>());
            let work = move || {
                while thread_cpu() < WORK {
                    std::hint::spin_loop();
                }
                done.send(()).unwrap();
                // Lives until it has been looked at.
                let _ = held.recv();
            };
            (std::thread::Builder::new().name(name.into()).spawn(work).unwrap(), hold)
        });
        threads.iter().for_each(|_| wait.recv().unwrap());
        let [one, both] =
            [&["clock-test-a"][..], &["clock-test-a", "clock-test-b"]].map(|n| threads_cpu(n).unwrap());
        assert!(one > Duration::ZERO && both > one, "{one:?} of {both:?}");
        assert_eq!(threads_cpu(&["clock-test"]).unwrap(), Duration::ZERO, "no thread has this name");
        for (thread, hold) in threads {
            drop(hold);
            thread.join().unwrap();
        }
    }
}
