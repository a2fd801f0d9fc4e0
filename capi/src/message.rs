//! Messages, with tags and without.

use std::ffi::c_int;
use std::sync::Arc;

use mp::tagged::{Source, Tag, Tagged};

use crate::abi::{Raw, gda_buf};
use crate::comm::Comm;
use crate::guard::{Error, Result, invalid, non_null, rank, status};
use crate::memory::Buffers;
use crate::request::{Request, give, give_send};
use crate::stream::on;

/// See the header.
///
/// # Safety
/// `bufs` must be null or valid for `n` buffers; `req` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_send(
    comm: Raw,
    to: c_int,
    bufs: *const gda_buf,
    n: c_int,
    stream: Raw,
    req: *mut Raw,
) -> c_int {
    status("gda_send", || {
        // SAFETY: the caller vouches for the buffers.
        let buffers = unsafe { Buffers::of(comm, bufs, n) }?;
        let (comm, pieces) = (buffers.comm(), buffers.pieces()?);
        let sent = match stream {
            0 => comm.comm.isend_vectored(&pieces, rank(to)?)?,
            _ => on(stream, |batch| Ok(comm.comm.isend_vectored_in_batch(batch, &pieces, rank(to)?)?))?,
        };
        give_send(req, sent, comm)
    })
}

/// See the header.
///
/// # Safety
/// `bufs` must be null or valid for `n` buffers; `req` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_recv(
    comm: Raw,
    from: c_int,
    bufs: *const gda_buf,
    n: c_int,
    stream: Raw,
    req: *mut Raw,
) -> c_int {
    status("gda_recv", || {
        // SAFETY: the caller vouches for the buffers.
        let buffers = unsafe { Buffers::of(comm, bufs, n) }?;
        let (comm, pieces) = (buffers.comm(), buffers.pieces()?);
        if from == ANY_RANK {
            return Err(invalid(
                "the rank",
                "GDA_ANY_RANK",
                "one of the communicator; gda_trecv receives from any",
            ));
        }
        let received = match stream {
            0 => comm.comm.irecv_vectored(&pieces, rank(from)?)?,
            _ => on(stream, |batch| Ok(comm.comm.irecv_vectored_in_batch(batch, &pieces, rank(from)?)?))?,
        };
        give(req, || Request::Message(comm.clone(), received))
    })
}

fn tagged(comm: &Arc<Comm>) -> Result<&Tagged> {
    let missing =
        || Error::Own(libc::EOPNOTSUPP, "the communicator has no tags: create it with GDA_TAGGED".into());
    comm.tagged.as_ref().ok_or_else(missing)
}

/// See the header.
///
/// # Safety
/// `buf` must be null or valid; `req` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_tsend(
    comm: Raw,
    to: c_int,
    tag: u64,
    buf: *const gda_buf,
    req: *mut Raw,
) -> c_int {
    status("gda_tsend", || {
        non_null("buf", buf.cast_mut())?;
        // SAFETY: the caller vouches for the buffer.
        let buffers = unsafe { Buffers::of(comm, buf, 1) }?;
        let (comm, (buffer, range)) = (buffers.comm(), buffers.pieces()?.swap_remove(0));
        let sent = tagged(comm)?.isend(buffer, range, rank(to)?, tag)?;
        give(req, || Request::Tagged(comm.clone(), sent))
    })
}

/// See the header.
///
/// # Safety
/// `buf` must be null or valid; `req` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_trecv(
    comm: Raw,
    from: c_int,
    tag: u64,
    mask: u64,
    buf: *const gda_buf,
    req: *mut Raw,
) -> c_int {
    status("gda_trecv", || {
        non_null("buf", buf.cast_mut())?;
        // SAFETY: the caller vouches for the buffer.
        let buffers = unsafe { Buffers::of(comm, buf, 1) }?;
        let (comm, (buffer, range)) = (buffers.comm(), buffers.pieces()?.swap_remove(0));
        let source = if from == ANY_RANK { Source::Any } else { rank(from)?.into() };
        let tag = match mask {
            u64::MAX => Tag::Is(tag),
            0 => Tag::Any,
            _ => Tag::Masked { value: tag, mask },
        };
        let received = tagged(comm)?.irecv(buffer, range, source, tag)?;
        give(req, || Request::Tagged(comm.clone(), received))
    })
}

/// `GDA_ANY_RANK`
const ANY_RANK: c_int = -1;
