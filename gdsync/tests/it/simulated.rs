//! A GPU where there is none: the simulated driver and its kernels.

use gdrcopy::Gdr;
use gdsync::cuda::Gpu;
use gdsync_testkit::{driver, kernels};

pub(crate) fn gpu(ordinal: i32) -> gdsync::Result<Gpu> {
    Gpu::open_with(driver::api(), ordinal, Some(gdr()))
}

/// What maps its memory; the kernels are there from then on.
pub(crate) fn gdr() -> Gdr {
    kernels::register();
    driver::gdr().expect("a simulated driver")
}
