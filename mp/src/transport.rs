//! The connection to one rank: how it is built, its queue pair, the credits beside it, and whether the rank is alive.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use gdsync::cuda::Gpu;
use gdsync::memory::{Memory, Word64};
use gdsync::mlx5::{Opcode, Syndrome};
use gdsync::recorder::Traffic;
use gdsync::stream::{Batch, PreparedSend, Stream};
use gdsync::verbs::{
    Completion, CompletionError, Context, Cq, MrGuard, OnGpu, Pd, Qp, QpAddress, QpBuilder, RecvWr, SendWr,
    Sge,
};
use gdsync_device::fork_guard::ForkGuard;
use parking_lot::Mutex;

use crate::credit::{Credits, low32, number_of};
use crate::in_flight::Direction;
use crate::places::{Place, Places};
use crate::registration::{DomainId, Piece};
use crate::shm_memory::FifoPair;

/// How long a rank may be silent before a wait asks whether it is alive.
pub(crate) const SILENCE: Duration = Duration::from_millis(250);

/// Messages whose completions are taken together.
pub(crate) const DRAIN: u64 = 32;

/// Acknowledge timeout of all queue pairs, eight times before a rank counts as lost: about half a second with the software HCA, so that
/// a wait for a rank that is stopped ends within 5 s, and a second with a card, whose network may take longer to find another route.
pub(crate) fn ack_timeout(context: &Context) -> u8 {
    if context.is_software() { 17 } else { 18 }
}

/// What the queue pairs of messages are built with.
#[derive(Clone, Debug)]
pub(crate) struct QueueConfig {
    /// Messages in each direction.
    pub(crate) depth: usize,
    /// Pieces of a message.
    pub(crate) max_pieces: u32,
    /// For errors and recordings.
    pub(crate) traffic: Traffic,
    pub(crate) gpu: Option<Gpu>,
    pub(crate) on_gpu: OnGpu,
    /// See [`ack_timeout`].
    pub(crate) ack_timeout: u8,
}

impl QueueConfig {
    pub(crate) fn build_qp(&self, pd: &Pd) -> QpBuilder {
        // Retries for a missing receive without end: the deadlines of waits end what never comes.
        let builder = pd.build_qp().max_send_wr(self.depth).max_recv_wr(self.depth).rnr_retry(7);
        let builder = builder.timeout(self.ack_timeout);
        let builder = builder.max_send_sge(self.max_pieces as usize).max_recv_sge(self.max_pieces);
        match &self.gpu {
            Some(gpu) => builder.on_gpu(gpu, self.on_gpu),
            None => builder,
        }
    }
}

/// The queue pair to one rank; for the own rank two that are connected to each other.
#[derive(Debug)]
pub(crate) struct QpPair {
    /// Sends to the rank.
    pub(crate) send: Qp,
    /// Receives from the rank: the same queue pair, except for the own rank.
    pub(crate) recv: Qp,
}

impl QpPair {
    /// Builds without connecting; a second queue pair for the own rank.
    pub(crate) fn build(is_own: bool, build: impl Fn() -> QpBuilder) -> gdsync::Result<Self> {
        let send = build().build()?;
        let recv = if is_own { build().build()? } else { send.clone() };
        Ok(Self { send, recv })
    }

    /// What the other rank connects to.
    pub(crate) fn address(&self) -> QpAddress {
        self.send.address()
    }

    /// Connects to the other rank, which has this address; the two of the own rank to each other.
    pub(crate) fn connect(&self, theirs: QpAddress) -> gdsync::Result<()> {
        if self.send.qpn() == self.recv.qpn() {
            return self.send.connect(theirs);
        }
        self.recv.connect(self.send.address())?;
        self.send.connect(self.recv.address())
    }

    /// Ends all operations: see [`Qp::stop`].
    fn stop(&self, error: &gdsync::Error) {
        self.send.stop(error);
        self.recv.stop(error);
    }

    /// Names both ranks, and what goes through either queue pair, in errors and in the flight recorder.
    pub(crate) fn name_ranks(&self, own: usize, other: usize, [send, recv]: [Traffic; 2]) {
        self.send.name_ranks(own, other, send);
        self.recv.name_ranks(own, other, recv);
    }
}

