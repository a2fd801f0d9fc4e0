//! Hardware channels of a GPU, and the streams that occupy them with waits.
//!
//! CUDA distributes the streams of a context over a few channels. A wait of the GPU's front end occupies its channel. When all are
//! occupied, nothing else of the process runs on that GPU. This module reports that in the log and in errors of waits that timed out.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use gdrcopy::cuda::raw::layout::Handle;
use parking_lot::Mutex;

use crate::env::variable;

/// The variable that sets the number of channels, read when CUDA is initialised.
pub const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// Values that CUDA accepts.
const TAKEN: RangeInclusive<usize> = 1..=32;
/// The default.
pub const USUAL: usize = 8;

/// The number of channels that a value of the variable requests, if CUDA accepts it.
pub fn asked(value: &str) -> Option<usize> {
    value.trim().parse().ok().filter(|asked| TAKEN.contains(asked))
}

/// The number of channels of this process.
pub fn here() -> usize {
    variable(VARIABLE).and_then(|value| asked(&value)).unwrap_or(USUAL)
}

const FIX: &str = "let fewer streams wait at a time, or set CUDA_DEVICE_MAX_CONNECTIONS (at most 32) before CUDA is initialised";

/// Counts the streams that wait in a context of a GPU.
#[derive(Debug)]
pub struct ChannelPressure {
    channels: usize,
    waiting: AtomicUsize,
    logged: AtomicBool,
}

/// Of the contexts in use.
static CONTEXTS: Mutex<Vec<(Handle, Weak<ChannelPressure>)>> = Mutex::new(Vec::new());

impl ChannelPressure {
    /// The counter of a context, shared by all who open the context.
    pub fn of_context(context: Handle) -> Arc<Self> {
        let mut contexts = CONTEXTS.lock();
        contexts.retain(|(_, pressure)| pressure.strong_count() > 0);
        let known = contexts.iter().find(|(known, _)| *known == context);
        if let Some(pressure) = known.and_then(|(_, pressure)| pressure.upgrade()) {
            return pressure;
        }
        let pressure = Arc::new(Self::of(here()));
        contexts.push((context, Arc::downgrade(&pressure)));
        pressure
    }

    fn of(channels: usize) -> Self {
        Self { channels, waiting: AtomicUsize::new(0), logged: AtomicBool::new(false) }
    }

    /// Counts a stream as waiting until the result is dropped.
    pub fn join(&self) -> WaitingStream<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        WaitingStream { pressure: self, most: 0 }
    }
}

/// A stream that waits, counted in a [`ChannelPressure`].
#[derive(Debug)]
pub struct WaitingStream<'a> {
    pressure: &'a ChannelPressure,
    /// Maximum number of streams seen waiting, including this one.
    most: usize,
}

impl WaitingStream<'_> {
    /// Samples the number of waiting streams; logs once if they occupy all channels.
    pub fn sample(&mut self) {
        let (now, channels) = (self.pressure.waiting.load(Ordering::Relaxed), self.pressure.channels);
        self.most = self.most.max(now);
        if now >= channels && !self.pressure.logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                streams = now,
                channels,
                fix = FIX,
                "as many streams wait on a GPU as it has channels for this process"
            );
        }
    }

    /// Advice for a wait that timed out, if all channels were seen occupied.
    pub fn advice(&self) -> Option<String> {
        let (most, channels) = (self.most, self.pressure.channels);
        (most >= channels).then(|| {
            format!(
                "{most} streams waited on the GPU at a time, which has {channels} channels for this process and does nothing else \
                 for it when all are held: {FIX}"
            )
        })
    }
}

impl Drop for WaitingStream<'_> {
    fn drop(&mut self) {
        self.pressure.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_takes_one_to_thirty_two() {
        let values = ["1", "32", " 8 ", "0", "33", "-1", "many", ""];
        assert_eq!(values.map(asked), [Some(1), Some(32), Some(8), None, None, None, None, None]);
    }

    #[test]
    fn advice_covers_waits_that_have_ended() {
        let pressure = ChannelPressure::of(2);
        let (mut first, mut second) = (pressure.join(), pressure.join());
        first.sample();
        drop(first);
        second.sample();
        assert_eq!(second.advice(), None, "it was not seen");
        let third = pressure.join();
        second.sample();
        drop(third);
        second.sample();
        assert!(second.advice().unwrap().starts_with("2 streams waited"));
        drop(second);
        assert_eq!(pressure.waiting.into_inner(), 0);
    }

    #[test]
    fn a_context_that_is_opened_twice_has_one_crowd() {
        let [one, same, other] = [usize::MAX, usize::MAX, usize::MAX - 1].map(ChannelPressure::of_context);
        assert!(Arc::ptr_eq(&one, &same) && !Arc::ptr_eq(&one, &other));
    }
}
