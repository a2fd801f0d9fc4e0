//! Going on without the ranks that are gone.

use std::thread::sleep;
use std::time::Duration;

use crate::bootstrap::Exchange;
use crate::communicator::Communicator;
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// Between two attempts: another rank has just died.
const PAUSE: Duration = Duration::from_millis(10);

/// What [`Communicator::shrink`] returns.
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// The ranks that are left, numbered from 0 in the order they had.
    pub communicator: Communicator,
    /// The rank that each of them had before.
    pub former: Vec<usize>,
}

impl Shrunk {
    /// The rank now of one that was `former`; `None` if it is gone.
    pub fn rank_of(&self, former: usize) -> Option<usize> {
        self.former.binary_search(&former).ok()
    }
}

impl Communicator {
    /// Makes a communicator of the ranks that are left, built as this one was, where ranks have died
    /// ([`Error::is_rank_lost`] tells). All that are left must
    /// call it. Ranks that die meanwhile are left out too, or are found out by the first use of what it returns; it can be
    /// called on that again. What was registered belongs to this communicator, and has to be registered with the new one;
    /// [`Tagged`](crate::tagged::Tagged) has a [`shrink`](crate::tagged::Tagged::shrink) of its own, to be called then.
    ///
    /// It ends all connections of this communicator, and its barriers and exchanges: ranks that wait for this one learn within
    /// a second that something has happened, as from [`Communicator::give_up`].
    /// A rank whose process is there is waited for, unless it was [given up](Communicator::give_up) by any rank: then it is
    /// left out, and told so if it calls this. Processes that [`Builder::spawn`](crate::Builder::spawn) started here belong to
    /// the new communicator afterwards; those of ranks that are left out are ended.
    ///
    /// The ranks find each other by sockets that [`Builder::init`](crate::Builder::init) opens at each of them, rank 0 or not.
    /// A process that is gone is known by a connection to it that is refused: where a whole host is gone, or a firewall
    /// answers in its place, give its ranks up.
    ///
    /// # Errors
    /// [`Error::Deadline`] names ranks that are there and have not called this: it may be called again, by all.
    /// [`Error::Bootstrap`] for a rank that the others leave out, and where
    /// [`Builder::init_over`](crate::Builder::init_over) was given an exchange that cannot do it; [`Error::Device`] as from
    /// [`Builder::init`](crate::Builder::init). A rank that dies in the very last step may leave some ranks with an error and
    /// others with a communicator, in which the next call fails.
    pub fn shrink(&self, timeout: Duration) -> Result<Shrunk> {
        let deadline = Deadline::after(timeout);
        let links = self.0.peers.iter().map(|peer| &peer.link);
        let without: Vec<usize> =
            links.clone().filter(|link| link.is_given_up()).map(|link| link.rank).collect();
        links.for_each(|link| link.fail(&gdsync::Error::GivenUp));
        loop {
            let (exchange, former) = self.regroup(&without, &deadline)?;
            match self.0.builder.clone().rebuild(exchange, &deadline) {
                Ok(communicator) => {
                    let children = self.0.children.lock().take();
                    *communicator.0.children.lock() = children.map(|children| children.keep(&former));
                    return Ok(Shrunk { communicator, former });
                }
                // One has died since: the others see that as well, and come back.
                Err(Error::Bootstrap { .. } | Error::Message { .. }) if !deadline.is_over() => sleep(PAUSE),
                Err(error) => return Err(error),
            }
        }
    }

    pub(crate) fn regroup(
        &self,
        without: &[usize],
        deadline: &Deadline,
    ) -> Result<(Box<dyn Exchange>, Vec<usize>)> {
        let bootstrap = self.0.bootstrap.try_lock_for(deadline.remaining());
        let busy = || deadline.error("shrink: waiting for another thread's barrier or exchange".to_owned());
        bootstrap.ok_or_else(busy)?.regroup(without, deadline.remaining())
    }
}
