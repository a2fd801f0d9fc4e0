//! A copy engine for plain memory: late, out of order, and failing on request.
#![allow(unreachable_pub, reason = "part of a test program")]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use gdsync::copy_engine::{CopyEngine, Handle, Part, ProcessId, Source, Ticket};
use gdsync::cuda::Gpu;
use gdsync::hca::SoftHcaConfig;
use gdsync::memory::Memory;
use gdsync::verbs::Context;

/// What the engine does wrong.
#[derive(Clone, Copy, Debug, Default)]
pub struct Habits {
    pub seed: u64,
    /// Takes any of the waiting copies, not the oldest.
    pub shuffles: bool,
    /// Longest pause before a copy, microseconds.
    pub pause: u64,
    /// Of a hundred copies so many fail, some of them half-way.
    pub fails: u64,
    /// Reads through staging memory too.
    pub stages: bool,
}

/// Copies in a thread of its own.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    jobs: Mutex<VecDeque<(Vec<Part>, Ticket)>>,
    come: Condvar,
    stop: AtomicBool,
    /// While set, copies wait.
    held: AtomicBool,
    /// While set, a copy that has begun does not end.
    stuck: AtomicBool,
    begun: AtomicU64,
    done: AtomicU64,
    habits: Habits,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.come.notify_all();
    }
}

impl Engine {
    pub fn start(habits: Habits) -> Arc<Self> {
        let shared = Arc::new(Shared { habits, ..Shared::default() });
        let worker = shared.clone();
        std::thread::spawn(move || worker.run());
        Arc::new(Self { shared })
    }

    /// Holds copies that have not begun, or lets them go.
    pub fn hold(&self, held: bool) {
        self.shared.held.store(held, Ordering::Release);
        self.shared.come.notify_all();
    }

    /// Holds copies that have begun, or lets them go.
    pub fn stick(&self, stuck: bool) {
        self.shared.stuck.store(stuck, Ordering::Release);
    }

    /// Copies that are asked for and have not ended.
    pub fn waiting(&self) -> usize {
        self.shared.jobs.lock().unwrap().len()
    }

    /// Copies begun.
    pub fn begun(&self) -> u64 {
        self.shared.begun.load(Ordering::Acquire)
    }

    /// Copies made.
    pub fn done(&self) -> u64 {
        self.shared.done.load(Ordering::Acquire)
    }

    /// An HCA that leaves payload of `by_reference` bytes and more to this engine.
    pub fn hca(self: &Arc<Self>, by_reference: usize) -> Context {
        Context::soft(&self.config(by_reference)).unwrap()
    }

    pub fn config(self: &Arc<Self>, by_reference: usize) -> SoftHcaConfig {
        let copy_engine: Option<Arc<dyn CopyEngine>> = Some(self.clone());
        SoftHcaConfig { strict: true, by_reference, copy_engine, ..SoftHcaConfig::default() }
    }
}

impl Shared {
    fn run(&self) {
        let mut random = self.habits.seed | 1;
        let mut next = move |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below.max(1)
        };
        while !self.stop.load(Ordering::Acquire) {
            let mut jobs = self.jobs.lock().unwrap();
            if jobs.is_empty() || self.held.load(Ordering::Acquire) {
                drop(self.come.wait_timeout(jobs, Duration::from_millis(1)).unwrap());
                continue;
            }
            let mut at = if self.habits.shuffles {
                usize::try_from(next(jobs.len() as u64)).expect("less than a length")
            } else {
                0
            };
            while let Some(before) = (0..at).find(|&i| overlap(&jobs[i].0, &jobs[at].0)) {
                at = before;
            }
            let (parts, ticket) = jobs.remove(at).unwrap();
            drop(jobs);
            if !ticket.begin() {
                continue;
            }
            self.begun.fetch_add(1, Ordering::AcqRel);
            std::thread::sleep(Duration::from_micros(next(self.habits.pause + 1)));
            while self.stuck.load(Ordering::Acquire) && !self.stop.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_micros(50));
            }
            let fails = next(100) < self.habits.fails;
            for Part { from, to, at, len } in &parts {
                let Source::Here(memory, from) = from else { panic!("another process") };
                let len = if fails { len / 2 } else { *len };
                to.copy_from(*at, memory, *from, len).unwrap();
            }
            if fails {
                ticket.fail("on request");
            } else {
                self.done.fetch_add(1, Ordering::AcqRel);
                ticket.done();
            }
        }
    }
}

/// Whether two copies write the same bytes: these go in order.
fn overlap(a: &[Part], b: &[Part]) -> bool {
    let range = |p: &Part| p.to.addr() + p.at as u64..p.to.addr() + (p.at + p.len) as u64;
    a.iter().map(range).any(|x| b.iter().map(range).any(|y| x.start < y.end && y.start < x.end))
}

impl CopyEngine for Engine {
    fn adopt(&self, _gpu: &Gpu) {}

    fn export(&self, _memory: &Memory) -> Option<Handle> {
        Some(Handle { ipc: [0; 64], buffer: 0, offset: 0 })
    }

    fn stages(&self, _memory: &Memory) -> bool {
        self.shared.habits.stages
    }

    fn start(&self, parts: Vec<Part>) -> Ticket {
        let ticket = Ticket::default();
        self.shared.jobs.lock().unwrap().push_back((parts, ticket.clone()));
        self.shared.come.notify_all();
        ticket
    }

    fn forget(&self, _process: ProcessId) {}
}
