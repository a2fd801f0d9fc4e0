//! The device of the card, opened with simulated GPUs.

use gdsync::Device;
use gdsync::cuda::Gpu;
use gdsync::rdma::{DeviceConfig, Route};
use gdsync::verbs::Context;
use gdsync_testkit::driver::{self, Control};

/// The device.
pub(crate) const CARD: &str = "mlx5_0";

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
        let done = self.gpu.reclaim(std::time::Duration::from_secs(20));
        assert!(done.is_ok() || std::thread::panicking(), "{done:?}");
    }
}

impl Bench {
    pub(crate) fn take() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(settings: impl FnOnce(&Control)) -> Self {
        let control = Control::take();
        settings(&control);
        Self { gpu: simulated_gpu(0), control }
    }
}

pub(crate) fn simulated_gpu(ordinal: i32) -> Gpu {
    Gpu::open_with(driver::api(), ordinal, driver::gdr().ok()).unwrap()
}

/// Opens the device by a route, or as it chooses, for a GPU.
pub(crate) fn open_by(route: Option<Route>, gpu: Option<&Gpu>) -> gdsync::Result<Context> {
    let config = DeviceConfig { route, gpu: gpu.cloned(), ..DeviceConfig::default() };
    Device::find(Some(CARD)).unwrap().open_with(&config)
}

/// Opens the device so that it reads the rings itself.
pub(crate) fn open(gpu: &Gpu) -> Context {
    open_by(Some(Route::Direct), Some(gpu)).unwrap()
}

/// A message has all these words.
pub(crate) fn assert_says(message: &impl ToString, words: &[&str]) {
    let text = message.to_string();
    for word in words {
        assert!(text.contains(word), "'{text}' lacks '{word}'");
    }
}
