//! Where and how a test runs.

use std::time::Duration;

use gdsync::cuda::Gpu;
use gdsync::stream::{CudaStreamConfig, Stream, Via};
use gdsync::verbs::{Context, OnGpu, QpBuilder};

use super::common::Side;

/// A GPU, what runs streams on it, and what is in its memory.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) gpu: Gpu,
    pub(crate) via: Via,
    pub(crate) on_gpu: OnGpu,
}

/// Every way to run a test here; none, with a printed reason, where there is no GPU.
pub(crate) fn places() -> impl Iterator<Item = Place> {
    let gpu = Gpu::open(0)
        .inspect_err(|error| eprintln!("simulated: {error}"))
        .or_else(|_| super::simulated::gpu())
        .ok();
    gpu.into_iter().flat_map(|gpu| {
        let ways = [Via::MemOp, Via::Kernel].into_iter();
        ways.flat_map(move |via| {
            let gpu = gpu.clone();
            [OnGpu::empty(), OnGpu::SEND_CQ | OnGpu::RECV_CQ, OnGpu::all()].map(move |on_gpu| Place {
                gpu: gpu.clone(),
                via,
                on_gpu,
            })
        })
    })
}

impl Place {
    pub(crate) fn side(&self, context: &Context, bytes: usize) -> Side {
        self.side_with(context, bytes, |q| q)
    }

    pub(crate) fn side_with(
        &self,
        context: &Context,
        bytes: usize,
        build: impl Fn(QpBuilder) -> QpBuilder,
    ) -> Side {
        Side::new(context, bytes, |q| build(q).on_gpu(&self.gpu, self.on_gpu))
    }

    pub(crate) fn stream(&self, wait_limit: Duration) -> Stream {
        let config = CudaStreamConfig {
            name: format!("{} {:?}", self.via, self.on_gpu),
            wait_limit,
            via: self.via,
            ..CudaStreamConfig::default()
        };
        Stream::cuda(&self.gpu, config).unwrap()
    }
}
