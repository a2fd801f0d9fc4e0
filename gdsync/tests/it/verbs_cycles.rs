//! Many queue pairs to several peers, opened, used and closed over and over: nothing is left, here and in the kernel.
//!
//! `GDSYNC_TEST_DEVICE` names the device; without it these tests say so and do nothing.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, named_device, pattern, tier};
use gdsync::memory::Memory;
use gdsync::verbs::{Access, Context, Mr, Pd, Qp, RecvWr, SendWr};

const PEERS: usize = 8;
const QPS_PER_PEER: usize = 32;
/// Bytes of a message.
const MESSAGE: usize = 64;
/// Cycles before the first look: caches fill, threads get their memory.
const WARM_UP: usize = 2;

/// Half of the queue pairs between the middle and one peer, all on one device opened anew.
struct End {
    // The last to go is what the others are made on.
    qps: Vec<Qp>,
    mr: Mr,
    _pd: Pd,
    _context: Context,
}

impl End {
    fn new(context: &Context, qps: usize) -> Self {
        let pd = context.alloc_pd().unwrap();
        let memory = Memory::alloc(2 * MESSAGE * qps).unwrap();
        let mr = pd.register(&memory, Access::all()).unwrap();
        // Receives may reach the device late on a busy machine.
        let build = |_| pd.build_qp().max_send_wr(4).max_recv_wr(4).rnr_retry(7).build().unwrap();
        Self { qps: (0..qps).map(build).collect(), mr, _pd: pd, _context: context.clone() }
    }

    /// Where queue pair `n` sends from.
    fn source(n: usize) -> usize {
        2 * MESSAGE * n
    }

    /// Where it receives.
    fn target(n: usize) -> usize {
        Self::source(n) + MESSAGE
    }

    fn post_recv(&self, n: usize) {
        let sges = [self.mr.sge(Self::target(n), MESSAGE).unwrap()];
        self.qps[n].post_recv(&[RecvWr { wr_id: n as u64, sges: &sges }]).unwrap();
    }

    fn send(&self, n: usize, seed: usize) {
        self.mr.memory().write(Self::source(n), &pattern(MESSAGE, seed)).unwrap();
        let sges = [self.mr.sge(Self::source(n), MESSAGE).unwrap()];
        self.qps[n].post_send(&[SendWr::send(&sges).id(n as u64)]).unwrap();
    }

    /// The message has gone, or come, as it was meant.
    fn has_sent(&self, n: usize) {
        let wc = self.qps[n].send_cq().wait(PATIENCE).unwrap().ok().unwrap();
        assert_eq!(wc.wr_id, n as u64);
    }

    fn has_received(&self, n: usize, seed: usize) {
        let wc = self.qps[n].recv_cq().wait(PATIENCE).unwrap().ok().unwrap();
        assert_eq!(wc.wr_id, n as u64);
        let mut got = vec![0; MESSAGE];
        self.mr.memory().read(Self::target(n), &mut got).unwrap();
        assert_eq!(got, pattern(MESSAGE, seed));
    }
}

/// 256 queue pairs to 8 peers: a message and its answer on each.
fn cycle(device: &impl Fn() -> Context, seed: usize) {
    let here = device();
    let pairs: Vec<_> =
        (0..PEERS).map(|_| (End::new(&here, QPS_PER_PEER), End::new(&device(), QPS_PER_PEER))).collect();
    let seed = |peer: usize, n: usize| seed + peer * QPS_PER_PEER + n;
    let each = || (0..PEERS).flat_map(|peer| (0..QPS_PER_PEER).map(move |n| (peer, n)));
    for (peer, n) in each() {
        let (a, b) = &pairs[peer];
        a.qps[n].connect(b.qps[n].address()).unwrap();
        b.qps[n].connect(a.qps[n].address()).unwrap();
        a.post_recv(n);
        b.post_recv(n);
    }
    for (peer, n) in each() {
        pairs[peer].0.send(n, seed(peer, n));
    }
    for (peer, n) in each() {
        let (a, b) = &pairs[peer];
        b.has_received(n, seed(peer, n));
        a.has_sent(n);
        b.send(n, seed(peer, n) + 1);
    }
    for (peer, n) in each() {
        let (a, b) = &pairs[peer];
        a.has_received(n, seed(peer, n) + 1);
        b.has_sent(n);
    }
}

/// What there is of the things that leak.
#[derive(Debug, PartialEq)]
struct Held {
    /// Objects of RDMA in the kernel, by `rdma resource show`; empty where there is no such program.
    kernel: String,
    files: usize,
    threads: usize,
    /// Memory that the kernel holds for the device, in KiB.
    pinned: u64,
}

impl Held {
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
fn settled(before: &Held) -> Held {
    let end = Instant::now() + PATIENCE;
    loop {
        let now = Held::now();
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
    let unused = Held::now();
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
