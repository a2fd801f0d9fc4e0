//! Packet format between software HCAs: InfiniBand RC transport with larger packets.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::wire::HEADER;
pub(crate) use crate::wire::{FAR_SEGMENT, SEGMENT};
use gdsync_device::copy_engine::{Handle, ProcessId, Source, nonce, this_process};
use gdsync_device::fork_guard::PerProcess;
use gdsync_device::memory::{MARK, Memory, Process, WeakMemory};

/// Packet opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct PacketOp(pub(crate) u8);

impl PacketOp {
    pub(crate) const SEND: Self = Self(1);
    /// Extension header: remote address.
    pub(crate) const WRITE: Self = Self(2);
    /// Extension header: remote address. `len` is the number of bytes requested.
    pub(crate) const READ: Self = Self(3);
    /// Extension header: remote address, compare, swap, the masks of both. `len` is the size of the word, as for FETCH_ADD.
    pub(crate) const COMPARE_SWAP: Self = Self(4);
    /// Extension header: remote address, addend, field boundaries, 0, 0.
    pub(crate) const FETCH_ADD: Self = Self(5);
    /// Acknowledges all packets up to `psn`.
    pub(crate) const ACK: Self = Self(6);
    /// Negative acknowledgement of packet `psn`; `code` is the reason.
    pub(crate) const NAK: Self = Self(7);
    pub(crate) const READ_RESPONSE: Self = Self(8);
    /// Extension header: the old value. One of 4 bytes is in network order, as cards return it.
    pub(crate) const ATOMIC_RESPONSE: Self = Self(9);
    /// The receiver is still copying the payload that packet `psn` references.
    pub(crate) const COPYING: Self = Self(10);
    /// Withdraws all unacknowledged references: their bytes may change, so they must not complete. `psn` is the first
    /// of the connection.
    pub(crate) const WITHDRAW: Self = Self(11);
    /// Revokes all references in READ responses: a region was deregistered or the queue pair ends, so the bytes may
    /// change. The requester asks again.
    pub(crate) const REVOKE: Self = Self(12);
    /// To a datagram queue pair. Extension header: the GRH. `rkey` is the Q_Key; `psn` holds LID (bits 0 to 15) and service
    /// level of the sender.
    pub(crate) const DATAGRAM: Self = Self(13);
}

pub(crate) const FIRST: u8 = 1;
pub(crate) const LAST: u8 = 2;
pub(crate) const IMM: u8 = 4;
pub(crate) const SOLICITED: u8 = 8;
/// The body ends in a reference to the payload instead of its `len` bytes. Such a message or READ response has one packet.
/// In a READ: the response may be a reference.
pub(crate) const REFERENCE: u8 = 16;

/// A message without payload: its `len` bytes are in the receive already. It has one packet.
pub(crate) const PLACED: u8 = 64;

/// The GRH of the datagram counts.
pub(crate) const GRH: u8 = 32;

/// NAK code: packets before the received one were lost; `psn` is the expected one.
pub(crate) const NAK_SEQUENCE: u8 = 0;
/// NAK code: receiver not ready; `len` is the RNR timer code. Codes not listed here are requester syndromes.
pub(crate) const NAK_RNR: u8 = 1;
/// NAK code: the receiver cannot follow the reference in `psn`; the requester sends the bytes. No syndrome has this
/// number.
pub(crate) const NAK_REFERENCE: u8 = 0xfe;

/// Packet header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) op: PacketOp,
    pub(crate) flags: u8,
    pub(crate) code: u8,
    /// Destination QPN; `src` is the source QPN.
    pub(crate) dst: u32,
    pub(crate) src: u32,
    pub(crate) psn: u32,
    pub(crate) len: u32,
    pub(crate) imm: u32,
    pub(crate) rkey: u32,
}

impl Header {
    pub(crate) fn new(op: PacketOp, dst: u32, src: u32, psn: u32) -> Self {
        Self { op, flags: 0, code: 0, dst, src, psn, len: 0, imm: 0, rkey: 0 }
    }

    pub(crate) fn is_response(&self) -> bool {
        (PacketOp::ACK.0..=PacketOp::COPYING.0).contains(&self.op.0) || self.op == PacketOp::REVOKE
    }

