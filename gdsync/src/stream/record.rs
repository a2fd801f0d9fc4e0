//! What a capture remembers of batches, so that they can be made again.
//!
//! A send is kept as the bytes of its WQEs, without their places in the ring. A wait is kept by what it was asked for:
//! the next completions of its queue, or all through a send of the same graph.

use std::mem;
use std::sync::Arc;

use super::batch::{Batch, RareState, Repeatable, Replenish};
use super::op::Op;
use super::prepared::{Asked, PreparedSend, PreparedWait};
use crate::verbs::Completion;
use crate::verbs::end::QueueEnd;
use crate::verbs::sq::{SendQueue, Template};
use gdsync_device::error::{Error, Result};

/// A part of a batch. Places are those among the completions of the graph.
#[derive(Debug)]
pub(super) enum Part {
    /// The same at each launch.
    Op(Op),
    HostFn(Repeatable),
    /// Before everything else.
    Before(Arc<dyn Replenish>),
    Sends(Arc<SendQueue>, Vec<Template>),
    Wait {
        awaited: For,
        /// Its completion was handed out.
        told: bool,
    },
    /// An earlier wait of the graph covered the send at this place.
    Covered(usize),
    /// A wait outside of the graph covered this.
    CoveredBefore(Completion),
}

/// What a wait is for.
#[derive(Debug)]
pub(super) enum For {
    /// The next so many completions.
    Next(Arc<QueueEnd>, u64),
    /// The completions of all sends.
    All(Arc<QueueEnd>),
    /// All through that of the send at this place.
    Through(usize),
}

/// A capture under way.
#[derive(Debug, Default)]
pub(super) struct Recording {
    batches: Vec<Vec<Part>>,
    /// Everything prepared stays so until the end, because later batches wait for it; then it is taken back.
    sends: Vec<(usize, PreparedSend)>,
    waits: Vec<PreparedWait>,
    completions: usize,
    /// Who comes before each launch.
    before: Vec<Arc<dyn Replenish>>,
    /// Operations of each batch, where batches are steps of a kernel.
    pub(super) sizes: Option<Vec<usize>>,
}

/// Refuses what cannot be done more than once.
pub(super) fn check(batch: &mut Batch) -> Result<()> {
    if let Some((what, fix)) = batch.only_once {
        return Err(once(what, fix));
    }
    let host_fns = batch.ops().iter().filter(|op| matches!(op, Op::HostFn(_))).count();
    match host_fns == batch.rare.as_ref().map_or(0, |rare| rare.repeatable.len()) {
        true => Ok(()),
        false => Err(Error::Unsupported {
            what: "a host function in a graph",
            by: "the capture: a graph runs many times, a host function once",
            fix: "use Batch::repeatable_host_fn, or submit the function to the stream before or after each launch",
        }),
    }
}

/// For what a graph would repeat wrongly.
pub(super) fn once(what: &'static str, fix: &'static str) -> Error {
    Error::Unsupported { what, by: "graphs and steps of kernels, which repeat what was recorded", fix }
}

impl Recording {
    /// Of steps of a kernel.
    pub(super) fn of_steps() -> Self {
        Self { sizes: Some(Vec::new()), ..Self::default() }
    }

    /// Adds a batch, and empties it.
    pub(super) fn add(&mut self, batch: &mut Batch) {
        let ops = mem::take(batch.ops());
        let Batch { sends, waits, rare, .. } = mem::take(batch);
        let RareState { covered, repeatable, before } = *rare.unwrap_or_default();
        for who in before {
            if !self.before.iter().any(|other| Arc::ptr_eq(other, &who)) {
                self.before.push(who);
            }
        }
        let mut sends = sends.into_iter().flat_map(PreparedSend::apart).peekable();
        let mut waits = waits.into_iter().peekable();
        let mut covered = covered.into_iter().peekable();
        let mut repeatable = repeatable.into_iter().peekable();
        let mut parts = Vec::new();
        for (at, op) in ops.into_iter().enumerate() {
            while let Some((_, completion)) = covered.next_if(|(place, _)| *place <= at) {
                parts.extend(self.covered(completion));
            }
            if let Op::Trigger(..) = op {
                while let Some(send) = sends.next_if(|send| send.place == at) {
                    parts.push(Part::Sends(send.queue.clone(), send.queue.templates(&send.sends.range)));
                    self.sends.push((self.completions, send));
                    self.completions += 1;
                }
            } else if let Some(wait) = waits.next_if(|wait| wait.place == at) {
                let told = wait.asked != Asked::Through;
                parts.push(Part::Wait { awaited: self.awaited(&wait), told });
                self.completions += usize::from(told);
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
        self.batches.push(parts);
    }

    /// What was recorded. The sends are taken back, the completions given back.
    pub(super) fn finish(mut self) -> Vec<Vec<Part>> {
        // The newest first, so that none leaves a gap.
        while self.sends.pop().is_some() {}
        if let Some(first) = self.batches.first_mut() {
            first.splice(0..0, mem::take(&mut self.before).into_iter().map(Part::Before));
        }
        self.batches
    }

    fn awaited(&self, wait: &PreparedWait) -> For {
        let end = &wait.claim.end;
        let next = || For::Next(end.clone(), wait.claim.n + 1 - wait.first);
        match wait.asked {
            Asked::Next => next(),
            Asked::All => For::All(end.clone()),
            Asked::Through => self.sent(&wait.claim).map_or_else(next, For::Through),
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
        // Of a receive that the graph waits for: so does the next launch, for another one.
        (!self.waits.iter().any(covers)).then_some(Part::CoveredBefore(completion))
    }

    /// The place of the send of this graph that the completion is for.
    fn sent(&self, completion: &Completion) -> Option<usize> {
        let is_it = |(_, send): &&(usize, PreparedSend)| {
            Arc::ptr_eq(&send.queue.end, &completion.end) && send.sends.range.end - 1 == completion.n
        };
        self.sends.iter().rev().find(is_it).map(|(place, _)| *place)
    }
}

impl Part {
    /// Makes it again, as the next part of `batch`.
    pub(super) fn again(&self, batch: &mut Batch, completions: &mut Vec<Completion>) -> Result<()> {
        match self {
            Part::Op(op) => batch.ops().extend(op.again()),
            Part::HostFn(f) => batch.repeat(f.clone()),
            Part::Before(who) => who.replenish()?,
            Part::Sends(queue, sends) => {
                let send = PreparedSend::again(queue, sends, batch.stream)?;
                completions.push(batch.post(send));
            }
            Part::Wait { awaited, told } => {
                let wait = match awaited {
                    For::Next(end, count) => PreparedWait::next(end, *count, batch.stream)?,
                    For::All(end) => PreparedWait::all(end, batch.stream)?,
                    For::Through(place) => {
                        let sent = &completions[*place];
                        PreparedWait::through(sent, batch.stream)?.ok_or_else(|| differs(sent))?
                    }
                };
                let completion = batch.post_wait(wait);
                completions.extend(told.then_some(completion));
            }
            Part::Covered(place) => {
                let sent = &completions[*place];
                if PreparedWait::through(sent, None)?.is_some() {
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
