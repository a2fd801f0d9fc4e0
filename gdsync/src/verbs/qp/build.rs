//! The builder of queue pairs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32};

use parking_lot::Mutex;

use super::connect::Connect;
use super::{Qp, QpCore};
use crate::verbs::context::Pd;
use crate::verbs::cq::Cq;
use crate::verbs::end::QueueEnd;
use crate::verbs::old_keys::{KeyReader, Ring};
use crate::verbs::rq::RecvQueue;
use crate::verbs::source::SendDoorbell;
use crate::verbs::sq::{Limits, SendQueue};
use crate::verbs::track::Tracker;
use gdsync_device::cuda::Gpu;
use gdsync_device::error::{Error, Result};
use gdsync_device::recorder::{Log, QpLog};
use gdsync_device::{Access, NO_DATAGRAMS, OnGpu, Places, QpParts, QpRequest, QpState};
use mlx5_ring as mlx5;

/// Builds a [`Qp`].
#[derive(Clone, Debug)]
#[must_use]
pub struct QpBuilder {
    pd: Pd,
    send_cq: Option<Cq>,
    recv_cq: Option<Cq>,
    max_send_wr: usize,
    max_recv_wr: usize,
    max_send_sge: usize,
    max_recv_sge: u32,
    max_inline: usize,
    qkey: Option<u32>,
    places: Places,
    connect: Connect,
}

