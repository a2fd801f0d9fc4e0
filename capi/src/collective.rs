//! Collectives.

use std::ffi::c_int;
use std::time::Duration;

use gdsync::stream::Stream;
use mp::collective::{Collectives, Pending, Reduction};

use crate::abi::{Raw, gda_buf};
use crate::comm::{Remaining, comm};
use crate::guard::{Error, Result, invalid, rank, status};
use crate::memory::kept;
use crate::stream::{Queue, queue};

/// Where a collective runs.
enum On<'a> {
    Stream(&'a Stream),
    /// On the CPU, within this time.
    Cpu(Duration),
}

/// Makes a call of all ranks, with the stream if there is one.
fn run(
    of: Raw,
    stream: Raw,
    timeout_ns: i64,
    call: impl FnOnce(&Collectives, On<'_>) -> Result<Option<Pending>>,
) -> Result<()> {
    let limit = Remaining::of(timeout_ns)?;
    let comm = comm(of)?.clone();
    let queue = if stream == 0 { None } else { Some(queue(stream)?) };
    let stream = queue.as_deref().map(Queue::stream).transpose()?;
    let _call = comm.call(&limit)?;
    let collectives = comm.collectives.as_ref().ok_or_else(|| {
        let text = "the communicator has no collectives: create it with GDA_COLLECTIVES".into();
        Error::Own(libc::EOPNOTSUPP, text)
    })?;
    let on = stream.map_or_else(|| On::Cpu(limit.get()), |to| On::Stream(&to.stream));
    // The stream reports failures; so does the next call.
    call(collectives, on).map(drop)
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_barrier(comm: Raw, stream: Raw, timeout_ns: i64) -> c_int {
    status("gda_barrier", || {
        run(comm, stream, timeout_ns, |all, on| match on {
            On::Stream(stream) => Ok(Some(all.barrier_on_stream(stream)?)),
            On::Cpu(limit) => Ok(all.barrier(limit).map(|()| None)?),
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
        let ((into, range), root) = (unsafe { kept(buf) }?, rank(root)?);
        run(comm, stream, timeout_ns, |all, on| match on {
            On::Stream(stream) => Ok(Some(all.broadcast_on_stream(stream, &into, range, root)?)),
            On::Cpu(limit) => Ok(all.broadcast(&into, range, root, limit).map(|()| None)?),
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
        let (values, range) = unsafe { kept(buf) }?;
        let op = match op {
            1 => Reduction::Sum,
            2 => Reduction::Min,
            3 => Reduction::Max,
            _ => return Err(invalid("op", op, "GDA_SUM, GDA_MIN or GDA_MAX")),
        };
        run(comm, stream, timeout_ns, |all, on| {
            macro_rules! reduce {
                ($number:ty) => {
                    match on {
                        On::Stream(stream) => {
                            Some(all.allreduce_on_stream::<$number>(stream, &values, range, op)?)
                        }
                        On::Cpu(limit) => {
                            all.allreduce::<$number>(&values, range, op, limit)?;
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
        let (into, range) = unsafe { kept(buf) }?;
        run(comm, stream, timeout_ns, |all, on| match on {
            On::Stream(stream) => Ok(Some(all.allgather_on_stream(stream, &into, range)?)),
            On::Cpu(limit) => Ok(all.allgather(&into, range, limit).map(|()| None)?),
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
        let (from, to) = (unsafe { kept(from) }?, unsafe { kept(to) }?);
        let (from, to) = ((&from.0, from.1), (&to.0, to.1));
        run(comm, stream, timeout_ns, |all, on| match on {
            On::Stream(stream) => Ok(Some(all.alltoall_on_stream(stream, from, to)?)),
            On::Cpu(limit) => Ok(all.alltoall(from, to, limit).map(|()| None)?),
        })
    })
}
