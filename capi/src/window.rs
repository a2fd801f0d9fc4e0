//! Windows: memory of each rank that the others access, and operations on it.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use gdsync::stream::Cond;
use gdsync_capi_support::handles::{Guard, Table};
use mp::{Rma, Signal, Window};

use crate::abi::{KINDS, Raw, gda_buf, gda_signal};
use crate::comm::{Comm, Remaining, comm};
use crate::guard::{Error, Result, invalid, place, rank, ranks, size, status, timeout, values};
use crate::memory::{Buffers, MEMS};
use crate::request::{LOOK, Request, give};
use crate::stream::{on, queue};

/// A window with its communicator.
type Win = (Arc<Comm>, Window);

static WINDOWS: Table<Win> = Table::new(8, &KINDS);

fn window(raw: Raw) -> Result<Guard<Win>> {
    let win = WINDOWS.get(raw)?;
    win.0.check()?;
    Ok(win)
}

/// See the header.
///
/// # Safety
/// `win` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_win_create(
    of: Raw,
    mem: Raw,
    offset: u64,
    len: u64,
    timeout_ns: i64,
    win: *mut Raw,
) -> c_int {
    status("gda_win_create", || {
        let (win, owner) = (place("win", win)?, comm(of)?.clone());
        let range = gda_buf { mem, offset, len }.range()?;
        // Not locked while the other ranks are waited for.
        let registration = MEMS.get(mem)?.registration().clone();
        let made = owner.comm.window(&registration, range, timeout(timeout_ns)?)?;
        *win = WINDOWS.insert((owner, made))?;
        Ok(())
    })
}

/// Starts an operation, and gives the caller its request.
///
/// # Safety
/// `signal` must be null or valid.
unsafe fn start(
    win: &Win,
    rma: Rma<'_>,
    signal: *const gda_signal,
    (stream, req): (Raw, *mut Raw),
) -> Result<()> {
    let (comm, window) = win;
    // SAFETY: null or valid: the caller guarantees it.
    let rma = match unsafe { signal.as_ref() } {
        None => rma,
        Some(signal) => {
            let (at, value) = (size("offset of the signal", signal.offset)?, signal.value);
            rma.with_signal(match (signal.add, signal.reserved) {
                (0, 0) => Signal::set(at, value),
                (1, 0) => Signal::add(at, value),
                other => return Err(invalid("add and reserved", format_args!("{other:?}"), "0 or 1, and 0")),
            })
        }
    };
    let started = match stream {
        0 => window.start(&rma)?,
        _ => on(stream, |batch| Ok(window.start_in_batch(batch, &rma)?))?,
    };
    give(req, || Request::Message(comm.clone(), started))
}

/// See the header.
///
/// # Safety
/// `bufs` must be null or valid for `n` buffers, `signal` null or valid, `req` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_put(
    win: Raw,
    to: c_int,
    offset: u64,
    bufs: *const gda_buf,
    n: c_int,
    signal: *const gda_signal,
    stream: Raw,
    req: *mut Raw,
) -> c_int {
    status("gda_put", || {
        // SAFETY: the caller vouches for the buffers.
        let (win, buffers) = (window(win)?, unsafe { Buffers::new(bufs, n) }?);
        let pieces = buffers.pieces()?;
        let rma = Rma::put_vectored(&pieces, rank(to)?, size("offset", offset)?);
        // SAFETY: null or valid: the caller guarantees it.
        unsafe { start(&win, rma, signal, (stream, req)) }
    })
}

/// See the header.
///
/// # Safety
/// `bytes` must be valid for `len` bytes, `signal` null or valid, `req` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_put_bytes(
    win: Raw,
    to: c_int,
    offset: u64,
    bytes: *const c_void,
    len: usize,
    signal: *const gda_signal,
    stream: Raw,
    req: *mut Raw,
) -> c_int {
    status("gda_put_bytes", || {
        let win = window(win)?;
        let n = c_int::try_from(len).map_err(|_| invalid("len", len, "at most gda_info.max_inline"))?;
        // SAFETY: the caller vouches for the length.
        let bytes = unsafe { values("bytes", bytes.cast::<u8>(), n) }?;
        let rma = Rma::put_bytes(bytes, rank(to)?, size("offset", offset)?);
        // SAFETY: null or valid: the caller guarantees it.
        unsafe { start(&win, rma, signal, (stream, req)) }
    })
}

