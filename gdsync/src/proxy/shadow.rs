//! Payload in GPU memory that the device cannot register. Pinned host memory is registered in its place, of the same size, and a
//! copy engine brings payload there before the device gets a request, and back before a CQE tells of what came.
//!
//! The copies of one message come before or after its time on the wire. Those of messages that follow each other go on meanwhile.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::translate::Buffers;
use crate::cuda::Engines;
use crate::error::Error;
use crate::memory::Memory;
use crate::mover::{Mover, Part, Source, Status, Ticket};

/// How long a copy may take.
const LIMIT: Duration = Duration::from_secs(10);

/// The host memory in place of GPU memory, by key.
#[derive(Debug, Default)]
pub(super) struct Shadows {
    list: HashMap<u32, Shadow>,
    engines: Arc<Engines>,
    /// When a copy last began, if anybody wants to know.
    begun: Option<Instant>,
}

#[derive(Clone, Debug)]
pub(super) struct Shadow {
    pub(super) gpu: Memory,
    pub(super) host: Memory,
    /// Why it is needed.
    pub(super) why: String,
}

/// A part of a message in GPU memory that has a shadow.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    gpu: Memory,
    host: Memory,
    at: usize,
    len: usize,
    /// Its first byte in the message.
    begin: usize,
}

/// Those of one message.
pub(super) type Pieces = Vec<Piece>;

impl Shadows {
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// What copies: it must know the GPU of what is added.
    pub(super) fn engines(&self) -> &Arc<Engines> {
        &self.engines
    }

    pub(super) fn add(&mut self, lkey: u32, shadow: Shadow) {
        self.list.insert(lkey, shadow);
    }

    /// Takes it out, to be dropped without the lock.
    pub(super) fn remove(&mut self, lkey: u32) -> Option<Shadow> {
        self.list.remove(&lkey)
    }

    /// Why the memory of this key has one, if so.
    pub(super) fn why(&self, lkey: u32) -> Option<&str> {
        Some(&self.list.get(&lkey)?.why)
    }

    /// Has buffers name shadows in place of memory that has one, and returns which. What leaves its region keeps its address:
    /// the device refuses it.
    pub(super) fn redirect(&self, buffers: &mut Buffers) -> Pieces {
        let mut begin = 0;
        let mut pieces = Pieces::new();
        for buffer in buffers {
            let len = buffer.length as usize;
            if let Some(Shadow { gpu, host, .. }) = self.list.get(&buffer.lkey)
                && let Some(at) = offset(gpu, buffer.addr, len)
            {
                buffer.addr = host.addr() + at as u64;
                pieces.push(Piece { gpu: gpu.clone(), host: host.clone(), at, len, begin });
            }
            begin += len;
        }
        pieces
    }

    /// Begins to bring payload to the shadows.
    pub(super) fn bring(&mut self, pieces: Pieces) -> Copy {
        self.start(pieces.into_iter().map(|Piece { gpu, host, at, len, .. }| {
            let from = Source::Here(gpu, at);
            Part { from, to: host, at, len }
        }))
    }

    /// Begins to bring the first `bytes` bytes of a message from the shadows.
    pub(super) fn land(&mut self, pieces: Pieces, bytes: u32) -> Copy {
        self.start(pieces.into_iter().map(|Piece { gpu, host, at, len, begin }| {
            let (from, len) = (Source::Here(host, at), len.min((bytes as usize).saturating_sub(begin)));
            Part { from, to: gpu, at, len }
        }))
    }

    fn start(&mut self, parts: impl Iterator<Item = Part>) -> Copy {
        let since = Instant::now();
        self.begun = Some(since);
        Copy { ticket: self.engines.start(parts.filter(|part| part.len > 0).collect()), since }
    }

    /// When a copy last began, if one has since the last call.
    pub(super) fn take_begun(&mut self) -> Option<Instant> {
        self.begun.take()
    }
}

/// Where in a memory these bytes are.
fn offset(memory: &Memory, addr: u64, len: usize) -> Option<usize> {
    let at = usize::try_from(addr.checked_sub(memory.addr())?).ok()?;
    (at.checked_add(len)? <= memory.len()).then_some(at)
}

/// A copy between memory and its shadow.
#[derive(Debug)]
pub(super) struct Copy {
    ticket: Ticket,
    since: Instant,
}

impl Copy {
    pub(super) fn is_over(&self) -> bool {
        self.ticket.is_over() || self.since.elapsed() > LIMIT
    }

    /// Nobody waits for it any more.
    pub(super) fn give_up(&self) {
        self.ticket.cancel();
    }

    /// Why the bytes are not in place, once it is over.
    pub(super) fn failure(&self, device: &str) -> Option<Error> {
        let why = match self.ticket.status() {
            Status::Done => return None,
            Status::Pending => {
                self.give_up();
                format!("its copy has not ended within {LIMIT:?}")
            }
            Status::Failed => self.ticket.failure().unwrap_or("its copy failed").to_owned(),
        };
        let why = format!("payload in GPU memory is staged in host memory, and cannot be: {why}");
        Some(Error::Device { device: device.to_owned(), why })
    }
}
