//! The same thing many times, and what is left behind.
#![allow(dead_code, unreachable_pub, reason = "every test binary uses its own part")]

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use gdsync::error::Error;
use gdsync::mlx5::Syndrome;
use gdsync::stream::{Batch, Stream};
use gdsync::verbs::{Completion, Context, Qp, QpBuilder, QpState, RecvWr, SendWr, Sge, Wc};

use super::common::{PATIENCE, Side, hca, stream};

pub const TIMES: u32 = 100;

/// What this process holds of the things that leak.
#[derive(Debug, PartialEq)]
pub struct Held {
    pub files: usize,
    /// Those of this library.
    pub threads: usize,
    /// Mappings of memory shared with other HCAs.
    pub links: usize,
}

impl Held {
    pub fn now() -> Self {
        let files = fs::read_dir("/proc/self/fd").unwrap().count();
        let threads = threads().len();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let links = maps.lines().filter(|line| line.contains("memfd:gdsync")).count();
        Self { files, threads, links }
    }
}

/// The names of this library's threads.
pub fn threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.starts_with("gdsync-")).map(|name| name.trim().to_owned()).collect()
}

/// As long as this lives, no other test of the binary runs that asks for it.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does it `TIMES` times with two HCAs, alone in this process, and checks that nothing is left of it.
pub fn repeat(mut once: impl FnMut(&Context, &Context)) {
    let _alone = alone();
    let (a, b) = (hca(), hca());
    // Once without looking: it makes the link between the two.
    drop(fresh(&a, &b, |q| q));
    once(&a, &b);
    // A thread gets its name a moment after it was started: two of each HCA.
    let start = Instant::now();
    let mut before = Held::now();
    while before.threads != 4 {
        assert!(start.elapsed() < PATIENCE, "left by one time: {before:?}");
        thread::sleep(Duration::from_millis(1));
        before = Held::now();
    }
    for _ in 0..TIMES {
        once(&a, &b);
    }
    let start = Instant::now();
    // The kernel removes a thread a moment after it was joined.
    while Held::now() != before {
        assert!(start.elapsed() < PATIENCE, "before: {before:?}, after: {:?}", Held::now());
        thread::sleep(Duration::from_millis(1));
    }
}

/// Timers as short as they go, so that what will not be answered fails at once.
pub fn hasty(q: QpBuilder) -> QpBuilder {
    q.timeout(5).retry_cnt(1).rnr_retry(1).min_rnr_timer(1)
}

/// A connected pair of fresh queue pairs.
pub fn fresh(a: &Context, b: &Context, build: impl Fn(QpBuilder) -> QpBuilder) -> (Side, Side) {
    let (a, b) = (Side::new(a, 256, &build), Side::new(b, 256, &build));
    a.qp.connect(b.qp.address()).unwrap();
    b.qp.connect(a.qp.address()).unwrap();
    (a, b)
}

/// Who posts, and who waits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum By {
    Cpu,
    Stream,
}

pub const BOTH: [By; 2] = [By::Cpu, By::Stream];

/// Sends `wrs`, lets something happen `meanwhile`, and returns how each of them ended.
pub fn sends(by: By, side: &Side, wrs: &[SendWr<'_>], meanwhile: impl FnOnce()) -> Vec<Option<Syndrome>> {
    if by == By::Cpu {
        side.qp.post_send(wrs).unwrap();
        meanwhile();
        let cq = side.qp.send_cq();
        return wrs.iter().map(|wr| ended(cq.wait(PATIENCE).unwrap(), side, wr.wr_id)).collect();
    }
    let s = stream("sends");
    let mut batch = Batch::new();
    let sent: Vec<_> = wrs.iter().map(|wr| batch.send(&side.qp, wr).unwrap()).collect();
    wrs.iter().for_each(|_| drop(batch.wait_send(&side.qp).unwrap()));
    let end = side.memory().word32(252).unwrap();
    batch.write_value32(&end, 1);
    s.submit(&mut batch).unwrap();
    meanwhile();
    let result = s.synchronize(PATIENCE);
    assert_eq!(end.load(), 1, "the stream ran to its end: {result:?}");
    assert_eq!(result.map_err(|e| e.to_string()), side.qp.check().map_err(|e| e.to_string()));
    assert!(s.query().error.is_none(), "the queue pair failed, not the stream");
    if let Err(error) = side.qp.check() {
        refuses(&s, &side.qp, &error);
    }
    let status = |(c, wr): (&Completion, &SendWr<'_>)| match c.status() {
        Ok(wc) => ended(wc.expect("the stream waited for it"), side, wr.wr_id),
        Err(Error::Completion(e)) => {
            assert_eq!((e.qpn, e.wr_id, e.vendor), (side.qp.qpn(), wr.wr_id, 0));
            Some(e.syndrome)
        }
        Err(other) => panic!("{other}"),
    };
    sent.iter().zip(wrs).map(status).collect()
}

fn ended(wc: Wc, side: &Side, wr_id: u64) -> Option<Syndrome> {
    assert_eq!((wc.qpn, wc.wr_id, wc.vendor), (side.qp.qpn(), wr_id, 0));
    wc.syndrome
}

/// Receives that somebody waits for.
pub struct Awaited<'a> {
    side: &'a Side,
    count: usize,
    stream: Option<(Stream, Vec<Completion>)>,
}

