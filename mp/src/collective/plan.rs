//! The blocking driver: rounds of messages, one after the other.

use std::collections::VecDeque;
use std::ops::Range;

use crate::communicator::{Communicator, Registration};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::request::{Request, Status};

/// One message.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) rank: usize,
    pub(super) buffer: Registration,
    pub(super) range: Range<usize>,
}

/// What the CPU does with what came.
pub(super) type Step = Box<dyn FnOnce() -> Result<()> + Send>;

/// Messages that are under way together, and what is done after all of them.
#[derive(Default)]
pub(super) struct Round {
    pub(super) sends: Vec<Part>,
    pub(super) receives: Vec<Part>,
    pub(super) then: Option<Step>,
}

/// A receive under way, and the bytes that it is for.
#[derive(Clone, Debug)]
pub(super) struct Due {
    pub(super) request: Request,
    pub(super) bytes: usize,
}

impl Due {
    pub(super) fn receive(comm: &Communicator, part: &Part) -> Result<Self> {
        let request = comm.irecv(&part.buffer, part.range.clone(), part.rank)?;
        Ok(Self { request, bytes: part.range.len() })
    }

    /// What came must be what was due: there are no tags, so a rank in another collective is told by its lengths.
    pub(super) fn check(&self, operation: &'static str, status: Status) -> Result<()> {
        if status.bytes == self.bytes {
            return Ok(());
        }
        let what = format!("{} bytes came where {} were due", status.bytes, self.bytes);
        Err(Error::Collective { operation, rank: status.rank, what })
    }
}

/// Plays the rounds.
pub(super) fn run(
    comm: &Communicator,
    operation: &'static str,
    mut rounds: Vec<Round>,
    deadline: &Deadline,
) -> Result<()> {
    let take = |(index, round): (usize, &mut Round)| -> Vec<_> {
        std::mem::take(&mut round.receives).into_iter().map(|part| (index, part)).collect()
    };
    let mut ahead: VecDeque<(usize, Part)> = rounds.iter_mut().enumerate().flat_map(take).collect();
    let mut due: VecDeque<(usize, Due)> = VecDeque::new();
    for (index, round) in rounds.into_iter().enumerate() {
        // Those of later rounds too, as far as there is room: who is early then need not wait.
        while let Some((at, part)) = ahead.front() {
            match Due::receive(comm, part) {
                Ok(receive) => due.push_back((*at, receive)),
                Err(Error::Message { source: gdsync::Error::QueueFull { .. }, .. }) if *at > index => break,
                Err(error) => return Err(error),
            }
            ahead.pop_front();
        }
        let sends: Result<Vec<_>> =
            round.sends.iter().map(|part| comm.isend(&part.buffer, part.range.clone(), part.rank)).collect();
        while let Some((_, receive)) = due.pop_front_if(|(at, _)| *at == index) {
            receive.check(operation, comm.wait(&receive.request, deadline.remaining())?)?;
        }
        comm.wait_all(&sends?, deadline.remaining())?;
        round.then.map_or(Ok(()), |then| then())?;
    }
    Ok(())
}
