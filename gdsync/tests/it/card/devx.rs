//! Queues in GPU memory by DevX, with the simulated driver for a GPU, whose dma-bufs the card maps.

use std::sync::atomic::{AtomicU64, Ordering};

use gdsync::Device;
use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::mlx5::{self, Cqe, CqeOpcode};
use gdsync::rdma::{DeviceConfig, Route};
use gdsync::verbs::{Access, DeviceCq, DeviceQp, OnGpu, QpBuilder, SendWr};
use gdsync::{Error, hca};

use super::pages;
use super::setup::{Bench, CARD, DMA_BUF_SUPPORTED, assert_says, open, simulated_gpu};
use crate::child::own_process;
use crate::common::{PATIENCE, Side, bytes, connect, message, pattern, sent, until};

/// Dma-bufs that the driver gave so far.
fn dma_bufs(bench: &Bench) -> u64 {
    bench.control.calls("cuMemGetHandleForAddressRange")
}

/// Mappings of GPU memory, registrations by dma-buf among them.
fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:simulated-cuda")).count()
}

/// Two connected sides whose queues are on the GPU as far as `what` says.
fn pair(gpu: &Gpu, what: OnGpu, bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder) -> (Side, Side) {
    let side = || Side::new(&open(gpu), bytes, |q| build(q.on_gpu(gpu, what)));
    connect(side(), side())
}

#[test]
#[ignore = "`card` runs it on the card"]
fn all_works_on_larger_pages() {
    pages::run_again_on_larger(&["card::devx::", "--skip", "kernel_could", "--skip", "for_kernels"]);
}

/// What is asked for lies on the GPU, and nothing else does; more than two laps of every ring.
#[test]
#[ignore = "`card` runs it on the card"]
fn every_placement_works_over_laps() {
    own_process!();
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    // The GPU keeps what it has allocated once.
    drop(pair(&gpu, OnGpu::all(), 64, |q| q));
    for bits in 1..16 {
        let what = OnGpu::from_bits(bits).unwrap();
        let (before, idle) = (dma_bufs(&bench), mappings());
        let (a, b) = pair(&gpu, what, 64, |q| q.max_send_wr(4).max_recv_wr(4));
        // Of each side: the rings, two completion queues, and a record each.
        let on_gpu = [OnGpu::SEND_QUEUE, OnGpu::SEND_CQ, OnGpu::RECV_CQ, OnGpu::RECORDS]
            .map(|one| u64::from(what.contains(one)));
        let expected = on_gpu[0] + on_gpu[1] + on_gpu[2] + 3 * on_gpu[3];
        assert_eq!(dma_bufs(&bench) - before, 2 * expected, "{what:?}");
        for round in 0..12 {
            message(&a, &b, round);
            message(&b, &a, round + 1000);
        }
        drop((a, b));
        gpu.reclaim(PATIENCE).unwrap();
        assert_eq!(mappings(), idle, "{what:?}");
    }
}

#[test]
#[ignore = "`card` runs it on the card"]
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
#[ignore = "`card` runs it on the card"]
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
}

#[test]
#[ignore = "`card` runs it on the card"]
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
#[ignore = "`card` runs it on the card"]
fn queues_of_every_size_can_be_made() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let context = open(&gpu);
    let before = mappings();
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
    gpu.reclaim(PATIENCE).unwrap();
    assert_eq!(mappings(), before);
}

#[test]
#[ignore = "`card` runs it on the card"]
fn without_devx_the_command_and_its_needs_are_named() {
    own_process!("GDASYNC_CARD_MODES" = "no-devx");
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let context = open(&gpu);
    let pd = context.alloc_pd().unwrap();
    for what in [OnGpu::SEND_QUEUE, OnGpu::SEND_CQ, OnGpu::RECV_CQ, OnGpu::RECORDS] {
        let error = pd.build_qp().on_gpu(&gpu, what).build().unwrap_err();
        assert!(matches!(error, Error::Verbs { call: "mlx5dv_devx_general_cmd", .. }), "{error:?}");
        assert_says(&error, &["QUERY_HCA_CAP", "kernel", "user contexts", "UCTX_EN", "OnGpu::empty()"]);
    }
    // Queues in host memory do not need it.
    let side = || Side::new(&context, 64, |q| q);
    let (a, b) = connect(side(), side());
    message(&a, &b, 1);
}

#[test]
#[ignore = "`card` runs it on the card"]
fn without_dma_bufs_of_the_kernel_both_ways_are_named() {
    own_process!("GDASYNC_CARD_MODES" = "no-dma-buf,no-peermem");
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let pd = open(&gpu).alloc_pd().unwrap();
    for what in [OnGpu::SEND_QUEUE, OnGpu::SEND_CQ, OnGpu::RECV_CQ, OnGpu::RECORDS] {
        let error = pd.build_qp().on_gpu(&gpu, what).build().unwrap_err();
        assert!(matches!(error, Error::Device { .. }), "{error:?}");
        assert_says(&error, &["mlx5dv_devx_umem_reg_ex", "6.1", "nvidia_peermem", "OnGpu::empty()"]);
        assert_says(&error, &["before rdma-core 43", "MLX5DV_UMEM_MASK_DMABUF"]);
        assert!(!error.to_string().contains("rdma-core 35"), "{error}");
    }
}

#[test]
#[ignore = "`card` runs it on the card"]
fn without_dma_bufs_of_the_driver_both_ways_are_named() {
    let bench = Bench::take();
    bench.control.attribute(0, DMA_BUF_SUPPORTED, 0);
    let closed = simulated_gpu(0);
    let pd = open(&closed).alloc_pd().unwrap();
    let error = pd.build_qp().on_gpu(&closed, OnGpu::all()).build().unwrap_err();
    assert_says(&error, &["attribute 124", "open kernel modules", "nvidia_peermem"]);
    drop(pd);
    closed.reclaim(PATIENCE).unwrap();
}

/// The firmware must know what version of RoCE packets are, and the address of entry 1 is none of IPv4.
#[test]
#[ignore = "`card` runs it on the card"]
fn gid_of_unknown_kind_is_refused_for_queues_in_gpu_memory() {
    own_process!("GDASYNC_CARD_MODES" = "no-gid-type");
    let bench = Bench::take();
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
#[ignore = "`card` runs it on the card"]
fn without_atomics_queue_pairs_connect_without_the_right() {
    own_process!("GDASYNC_CARD_MODES" = "no-atomics");
    let bench = Bench::take();
    for what in [OnGpu::empty(), OnGpu::all()] {
        let (a, b) = pair(&bench.gpu, what, 64, |q| q);
        message(&a, &b, 1);
        // Who asks for it is told.
        let asked = a.pd.build_qp().on_gpu(&bench.gpu, what).access(Access::all()).build().unwrap();
        assert!(matches!(asked.init(), Err(Error::Verbs { .. })), "{what:?}");
    }
}

#[test]
#[ignore = "`card` runs it on the card"]
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
#[ignore = "`card` runs it on the card"]
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
#[ignore = "`card` runs it on the card"]
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
