//! Queues of the device that the proxy posts to and polls.

use std::fmt;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_core_sys::verbs::{
    ibv_comp_channel, ibv_cq, ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_init_attr,
    ibv_qp_type, ibv_req_notify_cq, ibv_wc,
};

use super::translate::{Buffers, Request, recv_wr};
use crate::explain::{Asked, Call, Memlock, failed, failed_last};
use crate::{Domain, Open};
use crate::{Raw, set_nonblocking};
use gdsync_device::error::{Error, Result};
use gdsync_device::{MAX_RD_ATOMIC, QpAttr, QpRequest, QpState};
use mlx5_ring::SEGMENT;

/// A device limit; some drivers report -1 for none.
pub(super) fn limit(value: i32) -> u32 {
    u32::try_from(value).ok().filter(|&value| value > 0).unwrap_or(u32::MAX >> 1)
}

/// Vendor ID of Soft-RoCE (`RXE_VENDOR_ID`).
const SOFT_ROCE: u32 = 0x00ff_ffff;

/// Attributes adapted to quirks of Soft-RoCE. It takes 7 retries for infinite, so a dead peer would go unnoticed. If a
/// queue pair is reconnected with a larger `max_dest_rd_atomic`, its kernel module overruns the smaller array (seen in
/// Linux 6.1), so the maximum is set from the start.
fn adapted(attr: &QpAttr, vendor: u32) -> QpAttr {
    let mut attr = attr.clone();
    if vendor == SOFT_ROCE {
        attr.retry_cnt = attr.retry_cnt.map(|count| count.min(6));
        attr.max_dest_rd_atomic = attr.max_dest_rd_atomic.map(|_| MAX_RD_ATOMIC);
    }
    attr
}

/// Completion channel of the device.
pub(super) struct Channel {
    open: Arc<Open>,
    channel: Raw<ibv_comp_channel>,
    fd: RawFd,
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "completion channel of {:?}", self.open)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: created here, destroyed only here; completion queues keep it alive.
        let errno = unsafe { self.open.verbs().ibv_destroy_comp_channel(self.channel.as_ptr()) };
        if errno != 0 {
            tracing::debug!(device = self.open.name(), errno, "a completion channel was not destroyed");
        }
    }
}

impl Channel {
    pub(super) fn create(open: &Arc<Open>) -> Result<Self> {
        // SAFETY: the device is open.
        let channel = unsafe { open.verbs().ibv_create_comp_channel(open.context().as_ptr()) };
        let channel = NonNull::new(channel)
            .ok_or_else(|| failed_last("ibv_create_comp_channel", open.name(), &Call::Other))?;
        // SAFETY: `channel` was just created.
        let fd = unsafe { (*channel.as_ptr()).fd };
        let channel = Self { open: open.clone(), channel: Raw(channel), fd };
        set_nonblocking(fd)?;
        Ok(channel)
    }

    /// Readable when an armed queue has completions.
    pub(super) fn fd(&self) -> RawFd {
        self.fd
    }

    /// Takes the next event, if any, and returns its queue.
    pub(super) fn take(&self) -> Option<NonNull<ibv_cq>> {
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        let verbs = self.open.verbs();
        // SAFETY: the channel is live and both outputs are writable; the descriptor does not block.
        let failed = unsafe { verbs.ibv_get_cq_event(self.channel.as_ptr(), &raw mut cq, &raw mut context) };
        let cq = NonNull::new(cq).filter(|_| failed == 0)?;
        // SAFETY: acknowledges the event just taken; destroying the queue waits for this.
        unsafe { verbs.ibv_ack_cq_events(cq.as_ptr(), 1) };
        Some(cq)
    }
}

/// A completion queue of the device, shared by many queue pairs.
pub(super) struct DeviceCq {
    channel: Arc<Channel>,
    cq: Raw<ibv_cq>,
    /// Unreserved entries.
    free: u32,
    /// Whether the next completion raises an event.
    armed: AtomicBool,
}

impl fmt::Debug for DeviceCq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "completion queue of {:?}", self.channel.open)
    }
}