/// Begins to wait for the next `count` receives.
pub fn await_receives(by: By, side: &Side, count: usize) -> Awaited<'_> {
    let wait = || {
        let s = stream("receives");
        let waits = (0..count).map(|_| s.wait_recv(&side.qp).unwrap().completion()).collect();
        (s, waits)
    };
    Awaited { side, count, stream: (by == By::Stream).then(wait) }
}

impl Awaited<'_> {
    /// How each of them ended.
    pub fn ended(self) -> Vec<Option<Syndrome>> {
        let Some((s, waits)) = self.stream else {
            let cq = self.side.qp.recv_cq();
            return (0..self.count).map(|_| cq.wait(PATIENCE).unwrap().syndrome).collect();
        };
        let result = s.synchronize(PATIENCE).map_err(|e| e.to_string());
        assert_eq!(s.query().pending, 0, "the stream has drained");
        assert_eq!(result, self.side.qp.check().map_err(|e| e.to_string()));
        let status = |wait: &Completion| match wait.status() {
            Ok(wc) => wc.expect("the stream waited for it").syndrome,
            Err(Error::Completion(e)) => Some(e.syndrome),
            Err(other) => panic!("{other}"),
        };
        waits.iter().map(status).collect()
    }
}

/// Every further call fails at once with the root cause.
pub fn refuses(s: &Stream, qp: &Qp, root: &Error) {
    let text = root.to_string();
    let nop = [SendWr::nop()];
    let errors = [
        qp.check().unwrap_err(),
        qp.post_send(&nop).unwrap_err(),
        qp.post_recv(&[RecvWr { wr_id: 0, sges: &[] }]).unwrap_err(),
        qp.prepare_send(&nop).unwrap_err(),
        qp.prepare_wait_send().unwrap_err(),
        qp.prepare_wait_recv().unwrap_err(),
        s.send(qp, &nop[0]).unwrap_err(),
    ];
    errors.iter().for_each(|error| assert_eq!(error.to_string(), text));
    assert_eq!(qp.state(), QpState::ERR);
}

/// The queue pair broke on this request, says so with everything one needs to know, and stays so.
pub fn broke(side: &Side, wr_id: u64, syndrome: Syndrome) {
    let error = side.qp.check().unwrap_err();
    let Error::Completion(e) = &error else { panic!("{error}") };
    assert_eq!((e.qpn, e.wr_id, e.syndrome, e.vendor), (side.qp.qpn(), wr_id, syndrome, 0), "{error}");
    let text = error.to_string();
    for part in
        [format!("QP {:#x}", e.qpn), format!("{wr_id:#x}"), syndrome.to_string(), "vendor code 0x0".into()]
    {
        assert!(text.contains(&part), "{text} lacks {part}");
    }
    refuses(&stream("late"), &side.qp, &error);
}

/// The queue pair broke because the other side is gone, with nothing under way that could fail, and stays so.
pub fn lost_its_peer(side: &Side) {
    let error = side.qp.check().unwrap_err();
    assert!(matches!(error, Error::PeerGone { qpn } if qpn == side.qp.qpn()), "{error}");
    refuses(&stream("late"), &side.qp, &error);
}

pub const FLUSH: Option<Syndrome> = Some(Syndrome::WR_FLUSH_ERR);
pub const RETRY: Option<Syndrome> = Some(Syndrome::RETRY_EXC_ERR);

/// A receiver that is not ready never makes a send fail.
pub fn patient(q: QpBuilder) -> QpBuilder {
    q.rnr_retry(7).min_rnr_timer(1)
}

/// Writes of one byte each, with ids from 100.
pub fn writes(to: &Side) -> [SendWr<'static>; 3] {
    let remote = to.mr.remote(0).unwrap();
    std::array::from_fn(|i| SendWr::write_inline(remote, b"x").id(100 + i as u64))
}

/// Empty sends, with ids from 100.
pub fn messages() -> [SendWr<'static>; 3] {
    std::array::from_fn(|i| SendWr::send(&[]).id(100 + i as u64))
}

pub fn post_recvs(side: &Side, count: u64, sges: &[Sge]) -> Completion {
    let wrs: Vec<_> = (0..count).map(|i| RecvWr { wr_id: 200 + i, sges }).collect();
    side.qp.post_recv(&wrs).unwrap()
}
