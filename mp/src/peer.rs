//! The connection to one rank.

use std::collections::VecDeque;
use std::sync::Weak;

use gdsync::verbs::{Completion, Qp};
use parking_lot::Mutex;

use crate::communicator::Registration;
use crate::error::{Error, Result};
use crate::link::Link;
use crate::request::Request;

/// One queue pair, or for the own rank two that are connected to each other.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: usize,
    pub(crate) send: Qp,
    pub(crate) recv: Qp,
    /// Messages under way in each direction: not more than the queues remember.
    depth: usize,
    held: [Mutex<Held>; 2],
}

/// Messages under way, oldest first, and their buffers: they stay registered though their request is dropped.
type Held = VecDeque<(Request, Registration)>;

/// Which of the two directions.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    Send = 0,
    Recv = 1,
}

impl Peer {
    pub(crate) fn new(link: Link, depth: usize) -> Self {
        let Link { rank, send, recv } = link;
        Self { rank, send, recv, depth, held: Default::default() }
    }

    /// Posts a message of `bytes` bytes, after recycling if the queue is full, and holds its buffer until it is
    /// complete.
    pub(crate) fn start(
        &self,
        way: Way,
        operation: &'static str,
        buffer: &Registration,
        bytes: usize,
        mut post: impl FnMut() -> gdsync::Result<Completion>,
    ) -> Result<Request> {
        // Held in the order of the queue, so that the oldest are recycled before the queue forgets them.
        let mut held = self.held[way as usize].lock();
        if held.len() >= self.depth {
            self.poll();
            settle(&mut held);
        }
        let posted = match self.room(way, held.len()).and_then(|()| post()) {
            Err(gdsync::Error::QueueFull { .. }) if held.len() < self.depth => {
                self.poll();
                settle(&mut held);
                post()
            }
            other => other,
        };
        let completion = posted.map_err(|source| Error::Message { rank: self.rank, operation, source })?;
        let request = Request::new(self.rank, operation, completion, bytes, Weak::new());
        held.push_back((request.clone(), buffer.clone()));
        Ok(request)
    }

    fn room(&self, way: Way, held: usize) -> gdsync::Result<()> {
        if held < self.depth {
            return Ok(());
        }
        let (qp, queue) = match way {
            Way::Send => (&self.send, "send queue"),
            Way::Recv => (&self.recv, "receive queue"),
        };
        qp.check()?;
        let (outstanding, depth) = (held as u64, self.depth as u64);
        Err(gdsync::Error::QueueFull { queue, qpn: qp.qpn(), outstanding, depth })
    }

    /// Takes completions, so that the queues have room again.
    fn poll(&self) {
        while self.send.poll_send().is_some() {}
        while self.recv.poll_recv().is_some() {}
    }

    /// Takes completions, and lets buffers go.
    pub(crate) fn recycle(&self) {
        self.poll();
        self.held.iter().for_each(|held| settle(&mut held.lock()));
    }
}

/// Lets go of the messages that are complete, and keeps what came of them.
pub(crate) fn settle<T>(held: &mut VecDeque<(Request, T)>) {
    while let Some((request, _)) = held.front() {
        match request.test() {
            Ok(None) => break,
            Ok(Some(status)) => {
                let _ = request.kept.set(status);
            }
            // The queue pair is broken, and stays so.
            Err(_) => {}
        }
        held.pop_front();
    }
}
