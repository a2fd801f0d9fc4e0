//! Streams of a GPU that ring the card's doorbells, on a simulated driver.

use gdsync::Error;
use gdsync::cuda::Gpu;
use gdsync::rdma::{DeviceConfig, Route};
use gdsync::stream::{Batch, CudaStreamConfig, Stream};
use gdsync::verbs::{Access, Carrier, Context, Device, OnGpu, RecvWr, SendWr};
use gdsync_testkit::driver::{self, Control};

use crate::common::{PATIENCE, Side, bytes, connect, pattern, received, sent};
use crate::setup::CARD;

/// `CUDA_ERROR_NOT_PERMITTED`.
const NOT_PERMITTED: u32 = 800;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
pub(crate) const DMA_BUF_SUPPORTED: u32 = 124;

/// A simulated GPU for one test: the driver has forgotten all it knew when the next begins.
pub(crate) struct Bench {
    pub(crate) gpu: Gpu,
    pub(crate) control: Control,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.control.mend("cuMemHostRegister");
        let done = self.gpu.reclaim(PATIENCE);
        assert!(done.is_ok() || std::thread::panicking(), "{done:?}");
    }
}

fn bench() -> Bench {
    bench_with(|_| {})
}

pub(crate) fn bench_with(settings: impl FnOnce(&Control)) -> Bench {
    let control = Control::take();
    settings(&control);
    Bench { gpu: Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap(), control }
}

fn open(gpu: Option<&Gpu>) -> gdsync::Result<Context> {
    open_by(Some(Route::Direct), gpu)
}

pub(crate) fn open_by(route: Option<Route>, gpu: Option<&Gpu>) -> gdsync::Result<Context> {
    let config = DeviceConfig { route, gpu: gpu.cloned(), ..DeviceConfig::default() };
    Device::find(Some(CARD)).unwrap().open_with(&config)
}

#[test]
fn a_stream_of_a_gpu_triggers_and_waits() {
    let bench = bench();
    let gpu = bench.gpu.clone();
    let side =
        || Side::new(&open(Some(&gpu)).unwrap(), 4096, |q| q.max_send_wr(4).on_gpu(&gpu, OnGpu::empty()));
    let (a, b) = connect(side(), side());
    round_trips(&gpu, &a, &b);
}

/// Messages that a stream of the GPU triggers and waits for.
fn round_trips(gpu: &Gpu, a: &Side, b: &Side) {
    let stream = Stream::cuda(gpu, CudaStreamConfig::default()).unwrap();
    for round in 0..20u8 {
        a.memory().write(0, &[round; 100]).unwrap();
        b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[b.mr.sge(1000, 100).unwrap()] }]).unwrap();
        let mut batch = Batch::new();
        batch.send(&a.qp, &SendWr::send(&[a.mr.sge(0, 100).unwrap()])).unwrap();
        batch.wait_send(&a.qp).unwrap();
        batch.wait_recv(&b.qp).unwrap();
        stream.submit(&mut batch).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(bytes(b, 1000, 100), [round; 100]);
    }
}

#[test]
fn a_gpu_that_may_not_ring_is_refused_with_the_fix() {
    let bench = bench();
    let (gpu, control) = (bench.gpu.clone(), &bench.control);
    control.fail("cuMemHostRegister", NOT_PERMITTED);
    let refused = |error: Error| {
        let text = error.to_string();
        assert!(matches!(error, Error::Cuda { .. }), "{error:?}");
        for word in ["doorbell", "PeerMappingOverride=1", "root", "GDSYNC_PATH=proxy"] {
            assert!(text.contains(word), "'{text}' lacks '{word}'");
        }
    };
    refused(open(Some(&gpu)).unwrap_err());
    // Without a GPU it is not asked for.
    let context = open(None).unwrap();
    let (a, b) = connect(Side::new(&context, 64, |q| q), Side::new(&context, 64, |q| q));
    crate::ends::message(&a, &b, 1);
    // Found out late, by a stream: refused then.
    let stream = Stream::cuda(&gpu, CudaStreamConfig::default());
    control.mend("cuMemHostRegister");
    let stream = stream.or_else(|_| Stream::cuda(&gpu, CudaStreamConfig::default())).unwrap();
    control.fail("cuMemHostRegister", NOT_PERMITTED);
    let mut batch = Batch::new();
    batch.send(&a.qp, &SendWr::nop()).unwrap();
    let error = stream.submit(&mut batch).unwrap_err();
    assert!(matches!(error, Error::Cuda { .. }), "{error:?}");
}

