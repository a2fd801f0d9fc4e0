//! Whose pins and mappings they are: children, other processes, and the last to close.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::rig::{Machine, Map, Memory, Raw, counter};
use crate::rig::{End, in_child};
use gdsync_testkit::kmod::{self, CHUNK};

const SIZE: u64 = 3 * CHUNK;

/// Every request, and a mapping.
fn everything_is_refused(raw: &Raw, handle: u64, va: u64) -> bool {
    let no = Err(libc::EACCES);
    raw.pin(va, CHUNK) == Err(libc::EACCES)
        && raw.pin_v1(va, CHUNK) == Err(libc::EACCES)
        && raw.unpin(handle) == no
        && raw.info(handle).map(drop) == no
        && raw.flag(handle).map(drop) == no
        && raw.attribute(1).map(drop) == no
        && raw.map(handle, CHUNK).map(drop) == no
}

#[test]
fn a_child_has_neither_mapping_nor_access() {
    let Some(_machine) = Machine::new() else { return };
    let (raw, memory) = (Raw::open(), Memory::new(SIZE));
    let handle = raw.pin(memory.va, SIZE).unwrap();
    let map = raw.map(handle, SIZE).unwrap();
    map.store(0, 1);
    assert_eq!(in_child(|| everything_is_refused(&raw, handle, memory.va)), End::Said(true));
    assert_eq!(in_child(|| map.load(0) == 1), End::Killed(libc::SIGSEGV));
    // What the child opens itself is its own.
    let end = in_child(|| {
        let (raw, memory) = (Raw::open(), Memory::new(SIZE));
        let Ok(handle) = raw.pin(memory.va, SIZE) else { return false };
        let Ok(map) = raw.map(handle, SIZE) else { return false };
        map.store(0, 2);
        memory.read(0, 1) == [2] && raw.unpin(handle).is_ok()
    });
    assert_eq!(end, End::Said(true));
    assert_eq!((map.load(0), memory.read(0, 1)), (1, vec![1]));
    raw.unpin(handle).unwrap();
}

#[test]
fn another_processs_memory_is_not_pinned() {
    let Some(_machine) = Machine::new() else { return };
    let memory = Memory::new(SIZE);
    assert_eq!(in_child(|| Raw::open().pin(memory.va, SIZE) == Err(libc::EINVAL)), End::Said(true));
}

/// Passes a descriptor as programs do that share them.
fn send(socket: &UnixStream, fd: i32) -> bool {
    let (mut byte, mut control) = ([0_u8], [0_u64; 8]);
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: plain integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    // SAFETY: a pure function.
    let (space, length) = (unsafe { libc::CMSG_SPACE(4) }, unsafe { libc::CMSG_LEN(4) });
    (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), space as usize);
    // SAFETY: there is room for one header.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: as above, and nobody else knows of it.
    let header = unsafe { &mut *header };
    (header.cmsg_level, header.cmsg_type, header.cmsg_len) =
        (libc::SOL_SOCKET, libc::SCM_RIGHTS, length as usize);
    // SAFETY: and behind it for a descriptor.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: as above.
    unsafe { data.cast::<i32>().write_unaligned(fd) };
    // SAFETY: a message whose parts live.
    unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, 0) == 1 }
}

fn receive(socket: &UnixStream) -> OwnedFd {
    let (mut byte, mut control) = ([0_u8], [0_u64; 8]);
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: plain integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
    // SAFETY: a message whose parts live.
    assert_eq!(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) }, 1);
    // SAFETY: the kernel filled it in.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    assert!(!header.is_null());
    // SAFETY: a header of this message.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: the descriptor lies behind it.
    let fd = unsafe { data.cast::<i32>().read_unaligned() };
    // SAFETY: a new descriptor of this process.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[test]
fn a_descriptor_that_is_passed_on_serves_nobody_else() {
    let Some(_machine) = Machine::new() else { return };
    let memory = Memory::new(SIZE);
    let (here, there) = UnixStream::pair().unwrap();
    // From a child that opened it, with a pin in it, to this process.
    let end = in_child(|| {
        let (raw, memory) = (Raw::open(), Memory::new(SIZE));
        raw.pin(memory.va, SIZE).is_ok() && send(&there, raw.0.as_raw_fd())
    });
    assert_eq!(end, End::Said(true));
    let fd = receive(&here);
    let raw = Raw(fd);
    // The child has ended, its number may be given to others: they are not it.
    assert!(everything_is_refused(&raw, 0, memory.va));
    for _ in 0..20 {
        assert_eq!(in_child(|| everything_is_refused(&raw, 0, memory.va)), End::Said(true));
    }
    // Persistent pins of the dead live on until the last descriptor is closed, by whomever.
    assert_eq!(counter("pins"), 1);
    drop(raw);
    assert_eq!(counter("pins"), 0);
    assert_eq!(kmod::state().unwrap().pins, 0);
}

#[test]
fn the_last_to_close_may_be_a_child() {
    let Some(_machine) = Machine::new() else { return };
    let memory = Memory::new(SIZE);
    let (here, there) = UnixStream::pair().unwrap();
    let raw = Raw::open();
    raw.pin(memory.va, SIZE).unwrap();
    let child = Raw::borrowed(raw.0.as_fd());
    // SAFETY: the child waits for a byte and leaves.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(here);
        std::io::Read::read_exact(&mut &there, &mut [0]).ok();
        // SAFETY: ends this process.
        unsafe { libc::_exit(0) };
    }
    drop((raw, child));
    assert_eq!(counter("pins"), 1);
    std::io::Write::write_all(&mut &here, &[1]).unwrap();
    let mut status = 0;
    // SAFETY: a place for the status of the child above.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    let deadline = Instant::now() + Duration::from_secs(20);
    while counter("pins") != 0 {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
}

/// Processes that die with everything open, in either order of closing.
#[test]
fn a_process_that_dies_leaves_nothing() {
    let Some(_machine) = Machine::new() else { return };
    for device_first in [true, false] {
        let end = in_child(|| {
            let open = || (Raw::open(), Memory::new(SIZE));
            let (raw, memory) = if device_first {
                open()
            } else {
                let memory = Memory::new(SIZE);
                (Raw::open(), memory)
            };
            let mut maps: Vec<Map> = Vec::new();
            for _ in 0..10 {
                let Ok(handle) = raw.pin(memory.va, SIZE) else { return false };
                let Ok(map) = raw.map(handle, SIZE) else { return false };
                map.store(0, 1);
                maps.push(map);
            }
            // SAFETY: ends this process.
            unsafe { libc::raise(libc::SIGKILL) };
            false
        });
        assert_eq!(end, End::Killed(libc::SIGKILL));
        assert_eq!(kmod::state().unwrap().pins, 0);
        assert_eq!(counter("mappings"), 0);
    }
}