macro_rules! builder {
    ($($(#[$doc:meta])* $name:ident: $type:ty => $($field:ident).+,)*) => {$(
        $(#[$doc])*
        pub fn $name(mut self, value: $type) -> Self {
            self.$($field).+ = value;
            self
        }
    )*};
}

impl QpBuilder {
    pub(crate) fn new(pd: Pd) -> Self {
        Self {
            pd,
            send_cq: None,
            recv_cq: None,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 64,
            qkey: None,
            places: Places::default(),
            connect: Connect::default(),
        }
    }

    builder! {
        /// Sends that can be outstanding, 1 to 32768 (default 128). As in verbs, more may fit: the queue is a power of two
        /// of 64-byte entries that holds so many of the largest, and a small request takes one entry. By default it has 256.
        max_send_wr: usize => max_send_wr,
        /// Receives that can be outstanding, 1 to 32768 (default 128), rounded up to a power of two.
        max_recv_wr: usize => max_recv_wr,
        /// SGEs of a send, 1 to 30 (default 1). More fit while the queue has room.
        max_send_sge: usize => max_send_sge,
        /// SGEs of a receive, 1 to 32 (default 1).
        max_recv_sge: u32 => max_recv_sge,
        /// Bytes of inline data, 0 to 512 (default 64).
        max_inline: usize => max_inline,
        /// Maximum path MTU in bytes for [`Qp::connect`] (default 4096): see
        /// [`QpAttr::path_mtu`](gdsync_device::QpAttr::path_mtu).
        path_mtu: u32 => connect.path_mtu,
        /// RNR timer code (default 12: 0.64 ms).
        min_rnr_timer: u8 => connect.min_rnr_timer,
        /// Acknowledge timeout, `4.096 us * 2^timeout` (default 14: 67 ms). The software HCA counts none while the peer's process
        /// lives, is not stopped, and has packets to handle: it waits for a processor.
        timeout: u8 => connect.timeout,
        /// Retries after a timeout (default 7).
        retry_cnt: u8 => connect.retry_cnt,
        /// Retries after "receiver not ready"; 7 means unlimited (default 6).
        rnr_retry: u8 => connect.rnr_retry,
    }

    /// Makes a datagram queue pair (UD) with this Q_Key: it sends [`SendWr::datagram`](crate::verbs::SendWr::datagram) to any
    /// other that has the key, in one packet each, and is made ready by [`Qp::activate`]. The first 40 bytes of a receive get the GRH.
    /// A datagram that finds no receive is lost. Only on mlx5 cards that read the rings themselves.
    pub fn datagrams(mut self, qkey: u32) -> Self {
        self.qkey = Some(qkey);
        self
    }

    /// Remote access rights (default: all that a region allows and the device supports; some virtual functions have no
    /// atomics).
    pub fn access(mut self, value: Access) -> Self {
        self.connect.access = Some(value);
        self
    }

    /// Outstanding READs and atomics in each direction, 0 to 16 (default 16, or the device limit).
    pub fn rd_atomic(mut self, value: u8) -> Self {
        self.connect.rd_atomic = Some(value);
        self
    }

    /// Uses a shared completion queue for sends. Streams cannot wait on a shared queue.
    pub fn send_cq(mut self, cq: &Cq) -> Self {
        self.send_cq = Some(cq.clone());
        self
    }

    /// Uses a shared completion queue for receives. Streams cannot wait on a shared queue.
    pub fn recv_cq(mut self, cq: &Cq) -> Self {
        self.recv_cq = Some(cq.clone());
        self
    }

    /// Prepares the queue pair for streams of this GPU, with `what` in GPU memory. Without this, the first submission
    /// registers its host memory with CUDA instead.
    pub fn on_gpu(mut self, gpu: &Gpu, what: OnGpu) -> Self {
        self.places = Places { gpu: Some(gpu.clone()), on_gpu: what };
        self
    }

    /// Creates the queue pair, in RESET.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a value out of range; [`Error::Sys`] when out of memory; [`Error::Verbs`] and
    /// [`Error::Device`] when a card refuses, for example queues in GPU memory: see [`OnGpu`].
    pub fn build(self) -> Result<Qp> {
        self.pd.check_here()?;
        let check = |what, value: usize, range: std::ops::RangeInclusive<usize>, expected| {
            if range.contains(&value) { Ok(()) } else { Err(Error::invalid(what, value, expected)) }
        };
        check("max_send_wr", self.max_send_wr, 1..=32768, "1 to 32768")?;
        check("max_recv_wr", self.max_recv_wr, 1..=32768, "1 to 32768")?;
        check("max_send_sge", self.max_send_sge, 1..=30, "1 to 30")?;
        check("max_recv_sge", self.max_recv_sge as usize, 1..=32, "1 to 32")?;
        check("max_inline", self.max_inline, 0..=512, "0 to 512")?;
        self.connect.check()?;

        let limits =
            Limits { sges: self.max_send_sge, inline: self.max_inline, is_datagram: self.qkey.is_some() };
        let blocks = self.max_send_wr * limits.blocks();
        let log_sq = blocks.next_power_of_two().trailing_zeros();
        if log_sq > 15 {
            return Err(Error::invalid(
                "send queue",
                blocks,
                "at most 32768 blocks of 64 bytes: fewer or smaller requests",
            ));
        }
        let log_rq = self.max_recv_wr.next_power_of_two().trailing_zeros();
        let rq_stride = mlx5::recv_stride(self.max_recv_sge);
        let provider = self.pd.provider().clone();
        if limits.is_datagram && !provider.has_datagrams() {
            return Err(NO_DATAGRAMS);
        }
        let places = &self.places;
        if let Some(gpu) = &places.gpu {
            provider.admit(gpu, &mut || self.pd.probe(gpu))?;
        }
        let recorder = Log::open()?.on(provider.gid());
        let own = |cq: Option<Cq>, log: u32, ring| {
            let create = || Cq::create(provider.clone(), 1 << log, ring, places, recorder.clone());
            cq.map_or_else(create, Ok)
        };
        let send_cq = own(self.send_cq, log_sq, OnGpu::SEND_CQ)?.0;
        let recv_cq = own(self.recv_cq, log_rq, OnGpu::RECV_CQ)?.0;
        send_cq.check_flushed()?;
        recv_cq.check_flushed()?;
        let request = QpRequest {
            pdn: self.pd.pdn(),
            send_cqn: send_cq.cqn(),
            recv_cqn: recv_cq.cqn(),
            log_sq,
            log_rq,
            rq_stride,
            max_send_sge: self.max_send_sge,
            max_inline: self.max_inline,
            qkey: self.qkey,
        };
        let QpParts { qpn, psn, sq, rq, record, doorbell, health, doorbell_watch } =
            provider.create_qp(&request, places)?;
        let found = (recorder.clone(), provider.reads_by_itself());
        let log = QpLog::new(recorder, qpn, provider.address(qpn, psn).gid);
        let core = Arc::new(QpCore {
            provider,
            qpn,
            psn: AtomicU32::new(psn),
            state: AtomicU8::new(QpState::RESET.0),
            modifying: Mutex::new(()),
            health: health.clone(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            defaults: self.connect,
            is_datagram: limits.is_datagram,
            log,
            pd: self.pd,
        });
        let send_tracker = Tracker::new(qpn, true, 1 << log_sq, health.clone(), found.clone());
        let recv_tracker = Tracker::new(qpn, false, 1 << log_rq, health, found);
        let queue = if limits.is_datagram { Ring::Datagrams } else { Ring::Sends };
        send_tracker.read_keys_by(KeyReader::new(&sq, queue, core.pd.old_keys()));
        recv_tracker.read_keys_by(KeyReader::new(&rq, Ring::Receives(rq_stride), core.pd.old_keys()));
        send_cq.attach(&send_tracker);
        recv_cq.attach(&recv_tracker);
        let record_may_lag = core.provider.record_may_lag();
        let (word, by_card) = (record.word32(mlx5::QP_DBREC_SEND)?, core.provider.reads_by_itself());
        let found = Default::default();
        let send_doorbell = Arc::new(SendDoorbell { record: word, doorbell, record_may_lag, by_card, found });
        let end = QueueEnd::new(core.clone(), send_cq, send_tracker, Some(send_doorbell.clone()));
        let send = SendQueue::new(end, sq, send_doorbell, limits, doorbell_watch);
        let end = QueueEnd::new(core, recv_cq, recv_tracker, None);
        let recv = RecvQueue::new(end, rq, rq_stride, &record)?;
        Ok(Qp { send, recv })
    }
}
