//! Asynchronous events of a context, and completion channels: queues behind descriptors that can be waited for.

use std::cell::UnsafeCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gdsync::hca::GpuNudge;
use parking_lot::{Condvar, Mutex};
use rdma_core_sys::verbs::{
    ibv_async_event, ibv_async_event_element, ibv_comp_channel, ibv_context, ibv_cq, ibv_event_type, ibv_qp,
};

use crate::context::Context;
use crate::cq::Cq;
use crate::domain::Users;
use crate::errno;
use crate::errno::complain;

/// How long an object waits for the acknowledgement of its events, before it goes all the same.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Events {
    /// Counts the events in the queue, and now and then one that was taken back.
    signal: OwnedFd,
    state: Mutex<State>,
    acknowledged: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<(usize, ibv_event_type)>,
    /// Events that the application has got of an object and not acknowledged.
    pending: HashMap<usize, u32>,
}

impl Events {
    pub(crate) fn new() -> Result<Self, c_int> {
        // SAFETY: it takes no memory of ours.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EMFILE));
        }
        // SAFETY: it is a new descriptor that nobody else has.
        let signal = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { signal, state: Mutex::default(), acknowledged: Condvar::new() })
    }

    pub(crate) fn fd(&self) -> c_int {
        self.signal.as_raw_fd()
    }

    pub(crate) fn push(&self, element: usize, event: ibv_event_type) {
        self.state.lock().queue.push_back((element, event));
        let one = 1u64.to_ne_bytes();
        // SAFETY: the eight bytes are a local variable. It cannot fail: the count is far from its limit.
        unsafe { libc::write(self.fd(), one.as_ptr().cast(), one.len()) };
    }

    /// The next event; blocks unless the application has made the descriptor non-blocking.
    pub(crate) fn get(&self) -> Result<(usize, ibv_event_type), c_int> {
        loop {
            let mut count = [0u8; 8];
            // SAFETY: the eight bytes are a local variable.
            let got = unsafe { libc::read(self.fd(), count.as_mut_ptr().cast(), count.len()) };
            if got < 0 {
                return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
            }
            let mut state = self.state.lock();
            if let Some((element, event)) = state.queue.pop_front() {
                *state.pending.entry(element).or_default() += 1;
                return Ok((element, event));
            }
        }
    }

    pub(crate) fn acknowledge(&self, element: usize) {
        let mut state = self.state.lock();
        match state.pending.get_mut(&element) {
            Some(pending) if *pending > 0 => *pending -= 1,
            _ => complain("an event is acknowledged that was not got"),
        }
        self.acknowledged.notify_all();
    }

    /// An object goes: takes its events back, and waits for those that the application has.
    pub(crate) fn forget(&self, element: usize) {
        let end = Instant::now() + PATIENCE;
        let mut state = self.state.lock();
        state.queue.retain(|(other, _)| *other != element);
        while state.pending.get(&element).is_some_and(|&pending| pending > 0) {
            if self.acknowledged.wait_until(&mut state, end).timed_out() {
                complain(
                    "an object is destroyed while events of it are not acknowledged: rdma-core would wait for ever",
                );
                break;
            }
        }
        state.pending.remove(&element);
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: &mut MaybeUninit<ibv_async_event>,
) -> c_int {
    // SAFETY: the caller vouches for the context.
    let context = unsafe { Context::of(context) };
    match context.events.get() {
        Ok((element, event_type)) => {
            let element = if event_type == ibv_event_type::IBV_EVENT_CQ_ERR {
                ibv_async_event_element { cq: element as *mut ibv_cq }
            } else {
                ibv_async_event_element { qp: element as *mut ibv_qp }
            };
            event.write(ibv_async_event { element, event_type });
            0
        }
        Err(errno) => {
            errno::set(errno);
            -1
        }
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the caller vouches for the event.
    let event = unsafe { event.read() };
    // SAFETY: all kinds of events here name an object, by its address.
    let qp = unsafe { event.element.qp };
    // SAFETY: queue pairs and completion queues both begin with their context, and the object is still there.
    let context = unsafe { (*qp).context };
    // SAFETY: it is the object's.
    let context = unsafe { Context::of(context) };
    context.events.acknowledge(qp.addr());
}

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

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let made = Events::new().map(|events| {
        let base = ibv_comp_channel { context, fd: events.fd(), refcnt: 0 };
        Box::new(Channel { base: UnsafeCell::new(base), users: Users::default(), events: Arc::new(events) })
    });
    errno::hand_out(made)
}

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

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_cq_event(
    channel: &Channel,
    cq: &mut MaybeUninit<*mut ibv_cq>,
    cq_context: *mut *mut c_void,
) -> c_int {
    let element = match channel.events.get() {
        Ok((element, _)) => element as *mut ibv_cq,
        Err(errno) => {
            errno::set(errno);
            return -1;
        }
    };
    cq.write(element);
    // SAFETY: a queue waits for the acknowledgement of its events before it goes.
    let context = unsafe { (*element).cq_context };
    // SAFETY: as above.
    unsafe { cq_context.write(context) };
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    // SAFETY: the caller vouches for the queue.
    let Some(watch) = (unsafe { Cq::of(cq) }).watch.as_ref() else {
        complain("events are acknowledged of a completion queue that has no channel");
        return;
    };
    (0..count).for_each(|_| watch.events.acknowledge(cq.addr()));
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
    let Some(watch) = &cq.watch else { return 0 };
    watch.armed.store(true, Ordering::SeqCst);
    if cq.has_any() {
        watch.nudge();
    }
    0
}
