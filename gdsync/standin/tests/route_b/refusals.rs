//! Where GPU memory cannot be had for queues: which call said no, and what to change.

use std::ffi::CStr;

use gdsync::Device;
use gdsync::Error;
use gdsync::rdma::{DeviceConfig, Route};
use gdsync::verbs::{Access, OnGpu};

use crate::common::{PATIENCE, Side, connect};
use crate::setup::{CARD, entry};
use crate::shared::message;
use crate::{Bench, Less, open, pair, umems};

/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const DMA_BUF_SUPPORTED: u32 = 124;

fn assert_says(error: &Error, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "'{text}' lacks '{word}'");
    }
}

#[test]
fn without_devx_the_command_and_its_needs_are_named() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let context = open(&gpu);
    let pd = context.alloc_pd().unwrap();
    let less = Less::of(0);
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
    let less = Less::of(1);
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
    let closed = crate::gpu();
    let pd = open(&closed).alloc_pd().unwrap();
    let error = pd.build_qp().on_gpu(&closed, OnGpu::all()).build().unwrap_err();
    assert_says(&error, &["attribute 124", "open kernel modules", "nvidia_peermem"]);
    drop(pd);
    closed.reclaim(PATIENCE).unwrap();
}

#[test]
fn without_dedicated_doorbell_pages_others_are_taken() {
    let bench = Bench::take();
    let _less = Less::of(3);
    let (a, b) = pair(&bench.gpu, OnGpu::all(), 64, |q| q);
    message(&a, &b, 1);
}

/// While it is there, the device lacks what this function of the stand-in takes away.
struct Without(extern "C" fn(bool));

impl Without {
    fn of(name: &CStr) -> Self {
        // SAFETY: the type is that of the functions.
        let set: extern "C" fn(bool) = unsafe { std::mem::transmute(entry(name)) };
        set(false);
        Self(set)
    }
}

impl Drop for Without {
    fn drop(&mut self) {
        (self.0)(true);
    }
}

/// The firmware must know what version of RoCE packets are, and the address of the stand-in is none of IPv4.
#[test]
fn a_gid_of_unknown_kind_is_refused_for_queues_in_gpu_memory() {
    let bench = Bench::take();
    let _without = Without::of(c"gdsync_standin_gid_kinds");
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
    let _without = Without::of(c"gdsync_standin_atomics");
    for what in [OnGpu::empty(), OnGpu::all()] {
        let (a, b) = pair(&bench.gpu, what, 64, |q| q);
        message(&a, &b, 1);
        // Who asks for it is told.
        let asked = a.pd.build_qp().on_gpu(&bench.gpu, what).access(Access::all()).build().unwrap();
        assert!(matches!(asked.init(), Err(Error::Verbs { .. })), "{what:?}");
    }
}

#[test]
fn a_peer_without_an_address_is_named() {
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