/// Where nothing else was asked for, a thread rings in place of the GPU, and the reason is kept.
#[test]
fn a_gpu_that_may_not_ring_is_helped_by_the_proxy() {
    let bench = bench();
    let (gpu, control) = (bench.gpu.clone(), &bench.control);
    let allowed = open_by(None, Some(&gpu)).unwrap();
    assert_eq!((allowed.description(), allowed.not_direct()), ("mlx5 card mlx5_standin", None));
    drop(allowed);
    // The stand-in uses its pages again at once, of which CUDA must not know any more.
    gpu.reclaim(PATIENCE).unwrap();
    control.fail("cuMemHostRegister", NOT_PERMITTED);
    let context = open_by(None, Some(&gpu)).unwrap();
    control.mend("cuMemHostRegister");
    assert_eq!(context.description(), "CPU proxy of mlx5_standin");
    let why = context.not_direct().unwrap();
    assert!(why.contains("PeerMappingOverride=1") && why.contains("CUDA_ERROR_NOT_PERMITTED"), "{why}");
    let side = || Side::new(&context, 4096, |q| q.on_gpu(&gpu, OnGpu::empty()));
    let (a, b) = connect(side(), side());
    round_trips(&gpu, &a, &b);
}

/// The driver lets the GPU have the registers, but what it writes does not arrive.
#[test]
fn a_gpu_that_the_card_does_not_hear_is_refused_with_the_reason() {
    let bench = bench();
    let (gpu, control) = (bench.gpu.clone(), &bench.control);
    // Opened before anything is known of a GPU.
    let early = open_by(Some(Route::Direct), None).unwrap().alloc_pd().unwrap();
    control.loses_io(true);
    let build = || early.build_qp().on_gpu(&gpu, OnGpu::empty()).build();
    let refused = build().unwrap_err();
    assert!(matches!(refused, Error::Device { .. }), "{refused:?}");
    let helped = open_by(None, Some(&gpu)).unwrap();
    assert_eq!(helped.description(), "CPU proxy of mlx5_standin");
    for text in [refused.to_string().as_str(), helped.not_direct().unwrap()] {
        for word in ["GPU 0", "doorbell", "ACS", "IOMMU", "GDSYNC_PATH=proxy"] {
            assert!(text.contains(word), "'{text}' lacks '{word}'");
        }
    }
    // It is asked again, until it rings.
    control.loses_io(false);
    build().unwrap();
    control.loses_io(true);
    build().unwrap();
}

/// From GPU to GPU, from and to any byte: the card takes the memory as a dma-buf of whole pages.
#[test]
fn payload_in_gpu_memory_is_sent_from_there() {
    let bench = bench();
    let gpu = bench.gpu.clone();
    let context = open(Some(&gpu)).unwrap();
    let (a, b) = connect(Side::new(&context, 64, |q| q), Side::new(&context, 64, |q| q));
    let from = gpu.alloc(100_000).unwrap();
    let to = gpu.alloc(100_000).unwrap();
    // Not at the beginning of its allocation.
    let part = to.slice(5003, 50_000).unwrap();
    let source = a.pd.register(&from, Access::LOCAL_WRITE).unwrap();
    let carriage = a.qp.carriage(&source, 100).unwrap();
    assert_eq!(carriage.carrier(), Carrier::CardFromGpu);
    assert!(carriage.to_string().contains("dma-buf"), "{carriage}");
    assert_eq!(a.qp.carriage(&a.mr, 100).unwrap().carrier(), Carrier::Card);
    let target = b.pd.register(&part, Access::all()).unwrap();
    let data = pattern(40_000, 3);
    from.write(77, &data).unwrap();
    b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[target.sge(1000, 40_000).unwrap()] }]).unwrap();
    a.qp.post_send(&[SendWr::send(&[source.sge(77, 40_000).unwrap()])]).unwrap();
    sent(&a).ok().unwrap();
    received(&b).ok().unwrap();
    let mut got = vec![0; 40_000];
    to.read(6003, &mut got).unwrap();
    assert!(got == data);
    // By address and key, as a peer names it.
    a.qp.post_send(&[SendWr::write(target.remote(49_000).unwrap(), &[source.sge(77, 1000).unwrap()])])
        .unwrap();
    sent(&a).ok().unwrap();
    to.read(54_003, &mut got[..1000]).unwrap();
    assert!(got[..1000] == data[..1000]);
}

/// No dma-bufs from this GPU, and no peer-memory module on this machine.
#[test]
fn gpu_memory_that_cannot_be_registered_names_both_ways() {
    let bench = bench_with(|control| control.attribute(0, DMA_BUF_SUPPORTED, 0));
    let gpu = bench.gpu.clone();
    let pd = open(Some(&gpu)).unwrap().alloc_pd().unwrap();
    let error = pd.register(&gpu.alloc(4096).unwrap(), Access::LOCAL_WRITE).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Device { .. }), "{error:?}");
    for word in ["dma-buf", "nvidia-peermem", "modprobe"] {
        assert!(text.contains(word), "'{text}' lacks '{word}'");
    }
}
