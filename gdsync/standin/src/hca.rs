//! The one card, its faults that tests ask for, whom its events concern, and its place in the list of devices.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use gdsync::hca::{AsyncEvent, AsyncEvents, Card, SoftHcaConfig};
use parking_lot::Mutex;
use rdma_core_sys::verbs::{
    ibv_device, ibv_event_type, ibv_node_type, ibv_port_state, ibv_transport_type, ibv_wc_status,
};

use crate::devx;
use crate::errno::complain;
use crate::events::Events;

/// The card of this process. It is never given up: its address stays the same, as that of a port does.
pub(crate) struct Hca {
    pub(crate) card: Card,
    pub(crate) roster: Arc<Roster>,
}

static HCA: OnceLock<Option<Hca>> = OnceLock::new();

impl Hca {
    /// The card, if it has been started.
    pub(crate) fn started() -> Option<&'static Self> {
        HCA.get()?.as_ref()
    }

    /// Started by the first call.
    ///
    /// # Errors
    /// `ENODEV`.
    pub(crate) fn get() -> Result<&'static Self, c_int> {
        let started = HCA.get_or_init(|| {
            let roster = Arc::new(Roster::default());
            let config = SoftHcaConfig::from_env().map(|config| SoftHcaConfig { strict: true, ..config });
            match config.and_then(|config| Card::start(&config, roster.clone())) {
                Ok(card) => Some(Self { card, roster }),
                Err(error) => {
                    complain(format!("the software HCA does not start: {error}"));
                    None
                }
            }
        });
        started.as_ref().ok_or(libc::ENODEV)
    }
}

/// An object that events may concern.
#[derive(Clone, Debug)]
pub(crate) struct Concerned {
    /// Where its context gets them.
    pub(crate) events: Arc<Events>,
    /// Its address.
    pub(crate) element: usize,
}

/// The objects of a kind by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Objects(Mutex<HashMap<u32, Concerned>>);

impl Objects {
    pub(crate) fn add(&self, number: u32, concerned: Concerned) {
        self.0.lock().insert(number, concerned);
    }

    /// Runs `f` with the address of the object of this number, which stays meanwhile.
    pub(crate) fn with<T>(&self, number: u32, f: impl FnOnce(usize) -> Option<T>) -> Option<T> {
        let objects = self.0.lock();
        f(objects.get(&number)?.element)
    }

    /// Nothing concerns it any more; returns when what was got of it is acknowledged.
    pub(crate) fn remove(&self, number: u32) {
        let concerned = self.0.lock().remove(&number);
        concerned.inspect(|concerned| concerned.events.forget(concerned.element));
    }
}

#[derive(Debug, Default)]
pub(crate) struct Roster {
    pub(crate) qps: Objects,
    pub(crate) cqs: Objects,
}

impl AsyncEvents for Roster {
    fn raise(&self, raised: AsyncEvent) {
        devx::raise(raised);
        let (objects, number, event) = match raised {
            AsyncEvent::CqError(cqn) => (&self.cqs, cqn, ibv_event_type::IBV_EVENT_CQ_ERR),
            AsyncEvent::QpFatal(qpn) => (&self.qps, qpn, ibv_event_type::IBV_EVENT_QP_FATAL),
            AsyncEvent::QpRequestError(qpn) => (&self.qps, qpn, ibv_event_type::IBV_EVENT_QP_REQ_ERR),
            AsyncEvent::QpAccessError(qpn) => (&self.qps, qpn, ibv_event_type::IBV_EVENT_QP_ACCESS_ERR),
            // There are no shared receive queues.
            AsyncEvent::QpLastWqeReached(_) | AsyncEvent::SrqLimitReached(_) => return,
        };
        // Under the lock, so that the object is not gone meanwhile.
        if let Some(Concerned { events, element }) = objects.0.lock().get(&number) {
            events.push(*element, event);
        }
    }
}

/// A difference, one bit each.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(crate) enum Quirk {
    /// Doorbells of queue pairs that are made are lost where the application rings them itself.
    Deaf = 1,
    /// The library is of rdma-core 28: completion queues take no parent domain.
    OldLibrary = 2,
    /// A queue pair in ERR flushes only the sends that a doorbell named.
    FlushesByDoorbell = 4,
    /// A queue pair goes to ERR up to 10 ms after it was told to.
    LateFlushes = 8,
    /// Completions of flushed requests do not say of which request they are.
    NoFlushCounters = 16,
}

