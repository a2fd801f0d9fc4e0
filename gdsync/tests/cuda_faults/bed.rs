//! A GPU that nothing may be left on.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use gdrcopy::cuda::raw::Api;
use gdsync::cuda::Gpu;
use gdsync::stream::{CudaStreamConfig, Stream};
use gdsync_testkit::driver::{self, Alive, Control};

use super::common::PATIENCE;
use super::place;
use super::repeat::{Held, alone, threads};

/// Bytes of a GPU by which its free memory may differ: what CUDA takes for itself comes late.
const TOLERANCE: usize = 32 << 20;

/// Keeps a GPU's primary context, so that it is not the end of the context that cleans up.
struct Keeper {
    api: Api,
    device: i32,
    context: usize,
}

impl Keeper {
    fn new(device: i32) -> Self {
        let api = if place::is_real() { Api::load().unwrap() } else { driver::api() };
        let mut context = 0;
        // SAFETY: no flags are defined.
        unsafe { api.init(0) }.unwrap();
        // SAFETY: a place for the answer.
        unsafe { api.primary_ctx_retain(&mut context, device) }.unwrap();
        Self { api, device, context }
    }

    /// Bytes of GPU memory.
    fn free(&self) -> usize {
        let (mut free, mut total, mut popped) = (0, 0, 0);
        // SAFETY: retained by this value.
        unsafe { self.api.ctx_push_current(self.context) }.unwrap();
        // SAFETY: places for the answers.
        unsafe { self.api.mem_get_info(&mut free, &mut total) }.unwrap();
        // SAFETY: a place for the answer.
        unsafe { self.api.ctx_pop_current(&mut popped) }.unwrap();
        free
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // SAFETY: retained once, given back once.
        unsafe { self.api.primary_ctx_release(self.device) }.unwrap();
    }
}

/// A GPU, alone in this process.
pub(crate) struct Bed {
    pub(crate) gpu: Gpu,
    /// Of the simulated driver.
    pub(crate) control: Option<Control>,
}

/// Runs a test on the first GPU: once to settle what is made only once, and then to see that all is given back.
pub(crate) fn on_gpu(mut test: impl FnMut(&Bed, Pass)) {
    let _alone = alone();
    threads_of_the_process();
    let mut control = (!place::is_real()).then(Control::take);
    let keeper = Keeper::new(0);
    let mut before = None;
    for pass in [Pass::First, Pass::Counted] {
        let bed = Bed { gpu: place::gpu(0).expect("there is one, real or simulated"), control };
        test(&bed, pass);
        control = bed.control;
        drop(bed.gpu);
        before = Some(given_back(&keeper, control.as_ref(), before));
        let stray = control.as_ref().map_or(0, Control::stray);
        assert_eq!(stray, 0, "calls with handles of streams that are gone");
    }
}

/// Which run it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pass {
    /// May be short.
    First,
    /// What is left afterwards counts.
    Counted,
}

/// Files that are open and bytes of the GPU that are free, when all that a test made has been given back: no more and no
/// fewer than there were `before`.
fn given_back(keeper: &Keeper, control: Option<&Control>, before: Option<(usize, usize)>) -> (usize, usize) {
    let only_keeper = Alive { retained: 1, ..Alive::default() };
    let start = Instant::now();
    loop {
        let (held, free, alive) = (Held::now(), keeper.free(), control.map(Control::alive));
        let as_before = before.is_none_or(|(files, most)| held.files <= files && free + TOLERANCE >= most);
        let nothing_runs = held.threads <= threads_of_the_process() && held.links == 0;
        if as_before && nothing_runs && alive.is_none_or(|alive| alive == only_keeper) {
            return (held.files, free);
        }
        // Streams and threads end a moment after they were told to.
        assert!(
            start.elapsed() < PATIENCE,
            "before: {before:?} (files, bytes), after: {held:?} {:?} and {free} bytes free, {alive:?}",
            threads()
        );
        thread::sleep(Duration::from_millis(1));
    }
}

/// Threads of this library that stay for ever, once there was a GPU.
fn threads_of_the_process() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| {
        let gpu = place::gpu(0).expect("there is one, real or simulated");
        drop(Stream::cuda(&gpu, CudaStreamConfig::default()).unwrap());
        drop(gpu);
        let looks = std::iter::repeat_with(|| {
            thread::sleep(Duration::from_millis(5));
            Held::now().threads
        });
        looks.take(40).min().expect("some looks")
    })
}
