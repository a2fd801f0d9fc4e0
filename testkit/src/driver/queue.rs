//! Commands of a stream, and the stream's queue with its worker thread.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gdrcopy::cuda::CudaStatus;
use parking_lot::{Condvar, Mutex, RwLock};

use super::context::Context;
use super::control::{COUNTERS, count};
use super::memop::{Deferred, Op};
use super::memory::{Kind, Region, find};
use super::objects::Launch;
use super::status::LAUNCH_TIMEOUT;
use super::{Outcome, control, require};

thread_local! {
    /// Whether this thread is a worker of a stream.
    static WORKING: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as a worker, which may not call the driver.
fn begin_working() {
    WORKING.set(true);
}

/// Refuses calls of the driver by kernels and host functions.
pub(super) fn not_working() -> Outcome {
    if WORKING.get() {
        count(&COUNTERS.misplaced);
    }
    require(!WORKING.get(), CudaStatus::NOT_PERMITTED)
}

/// Work of a stream.
#[derive(Clone)]
pub(super) enum Command {
    MemOps(Vec<Op>),
    Kernel(Launch),
    /// A function of the application and the address of its data.
    Host(extern "C" fn(*mut c_void), usize),
    Copy(Copy),
    Fill(Fill),
    /// No work; something to wait for.
    Mark,
    /// Waits until other work is done.
    After(Ticket),
    /// The nodes of a graph.
    Graph(Vec<Command>),
}

impl Command {
    /// Runs it on a stream of a context.
    pub(super) fn run(&self, context: &Context, deferred: &Deferred) -> Outcome {
        // Everything but a wait makes earlier writes visible.
        if !matches!(self, Self::MemOps(_) | Self::After(_) | Self::Graph(_)) {
            deferred.flush()?;
        }
        match self {
            Self::MemOps(ops) => ops.iter().try_for_each(|op| op.run(context, deferred)),
            Self::Kernel(launch) => {
                launch.run();
                Ok(())
            }
            Self::Host(function, data) => {
                function(with_exposed_provenance_mut(*data));
                Ok(())
            }
            Self::Copy(copy) => {
                control::copying(context.device);
                copy.run()
            }
            Self::Fill(fill) => fill.run(),
            Self::Mark => Ok(()),
            Self::After(ticket) => ticket.wait_in(context),
            Self::Graph(nodes) => nodes.iter().try_for_each(|node| {
                context.check()?;
                node.run(context, deferred)
            }),
        }
    }

    /// Whether it can be captured.
    pub(super) fn can_be_node(&self) -> bool {
        match self {
            Self::MemOps(_) | Self::Kernel(_) | Self::Host(..) | Self::Fill(_) => true,
            Self::Copy(copy) => !copy.uses_pageable(),
            Self::Mark | Self::After(_) | Self::Graph(_) => false,
        }
    }
}

/// Memory of a copy: that of the driver, or pageable.
#[derive(Clone)]
pub(super) struct Side {
    region: Option<Arc<Region>>,
    addr: usize,
}

impl Side {
    /// Memory of the driver, or pageable memory.
    pub(super) fn any(addr: usize, len: usize) -> Outcome<Self> {
        let region = find(addr, len);
        // A range that goes beyond its region is not pageable.
        let whole = region.is_some() || find(addr, 1).is_none();
        require(addr != 0 && whole, CudaStatus::INVALID_VALUE)?;
        Ok(Self { region, addr })
    }

    /// Memory of a GPU.
    pub(super) fn device(addr: usize, len: usize) -> Outcome<Self> {
        let region = find(addr, len).filter(|region| region.kind == Kind::Device);
        require(region.is_some(), CudaStatus::INVALID_VALUE)?;
        Ok(Self { region, addr })
    }

    /// Runs `act` unless the memory was freed.
    fn touch<T>(&self, act: impl FnOnce() -> T) -> Outcome<T> {
        match &self.region {
            Some(region) => region.touch(act),
            None => Ok(act()),
        }
    }
}

/// A copy of bytes.
#[derive(Clone)]
pub(super) struct Copy {
    to: Side,
    from: Source,
    len: usize,
}

#[derive(Clone)]
enum Source {
    Side(Side),
    /// Pageable memory is read by the call.
    Bytes(Arc<[u8]>),
}

impl Copy {
    pub(super) fn new(to: Side, from: Side, len: usize) -> Self {
        let pageable = from.region.is_none().then(|| {
            // SAFETY: memory of the application, which the caller of the entry point guarantees.
            let bytes = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(from.addr), len) };
            Source::Bytes(bytes.into())
        });
        Self { to, from: pageable.unwrap_or(Source::Side(from)), len }
    }

    /// Whether the call returns only when the bytes are in place.
    pub(super) fn is_synchronous(&self) -> bool {
        self.to.region.is_none()
    }

    fn uses_pageable(&self) -> bool {
        self.is_synchronous() || matches!(self.from, Source::Bytes(_))
    }

    fn run(&self) -> Outcome {
        let to = with_exposed_provenance_mut::<u8>(self.to.addr);
        let copy = |from: *const u8| {
            // SAFETY: inside memory that stays for now, or that the caller of the entry point guarantees.
            self.to.touch(|| unsafe { to.copy_from(from, self.len) })
        };
        match &self.from {
            Source::Side(side) => side.touch(|| copy(with_exposed_provenance(side.addr)))?,
            Source::Bytes(bytes) => copy(bytes.as_ptr()),
        }
    }
}

