//! The send or receive side of a queue pair, as completions and stream waits reference it.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::completion::Completion;
use super::cq::{Claims, CqInner};
use super::qp::QpCore;
use super::source::{Arrival, SendDoorbell, Source};
use super::track::{Owner, Track, Tracker};
use gdsync_device::cuda::Gpu;
use gdsync_device::error::{Error, Result};
use gdsync_device::recorder::{Awaited, By, Queue, Stage, Traffic};

/// Time limit for a card to flush a queue pair in ERR.
const CARD_FLUSH_TIME: Duration = Duration::from_millis(100);

/// Keeps the queue pair and its completion queue alive.
pub(crate) struct QueueEnd {
    parts: Arc<Parts>,
    /// The same value, as stream operations reference it.
    source: Arc<dyn Source>,
}

/// The parts of an end. Stream operations hold references too: while one exists, a stream may ring or wait here.
pub(crate) struct Parts {
    pub(crate) qp: Arc<QpCore>,
    pub(crate) cq: Arc<CqInner>,
    pub(crate) tracker: Arc<Tracker>,
    /// Set for send queues.
    send_doorbell: Option<Arc<SendDoorbell>>,
    /// Whether a READ or an atomic was written: its completion announces payload.
    fetches: AtomicBool,
}

impl Deref for QueueEnd {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl Parts {
    /// A wait for the completion of request `n`, for the flight recorder.
    pub(crate) fn awaits(&self, n: u64) -> Awaited {
        self.tracker.awaits(n)
    }

    /// Records that a READ or an atomic is about to be written.
    pub(crate) fn fetches(&self) {
        self.fetches.store(true, Ordering::Relaxed);
    }

    /// Whether a completion may announce payload.
    fn brings_payload(&self) -> bool {
        !self.tracker.is_send || self.fetches.load(Ordering::Relaxed)
    }
}

impl QueueEnd {
    pub(crate) fn new(
        qp: Arc<QpCore>,
        cq: Arc<CqInner>,
        tracker: Arc<Tracker>,
        send_doorbell: Option<Arc<SendDoorbell>>,
    ) -> Arc<Self> {
        let parts = Arc::new(Parts { qp, cq, tracker, send_doorbell, fetches: AtomicBool::new(false) });
        Arc::new(Self { source: parts.clone(), parts })
    }

    /// The completion of request `n`.
    #[inline]
    pub(crate) fn completion(self: Arc<Self>, n: u64) -> Completion {
        Completion { n, life: self.tracker.life(), end: self }
    }

    /// Records a stage of a stream's wait for request `n`.
    pub(crate) fn note_wait(&self, stage: Stage, n: u64, stream: u64) {
        self.qp.log.note_in(stage, self.tracker.queue(), stream, n..n + 1);
    }

    /// The source for stream operations. A clone prevents a reset while the queue has requests: see
    /// [`gdsync_shm::reset`].
    #[inline]
    pub(crate) fn source(&self) -> &Arc<dyn Source> {
        &self.source
    }

    /// Whether `source` is this queue.
    pub(crate) fn is_source(&self, source: &Arc<dyn Source>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(source), Arc::as_ptr(&self.parts))
    }

    /// The error where every request is already claimed or polled.
    pub(crate) fn nothing_to_wait_for(&self) -> Error {
        Error::NothingToWaitFor { queue: self.tracker.name(), qpn: self.qp.qpn }
    }

    /// The error for a full completion queue, given the outstanding requests of this queue.
    pub(crate) fn cq_full(&self, outstanding: u64) -> Error {
        let queue = if self.tracker.is_send { "send completion queue" } else { "receive completion queue" };
        let depth = self.cq.capacity();
        Error::QueueFull {
            queue,
            qpn: self.qp.qpn,
            outstanding,
            depth,
            untaken: depth.saturating_sub(outstanding),
        }
    }

    /// Whether a stream references it, or a thread is submitting from it: see [`gdsync_shm::reset`].
    fn is_in_stream(&self) -> bool {
        // This value holds two references itself.
        Arc::strong_count(&self.parts) > 2
    }

    /// What prevents a reset of the queue. The caller has locked it and its completion queue.
    pub(crate) fn reset_blocker(&self, claims: &Claims<'_>, track: &Track) -> Option<&'static str> {
        if track.posted > track.exposed {
            return Some(match self.tracker.is_send {
                true => "a prepared send that was neither posted nor dropped",
                false => "a batch with receives that was neither submitted nor dropped",
            });
        }
        if claims.has_prepared() {
            return Some("a prepared wait that was neither posted nor dropped");
        }
        if !self.is_in_stream() {
            return None;
        }
        if claims.has_submitted() {
            return Some("a stream that waits for its completions");
        }
        match self.tracker.is_send {
            true => (!track.is_idle()).then_some("a stream that sends on it"),
            false => matches!(track.owner, Owner::Stream(_)).then_some("a stream that posts its receives"),
        }
    }
}

impl fmt::Debug for QueueEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.parts.fmt(f)
    }
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} queue of {:?}", self.tracker.name(), self.qp)
    }
}

