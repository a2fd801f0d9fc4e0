//! Queues in GPU memory by DevX, with the simulated driver for a GPU, whose dma-bufs the stand-in maps.

use std::sync::atomic::{AtomicU64, Ordering};

use gdsync::Device;
use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::mlx5::{self, Cqe, CqeOpcode};
use gdsync::rdma::{DeviceConfig, Route};
use gdsync::verbs::{Access, DeviceCq, DeviceQp, OnGpu, QpBuilder, SendWr};
use gdsync::{Error, hca};

use crate::child::own_process;
use crate::common::{PATIENCE, Side, bytes, connect, message, pattern, sent, until};
use crate::pages;
use crate::setup::{
    Bench, CARD, DMA_BUF_SUPPORTED, Setting, assert_says, complaints, entry, open, simulated_gpu,
};

/// Registered memory that the firmware knows: all of it, and what came as a dma-buf.
fn umems() -> [usize; 2] {
    // SAFETY: the type is that of the function.
    let count: extern "C" fn(bool) -> usize = unsafe { std::mem::transmute(entry(c"gdsync_standin_umems")) };
    [count(false), count(true)]
}

/// The device has no DevX (0), or one that takes no dma-buf (1) or has no dedicated doorbell pages (3).
fn devx(level: u32) -> Setting {
    Setting::of(c"gdsync_standin_devx", level, 2)
}

/// Two connected sides whose queues are on the GPU as far as `what` says.
fn pair(gpu: &Gpu, what: OnGpu, bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder) -> (Side, Side) {
    let side = || Side::new(&open(gpu), bytes, |q| build(q.on_gpu(gpu, what)));
    connect(side(), side())
}

#[test]
fn all_works_on_larger_pages() {
    pages::run_again_on_larger(&["devx::", "--skip", "kernel_could", "--skip", "for_kernels"]);
}

/// What is asked for lies on the GPU, and nothing else does; more than two laps of every ring.
#[test]
fn every_placement_works_over_laps() {
    own_process!();
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    for bits in 1..16 {
        let what = OnGpu::from_bits(bits).unwrap();
        let before = umems();
        let (a, b) = pair(&gpu, what, 64, |q| q.max_send_wr(4).max_recv_wr(4));
        let now = umems();
        // Of each side: both completion queues and the rings, with a record each.
        assert_eq!(now[0] - before[0], 2 * 6, "{what:?}");
        let on_gpu = [OnGpu::SEND_QUEUE, OnGpu::SEND_CQ, OnGpu::RECV_CQ, OnGpu::RECORDS]
            .map(|one| usize::from(what.contains(one)));
        let expected = on_gpu[0] + on_gpu[1] + on_gpu[2] + 3 * on_gpu[3];
        assert_eq!(now[1] - before[1], 2 * expected, "{what:?}");
        for round in 0..12 {
            message(&a, &b, round);
            message(&b, &a, round + 1000);
        }
        drop((a, b));
        assert_eq!(umems(), before, "{what:?}");
    }
    assert_eq!(complaints(), "");
}

#[test]
fn writes_reads_and_atomics() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let (a, b) = pair(&gpu, OnGpu::all(), 4096, |q| q.max_send_wr(4).max_inline(64));
    for round in 0..12u64 {
        let data = pattern(1000, usize::try_from(round).unwrap());
        a.memory().write(0, &data).unwrap();
        a.qp.post_send(&[SendWr::write(b.mr.remote(1000).unwrap(), &[a.mr.sge(0, 1000).unwrap()])]).unwrap();
        sent(&a).ok().unwrap();
        assert!(bytes(&b, 1000, 1000) == data);
        a.qp.post_send(&[SendWr::read(b.mr.remote(1000).unwrap(), &[a.mr.sge(2000, 1000).unwrap()])])
            .unwrap();
        sent(&a).ok().unwrap();
        assert!(bytes(&a, 2000, 1000) == data);
        b.memory().write(0, &(10 * round).to_ne_bytes()).unwrap();
        let result = a.mr.sge(3000, 8).unwrap();
        a.qp.post_send(&[SendWr::fetch_add(b.mr.remote(0).unwrap(), 7, result)]).unwrap();
        sent(&a).ok().unwrap();
        assert_eq!(bytes(&a, 3000, 8), (10 * round).to_ne_bytes());
        a.qp.post_send(&[SendWr::compare_swap(b.mr.remote(0).unwrap(), 10 * round + 7, 99, result)]).unwrap();
        sent(&a).ok().unwrap();
        assert_eq!(bytes(&a, 3000, 8), (10 * round + 7).to_ne_bytes());
        assert_eq!(bytes(&b, 0, 8), 99u64.to_ne_bytes());
        a.qp.post_send(&[SendWr::write_inline(b.mr.remote(8).unwrap(), &[round.to_le_bytes()[0]; 60])])
            .unwrap();
        sent(&a).ok().unwrap();
        assert_eq!(bytes(&b, 8, 60), [round.to_le_bytes()[0]; 60]);
    }
}

