//! Asynchronous events of DevX objects: failed queue pairs and completion queues.

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

/// `MLX5_EVENT_TYPE_*` of the firmware.
mod kind {
    pub(super) const CQ_ERROR: u16 = 0x04;
    pub(super) const WQ_CATAS_ERROR: u16 = 0x05;
    pub(super) const WQ_INVAL_REQ_ERROR: u16 = 0x10;
    pub(super) const WQ_ACCESS_ERROR: u16 = 0x11;
}

/// Events subscribed for a queue pair, and for a completion queue.
pub(super) const OF_QP: &[u16] = &[kind::WQ_CATAS_ERROR, kind::WQ_INVAL_REQ_ERROR, kind::WQ_ACCESS_ERROR];
pub(super) const OF_CQ: &[u16] = &[kind::CQ_ERROR];

/// An event channel.
pub(in crate::direct) struct EventChannel {
    _open: Arc<Open>,
    mlx5: &'static Mlx5,
    raw: NonNull<mlx5dv_devx_event_channel>,
}

// SAFETY: libmlx5 is thread-safe.
unsafe impl Send for EventChannel {}
// SAFETY: libmlx5 is thread-safe, and the channel is not changed after its creation.
unsafe impl Sync for EventChannel {}

impl fmt::Debug for EventChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventChannel")
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        if let Some(destroy) = self.mlx5.mlx5dv_devx_destroy_event_channel {
            // SAFETY: created here, destroyed only here.
            unsafe { destroy(self.raw.as_ptr()) };
        }
    }
}

/// Cookie of an event: its type and the object's number.
fn cookie(kind: u16, number: u32) -> u64 {
    u64::from(kind) << 32 | u64::from(number)
}

/// Decodes a cookie; `None` for an unknown type.
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
    /// Creates a channel; `None` if unsupported. Failures are then noticed by completions only.
    pub(in crate::direct) fn open(open: &Arc<Open>, mlx5: &'static Mlx5) -> Option<Arc<Self>> {
        let create = mlx5.mlx5dv_devx_create_event_channel?;
        // Event data beyond the cookie is not needed.
        let omit = flags::MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA;
        // SAFETY: the device is open.
        let raw = unsafe { create(open.context().as_ptr(), omit) };
        let Some(raw) = NonNull::new(raw) else {
            tracing::debug!(device = open.name(), errno = last_errno(), "no events of objects made by DevX");
            return None;
        };
        Some(Arc::new(Self { _open: open.clone(), mlx5, raw }))
    }

    /// Subscribes to events of an object. If that fails, failures are noticed by completions only.
    pub(super) fn subscribe(&self, object: &Object, number: u32, kinds: &[u16]) {
        let Some(subscribe) = self.mlx5.mlx5dv_devx_subscribe_devx_event else { return };
        for &kind in kinds {
            let (mut kinds, cookie) = ([kind], cookie(kind, number));
            let size = u16::try_from(size_of_val(&kinds)).expect("two bytes");
            // SAFETY: channel and object are live, and `kinds` has the given length.
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
        // SAFETY: the channel lives until `self` is dropped.
        unsafe { (*self.raw.as_ptr()).fd }
    }

    fn take(&self) -> io::Result<Option<Event>> {
        let Some(get) = self.mlx5.mlx5dv_devx_get_event else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let mut head = mlx5dv_devx_async_event_hdr::zeroed();
        // SAFETY: the buffer holds an event header without data.
        let got = unsafe { get(self.raw.as_ptr(), &raw mut head, size_of_val(&head)) };
        if got < 0 { Err(io::Error::last_os_error()) } else { Ok(event(head.cookie)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_decoded_from_cookies() {
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