impl Source for Parts {
    fn progress(&self) -> bool {
        self.qp.provider.progress()
    }

    fn signal(&self) {
        self.qp.provider.ring(self.qp.qpn);
    }

    fn finish(&self) {
        self.qp.provider.progress();
    }

    fn remind(&self) {
        if self.tracker.is_of_stream() {
            self.qp.provider.ring(self.qp.qpn);
        }
    }

    fn wake(&self) {
        self.qp.provider.end_polling();
    }

    fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        self.cq.park(ready, timeout);
    }

    fn queue_pair(&self) -> usize {
        Arc::as_ptr(&self.qp).addr()
    }

    fn fail(&self, reason: &Error) {
        self.qp.stop(reason);
    }

    fn send_doorbell(&self) -> Option<&SendDoorbell> {
        self.send_doorbell.as_deref()
    }

    fn arrival(&self, n: u64) -> Arrival<'_> {
        self.cq.arrival(n)
    }

    fn is_next(&self, n: u64) -> bool {
        self.cq.is_next(n)
    }

    fn check_visible(&self, gpu: &Gpu) -> Result<()> {
        let is_written_by_card = self.qp.provider.reads_by_itself() && self.brings_payload();
        if is_written_by_card { self.qp.pd.writable_gpus().check(gpu) } else { Ok(()) }
    }

    fn release(&self, n: u64) {
        self.cq.write_flush_cqe(n, &self.tracker);
    }

    fn lost(&self) -> Option<Error> {
        self.qp.check_known().err().filter(|error| matches!(error, Error::Panicked { .. }))
    }

    fn flush_time(&self) -> Duration {
        // A card may be slow with thousands of requests or a busy command interface.
        if self.qp.provider.reads_by_itself() { CARD_FLUSH_TIME } else { Duration::ZERO }
    }

    fn awaited(&self, n: u64) -> Option<Awaited> {
        Some(self.awaits(n))
    }

    fn passed(&self, n: u64, by: By) {
        self.qp.log.note(Stage::Released, self.tracker.queue(), by, n, 0);
    }

    fn describe(&self, n: u64) -> String {
        let (qp, queue) = (&self.qp, self.tracker.queue());
        let Some((rank, traffic)) = qp.log.rank() else { return self.tracker.describe(n) };
        let fix = fix(traffic, queue, rank, n);
        format!("{} ({} {n} of {qp:?}); {fix}", traffic.awaited(queue, rank), self.tracker.name())
    }
}

/// What to do about a wait for request `n` of a queue.
fn fix(traffic: Traffic, queue: Queue, rank: u32, n: u64) -> String {
    match (traffic, queue) {
        (Traffic::Messages, Queue::Send) => {
            "see that the rank lives and posts receives (Communicator::irecv)".to_owned()
        }
        (Traffic::Messages | Traffic::ChannelIn, Queue::Receive) => {
            "see that the rank sends it (a send behind a wait of its own stream starts only after that wait)"
                .to_owned()
        }
        (Traffic::ChannelOut, Queue::Receive) => {
            // They complete in order: this is the first that has not.
            format!(
                "rank {rank} has freed {n}; call Channel::post_recv_on_stream or post_recv_in_batch there"
            )
        }
        (Traffic::Collectives, _) => {
            "see that the rank has called it, too, and what its stream waits for".to_owned()
        }
        _ => "see that the rank lives (Communicator::check)".to_owned(),
    }
}

impl QpCore {
    /// What a stream waits for that waits for a word which the peer writes in place of completions.
    pub(crate) fn describe_word(&self, word: u64, value: u64) -> String {
        let Some((rank, traffic)) = self.log.rank() else {
            return format!("a word of the peer of {self:?} (it is {word:#x}) to reach {value:#x}");
        };
        // Free places are counted from bit 33 on: see `stream::Inbox`.
        let fix = fix(traffic, Queue::Receive, rank, word >> 33);
        let awaited = traffic.awaited(Queue::Receive, rank);
        format!("{awaited} (a word of {self:?}, which is {word:#x}, to reach {value:#x}); {fix}")
    }
}
