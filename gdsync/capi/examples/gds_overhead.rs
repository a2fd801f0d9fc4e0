//! What `gds_*` adds to a ping-pong of two queue pairs of one thread: the same messages through `gdsync` and through the functions of
//! `gdsync.h`, in turns, by the CPU and on CUDA streams. Takes an mlx5 card, or `gdasync card --link ib`, and a CUDA driver.

use std::ptr::null_mut;

use gdsync::Device;
use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::stream::{CudaStreamConfig, Stream};
use gdsync::verbs::{Access, Completion, Mr, Pd, Qp, QpAddress, RecvWr, SendWr};
use gdsync_c::{
    gds_create_qp, gds_destroy_qp, gds_modify_qp, gds_poll_cq, gds_post_recv, gds_post_send, gds_qp,
    gds_stream_queue_send, gds_stream_wait_cq,
};
use gdsync_testkit::c::compare;
use rdma_core_sys::verbs::{
    ibv_mtu, ibv_qp_attr, ibv_qp_attr_mask as mask, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_recv_wr,
    ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc, ibv_wr_opcode,
};

const BYTES: usize = 8;

/// Two queue pairs that are connected with each other.
struct InRust {
    qps: [Qp; 2],
    mr: Mr,
    stream: Stream,
}

/// The same in C.
struct InC {
    qps: [*mut gds_qp; 2],
    sge: ibv_sge,
    stream: usize,
}

fn ok(status: i32) {
    assert_eq!(status, 0, "{status}");
}

fn take(completion: &Completion) -> gdsync::Result<()> {
    while completion.take()?.is_none() {}
    Ok(())
}

impl InRust {
    fn new(pd: &Pd, stream: Stream) -> gdsync::Result<Self> {
        let mr = pd.register(&Memory::alloc(4096)?, Access::LOCAL_WRITE)?;
        let qps = [pd.build_qp().build()?, pd.build_qp().build()?];
        qps[0].connect(qps[1].address())?;
        qps[1].connect(qps[0].address())?;
        Ok(Self { qps, mr, stream })
    }

    fn run(&self, on_stream: bool, count: usize) -> gdsync::Result<()> {
        let (into, out) = ([self.mr.sge(0, BYTES)?], [self.mr.sge(64, BYTES)?]);
        for n in 0..count {
            let (from, to) = (&self.qps[n % 2], &self.qps[1 - n % 2]);
            let received = to.post_recv(&[RecvWr::new(&into)])?;
            let sent = if on_stream {
                let sent = self.stream.send(from, &SendWr::send(&out))?;
                self.stream.wait_recv(to)?;
                sent
            } else {
                from.post_send(&[SendWr::send(&out)])?
            };
            take(&received)?;
            take(&sent)?;
        }
        Ok(())
    }
}

