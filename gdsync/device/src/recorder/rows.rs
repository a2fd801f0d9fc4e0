//! The table of queue pairs with their peers, and of words that have a purpose.

use std::ops::Range;

use parking_lot::Mutex;

use super::layout::{self, ROW_WORDS, ROWS, TABLE_ROWS};
use super::ring::Recorder;
use super::{By, Event, Log, Queue, Stage, Traffic};
use crate::{Gid, QpAddress};
use gdsync_shm::seqlock;

/// Rows of the table.
#[derive(Default)]
pub(super) struct Rows {
    /// Whether each row that was ever used is in use.
    used: Vec<bool>,
    /// Where the search for a free row continues.
    next: usize,
    written: u64,
    /// Devices by number, the first one 1.
    devices: Vec<Gid>,
}

impl Rows {
    /// Number of a device. Devices beyond the 255th share a number.
    pub(super) fn device(&mut self, gid: Gid) -> u8 {
        let at = self.devices.iter().position(|&known| known == gid).unwrap_or_else(|| {
            self.devices.push(gid);
            self.devices.len() - 1
        });
        u8::try_from(at + 1).unwrap_or(u8::MAX)
    }

    /// Takes a row that was never used, or the one that was freed longest ago.
    fn take(&mut self) -> Option<usize> {
        if self.used.len() < TABLE_ROWS {
            self.used.push(true);
            return Some(self.used.len() - 1);
        }
        let at = (self.next..TABLE_ROWS).chain(0..self.next).find(|&at| !self.used[at])?;
        self.used[at] = true;
        self.next = (at + 1) % TABLE_ROWS;
        Some(at)
    }
}

/// Words of a row before its check.
pub(super) const FIELDS: usize = ROW_WORDS - 1;
/// Flags in the first word: the queue pair or the words are gone; the row is of words.
pub(super) const GONE: u64 = 1 << 63;
pub(super) const OF_WORDS: u64 = 1 << 61;

/// A row of the table, or of none: freed when it is dropped.
#[derive(Debug)]
pub(super) struct Row {
    log: Log,
    at: Option<usize>,
}

impl Row {
    pub(super) fn take(log: &Log) -> Self {
        let at = log.recorder().and_then(|recorder| recorder.rows.lock().take());
        Self { log: log.clone(), at }
    }

    pub(super) fn write(&self, fields: [u64; FIELDS]) {
        if let (Some(at), Some(recorder)) = (self.at, self.log.recorder())
            && recorder.is_of_this_process()
        {
            recorder.write_row(at, fields);
        }
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        if let (Some(at), Some(recorder)) = (self.at, self.log.recorder())
            && recorder.is_of_this_process()
        {
            recorder.rows.lock().used[at] = false;
        }
    }
}

/// A queue pair and its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The device, numbered from 1 in each process.
    pub device: u8,
    /// The queue pair, 24 bits.
    pub qpn: u32,
    /// GID of its HCA.
    pub gid: Gid,
    /// GID and queue pair number of the peer, once connected.
    pub remote: Option<(Gid, u32)>,
    /// Rank of the peer, if `gdsync-mp` created the queue pair, and what that is for.
    pub rank: Option<(u32, Traffic)>,
    /// It was destroyed.
    pub is_gone: bool,
}

impl Peer {
    fn pack(&self) -> [u64; FIELDS] {
        let [own, remote] = [self.gid, self.remote.map_or(Gid([0; 16]), |(gid, _)| gid)]
            .map(|gid| *gid.0.as_chunks::<8>().0.first_chunk().expect("16 bytes"));
        let [own, remote]: [[u64; 2]; 2] = [own, remote].map(|halves| halves.map(u64::from_ne_bytes));
        let flags = u64::from(self.remote.is_some()) << 62 | if self.is_gone { GONE } else { 0 };
        let rank = self.rank.map_or(0, |(rank, traffic)| u64::from(rank) << 8 | traffic as u64);
        let remote_qpn = self.remote.map_or(0, |(_, qpn)| qpn);
        let own_qp = u64::from(self.qpn) | u64::from(self.device) << 32;
        [own_qp | flags, rank, u64::from(remote_qpn), own[0], own[1], remote[0], remote[1]]
    }

    /// Unpacks a row, if it is one of a queue pair.
    pub fn unpack([head, rank, remote_qpn, o0, o1, r0, r1]: [u64; FIELDS]) -> Option<Self> {
        if head & OF_WORDS != 0 {
            return None;
        }
        let gid = |halves: [u64; 2]| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&halves[0].to_ne_bytes());
            bytes[8..].copy_from_slice(&halves[1].to_ne_bytes());
            Gid(bytes)
        };
        let [q0, q1, q2, q3, device, ..] = head.to_le_bytes();
        let qpn = u32::from_le_bytes([q0, q1, q2, q3]);
        let remote_qpn = u32::try_from(remote_qpn).ok()?;
        let [traffic, ..] = rank.to_le_bytes();
        let named = || Some((u32::try_from(rank >> 8).ok()?, Traffic::from_code(traffic)?));
        Some(Self {
            device,
            qpn,
            gid: gid([o0, o1]),
            remote: (head & 1 << 62 != 0).then_some((gid([r0, r1]), remote_qpn)),
            rank: if rank == 0 { None } else { Some(named()?) },
            is_gone: head & GONE != 0,
        })
    }
}

