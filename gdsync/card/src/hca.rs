//! The software HCA behind an emulated device, and whom its events concern.

use std::collections::HashMap;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use gdsync_device::error::Error;
use gdsync_device::{Gid, GpuNudge};
use gdsync_soft::{AsyncEvent, AsyncEvents, Card, Network, SoftHcaConfig};
use mlx5_ring::AddressVector;
use parking_lot::Mutex;
use rdma_core_sys::mlx5::ifc::event;
use rustix::io::Errno;

use crate::abi::{bytes_of, ib_uverbs_async_event_desc};
use crate::address::{Link, Port};
use crate::events::EventPipe;
use crate::log::{failure, follow_hca};
use crate::modes::Modes;

/// How many numbers are tried for a port: another process may have the same.
const ATTEMPTS: usize = 64;

/// A running HCA. It ends with the process.
#[derive(Debug)]
pub(crate) struct Hca {
    pub(crate) card: Card,
    pub(crate) port: Port,
    pub(crate) owners: Arc<Owners>,
    pub(crate) modes: Modes,
    /// Queue pairs made so far.
    made: AtomicU32,
}

impl Hca {
    /// Starts one whose port has a number that no other process of the host has.
    ///
    /// # Errors
    /// `ENODEV`, with the reason in the log, or on standard error.
    pub(crate) fn start(link: Link) -> Result<Self, Errno> {
        let refused = |error: &dyn std::fmt::Display| {
            failure(format_args!("the software HCA does not start: {error}"));
            Errno::NODEV
        };
        follow_hca();
        let config = SoftHcaConfig::from_env().map_err(|error| refused(&error))?;
        let modes = Modes::from_env().map_err(|error| refused(&error))?;
        let owners = Arc::new(Owners::default());
        let mut last = None;
        for _ in 0..ATTEMPTS {
            let random = gdsync_device::random().map_err(|error| refused(&error))?;
            let port = Port { link, number: link.number(u32::from_ne_bytes(random)) };
            let config = SoftHcaConfig { gid: Some(port.link_local()), ..config.clone() };
            match Card::start(&config, owners.clone()) {
                Ok(card) => {
                    card.hide_flush_counters(modes.no_flush_counter);
                    return Ok(Self { card, port, owners, modes, made: AtomicU32::new(0) });
                }
                Err(Error::Sys { source, .. }) if source.kind() == std::io::ErrorKind::AddrInUse => {
                    last = Some(source);
                }
                Err(error) => return Err(refused(&error)),
            }
        }
        Err(refused(&format!("no free address among {ATTEMPTS}: {last:?}")))
    }

    /// Whether the next queue pair hears no doorbell.
    pub(crate) fn is_next_deaf(&self) -> bool {
        self.made.fetch_add(1, Ordering::Relaxed) < self.modes.deaf
    }
}

/// The addresses that the datagrams of a port may have.
#[derive(Debug)]
pub(crate) struct PortNetwork(pub(crate) Port);

impl Network for PortNetwork {
    fn destination(&self, to: &AddressVector) -> Option<Gid> {
        let link = self.0.link;
        link.canonical(link.path(to.rlid, to.rgid))
    }

    fn source(&self, index: u8) -> Gid {
        self.0.gid(index.into()).map_or(self.0.link_local(), |(gid, _)| gid)
    }

    fn lid(&self) -> u16 {
        self.0.lid()
    }
}

/// Which events of an object a channel is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventKind {
    /// Asynchronous ones of verbs: records of the object's name and the number (`enum ib_event_type`).
    Asynchronous,
    /// Completions of a queue that is armed: records of its name.
    Completions,
    /// Those of DevX with this number (`MLX5_EVENT_TYPE_*`): records of its name.
    Devx(u16),
}

/// A channel that is told of an object's events.
#[derive(Debug)]
struct Subscription {
    kind: EventKind,
    /// The program's name of the object: its handle, or a cookie.
    name: u64,
    pipe: Weak<EventPipe>,
    /// Channels of verbs stay until the object ends, those of DevX end with their last descriptor.
    _kept: Option<Arc<EventPipe>>,
    /// Records sent.
    sent: u32,
}

/// An object whose events a program reads. There are no subscriptions once it has ended: the HCA reports outside its lock, so an event
/// may come later than the end of its object.
#[derive(Debug, Default)]
pub(crate) struct EventSource(Mutex<Vec<Subscription>>);

/// Events of an object that a program has read or will have read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reported {
    pub(crate) asynchronous: u32,
    pub(crate) completions: u32,
}

impl EventSource {
    /// An object of verbs.
    pub(crate) fn new(pipe: &Arc<EventPipe>, user_handle: u64) -> Arc<Self> {
        let source = Self::default();
        source.subscribe(EventKind::Asynchronous, pipe, user_handle);
        Arc::new(source)
    }