/// Connects a queue pair of C.
fn connect(qp: *mut gds_qp, own: QpAddress, to: QpAddress) {
    let modify = |attr: &mut ibv_qp_attr, mask: mask| {
        // SAFETY: a live queue pair, and attributes.
        ok(unsafe { gds_modify_qp(qp, attr, mask.bits().cast_signed()) });
    };
    let mut attr = ibv_qp_attr::zeroed();
    (attr.qp_state, attr.port_num) = (ibv_qp_state::IBV_QPS_INIT, 1);
    let state = mask::IBV_QP_STATE;
    modify(&mut attr, state | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS);
    (attr.qp_state, attr.path_mtu) = (ibv_qp_state::IBV_QPS_RTR, ibv_mtu::IBV_MTU_1024);
    (attr.dest_qp_num, attr.rq_psn, attr.sq_psn) = (to.qpn, to.psn, own.psn);
    (attr.max_rd_atomic, attr.max_dest_rd_atomic, attr.min_rnr_timer) = (1, 1, 12);
    (attr.ah_attr.dlid, attr.ah_attr.port_num) = (to.lid, 1);
    let path = mask::IBV_QP_AV | mask::IBV_QP_PATH_MTU | mask::IBV_QP_DEST_QPN | mask::IBV_QP_RQ_PSN;
    modify(&mut attr, state | path | mask::IBV_QP_MAX_DEST_RD_ATOMIC | mask::IBV_QP_MIN_RNR_TIMER);
    attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
    (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (14, 7, 7);
    let retries = mask::IBV_QP_TIMEOUT | mask::IBV_QP_RETRY_CNT | mask::IBV_QP_RNR_RETRY;
    modify(&mut attr, state | retries | mask::IBV_QP_SQ_PSN | mask::IBV_QP_MAX_QP_RD_ATOMIC);
}

impl InC {
    /// On the device and in the memory of the other.
    fn new(rust: &InRust) -> gdsync::Result<Self> {
        let sge = rust.mr.sge(0, BYTES)?;
        let raw = rust.qps[0].raw().expect("a queue pair of libibverbs");
        // SAFETY: it lives as long as `rust`.
        let of = unsafe { raw.as_ref() };
        let create = || {
            let mut attr = ibv_qp_init_attr::zeroed();
            (attr.cap.max_send_wr, attr.cap.max_recv_wr) = (128, 128);
            (attr.cap.max_send_sge, attr.cap.max_recv_sge) = (1, 1);
            attr.qp_type = ibv_qp_type::IBV_QPT_RC;
            // SAFETY: an open domain and its device.
            let qp = unsafe { gds_create_qp(of.pd, of.context, &raw mut attr, 0, 0) };
            assert!(!qp.is_null());
            qp
        };
        let qps = [create(), create()];
        let addresses = qps.map(|qp| {
            // SAFETY: it was just created.
            let qp = unsafe { (*qp).qp };
            // SAFETY: that of libibverbs.
            let qpn = unsafe { (*qp).qp_num };
            let mut address = rust.qps[0].address();
            address.qpn = qpn;
            address
        });
        connect(qps[0], addresses[0], addresses[1]);
        connect(qps[1], addresses[1], addresses[0]);
        let sge = ibv_sge { addr: sge.addr, length: sge.len, lkey: sge.lkey };
        Ok(Self { qps, sge, stream: rust.stream.raw().expect("a CUDA stream") })
    }

    fn run(&self, on_stream: bool, count: usize) {
        let poll = |cq| {
            let mut wc = ibv_wc::zeroed();
            loop {
                // SAFETY: a live queue, and room for one.
                match unsafe { gds_poll_cq(cq, 1, &raw mut wc) } {
                    0 => {}
                    polled => return ok(polled - 1),
                }
            }
        };
        let (mut into, mut out) = (self.sge, self.sge);
        out.addr += 64;
        let (mut recv, mut send) = (ibv_recv_wr::zeroed(), ibv_send_wr::zeroed());
        (recv.sg_list, recv.num_sge) = (&raw mut into, 1);
        (send.sg_list, send.num_sge) = (&raw mut out, 1);
        (send.opcode, send.send_flags) = (ibv_wr_opcode::IBV_WR_SEND, ibv_send_flags::IBV_SEND_SIGNALED);
        for n in 0..count {
            let (from, to) = (self.qps[n % 2], self.qps[1 - n % 2]);
            // SAFETY: a live queue pair.
            let send_cq = unsafe { (*from).send_cq };
            // SAFETY: a live queue pair.
            let recv_cq = unsafe { (*to).recv_cq };
            // SAFETY: a list of one.
            ok(unsafe { gds_post_recv(to, &raw mut recv, null_mut()) });
            if on_stream {
                // SAFETY: a list of one, and a live stream.
                ok(unsafe { gds_stream_queue_send(self.stream, from, &raw mut send, null_mut()) });
                // SAFETY: a live stream.
                ok(unsafe { gds_stream_wait_cq(self.stream, recv_cq, 0) });
            } else {
                // SAFETY: a list of one.
                ok(unsafe { gds_post_send(from, &raw mut send, null_mut()) });
            }
            poll(recv_cq);
            poll(send_cq);
        }
    }
}

fn main() -> gdsync::Result<()> {
    let gpu = Gpu::open(0)?;
    let device = Device::find(Some("mlx5_0"))?.open()?;
    let rust = InRust::new(&device.alloc_pd()?, Stream::cuda(&gpu, CudaStreamConfig::default())?)?;
    let c = InC::new(&rust)?;
    for (what, on_stream, count) in [("by the CPU", false, 2_000), ("on CUDA streams", true, 500)] {
        let in_rust = &mut |n| rust.run(on_stream, n).unwrap_or_else(|error| panic!("{error}"));
        compare(what, count, [in_rust, &mut |n| c.run(on_stream, n)]);
    }
    // SAFETY: the last use.
    c.qps.iter().for_each(|&qp| ok(unsafe { gds_destroy_qp(qp) }));
    Ok(())
}
