//! Going on without dead ranks, in a smaller communicator.

use std::thread::sleep;
use std::time::Duration;

use crate::builder::CommunicatorBuilder;
use crate::communicator::Communicator;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::exchange::Exchange;

/// The pause between two attempts: another rank has just died.
const PAUSE: Duration = Duration::from_millis(10);

/// What [`Communicator::shrink`] returns.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Shrunk {
    /// The surviving ranks, numbered from 0 in their order.
    pub communicator: Communicator,
    /// The former rank of each of them.
    pub former: Vec<usize>,
}

impl Shrunk {
    /// The new rank of the one that was `former`; `None` if it is gone.
    pub fn rank_of(&self, former: usize) -> Option<usize> {
        self.former.binary_search(&former).ok()
    }
}

impl Communicator {
    /// Makes a communicator of the surviving ranks, built as this one, after ranks have died ([`Error::is_rank_lost`]). All
    /// survivors must call it. Ranks that die meanwhile are left out too, or show by the first use of the new communicator, which
    /// can shrink again. Registrations belong to this communicator: register memory with the new one.
    /// [`Tagged`](crate::tagged::Tagged) has a [`shrink`](crate::tagged::Tagged::shrink) of its own, to be called afterwards.
    ///
    /// It ends all connections of this communicator, and its barriers and exchanges: ranks that wait for this one get an error within
    /// a second, as after [`Communicator::give_up`]. A rank whose process is alive is waited for, unless any rank has
    /// [given it up](Communicator::give_up): then it is left out, and gets an error if it calls this. Processes that
    /// [`CommunicatorBuilder::spawn`] started here belong to the new communicator; those of ranks that are left out are killed.
    ///
    /// The ranks find each other by sockets that [`CommunicatorBuilder::init`] opens at each of them. A dead process is known by
    /// a refused connection: if a whole host is gone, or a firewall drops packets in its place, give its ranks up.
    ///
    /// # Errors
    /// [`Error::Deadline`] names ranks that are alive and have not called this: it may be called again, by all.
    /// [`Error::Bootstrap`] for a rank that the others leave out, and for an exchange of
    /// [`CommunicatorBuilder::init_over`] that cannot regroup; [`Error::Device`] from the RDMA device. A rank that dies in the very last step may leave some ranks with an error and
    /// others with a communicator, in which the next call fails.
    pub fn shrink(&self, timeout: Duration) -> Result<Shrunk> {
        let deadline = Deadline::after(timeout);
        let transports = self.0.peers.iter().map(|peer| &peer.transport);
        let without: Vec<usize> =
            transports.clone().filter(|one| one.is_given_up()).map(|one| one.rank).collect();
        transports.for_each(|one| one.fail(&gdsync::Error::GivenUp));
        loop {
            let (exchange, former) = self.regroup(&without, &deadline)?;
            let builder = CommunicatorBuilder(self.0.settings.clone());
            let built = builder.resolve().and_then(|resolved| {
                builder.build(exchange, resolved, Deadline::after(deadline.remaining()))
            });
            match built {
                Ok(communicator) => {
                    let children = self.0.children.lock().take();
                    *communicator.0.children.lock() = children.map(|children| children.keep(&former));
                    return Ok(Shrunk { communicator, former });
                }
                // Another one has died: the others see that as well, and try again.
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
        let exchange = self.0.exchange.try_lock_for(deadline.remaining());
        let busy = || deadline.error("shrink: waiting for another thread's barrier or exchange".to_owned());
        exchange.ok_or_else(busy)?.regroup(without, deadline.remaining())
    }
}
