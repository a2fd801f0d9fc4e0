//! Channels of events of objects that commands made: a pipe of cookies.

use std::ffi::{c_int, c_void};
use std::io::{PipeReader, PipeWriter, Write, pipe};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use gdsync::hca::AsyncEvent;
use parking_lot::Mutex;
use rdma_core_sys::mlx5::{
    mlx5dv_devx_async_event_hdr, mlx5dv_devx_create_event_channel_flags as flags, mlx5dv_devx_event_channel,
    mlx5dv_devx_obj,
};
use rdma_core_sys::verbs::ibv_context;

use crate::devx::{Object, is_there};
use crate::errno;
use crate::errno::complain;

/// Kinds of events, as the firmware numbers them.
const CQ_ERROR: u16 = 0x04;
const WQ_CATAS_ERROR: u16 = 0x05;
const WQ_INVAL_REQ_ERROR: u16 = 0x10;
const WQ_ACCESS_ERROR: u16 = 0x11;

/// `struct mlx5dv_devx_event_channel`, and what is behind it.
#[repr(C)]
struct Channel {
    base: mlx5dv_devx_event_channel,
    writer: Arc<PipeWriter>,
}

/// What a channel tells of an object.
struct Subscription {
    is_cq: bool,
    number: u32,
    kind: u16,
    cookie: u64,
    writer: Arc<PipeWriter>,
}

static SUBSCRIPTIONS: Mutex<Vec<Subscription>> = Mutex::new(Vec::new());

/// Tells those who have asked for it.
pub(crate) fn raise(raised: AsyncEvent) {
    let (is_cq, number, kind) = match raised {
        AsyncEvent::CqError(cqn) => (true, cqn, CQ_ERROR),
        AsyncEvent::QpFatal(qpn) => (false, qpn, WQ_CATAS_ERROR),
        AsyncEvent::QpRequestError(qpn) => (false, qpn, WQ_INVAL_REQ_ERROR),
        AsyncEvent::QpAccessError(qpn) => (false, qpn, WQ_ACCESS_ERROR),
        AsyncEvent::QpLastWqeReached(_) | AsyncEvent::SrqLimitReached(_) => return,
    };
    let all = SUBSCRIPTIONS.lock();
    for told in all.iter().filter(|told| (told.is_cq, told.number, told.kind) == (is_cq, number, kind)) {
        if let Err(error) = (&*told.writer).write_all(&told.cookie.to_ne_bytes()) {
            complain(format!("an event of an object of DevX is lost: {error}"));
        }
    }
}

/// An object is gone.
pub(super) fn forget(object: &Object) {
    let (is_cq, number) = object.number();
    SUBSCRIPTIONS.lock().retain(|told| (told.is_cq, told.number) != (is_cq, number));
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn mlx5dv_devx_create_event_channel(
    _context: *mut ibv_context,
    asked: flags,
) -> *mut mlx5dv_devx_event_channel {
    if !is_there() || asked != flags::MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA {
        return errno::null(libc::EOPNOTSUPP);
    }
    let Ok((reader, writer)) = pipe() else { return errno::null(libc::EMFILE) };
    let base = mlx5dv_devx_event_channel { fd: PipeReader::into_raw_fd(reader) };
    Box::into_raw(Box::new(Channel { base, writer: Arc::new(writer) })).cast()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_devx_destroy_event_channel(channel: *mut mlx5dv_devx_event_channel) {
    // SAFETY: the caller vouches for it: a box of the function above.
    let channel = unsafe { Box::from_raw(channel.cast::<Channel>()) };
    SUBSCRIPTIONS.lock().retain(|told| !Arc::ptr_eq(&told.writer, &channel.writer));
    // SAFETY: made with the channel, closed with it.
    drop(unsafe { OwnedFd::from_raw_fd(channel.base.fd) });
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_devx_subscribe_devx_event(
    channel: *mut mlx5dv_devx_event_channel,
    object: *mut mlx5dv_devx_obj,
    events_size: u16,
    events: *mut u16,
    cookie: u64,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let channel = unsafe { &*channel.cast::<Channel>() };
    if object.is_null() || !events_size.is_multiple_of(2) {
        return libc::EINVAL;
    }
    // SAFETY: the caller vouches for it.
    let (is_cq, number) = unsafe { &*object.cast::<Object>() }.number();
    // SAFETY: the caller vouches for so many bytes.
    let kinds = unsafe { std::slice::from_raw_parts(events, usize::from(events_size / 2)) };
    let known: &[u16] =
        if is_cq { &[CQ_ERROR] } else { &[WQ_CATAS_ERROR, WQ_INVAL_REQ_ERROR, WQ_ACCESS_ERROR] };
    if !kinds.iter().all(|kind| known.contains(kind)) {
        return libc::EINVAL;
    }
    let writer = &channel.writer;
    let told = kinds.iter().map(|&kind| Subscription { is_cq, number, kind, cookie, writer: writer.clone() });
    SUBSCRIPTIONS.lock().extend(told);
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_devx_get_event(
    channel: *mut mlx5dv_devx_event_channel,
    data: *mut mlx5dv_devx_async_event_hdr,
    len: usize,
) -> isize {
    if len < size_of::<mlx5dv_devx_async_event_hdr>() {
        errno::set(libc::EINVAL);
        return -1;
    }
    // SAFETY: the caller vouches for it.
    let fd = unsafe { (*channel).fd };
    // SAFETY: a cookie fits, and the caller vouches for the place.
    unsafe { libc::read(fd, data.cast::<c_void>(), size_of::<mlx5dv_devx_async_event_hdr>()) }
}
