//! Splitting a communicator into smaller ones.

use std::str;
use std::time::Duration;

use super::bootstrap::Bootstrap;
use super::pairwise::{job, listen_for_part, new_token};
use crate::builder::CommunicatorBuilder;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::exchange::{CommonCall, take};
use crate::wait::Deadline;

/// What a rank tells the others.
struct Part {
    color: Option<u64>,
    key: u64,
    token: u64,
    /// Where it would listen.
    at: String,
}

impl Part {
    fn to_bytes(&self) -> Vec<u8> {
        let numbers = [u64::from(self.color.is_some()), self.color.unwrap_or(0), self.key, self.token];
        [numbers.map(u64::to_be_bytes).as_flattened(), self.at.as_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (numbers, at) = bytes.split_first_chunk::<32>()?;
        let rest = &mut &numbers[..];
        let [has_color, color, key, token] = [(); 4].map(|()| u64::from_be_bytes(take(rest)));
        Some(Self {
            color: (has_color == 1).then_some(color),
            key,
            token,
            at: str::from_utf8(at).ok()?.into(),
        })
    }
}

impl Communicator {
    /// Makes a communicator of all ranks that give the same `color`, numbered by `key` and then by their rank here, over the same
    /// devices and with the settings of this one: as `MPI_Comm_split`. All ranks must call it. A rank without a color gets none.
    ///
    /// The parts are independent: each may [shrink](Communicator::shrink), and this communicator may end before them. Register memory
    /// with the new one.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] names a rank that is gone or could not be reached, [`Error::Deadline`] one that is late;
    /// [`Error::Device`] from the RDMA device.
    pub fn split(
        &self,
        color: Option<u64>,
        key: u64,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Option<Self>> {
        let (_call, deadline) = (CommonCall::Split.enter(), Deadline::after(self.limit(timeout)));
        let (listener, at) = listen_for_part()?;
        let own = Part { color, key, token: new_token()?, at: at.to_string() };
        let all = self.exchange(&own.to_bytes(), deadline.remaining())?;
        let parts = all.iter().enumerate().map(|(rank, bytes)| {
            let fix = "let all ranks make the same calls, in one order";
            let wrong = || Error::bootstrap(format!("rank {rank}"), "is in another call of all ranks", fix);
            Part::from_bytes(bytes).ok_or_else(wrong)
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        if color.is_none() {
            return Ok(None);
        }
        let mut group: Vec<_> = (0..parts.len()).filter(|&rank| parts[rank].color == color).collect();
        group.sort_by_key(|&rank| (parts[rank].key, rank));
        let rank = group.iter().position(|&rank| rank == self.rank()).expect("its color is its own");
        let leader = &parts[group[0]];
        let at = leader.at.parse().map_err(|_| {
            Error::bootstrap(format!("rank {}", group[0]), "has told a wrong address", "run one version")
        })?;
        let launch = job(rank, group.len(), at, leader.token);
        let limit = deadline.remaining();
        let mut bootstrap = match rank {
            0 => Bootstrap::root(listener, &launch, limit)?,
            _ => Bootstrap::connect(&launch, limit)?,
        };
        bootstrap.open_listeners(deadline.remaining())?;
        let mut builder = CommunicatorBuilder(self.0.settings.clone());
        builder.0.context = Some(self.0.context.clone());
        let resolved = builder.resolve()?;
        let part = builder.build(Box::new(bootstrap), resolved, deadline)?;
        Ok(Some(part.with_timeout(self.timeout())))
    }
}
