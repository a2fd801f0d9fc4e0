//! Asynchronous events of objects that commands made: a queue pair that failed without a completion, a completion queue that failed.

use std::ptr::NonNull;
use std::sync::Arc;
use std::{fmt, io};

use rdma_core_sys::Mlx5;
use rdma_core_sys::mlx5::{
    mlx5dv_devx_async_event_hdr, mlx5dv_devx_create_event_channel_flags as flags, mlx5dv_devx_event_channel,
};
use rdma_core_sys::verbs::ibv_event_type;

use super::object::{Object, last_errno};
use crate::{Event, FailedCq, More, Open};

/// `MLX5_EVENT_TYPE_*`, as the firmware numbers them.
mod kind {
    pub(super) const CQ_ERROR: u16 = 0x04;
    pub(super) const WQ_CATAS_ERROR: u16 = 0x05;
    pub(super) const WQ_INVAL_REQ_ERROR: u16 = 0x10;
    pub(super) const WQ_ACCESS_ERROR: u16 = 0x11;
}

/// What is told of a queue pair, and of a completion queue.
pub(super) const OF_QP: &[u16] = &[kind::WQ_CATAS_ERROR, kind::WQ_INVAL_REQ_ERROR, kind::WQ_ACCESS_ERROR];
pub(super) const OF_CQ: &[u16] = &[kind::CQ_ERROR];

/// A channel that tells them.
pub(in crate::direct) struct EventChannel {
    _open: Arc<Open>,
    mlx5: &'static Mlx5,
    raw: NonNull<mlx5dv_devx_event_channel>,
}

// SAFETY: libmlx5 may be called from any thread.
unsafe impl Send for EventChannel {}
// SAFETY: likewise; nothing of the channel changes after it was made.
unsafe impl Sync for EventChannel {}

impl fmt::Debug for EventChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventChannel")
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        if let Some(destroy) = self.mlx5.mlx5dv_devx_destroy_event_channel {
            // SAFETY: made here, destroyed once.
            unsafe { destroy(self.raw.as_ptr()) };
        }
    }
}

/// What an event carries: its kind, and the number of its object.
fn cookie(kind: u16, number: u32) -> u64 {
    u64::from(kind) << 32 | u64::from(number)
}

/// What it means; `None` of an unknown kind.
fn event(cookie: u64) -> Option<Event> {
    let number = u32::try_from(cookie & u64::from(u32::MAX)).expect("masked");
    let of_qp = |kind| Event::QueuePair { qpn: number, kind };
    Some(match u16::try_from(cookie >> 32).ok()? {
        kind::CQ_ERROR => Event::CompletionQueue(FailedCq::Number(number)),
        kind::WQ_CATAS_ERROR => of_qp(ibv_event_type::IBV_EVENT_QP_FATAL),
        kind::WQ_INVAL_REQ_ERROR => of_qp(ibv_event_type::IBV_EVENT_QP_REQ_ERR),
        kind::WQ_ACCESS_ERROR => of_qp(ibv_event_type::IBV_EVENT_QP_ACCESS_ERR),
        _ => return None,
    })
}

impl EventChannel {
    /// A channel of the device; `None` where there is none, as without DevX: then failures are noticed by completions alone.
    pub(in crate::direct) fn open(open: &Arc<Open>, mlx5: &'static Mlx5) -> Option<Arc<Self>> {
        let create = mlx5.mlx5dv_devx_create_event_channel?;
        // The bytes of an event say no more than its kind and its object.
        let omit = flags::MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA;
        // SAFETY: the device is open.
        let raw = unsafe { create(open.context().as_ptr(), omit) };
        let Some(raw) = NonNull::new(raw) else {
            tracing::debug!(device = open.name(), errno = last_errno(), "no events of objects made by DevX");
            return None;
        };
        Some(Arc::new(Self { _open: open.clone(), mlx5, raw }))
    }

    /// Has it tell of an object with this number. Where it does not, failures are noticed by completions alone.
    pub(super) fn subscribe(&self, object: &Object, number: u32, kinds: &[u16]) {
        let Some(subscribe) = self.mlx5.mlx5dv_devx_subscribe_devx_event else { return };
        for &kind in kinds {
            let (mut kinds, cookie) = ([kind], cookie(kind, number));
            let size = u16::try_from(size_of_val(&kinds)).expect("two bytes");
            // SAFETY: channel and object are there, and so many bytes of kinds.
            let errno =
                unsafe { subscribe(self.raw.as_ptr(), object.raw(), size, kinds.as_mut_ptr(), cookie) };
            if errno != 0 {
                tracing::debug!(?object, kind, errno, "events of this kind are not told");
            }
        }
    }
}

impl More for EventChannel {
    fn fd(&self) -> i32 {
        // SAFETY: the channel is there until this is dropped.
        unsafe { (*self.raw.as_ptr()).fd }
    }

    fn take(&self) -> io::Result<Option<Event>> {
        let Some(get) = self.mlx5.mlx5dv_devx_get_event else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let mut head = mlx5dv_devx_async_event_hdr::zeroed();
        // SAFETY: a place for an event without its bytes.
        let got = unsafe { get(self.raw.as_ptr(), &raw mut head, size_of_val(&head)) };
        if got < 0 { Err(io::Error::last_os_error()) } else { Ok(event(head.cookie)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_told_by_their_cookies() {
        let told: Vec<_> =
            OF_CQ.iter().chain(OF_QP).map(|&kind| event(cookie(kind, 0xff_ffff)).unwrap()).collect();
        let of_qp = |kind| Event::QueuePair { qpn: 0xff_ffff, kind };
        let expected = [
            Event::CompletionQueue(FailedCq::Number(0xff_ffff)),
            of_qp(ibv_event_type::IBV_EVENT_QP_FATAL),
            of_qp(ibv_event_type::IBV_EVENT_QP_REQ_ERR),
            of_qp(ibv_event_type::IBV_EVENT_QP_ACCESS_ERR),
        ];
        assert_eq!(told, expected);
        assert_eq!(event(cookie(0x13, 1)), None);
        assert_eq!(event(u64::MAX), None);
    }
}
