//! The in-flight list of a queue: its operations that are not complete, oldest first, and the registrations they pin.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gdsync::stream::{Inbox, Ticket};
use gdsync::verbs::{Completion, MrGuard};
use smallvec::SmallVec;

use crate::overlap::ReceiveClaims;
use crate::registration::Piece;

/// Which of the two queues of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Send = 0,
    Recv = 1,
}

/// Bytes of a message and of its receive, where they are known.
pub(crate) type Lengths = (Option<NonZeroU32>, Option<NonZeroU32>);

/// A length for errors.
pub(crate) fn nonzero(bytes: usize) -> Option<NonZeroU32> {
    NonZeroU32::new(u32::try_from(bytes).ok()?)
}

/// What tells whether an operation is complete.
#[derive(Debug)]
pub(crate) enum Done {
    /// Its last work request in a queue.
    Queue(Completion),
    /// The stream that copies.
    Stream(Ticket),
}

impl From<Completion> for Done {
    fn from(completion: Completion) -> Self {
        Self::Queue(completion)
    }
}

/// An operation that was posted to a queue pair, or that a stream does beside it.
#[derive(Debug)]
pub(crate) struct InFlightOp {
    pub(crate) direction: Direction,
    /// Its name in errors.
    pub(crate) operation: &'static str,
    pub(crate) done: Done,
    /// Work requests that it takes in the queue: the one of the completion and those right before it.
    wqes: usize,
    /// Bytes of a send, or of the buffers of a receive.
    bytes: usize,
    /// Bytes of a success, kept from before the queue forgets it; [`UNKNOWN`] until then.
    kept_bytes: AtomicU64,
    /// Of a message that a stream puts into its place.
    inbox: Option<Arc<Inbox>>,
}

const UNKNOWN: u64 = u64::MAX;

impl InFlightOp {
    pub(crate) fn new(
        direction: Direction,
        operation: &'static str,
        done: impl Into<Done>,
        wqes: usize,
        bytes: usize,
    ) -> Arc<Self> {
        let kept_bytes = AtomicU64::new(UNKNOWN);
        let done = done.into();
        Arc::new(Self { direction, operation, done, wqes, bytes, kept_bytes, inbox: None })
    }

    /// A wait of a stream for a message of at most `room` bytes that comes into its place.
    pub(crate) fn awaited(
        operation: &'static str,
        ticket: Ticket,
        room: usize,
        inbox: Arc<Inbox>,
    ) -> Arc<Self> {
        let (direction, done, kept_bytes) = (Direction::Recv, Done::Stream(ticket), AtomicU64::new(UNKNOWN));
        Arc::new(Self { direction, operation, done, wqes: 0, bytes: room, kept_bytes, inbox: Some(inbox) })
    }

    /// The completion of its last work request.
    pub(crate) fn completion(&self) -> Option<&Completion> {
        match &self.done {
            Done::Queue(completion) => Some(completion),
            Done::Stream(_) => None,
        }
    }

    /// The index of its last work request in the queue; 0 without.
    #[inline]
    pub(crate) fn index(&self) -> u64 {
        self.completion().map_or(0, Completion::index)
    }

    /// Whether its batch was dropped.
    fn is_taken_back(&self) -> bool {
        match &self.done {
            Done::Queue(completion) => completion.is_taken_back(),
            Done::Stream(ticket) => ticket.is_taken_back(),
        }
    }

    /// Bytes of the message and of its receive, as far as this side knows them.
    pub(crate) fn lengths(&self) -> Lengths {
        let bytes = nonzero(self.bytes);
        match self.direction {
            Direction::Send => (bytes, None),
            Direction::Recv => (None, bytes),
        }
    }

