//! Queues in GPU memory by DevX: the whole library on the route of kernels' queue pairs, with the stand-in for a card and the
//! simulated driver for a GPU. GPU memory goes to the card as dma-bufs, which the stand-in maps.

#![allow(clippy::duplicate_mod, reason = "each file of tests brings what it shares with others")]

#[path = "../../../tests/common/mod.rs"]
mod common;
mod descriptor;
mod ends;
mod mailboxes;
#[path = "../setup/pages.rs"]
mod pages;
mod refusals;
#[path = "../setup/mod.rs"]
mod setup;
#[path = "../setup/ends.rs"]
mod shared;
mod traffic;

use gdsync::cuda::Gpu;
use gdsync::rdma::{DeviceConfig, Route};
use gdsync::verbs::{Context, Device, OnGpu, QpBuilder};
use gdsync_testkit::driver::{self, Control};

use crate::common::{PATIENCE, Side, connect};
use crate::setup::{CARD, entry};

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = choose_the_card;

/// Before there are threads.
extern "C" fn choose_the_card() {
    setup::use_the_stand_in("direct");
}

/// Registered memory that the firmware knows: all of it, and what came as a dma-buf.
fn umems() -> [usize; 2] {
    // SAFETY: the type is that of the function.
    let count: extern "C" fn(bool) -> usize = unsafe { std::mem::transmute(entry(c"gdsync_standin_umems")) };
    [count(false), count(true)]
}

/// While it is there, the device has no DevX (0), or one that takes no dma-buf (1) or has no dedicated doorbell pages (3).
struct Less;

impl Less {
    fn of(level: u32) -> Self {
        set_level(level);
        Self
    }
}

impl Drop for Less {
    fn drop(&mut self) {
        set_level(2);
    }
}

fn set_level(level: u32) {
    // SAFETY: the type is that of the function.
    let set: extern "C" fn(u32) = unsafe { std::mem::transmute(entry(c"gdsync_standin_devx")) };
    set(level);
}

/// A simulated GPU for one test: the driver has forgotten all it knew when the next begins.
struct Bench {
    gpu: Gpu,
    control: Control,
}

impl Bench {
    fn take() -> Self {
        let control = Control::take();
        Self { gpu: gpu(), control }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let done = self.gpu.reclaim(PATIENCE);
        assert!(done.is_ok() || std::thread::panicking(), "{done:?}");
    }
}

fn gpu() -> Gpu {
    Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap()
}

fn open(gpu: &Gpu) -> Context {
    let config =
        DeviceConfig { route: Some(Route::Direct), gpu: Some(gpu.clone()), ..DeviceConfig::default() };
    Device::find(Some(CARD)).unwrap().open_with(&config).unwrap()
}

/// Two connected sides whose queues are on the GPU as far as `what` says.
fn pair(gpu: &Gpu, what: OnGpu, bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder) -> (Side, Side) {
    let side = || Side::new(&open(gpu), bytes, |q| build(q.on_gpu(gpu, what)));
    connect(side(), side())
}

#[test]
fn all_works_on_larger_pages() {
    pages::run_again_on_larger(&["traffic::", "ends::", "refusals::"]);
}
