//! What words of memory are for: errors and recordings say that in place of an address.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use super::Log;
use super::rows::{FIELDS, GONE, OF_WORDS, Row};
use crate::fork_guard::PerProcess;

/// What a process waits for in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Purpose {
    /// A rank counts there the receives that it has posted for this one.
    Receives {
        /// The rank.
        rank: u32,
    },
    /// The same, for messages of collectives.
    Collectives {
        /// The rank.
        rank: u32,
    },
    /// Any rank signals there: the memory of a window.
    Signals,
}

/// Words of one purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words {
    /// Address of the first one.
    pub addr: u64,
    /// Their bytes.
    pub len: u64,
    /// Their purpose.
    pub purpose: Purpose,
    /// They are used no more.
    pub is_gone: bool,
}

impl Words {
    /// Their addresses.
    pub fn range(&self) -> Range<u64> {
        self.addr..self.addr.saturating_add(self.len)
    }

    /// What a wait for this value of the word at `addr` waits for.
    pub fn awaited(&self, addr: u64, value: u64) -> String {
        match self.purpose {
            Purpose::Receives { rank } => format!("a receive of rank {rank} (message {value})"),
            Purpose::Collectives { rank } => {
                format!("rank {rank} to call a collective (message {value} to it)")
            }
            Purpose::Signals => format!("a signal at offset {} of a window", addr.saturating_sub(self.addr)),
        }
    }

    fn pack(&self) -> [u64; FIELDS] {
        let (kind, rank) = match self.purpose {
            Purpose::Receives { rank } => (1, rank),
            Purpose::Signals => (2, 0),
            Purpose::Collectives { rank } => (3, rank),
        };
        let gone = if self.is_gone { GONE } else { 0 };
        [OF_WORDS | gone | kind, rank.into(), self.addr, self.len, 0, 0, 0]
    }

    /// Unpacks a row, if it is one of words.
    pub fn unpack([head, rank, addr, len, ..]: [u64; FIELDS]) -> Option<Self> {
        let purpose = match head & !GONE ^ OF_WORDS {
            1 => Purpose::Receives { rank: rank.try_into().ok()? },
            2 => Purpose::Signals,
            3 => Purpose::Collectives { rank: rank.try_into().ok()? },
            _ => return None,
        };
        Some(Self { addr, len, purpose, is_gone: head & GONE != 0 })
    }
}

/// Those of this process, by address; the number keeps apart those at the same one.
static NAMED: PerProcess<RwLock<BTreeMap<(u64, u64), Words>>> = PerProcess::new();

/// The purpose of words of this process, known to errors and the recording until it is dropped.
#[derive(Debug)]
pub struct NamedWords {
    key: (u64, u64),
    words: Words,
    row: Row,
}

impl NamedWords {
    /// Names the words in `len` bytes from `addr` on.
    pub fn new(addr: u64, len: u64, purpose: Purpose) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let words = Words { addr, len, purpose, is_gone: false };
        let key = (addr, NEXT.fetch_add(1, Ordering::Relaxed));
        NAMED.get().write().insert(key, words);
        let row = Row::take(&Log::current());
        row.write(words.pack());
        Self { key, words, row }
    }

    /// The words of this process at an address.
    pub fn find(addr: u64) -> Option<Words> {
        let named = NAMED.get().read();
        // Windows may share memory: the nearest one has it.
        let mut nearest = named.range(..=(addr, u64::MAX)).rev().map(|(_, words)| *words);
        nearest.find(|words| words.range().contains(&addr))
    }
}

impl Drop for NamedWords {
    fn drop(&mut self) {
        self.row.write(Words { is_gone: true, ..self.words }.pack());
        NAMED.get().write().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::Peer;
    use super::*;

    #[test]
    fn words_fit_in_their_rows_and_are_no_queue_pairs() {
        let most = u32::MAX;
        for purpose in
            [Purpose::Receives { rank: most }, Purpose::Collectives { rank: most }, Purpose::Signals]
        {
            for is_gone in [false, true] {
                let words = Words { addr: u64::MAX - 1, len: 1, purpose, is_gone };
                assert_eq!(Words::unpack(words.pack()), Some(words));
                assert_eq!(Peer::unpack(words.pack()), None);
            }
        }
        assert_eq!(Words::unpack([0; FIELDS]), None);
    }

    #[test]
    fn words_are_found_until_they_are_dropped() {
        let memory = crate::memory::Memory::alloc(128).unwrap();
        let addr = memory.word32(0).unwrap().addr();
        let window = NamedWords::new(addr, 128, Purpose::Signals);
        let count = NamedWords::new(addr + 64, 4, Purpose::Receives { rank: 3 });
        let awaited = |addr, value| NamedWords::find(addr).map(|words| words.awaited(addr, value));
        assert_eq!(awaited(addr + 64, 7).unwrap(), "a receive of rank 3 (message 7)");
        assert_eq!(awaited(addr + 72, 7).unwrap(), "a signal at offset 72 of a window");
        drop(count);
        assert_eq!(awaited(addr + 64, 7).unwrap(), "a signal at offset 64 of a window");
        drop(window);
        assert_eq!(awaited(addr + 64, 7), None);
    }
}
