//! What a process holds: descriptors, mappings, BAR1 and memory of its GPU.

use std::fs;

use gdrcopy::Gdr;

use super::case::{Env, Outcome, ensure};
use super::nvml;

/// What is held now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resources {
    descriptors: usize,
    mappings: usize,
    bar1_used: Option<u64>,
    gpu_used: Option<u64>,
}

/// Growth below these is no leak: allocators keep a little. What leaks in every cycle grows by more.
const SLACK_DESCRIPTORS: usize = 2;
const SLACK_MAPPINGS: usize = 16;
const SLACK_BYTES: u64 = 48 << 20;

impl Resources {
    /// Counts, and says what cannot be counted.
    pub(super) fn count(env: &Env, gdr: &Gdr) -> Outcome<Self> {
        let descriptors = fs::read_dir("/proc/self/fd")?.count();
        let mappings = fs::read_to_string("/proc/self/maps")?.lines().count();
        let gpu_used = env.cuda(gdr).ok().and_then(|context| context.mem_get_info().ok());
        let gpu_used = gpu_used.map(|(free, total)| (total - free) as u64);
        let pci = gdr.gpus()?.into_iter().find(|gpu| gpu.ordinal == env.common.gpu).map(|gpu| gpu.pci);
        let bar1_used = match pci.filter(|_| gpu_used.is_some()).map(|pci| nvml::bar1(&pci)) {
            Some(Ok(bar1)) => Some(bar1.used),
            Some(Err(why)) => {
                env.note(format_args!("BAR1 is not looked at: {why}"));
                None
            }
            None => None,
        };
        Ok(Self { descriptors, mappings, bar1_used, gpu_used })
    }

    /// Compares with what was held before.
    pub(super) fn compare(self, env: &Env, before: Self) -> Outcome {
        env.note(format_args!("before: {before:?}"));
        env.note(format_args!("after: {self:?}"));
        let grown = |after: usize, before: usize| after.saturating_sub(before);
        let descriptors = grown(self.descriptors, before.descriptors);
        ensure!(descriptors <= SLACK_DESCRIPTORS, "{descriptors} file descriptors leaked");
        let mappings = grown(self.mappings, before.mappings);
        ensure!(mappings <= SLACK_MAPPINGS, "{mappings} memory mappings leaked");
        let bytes = |after: Option<u64>, before: Option<u64>| Some(after?.saturating_sub(before?));
        for (what, grown) in [
            ("BAR1", bytes(self.bar1_used, before.bar1_used)),
            ("GPU memory", bytes(self.gpu_used, before.gpu_used)),
        ] {
            let grown = grown.unwrap_or(0);
            ensure!(grown <= SLACK_BYTES, "{grown} bytes of {what} leaked, or another program took them");
        }
        Ok(())
    }
}
