//! Messages under way to and from one rank.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use gdsync::verbs::{Completion, Sge};
use parking_lot::Mutex;

use crate::communicator::Registration;
use crate::error::{Error, Result};
use crate::link::Link;
use crate::request::{Order, Request, Status};

/// A part of a message: bytes of registered memory.
pub type Piece<'a> = (&'a Registration, Range<usize>);

/// A rank, and what is under way with it.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) link: Arc<Link>,
    /// In each direction: not more than the queues remember.
    held: [Mutex<Held>; 2],
}

/// Messages under way, oldest first, and their buffers: they stay registered though their request is dropped.
type Held = VecDeque<(Request, Buffers)>;

/// Most messages have one; the others do not cost them an allocation.
type Buffers = (Option<Registration>, Box<[Registration]>);

/// Messages whose completions are taken together.
const DRAIN: u64 = 32;

/// Which of the two directions.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    Send = 0,
    Recv = 1,
}

impl Peer {
    pub(crate) fn new(link: Link) -> Self {
        Self { link: Arc::new(link), held: Default::default() }
    }

    /// Puts a message into its queue by `post`, which gets its pieces, after recycling if the queue is full. Its buffers are
    /// held until it is complete.
    pub(crate) fn start<T>(
        &self,
        way: Way,
        operation: &'static str,
        pieces: &[Piece<'_>],
        post: impl FnMut(&Link, &[Sge]) -> gdsync::Result<(Completion, T)>,
    ) -> Result<(Request, T)> {
        match pieces {
            [piece] => self.hold(way, operation, pieces, &[self.sge(piece)?], post),
            _ => {
                // Empty ones take no room.
                let count = pieces.iter().filter(|(_, range)| !range.is_empty()).count();
                if count > self.link.pieces {
                    let source = gdsync::Error::InvalidArgument {
                        what: "pieces of a message",
                        value: count.to_string(),
                        expected: "at most Builder::max_pieces",
                    };
                    return Err(Error::Message { rank: self.link.rank, operation, source });
                }
                let sges = pieces.iter().map(|piece| self.sge(piece)).collect::<Result<Vec<_>>>()?;
                self.hold(way, operation, pieces, &sges, post)
            }
        }
    }

    fn sge(&self, (buffer, range): &Piece<'_>) -> Result<Sge> {
        let bytes = range.end.checked_sub(range.start).ok_or_else(|| gdsync::Error::InvalidArgument {
            what: "the range of the buffer",
            value: format!("{range:?}"),
            expected: "one that does not end before it starts",
        })?;
        Ok(buffer.on(self.link.near).sge(range.start, bytes)?)
    }

    fn hold<T>(
        &self,
        way: Way,
        operation: &'static str,
        pieces: &[Piece<'_>],
        sges: &[Sge],
        mut post: impl FnMut(&Link, &[Sge]) -> gdsync::Result<(Completion, T)>,
    ) -> Result<(Request, T)> {
        // Held in the order of the queue, so that the oldest are recycled before the queue forgets them.
        let mut held = self.held[way as usize].lock();
        if held.len() >= self.link.depth {
            self.poll();
            settle(&mut held);
        }
        let posted = match self.room(way, held.len()).and_then(|()| post(&self.link, sges)) {
            Err(gdsync::Error::QueueFull { .. }) if held.len() < self.link.depth => {
                self.poll();
                settle(&mut held);
                post(&self.link, sges)
            }
            other => other,
        };
        let failed = |source| Error::Message { rank: self.link.rank, operation, source };
        let (completion, posted) = posted.map_err(failed)?;
        let bytes = sges.iter().map(|sge| sge.len as usize).sum();
        let (link, kept) = (self.link.clone(), OnceLock::new());
        let request = Request(Arc::new(Order { link, way, lane: None, operation, completion, bytes, kept }));
        let mut buffers = pieces.iter().map(|(buffer, _)| (*buffer).clone());
        held.push_back((request.clone(), (buffers.next(), buffers.collect())));
        Ok((request, posted))
    }

    fn room(&self, way: Way, held: usize) -> gdsync::Result<()> {
        let link = &self.link;
        if held < link.depth {
            return Ok(());
        }
        let (qp, queue) = match way {
            Way::Send => (&link.ends.send, "send queue"),
            Way::Recv => (&link.ends.recv, "receive queue"),
        };
        qp.check()?;
        let (outstanding, depth) = (held as u64, link.depth as u64);
        Err(gdsync::Error::QueueFull { queue, qpn: qp.qpn(), outstanding, depth })
    }

    /// Recycles, and refuses unless `count` more messages can be started.
    pub(crate) fn has_room(&self, way: Way, count: usize, operation: &'static str) -> Result<()> {
        self.recycle();
        let held = self.held[way as usize].lock().len();
        let depth = self.link.depth;
        let room = if held + count <= depth { Ok(()) } else { self.room(way, depth) };
        room.map_err(|source| Error::Message { rank: self.link.rank, operation, source })
    }

    /// Takes completions, so that the queues have room again.
    fn poll(&self) {
        [Way::Send, Way::Recv].into_iter().for_each(|way| self.link.queue(way).drain());
    }

    /// A message was seen to be complete: lets it and those before it go, and takes the completions of its queue now and then.
    pub(crate) fn finish(&self, request: &Request, status: Status) {
        let Order { way, completion, .. } = &*request.0;
        let index = completion.index();
        if matches!(way, Way::Recv) {
            self.link.credits.arrived(completion);
        }
        let mut held = self.held[*way as usize].lock();
        // By whoever has seen a later one, too.
        let mut over = held.pop_front_if(|(front, _)| Arc::ptr_eq(&front.0, &request.0));
        if over.is_none() && held.front().is_some_and(|(front, _)| front.0.completion.index() <= index) {
            settle(&mut held);
        } else if let Some((request, _)) = &mut over {
            let _ = request.0.kept.set(status);
        }
        drop(held);
        if index.is_multiple_of(DRAIN) {
            self.link.queue(*way).drain();
        }
    }

    /// Takes completions, lets buffers go, and asks a silent rank whether it is there if something is under way.
    pub(crate) fn recycle(&self) {
        self.poll();
        let mut under_way = false;
        for held in &self.held {
            let mut held = held.lock();
            settle(&mut held);
            under_way |= !held.is_empty();
        }
        if under_way || self.link.check().is_err() {
            self.link.tend();
        }
    }
}

/// Lets go of the messages that are complete, and keeps what came of them.
pub(crate) fn settle<T>(held: &mut VecDeque<(Request, T)>) {
    while let Some((request, _)) = held.front() {
        match request.test() {
            Ok(None) => break,
            Ok(Some(status)) => {
                let _ = request.0.kept.set(status);
            }
            // The queue pair is broken, and stays so.
            Err(_) => {}
        }
        held.pop_front();
    }
}
