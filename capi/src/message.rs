//! Messages, with tags and without.

use std::ffi::c_int;
use std::sync::Arc;

use mp::Piece;
use mp::tagged::{Source, Tag, Tagged};

use crate::abi::{Raw, gda_buf};
use crate::comm::Comm;
use crate::guard::{Error, Result, invalid, non_null, rank, status};
use crate::memory::with_pieces;
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
        let start = |comm: &Arc<Comm>, pieces: &[Piece<'_>]| {
            let sent = match stream {
                0 => comm.comm.isend_vectored(pieces, rank(to)?)?,
                _ => on(stream, |batch| Ok(comm.comm.isend_vectored_in_batch(batch, pieces, rank(to)?)?))?,
            };
            give_send(req, sent, comm)
        };
        // SAFETY: the caller vouches for the buffers.
        unsafe { with_pieces(comm, bufs, n, start) }
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
        if from == ANY_RANK {
            return Err(invalid(
                "the rank",
                "GDA_ANY_RANK",
                "one of the communicator; gda_trecv receives from any",
            ));
        }
        let start = |comm: &Arc<Comm>, pieces: &[Piece<'_>]| {
            let received = match stream {
                0 => comm.comm.irecv_vectored(pieces, rank(from)?)?,
                _ => {
                    on(stream, |batch| Ok(comm.comm.irecv_vectored_in_batch(batch, pieces, rank(from)?)?))?
                }
            };
            give(req, || Request::Message(comm.clone(), received))
        };
        // SAFETY: the caller vouches for the buffers.
        unsafe { with_pieces(comm, bufs, n, start) }
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
        let start = |comm: &Arc<Comm>, pieces: &[Piece<'_>]| {
            let sent = tagged(comm)?.isend(pieces[0].0, pieces[0].1.clone(), rank(to)?, tag)?;
            give(req, || Request::Tagged(comm.clone(), sent))
        };
        // SAFETY: the caller vouches for the buffer.
        unsafe { with_pieces(comm, buf, 1, start) }
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
        let source = if from == ANY_RANK { Source::Any } else { rank(from)?.into() };
        let tag = match mask {
            u64::MAX => Tag::Is(tag),
            0 => Tag::Any,
            _ => Tag::Masked { value: tag, mask },
        };
        let start = |comm: &Arc<Comm>, pieces: &[Piece<'_>]| {
            let received = tagged(comm)?.irecv(pieces[0].0, pieces[0].1.clone(), source, tag)?;
            give(req, || Request::Tagged(comm.clone(), received))
        };
        // SAFETY: the caller vouches for the buffer.
        unsafe { with_pieces(comm, buf, 1, start) }
    })
}

/// `GDA_ANY_RANK`
const ANY_RANK: c_int = -1;