    /// Bytes of a send, or of the buffers of a receive.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn kept(&self) -> Option<usize> {
        let bytes = self.kept_bytes.load(Ordering::Relaxed);
        usize::try_from(bytes).ok().filter(|_| bytes != UNKNOWN)
    }

    /// Bytes sent or received, or `None` while it is under way.
    ///
    /// # Errors
    /// Why it failed.
    pub(crate) fn outcome(&self) -> gdsync::Result<Option<usize>> {
        let completion = match &self.done {
            Done::Queue(completion) => completion,
            Done::Stream(_) if self.kept().is_some() => return Ok(self.kept()),
            Done::Stream(ticket) => {
                let len = || self.inbox.as_ref()?.len_of(ticket.number()?);
                return Ok(ticket.is_done()?.then(|| len().unwrap_or(self.bytes)));
            }
        };
        match completion.status() {
            Ok(wc) => Ok(wc.map(|wc| if wc.is_send() { self.bytes } else { wc.byte_len as usize })),
            // The queue forgets successes; this one was kept.
            Err(gdsync::Error::Forgotten { .. }) if self.kept().is_some() => Ok(self.kept()),
            Err(error) => Err(error),
        }
    }

    /// Whether it is over. Keeps the length of a success, which the queue may forget.
    pub(crate) fn keep_outcome(&self) -> bool {
        match self.outcome() {
            Ok(None) => false,
            Ok(Some(bytes)) => {
                self.kept_bytes.store(bytes as u64, Ordering::Relaxed);
                true
            }
            // The queue pair is broken, and stays so.
            Err(_) => true,
        }
    }
}

/// What an operation holds until it is complete: registrations, mostly one, and the memory of a receive.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    _buffers: SmallVec<[MrGuard; 1]>,
    _claims: ReceiveClaims,
}

/// Pins the buffers of a message with one of the devices, and keeps what it has claimed.
pub(crate) fn pin(pieces: &[Piece<'_>], intra_host: bool, claims: ReceiveClaims) -> Pins {
    let buffers = pieces.iter().map(|(buffer, _)| buffer.mr(intra_host).guard());
    Pins { _buffers: buffers.collect(), _claims: claims }
}

/// Operations under way in one queue, in its order: the oldest leave before the queue forgets them.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    ops: VecDeque<(Arc<InFlightOp>, Pins)>,
    wqes: usize,
}

impl InFlight {
    /// Work requests that the operations take in the queue.
    pub(crate) fn wqes(&self) -> usize {
        self.wqes
    }

