//! REMOVE

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use rdma_core_sys::verbs::ibv_event_type;

use super::bell::Bell;
use super::core::Core;
use super::device::Channel;
use crate::{Event, Open};
use gdsync_device::DoorbellSet;
use gdsync_device::engine::{ProgressEngine, ProgressState};
use gdsync_device::error::{Error, Result};

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) core: Mutex<Core>,
    pub(super) open: Arc<Open>,
    rung: DoorbellSet,
    pub(super) duties: ProgressState,
    bell: Bell,
    channel: Arc<Channel>,
    /// Requests at the device.
    outstanding: Arc<AtomicUsize>,
    /// Slots of queue pairs, by QPN.
    places: RwLock<HashMap<u32, usize>>,
}

impl Shared {
    pub(super) fn new(open: Arc<Open>, strict: bool) -> Result<Self> {
        let channel = Arc::new(Channel::create(&open)?);
        let outstanding = Arc::<AtomicUsize>::default();
        let core = Core::new(channel.clone(), open.clone(), outstanding.clone(), strict);
        Ok(Self {
            core: Mutex::new(core),
            open,
            rung: DoorbellSet::default(),
            duties: ProgressState::default(),
            bell: Bell::create()?,
            channel,
            outstanding,
            places: RwLock::default(),
        })
    }

    /// Slot of a queue pair.
    pub(super) fn place(&self, qpn: u32) -> Option<usize> {
        self.places.read().get(&qpn).copied()
    }

    pub(super) fn insert(&self, qpn: u32, place: usize) {
        self.places.write().insert(qpn, place);
    }

    pub(super) fn forget(&self, qpn: u32) -> Option<usize> {
        self.places.write().remove(&qpn)
    }

    /// Handles an asynchronous event of the device.
    pub(super) fn tell(&self, event: Event) {
        let place = match event {
            Event::QueuePair { qpn, .. } => match self.place(qpn) {
                Some(place) => Some(place),
                // Destroyed meanwhile.
                None => return,
            },
            Event::CompletionQueue(_) | Event::Device | Event::Port { .. } => None,
        };
        if let Some(cause) = event.cause(&self.open).or_else(|| self.is_unplugged(event)) {
            self.with(|core| {
                core.break_off(place, &cause);
                if event == Event::Device {
                    core.force();
                }
            });
            self.wake();
        }
    }

    /// Error for the loss of the port in use.
    fn is_unplugged(&self, event: Event) -> Option<Error> {
        let Event::Port { number, kind: ibv_event_type::IBV_EVENT_PORT_ERR } = event else { return None };
        let why = format!(
            "port {number} went down (IBV_EVENT_PORT_ERR): check the cable and the peer's port, then reset and connect again"
        );
        let device = self.open.name().to_owned();
        (number == self.open.port().number).then_some(Error::Device { device, why })
    }
}

impl ProgressEngine for Shared {
    type Core = Core;
    const THREAD: &str = "gdsync-proxy";

    fn core(&self) -> &Mutex<Core> {
        &self.core
    }

    fn rung(&self) -> &DoorbellSet {
        &self.rung
    }

    fn duties(&self) -> &ProgressState {
        &self.duties
    }

    fn has_arrivals(&self) -> bool {
        false
    }

    /// The device's queues are polled under the lock.
    fn may_have_arrivals(&self) -> bool {
        self.outstanding.load(Ordering::Relaxed) > 0
    }

    fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        let ready = || {
            let Some(mut core) = self.core.try_lock() else { return true };
            core.arm();
            let worked = core.poll();
            self.settle(core);
            worked || ready()
        };
        if self.bell.sleep(self.channel.fd(), &ready, timeout) {
            self.with(Core::take_events);
        }
    }

    fn wake(&self) {
        self.bell.ring();
    }
}
