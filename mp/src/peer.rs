//! The connection to one rank.

use std::collections::VecDeque;

use gdsync::verbs::{Completion, Qp};
use parking_lot::Mutex;

use crate::communicator::Registration;
use crate::error::{Error, Result};

/// One queue pair, or for the own rank two that are connected to each other.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: usize,
    pub(crate) send: Qp,
    pub(crate) recv: Qp,
    /// Buffers of messages under way, oldest first: they stay registered though their request is dropped.
    held: [Mutex<VecDeque<(Completion, Registration)>>; 2],
}

/// Which of the two directions.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    Send = 0,
    Recv = 1,
}

impl Peer {
    pub(crate) fn new(rank: usize, send: Qp, recv: Qp) -> Self {
        Self { rank, send, recv, held: Default::default() }
    }

    /// Keeps a buffer registered until its message is complete.
    pub(crate) fn hold(&self, way: Way, completion: &Completion, buffer: &Registration) {
        self.held[way as usize].lock().push_back((completion.clone(), buffer.clone()));
    }

    /// Takes completions, so that the queues have room again, and lets buffers go.
    pub(crate) fn recycle(&self) {
        while self.send.poll_send().is_some() {}
        while self.recv.poll_recv().is_some() {}
        for held in &self.held {
            let mut held = held.lock();
            while held.front().is_some_and(|(completion, _)| !matches!(completion.status(), Ok(None))) {
                held.pop_front();
            }
        }
    }

    /// Runs `post`, and once more after recycling if the queues were full.
    pub(crate) fn with_room<T>(
        &self,
        operation: &'static str,
        mut post: impl FnMut() -> gdsync::Result<T>,
    ) -> Result<T> {
        let result = match post() {
            Err(gdsync::Error::QueueFull { .. }) => {
                self.recycle();
                post()
            }
            other => other,
        };
        result.map_err(|source| Error::Message { rank: self.rank, operation, source })
    }
}
