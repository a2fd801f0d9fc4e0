//! A queue pair driven as a kernel does: by the addresses of its descriptor alone.

use std::sync::atomic::{AtomicU64, Ordering};

use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::mlx5::{self, Cqe, CqeOpcode};
use gdsync::verbs::{DeviceCq, DeviceQp, OnGpu, SendWr};
use gdsync::{Error, hca};

use crate::common::{PATIENCE, Side, bytes, connect, pattern, until};
use crate::{Bench, open, pair};

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
fn a_kernel_could_post_and_poll() {
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