/// What ends with the connection to a rank: the queue pairs of windows and channels, and the connection of collectives.
pub(crate) trait Companion: fmt::Debug + Send + Sync {
    /// Ends all operations.
    fn end(&self, error: &gdsync::Error);

    /// Whether a stream waits for the rank.
    fn is_awaited(&self) -> bool;

    /// Whether a batch or a capture that no stream has got yet holds work with the rank.
    fn has_unsubmitted(&self) -> bool;
}

impl Companion for QpPair {
    fn end(&self, error: &gdsync::Error) {
        self.stop(error);
    }

    fn is_awaited(&self) -> bool {
        // No stream waits on a broken queue pair any more.
        [&self.send, &self.recv].iter().any(|qp| !qp.is_broken() && qp.is_awaited())
    }

    fn has_unsubmitted(&self) -> bool {
        [&self.send, &self.recv].iter().any(|qp| !qp.is_broken() && qp.has_unsubmitted())
    }
}

/// Registrations that stay, by their key.
pub(crate) type KeyedPins = HashMap<u32, MrGuard>;

/// The connection to one rank.
#[derive(Debug)]
pub(crate) struct Transport {
    pub(crate) rank: usize,
    /// It goes through the device for ranks of the same host.
    pub(crate) intra_host: bool,
    pub(crate) domain: DomainId,
    pub(crate) qp: QpPair,
    /// Messages in each direction.
    pub(crate) depth: usize,
    /// Pieces of a message.
    pub(crate) max_pieces: usize,
    pub(crate) credits: Credits,
    /// Shared memory beside the queue pair, for short messages of the CPU.
    pub(crate) fifo: Option<FifoPair>,
    /// Where receives are, for streams that put messages there themselves.
    pub(crate) places: Option<Places>,
    /// One-sided operations that were posted to the send queue: these are no messages.
    one_sided: AtomicU64,
    pub(crate) fork_guard: ForkGuard,
    has_ended: AtomicBool,
    is_given_up: AtomicBool,
    companions: Mutex<Vec<Weak<dyn Companion>>>,
    /// Channels that were dropped here, but perhaps not by the rank or by streams, and what they still send.
    retired: Mutex<Vec<(Arc<dyn Companion>, KeyedPins)>>,
}

impl Transport {
    pub(crate) fn new(
        rank: usize,
        (intra_host, domain): (bool, DomainId),
        qp: QpPair,
        queues: &QueueConfig,
        credits: Credits,
        (fifo, places): (Option<FifoPair>, Option<Places>),
    ) -> Self {
        let [has_ended, is_given_up] = [false; 2].map(AtomicBool::new);
        let (companions, retired, one_sided, fork_guard) = Default::default();
        Self {
            rank,
            intra_host,
            domain,
            qp,
            depth: queues.depth,
            max_pieces: queues.max_pieces as usize,
            credits,
            fifo,
            places,
            one_sided,
            fork_guard,
            has_ended,
            is_given_up,
            companions,
            retired,
        }
    }

    /// The completion queue of one direction.
    pub(crate) fn cq(&self, direction: Direction) -> Cq {
        match direction {
            Direction::Send => self.qp.send.send_cq(),
            Direction::Recv => self.qp.recv.recv_cq(),
        }
    }

    /// The error for `outstanding` messages of one direction that fill its queue.
    ///
    /// # Errors
    /// Always: what ended the connection, or [`gdsync::Error::QueueFull`].
    pub(crate) fn refuse_full<T>(&self, direction: Direction, outstanding: usize) -> gdsync::Result<T> {
        let (qp, queue) = match direction {
            Direction::Send => (&self.qp.send, "send queue"),
            Direction::Recv => (&self.qp.recv, "receive queue"),
        };
        qp.check()?;
        let (outstanding, depth) = (outstanding as u64, self.depth as u64);
        Err(gdsync::Error::QueueFull { queue, qpn: qp.qpn(), outstanding, depth, untaken: 0 })
    }

    /// Whether the rank can be reached, as far as is known.
    ///
    /// # Errors
    /// What ended the connection first.
    pub(crate) fn check(&self) -> gdsync::Result<()> {
        self.qp.send.check()?;
        self.qp.recv.check()
    }

