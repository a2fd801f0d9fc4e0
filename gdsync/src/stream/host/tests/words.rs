//! Waits for words that a device writes: the waiting thread runs the device.

use super::*;
use crate::verbs::{Access, Context, Pd, QpAttr, TransferPath, Transport};
use gdsync_device::{CqParts, Gid, MrKeys, OnGpu, Places, Provider, QpParts, QpRequest};

/// A device that nothing runs but the calls to it. `step` gets the number of its steps so far.
struct Passive {
    steps: AtomicU64,
    rests: AtomicU64,
    step: Box<dyn Fn(u64) + Send + Sync>,
}

impl Passive {
    fn new(step: impl Fn(u64) + Send + Sync + 'static) -> Arc<Self> {
        let (steps, rests) = Default::default();
        Arc::new(Self { steps, rests, step: Box::new(step) })
    }

    fn open(self: &Arc<Self>) -> Pd {
        Context::over(self.clone()).alloc_pd().expect("it refuses nothing")
    }

    fn steps(&self) -> u64 {
        self.steps.load(Ordering::SeqCst)
    }
}

impl fmt::Debug for Passive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passive")
    }
}

fn no_queues() -> Error {
    Error::Unsupported { what: "a queue", by: "a device without queues", fix: "use another" }
}

impl Provider for Passive {
    fn description(&self) -> &str {
        "passive"
    }
    fn wire(&self) -> &str {
        "none"
    }
    fn gid(&self) -> Gid {
        Gid([0; 16])
    }
    fn alloc_pd(&self) -> Result<u32> {
        Ok(1)
    }
    fn dealloc_pd(&self, _pdn: u32) {}
    fn reg_mr(&self, _pdn: u32, _memory: &Memory, _access: Access) -> Result<MrKeys> {
        Ok(MrKeys { lkey: 1, rkey: 1, is_staged: false })
    }
    fn dereg_mr(&self, _keys: MrKeys) {}
    fn transfer_path(&self, _qpn: u32, _lkey: u32, _memory: &Memory, _len: usize) -> TransferPath {
        TransferPath::new(Transport::Cpu, "there is none")
    }
    fn create_cq(&self, _log_entries: u32, _ring: OnGpu, _places: &Places) -> Result<CqParts> {
        Err(no_queues())
    }
    fn destroy_cq(&self, _cqn: u32) {}
    fn create_qp(&self, _request: &QpRequest, _places: &Places) -> Result<QpParts> {
        Err(no_queues())
    }
    fn modify_qp(&self, _qpn: u32, _attr: &QpAttr, _timeout: Duration) -> Result<u32> {
        Err(no_queues())
    }
    fn destroy_qp(&self, _qpn: u32) {}
    fn record_may_lag(&self) -> bool {
        false
    }
    fn progress(&self) -> bool {
        (self.step)(self.steps.fetch_add(1, Ordering::SeqCst) + 1);
        false
    }
    fn end_polling(&self) {
        self.rests.fetch_add(1, Ordering::SeqCst);
    }
}

/// The word is written by a step of the device, and no other thread runs it. Without spinning, the wait sleeps before.
#[test]
fn a_wait_for_a_word_runs_the_device_that_writes_it() {
    for spin in [LONG, Duration::ZERO] {
        let engine = start(HostStreamConfig { spin, wait_limit: LONG, ..HostStreamConfig::default() });
        let memory = Memory::alloc(4096).unwrap();
        let (narrow, wide) = (memory.word32(4092).unwrap(), memory.word64(8).unwrap());
        let words = (narrow.clone(), wide.clone());
        let device = Passive::new(move |number| match number {
            20 => words.0.store(1),
            40 => words.1.store(1),
            _ => {}
        });
        let pd = device.open();
        let _mr = pd.register(&memory, Access::all()).unwrap();
        let wide = Op::Wait64 { at: wide, value: 1, cond: Cond::Geq };
        submit(&engine, [wait_for(&narrow, 1), wide]);
        drain(&engine);
        assert!(engine.error().is_none(), "{:?}", engine.error());
        assert!(device.steps() >= 40, "{}", device.steps());
        let rests = device.rests.load(Ordering::SeqCst);
        assert_eq!(rests > 0, spin.is_zero(), "it hands the device over before it sleeps: {rests}");
    }
}

/// What a step left behind, such as an acknowledgement, is done before the stream rests or runs foreign code.
#[test]
fn a_wait_for_a_word_leaves_no_work_behind() {
    let engine = engine();
    let [seen] = words32();
    let memory = Memory::alloc(8).unwrap();
    let word = memory.word32(0).unwrap();
    let at = word.clone();
    let device = Passive::new(move |number| at.store(u32::from(number >= 10)));
    let _mr = device.open().register(&memory, Access::all()).unwrap();
    let (steps, out) = (device.clone(), seen.clone());
    let note = host_fn(move || out.store(u32::try_from(steps.steps()).unwrap()));
    submit(&engine, [wait_for(&word, 1), note]);
    drain(&engine);
    assert_eq!(seen.load(), 11, "ten steps until the word was written, one after");
}

/// Devices that cannot write the word are left alone.
#[test]
fn a_wait_for_a_word_runs_no_other_device() {
    let engine = engine();
    let memory = Memory::alloc(4096).unwrap();
    let word = memory.word32(64).unwrap();
    let device = Passive::new(|_| {});
    let pd = device.open();
    let _beside = pd.register(&memory.slice(0, 64).unwrap(), Access::all()).unwrap();
    let _behind = pd.register(&memory.slice(68, 64).unwrap(), Access::all()).unwrap();
    let _read_only = pd.register(&memory, Access::REMOTE_READ).unwrap();
    drop(pd.register(&memory, Access::all()).unwrap());
    let seq = submit(&engine, [wait_for(&word, 1)]);
    assert!(!engine.wait_completed(seq, Instant::now() + Duration::from_millis(20)));
    assert_eq!(device.steps(), 0);
    // Registered while the stream waits.
    let _mr = pd.register(&memory, Access::all()).unwrap();
    until("the device is run", || device.steps() > 0);
    word.store(1);
    drain(&engine);
}
