//! Ways in which cards, kernels and libraries differ, which a test asks for.

use std::fmt::Write as _;

/// Environment variable with the modes.
const VARIABLE: &str = "GDASYNC_CARD_MODES";

/// What this card does differently.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Modes {
    /// Sends are found by the doorbell register, not by the doorbell record.
    pub(crate) register: bool,
    /// The first so many queue pairs of each device of a process hear no doorbell.
    pub(crate) deaf: u32,
    /// In ERR, a queue pair flushes only the sends that a doorbell announced, not all that the record counts.
    pub(crate) flush_by_doorbell: bool,
    /// A queue pair goes to ERR up to 10 ms after it was told to.
    pub(crate) late_flush: bool,
    /// Completions of flushed requests do not say which request they are of.
    pub(crate) no_flush_counter: bool,
    /// There are no atomics, and no queue pair may allow them to its peer.
    pub(crate) no_atomics: bool,
    /// Extended completion queues are refused, as libmlx5 before rdma-core 29 refuses those of a parent domain.
    pub(crate) no_cq_ex: bool,
    /// The types of GIDs are not told.
    pub(crate) no_gid_type: bool,
    /// The modules through which cards reach GPU memory by its address are not loaded.
    pub(crate) no_peermem: bool,
    /// Contexts have no DevX.
    pub(crate) no_devx: bool,
    /// DevX registers no dma-bufs.
    pub(crate) no_dma_buf: bool,
    /// DevX tells that messages may have 1 GiB, whereupon UCX makes its queues by DevX.
    pub(crate) log_max_msg: bool,
}

impl Modes {
    /// # Errors
    /// What is wrong with the variable.
    pub(crate) fn from_env() -> Result<Self, String> {
        Self::parse(&std::env::var(VARIABLE).unwrap_or_default())
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut modes = Self::default();
        let mut flags = [
            ("register", &mut modes.register),
            ("flush-by-doorbell", &mut modes.flush_by_doorbell),
            ("late-flush", &mut modes.late_flush),
            ("no-flush-counter", &mut modes.no_flush_counter),
            ("no-atomics", &mut modes.no_atomics),
            ("no-cq-ex", &mut modes.no_cq_ex),
            ("no-gid-type", &mut modes.no_gid_type),
            ("no-peermem", &mut modes.no_peermem),
            ("no-devx", &mut modes.no_devx),
            ("no-dma-buf", &mut modes.no_dma_buf),
            ("log-max-msg", &mut modes.log_max_msg),
        ];
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            if let Some((_, flag)) = flags.iter_mut().find(|(name, _)| *name == item) {
                **flag = true;
            } else if let Some(Ok(count)) = item.strip_prefix("deaf=").map(str::parse) {
                modes.deaf = count;
            } else {
                let mut known = String::from("deaf=N");
                flags.iter().for_each(|(name, _)| _ = write!(known, ", {name}"));
                return Err(format!("{VARIABLE} is '{text}', where '{item}' is none of {known}"));
            }
        }
        Ok(modes)
    }

    /// Whether doorbell registers are looked at: only they tell what was announced.
    pub(crate) fn reads_registers(&self) -> bool {
        self.register || self.flush_by_doorbell
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_others_are_refused() {
        assert_eq!(Modes::parse(""), Ok(Modes::default()));
        let modes = Modes::parse("no-atomics, deaf=2,flush-by-doorbell").unwrap();
        assert_eq!(modes, Modes { no_atomics: true, deaf: 2, flush_by_doorbell: true, ..Modes::default() });
        assert!(modes.reads_registers());
        for bad in ["deaf", "deaf=x", "no-flush-counters", "register=1"] {
            let error = Modes::parse(bad).unwrap_err();
            assert!(error.contains(bad) && error.contains("late-flush"), "{error}");
        }
    }
}
