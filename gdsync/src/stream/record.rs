//! The recording of captured batches, from which each launch makes them again.
//!
//! A send is kept as its WQE bytes, without its ring position. A wait is kept as its target: the next completions of
//! its queue, or all through a send of the same graph.

use std::mem;
use std::sync::Arc;

use super::batch::{Batch, RareState, Repeatable, Replenish, add_hook};
use super::op::Op;
use super::order::{Fill, Follows, StreamOrder};
use super::prepared::{PreparedSend, PreparedWait};
use crate::verbs::Completion;
use crate::verbs::cq::ClaimRange;
use crate::verbs::end::QueueEnd;
use crate::verbs::sq::{SendQueue, Template};
use gdsync_device::error::{Error, Result};

/// A part of a batch. Indices are those among the completions of the graph.
#[derive(Debug)]
pub(super) enum Part {
    /// Identical in each launch.
    Op(Op),
    HostFn(Repeatable),
    /// A hook, called before everything else.
    Before(Arc<dyn Replenish>),
    /// An order that each launch follows.
    Follow(StreamOrder),
    /// Operations that differ by their number.
    Numbered(StreamOrder, usize, Fill),
    Sends(Arc<SendQueue>, Vec<Template>),
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
pub(super) enum WaitTarget {
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
    batches: Vec<Vec<Part>>,
    /// Prepared sends and waits are kept until the end, because later batches refer to them, then dropped.
    sends: Vec<(usize, PreparedSend)>,
    waits: Vec<PreparedWait>,
    completions: usize,
    /// Kept until the end, as sends are.
    follows: Vec<Follows>,
    /// The orders that a launch follows.
    orders: Vec<StreamOrder>,
    /// Hooks to call before each launch.
    before: Vec<Arc<dyn Replenish>>,
    /// The size of each batch, where batches are steps of a kernel.
    pub(super) sizes: Option<Vec<usize>>,
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
        Self { sizes: Some(Vec::new()), ..Self::default() }
    }

    /// Adds a batch and empties it.
    pub(super) fn add(&mut self, batch: &mut Batch) {
        let Batch { ops, sends, waits, rare, follows, .. } = mem::take(batch);
        let RareState { covered, repeatable, before, .. } = *rare.unwrap_or_default();
        before.into_iter().for_each(|hook| add_hook(&mut self.before, hook));
        let mut sends = sends.into_iter().peekable();
        let mut waits = waits.into_iter().peekable();
        let mut covered = covered.into_iter().peekable();
        let mut repeatable = repeatable.into_iter().peekable();
        let mut parts = Vec::new();
        let mut numbered = Vec::new();
        if let Some(mut follows) = follows {
            // A launch is one batch, which follows an order once.
            for order in follows.orders() {
                if !self.orders.iter().any(|known| known.is(order)) {
                    self.orders.push(order.clone());
                    parts.push(Part::Follow(order.clone()));
                }
            }
            numbered = follows.take_numbered();
            self.follows.push(*follows);
        }
        let mut numbered = numbered.into_iter().peekable();
        let mut made = 0;
        for (at, op) in ops.into_iter().enumerate() {
            while let Some((_, completion)) = covered.next_if(|(place, _)| *place <= at) {
                parts.extend(self.covered(completion));
            }
            while let Some((places, order, fill)) = numbered.next_if(|(places, ..)| places.start == at) {
                parts.push(Part::Numbered(order, places.len(), fill));
                made = places.end;
            }
            if at < made {
                continue;
            }
            if let Op::Trigger(..) = op {
                while let Some(send) = sends.next_if(|send| send.place == at) {
                    parts.push(Part::Sends(send.queue.clone(), send.queue.templates(&send.sends.range)));
                    self.sends.push((self.completions, send));
                    self.completions += 1;
                }
            } else if let Some(wait) = waits.next_if(|wait| wait.place == at) {
                let has_completion = !matches!(wait.range, Some(ClaimRange::Through(_)));
                parts.push(Part::Wait { awaited: self.awaited(&wait), has_completion });
                self.completions += usize::from(has_completion);
                self.waits.push(wait);
            } else if let Some((_, f)) = repeatable.next_if(|(place, _)| *place == at) {
                parts.push(Part::HostFn(f));
            } else {
                parts.push(Part::Op(op));
            }
        }
        for (_, completion) in covered {
            parts.extend(self.covered(completion));
        }
        // Without operations.
        parts.extend(numbered.map(|(_, order, fill)| Part::Numbered(order, 0, fill)));
        self.batches.push(parts);
    }

    /// Returns the recording. Cancels its sends and releases its waits.
    pub(super) fn finish(mut self) -> Vec<Vec<Part>> {
        // Newest first, so that no gap remains.
        while self.sends.pop().is_some() {}
        if let Some(first) = self.batches.first_mut() {
            first.splice(0..0, mem::take(&mut self.before).into_iter().map(Part::Before));
        }
        self.batches
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

    fn covered(&self, completion: Completion) -> Option<Part> {
        if let Some(place) = self.sent(&completion) {
            return Some(Part::Covered(place));
        }
        let covers = |wait: &PreparedWait| {
            Arc::ptr_eq(&wait.claim.end, &completion.end)
                && (wait.first..=wait.claim.n).contains(&completion.n)
        };
        // A receive that this graph waits for: each launch waits for its own.
        (!self.waits.iter().any(covers)).then_some(Part::CoveredBefore(completion))
    }

    /// The index of the send of this graph that `completion` belongs to.
    fn sent(&self, completion: &Completion) -> Option<usize> {
        let is_it = |(_, send): &&(usize, PreparedSend)| {
            Arc::ptr_eq(&send.queue.end, &completion.end) && send.sends.range.end - 1 == completion.n
        };
        self.sends.iter().rev().find(is_it).map(|(place, _)| *place)
    }
}

impl Part {
    /// The queue of its sends.
    pub(super) fn send_end(&self) -> Option<&QueueEnd> {
        match self {
            Part::Sends(queue, _) => Some(&queue.end),
            _ => None,
        }
    }

    /// Names the rank in the error of a queue pair that it uses.
    pub(super) fn name_rank(&self, error: &Error) -> Option<Error> {
        let failed = match error {
            Error::Busy { qpn, .. } | Error::PeerGone { qpn } | Error::QpStopped { qpn, .. } => *qpn,
            Error::Completion(error) => error.qpn,
            _ => return None,
        };
        let end = match self {
            Part::Sends(queue, _) => &queue.end,
            Part::Wait { awaited: WaitTarget::Next(end, _) | WaitTarget::All(end), .. } => end,
            Part::Follow(order) => {
                return (order.core().qpn == failed).then(|| order.core().name_rank(error.clone()));
            }
            _ => return None,
        };
        (end.qp.qpn == failed).then(|| end.qp.name_rank(error.clone()))
    }

    /// Adds it to `batch` again.
    pub(super) fn again(&self, batch: &mut Batch, completions: &mut Vec<Completion>) -> Result<()> {
        match self {
            Part::Op(op) => batch.ops.extend(op.again()),
            Part::HostFn(f) => batch.repeat(f.clone()),
            Part::Before(hook) => hook.replenish()?,
            Part::Follow(order) => _ = batch.follow(order),
            Part::Numbered(order, count, fill) => _ = batch.add_numbered(order, *count, fill.clone()),
            Part::Sends(queue, sends) => {
                completions.push(batch.post(PreparedSend::again(queue, sends)?));
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