    pub(crate) fn subscribe(&self, kind: EventKind, pipe: &Arc<EventPipe>, name: u64) {
        let kept = (!matches!(kind, EventKind::Devx(_))).then(|| pipe.clone());
        self.0.lock().push(Subscription { kind, name, pipe: Arc::downgrade(pipe), _kept: kept, sent: 0 });
    }

    fn send(&self, kind: EventKind, record: impl Fn(u64) -> Vec<u8>) {
        for subscription in self.0.lock().iter_mut().filter(|subscription| subscription.kind == kind) {
            if let Some(pipe) = subscription.pipe.upgrade() {
                subscription.sent += 1;
                pipe.send(ptr::from_ref(self).addr(), &record(subscription.name));
            }
        }
    }

    /// The object has ended, and with it what the program has not read.
    pub(crate) fn finish(&self) -> Reported {
        let mut reported = Reported::default();
        for Subscription { kind, pipe, sent, .. } in std::mem::take(&mut *self.0.lock()) {
            let Some(pipe) = pipe.upgrade() else { continue };
            let read = sent.saturating_sub(pipe.take_back(ptr::from_ref(self).addr()));
            match kind {
                EventKind::Asynchronous => reported.asynchronous += read,
                EventKind::Completions => reported.completions += read,
                EventKind::Devx(_) => {}
            }
        }
        reported
    }

    fn raise(&self, event: AsyncEvent) {
        let (event_type, devx) = match event {
            AsyncEvent::CqError(_) => (0, event::CQ_ERROR),
            AsyncEvent::QpFatal(_) => (1, event::WQ_CATAS_ERROR),
            AsyncEvent::QpRequestError(_) => (2, event::WQ_INVAL_REQ_ERROR),
            AsyncEvent::QpAccessError(_) => (3, event::WQ_ACCESS_ERROR),
            AsyncEvent::SrqLimitReached(_) => (15, event::SRQ_RQ_LIMIT),
            AsyncEvent::QpLastWqeReached(_) => (16, event::SRQ_LAST_WQE),
        };
        self.send(EventKind::Asynchronous, |element| {
            bytes_of(&ib_uverbs_async_event_desc { element, event_type, reserved: 0 }).to_vec()
        });
        self.send(EventKind::Devx(devx), |cookie| cookie.to_ne_bytes().to_vec());
    }
}

impl GpuNudge for EventSource {
    fn nudge(&self) {
        for kind in [EventKind::Completions, EventKind::Devx(event::COMP)] {
            self.send(kind, |name| name.to_ne_bytes().to_vec());
        }
    }
}

/// The objects of an HCA that events may concern, by number.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    pub(crate) cqs: Numbered,
    pub(crate) qps: Numbered,
    pub(crate) srqs: Numbered,
}

/// Objects of a kind.
#[derive(Debug, Default)]
pub(crate) struct Numbered(Mutex<HashMap<u32, Weak<EventSource>>>);

impl Numbered {
    pub(crate) fn add(&self, number: u32, source: &Arc<EventSource>) {
        self.0.lock().insert(number, Arc::downgrade(source));
    }

    pub(crate) fn remove(&self, number: u32) {
        self.0.lock().remove(&number);
    }

    fn raise(&self, number: u32, event: AsyncEvent) {
        let source = self.0.lock().get(&number).and_then(Weak::upgrade);
        if let Some(source) = source {
            source.raise(event);
        }
    }
}

impl AsyncEvents for Owners {
    fn raise(&self, event: AsyncEvent) {
        let (objects, number) = match event {
            AsyncEvent::CqError(number) => (&self.cqs, number),
            AsyncEvent::SrqLimitReached(number) => (&self.srqs, number),
            AsyncEvent::QpFatal(number)
            | AsyncEvent::QpRequestError(number)
            | AsyncEvent::QpAccessError(number)
            | AsyncEvent::QpLastWqeReached(number) => (&self.qps, number),
        };
        objects.raise(number, event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_after_the_end_of_their_object_are_not_sent() {
        let (pipe, program) = EventPipe::new(8).map(|(pipe, program)| (Arc::new(pipe), program)).unwrap();
        let read = || {
            let mut records = [0; 16];
            assert_eq!(rustix::io::read(&program, &mut records), Ok(8), "one record for each read");
            u64::from_ne_bytes(*records.first_chunk().unwrap())
        };
        for kind in [EventKind::Completions, EventKind::Devx(event::COMP)] {
            let [ended, other, new] = [1, 2, 1].map(|name| {
                let source = EventSource::default();
                source.subscribe(kind, &pipe, name);
                source
            });
            ended.nudge();
            assert_eq!(read(), 1);
            ended.nudge();
            let completions = u32::from(kind == EventKind::Completions);
            assert_eq!(ended.finish(), Reported { completions, asynchronous: 0 }, "one was read");
            ended.nudge();
            other.nudge();
            // An object at the same address has the same name.
            new.nudge();
            drop(ended);
            assert_eq!([read(), read()], [2, 1]);
        }
        assert_eq!(rustix::io::ioctl_fionread(&program), Ok(0));
    }
}
