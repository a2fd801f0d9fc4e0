//! File descriptors between processes: memory files that cannot shrink, and messages that carry them.

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// The most descriptors of a message.
const MAX_FDS: usize = 2;
/// Room for the control message of that many, with some to notice when there are more.
const CONTROL: usize = 64;

/// The process at the other end and its effective user; its number is 0 where this process cannot see it.
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
    // SAFETY: pure arithmetic.
    let space = unsafe { libc::CMSG_SPACE(payload) } as usize;
    assert!(space <= CONTROL && fds.len() <= MAX_FDS, "the control buffer holds {MAX_FDS} descriptors");
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let message = header(&mut iov, &mut control, space);
    // SAFETY: the message points to a live control buffer.
    let first = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: the control buffer is aligned and large enough for one header, so that is where it is.
    let cmsg = unsafe { &mut *first };
    cmsg.cmsg_level = libc::SOL_SOCKET;
    cmsg.cmsg_type = libc::SCM_RIGHTS;
    // SAFETY: pure arithmetic.
    cmsg.cmsg_len = unsafe { libc::CMSG_LEN(payload) } as usize;
    // SAFETY: the header is valid.
    let data = unsafe { libc::CMSG_DATA(cmsg) };
    // SAFETY: `CMSG_SPACE` made room for the descriptors behind the header.
    unsafe { data.copy_from_nonoverlapping(fds.as_ptr().cast(), size_of_val(fds)) };
    // SAFETY: the message points to live buffers of the stated lengths.
    let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    match usize::try_from(sent) {
        Ok(n) if n == bytes.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Receives one message and its descriptors. More than fit are closed by the kernel, which fails the call.
pub(super) fn receive(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut control = Control([0; CONTROL]);
    let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut message = header(&mut iov, &mut control, CONTROL);
    // SAFETY: the message points to live buffers of the stated lengths.
    let got = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    let Ok(got) = usize::try_from(got) else { return Err(io::Error::last_os_error()) };
    let mut fds = Vec::new();
    // SAFETY: the kernel filled the control buffer in.
    let mut cmsg = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !cmsg.is_null() {
        // SAFETY: not null, so it points into the control buffer.
        let head = unsafe { cmsg.read() };
        if head.cmsg_level == libc::SOL_SOCKET && head.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: pure arithmetic.
            let data_len = head.cmsg_len.saturating_sub(unsafe { libc::CMSG_LEN(0) } as usize);
            // SAFETY: the header is valid.
            let data = unsafe { libc::CMSG_DATA(cmsg) }.cast::<RawFd>();
            for i in 0..data_len / size_of::<RawFd>() {
                // SAFETY: the kernel wrote that many descriptors.
                let slot = unsafe { data.add(i) };
                // SAFETY: as above, and `Control` aligns them.
                let raw = unsafe { slot.read() };
                // SAFETY: the kernel gave us this descriptor.
                fds.push(unsafe { OwnedFd::from_raw_fd(raw) });
            }
        }
        // SAFETY: both point to what the kernel filled in.
        cmsg = unsafe { libc::CMSG_NXTHDR(&raw const message, cmsg) };
    }
    if message.msg_flags & libc::MSG_CTRUNC != 0 || fds.len() > MAX_FDS {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors"));
    }
    Ok((got, fds))
}