    pub(crate) fn to_bytes(self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[..4].copy_from_slice(&[self.op.0, self.flags, self.code, 0]);
        let words = [self.dst, self.src, self.psn, self.len, self.imm, self.rkey];
        for (slot, word) in out[4..].as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *slot = word.to_le_bytes();
        }
        out
    }

    pub(crate) fn from_bytes(bytes: &[u8; HEADER]) -> Self {
        let word = |i: usize| u32::from_le_bytes(bytes.as_chunks::<4>().0[i]);
        let [op, flags, code, _] = bytes.as_chunks::<4>().0[0];
        Self {
            op: PacketOp(op),
            flags,
            code,
            dst: word(1),
            src: word(2),
            psn: word(3),
            len: word(4),
            imm: word(5),
            rkey: word(6),
        }
    }
}

/// Number of packets of at most `segment` bytes for `len` bytes, at least one.
pub(crate) fn segments(len: usize, segment: usize) -> u32 {
    u32::try_from(len.div_ceil(segment).max(1)).expect("messages are at most 1 GiB")
}

/// Signed distance from `from` to `psn`; negative if `psn` is older.
pub(crate) fn ahead(psn: u32, from: u32) -> i32 {
    psn.wrapping_sub(from).cast_signed()
}

/// Bytes of an encoded reference.
pub(super) const REFERENCE_BYTES: usize = 112;

/// Exported memory of this process, by token. Process-wide, because HCAs of one process reference each other's memory.
static EXPORTS: PerProcess<Mutex<BTreeMap<u64, WeakMemory>>> = PerProcess::new();

/// Token of references to host memory.
const HOST: u64 = 0;

/// Keeps a memory region in the export table until dropped.
#[derive(Debug)]
pub(crate) struct Export {
    token: u64,
    handle: Handle,
}

impl Export {
    pub(crate) fn new(memory: &Memory, handle: Handle) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let token = NEXT.fetch_add(1, Ordering::Relaxed);
        EXPORTS.get().lock().insert(token, memory.downgrade());
        Arc::new(Self { token, handle })
    }

    /// Reference to the bytes from `at` on.
    pub(super) fn reference(&self, at: usize) -> Reference {
        Reference { process: this_process(), token: self.token, at: at as u64, handle: self.handle }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        EXPORTS.get().lock().remove(&self.token);
    }
}

/// Reference to bytes of a region, as encoded in a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reference {
    process: ProcessId,
    token: u64,
    /// Offset in the region.
    at: u64,
    handle: Handle,
}

impl Reference {
    /// References host memory of this process. Peers that do not know this token fail to open it and send a NAK.
    pub(super) fn to_host(addr: u64) -> Self {
        let handle = Handle { ipc: [0; 64], buffer: nonce().as_ptr().addr() as u64, offset: 0 };
        Self { process: this_process(), token: HOST, at: addr, handle }
    }

    pub(super) fn is_to_host(&self) -> bool {
        self.token == HOST
    }

    /// The process, known here as `pid`, and the address in it. `None` unless it references host memory.
    pub(super) fn in_process(&self, pid: libc::pid_t) -> Option<(Process, u64)> {
        let [_, _, _, _, mark @ ..] = self.process;
        let mark_at = self.handle.buffer.checked_add((16 - MARK) as u64)?;
        self.is_to_host().then_some((Process { pid, mark, mark_at }, self.at))
    }

    pub(super) fn process(&self) -> ProcessId {
        self.process
    }

    pub(super) fn to_bytes(self) -> [u8; REFERENCE_BYTES] {
        let mut out = [0; REFERENCE_BYTES];
        out[..16].copy_from_slice(&self.process);
        let words = [self.token, self.at, self.handle.buffer, self.handle.offset];
        for (slot, word) in out[16..48].as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *slot = word.to_le_bytes();
        }
        out[48..].copy_from_slice(&self.handle.ipc);
        out
    }

    pub(super) fn from_bytes(bytes: &[u8; REFERENCE_BYTES]) -> Self {
        let word = |i: usize| u64::from_le_bytes(bytes[16..48].as_chunks::<8>().0[i]);
        let mut process = [0; 16];
        process.copy_from_slice(&bytes[..16]);
        let mut ipc = [0; 64];
        ipc.copy_from_slice(&bytes[48..]);
        let handle = Handle { ipc, buffer: word(2), offset: word(3) };
        Self { process, token: word(0), at: word(1), handle }
    }

    /// Source of `len` bytes after skipping `skip`. `None` if the memory is gone or cannot be opened.
    pub(super) fn source(&self, skip: usize, len: usize) -> Option<Source> {
        let at = self.at.checked_add(skip as u64)?;
        if self.process == this_process() {
            let memory = EXPORTS.get().lock().get(&self.token)?.upgrade()?;
            let at = usize::try_from(at).ok()?;
            return memory.slice(at, len).ok().map(|memory| Source::Here(memory, 0));
        }
        let can_open = self.handle.ipc != [0; 64];
        can_open.then_some(Source::Peer { process: self.process, handle: self.handle, at })
    }
}

