//! Payload in GPU memory that the device cannot register. Pinned host memory is registered in its place, of the same size, and a
//! copy engine brings payload there before the device gets a request, and back before a CQE tells of what came.
//!
//! The copies of one message come before or after its time on the wire. Those of messages that follow each other go on meanwhile.
//! Each is by the engine of the memory's own GPU, so those of the same bytes happen in order.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::copy::Copy;
use super::translate::Buffers;
use gdsync_device::copy_engine::{Part, Source};
use gdsync_device::cuda::Engine;
use gdsync_device::error::Result;
use gdsync_device::memory::Memory;

/// The host memory in place of GPU memory, by key.
#[derive(Debug, Default)]
pub(super) struct Shadows {
    list: HashMap<u32, Arc<Shadow>>,
    /// All that were ever used: to end one takes time, which nobody has who holds the lock.
    engines: Vec<Arc<Engine>>,
    /// When a copy last began, if anybody wants to know.
    begun: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Shadow {
    gpu: Memory,
    host: Memory,
    engine: Arc<Engine>,
    /// Why it is needed.
    why: String,
    life: Mutex<Life>,
}

#[derive(Debug, Default)]
struct Life {
    /// Copies under way, and some that have ended.
    copies: Vec<Copy>,
    /// It is registered no more, and nothing is copied any more.
    is_over: bool,
}

/// A part of a message in GPU memory that has a shadow.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    shadow: Arc<Shadow>,
    at: usize,
    len: usize,
    /// Its first byte in the message.
    begin: usize,
}

/// Those of one message.
pub(super) type Pieces = Vec<Piece>;

impl Shadow {
    pub(super) fn new(gpu: Memory, host: Memory, engine: Arc<Engine>, why: String) -> Self {
        Self { gpu, host, engine, why, life: Mutex::default() }
    }

    /// Waits until no copy touches its memory any more. Returns one that does not end in time.
    pub(super) fn settle(&self) -> Option<Copy> {
        let copies = std::mem::take(&mut self.life.lock().copies);
        while !copies.iter().all(Copy::is_over) {
            std::thread::yield_now();
        }
        copies.into_iter().find(|copy| !copy.has_ended())
    }
}

impl Shadows {
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn add(&mut self, lkey: u32, shadow: Shadow) {
        if !self.engines.iter().any(|known| Arc::ptr_eq(known, &shadow.engine)) {
            self.engines.push(shadow.engine.clone());
        }
        self.list.insert(lkey, Arc::new(shadow));
    }

    /// Takes it out, to [settle](Shadow::settle) and be dropped without the lock. Copies that have not begun will not.
    pub(super) fn remove(&mut self, lkey: u32) -> Option<Arc<Shadow>> {
        let shadow = self.list.remove(&lkey)?;
        let mut life = shadow.life.lock();
        life.is_over = true;
        life.copies.iter().for_each(Copy::give_up);
        drop(life);
        Some(shadow)
    }

    /// Why the memory of this key has one, if so.
    pub(super) fn why(&self, lkey: u32) -> Option<&str> {
        Some(&self.list.get(&lkey)?.why)
    }

    /// Has buffers name shadows in place of memory that has one, and returns which. What leaves its region keeps its address:
    /// the device refuses it.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) where a copy is stuck: it may overwrite what comes next.
    pub(super) fn redirect(&self, buffers: &mut Buffers, device: &str) -> Result<Pieces> {
        let mut begin = 0;
        let mut pieces = Pieces::new();
        for buffer in buffers {
            let len = buffer.length as usize;
            if let Some(shadow) = self.list.get(&buffer.lkey)
                && let Some(at) = offset(&shadow.gpu, buffer.addr, len)
            {
                let stuck_copies = shadow.life.lock().copies.iter().find(|copy| copy.is_stuck()).cloned();
                stuck_copies.and_then(|copy| copy.failure(device)).map_or(Ok(()), Err)?;
                buffer.addr = shadow.host.addr() + at as u64;
                pieces.push(Piece { shadow: shadow.clone(), at, len, begin });
            }
            begin += len;
        }
        Ok(pieces)
    }

    /// Begins to bring payload to the shadows.
    pub(super) fn bring(&mut self, pieces: &[Piece]) -> Copy {
        self.start(pieces, |Piece { shadow, at, len, .. }| {
            let from = Source::Here(shadow.gpu.clone(), *at);
            Part { from, to: shadow.host.clone(), at: *at, len: *len }
        })
    }

    /// Begins to bring the first `bytes` bytes of a message from the shadows.
    pub(super) fn land(&mut self, pieces: &[Piece], bytes: u32) -> Copy {
        self.start(pieces, |Piece { shadow, at, len, begin }| {
            let from = Source::Here(shadow.host.clone(), *at);
            let len = *len.min(&(bytes as usize).saturating_sub(*begin));
            Part { from, to: shadow.gpu.clone(), at: *at, len }
        })
    }

    fn start(&mut self, pieces: &[Piece], part: impl Fn(&Piece) -> Part) -> Copy {
        self.begun = Some(Instant::now());
        if let Some(Piece { shadow, .. }) = pieces.iter().find(|piece| piece.shadow.life.lock().is_over) {
            return Copy::refused(&shadow.engine, "its region is registered no more");
        }
        let copy = Copy::start(pieces.iter().map(|piece| (piece.shadow.engine.clone(), part(piece))));
        for Piece { shadow, .. } in pieces {
            let copies = &mut shadow.life.lock().copies;
            copies.retain(|copy| !copy.has_ended());
            copies.push(copy.clone());
        }
        copy
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
