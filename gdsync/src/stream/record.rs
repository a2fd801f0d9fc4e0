//! The recording of captured batches: operations that are the same in each launch, and what each launch makes anew.
//!
//! A send is kept as its WQE bytes, without its ring position. A wait is kept as its target: the next completions of
//! its queue, or all through a send of the same graph.

use std::mem;
use std::sync::Arc;

use super::batch::{Batch, RareState, Repeatable, Replenish, add_hook};
use super::graph::EngineGraph;
use super::op::Op;
use super::order::{Follows, Orders};
use super::prepared::{PreparedSend, PreparedWait};
use crate::verbs::Completion;
use crate::verbs::cq::ClaimRange;
use crate::verbs::end::QueueEnd;
use crate::verbs::sq::{SendQueue, Template};
use gdsync_device::error::{Error, Result};

/// What each launch does anew. Indices are those among the completions of the graph.
#[derive(Debug)]
enum Part {
    HostFn(Repeatable),
    Sends {
        queue: Arc<SendQueue>,
        templates: Vec<Template>,
        /// Whether the doorbell of the sends before starts them, too.
        joins: bool,
    },
    Wait {
        awaited: WaitTarget,
        /// Whether its completion was returned to the caller.
        has_completion: bool,
    },
    /// An earlier wait of the graph covered the send at this index.
    Covered(usize),
    /// A wait outside the graph covered this completion.
    CoveredBefore(Completion),
}

/// The target of a recorded wait.
#[derive(Debug)]
enum WaitTarget {
    /// The next `n` completions.
    Next(Arc<QueueEnd>, u64),
    /// The completions of all sends.
    All(Arc<QueueEnd>),
    /// The completions through the send at this index.
    Through(usize),
}

/// A capture in progress.
#[derive(Debug, Default)]
pub(super) struct Recording {
    recorded: Recorded,
    ops: Vec<Option<Op>>,
    /// Prepared sends and waits are kept until the end, because later batches refer to them, then dropped.
    sends: Vec<(usize, PreparedSend)>,
    waits: Vec<PreparedWait>,
    completions: usize,
    /// Kept until the end, as sends are.
    follows: Vec<Follows>,
    /// The engine's part of each batch, where batches are steps of a kernel.
    pub(super) steps: Option<Vec<EngineGraph>>,
}

/// A finished recording, from which launches are made.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    /// Called before each launch.
    pub(super) hooks: Vec<Arc<dyn Replenish>>,
    orders: Orders,
    parts: Vec<Part>,
    /// As [`Kept`](super::op::Kept) has them.
    pub(super) ops: Arc<[Option<Op>]>,
    /// The number of batches.
    pub(super) batches: usize,
}

/// Refuses a batch that cannot be repeated.
pub(super) fn check(batch: &Batch) -> Result<()> {
    if let Some((what, fix)) = batch.only_once {
        return Err(once(what, fix));
    }
    let host_fns = batch.ops.iter().filter(|op| matches!(op, Op::HostFn(_))).count();
    match host_fns == batch.rare.as_ref().map_or(0, |rare| rare.repeatable.len()) {
        true => Ok(()),
        false => Err(Error::Unsupported {
            what: "a host function in a graph",
            by: "the capture: a graph runs many times, a host function once",
            fix: "use Batch::repeatable_host_fn, or submit the function to the stream before or after each launch",
        }),
    }
}

/// The error for an operation that cannot be repeated.
pub(super) fn once(what: &'static str, fix: &'static str) -> Error {
    Error::Unsupported { what, by: "graphs and steps of kernels, which repeat what was recorded", fix }
}

impl Recording {
    /// A recording of kernel steps.
    pub(super) fn of_steps() -> Self {
        Self { steps: Some(Vec::new()), ..Self::default() }
    }

    /// Adds a batch, with the hooks of its orders, and empties it. `anew` says of each operation whether launches differ in it: see
    /// [`Batch::anew`].
    pub(super) fn add(&mut self, batch: &mut Batch, hooks: Vec<Arc<dyn Replenish>>, anew: &[bool]) {
        let Batch { ops, sends, waits, rare, follows, .. } = mem::take(batch);
        let RareState { covered, repeatable, before, .. } = *rare.unwrap_or_default();
        before.into_iter().chain(hooks).for_each(|hook| add_hook(&mut self.recorded.hooks, hook));
        let mut sends = sends.into_iter().peekable();
        let mut waits = waits.into_iter().peekable();
        let mut covered = covered.into_iter().peekable();
        let mut repeatable = repeatable.into_iter().peekable();
        let joined = follows.as_ref().map(|follows| self.recorded.orders.join(follows)).unwrap_or_default();
        self.follows.extend(follows);
        for (at, (mut op, anew)) in ops.into_iter().zip(anew).enumerate() {
            while let Some((_, completion)) = covered.next_if(|(place, _)| *place <= at) {
                self.add_covered(completion);
            }
            if let Op::Trigger(..) = op {
                let mut joins = false;
                while let Some(send) = sends.next_if(|send| send.place == at) {
                    let (queue, templates) = (send.queue.clone(), send.queue.templates(&send.sends.range));
                    self.recorded.parts.push(Part::Sends { queue, templates, joins });
                    self.sends.push((self.completions, send));
                    self.completions += 1;
                    joins = true;
                }
            } else if let Some(wait) = waits.next_if(|wait| wait.place == at) {
                let has_completion = !matches!(wait.range, Some(ClaimRange::Through(_)));
                self.recorded.parts.push(Part::Wait { awaited: self.awaited(&wait), has_completion });
                self.completions += usize::from(has_completion);
                self.waits.push(wait);
            } else if let Some((_, f)) = repeatable.next_if(|(place, _)| *place == at) {
                self.recorded.parts.push(Part::HostFn(f));
            }
            if let Op::Message(message) = &mut op {
                message.taken = message.taken.joined(&joined);
                self.ops.push(Some(op));
            } else {
                self.ops.push((!anew).then_some(op));
            }
        }
        covered.for_each(|(_, completion)| self.add_covered(completion));
        self.recorded.batches += 1;
    }

