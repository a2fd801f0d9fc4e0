//! Completions that streams of GPUs wait for, as the device is told of them.

use std::sync::Arc;

use super::CqInner;
use gdsync_device::GpuNudge;

impl CqInner {
    /// A stream of a GPU waits for completion `n`. It cannot help the device, and where the device can do that, `kicker` wakes
    /// it when the completion was written.
    #[inline(never)]
    pub(crate) fn attend(&self, n: u64, nudger: Option<&Arc<dyn GpuNudge>>) {
        if self.parts.event.attend(n + 1, nudger) {
            self.provider.attend(self.parts.cqn);
        }
    }

    /// Foresees a claim that was made by [`CqInner::claim`].
    pub(crate) fn foresee(&self, n: u64) {
        self.parts.event.foresee_late(n + 1);
    }

    /// As [`CqInner::attend`], of a claim that was foreseen, when the caller has let a lock go since.
    #[inline(always)]
    pub(crate) fn attend_foreseen(&self, n: u64, nudger: Option<&Arc<dyn GpuNudge>>) {
        if !self.parts.event.is_attended(nudger.is_some()) {
            self.attend(n, nudger);
        }
    }
}
