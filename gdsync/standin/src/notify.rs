//! Completion channels: a descriptor that becomes readable when a completion was asked for and came.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use gdsync::hca::GpuNudge;
use rdma_core_sys::verbs::{ibv_comp_channel, ibv_context, ibv_cq, ibv_event_type};

use crate::complaint::complain;
use crate::cq::Cq;
use crate::domain::Users;
use crate::errno;
use crate::events::Events;

/// `struct ibv_comp_channel`, and what is behind it.
#[repr(C)]
pub(crate) struct Channel {
    base: UnsafeCell<ibv_comp_channel>,
    pub(crate) users: Users,
    pub(crate) events: Arc<Events>,
}

impl Channel {
    /// # Safety
    /// It must be a channel of this library.
    pub(crate) unsafe fn of<'a>(channel: *mut ibv_comp_channel) -> &'a Self {
        // SAFETY: the caller vouches for it.
        unsafe { &*channel.cast() }
    }
}

/// Puts a completion queue on its channel, once for each time that it was armed.
#[derive(Debug)]
pub(crate) struct DoorbellWatch {
    pub(crate) events: Arc<Events>,
    /// The queue's address, once it has one.
    pub(crate) element: AtomicUsize,
    armed: AtomicBool,
}

impl DoorbellWatch {
    pub(crate) fn new(events: Arc<Events>) -> Self {
        Self { events, element: AtomicUsize::new(0), armed: AtomicBool::new(false) }
    }
}

impl GpuNudge for DoorbellWatch {
    fn nudge(&self) {
        if self.armed.swap(false, Ordering::SeqCst) {
            // The kind of event is not looked at: a channel has one.
            self.events.push(self.element.load(Ordering::SeqCst), ibv_event_type::IBV_EVENT_CQ_ERR);
        }
    }
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let made = Events::new().map(|events| {
        let base = ibv_comp_channel { context, fd: events.fd(), refcnt: 0 };
        Box::new(Channel { base: UnsafeCell::new(base), users: Users::default(), events: Arc::new(events) })
    });
    errno::hand_out(made)
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: the caller vouches for it.
    if let Err(errno) = unsafe { Channel::of(channel) }.users.none() {
        return errno;
    }
    // SAFETY: it is a box of this module that nothing uses any more.
    drop(unsafe { Box::from_raw(channel.cast::<Channel>()) });
    0
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let channel = unsafe { Channel::of(channel) };
    let element = match channel.events.get() {
        Ok((element, _)) => element as *mut ibv_cq,
        Err(errno) => {
            errno::set(errno);
            return -1;
        }
    };
    // SAFETY: the caller vouches for the place.
    unsafe { cq.write(element) };
    // SAFETY: a queue waits for the acknowledgement of its events before it goes.
    let context = unsafe { (*element).cq_context };
    // SAFETY: as above.
    unsafe { cq_context.write(context) };
    0
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    // SAFETY: the caller vouches for the queue.
    let Some(notice) = (unsafe { Cq::of(cq) }).notice.as_ref() else {
        complain("events are acknowledged of a completion queue that has no channel");
        return;
    };
    (0..count).for_each(|_| notice.events.acknowledge(cq.addr()));
}

/// `ibv_req_notify_cq`
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller vouches for the queue.
    let cq = unsafe { Cq::of(cq) };
    if solicited_only != 0 {
        complain("events of solicited completions alone are not part of the stand-in");
        return libc::EOPNOTSUPP;
    }
    // Without a channel nobody would hear of it, which is no error.
    let Some(notice) = &cq.notice else { return 0 };
    notice.armed.store(true, Ordering::SeqCst);
    if cq.has_any() {
        notice.nudge();
    }
    0
}