    /// Returns the recording. Cancels its sends and releases its waits.
    pub(super) fn finish(mut self) -> Recorded {
        // Newest first, so that no gap remains.
        while self.sends.pop().is_some() {}
        Recorded { ops: self.ops.into(), ..self.recorded }
    }

    fn awaited(&self, wait: &PreparedWait) -> WaitTarget {
        let end = &wait.claim.end;
        let next = || WaitTarget::Next(end.clone(), wait.claim.n + 1 - wait.first);
        match wait.range {
            Some(ClaimRange::All) => WaitTarget::All(end.clone()),
            Some(ClaimRange::Through(_)) => self.sent(&wait.claim).map_or_else(next, WaitTarget::Through),
            _ => next(),
        }
    }

    fn add_covered(&mut self, completion: Completion) {
        let covers = |wait: &PreparedWait| {
            Arc::ptr_eq(&wait.claim.end, &completion.end)
                && (wait.first..=wait.claim.n).contains(&completion.n)
        };
        self.recorded.parts.push(match self.sent(&completion) {
            Some(place) => Part::Covered(place),
            // A receive that this graph waits for: each launch waits for its own.
            None if self.waits.iter().any(covers) => return,
            None => Part::CoveredBefore(completion),
        });
    }

    /// The index of the send of this graph that `completion` belongs to.
    fn sent(&self, completion: &Completion) -> Option<usize> {
        let is_it = |(_, send): &&(usize, PreparedSend)| {
            Arc::ptr_eq(&send.queue.end, &completion.end) && send.sends.range.end - 1 == completion.n
        };
        self.sends.iter().rev().find(is_it).map(|(place, _)| *place)
    }
}

impl Recorded {
    /// Names the rank in the error of a queue pair that it uses.
    pub(super) fn name_rank(&self, error: Error) -> Error {
        let failed = match &error {
            Error::Busy { qpn, .. } | Error::PeerGone { qpn } | Error::QpStopped { qpn, .. } => *qpn,
            Error::Completion(error) => error.qpn,
            _ => return error,
        };
        let cores = self.parts.iter().filter_map(|part| match part {
            Part::Sends { queue, .. } => Some(&queue.end.qp),
            Part::Wait { awaited: WaitTarget::Next(end, _) | WaitTarget::All(end), .. } => Some(&end.qp),
            _ => None,
        });
        match cores.chain(self.orders.cores()).find(|core| core.qpn == failed) {
            Some(core) => core.name_rank(error),
            None => error,
        }
    }

    /// Adds to `batch` what a launch makes. On an error `full` becomes the queue that may be full.
    pub(super) fn again<'a>(
        &'a self,
        batch: &mut Batch,
        completions: &mut Vec<Completion>,
        full: &mut Option<&'a QueueEnd>,
    ) -> Result<()> {
        self.hooks.iter().try_for_each(|hook| hook.replenish())?;
        batch.follow_again(&self.orders);
        for part in &self.parts {
            part.again(batch, completions).inspect_err(|_| {
                *full = match part {
                    Part::Sends { queue, .. } => Some(&queue.end),
                    _ => None,
                }
            })?;
        }
        Ok(())
    }
}

impl Part {
    /// Adds it to `batch` again.
    fn again(&self, batch: &mut Batch, completions: &mut Vec<Completion>) -> Result<()> {
        match self {
            Part::HostFn(f) => batch.repeat(f.clone()),
            Part::Sends { queue, templates, joins } => {
                if !joins {
                    batch.part = batch.len();
                }
                completions.push(batch.post(PreparedSend::again(queue, templates)?));
            }
            Part::Wait { awaited, has_completion } => {
                let completion = match awaited {
                    WaitTarget::Next(end, count) => batch.wait_some(end, ClaimRange::Next(*count))?,
                    WaitTarget::All(end) => batch.wait_some(end, ClaimRange::All)?,
                    WaitTarget::Through(place) => {
                        let sent = &completions[*place];
                        let wait = batch.claim(&sent.end, ClaimRange::Through(sent.n))?;
                        wait.ok_or_else(|| differs(sent))?.completion()
                    }
                };
                completions.extend(has_completion.then_some(completion));
            }
            Part::Covered(place) => {
                let sent = &completions[*place];
                if PreparedWait::empty(&sent.end).claim(ClaimRange::Through(sent.n), None)? {
                    return Err(differs(sent));
                }
            }
            Part::CoveredBefore(completion) => batch.cover(completion),
        }
        Ok(())
    }
}

fn differs(sent: &Completion) -> Error {
    Error::GraphWaits { queue: sent.end.tracker.name(), qpn: sent.end.qp.qpn }
}
