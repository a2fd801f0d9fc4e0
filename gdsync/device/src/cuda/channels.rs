//! How many channels CUDA gives a process on a GPU: it spreads the streams of a context over them.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use gdrcopy::cuda::raw::layout::Handle;
use parking_lot::Mutex;

use crate::cuda::channels;
use crate::env::variable;

/// What says how many, before CUDA is initialised.
pub const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// What it may say.
const TAKEN: RangeInclusive<usize> = 1..=32;
/// Where it says nothing of the kind.
pub const USUAL: usize = 8;

/// The channels that a value of the variable asks for, if CUDA takes it.
pub fn asked(value: &str) -> Option<usize> {
    value.trim().parse().ok().filter(|asked| TAKEN.contains(asked))
}

/// Those of this process.
pub fn here() -> usize {
    variable(VARIABLE).and_then(|value| asked(&value)).unwrap_or(USUAL)
}

const FIX: &str = "let fewer streams wait at a time, or set CUDA_DEVICE_MAX_CONNECTIONS (at most 32) before CUDA is initialised";

/// The streams that wait in a context of a GPU.
#[derive(Debug)]
pub struct ChannelPressure {
    channels: usize,
    standing: AtomicUsize,
    told: AtomicBool,
}

/// Those of the contexts in use.
static CROWDS: Mutex<Vec<(Handle, Weak<ChannelPressure>)>> = Mutex::new(Vec::new());

impl ChannelPressure {
    /// The streams of a context, however often it is opened.
    pub fn of_context(context: Handle) -> Arc<Self> {
        let mut crowds = CROWDS.lock();
        crowds.retain(|(_, channel_pressure)| channel_pressure.strong_count() > 0);
        if let Some(known) = crowds
            .iter()
            .find(|(known, _)| *known == context)
            .and_then(|(_, channel_pressure)| channel_pressure.upgrade())
        {
            return known;
        }
        let channel_pressure = Arc::new(Self::of(channels::here()));
        crowds.push((context, Arc::downgrade(&channel_pressure)));
        channel_pressure
    }

    fn of(channels: usize) -> Self {
        Self { channels, standing: AtomicUsize::new(0), told: AtomicBool::new(false) }
    }

    /// One more stream waits, until the result is dropped.
    pub fn join(&self) -> Standing<'_> {
        self.standing.fetch_add(1, Ordering::Relaxed);
        Standing { channel_pressure: self, most: 0 }
    }
}

/// A stream that waits.
#[derive(Debug)]
pub struct Standing<'a> {
    channel_pressure: &'a ChannelPressure,
    /// Streams that were seen to wait at a time, this one among them.
    most: usize,
}

impl Standing<'_> {
    /// Looks at the others.
    pub fn look(&mut self) {
        let (now, channels) =
            (self.channel_pressure.standing.load(Ordering::Relaxed), self.channel_pressure.channels);
        self.most = self.most.max(now);
        if now >= channels && !self.channel_pressure.told.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                streams = now,
                channels,
                fix = FIX,
                "as many streams wait on a GPU as it has channels for this process"
            );
        }
    }

    /// What to say of a wait that was not satisfied, if so many waited that it may be why.
    pub fn advice(&self) -> Option<String> {
        let (most, channels) = (self.most, self.channel_pressure.channels);
        (most >= channels).then(|| {
            format!(
                "{most} streams waited on the GPU at a time, which has {channels} channels for this process and does nothing else \
                 for it when all are held: {FIX}"
            )
        })
    }
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        self.channel_pressure.standing.fetch_sub(1, Ordering::Relaxed);
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
    fn who_waited_while_all_channels_were_held_is_told_even_when_others_are_gone() {
        let channel_pressure = ChannelPressure::of(2);
        let (mut first, mut second) = (channel_pressure.join(), channel_pressure.join());
        first.look();
        drop(first);
        second.look();
        assert_eq!(second.advice(), None, "it was not seen");
        let third = channel_pressure.join();
        second.look();
        drop(third);
        second.look();
        assert!(second.advice().unwrap().starts_with("2 streams waited"));
        drop(second);
        assert_eq!(channel_pressure.standing.into_inner(), 0);
    }

    #[test]
    fn a_context_that_is_opened_twice_has_one_crowd() {
        let [one, same, other] = [usize::MAX, usize::MAX, usize::MAX - 1].map(ChannelPressure::of_context);
        assert!(Arc::ptr_eq(&one, &same) && !Arc::ptr_eq(&one, &other));
    }
}