    pub(crate) fn len(&self) -> usize {
        self.ops.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    pub(crate) fn newest(&self) -> Option<&Arc<InFlightOp>> {
        self.ops.back().map(|(op, _)| op)
    }

    /// All operations, oldest first.
    pub(crate) fn ops(&self) -> impl Iterator<Item = &Arc<InFlightOp>> {
        self.ops.iter().map(|(op, _)| op)
    }

    pub(crate) fn push(&mut self, op: Arc<InFlightOp>, pins: Pins) {
        self.wqes += op.wqes;
        self.ops.push_back((op, pins));
    }

    /// Removes the newest operations that were taken back, by dropping their batch.
    pub(crate) fn drop_taken_back(&mut self) {
        while let Some((op, _)) = self.ops.pop_back_if(|(op, _)| op.is_taken_back()) {
            self.wqes -= op.wqes;
        }
    }

    /// Removes complete operations, and keeps their outcomes.
    pub(crate) fn retire(&mut self) {
        while let Some((op, _)) = self.ops.pop_front_if(|(op, _)| op.keep_outcome()) {
            self.wqes -= op.wqes;
        }
    }

    /// Somebody has seen that `op` is complete: so are those before it.
    pub(crate) fn retire_until(&mut self, op: &InFlightOp) {
        if self.ops.front().is_some_and(|(oldest, _)| oldest.index() <= op.index()) {
            self.retire();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gdsync::hca::SoftHcaConfig;
    use gdsync::memory::Memory;
    use gdsync::verbs::{Access, Context, Mr, Qp, RecvWr, SendWr};
    use proptest::prelude::*;

    use super::*;
    use crate::registration::{DomainId, Registration};

    /// Generous: reached only by a test that fails.
    const LONG: Duration = Duration::from_secs(60);
    const DEPTH: usize = 128;

    #[derive(Clone, Debug)]
    enum Step {
        /// An operation of so many work requests.
        Push(usize),
        /// So many more operations complete.
        Complete(usize),
        Retire,
        /// Somebody has seen that a complete operation is: which, from the newest on.
        RetireUntil(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (1..=3_usize).prop_map(Step::Push),
            2 => (1..4_usize).prop_map(Step::Complete),
            1 => Just(Step::Retire),
            2 => (0..4_usize).prop_map(Step::RetireUntil),
        ];
        prop::collection::vec(step, 1..40)
    }

    struct Fixture {
        qps: [Qp; 2],
        mr: Mr,
        buffer: Registration,
        list: InFlight,
        /// Index and work requests of the operations that should be in the list.
        model: VecDeque<(u64, usize)>,
        /// Those that are not complete, also those that have left the list.
        queued: VecDeque<(Arc<InFlightOp>, usize)>,
        completed: Vec<Arc<InFlightOp>>,
    }

    impl Fixture {
        fn new(context: &Context) -> gdsync::Result<Self> {
            let pd = context.alloc_pd()?;
            let register = || pd.register(&Memory::alloc(64)?, Access::LOCAL_WRITE);
            let build = || pd.build_qp().max_send_wr(DEPTH).max_recv_wr(DEPTH).rnr_retry(7).build();
            let qps = [build()?, build()?];
            qps[0].connect(qps[1].address())?;
            qps[1].connect(qps[0].address())?;
            let (list, model, queued, completed) = Default::default();
            let buffer = Registration::new(register()?, None, DomainId::new());
            Ok(Self { qps, mr: register()?, buffer, list, model, queued, completed })
        }

        fn run(&mut self, step: &Step) -> gdsync::Result<()> {
            match *step {
                Step::Push(wqes) => {
                    let sges = [self.mr.sge(0, 8)?];
                    let sends: Vec<_> = (0..wqes).map(|_| SendWr::send(&sges)).collect();
                    let completion = self.qps[0].post_send(&sends)?;
                    let op = InFlightOp::new(Direction::Send, "send", completion, wqes, 8);
                    self.list.push(op.clone(), pin(&[(&self.buffer, 0..8)], false, ReceiveClaims::new()));
                    self.model.push_back((op.index(), wqes));
                    self.queued.push_back((op, wqes));
                }
                Step::Complete(count) => {
                    for (op, wqes) in self.queued.drain(..count.min(self.queued.len())) {
                        for _ in 0..wqes {
                            self.qps[1].post_recv(&[RecvWr::new(&[self.mr.sge(8, 8)?])])?;
                        }
                        op.completion().unwrap().wait(LONG)?.ok()?;
                        self.completed.push(op);
                    }
                }
                Step::Retire => {
                    self.list.retire();
                    self.retire();
                }
                Step::RetireUntil(back) => {
                    if let Some(op) = self.completed.iter().rev().nth(back) {
                        self.list.retire_until(op);
                        if self.model.front().is_some_and(|(oldest, _)| *oldest <= op.index()) {
                            self.retire();
                        }
                    }
                }
            }
            Ok(())
        }

        fn retire(&mut self) {
            let last = self.completed.last().map(|op| op.index());
            while self.model.pop_front_if(|(index, _)| Some(*index) <= last).is_some() {}
        }

        fn check(&self) {
            assert_eq!(self.list.wqes(), self.model.iter().map(|(_, wqes)| wqes).sum::<usize>());
            assert_eq!(self.list.is_empty(), self.model.is_empty());
            assert!(self.list.ops().map(|op| op.index()).eq(self.model.iter().map(|(index, _)| *index)));
            assert!(self.completed.iter().all(|op| op.outcome().unwrap() == Some(8)));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

        #[test]
        fn operations_leave_when_they_are_complete(steps in steps()) {
            let context = Context::soft(&SoftHcaConfig::default()).unwrap();
            let mut fixture = Fixture::new(&context).unwrap();
            for step in &steps {
                fixture.run(step).unwrap();
                fixture.check();
            }
            fixture.run(&Step::Complete(usize::MAX)).unwrap();
            fixture.run(&Step::Retire).unwrap();
            prop_assert_eq!(fixture.list.wqes(), 0);
        }
    }

    #[test]
    fn operations_that_are_taken_back_leave() {
        let context = Context::soft(&SoftHcaConfig::default()).unwrap();
        let mut fixture = Fixture::new(&context).unwrap();
        fixture.run(&Step::Push(1)).unwrap();
        let sges = [fixture.mr.sge(0, 8).unwrap()];
        let send = fixture.qps[0].prepare_send(&[SendWr::send(&sges)]).unwrap();
        let op = InFlightOp::new(Direction::Send, "send", send.completion().clone(), 1, 8);
        fixture.list.push(op, Pins::default());
        assert_eq!(fixture.list.wqes(), 2);
        drop(send);
        fixture.list.drop_taken_back();
        fixture.check();
    }
}