impl Drop for DeviceCq {
    fn drop(&mut self) {
        let open = &self.channel.open;
        // SAFETY: created here, destroyed only here; its events are acknowledged and its queue pairs destroyed.
        let errno = unsafe { open.verbs().ibv_destroy_cq(self.cq.as_ptr()) };
        if errno != 0 {
            tracing::debug!(device = open.name(), errno, "a completion queue was not destroyed");
        }
    }
}

impl DeviceCq {
    /// Creates a queue of at least `entries`.
    pub(super) fn create(channel: &Arc<Channel>, entries: u32) -> Result<Self> {
        let open = &channel.open;
        let most = limit(open.attr().max_cqe);
        let count = i32::try_from(entries).unwrap_or(i32::MAX);
        let (context, raw) = (open.context().as_ptr(), channel.channel.as_ptr());
        // SAFETY: device and channel are live.
        let cq = unsafe { open.verbs().ibv_create_cq(context, count, ptr::null_mut(), raw, 0) };
        let cq = NonNull::new(cq).ok_or_else(|| {
            let call =
                Call::CreateCq { entries: entries.into(), most: most.into(), memlock: Memlock::here() };
            failed_last("ibv_create_cq", open.name(), &call)
        })?;
        Ok(Self { channel: channel.clone(), cq: Raw(cq), free: entries, armed: AtomicBool::new(false) })
    }

    pub(super) fn is(&self, cq: NonNull<ibv_cq>) -> bool {
        *self.cq == cq
    }

    /// Reserves `entries` completions, if there is room.
    pub(super) fn reserve(&mut self, entries: u32) -> bool {
        let left = self.free.checked_sub(entries);
        self.free = left.unwrap_or(self.free);
        left.is_some()
    }

    /// Returns reserved entries.
    pub(super) fn release(&mut self, entries: u32) {
        self.free += entries;
    }

    /// Polls completions and returns their number.
    pub(super) fn poll(&self, out: &mut [ibv_wc]) -> usize {
        let room = i32::try_from(out.len()).unwrap_or(i32::MAX);
        // SAFETY: the queue is live and `out` is writable for its length.
        let count = unsafe { ibv_poll_cq(self.cq.as_ptr(), room, out.as_mut_ptr()) };
        // Fails only if the driver lost the queue, which an event reports.
        usize::try_from(count).unwrap_or(0)
    }

    /// Arms the queue unless it is armed. The caller must poll once more after this.
    pub(super) fn arm(&self) {
        if !self.armed.swap(true, Ordering::Relaxed) {
            // SAFETY: the queue is live.
            let errno = unsafe { ibv_req_notify_cq(self.cq.as_ptr(), 0) };
            if errno != 0 {
                tracing::warn!(cq = ?self, errno, "no events of completions: they are found within 100 ms");
            }
        }
    }

    /// Its event was taken, so it is no longer armed.
    pub(super) fn disarm(&self) {
        self.armed.store(false, Ordering::Relaxed);
    }
}

/// Capacity of a device queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capacity {
    /// Outstanding requests.
    pub(super) sends: u32,
    pub(super) receives: u32,
    /// SGEs per request.
    pub(super) send_sge: usize,
    pub(super) recv_sge: usize,
    /// Maximum inline bytes.
    pub(super) inline: usize,
}

/// Upper limits for requests to the device, for tests.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceLimits {
    /// Outstanding sends, and receives.
    pub(super) requests: u32,
    /// Inline bytes.
    pub(super) inline: usize,
}

impl DeviceLimits {
    pub(super) const ALL: Self = Self { requests: u32::MAX, inline: usize::MAX };
}

impl Capacity {
    /// Initial request: everything within the device's limits. Requests beyond them wait in the rings.
    pub(super) fn wanted(open: &Open, request: &QpRequest, limits: DeviceLimits) -> Self {
        let attr = open.attr();
        let sge = usize::try_from(limit(attr.max_sge)).unwrap_or(usize::MAX);
        // Sends and receives share one completion queue.
        let requests = limit(attr.max_qp_wr).min(limit(attr.max_cqe) / 2);
        let requests = requests.min(limits.requests);
        Self {
            sends: (1 << request.log_sq).min(requests),
            receives: (1 << request.log_rq).min(requests),
            // Inline data read from the ring may wrap, which takes one more SGE. Otherwise the device gets what was
            // requested.
            send_sge: request.max_send_sge.max(sge.min(2)),
            recv_sge: (request.rq_stride / SEGMENT).min(sge),
            inline: request.max_inline.min(limits.inline),
        }
    }

