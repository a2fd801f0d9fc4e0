//! An open device: its objects, and the commands that make, change and end them.

mod cq;
mod device;
mod devx;
mod dmabuf;
mod ioctl;
mod memory;
mod modify;
mod qp;
mod srq;

use std::collections::HashMap;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustix::io::Errno;

#[cfg(target_arch = "x86_64")]
pub(crate) use self::dmabuf::exported;
use crate::abi;
use crate::command::{Command, name};
use crate::events::{EventPipe, into_program};
use crate::hca::{EventSource, Hca};
use crate::log::log;
use crate::user::User;

pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// Objects of a kind, by handle.
#[derive(Debug)]
struct Table<T>(Mutex<HashMap<u32, Arc<T>>>);

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Table<T> {
    fn get(&self, handle: u32) -> Result<Arc<T>> {
        self.0.lock().get(&handle).cloned().ok_or(Errno::INVAL)
    }

    fn find(&self, is_it: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        self.0.lock().values().find(|object| is_it(object)).cloned()
    }

    fn add(&self, handle: u32, object: Arc<T>) {
        self.0.lock().insert(handle, object);
    }

    /// Removes an object that no other object uses; a command that just runs counts as one.
    fn remove(&self, handle: u32) -> Result<Arc<T>> {
        let mut objects = self.0.lock();
        let object = objects.remove(&handle).ok_or(Errno::INVAL)?;
        if Arc::strong_count(&object) > 1 {
            objects.insert(handle, object);
            return Err(Errno::BUSY);
        }
        Ok(object)
    }
}

/// Which events come by a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Events {
    Asynchronous,
    Completions,
    Devx,
}

/// A protection domain.
#[derive(Debug)]
struct Pd {
    pdn: u32,
}

/// An open device. Its objects end with it.
#[derive(Debug)]
pub(crate) struct Context {
    hca: &'static Hca,
    /// The memory of the doorbell pages.
    file: OwnedFd,
    /// Set by GET_CONTEXT.
    async_events: OnceLock<Arc<EventPipe>>,
    handles: AtomicU32,
    // Dropped in this order: objects before those that they use.
    devx: devx::Devx,
    qps: Table<qp::Qp>,
    srqs: Table<srq::Srq>,
    cqs: Table<cq::Cq>,
    channels: Mutex<HashMap<RawFd, (Events, Arc<EventPipe>)>>,
    /// Descriptors of channels made since [`Context::take_new_channels`].
    new_channels: Mutex<Vec<RawFd>>,
    mrs: Table<memory::Mr>,
    ahs: Table<qp::Ah>,
    pds: Table<Pd>,
    uars: Mutex<HashMap<u32, ioctl::Uar>>,
}

impl Context {
    /// A context whose doorbell pages are those of `file`.
    pub(crate) fn new(hca: &'static Hca, file: OwnedFd) -> Self {
        Self {
            hca,
            file,
            async_events: OnceLock::new(),
            handles: AtomicU32::new(0),
            devx: devx::Devx::default(),
            qps: Table::default(),
            srqs: Table::default(),
            cqs: Table::default(),
            channels: Mutex::default(),
            new_channels: Mutex::default(),
            mrs: Table::default(),
            ahs: Table::default(),
            pds: Table::default(),
            uars: Mutex::default(),
        }
    }

    fn new_handle(&self) -> u32 {
        self.handles.fetch_add(1, Ordering::Relaxed)
    }

    /// The pipe of asynchronous events.
    ///
    /// # Errors
    /// `EINVAL` before GET_CONTEXT, as for all other commands.
    fn async_events(&self) -> Result<&Arc<EventPipe>> {
        self.async_events.get().ok_or(Errno::INVAL)
    }

    fn event_source(&self, user_handle: u64) -> Result<Arc<EventSource>> {
        Ok(EventSource::new(self.async_events()?, user_handle))
    }

    /// Gives the descriptor of a new channel to the program.
    fn add_channel(&self, events: Events, pipe: Arc<EventPipe>, program: OwnedFd) {
        let fd = into_program(program);
        self.channels.lock().insert(fd, (events, pipe));
        self.new_channels.lock().push(fd);
    }

    /// The channel of a descriptor.
    ///
    /// # Errors
    /// `EBADF`, also if other events come by it.
    fn channel(&self, events: Events, fd: RawFd) -> Result<Arc<EventPipe>> {
        let channels = self.channels.lock();
        let known = channels.get(&fd).filter(|(known, _)| *known == events);
        known.map(|(_, pipe)| pipe.clone()).ok_or(Errno::BADF)
    }

    /// Bytes that a read of this channel must have room for. A kernel refuses others.
    pub(crate) fn event_size(&self, fd: RawFd) -> Option<usize> {
        self.channels.lock().get(&fd).map(|(_, pipe)| pipe.record())
    }