#[cfg(test)]
mod tests {
    use gdsync_testkit::process::{End, in_child};

    use super::*;

    #[test]
    fn header_round_trip() {
        let header = Header {
            op: PacketOp::WRITE,
            flags: FIRST | IMM,
            code: 0x13,
            dst: 0x123456,
            src: 0xabcdef,
            psn: u32::MAX,
            len: 77,
            imm: 0xdead_beef,
            rkey: 0x1234_5678,
        };
        assert_eq!(Header::from_bytes(&header.to_bytes()), header);
    }

    #[test]
    fn psn_arithmetic_wraps() {
        assert_eq!(ahead(1, u32::MAX), 2);
        assert_eq!(ahead(u32::MAX, 1), -2);
        assert_eq!([0, 1, SEGMENT, SEGMENT + 1].map(|len| segments(len, SEGMENT)), [1, 1, 1, 2]);
    }

    const HANDLE: Handle = Handle { ipc: [7; 64], buffer: 8, offset: 9 };

    #[test]
    fn reference_round_trip() {
        let reference = Reference { process: [3; 16], token: 4, at: 5, handle: HANDLE };
        assert_eq!(Reference::from_bytes(&reference.to_bytes()), reference);
        assert!(matches!(
            reference.source(10, 1),
            Some(Source::Peer { process: [3, ..], handle: HANDLE, at: 15 })
        ));
        let closed = Handle { ipc: [0; 64], ..HANDLE };
        assert!(Reference { handle: closed, ..reference }.source(0, 1).is_none());
        assert!(Reference { at: u64::MAX, ..reference }.source(1, 1).is_none());
    }

    #[test]
    fn host_reference_is_readable_by_cma() {
        let memory = Memory::alloc(100).unwrap();
        memory.write(0, &[7; 100]).unwrap();
        let reference = Reference::to_host(memory.host_addr(10).unwrap());
        let reference = Reference::from_bytes(&reference.to_bytes());
        let pid = libc::pid_t::try_from(std::process::id()).unwrap();
        let (process, at) = reference.in_process(pid).unwrap();
        let copy = Memory::alloc(90).unwrap();
        copy.read_from_process(0, 90, &process, at).unwrap();
        assert_eq!(copy.to_vec(), [7; 90]);
        assert!(reference.source(0, 1).is_none(), "copy engines do not take host references");
        assert!(Reference { token: 1, ..reference }.in_process(pid).is_none());
    }

    #[test]
    fn a_forked_child_references_memory_while_its_parent_exports() {
        let _held = EXPORTS.get().lock();
        let memory = Memory::alloc(100).unwrap();
        let exports = || Export::new(&memory, HANDLE).reference(0).source(0, 100).is_some();
        assert_eq!(in_child(exports), End::Said(true));
    }

    #[test]
    fn local_reference_is_valid_while_exported_and_alive() {
        let memory = Memory::alloc(100).unwrap();
        let export = Export::new(&memory, HANDLE);
        let reference = export.reference(10);
        let Some(Source::Here(found, 0)) = reference.source(20, 70) else { panic!("not found") };
        assert_eq!((found.addr(), found.len()), (memory.addr() + 30, 70));
        assert!(reference.source(20, 71).is_none(), "past the end");
        drop((memory, found));
        assert!(reference.source(0, 1).is_none(), "freed");
        let memory = Memory::alloc(100).unwrap();
        let export = Export::new(&memory, HANDLE);
        let reference = export.reference(0);
        drop(export);
        assert!(reference.source(0, 1).is_none(), "no longer exported");
    }
}