/// See the header.
///
/// # Safety
/// `bufs` must be null or valid for `n` buffers, `req` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_get(
    win: Raw,
    from: c_int,
    offset: u64,
    bufs: *const gda_buf,
    n: c_int,
    stream: Raw,
    req: *mut Raw,
) -> c_int {
    status("gda_get", || {
        // SAFETY: the caller vouches for the buffers.
        let (win, buffers) = (window(win)?, unsafe { Buffers::new(bufs, n) }?);
        let pieces = buffers.pieces()?;
        let rma = Rma::get_vectored(&pieces, rank(from)?, size("offset", offset)?);
        // SAFETY: no signal.
        unsafe { start(&win, rma, std::ptr::null(), (stream, req)) }
    })
}

const ADD: c_int = 1;
const COMPARE_SWAP: c_int = 2;

/// See the header.
///
/// # Safety
/// `result` must be null or valid, `req` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_atomic(
    win: Raw,
    of: c_int,
    offset: u64,
    op: c_int,
    value: u64,
    compare: u64,
    result: *const gda_buf,
    stream: Raw,
    req: *mut Raw,
) -> c_int {
    status("gda_atomic", || {
        let win = window(win)?;
        // SAFETY: the caller vouches for the buffer.
        let buffers = unsafe { Buffers::new(result, c_int::from(!result.is_null())) }?;
        let (pieces, rank, offset) = (buffers.pieces()?, rank(of)?, size("offset", offset)?);
        if let Some((_, range)) = pieces.first()
            && range.len() != 8
        {
            return Err(invalid("len of the result", range.len(), "8"));
        }
        let rma = match (op, pieces.first()) {
            (ADD, None) => Rma::accumulate(value, rank, offset),
            (ADD, Some((into, range))) => Rma::fetch_add(value, rank, offset, into, range.start),
            (COMPARE_SWAP, Some((into, range))) => {
                Rma::compare_swap(compare, value, rank, offset, into, range.start)
            }
            (COMPARE_SWAP, None) => return Err(invalid("result", "NULL", "a place for the old value")),
            _ => return Err(invalid("op", op, "GDA_ADD or GDA_COMPARE_SWAP")),
        };
        // SAFETY: no signal.
        unsafe { start(&win, rma, std::ptr::null(), (stream, req)) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_wait_signal(
    win: Raw,
    offset: u64,
    value: u64,
    cond: c_int,
    stream: Raw,
    timeout_ns: i64,
) -> c_int {
    status("gda_wait_signal", || {
        let offset = size("offset", offset)?;
        let all = [Cond::Geq, Cond::Eq, Cond::And, Cond::Nor];
        let known = usize::try_from(cond).ok().and_then(|cond| all.get(cond)).copied();
        let cond = known.ok_or_else(|| invalid("cond", cond, "GDA_GEQ, GDA_EQ, GDA_AND or GDA_NOR"))?;
        // Not locked while it waits.
        let (comm, window) = window(win)?.clone();
        if stream != 0 {
            return on(stream, |batch| Ok(window.wait_signal_in_batch(batch, offset, value, cond)?));
        }
        let after = timeout(timeout_ns)?;
        let limit = Remaining::new(after);
        loop {
            let left = limit.get();
            let (what, fix) = match window.wait_signal(offset, value, cond, left.min(LOOK)) {
                Err(mp::Error::Deadline { what, fix, .. }) => (what, fix),
                done => return Ok(done.map(drop)?),
            };
            if comm.is_gone() || WINDOWS.has_ended(win)? {
                let text = "the window was destroyed before its word was signalled; wait for it first";
                return Err(Error::Own(libc::ECANCELED, text.into()));
            }
            if left <= LOOK {
                return Err(mp::Error::Deadline { what, after, fix }.into());
            }
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_win_flush(win: Raw, of: c_int, stream: Raw, timeout_ns: i64) -> c_int {
    status("gda_win_flush", || {
        let window = window(win)?.1.clone();
        let ranks = ranks(of, window.communicator().size())?;
        match stream {
            0 if of == -1 => Ok(window.flush_all(timeout(timeout_ns)?)?),
            0 => Ok(window.flush(ranks.start, timeout(timeout_ns)?)?),
            _ => {
                let queue = queue(stream)?;
                let stream = &queue.stream()?.stream;
                Ok(ranks.into_iter().try_for_each(|rank| window.flush_on_stream(stream, rank))?)
            }
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_win_destroy(win: Raw, timeout_ns: i64) -> c_int {
    status("gda_win_destroy", || {
        let limit = timeout(timeout_ns)?;
        let (comm, window) = WINDOWS.take(win)?;
        comm.check()?;
        Ok(window.destroy(limit)?)
    })
}
