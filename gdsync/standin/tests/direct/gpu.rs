//! Streams of a GPU that ring the card's doorbells, on a simulated driver.

use gdrcopy::standin::driver::{self, Control};
use gdsync::Error;
use gdsync::cuda::Gpu;
use gdsync::rdma::{DeviceConfig, Route};
use gdsync::stream::{Batch, CudaStreamConfig, Stream};
use gdsync::verbs::{Access, Context, Device, OnGpu, RecvWr, SendWr};

use crate::CARD;
use crate::common::{PATIENCE, Side, bytes, connect};

/// `CUDA_ERROR_NOT_PERMITTED`.
const NOT_PERMITTED: u32 = 800;

fn gpu() -> Gpu {
    Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap()
}

fn open(gpu: Option<&Gpu>) -> gdsync::Result<Context> {
    let config = DeviceConfig { route: Some(Route::Direct), gpu: gpu.cloned(), ..DeviceConfig::default() };
    Device::find(Some(CARD)).unwrap().open_with(&config)
}

#[test]
fn a_stream_of_a_gpu_triggers_and_waits() {
    let _control = Control::take();
    let gpu = gpu();
    let side =
        || Side::new(&open(Some(&gpu)).unwrap(), 4096, |q| q.max_send_wr(4).on_gpu(&gpu, OnGpu::empty()));
    let (a, b) = connect(side(), side());
    let stream = Stream::cuda(&gpu, CudaStreamConfig::default()).unwrap();
    for round in 0..20u8 {
        a.memory().write(0, &[round; 100]).unwrap();
        b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[b.mr.sge(1000, 100).unwrap()] }]).unwrap();
        let mut batch = Batch::new();
        batch.send(&a.qp, &SendWr::send(&[a.mr.sge(0, 100).unwrap()])).unwrap();
        batch.wait_send(&a.qp).unwrap();
        batch.wait_recv(&b.qp).unwrap();
        stream.submit(&mut batch).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(bytes(&b, 1000, 100), [round; 100]);
    }
}

#[test]
fn a_gpu_that_may_not_ring_is_refused_with_the_fix() {
    let control = Control::take();
    let gpu = gpu();
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
    crate::queues::message(&a, &b, 1);
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

#[test]
fn queues_in_gpu_memory_are_refused() {
    let _control = Control::take();
    let gpu = gpu();
    let pd = open(Some(&gpu)).unwrap().alloc_pd().unwrap();
    for what in [OnGpu::SEND_QUEUE, OnGpu::SEND_CQ, OnGpu::RECV_CQ, OnGpu::RECORDS] {
        let error = pd.build_qp().on_gpu(&gpu, what).build().unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{what:?}: {error:?}");
    }
}

/// The stand-in has no dma-bufs, and the machine no peer-memory module.
#[test]
fn gpu_memory_that_cannot_be_registered_names_both_ways() {
    let _control = Control::take();
    let gpu = gpu();
    let pd = open(Some(&gpu)).unwrap().alloc_pd().unwrap();
    let error = pd.register(&gpu.alloc(4096).unwrap(), Access::LOCAL_WRITE).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Device { .. }), "{error:?}");
    for word in ["dma-buf", "nvidia-peermem", "modprobe"] {
        assert!(text.contains(word), "'{text}' lacks '{word}'");
    }
}
