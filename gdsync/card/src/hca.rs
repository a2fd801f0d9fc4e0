//! The software HCA behind an emulated device, and whom its events concern.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use gdsync_device::error::Error;
use gdsync_device::{Gid, GpuNudge};
use gdsync_soft::{AsyncEvent, AsyncEvents, Card, Network, SoftHcaConfig};
use mlx5_ring::AddressVector;
use parking_lot::Mutex;
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

/// Who is told of the asynchronous events of an object.
pub(crate) trait Listener: std::fmt::Debug + Send + Sync {
    fn raise(&self, event: AsyncEvent);
}

/// A queue whose asynchronous events a program reads.
#[derive(Debug)]
pub(crate) struct EventSource {
    pipe: Arc<EventPipe>,
    /// The program's name of the object.
    user_handle: u64,
    /// Records sent. `None` once they are taken back: the HCA reports outside its lock, so an event may come later than the end of
    /// its object.
    sent: Mutex<Option<u32>>,
}

impl EventSource {
    pub(crate) fn new(pipe: Arc<EventPipe>, user_handle: u64) -> Arc<Self> {
        Arc::new(Self { pipe, user_handle, sent: Mutex::new(Some(0)) })
    }

    fn send(&self, record: &[u8]) {
        if let Some(sent) = &mut *self.sent.lock() {
            *sent += 1;
            self.pipe.send(record);
        }
    }

    /// Takes back what the program has not read. Returns how many events it has read or will have read.
    pub(crate) fn finish(&self) -> u32 {
        let sent = self.sent.lock().take().unwrap_or_default();
        let element = self.user_handle.to_ne_bytes();
        sent.saturating_sub(self.pipe.take_back(|record| record.starts_with(&element)))
    }
}

/// Asynchronous events, by the numbers of `enum ib_event_type`.
impl Listener for EventSource {
    fn raise(&self, event: AsyncEvent) {
        let event_type = match event {
            AsyncEvent::CqError(_) => 0,
            AsyncEvent::QpFatal(_) => 1,
            AsyncEvent::QpRequestError(_) => 2,
            AsyncEvent::QpAccessError(_) => 3,
            AsyncEvent::SrqLimitReached(_) => 15,
            AsyncEvent::QpLastWqeReached(_) => 16,
        };
        let record = ib_uverbs_async_event_desc { element: self.user_handle, event_type, reserved: 0 };
        self.send(bytes_of(&record));
    }
}

/// Completion events: records of eight bytes.
impl GpuNudge for EventSource {
    fn nudge(&self) {
        self.send(&self.user_handle.to_ne_bytes());
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
pub(crate) struct Numbered(Mutex<HashMap<u32, Weak<dyn Listener>>>);

impl Numbered {
    pub(crate) fn add<L: Listener + 'static>(&self, number: u32, listener: &Arc<L>) {
        let listener: Weak<L> = Arc::downgrade(listener);
        self.0.lock().insert(number, listener);
    }

    pub(crate) fn remove(&self, number: u32) {
        self.0.lock().remove(&number);
    }

    fn raise(&self, number: u32, event: AsyncEvent) {
        let listener = self.0.lock().get(&number).and_then(Weak::upgrade);
        if let Some(listener) = listener {
            listener.raise(event);
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
        let (pipe, program) = EventPipe::new(8).unwrap();
        let pipe = Arc::new(pipe);
        let [ended, other] = [1, 2].map(|handle| EventSource::new(pipe.clone(), handle));
        ended.nudge();
        assert_eq!(ended.finish(), 0, "the program has read none");
        ended.nudge();
        other.nudge();
        let mut record = [0; 8];
        rustix::io::read(&program, &mut record).unwrap();
        assert_eq!(u64::from_ne_bytes(record), 2);
    }
}
