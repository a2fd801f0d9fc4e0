//! Many queue pairs to several peers, opened, used and closed over and over: nothing is left, here and in the kernel.
//!
//! `GDSYNC_TEST_DEVICE` names the device; without it these tests say so and do nothing.

use std::process::Command;
use std::time::{Duration, Instant};
use std::{fs, iter, thread};

use crate::common::{PATIENCE, Side, connect, message, named_device, tier};
use gdsync::verbs::Context;

const PEERS: usize = 8;
const QPS_PER_PEER: usize = 32;
/// Cycles before the first look: caches fill, threads get their memory.
const WARM_UP: u64 = 2;

/// 256 queue pairs to 8 peers: a message and its answer on each.
fn cycle(device: &impl Fn() -> Context, seed: u64) {
    let here = device();
    // Receives may reach the device late on a busy machine.
    let side = |context: &Context| Side::new(context, 64, |q| q.max_send_wr(4).max_recv_wr(4).rnr_retry(7));
    let pairs: Vec<_> = iter::repeat_with(device)
        .take(PEERS)
        .flat_map(|there| [(); QPS_PER_PEER].map(|()| connect(side(&here), side(&there))))
        .collect();
    for (n, (a, b)) in (seed..).zip(&pairs) {
        message(a, b, n);
        message(b, a, n + 1);
    }
}

/// What there is of the things that leak.
#[derive(Debug, PartialEq)]
struct Resources {
    /// Objects of RDMA in the kernel, by `rdma resource show`; empty where there is no such program.
    kernel: String,
    files: usize,
    threads: usize,
    /// Memory that the kernel holds for the device, in KiB.
    pinned: u64,
}

impl Resources {
    fn now() -> Self {
        let kernel = Command::new("rdma").args(["resource", "show"]).output();
        let kernel = kernel.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        Self {
            kernel: kernel.unwrap_or_default(),
            files: fs::read_dir("/proc/self/fd").unwrap().count(),
            threads: fs::read_dir("/proc/self/task").unwrap().count(),
            pinned: status("VmPin:"),
        }
    }
}

/// A line of `/proc/self/status`, in KiB.
fn status(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect(name);
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// KiB of the kernel's own memory that it cannot take back, by `/proc/meminfo`.
fn kernel_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("SUnreclaim:")).expect("a line of that name");
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// The kernel takes things away a moment after they were closed.
fn settled(before: &Resources) -> Resources {
    let end = Instant::now() + PATIENCE;
    loop {
        let now = Resources::now();
        if now == *before || Instant::now() > end {
            return now;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn queue_pairs_to_peers_leave_nothing_behind() {
    if named_device().is_none() {
        println!("skipped: GDSYNC_TEST_DEVICE names no device");
        return;
    }
    let device = || named_device().unwrap();
    let cycles = tier(1, 3, 100);
    let unused = Resources::now();
    (0..WARM_UP).for_each(|round| cycle(&device, round));
    let before = settled(&unused);
    assert_eq!(before, unused, "after the first cycles");
    let (maps, resident, kernel) = (mappings(), status("VmRSS:"), kernel_memory());
    let start = Instant::now();
    for round in 0..cycles {
        cycle(&device, round);
        if round % 50 == 49 {
            let (done, time) = (round + 1, start.elapsed().as_secs());
            println!(
                "{done} cycles, {time} s, {} KiB resident, {} KiB of the kernel",
                status("VmRSS:"),
                kernel_memory()
            );
        }
    }
    assert_eq!(settled(&before), before, "after {cycles} cycles");
    println!(
        "{cycles} cycles: mappings {maps} -> {}, resident {resident} -> {} KiB, the kernel {kernel} -> {} KiB",
        mappings(),
        status("VmRSS:"),
        kernel_memory(),
    );
    // What the allocator keeps changes from cycle to cycle, and does not grow with them: a page of each cycle would.
    assert!(mappings() < maps + 100, "mappings grew from {maps} to {}", mappings());
    assert!(status("VmRSS:") < resident + (8 << 10), "{resident} KiB grew to {} KiB", status("VmRSS:"));
}