/// Words of 32 bits in GPU memory.
#[derive(Clone)]
pub(super) struct Fill {
    pub(super) to: Side,
    pub(super) value: u32,
    pub(super) count: usize,
}

impl Fill {
    fn run(&self) -> Outcome {
        let to = with_exposed_provenance_mut::<u32>(self.to.addr);
        self.to.touch(|| {
            for index in 0..self.count {
                // SAFETY: inside the memory, whose length was checked.
                let word = unsafe { to.add(index) };
                // SAFETY: aligned, in memory that stays for now.
                unsafe { word.write(self.value) };
            }
        })
    }
}

/// Queues of running threads.
static QUEUES: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// The queue that a stream shares with its thread. The thread ends when the stream is closed and its work is done.
pub(super) struct Shared {
    context: Arc<Context>,
    queue: Mutex<Queue>,
    /// Signalled when work is added or done.
    changed: Condvar,
    deferred: Deferred,
}

#[derive(Default)]
struct Queue {
    /// Work that has not begun.
    work: VecDeque<Command>,
    submitted: u64,
    finished: u64,
    /// Host functions that are not finished.
    host_functions: usize,
    closed: bool,
}

impl Queue {
    fn has_room(&self, command: &Command) -> bool {
        let (depth, host_functions) = control::limits();
        let host = matches!(command, Command::Host(..));
        self.submitted - self.finished < depth as u64 && (!host || self.host_functions < host_functions)
    }
}

/// A submission to wait for.
#[derive(Clone)]
pub(super) struct Ticket {
    shared: Arc<Shared>,
    number: u64,
}

impl Ticket {
    pub(super) fn is_done(&self) -> bool {
        self.shared.queue.lock().finished >= self.number
    }

    /// Waits up to a limit; returns whether the submission is done.
    fn wait(&self, limit: Duration) -> bool {
        let mut queue = self.shared.queue.lock();
        let not_done = |queue: &mut Queue| queue.finished < self.number;
        self.shared.changed.wait_while_for(&mut queue, not_done, limit);
        queue.finished >= self.number
    }

    /// Waits as long as a call may, and returns the error of the context.
    pub(super) fn synchronize(&self) -> Outcome {
        let done = self.wait(control::patience());
        self.shared.context.check()?;
        require(done, LAUNCH_TIMEOUT)
    }

    /// Waits in a stream of a context, which may fail meanwhile.
    pub(super) fn wait_in(&self, context: &Context) -> Outcome {
        while !self.wait(Duration::from_millis(20)) {
            context.check()?;
        }
        Ok(())
    }
}

