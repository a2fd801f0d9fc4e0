//! What waiting costs. One test only: it looks at the CPU time of the whole process.

mod common;

use std::time::{Duration, Instant};

use common::{PATIENCE, stream};
use gdsync::verbs::{RecvWr, SendWr};

/// CPU time of all threads of this process.
fn cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid for one timespec.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

#[test]
fn four_streams_that_wait_use_little_cpu() {
    let pairs: Vec<_> = (0..4).map(|_| common::pair(64, |q| q)).collect();
    let streams: Vec<_> = (0..4).map(|i| stream(&format!("idle{i}"))).collect();
    for ((_, b), s) in pairs.iter().zip(&streams) {
        b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
        s.wait_recv(&b.qp).unwrap();
    }
    let (start, before) = (Instant::now(), cpu());
    std::thread::sleep(Duration::from_millis(300));
    let (wall, used) = (start.elapsed(), cpu() - before);
    assert!(used < wall * 15 / 100, "{used:?} of CPU in {wall:?}");
    for ((a, _), s) in pairs.iter().zip(&streams) {
        a.qp.post_send(&[SendWr::send(&[])]).unwrap();
        s.synchronize(PATIENCE).unwrap();
    }
}
