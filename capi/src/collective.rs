//! Collectives.

use std::ffi::c_int;

use mp::collective::{Collectives, Pending, Reduction};

use crate::abi::{Raw, gda_buf};
use crate::comm::comm;
use crate::guard::{Error, Result, invalid, rank, status, timeout};
use crate::memory::Buffers;
use crate::stream::{Queue, queue};

/// Makes a call of all ranks, with the stream if there is one.
fn run(
    of: Raw,
    stream: Raw,
    call: impl FnOnce(&Collectives, Option<&gdsync::stream::Stream>) -> Result<Option<Pending>>,
) -> Result<()> {
    let comm = comm(of)?.clone();
    let queue = if stream == 0 { None } else { Some(queue(stream)?) };
    let stream = queue.as_deref().map(Queue::stream).transpose()?;
    let collectives = comm.collectives.lock();
    let collectives = collectives.as_ref().ok_or_else(|| {
        let text = "the communicator has no collectives: create it with GDA_COLLECTIVES".into();
        Error::Own(libc::EOPNOTSUPP, text)
    })?;
    // The stream reports failures; so does the next call.
    call(collectives, stream.map(|to| &to.stream)).map(drop)
}

/// The range of one buffer.
///
/// # Safety
/// The pointer must be null or valid.
unsafe fn buffer<'a>(buf: *const gda_buf) -> Result<Buffers<'a>> {
    // SAFETY: the caller vouches for the buffer.
    unsafe { Buffers::one(buf) }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_barrier(comm: Raw, stream: Raw, timeout_ns: i64) -> c_int {
    status("gda_barrier", || {
        run(comm, stream, |all, stream| match stream {
            Some(stream) => Ok(Some(all.barrier_on_stream(stream)?)),
            None => Ok(all.barrier(timeout(timeout_ns)?).map(|()| None)?),
        })
    })
}

/// See the header.
///
/// # Safety
/// `buf` must be null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_broadcast(
    comm: Raw,
    buf: *const gda_buf,
    root: c_int,
    stream: Raw,
    timeout_ns: i64,
) -> c_int {
    status("gda_broadcast", || {
        // SAFETY: the caller vouches for the buffer.
        let (buffers, root) = (unsafe { buffer(buf) }?, rank(root)?);
        let (into, range) = buffers.pieces()?.swap_remove(0);
        run(comm, stream, |all, stream| match stream {
            Some(stream) => Ok(Some(all.broadcast_on_stream(stream, into, range, root)?)),
            None => Ok(all.broadcast(into, range, root, timeout(timeout_ns)?).map(|()| None)?),
        })
    })
}

/// See the header.
///
/// # Safety
/// `buf` must be null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_allreduce(
    comm: Raw,
    buf: *const gda_buf,
    kind: c_int,
    op: c_int,
    stream: Raw,
    timeout_ns: i64,
) -> c_int {
    status("gda_allreduce", || {
        // SAFETY: the caller vouches for the buffer.
        let buffers = unsafe { buffer(buf) }?;
        let (values, range) = buffers.pieces()?.swap_remove(0);
        let op = match op {
            1 => Reduction::Sum,
            2 => Reduction::Min,
            3 => Reduction::Max,
            _ => return Err(invalid("op", op, "GDA_SUM, GDA_MIN or GDA_MAX")),
        };
        run(comm, stream, |all, stream| {
            macro_rules! reduce {
                ($number:ty) => {
                    match stream {
                        Some(stream) => Some(all.allreduce_on_stream::<$number>(stream, values, range, op)?),
                        None => {
                            all.allreduce::<$number>(values, range, op, timeout(timeout_ns)?)?;
                            None
                        }
                    }
                };
            }
            Ok(match kind {
                1 => reduce!(i32),
                2 => reduce!(i64),
                3 => reduce!(u64),
                4 => reduce!(f32),
                5 => reduce!(f64),
                _ => return Err(invalid("type", kind, "GDA_INT32 to GDA_DOUBLE")),
            })
        })
    })
}

/// See the header.
///
/// # Safety
/// `buf` must be null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_allgather(
    comm: Raw,
    buf: *const gda_buf,
    stream: Raw,
    timeout_ns: i64,
) -> c_int {
    status("gda_allgather", || {
        // SAFETY: the caller vouches for the buffer.
        let buffers = unsafe { buffer(buf) }?;
        let (into, range) = buffers.pieces()?.swap_remove(0);
        run(comm, stream, |all, stream| match stream {
            Some(stream) => Ok(Some(all.allgather_on_stream(stream, into, range)?)),
            None => Ok(all.allgather(into, range, timeout(timeout_ns)?).map(|()| None)?),
        })
    })
}

/// See the header.
///
/// # Safety
/// `from` and `to` must be null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_alltoall(
    comm: Raw,
    from: *const gda_buf,
    to: *const gda_buf,
    stream: Raw,
    timeout_ns: i64,
) -> c_int {
    status("gda_alltoall", || {
        // SAFETY: the caller vouches for the buffers.
        let buffers = [unsafe { buffer(from) }?, unsafe { buffer(to) }?];
        let [from, to] = &buffers;
        let (from, to) = (from.pieces()?.swap_remove(0), to.pieces()?.swap_remove(0));
        run(comm, stream, |all, stream| match stream {
            Some(stream) => Ok(Some(all.alltoall_on_stream(stream, from, to)?)),
            None => Ok(all.alltoall(from, to, timeout(timeout_ns)?).map(|()| None)?),
        })
    })
}
