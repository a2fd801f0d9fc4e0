//! Passing file descriptors over Unix sockets.

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// Maximum descriptors per message.
const MAX_FDS: usize = 2;
/// Bytes for the control message, with room to detect excess descriptors.
const CONTROL: usize = 64;

/// PID and effective UID of the peer. The PID is 0 if not visible in this namespace.
pub(super) fn peer(stream: &UnixStream) -> io::Result<libc::ucred> {
    // SAFETY: the structure is plain old data, for which zero bytes are valid.
    let mut cred: libc::ucred = unsafe { zeroed() };
    let mut len = libc::socklen_t::try_from(size_of::<libc::ucred>()).expect("a small structure");
    let fd = stream.as_raw_fd();
    // SAFETY: `cred` and `len` are valid for writing and `len` says how much.
    let rc = unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut cred).cast(), &raw mut len)
    };
    if rc == 0 { Ok(cred) } else { Err(io::Error::last_os_error()) }
}

#[repr(C, align(8))]
struct Control([u8; CONTROL]);

fn header(iov: &mut libc::iovec, control: &mut Control, control_len: usize) -> libc::msghdr {
    // SAFETY: the structure is plain old data, for which zero bytes are valid.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = iov;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control_len;
    message
}

/// Sends `bytes` with one or two descriptors.
pub(super) fn send(stream: &UnixStream, bytes: &[u8], fds: &[RawFd]) -> io::Result<()> {
    let payload = u32::try_from(size_of_val(fds)).expect("two descriptors");
    let mut control = Control([0; CONTROL]);
    // SAFETY: `CMSG_SPACE` only computes.
    let space = unsafe { libc::CMSG_SPACE(payload) } as usize;
    assert!(space <= CONTROL && fds.len() <= MAX_FDS, "the control buffer holds {MAX_FDS} descriptors");
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let message = header(&mut iov, &mut control, space);
    // SAFETY: `message` points to `control`, which lives on this stack frame.
    let first = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: `control` is aligned to 8 and holds `space` bytes, so the first header is not null and lies in it.
    let cmsg = unsafe { &mut *first };
    cmsg.cmsg_level = libc::SOL_SOCKET;
    cmsg.cmsg_type = libc::SCM_RIGHTS;
    // SAFETY: `CMSG_LEN` only computes.
    cmsg.cmsg_len = unsafe { libc::CMSG_LEN(payload) } as usize;
    // SAFETY: `cmsg` is a valid header in `control`.
    let data = unsafe { libc::CMSG_DATA(cmsg) };
    // SAFETY: `CMSG_SPACE(payload)` bytes fit in `control`, so the descriptors fit behind the header.
    unsafe { data.copy_from_nonoverlapping(fds.as_ptr().cast(), size_of_val(fds)) };
    // SAFETY: the message points to live buffers of the stated lengths.
    let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    match usize::try_from(sent) {
        Ok(n) if n == bytes.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Receives one message and its descriptors. Fails if there are too many.
pub(super) fn receive(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut control = Control([0; CONTROL]);
    let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut message = header(&mut iov, &mut control, CONTROL);
    // SAFETY: the message points to live buffers of the stated lengths.
    let got = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    let Ok(got) = usize::try_from(got) else { return Err(io::Error::last_os_error()) };
    let mut fds = Vec::new();
    // SAFETY: `recvmsg` filled in the control buffer and its length.
    let mut cmsg = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !cmsg.is_null() {
        // SAFETY: `cmsg` is not null, so it points to a header in `control`.
        let head = unsafe { cmsg.read() };
        if head.cmsg_level == libc::SOL_SOCKET && head.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: `CMSG_LEN` only computes.
            let data_len = head.cmsg_len.saturating_sub(unsafe { libc::CMSG_LEN(0) } as usize);
            // SAFETY: `cmsg` is a valid header in `control`.
            let data = unsafe { libc::CMSG_DATA(cmsg) }.cast::<RawFd>();
            for i in 0..data_len / size_of::<RawFd>() {
                // SAFETY: `i` is below the number of descriptors in this message.
                let slot = unsafe { data.add(i) };
                // SAFETY: the kernel wrote a descriptor there; the alignment of `Control` aligns it.
                let raw = unsafe { slot.read() };
                // SAFETY: the kernel installed this descriptor for this message; nothing else owns it.
                fds.push(unsafe { OwnedFd::from_raw_fd(raw) });
            }
        }
        // SAFETY: `message` and `cmsg` are what `recvmsg` and `CMSG_FIRSTHDR` filled in.
        cmsg = unsafe { libc::CMSG_NXTHDR(&raw const message, cmsg) };
    }
    if message.msg_flags & libc::MSG_CTRUNC != 0 || fds.len() > MAX_FDS {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors"));
    }
    Ok((got, fds))
}
