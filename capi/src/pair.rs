//! Communicators of two processes that meet when they like: one listens, the other connects.

use std::ffi::{c_int, c_void};
use std::slice;
use std::sync::Arc;

use gdsync_capi_support::handles::Table;
use mp::launch::Listener;
use mp::{Communicator, CommunicatorBuilder};

use crate::abi::{KINDS, Raw};
use crate::comm::{COMMS, Comm, Remaining, check_flags};
use crate::context::{Ctx, context};
use crate::guard::{Foreign, Result, end, invalid, non_null, place, status, timeout, values};
use crate::request::{Joined, join};

/// `GDA_ADDRESS_MAX`
const ADDRESS_MAX: c_int = 64;

static LISTENERS: Table<Arc<(Arc<Ctx>, Listener)>> = Table::new(3, &KINDS);

/// See the header.
///
/// # Safety
/// `address` must be valid for `*len` writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_listen(
    ctx: Raw,
    address: *mut c_void,
    len: *mut usize,
    listener: *mut Raw,
) -> c_int {
    status("gda_listen", || {
        let (len, listener) = (place("len", len)?, place("listener", listener)?);
        let (ctx, to) = (context(ctx)?, non_null("address", address.cast::<u8>())?);
        let made = Listener::bind(None)?;
        let bytes = made.address()?;
        if *len < bytes.len() {
            return Err(invalid("len", *len, "GDA_ADDRESS_MAX"));
        }
        // SAFETY: the place has as many bytes: the caller guarantees it.
        unsafe { slice::from_raw_parts_mut(to, bytes.len()) }.copy_from_slice(&bytes);
        *len = bytes.len();
        *listener = LISTENERS.insert(Arc::new((ctx, made)))?;
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_listen_close(listener: Raw) -> c_int {
    end("gda_listen_close", &LISTENERS, listener)
}

/// Makes a communicator of two, on this thread or on one of its own.
fn pair(
    ctx: &Arc<Ctx>,
    (flags, timeout_ns): (u32, i64),
    (comm, req): (*mut Raw, *mut Raw),
    connect: impl FnOnce(CommunicatorBuilder) -> mp::Result<Communicator> + Send + 'static,
) -> Result<()> {
    let to = place("comm", comm)?;
    check_flags(flags)?;
    timeout(timeout_ns)?;
    let ctx = ctx.clone();
    let make = move || -> Result<Joined> {
        let limit = Remaining::of(timeout_ns)?;
        let built = connect(ctx.builder().timeout(limit.get()))?;
        Ok(COMMS.insert(Comm::new(&ctx, built, flags, &limit)?)?)
    };
    if req.is_null() {
        *to = make()?;
        return Ok(());
    }
    join(Foreign(comm.cast()), place("req", req)?, make)
}

/// See the header.
///
/// # Safety
/// `comm` must be valid for a write until the request has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_accept(
    listener: Raw,
    flags: u32,
    timeout_ns: i64,
    comm: *mut Raw,
    req: *mut Raw,
) -> c_int {
    status("gda_accept", || {
        let listener = LISTENERS.get(listener)?.clone();
        let ctx = listener.0.clone();
        pair(&ctx, (flags, timeout_ns), (comm, req), move |builder| listener.1.accept(builder))
    })
}

/// See the header.
///
/// # Safety
/// `address` must be valid for `len` bytes; `comm` for a write until the request has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_connect(
    ctx: Raw,
    address: *const c_void,
    len: usize,
    flags: u32,
    timeout_ns: i64,
    comm: *mut Raw,
    req: *mut Raw,
) -> c_int {
    status("gda_connect", || {
        let n = c_int::try_from(len).ok().filter(|&n| n <= ADDRESS_MAX);
        let n = n.ok_or_else(|| invalid("len", len, "what gda_listen has set"))?;
        // SAFETY: the caller vouches for the length.
        let address = unsafe { values("address", address.cast::<u8>(), n) }?.to_vec();
        pair(&context(ctx)?, (flags, timeout_ns), (comm, req), move |builder| builder.connect_to(&address))
    })
}
