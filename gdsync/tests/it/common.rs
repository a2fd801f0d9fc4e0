//! What the integration tests of this crate share.
#![allow(unreachable_pub, reason = "modules of a test program")]

use std::time::{Duration, Instant};

use gdsync::Device;
use gdsync::hca::SoftHcaConfig;
use gdsync::memory::{Memory, Word32};
use gdsync::shm::back_off;
use gdsync::stream::{HostStreamConfig, Stream};
use gdsync::verbs::{
    Access, Context, Mr, Pd, Qp, QpAttr, QpBuilder, QpState, RecvWr, RemoteAddr, SendWr, Wc,
};
pub use gdsync_testkit::tier;

/// How long a test waits for something that happens at once when all is well.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// One side of a connection: its own HCA unless made by [`Side::sharing`].
pub struct Side {
    pub context: Context,
    pub pd: Pd,
    pub qp: Qp,
    pub mr: Mr,
}

impl Side {
    pub fn new(context: &Context, bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder) -> Self {
        let pd = context.alloc_pd().unwrap();
        let mr = pd.register(&Memory::alloc(bytes).unwrap(), Access::all()).unwrap();
        // The proxy of a device posts receives by its own thread, on a loaded machine later than six retries last.
        let start = pd.build_qp();
        let start = if is_device_named() { start.rnr_retry(7) } else { start };
        let qp = build(start).build().unwrap();
        Self { context: context.clone(), pd, qp, mr }
    }

    pub fn memory(&self) -> &Memory {
        self.mr.memory()
    }
}

/// Whether these tests use a device of the machine.
pub fn is_device_named() -> bool {
    std::env::var_os("GDSYNC_TEST_DEVICE").is_some_and(|name| !name.is_empty())
}

/// The device that `GDSYNC_TEST_DEVICE` names, through the route that the environment says.
pub fn named_device() -> Option<Context> {
    let name = std::env::var("GDSYNC_TEST_DEVICE").ok().filter(|name| !name.is_empty())?;
    Some(Device::find(Some(&name)).unwrap().open().unwrap())
}

/// A strict software HCA, without faults from the environment; or the device that [`named_device`] opens.
pub fn hca() -> Context {
    if let Some(device) = named_device() {
        return device;
    }
    Context::soft(&SoftHcaConfig { strict: true, ..SoftHcaConfig::default() }).unwrap()
}

/// Two connected sides on HCAs of their own, `bytes` of memory each.
pub fn pair(bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder) -> (Side, Side) {
    connect(Side::new(&hca(), bytes, &build), Side::new(&hca(), bytes, &build))
}

/// Two connected sides on one HCA.
pub fn loopback(bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder) -> (Side, Side) {
    let context = hca();
    connect(Side::new(&context, bytes, &build), Side::new(&context, bytes, &build))
}

/// Connects two sides.
pub fn connect(a: Side, b: Side) -> (Side, Side) {
    a.qp.connect(b.qp.address()).unwrap();
    b.qp.connect(a.qp.address()).unwrap();
    (a, b)
}

pub fn stream(name: &str) -> Stream {
    stream_with(name, PATIENCE)
}

pub fn stream_with(name: &str, wait_limit: Duration) -> Stream {
    Stream::host(HostStreamConfig { name: name.into(), wait_limit, ..HostStreamConfig::default() }).unwrap()
}

/// The next send completion, whatever it says.
pub fn sent(side: &Side) -> Wc {
    side.qp.send_cq().wait(PATIENCE).unwrap()
}

/// The next receive completion, whatever it says.
pub fn received(side: &Side) -> Wc {
    side.qp.recv_cq().wait(PATIENCE).unwrap()
}

/// Posts a receive of `len` bytes at `offset`.
pub fn receive(side: &Side, wr_id: u64, offset: usize, len: usize) {
    side.qp.post_recv(&[RecvWr::new(&[side.mr.sge(offset, len).unwrap()]).id(wr_id)]).unwrap();
}

/// Posts a send of `len` bytes from `offset`.
pub fn send(side: &Side, wr_id: u64, offset: usize, len: usize) {
    side.qp.post_send(&[SendWr::send(&[side.mr.sge(offset, len).unwrap()]).id(wr_id)]).unwrap();
}

/// One message over the pair, with contents.
pub fn message(a: &Side, b: &Side, wr_id: u64) {
    let data = pattern(30, usize::try_from(wr_id & 0xff).unwrap());
    a.memory().write(0, &data).unwrap();
    receive(b, !wr_id, 32, 30);
    send(a, wr_id, 0, 30);
    assert_eq!(sent(a).ok().unwrap().wr_id, wr_id);
    assert_eq!(received(b).ok().unwrap().wr_id, !wr_id);
    assert!(bytes(b, 32, 30) == data);
}

/// Where the memory of a side begins, by a key that is not its own.
pub fn wrong_key(side: &Side) -> RemoteAddr {
    let remote = side.mr.remote(0).unwrap();
    RemoteAddr { rkey: remote.rkey ^ 1, ..remote }
}

/// A word in host memory, 0.
pub fn gate() -> Word32 {
    Memory::alloc(4).unwrap().word32(0).unwrap()
}

/// Two of them.
pub fn gates() -> [Word32; 2] {
    [gate(), gate()]
}

/// Resets both queue pairs and connects them again.
pub fn reconnect(a: &Qp, b: &Qp) {
    for qp in [a, b] {
        qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
    }
    a.connect(b.address()).unwrap();
    b.connect(a.address()).unwrap();
}

/// Bytes that differ from their neighbours, from other seeds, and from one 16 KiB packet to the next.
pub fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i ^ i >> 8 ^ i >> 14).wrapping_mul(151) + seed * 89 + 1).to_le_bytes()[0]).collect()
}

/// A part of a side's memory.
pub fn bytes(side: &Side, offset: usize, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    side.memory().read(offset, &mut out).unwrap();
    out
}

/// Whether this is the software HCA of this process, which counts what it does. Devices of the machine do not.
pub fn counts(context: &Context) -> bool {
    context.description() == "software HCA"
}

/// So many send WQEs were taken from the rings, as far as that can be known.
pub fn assert_wqes(context: &Context, expected: u64, why: &str) {
    if counts(context) {
        assert_eq!(context.stats().wqes, expected, "{why}");
    }
}

/// Nothing happened that a card would punish.
pub fn assert_clean(sides: &[&Side]) {
    for side in sides {
        let stats = side.context.stats();
        assert_eq!((stats.violations, stats.cq_overruns), (0, 0), "{:?}", stats.last_violation);
    }
}

/// Calls `done` until it is true.
#[track_caller]
pub fn until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "waited in vain");
        back_off(start.elapsed(), PATIENCE);
    }
}