/// Write-locked by a call that waits for the GPU: only memory operations are submitted meanwhile.
static HELD_UP: RwLock<()> = RwLock::new(());

/// Waits for all work on a device, or on all of them, as CUDA does, as long as a call may. Whether the work succeeds does
/// not matter.
pub(super) fn wait_for_idle(device: Option<i32>) -> Outcome {
    let queues: Vec<_> = QUEUES.lock().iter().filter_map(Weak::upgrade).collect();
    let of_it = queues.iter().filter(|queue| device.is_none_or(|device| queue.context.device == device));
    let busy: Vec<_> = of_it.map(Shared::last).filter(|ticket| !ticket.is_done()).collect();
    if !busy.is_empty() {
        count(&COUNTERS.stalled);
    }
    let deadline = Instant::now() + control::patience();
    let _held = HELD_UP.write();
    let wait = |ticket: &Ticket| ticket.wait(deadline.saturating_duration_since(Instant::now()));
    require(busy.iter().all(wait), LAUNCH_TIMEOUT)
}

impl Shared {
    /// A queue and its thread.
    pub(super) fn start(context: Arc<Context>) -> Outcome<Arc<Self>> {
        let (queue, changed, deferred) = Default::default();
        let shared = Arc::new(Self { context, queue, changed, deferred });
        let worker = shared.clone();
        let mut queues = QUEUES.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&shared));
        drop(queues);
        std::thread::Builder::new()
            .name("simulated-gpu".into())
            .spawn(move || worker.work())
            .map_err(|_| CudaStatus::OUT_OF_MEMORY)?;
        Ok(shared)
    }

    /// Appends work when there is room.
    pub(super) fn submit(self: &Arc<Self>, command: Command) -> Outcome<Ticket> {
        let _free = match command {
            Command::MemOps(_) => None,
            _ => Some(HELD_UP.try_read_for(control::patience()).ok_or(LAUNCH_TIMEOUT)?),
        };
        let mut queue = self.queue.lock();
        if !queue.has_room(&command) {
            count(&COUNTERS.blocked);
            let deadline = Instant::now() + control::patience();
            let full = |queue: &mut Queue| !queue.has_room(&command);
            self.changed.wait_while_until(&mut queue, full, deadline);
            require(queue.has_room(&command), LAUNCH_TIMEOUT)?;
        }
        queue.host_functions += usize::from(matches!(command, Command::Host(..)));
        queue.work.push_back(command);
        queue.submitted += 1;
        let number = queue.submitted;
        drop(queue);
        self.changed.notify_all();
        Ok(Ticket { shared: self.clone(), number })
    }

    /// The last submission.
    pub(super) fn last(self: &Arc<Self>) -> Ticket {
        Ticket { shared: self.clone(), number: self.queue.lock().submitted }
    }

    /// Waits for all submissions, and makes their writes visible.
    pub(super) fn synchronize(self: &Arc<Self>) -> Outcome {
        self.last().synchronize()?;
        self.deferred.flush()
    }

    /// Closes the queue: no more work is submitted.
    pub(super) fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_all();
    }

    fn work(&self) {
        begin_working();
        while let Some(command) = self.next() {
            if self.context.check().is_ok() {
                let run = AssertUnwindSafe(|| command.run(&self.context, &self.deferred));
                if let Err(status) = catch_unwind(run).unwrap_or(Err(CudaStatus::LAUNCH_FAILED)) {
                    self.context.fail(status);
                }
            }
            let mut queue = self.queue.lock();
            queue.finished += 1;
            queue.host_functions -= usize::from(matches!(command, Command::Host(..)));
            drop(queue);
            self.changed.notify_all();
        }
        if let Err(status) = self.deferred.flush() {
            self.context.fail(status);
        }
    }

    /// The next work; none at the end of the stream.
    fn next(&self) -> Option<Command> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(command) = queue.work.pop_front() {
                return Some(command);
            }
            if queue.closed {
                return None;
            }
            self.changed.wait(&mut queue);
        }
    }
}