    /// Whether the connection is known to have ended: [`Transport::check`] says why.
    pub(crate) fn has_ended(&self) -> bool {
        self.qp.send.is_broken()
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Relaxed)
    }

    /// The number modulo 2^32, from 1, of the message that was posted last, at this index, among those that were sent.
    pub(crate) fn message_number(&self, index: u64) -> u32 {
        let others = self.qp.send.send_gaps() + self.one_sided.load(Ordering::Relaxed);
        low32((index + 1).wrapping_sub(others))
    }

    /// Posts a send of the CPU.
    pub(crate) fn send(&self, sges: &[Sge]) -> gdsync::Result<Completion> {
        let completion = self.qp.send.post_send(&[SendWr::send(sges)])?;
        // The device waits for the receive, by retries.
        self.credits.count(completion.index());
        Ok(completion)
    }

    /// The tables of receives, unless this is a forked child, which does not have them.
    pub(crate) fn places(&self) -> Option<&Places> {
        self.places.as_ref().filter(|_| self.fork_guard.is_here())
    }

    /// The word that a kernel of the rank writes behind the message of the receive at this index, and its upper half then.
    pub(crate) fn arrival(&self, index: u64) -> Option<(Word64, u32)> {
        let number = number_of(index);
        Some((self.places()?.arrival(number)?, number))
    }

    /// Where a receive of these pieces is, for streams of the rank.
    ///
    /// # Errors
    /// As [`Places::place`].
    pub(crate) fn place(&self, pieces: &[Piece<'_>]) -> gdsync::Result<Place> {
        self.places().map_or(Ok(Place::default()), |places| places.place(pieces))
    }

    /// What a stream can put into a receive of the rank itself.
    ///
    /// # Errors
    /// As [`Places::payload`].
    pub(crate) fn payload(&self, pieces: &[Piece<'_>]) -> gdsync::Result<Option<Memory>> {
        self.places().map_or(Ok(None), |places| places.payload(pieces))
    }

    /// Tells the rank where the receive at this index is, before it is announced.
    fn tell(&self, index: u64, place: Place) {
        self.places.iter().for_each(|places| places.tell(number_of(index), place));
    }

    /// Posts a receive.
    pub(crate) fn receive(&self, sges: &[Sge], place: Place) -> gdsync::Result<Completion> {
        let completion = self.qp.recv.post_recv(&[RecvWr::new(sges)])?;
        self.tell(completion.index(), place);
        self.credits.grant(completion.index());
        Ok(completion)
    }

    /// Adds a receive to a batch: the stream posts and announces it.
    pub(crate) fn receive_in_batch(
        &self,
        batch: &mut Batch,
        sges: &[Sge],
        place: Place,
    ) -> gdsync::Result<Completion> {
        self.credits.check_room()?;
        mark_only_once(batch);
        let (qp, wr) = (&self.qp.recv, &RecvWr::new(sges));
        // Without it the peer would wait for ever.
        let announce = |batch: &mut Batch, index| {
            self.credits.announce_in_batch(batch, index).inspect_err(|error| self.fail(error))
        };
        let Some(places) = &self.places else {
            let completion = batch.post_recv(qp, wr)?;
            announce(batch, completion.index())?;
            return Ok(completion);
        };
        batch.announce_recv(qp, wr, |batch, index| {
            places.tell_in_batch(batch, number_of(index), place)?;
            announce(batch, index)
        })
    }

    /// Posts an RDMA READ or WRITE to the queue of the messages. To be called by one thread at a time.
    pub(crate) fn post_one_sided(&self, wr: SendWr<'_>) -> gdsync::Result<Completion> {
        let completion = self.qp.send.post_send(&[wr])?;
        self.credits.skip(completion.index());
        self.one_sided.fetch_add(1, Ordering::Relaxed);
        Ok(completion)
    }

    /// Prepares a send that a stream starts.
    pub(crate) fn prepare_send(&self, sges: &[Sge]) -> gdsync::Result<PreparedSend> {
        self.qp.send.prepare_send(&[SendWr::send(sges)])
    }

    /// Adds a prepared send to a batch, after the wait for its receive if that is not posted yet.
    pub(crate) fn send_in_batch(
        &self,
        batch: &mut Batch,
        send: PreparedSend,
        payload: Option<&Memory>,
    ) -> Completion {
        let gaps = self.qp.send.send_gaps();
        let (number, credit) = self.credits.next(send.completion().index(), gaps);
        mark_only_once(batch);
        if let Some(word) = credit {
            batch.wait_credit(&self.qp.send, word, number);
        }
        let placement = self.places.as_ref().zip(payload);
        match placement
            .and_then(|(places, payload)| places.placement((number, gaps), payload, credit.is_none()))
        {
            Some(placement) => batch.post_placed(send, placement),
            None => batch.post(send),
        }
    }

    /// Asks whether the rank is alive, if it has been silent: a receive alone would never learn it.
    pub(crate) fn tend(&self) {
        let alive =
            self.check().and_then(|()| self.check_refusal()).and_then(|()| self.credits.tend(SILENCE));
        if let Err(error) = alive {
            self.fail(&error);
        }
    }

    /// Whether the rank accepts messages of the FIFO.
    fn check_refusal(&self) -> gdsync::Result<()> {
        if self.fifo.as_ref().is_some_and(FifoPair::is_refused) {
            let (qpn, operation) = (self.qp.send.qpn(), Some(Opcode::SEND));
            let syndrome = Syndrome::REM_INV_REQ_ERR;
            return Err(CompletionError::new(qpn, operation, syndrome).into());
        }
        Ok(())
    }

    /// Ends the connection if the rank has refused a message of the FIFO.
    pub(crate) fn fail_if_refused(&self) {
        if let Err(error) = self.check_refusal() {
            self.fail(&error);
        }
    }

    /// Ends the companion when this connection ends.
    pub(crate) fn accompany<T: Companion + 'static>(&self, companion: &Arc<T>) {
        let mut companions = self.companions.lock();
        companions.retain(|other| other.strong_count() > 0);
        companions.push(Arc::<T>::downgrade(companion));
        drop(companions);
        if self.has_ended.load(Ordering::Relaxed)
            && let Err(error) = self.check()
        {
            companion.end(&error);
        }
    }

    /// Keeps a dropped channel, which still has to answer, and which streams may wait for.
    pub(crate) fn retire(&self, channel: Arc<dyn Companion>, sends: KeyedPins) {
        self.retired.lock().push((channel, sends));
    }

    pub(crate) fn companions(&self) -> Vec<Arc<dyn Companion>> {
        self.companions.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Ends the connection because the program asks for it.
    pub(crate) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
        self.fail(&gdsync::Error::GivenUp);
    }

    /// Ends the connection: all that is under way ends with this error, unless it has one of its own. A forked child leaves it to its
    /// parent.
    pub(crate) fn fail(&self, error: &gdsync::Error) {
        if !self.fork_guard.is_here() || self.has_ended.swap(true, Ordering::Relaxed) {
            return;
        }
        self.qp.stop(error);
        self.fifo.iter().for_each(FifoPair::shut);
        self.places.iter().for_each(Places::end);
        self.credits.end(error);
        self.companions().iter().for_each(|companion| companion.end(error));
    }
}

/// Why graphs refuse messages of a communicator, and what to do.
const ONLY_ONCE: (&str, &str) = (
    "a message of a communicator",
    "before the capture make an mp::Channel (channel = comm.channel(rank, &[(&buffer, range)], None), at both ranks); in the capture write \
     channel.post_recv_on_stream(stream) where the receive is queued, channel.isend_on_stream(stream, &buffer, range) for the send and \
     channel.wait_recv_on_stream(stream) for the wait",
);

/// The stream, whose calls do not wait for room: ours repeat them, and move messages along meanwhile.
pub(crate) fn at_once(stream: &Stream) -> Stream {
    stream.with_timeout(Duration::ZERO)
}

/// Marks a batch with a message of a communicator: no graph can repeat it.
pub(crate) fn mark_only_once(batch: &mut Batch) {
    let (what, fix) = ONLY_ONCE;
    batch.only_once(what, fix);
}

/// Refuses a message of a communicator on a stream that is being captured.
pub(crate) fn refuse_in_capture(stream: &Stream) -> gdsync::Result<()> {
    let (what, fix) = ONLY_ONCE;
    stream.refuse_in_capture(what, fix)
}
