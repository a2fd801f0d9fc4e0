//! Tagged messages under way.

use std::hint::spin_loop;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::thread::{sleep, yield_now};
use std::time::Duration;

use super::Shared;
use super::matching::Place;
use crate::communicator::Registration;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::link::SILENCE;

/// Looks at what comes between two at the clock, which takes as long as a message.
const LOOKS: usize = 64;

/// How long a wait is busy before it lets others run, and before it sleeps between looks, for so long.
const SPIN: Duration = Duration::from_micros(5);
const PATIENCE: Duration = Duration::from_millis(10);
const NAP: Duration = Duration::from_micros(50);

/// A tagged message that is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The rank at the other end.
    pub rank: usize,
    /// The tag it was sent with.
    pub tag: u64,
    /// Its bytes.
    pub bytes: usize,
}

/// What becomes of a message.
pub(super) type Outcome = Arc<OnceLock<Result<Status>>>;

pub(super) fn finish(outcome: &Outcome, with: Result<Status>) {
    // Only whoever takes it out of a queue does, and so once.
    let _ = outcome.set(with);
}

/// A receive under way.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) outcome: Outcome,
    pub(super) buffer: Registration,
    pub(super) range: Range<usize>,
}

/// A send under way.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) outcome: Outcome,
    pub(super) buffer: Registration,
    pub(super) range: Range<usize>,
    pub(super) status: Status,
}

/// A tagged message under way. Dropping it detaches: the message goes on with the calls that follow.
#[derive(Clone, Debug)]
#[must_use = "a message nobody waits for may fail unnoticed"]
pub struct Request {
    pub(super) shared: Arc<Shared>,
    pub(super) outcome: Outcome,
    /// The only rank it has to do with, if there is one.
    pub(super) rank: Option<usize>,
    /// Where it waits for a message, if it had to.
    pub(super) place: Option<Place>,
}

impl Request {
    fn known(&self) -> Option<Result<Status>> {
        self.outcome.get().cloned()
    }

    /// Whether the message is complete; `None` while it is under way. It moves messages along if it is not. A complete send may
    /// be overwritten: it need not have been received.
    ///
    /// # Errors
    /// [`Error::Message`] names the rank and why it failed; [`Error::Truncated`]; [`Error::Cancelled`].
    pub fn test(&self) -> Result<Option<Status>> {
        if self.outcome.get().is_none() {
            self.shared.look();
        }
        self.known().transpose()
    }

    /// Blocks until the message is complete. Meanwhile it moves along all messages of this rank, those of other requests too.
    ///
    /// # Errors
    /// As [`Request::test`], and [`Error::Deadline`] after `timeout`: the message goes on.
    pub fn wait(&self, timeout: Duration) -> Result<Status> {
        let deadline = Deadline::after(timeout);
        let mut tended = Duration::ZERO;
        loop {
            let mut helped = false;
            for _ in 0..LOOKS {
                if let Some(known) = self.known() {
                    return known;
                }
                let mut engine = self.shared.engine.lock();
                match self.rank {
                    Some(rank) => engine.poll(rank),
                    None => engine.poll_all(),
                }
                drop(engine);
                helped |= self.shared.progress();
                spin_loop();
            }
            // Others may wait for this rank meanwhile.
            helped |= self.shared.look();
            let waited = deadline.elapsed();
            if deadline.is_over() {
                let whom = self.rank.map_or("any rank".to_owned(), |rank| format!("rank {rank}"));
                return Err(deadline.error(format!("waiting for a tagged message with {whom}")));
            }
            if waited >= tended + SILENCE {
                self.shared.tend();
                tended = waited;
            }
            if helped {
                // There may be more.
            } else if waited > PATIENCE {
                sleep(NAP);
            } else if waited > SPIN {
                yield_now();
            }
        }
    }

    /// Takes back a receive that no message has matched, and says whether it could: its buffer is free then, and the request
    /// ends with [`Error::Cancelled`]. All else goes on as it was.
    pub fn cancel(&self) -> bool {
        let receive = self.place.and_then(|place| self.shared.engine.lock().cancel(place));
        if let Some(receive) = &receive {
            finish(&receive.outcome, Err(Error::Cancelled));
        }
        receive.is_some()
    }
}
