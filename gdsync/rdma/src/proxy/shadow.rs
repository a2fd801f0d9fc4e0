//! Staging of GPU memory that the device cannot register.
//!
//! Pinned host memory of the same size, the shadow, is registered in its place. A copy engine copies payload to the
//! shadow before the device gets a request, and from it before a CQE reports received data. Copies of one message do
//! not overlap its time on the wire; those of successive messages do. Each runs on the engine of the memory's own GPU,
//! so copies of the same bytes are ordered.

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

/// Shadows of GPU memory, by key.
#[derive(Debug, Default)]
pub(super) struct Shadows {
    list: HashMap<u32, Arc<Shadow>>,
    /// All engines ever used: stopping one takes long, so it is not done under the lock.
    engines: Vec<Arc<Engine>>,
    /// Start of the newest copy that has not been reported.
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
    /// Copies in progress, and some finished ones.
    copies: Vec<Copy>,
    /// Deregistered: no copy may start.
    is_over: bool,
}

/// A part of a message in memory with a shadow.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    shadow: Arc<Shadow>,
    at: usize,
    len: usize,
    /// Offset in the message.
    begin: usize,
}

/// The parts of one message.
pub(super) type Pieces = Vec<Piece>;

impl Shadow {
    pub(super) fn new(gpu: Memory, host: Memory, engine: Arc<Engine>, why: String) -> Self {
        Self { gpu, host, engine, why, life: Mutex::default() }
    }

    /// Waits until no copy accesses its memory. Returns one that times out.
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

    /// Removes a shadow and cancels copies that have not begun. The caller waits for copies and drops it, without the
    /// lock.
    pub(super) fn remove(&mut self, lkey: u32) -> Option<Arc<Shadow>> {
        let shadow = self.list.remove(&lkey)?;
        let mut life = shadow.life.lock();
        life.is_over = true;
        life.copies.iter().for_each(Copy::give_up);
        drop(life);
        Some(shadow)
    }

    /// Why this key's memory has a shadow, if it has one.
    pub(super) fn why(&self, lkey: u32) -> Option<&str> {
        Some(&self.list.get(&lkey)?.why)
    }

    /// Replaces addresses in memory with a shadow, and returns those parts. Addresses outside of their region stay; the
    /// device refuses them.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if a copy is stuck: it could overwrite newer data.
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

    /// Starts to copy payload to the shadows.
    pub(super) fn bring(&mut self, pieces: &[Piece]) -> Copy {
        self.start(pieces, |Piece { shadow, at, len, .. }| {
            let from = Source::Here(shadow.gpu.clone(), *at);
            Part { from, to: shadow.host.clone(), at: *at, len: *len }
        })
    }

    /// Starts to copy the first `bytes` bytes of a message from the shadows.
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

    /// Start of the newest copy since the last call.
    pub(super) fn take_begun(&mut self) -> Option<Instant> {
        self.begun.take()
    }
}

/// Offset of a range in a memory.
fn offset(memory: &Memory, addr: u64, len: usize) -> Option<usize> {
    let at = usize::try_from(addr.checked_sub(memory.addr())?).ok()?;
    (at.checked_add(len)? <= memory.len()).then_some(at)
}
