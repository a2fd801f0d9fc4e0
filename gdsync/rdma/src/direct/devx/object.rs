//! DevX objects, their asynchronous events, and errors of commands.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::{fmt, io};

use rdma_core_sys::Mlx5;
use rdma_core_sys::mlx5::ifc::{Opcode, Status, event};
use rdma_core_sys::mlx5::{
    mlx5dv_devx_async_event_hdr, mlx5dv_devx_create_event_channel_flags as flags, mlx5dv_devx_event_channel,
    mlx5dv_devx_obj,
};
use rdma_core_sys::verbs::ibv_event_type;

use super::mailbox::{Command, status};
use crate::Raw;
use crate::explain::last_errno;
use crate::{Event, EventSource, FailedCq, Open};
use gdsync_device::error::{Error, Result};

/// Advice for devices without DevX.
pub(super) const NO_DEVX: &str = "queues in GPU memory need DevX: a kernel whose mlx5_ib has it (CONFIG_INFINIBAND_USER_ACCESS, Linux 4.19), \
     firmware with user contexts (`mlxconfig -d DEVICE set UCTX_EN=1`, then a reset of the card), and in a container \
     or guest a function that may use them; or leave the queues in host memory (OnGpu::empty())";

/// A completion queue or queue pair of the firmware, destroyed on drop.
pub(in crate::direct) struct Object {
    open: Arc<Open>,
    mlx5: &'static Mlx5,
    /// `None` after destruction.
    raw: Option<Raw<mlx5dv_devx_obj>>,
    what: &'static str,
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.what, self.open.name())
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        self.destroy();
    }
}

impl Object {
    /// Creates an object. Also returns the answer.
    pub(super) fn create(
        open: &Arc<Open>,
        mlx5: &'static Mlx5,
        what: &'static str,
        command: &Command,
    ) -> Result<(Self, Vec<u8>)> {
        let mut object = Self { open: open.clone(), mlx5, raw: None, what };
        let answer = run("mlx5dv_devx_obj_create", open, command, |input, len, output, room| {
            // SAFETY: the device is open, and both buffers have the given lengths.
            let raw =
                unsafe { mlx5.mlx5dv_devx_obj_create(open.context().as_ptr(), input, len, output, room) };
            object.raw = NonNull::new(raw).map(Raw);
            if raw.is_null() { last_errno() } else { 0 }
        })?;
        Ok((object, answer))
    }

    /// Destroys the object. Returns false if the card refuses.
    pub(super) fn destroy(&mut self) -> bool {
        let Some(raw) = self.raw.take() else { return true };
        // SAFETY: created here, destroyed only here.
        let errno = unsafe { self.mlx5.mlx5dv_devx_obj_destroy(raw.as_ptr()) };
        if errno != 0 {
            tracing::error!(object = ?self, errno, "an object of DevX was not destroyed");
        }
        errno == 0
    }

    pub(super) fn raw(&self) -> *mut mlx5dv_devx_obj {
        self.raw.as_ref().map_or(std::ptr::null_mut(), |raw| raw.as_ptr())
    }

    /// Runs a modify command.
    pub(super) fn modify(&self, command: &Command) -> Result<()> {
        let answer = run("mlx5dv_devx_obj_modify", &self.open, command, |input, len, output, room| {
            // SAFETY: the object lives until `self` is dropped, and both buffers have the given lengths.
            unsafe { self.mlx5.mlx5dv_devx_obj_modify(self.raw(), input, len, output, room) }
        });
        answer.map(drop)
    }

    /// Runs a query command. Returns the answer.
    pub(super) fn query(&self, command: &Command) -> Result<Vec<u8>> {
        run("mlx5dv_devx_obj_query", &self.open, command, |input, len, output, room| {
            // SAFETY: the object lives until `self` is dropped, and both buffers have the given lengths.
            unsafe { self.mlx5.mlx5dv_devx_obj_query(self.raw(), input, len, output, room) }
        })
    }
}

/// Runs a command for the whole device. Returns the answer.
pub(super) fn ask(open: &Arc<Open>, mlx5: &Mlx5, command: &Command) -> Result<Vec<u8>> {
    run("mlx5dv_devx_general_cmd", open, command, |input, len, output, room| {
        // SAFETY: the device is open, and both buffers have the given lengths.
        unsafe { mlx5.mlx5dv_devx_general_cmd(open.context().as_ptr(), input, len, output, room) }
    })
}

/// Runs a command by `send`, which gets the input and output buffers with their lengths and returns an errno. Returns the answer.
fn run(
    call: &'static str,
    open: &Open,
    command: &Command,
    send: impl FnOnce(*const c_void, usize, *mut c_void, usize) -> i32,
) -> Result<Vec<u8>> {
    let mut answer = vec![0; command.answer];
    let (input, output) = (command.bytes(), answer.as_mut_slice());
    match send(input.as_ptr().cast(), input.len(), output.as_mut_ptr().cast(), output.len()) {
        0 => Ok(answer),
        errno => Err(refused(call, open, command.opcode, &answer, errno)),
    }
}

