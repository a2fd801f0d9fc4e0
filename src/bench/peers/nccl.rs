//! NCCL: send and recv, and put with signal where the version has it.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::rc::Rc;

use gdasync::declare;
use gdasync::library::{checked, load};
use gdasync::results::Result;

use super::{Rig, Way};

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// `ncclWaitSignalDesc_t`.
#[repr(C)]
struct WaitSignal {
    count: c_int,
    peer: c_int,
    signal: c_int,
    context: c_int,
}

/// `ncclChar`.
const CHAR: c_int = 0;
/// `NCCL_WIN_COLL_SYMMETRIC`.
const SYMMETRIC: c_int = 1;

/// `ncclComm_t`, `ncclWindow_t` and `cudaStream_t`.
type Pointer = *mut c_void;

declare! {
    /// What every version has.
    struct Functions {
        version: "ncclGetVersion" (version: *mut c_int) -> c_int;
        unique_id: "ncclGetUniqueId" (id: *mut UniqueId) -> c_int;
        init_rank: "ncclCommInitRank" (comm: *mut Pointer, size: c_int, id: UniqueId, rank: c_int) -> c_int;
        destroy: "ncclCommDestroy" (comm: Pointer) -> c_int;
        alloc: "ncclMemAlloc" (address: *mut Pointer, bytes: usize) -> c_int;
        send: "ncclSend"
            (from: Pointer, count: usize, kind: c_int, peer: c_int, comm: Pointer, stream: Pointer) -> c_int;
        recv: "ncclRecv"
            (to: Pointer, count: usize, kind: c_int, peer: c_int, comm: Pointer, stream: Pointer) -> c_int;
    }
}

declare! {
    /// Puts and signals.
    struct Puts {
        register: "ncclCommWindowRegister"
            (comm: Pointer, address: Pointer, bytes: usize, window: *mut Pointer, flags: c_int) -> c_int;
        put_signal: "ncclPutSignal"
            (from: Pointer, count: usize, kind: c_int, peer: c_int, window: Pointer, offset: usize, signal: c_int,
             context: c_int, flags: u32, comm: Pointer, stream: Pointer) -> c_int;
        wait_signal: "ncclWaitSignal"
            (count: c_int, signals: *mut WaitSignal, comm: Pointer, stream: Pointer) -> c_int;
    }
}

/// A communicator of both ranks, and memory that it has allocated.
struct Nccl<'a> {
    functions: Functions,
    comm: Pointer,
    rig: Rig<'a>,
    buffer: Pointer,
    peer: c_int,
}

/// Opens the library at both ranks: its version, and what it can do.
pub(super) fn open<'a>(name: &str, rig: Rig<'a>) -> Result<(String, Vec<Box<dyn Way + 'a>>)> {
    let library = load(name)?;
    // SAFETY: the types are those of nccl.h.
    let functions = unsafe { Functions::find(library) }?;
    let (mut version, mut id) = (0, UniqueId([0; 128]));
    // SAFETY: a place for the answer.
    checked("ncclGetVersion", unsafe { (functions.version)(&mut version) })?;
    if rig.comm.rank() == 0 {
        // SAFETY: a place for the answer.
        checked("ncclGetUniqueId", unsafe { (functions.unique_id)(&mut id) })?;
    }
    let id = UniqueId(rig.of_first(id.0)?);
    let (mut comm, mut buffer) = (null_mut(), null_mut());
    let rank = c_int::try_from(rig.comm.rank())?;
    // SAFETY: a place for the answer; both ranks call it.
    checked("ncclCommInitRank", unsafe { (functions.init_rank)(&mut comm, 2, id, rank) })?;
    // SAFETY: a place for the answer.
    checked("ncclMemAlloc", unsafe { (functions.alloc)(&mut buffer, 2 * rig.room) })?;
    let nccl = Nccl { functions, comm, rig, buffer, peer: 1 - rank };
    let nccl = Rc::new(nccl);
    let mut ways: Vec<Box<dyn Way + 'a>> = vec![Box::new(SendRecv(nccl.clone()))];
    // SAFETY: the types are those of nccl.h.
    if let Ok(puts) = unsafe { Puts::find(library) } {
        let mut window = null_mut();
        // SAFETY: memory of the library of this length, and a place for the answer; both ranks call it.
        let told = unsafe { (puts.register)(comm, buffer, 2 * rig.room, &mut window, SYMMETRIC) };
        checked("ncclCommWindowRegister", told)?;
        ways.push(Box::new(PutSignal { nccl, puts, window }));
    }
    let version = format!("NCCL {}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
    Ok((version, ways))
}

/// `ncclSend` and `ncclRecv`.
struct SendRecv<'a>(Rc<Nccl<'a>>);