/// Records events of a queue pair.
#[derive(Debug)]
pub struct QpLog {
    log: Log,
    qpn: u32,
    row: Row,
    peer: Mutex<Peer>,
}

impl QpLog {
    /// A log of queue pair `qpn`; `log` must be of its device.
    pub fn new(log: Log, qpn: u32, gid: Gid) -> Self {
        let row = Row::take(&log);
        let peer = Peer { device: log.device(), qpn, gid, remote: None, rank: None, is_gone: false };
        let this = Self { log, qpn, row, peer: Mutex::new(peer) };
        this.change(|_| {});
        this
    }

    fn change(&self, change: impl FnOnce(&mut Peer)) {
        let mut peer = self.peer.lock();
        change(&mut peer);
        self.row.write(peer.pack());
    }

    /// The rank of the peer, if it was named, and what goes to it.
    pub fn rank(&self) -> Option<(u32, Traffic)> {
        self.peer.lock().rank
    }

    /// Records the connection.
    pub fn connected(&self, remote: QpAddress) {
        self.change(|peer| peer.remote = Some((remote.gid, remote.qpn)));
        self.note(Stage::Connected, Queue::None, By::Cpu, remote.qpn.into(), 0);
    }

    /// Records the ranks of this process and of the peer, and what goes between them.
    pub fn name(&self, own: u32, rank: u32, traffic: Traffic) {
        self.change(|peer| peer.rank = Some((rank, traffic)));
        if let Some(recorder) = self.log.recorder() {
            recorder.set_rank(own);
        }
    }

    /// Records a stage of a work request.
    #[inline]
    pub fn note(&self, stage: Stage, queue: Queue, by: By, number: u64, len: u32) {
        self.log.note(|| Event { len, ..Event::of(stage, queue, by, self.qpn, number) });
    }

    /// As [`QpLog::note`], one record for consecutive requests that are submitted to a stream.
    #[inline]
    pub fn note_in(&self, stage: Stage, queue: Queue, stream: u64, numbers: Range<u64>) {
        let (last, more) = (numbers.end - 1, numbers.end - 1 - numbers.start);
        // A queue has fewer than 2^32 entries.
        let len = u32::try_from(more).unwrap_or(u32::MAX);
        let event = || Event::of(stage, queue, By::Cpu, self.qpn, last);
        self.log.note(|| Event { stream: low16(stream), len, ..event() });
    }

    /// Records that a send of `len` bytes was prepared, and submitted if there is a stream. Returns false if the submission needs a record
    /// of its own, because the low 16 bits of the stream's number are 0.
    #[inline]
    pub fn note_prepared(&self, number: u64, len: u32, stream: Option<u64>) -> bool {
        let stream = low16(stream.unwrap_or(0));
        let event = || Event::of(Stage::Prepared, Queue::Send, By::Cpu, self.qpn, number);
        self.log.note(|| Event { stream, len, ..event() });
        stream != 0
    }
}

/// The recorded bits of a stream's number.
#[expect(clippy::cast_possible_truncation, reason = "a record has 16 bits for it")]
fn low16(stream: u64) -> u16 {
    stream as u16
}

impl Drop for QpLog {
    fn drop(&mut self) {
        self.change(|peer| peer.is_gone = true);
    }
}

impl Recorder {
    fn write_row(&self, row: usize, fields: [u64; FIELDS]) {
        let mut rows = self.rows.lock();
        rows.written += 1;
        let n = rows.written;
        let offset = ROWS + row * ROW_WORDS * 8;
        let words = self.memory.words64::<ROW_WORDS>(offset).expect("rows are in the table");
        let [a, b, c, d, e, f, g] = fields;
        seqlock::write(words, [a, b, c, d, e, f, g, layout::check(n)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_fit_in_their_rows() {
        let (gid, other) = (Gid::random().unwrap(), Gid::random().unwrap());
        for remote in [None, Some((other, 0xff_ffff)), Some((gid, 0))] {
            let ranks = [None, Some((0, Traffic::Messages)), Some((u32::MAX, Traffic::Announcements))];
            for (rank, is_gone) in ranks.into_iter().zip([true, false, true]) {
                let peer = Peer { device: 255, qpn: 0xff_ffff, gid, remote, rank, is_gone };
                assert_eq!(Peer::unpack(peer.pack()), Some(peer));
            }
        }
    }

    #[test]
    fn rows_are_used_again_when_there_are_no_more() {
        let mut rows = Rows::default();
        let (one, two) = (Gid::random().unwrap(), Gid::random().unwrap());
        assert_eq!([one, two, one].map(|gid| rows.device(gid)), [1, 2, 1]);
        for row in 0..TABLE_ROWS {
            assert_eq!(rows.take(), Some(row));
        }
        assert_eq!(rows.take(), None);
        for gone in [7, 900] {
            rows.used[gone] = false;
        }
        assert_eq!([rows.take(), rows.take(), rows.take()], [Some(7), Some(900), None]);
    }
}