/// Queue pairs of verbs and of DevX speak to each other, and share a completion queue of verbs.
#[test]
fn both_kinds_go_together() {
    own_process!();
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let context = open(&gpu);
    let shared = context.create_cq(64).unwrap();
    let a = Side::new(&context, 64, |q| q.on_gpu(&gpu, OnGpu::SEND_QUEUE).send_cq(&shared).recv_cq(&shared));
    let b = Side::new(&context, 64, |q| q.on_gpu(&gpu, OnGpu::empty()));
    let (a, b) = connect(a, b);
    for round in 0..200 {
        message(&a, &b, round);
        message(&b, &a, round);
    }
    // The reverse is not possible: libmlx5 knows nothing of the queue.
    let c = Side::new(&context, 64, |q| q.on_gpu(&gpu, OnGpu::SEND_CQ));
    let error = c.pd.build_qp().send_cq(&c.qp.send_cq()).build().unwrap_err();
    assert!(matches!(error, Error::Unsupported { by: "mlx5 cards", .. }), "{error:?}");
    assert_eq!(complaints(), "");
}

#[test]
fn payload_and_queues_share_the_gpu() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let (a, b) = pair(&gpu, OnGpu::all(), 64, |q| q);
    let (from, to) = (gpu.alloc(100_000).unwrap(), gpu.alloc(100_000).unwrap());
    let source = a.pd.register(&from, Access::LOCAL_WRITE).unwrap();
    let target = b.pd.register(&to, Access::all()).unwrap();
    let data = pattern(40_000, 3);
    from.write(77, &data).unwrap();
    a.qp.post_send(&[SendWr::write(target.remote(5003).unwrap(), &[source.sge(77, 40_000).unwrap()])])
        .unwrap();
    sent(&a).ok().unwrap();
    let mut got = vec![0; 40_000];
    to.read(5003, &mut got).unwrap();
    assert!(got == data);
}

/// Sizes at both ends of what can be asked for.
#[test]
fn queues_of_every_size_can_be_made() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let context = open(&gpu);
    let before = umems();
    for what in [OnGpu::empty(), OnGpu::all()] {
        for (sends, receives, sges, inline) in
            [(1, 1, 1, 0), (1, 1, 32, 512), (2, 3, 3, 60), (1000, 4000, 1, 64), (32768, 32768, 1, 0)]
        {
            let side = || {
                Side::new(&context, 64, |q| {
                    let q = q.max_send_wr(sends).max_recv_wr(receives).max_recv_sge(sges);
                    q.max_inline(inline).on_gpu(&gpu, what)
                })
            };
            let (a, b) = connect(side(), side());
            for round in 0..3 {
                message(&a, &b, round);
            }
        }
    }
    for _ in 0..16 {
        let (a, b) = pair(&gpu, OnGpu::all(), 64, |q| q);
        message(&a, &b, 1);
    }
    assert_eq!(umems(), before);
}

#[test]
fn without_devx_the_command_and_its_needs_are_named() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let context = open(&gpu);
    let pd = context.alloc_pd().unwrap();
    let less = devx(0);
    for what in [OnGpu::SEND_QUEUE, OnGpu::SEND_CQ, OnGpu::RECV_CQ, OnGpu::RECORDS] {
        let error = pd.build_qp().on_gpu(&gpu, what).build().unwrap_err();
        assert!(matches!(error, Error::Verbs { call: "mlx5dv_devx_general_cmd", .. }), "{error:?}");
        assert_says(&error, &["QUERY_HCA_CAP", "kernel", "user contexts", "UCTX_EN", "OnGpu::empty()"]);
    }
    // Queues in host memory do not need it.
    let side = || Side::new(&context, 64, |q| q);
    let (a, b) = connect(side(), side());
    message(&a, &b, 1);
    // Nor is the refusal remembered.
    drop(less);
    pd.build_qp().on_gpu(&gpu, OnGpu::all()).build().unwrap();
}

