//! The kernel module's file in the hands of another process.

use std::ffi::c_void;
use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use gdrcopy::{BackendKind, Gdr};

use super::basic::PAGE;
use super::case::{Env, Outcome, ensure, fail, waive};
use super::fork::{fork, receive, send};

/// `GDRDRV_IOC_PIN_BUFFER` of gdrcopy's `gdrdrv.h` (v2.6): type 0xDA, number 1, 40 bytes both ways.
const PIN_BUFFER: u32 = 0xC028_DA01;
/// The module's count of pins, there only if it was loaded with `dbg_enabled=1`.
const PINS: &str = "/proc/driver/gdrdrv/nv_get_pages_refcount";

/// The descriptor of the kernel module's file; waives the case where the backend has none.
fn descriptor(gdr: &Gdr) -> Outcome<RawFd> {
    if gdr.backend() != BackendKind::Gdrdrv {
        return waive(format_args!("the {} backend has no file of the gdrdrv module", gdr.backend()));
    }
    for entry in fs::read_dir("/proc/self/fd")? {
        let path = entry?.path();
        if fs::read_link(&path).is_ok_and(|target| target.as_os_str() == "/dev/gdrdrv") {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            return Ok(name.parse()?);
        }
    }
    fail("no descriptor of /dev/gdrdrv is open")
}

/// A descriptor that came by a socket cannot pin.
pub(super) fn pin_by_shared(env: &Env) -> Outcome {
    shared(env, |fd| {
        // Address, size, token, address space, handle: see section 2 of the module's header.
        let mut request = [0x7f00_0000_0000_u64, PAGE as u64, 0, 0, 0];
        let arg = request.as_mut_ptr().cast::<c_void>();
        // SAFETY: the request is as long as its code says.
        let rc = unsafe { libc::ioctl(fd.as_raw_fd(), PIN_BUFFER.into(), arg) };
        denied("a pin", rc == 0)
    })
}

/// Nor can it map what its owner has pinned.
pub(super) fn map_by_shared(env: &Env) -> Outcome {
    shared(env, |fd| {
        let (prot, null) = (libc::PROT_READ | libc::PROT_WRITE, std::ptr::null_mut());
        // The handle of a file's first pin is 0, and so is its offset.
        // SAFETY: an address that the kernel chooses touches no existing memory.
        let raw = unsafe { libc::mmap(null, PAGE, prot, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        denied("a mapping", raw != libc::MAP_FAILED)
    })
}

fn denied(what: &str, done: bool) -> Outcome {
    let error = io::Error::last_os_error();
    ensure!(!done, "{what} by another process's descriptor succeeded");
    ensure!(error.raw_os_error() == Some(libc::EACCES), "{what} was refused with {error}, expected EACCES");
    Ok(())
}

fn shared(env: &Env, attempt: impl FnOnce(OwnedFd) -> Outcome) -> Outcome {
    let child = fork(|parent| {
        let fd = receive_descriptor(&parent)?;
        attempt(fd)
    })?;
    let (gdr, buffer) = env.open_with(PAGE)?;
    let fd = descriptor(&gdr)?;
    let pin = buffer.pin()?;
    send_descriptor(&child.stream, fd)?;
    child.join()?;
    pin.map()?;
    Ok(())
}

/// A module must let pins go when the last process that holds its file ends, whoever that is.
pub(super) fn leak_over_fork(env: &Env) -> Outcome {
    let pins = || -> Outcome<i64> { Ok(fs::read_to_string(PINS)?.trim().parse()?) };
    if let Err(error) = fs::metadata(PINS) {
        return waive(format_args!(
            "{PINS}: {error}; load gdrdrv 2.5 or newer with dbg_enabled=1, and be root"
        ));
    }
    if pins()? != 0 {
        return waive("other programs have pinned memory");
    }
    let gdr = env.open()?;
    let fd = descriptor(&gdr)?;
    let child = fork(|parent| receive(&parent).map(drop))?;
    let buffer = env.alloc(&gdr, PAGE)?;
    let pin = buffer.pin()?;
    ensure!(pins()? > 0, "a pin is not counted");
    // As if the process had been careless: the file is closed under its owner.
    std::mem::forget((pin, gdr));
    // SAFETY: nothing uses the descriptor any more; its owner was forgotten.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    send(&child.stream, 1)?;
    child.join()?;
    let left = pins()?;
    ensure!(left == 0, "{left} pins are left after all processes closed the file");
    Ok(())
}

/// Room for the control message of one descriptor, aligned as its header.
#[repr(C, align(8))]
struct Control([u8; 32]);

fn message(control: &mut Control, iov: *mut libc::iovec) -> libc::msghdr {
    // SAFETY: the structure is plain old data, for which zero bytes are valid.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = iov;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: pure arithmetic.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as usize;
    message
}

fn send_descriptor(stream: &UnixStream, fd: RawFd) -> Outcome {
    let (mut control, mut byte) = (Control([0; 32]), IoSlice::new(&[1]));
    let message = message(&mut control, (&raw mut byte).cast());
    // SAFETY: the message has a control buffer with room for a header.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: pure arithmetic.
    let cmsg_len = unsafe { libc::CMSG_LEN(4) } as usize;
    let (cmsg_level, cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
    // SAFETY: the header lies in the control buffer, which is aligned for it.
    unsafe { header.write(libc::cmsghdr { cmsg_len, cmsg_level, cmsg_type }) };
    // SAFETY: the header is valid.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: the control buffer has room for a descriptor behind the header.
    unsafe { data.cast::<RawFd>().write_unaligned(fd) };
    // SAFETY: the message points to live buffers.
    match unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) } {
        1 => Ok(()),
        _ => Err(io::Error::last_os_error().into()),
    }
}

fn receive_descriptor(stream: &UnixStream) -> Outcome<OwnedFd> {
    let (mut control, mut bytes) = (Control([0; 32]), [0]);
    let mut byte = IoSliceMut::new(&mut bytes);
    let mut message = message(&mut control, (&raw mut byte).cast());
    // SAFETY: the message points to live buffers.
    if unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error().into());
    }
    // SAFETY: the kernel has filled in the control buffer.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    if header.is_null() {
        return waive("the backend has no file of the gdrdrv module to send");
    }
    // SAFETY: the header is valid.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: the sender put one descriptor there.
    let fd = unsafe { data.cast::<RawFd>().read_unaligned() };
    // SAFETY: the kernel gave it to this process.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