    /// The next smaller request after a refusal: first without inline data, then with fewer requests.
    fn less(self) -> Option<Self> {
        const FEWEST: u32 = 16;
        if self.inline > 0 {
            return Some(Self { inline: 0, ..self });
        }
        (self.sends > FEWEST || self.receives > FEWEST).then(|| Self {
            sends: self.sends.min((self.sends / 2).max(FEWEST)),
            receives: self.receives.min((self.receives / 2).max(FEWEST)),
            ..self
        })
    }
}

/// A queue pair of the device.
pub(super) struct DeviceQp {
    domain: Arc<Domain>,
    qp: Raw<ibv_qp>,
    qpn: u32,
    pub(super) granted: Capacity,
}

impl fmt::Debug for DeviceQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QP {:#x} of {:?}", self.qpn, self.domain.open())
    }
}

impl Drop for DeviceQp {
    fn drop(&mut self) {
        // SAFETY: created here, destroyed only here.
        let errno = unsafe { self.domain.open().verbs().ibv_destroy_qp(self.qp.as_ptr()) };
        if errno != 0 {
            tracing::debug!(qp = ?self, errno, "a queue pair was not destroyed");
        }
    }
}

impl DeviceQp {
    /// Whether the device has it in ERR.
    pub(super) fn has_failed(&self) -> bool {
        // SAFETY: the queue pair lives until `self` is dropped.
        unsafe { self.domain.open().has_failed(self.qp.as_ptr()) }
    }

    /// Creates an RC queue pair that completes on `cq`. Retries with less than `wanted` if refused.
    pub(super) fn create(domain: &Arc<Domain>, cq: &DeviceCq, wanted: Capacity) -> Result<Self> {
        let mut granted = wanted;
        loop {
            match Self::try_create(domain, cq, granted) {
                Ok(qp) => return Ok(qp),
                Err(error) => match granted.less() {
                    Some(less) => granted = less,
                    None => return Err(error),
                },
            }
        }
    }

    fn try_create(domain: &Arc<Domain>, cq: &DeviceCq, wanted: Capacity) -> Result<Self> {
        let open = domain.open();
        let mut attr = ibv_qp_init_attr::zeroed();
        (attr.send_cq, attr.recv_cq) = (cq.cq.as_ptr(), cq.cq.as_ptr());
        attr.qp_type = ibv_qp_type::IBV_QPT_RC;
        let small = |value| u32::try_from(value).unwrap_or(u32::MAX);
        (attr.cap.max_send_wr, attr.cap.max_recv_wr) = (wanted.sends, wanted.receives);
        (attr.cap.max_send_sge, attr.cap.max_recv_sge) = (small(wanted.send_sge), small(wanted.recv_sge));
        attr.cap.max_inline_data = small(wanted.inline);
        // SAFETY: domain and completion queue are live.
        let qp = unsafe { open.verbs().ibv_create_qp(domain.raw().as_ptr(), &raw mut attr) };
        let qp = NonNull::new(qp).ok_or_else(|| {
            let device = open.attr();
            let asked = [
                ("max_send_wr", u64::from(wanted.sends), limit(device.max_qp_wr)),
                ("max_recv_wr", u64::from(wanted.receives), limit(device.max_qp_wr)),
                ("max_send_sge", wanted.send_sge as u64, limit(device.max_sge)),
                ("max_recv_sge", wanted.recv_sge as u64, limit(device.max_sge)),
            ];
            let asked = asked.map(|(what, value, most)| Asked { what, value, most: most.into() }).into();
            failed_last("ibv_create_qp", open.name(), &Call::CreateQp { asked, memlock: Memlock::here() })
        })?;
        // SAFETY: `qp` was just created.
        let qpn = unsafe { (*qp.as_ptr()).qp_num };
        let granted = Capacity {
            send_sge: wanted.send_sge.max(attr.cap.max_send_sge as usize),
            recv_sge: wanted.recv_sge.max(attr.cap.max_recv_sge as usize),
            inline: (attr.cap.max_inline_data as usize).min(wanted.inline),
            ..wanted
        };
        Ok(Self { domain: domain.clone(), qp: Raw(qp), qpn, granted })
    }