#[test]
fn without_dma_bufs_both_ways_are_named() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let before = umems();
    let pd = open(&gpu).alloc_pd().unwrap();
    // The kernel's side.
    let less = devx(1);
    for what in [OnGpu::SEND_QUEUE, OnGpu::SEND_CQ, OnGpu::RECV_CQ, OnGpu::RECORDS] {
        let error = pd.build_qp().on_gpu(&gpu, what).build().unwrap_err();
        assert!(matches!(error, Error::Device { .. }), "{error:?}");
        assert_says(&error, &["mlx5dv_devx_umem_reg_ex", "6.1", "nvidia_peermem", "OnGpu::empty()"]);
        assert_says(&error, &["before rdma-core 43", "MLX5DV_UMEM_MASK_DMABUF"]);
        assert!(!error.to_string().contains("rdma-core 35"), "{error}");
    }
    drop(less);
    // What was made before it was refused is gone.
    assert_eq!(umems(), before);
    // The GPU driver's.
    bench.control.attribute(0, DMA_BUF_SUPPORTED, 0);
    let closed = simulated_gpu(0);
    let pd = open(&closed).alloc_pd().unwrap();
    let error = pd.build_qp().on_gpu(&closed, OnGpu::all()).build().unwrap_err();
    assert_says(&error, &["attribute 124", "open kernel modules", "nvidia_peermem"]);
    drop(pd);
    closed.reclaim(PATIENCE).unwrap();
}

#[test]
fn without_dedicated_doorbell_pages_others_are_taken() {
    let bench = Bench::take();
    let _less = devx(3);
    let (a, b) = pair(&bench.gpu, OnGpu::all(), 64, |q| q);
    message(&a, &b, 1);
}

/// The firmware must know what version of RoCE packets are, and the address of the stand-in is none of IPv4.
#[test]
fn gid_of_unknown_kind_is_refused_for_queues_in_gpu_memory() {
    let bench = Bench::take();
    let _without = Setting::of(c"gdsync_standin_gid_kinds", 0, 1);
    let context = {
        let config =
            DeviceConfig { route: Some(Route::Direct), gid_index: Some(1), ..DeviceConfig::default() };
        Device::find(Some(CARD)).unwrap().open_with(&config).unwrap()
    };
    let side = |what| Side::new(&context, 64, |q| q.on_gpu(&bench.gpu, what));
    let (a, b) = (side(OnGpu::all()), side(OnGpu::all()));
    let error = a.qp.connect(b.qp.address()).unwrap_err();
    assert!(matches!(error, Error::Device { .. }), "{error:?}");
    assert_says(&error, &["RoCE v1 or v2", "entry 1", "GDSYNC_GID_INDEX", "OnGpu::empty()"]);
    // The kernel knows, which builds the others.
    let (a, b) = connect(side(OnGpu::empty()), side(OnGpu::empty()));
    message(&a, &b, 1);
}

/// Some virtual functions have none.
#[test]
fn without_atomics_queue_pairs_connect_without_the_right() {
    let bench = Bench::take();
    let _without = Setting::of(c"gdsync_standin_atomics", 0, 1);
    for what in [OnGpu::empty(), OnGpu::all()] {
        let (a, b) = pair(&bench.gpu, what, 64, |q| q);
        message(&a, &b, 1);
        // Who asks for it is told.
        let asked = a.pd.build_qp().on_gpu(&bench.gpu, what).access(Access::all()).build().unwrap();
        assert!(matches!(asked.init(), Err(Error::Verbs { .. })), "{what:?}");
    }
}

#[test]
fn peer_without_an_address_is_named() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let (a, b) = pair(&gpu, OnGpu::all(), 64, |q| q);
    message(&a, &b, 1);
    let side = Side::new(&open(&gpu), 64, |q| q.on_gpu(&gpu, OnGpu::all()));
    let mut nowhere = b.qp.address();
    nowhere.gid.0 = [0; 16];
    let error = side.qp.connect(nowhere).unwrap_err();
    assert!(matches!(error, Error::Peer { .. }), "{error:?}");
}