impl Way for SendRecv<'_> {
    fn name(&self) -> String {
        "NCCL send and recv".into()
    }

    fn buffer(&self) -> u64 {
        self.0.buffer.addr() as u64
    }

    fn received(&self) -> u64 {
        self.buffer() + self.0.rig.room as u64
    }

    fn send(&self, bytes: usize, _n: u64) -> Result<()> {
        let nccl = &self.0;
        // SAFETY: the first part of the buffer, and a communicator and a stream that live.
        let told = unsafe {
            (nccl.functions.send)(nccl.buffer, bytes, CHAR, nccl.peer, nccl.comm, nccl.rig.stream())
        };
        Ok(checked("ncclSend", told)?)
    }

    fn receive(&self, bytes: usize, _n: u64) -> Result<()> {
        let nccl = &self.0;
        let to = nccl.buffer.wrapping_byte_add(nccl.rig.room);
        // SAFETY: the second part of the buffer, and a communicator and a stream that live.
        let told = unsafe { (nccl.functions.recv)(to, bytes, CHAR, nccl.peer, nccl.comm, nccl.rig.stream()) };
        Ok(checked("ncclRecv", told)?)
    }

    fn close(&self) -> Result<()> {
        // SAFETY: the communicator lives, and nothing uses it any more; both ranks call it.
        Ok(checked("ncclCommDestroy", unsafe { (self.0.functions.destroy)(self.0.comm) })?)
    }
}

/// `ncclPutSignal` and `ncclWaitSignal`.
struct PutSignal<'a> {
    nccl: Rc<Nccl<'a>>,
    puts: Puts,
    window: Pointer,
}

impl Way for PutSignal<'_> {
    fn name(&self) -> String {
        "NCCL put and signal".into()
    }

    fn buffer(&self) -> u64 {
        self.nccl.buffer.addr() as u64
    }

    fn received(&self) -> u64 {
        self.buffer() + self.nccl.rig.room as u64
    }

    fn send(&self, bytes: usize, _n: u64) -> Result<()> {
        let nccl = &*self.nccl;
        let (peer, window, offset) = (nccl.peer, self.window, nccl.rig.room);
        // SAFETY: the first part of the buffer, the second of the other rank's, and a communicator and a stream that live.
        let told = unsafe {
            (self.puts.put_signal)(
                nccl.buffer,
                bytes,
                CHAR,
                peer,
                window,
                offset,
                0,
                0,
                0,
                nccl.comm,
                nccl.rig.stream(),
            )
        };
        Ok(checked("ncclPutSignal", told)?)
    }

    fn receive(&self, _bytes: usize, _n: u64) -> Result<()> {
        let mut signal = WaitSignal { count: 1, peer: self.nccl.peer, signal: 0, context: 0 };
        // SAFETY: one description, and a communicator and a stream that live.
        let told = unsafe { (self.puts.wait_signal)(1, &mut signal, self.nccl.comm, self.nccl.rig.stream()) };
        Ok(checked("ncclWaitSignal", told)?)
    }
}
