//! A stream's queue, and the thread that works it off.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use super::command::{Command, begin_working};
use super::context::Context;
use super::memop::Deferred;
use super::status::LAUNCH_TIMEOUT;
use super::{Outcome, control, require};
use gdrcopy::cuda::CudaStatus;

/// All queues whose threads live.
static QUEUES: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Threads that have not ended.
pub(super) fn threads() -> usize {
    QUEUES.lock().iter().filter(|queue| queue.strong_count() > 0).count()
}

/// What a stream and its thread share. The thread ends when the stream is closed and its work done.
pub(super) struct Shared {
    context: Arc<Context>,
    queue: Mutex<Queue>,
    /// Work came, or was done.
    changed: Condvar,
    deferred: Deferred,
}

#[derive(Default)]
struct Queue {
    /// What has not begun.
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

/// The moment when what was submitted is done.
#[derive(Clone)]
pub(super) struct Ticket {
    shared: Arc<Shared>,
    number: u64,
}

impl Ticket {
    pub(super) fn is_done(&self) -> bool {
        self.shared.queue.lock().finished >= self.number
    }

    /// Whether it is done within a time.
    fn wait(&self, limit: Duration) -> bool {
        let mut queue = self.shared.queue.lock();
        let not_done = |queue: &mut Queue| queue.finished < self.number;
        self.shared.changed.wait_while_for(&mut queue, not_done, limit);
        queue.finished >= self.number
    }

    /// Waits as long as a call may, and for the success of the work.
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

/// Held for writing by a call that waits for work: nothing but memory operations is submitted meanwhile.
static HELD_UP: RwLock<()> = RwLock::new(());

/// Waits for all work on a device, or on all of them, as long as a call may, where CUDA does. Whether the work succeeds does
/// not matter.
pub(super) fn wait_for_idle(device: Option<i32>) -> Outcome {
    if !control::frees_wait() {
        return Ok(());
    }
    let queues: Vec<_> = QUEUES.lock().iter().filter_map(Weak::upgrade).collect();
    let of_it = queues.iter().filter(|queue| device.is_none_or(|device| queue.context.device == device));
    let busy: Vec<_> = of_it.map(Shared::last).filter(|ticket| !ticket.is_done()).collect();
    if !busy.is_empty() {
        control::stalled();
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

    /// Puts work at the end, when there is room.
    pub(super) fn submit(self: &Arc<Self>, command: Command) -> Outcome<Ticket> {
        let _free = match command {
            Command::MemOps(_) => None,
            _ => Some(HELD_UP.try_read_for(control::patience()).ok_or(LAUNCH_TIMEOUT)?),
        };
        let mut queue = self.queue.lock();
        if !queue.has_room(&command) {
            control::blocked();
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

    /// When all that was submitted so far is done.
    pub(super) fn last(self: &Arc<Self>) -> Ticket {
        Ticket { shared: self.clone(), number: self.queue.lock().submitted }
    }

    /// Waits for all that was submitted, which then shows.
    pub(super) fn synchronize(self: &Arc<Self>) -> Outcome {
        self.last().synchronize()?;
        self.deferred.flush()
    }

    /// No more work comes.
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