    /// Descriptors of channels that the program got since the last call.
    pub(crate) fn take_new_channels(&self) -> Vec<RawFd> {
        std::mem::take(&mut *self.new_channels.lock())
    }

    /// The program closes the descriptor of a channel. One of completions ends with its last completion queue, one of DevX with its
    /// last descriptor, and with it the subscriptions.
    pub(crate) fn close_channel(&self, fd: RawFd) {
        self.channels.lock().remove(&fd);
    }

    /// The program duplicated the descriptor of a channel.
    pub(crate) fn duplicate_channel(&self, from: RawFd, to: RawFd) {
        let mut channels = self.channels.lock();
        if let Some(channel) = channels.get(&from).cloned() {
            channels.insert(to, channel);
        }
    }

    /// Runs a write command.
    ///
    /// # Errors
    /// The `errno` of the command.
    pub(crate) fn write(&self, user: &dyn User, bytes: &[u8]) -> Result<()> {
        let command = Command::parse(bytes).inspect_err(|error| log!("a command is malformed: {error}"))?;
        if command.number != abi::IB_USER_VERBS_CMD_GET_CONTEXT {
            self.async_events()?;
        }
        self.run(user, &command).inspect_err(|error| {
            let extended = command.number & abi::IB_USER_VERBS_CMD_FLAG_EXTENDED != 0;
            let prefix = if extended { "EX_" } else { "" };
            log!("command {prefix}{}: {error}", name(command.number));
        })
    }

    fn run(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        const EX: u32 = abi::IB_USER_VERBS_CMD_FLAG_EXTENDED;
        const EX_QUERY_DEVICE: u32 = EX | abi::IB_USER_VERBS_CMD_QUERY_DEVICE;
        const EX_CREATE_CQ: u32 = EX | abi::IB_USER_VERBS_CMD_CREATE_CQ;
        const EX_CREATE_QP: u32 = EX | abi::IB_USER_VERBS_CMD_CREATE_QP;
        const EX_MODIFY_QP: u32 = EX | abi::IB_USER_VERBS_CMD_MODIFY_QP;
        match command.number {
            abi::IB_USER_VERBS_CMD_GET_CONTEXT => self.get_context(user, command),
            abi::IB_USER_VERBS_CMD_QUERY_DEVICE => self.query_device(user, command),
            EX_QUERY_DEVICE => self.query_device_extended(user, command),
            abi::IB_USER_VERBS_CMD_QUERY_PORT => self.query_port(user, command),
            abi::IB_USER_VERBS_CMD_ALLOC_PD => self.alloc_pd(user, command),
            abi::IB_USER_VERBS_CMD_DEALLOC_PD => self.dealloc_pd(command),
            abi::IB_USER_VERBS_CMD_CREATE_AH => self.create_ah(user, command),
            abi::IB_USER_VERBS_CMD_DESTROY_AH => self.destroy_ah(command),
            abi::IB_USER_VERBS_CMD_REG_MR => self.reg_mr(user, command),
            abi::IB_USER_VERBS_CMD_REREG_MR => self.rereg_mr(user, command),
            abi::IB_USER_VERBS_CMD_DEREG_MR => self.dereg_mr(command),
            abi::IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL => self.create_channel(user, command),
            abi::IB_USER_VERBS_CMD_CREATE_CQ => self.create_cq(user, command),
            EX_CREATE_CQ => self.create_cq_extended(user, command),
            abi::IB_USER_VERBS_CMD_RESIZE_CQ => self.resize_cq(user, command),
            abi::IB_USER_VERBS_CMD_DESTROY_CQ => self.destroy_cq(user, command),
            abi::IB_USER_VERBS_CMD_CREATE_QP => self.create_qp(user, command),
            EX_CREATE_QP => self.create_qp_extended(user, command),
            abi::IB_USER_VERBS_CMD_MODIFY_QP => self.modify_qp(command),
            EX_MODIFY_QP => self.modify_qp_extended(user, command),
            abi::IB_USER_VERBS_CMD_QUERY_QP => self.query_qp(user, command),
            abi::IB_USER_VERBS_CMD_CREATE_SRQ => self.create_srq(user, command),
            abi::IB_USER_VERBS_CMD_MODIFY_SRQ => self.modify_srq(command),
            abi::IB_USER_VERBS_CMD_QUERY_SRQ => self.query_srq(user, command),
            abi::IB_USER_VERBS_CMD_DESTROY_SRQ => self.destroy_srq(user, command),
            abi::IB_USER_VERBS_CMD_DESTROY_QP => self.destroy_qp(user, command),
            _ => Err(Errno::OPNOTSUPP),
        }
    }
}

#[cfg(test)]
mod tests;