    pub(super) fn qpn(&self) -> u32 {
        self.qpn
    }

    pub(super) fn open(&self) -> &Arc<Open> {
        self.domain.open()
    }

    /// Applies a transition that passed [`QpAttr::check`].
    pub(super) fn modify(&self, psn: u32, from: QpState, attr: &QpAttr) -> Result<()> {
        let attr = adapted(attr, self.open().attr().vendor_id);
        // SAFETY: the queue pair is of this device and lives until `self` is dropped.
        unsafe { self.open().modify(self.qp.as_ptr(), self.qpn, None, psn, from, &attr) }
    }

    /// Posts a send. The device checks keys and addresses.
    ///
    /// # Errors
    /// The `errno` of the call.
    pub(super) fn send(&self, request: &mut Request, wr_id: u64) -> std::result::Result<(), i32> {
        let (mut wr, mut bad) = (request.as_send_wr(wr_id), ptr::null_mut());
        // SAFETY: the queue pair is live; the request points to SGEs and bytes that outlive the call.
        let errno = unsafe { ibv_post_send(self.qp.as_ptr(), &raw mut wr, &raw mut bad) };
        if errno == 0 { Ok(()) } else { Err(errno.abs()) }
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// The `errno` of the call.
    pub(super) fn receive(&self, buffers: &mut Buffers, wr_id: u64) -> std::result::Result<(), i32> {
        let (mut wr, mut bad) = (recv_wr(wr_id, buffers), ptr::null_mut());
        // SAFETY: the queue pair is live; the request points to SGEs that outlive the call.
        let errno = unsafe { ibv_post_recv(self.qp.as_ptr(), &raw mut wr, &raw mut bad) };
        if errno == 0 { Ok(()) } else { Err(errno.abs()) }
    }

    /// Error of a refused post.
    pub(super) fn refused(&self, call: &'static str, errno: i32) -> Error {
        failed(call, format!("{self:?}"), &Call::Other, errno)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_shrink_until_none_is_left() {
        let mut wanted = Capacity { sends: 32768, receives: 100, send_sge: 30, recv_sge: 1, inline: 512 };
        let mut steps = 0;
        while let Some(less) = wanted.less() {
            assert!(
                less.inline < wanted.inline || less.sends < wanted.sends || less.receives < wanted.receives
            );
            assert_eq!((less.send_sge, less.recv_sge), (30, 1), "what requests need stays");
            (wanted, steps) = (less, steps + 1);
        }
        assert_eq!((wanted.inline, wanted.sends, wanted.receives, steps), (0, 16, 16, 12));
    }

    #[test]
    fn soft_roce_does_not_retry_forever() {
        let asked = QpAttr::to(QpState::RTS).retry_cnt(7).rnr_retry(7);
        let adapted = |vendor| super::adapted(&asked, vendor);
        assert_eq!([0x2c9, SOFT_ROCE].map(|vendor| adapted(vendor).retry_cnt), [Some(7), Some(6)]);
        assert_eq!(adapted(SOFT_ROCE).rnr_retry, Some(7));
    }

    #[test]
    fn soft_roce_starts_with_maximum_reads() {
        let step = |reads, vendor| {
            let asked = QpAttr::to(QpState::RTR).max_dest_rd_atomic(reads);
            adapted(&asked, vendor).max_dest_rd_atomic
        };
        assert_eq!([1, 16].map(|reads| step(reads, SOFT_ROCE)), [Some(16); 2]);
        assert_eq!([1, 16].map(|reads| step(reads, 0x2c9)), [Some(1), Some(16)]);
        assert_eq!(adapted(&QpAttr::to(QpState::RESET), SOFT_ROCE).max_dest_rd_atomic, None);
    }

    #[test]
    fn negative_limits_mean_unlimited() {
        assert_eq!([1, 7].map(limit), [1, 7]);
        assert!(limit(-1) > 1 << 30 && limit(0) > 1 << 30);
    }
}