/// GPU memory, by the GPU's address.
fn at(gpu: &Gpu, addr: u64, len: usize) -> Memory {
    // SAFETY: queues of a queue pair that the test keeps.
    unsafe { gpu.wrap(addr, len) }.unwrap()
}

/// The next completion, taken.
fn poll(gpu: &Gpu, cq: &DeviceCq, n: u32) -> Cqe {
    let ring = at(gpu, cq.ring, cq.entries as usize * 64);
    let slot = (n % cq.entries) as usize * 64;
    let mut cqe = [0; 64];
    until(|| {
        ring.read(slot, &mut cqe).unwrap();
        u32::from(cqe[63] & 1) == n / cq.entries % 2
    });
    at(gpu, cq.record, 4).write(0, &(n + 1).to_be_bytes()).unwrap();
    Cqe::decode(&cqe)
}

#[test]
fn kernel_could_post_and_poll() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let (a, b) = pair(&gpu, OnGpu::all(), 4096, |q| q.max_send_wr(4));
    let qp: DeviceQp = a.qp.for_kernels(&gpu).unwrap();
    assert_eq!((qp.qpn, qp.send_cq.cqn), (a.qp.qpn(), a.qp.send_cq().cqn()));
    assert_eq!((qp.recv_record + 4, qp.rq_stride), (qp.send_record, 16));
    let ring = at(&gpu, qp.sq, qp.sq_blocks as usize * 64);
    for n in 0..3 * qp.sq_blocks {
        let data = pattern(500, n as usize);
        a.memory().write(0, &data).unwrap();
        let from = [a.mr.sge(0, 500).unwrap()];
        let write = SendWr::write(b.mr.remote(1000).unwrap(), &from);
        let index = u16::try_from(n).unwrap();
        let wqe = mlx5::encode(&write.op, qp.qpn, index, mlx5::WqeFlags::default()).unwrap();
        let wqe = wqe.as_bytes();
        assert_eq!(wqe.len().next_multiple_of(64), 64);
        ring.write((n % qp.sq_blocks) as usize * 64, wqe).unwrap();
        at(&gpu, qp.send_record, 4).write(0, &(n + 1).to_be_bytes()).unwrap();
        let doorbell = usize::try_from(qp.doorbell).unwrap() as *mut AtomicU64;
        let first8 = u64::from_ne_bytes(*wqe.first_chunk().unwrap());
        // SAFETY: the simulated GPU calls a registered doorbell by its address on the host, and the queue pair is there.
        unsafe { &*doorbell }.store(first8, Ordering::Release);
        let cqe: Cqe = poll(&gpu, &qp.send_cq, n);
        assert_eq!((cqe.opcode, cqe.qpn, u32::from(cqe.wqe_counter)), (CqeOpcode::REQ, qp.qpn, n));
        assert!(bytes(&b, 1000, 500) == data, "round {n}");
    }
}

#[test]
fn what_is_not_for_kernels_is_refused() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let (a, _b) = pair(&gpu, OnGpu::all(), 64, |q| q);
    a.qp.post_send(&[SendWr::nop()]).unwrap();
    a.qp.send_cq().wait(PATIENCE).unwrap();
    let error = a.qp.for_kernels(&gpu).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { what: "posted requests", .. }), "{error:?}");
    let soft = gdsync::verbs::Context::soft(&hca::SoftHcaConfig::default()).unwrap();
    let error = Side::new(&soft, 64, |q| q).qp.for_kernels(&gpu).unwrap_err();
    assert!(matches!(error, Error::Unsupported { what: "posting from kernels", .. }), "{error:?}");
    // Queues in host memory are reached too.
    let context = open(&gpu);
    let side = || Side::new(&context, 64, |q| q.on_gpu(&gpu, OnGpu::empty()));
    let (a, _b) = connect(side(), side());
    let qp = a.qp.for_kernels(&gpu).unwrap();
    assert!(qp.sq != 0 && qp.sq_blocks.is_power_of_two() && qp.send_cq.entries.is_power_of_two());
}