fn refused(call: &'static str, open: &Open, opcode: Opcode, answer: &[u8], errno: i32) -> Error {
    let (status, syndrome) = status(answer);
    Error::Verbs {
        call,
        subject: format!(
            "{} on {} (status {:#x}, {}; syndrome {syndrome:#x})",
            opcode.name(),
            open.name(),
            status.0,
            status.name()
        ),
        // Some releases return negative numbers.
        source: Arc::new(io::Error::from_raw_os_error(errno.abs())),
        advice: advice(opcode, status, errno.abs()),
    }
}

/// Advice for a refused command.
fn advice(opcode: Opcode, status: Status, errno: i32) -> String {
    let is_create = matches!(opcode, Opcode::CREATE_CQ | Opcode::CREATE_QP);
    match (status, errno) {
        (Status::OK, libc::EOPNOTSUPP | libc::ENOSYS | libc::EPERM | libc::EACCES | libc::EINVAL)
            if opcode == Opcode::QUERY_HCA_CAP =>
        {
            NO_DEVX.into()
        }
        (Status::OK, libc::EIO | libc::ENODEV) => {
            "the device is gone or in a fatal state: check `dmesg`, and open it again".into()
        }
        (Status::OK, libc::EOPNOTSUPP | libc::ENOSYS) => NO_DEVX.into(),
        (Status::OK, libc::EPERM | libc::EACCES) => {
            "the kernel does not let this process send the command: check its access to /dev/infiniband".into()
        }
        (Status::LIM_ERR | Status::NO_RES, _) | (_, libc::ENOMEM | libc::EAGAIN) if is_create => {
            "the card has no more of these: destroy some, also of other processes".into()
        }
        (Status::BAD_QP_STATE | Status::BAD_RES_STATE, _) => {
            "the queue pair is not in the state that this step begins with: a failure may have put it into ERR".into()
        }
        _ => "the firmware does not take this: report the status and syndrome with the firmware's version (`ibv_devinfo`), \
              or leave the queues in host memory (OnGpu::empty())"
            .into(),
    }
}

/// Events subscribed for a queue pair, and for a completion queue.
pub(super) const OF_QP: &[u16] = &[event::WQ_CATAS_ERROR, event::WQ_INVAL_REQ_ERROR, event::WQ_ACCESS_ERROR];
pub(super) const OF_CQ: &[u16] = &[event::CQ_ERROR];

/// An event channel.
pub(in crate::direct) struct EventChannel {
    _open: Arc<Open>,
    mlx5: &'static Mlx5,
    raw: Raw<mlx5dv_devx_event_channel>,
}

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
fn decode(cookie: u64) -> Option<Event> {
    let number = u32::try_from(cookie & u64::from(u32::MAX)).expect("masked");
    let of_qp = |kind| Event::QueuePair { qpn: number, kind };
    Some(match u16::try_from(cookie >> 32).ok()? {
        event::CQ_ERROR => Event::CompletionQueue(FailedCq::Number(number)),
        event::WQ_CATAS_ERROR => of_qp(ibv_event_type::IBV_EVENT_QP_FATAL),
        event::WQ_INVAL_REQ_ERROR => of_qp(ibv_event_type::IBV_EVENT_QP_REQ_ERR),
        event::WQ_ACCESS_ERROR => of_qp(ibv_event_type::IBV_EVENT_QP_ACCESS_ERR),
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
        Some(Arc::new(Self { _open: open.clone(), mlx5, raw: Raw(raw) }))
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
                tracing::debug!(?object, kind, errno, "subscription to events of this type failed");
            }
        }
    }
}

impl EventSource for EventChannel {
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
        if got < 0 { Err(io::Error::last_os_error()) } else { Ok(decode(head.cookie)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_distinct_advice() {
        let advice_of = |opcode, status, errno| advice(opcode, Status(status), errno);
        assert!(advice_of(Opcode::QUERY_HCA_CAP, 0, libc::EOPNOTSUPP).contains("UCTX_EN"));
        assert!(advice_of(Opcode::QUERY_HCA_CAP, 0, libc::EINVAL).contains("user contexts"));
        assert!(advice_of(Opcode::CREATE_QP, 0x08, libc::ENOMEM).contains("no more"));
        assert!(advice_of(Opcode::INIT2RTR_QP, 0x10, libc::EINVAL).contains("state"));
        assert!(advice_of(Opcode::CREATE_CQ, 0x03, libc::EINVAL).contains("syndrome"));
        assert!(advice_of(Opcode::CREATE_CQ, 0, libc::EIO).contains("dmesg"));
    }

    #[test]
    fn events_are_decoded_from_cookies() {
        let decoded: Vec<_> =
            OF_CQ.iter().chain(OF_QP).map(|&kind| decode(cookie(kind, 0xff_ffff)).unwrap()).collect();
        let of_qp = |kind| Event::QueuePair { qpn: 0xff_ffff, kind };
        let expected = [
            Event::CompletionQueue(FailedCq::Number(0xff_ffff)),
            of_qp(ibv_event_type::IBV_EVENT_QP_FATAL),
            of_qp(ibv_event_type::IBV_EVENT_QP_REQ_ERR),
            of_qp(ibv_event_type::IBV_EVENT_QP_ACCESS_ERR),
        ];
        assert_eq!(decoded, expected);
        assert_eq!(decode(cookie(0x13, 1)), None);
        assert_eq!(decode(u64::MAX), None);
    }
}