static QUIRKS: AtomicU32 = AtomicU32::new(0);

impl Quirk {
    pub(crate) fn is_on(self) -> bool {
        QUIRKS.load(Ordering::SeqCst) & self as u32 != 0
    }
}

/// From now on the card has the quirks of these bits, and no others.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdsync_standin_quirks(bits: u32) {
    QUIRKS.store(bits, Ordering::SeqCst);
    if let Ok(hca) = Hca::get() {
        hca.card.hide_flush_counters(Quirk::NoFlushCounters.is_on());
    }
}

/// Its name.
const NAME: &[u8] = b"mlx5_standin";

struct Listed(UnsafeCell<ibv_device>);

// SAFETY: nobody writes to it.
unsafe impl Sync for Listed {}

static DEVICE: Listed = Listed(UnsafeCell::new(ibv_device {
    node_type: ibv_node_type::IBV_NODE_CA,
    transport_type: ibv_transport_type::IBV_TRANSPORT_IB,
    name: name(NAME),
    dev_name: name(b"uverbs_standin"),
    ..ibv_device::zeroed()
}));

const fn name(text: &[u8]) -> [c_char; 64] {
    let mut name = [0; 64];
    let mut n = 0;
    while n < text.len() {
        name[n] = text[n].cast_signed();
        n += 1;
    }
    name
}

/// Whether the device is that of this library.
pub(crate) fn is_ours(device: *mut ibv_device) -> bool {
    ptr::eq(device, DEVICE.0.get())
}

/// The GUID, big-endian: the half of the address that names the interface.
pub(crate) fn guid(hca: &Hca) -> u64 {
    let [_, _, _, _, _, _, _, _, half @ ..] = hca.card.gid().0;
    u64::from_ne_bytes(half)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
    if !num_devices.is_null() {
        // SAFETY: the caller vouches for the place.
        unsafe { num_devices.write(1) };
    }
    Box::into_raw(Box::new([DEVICE.0.get(), ptr::null_mut()])).cast()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: the caller vouches for it: a box of the function above.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_device; 2]>()) });
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: the caller vouches for the device.
    unsafe { (&raw const (*device).name).cast() }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_get_device_guid(_device: *mut ibv_device) -> u64 {
    Hca::get().map_or(0, guid)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_get_device_index(_device: *mut ibv_device) -> c_int {
    -1
}

/// A function that names the values of an enumeration.
macro_rules! names {
    ($($function:ident($type:ident) { $($value:ident = $text:literal,)* })*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $function(value: $type) -> *const c_char {
            let text: &'static CStr = match value {
                $($type::$value => $text,)*
                _ => c"unknown",
            };
            text.as_ptr()
        }
    )*};
}

names! {
    ibv_event_type_str(ibv_event_type) {
        IBV_EVENT_CQ_ERR = c"CQ error",
        IBV_EVENT_QP_FATAL = c"local work queue catastrophic error",
        IBV_EVENT_QP_REQ_ERR = c"invalid request local work queue error",
        IBV_EVENT_QP_ACCESS_ERR = c"local access violation work queue error",
    }
    ibv_wc_status_str(ibv_wc_status) {
        IBV_WC_SUCCESS = c"success",
        IBV_WC_LOC_LEN_ERR = c"local length error",
        IBV_WC_LOC_QP_OP_ERR = c"local QP operation error",
        IBV_WC_LOC_PROT_ERR = c"local protection error",
        IBV_WC_WR_FLUSH_ERR = c"Work Request Flushed Error",
        IBV_WC_REM_INV_REQ_ERR = c"remote invalid request error",
        IBV_WC_REM_ACCESS_ERR = c"remote access error",
        IBV_WC_REM_OP_ERR = c"remote operation error",
        IBV_WC_RETRY_EXC_ERR = c"transport retry counter exceeded",
        IBV_WC_RNR_RETRY_EXC_ERR = c"RNR retry counter exceeded",
    }
    ibv_node_type_str(ibv_node_type) {
        IBV_NODE_CA = c"InfiniBand channel adapter",
    }
    ibv_port_state_str(ibv_port_state) {
        IBV_PORT_ACTIVE = c"active",
    }
}

/// There is nothing to do.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_fork_init() -> c_int {
    0
}
