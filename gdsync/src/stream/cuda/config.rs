//! How a stream on a GPU behaves.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use gdsync_device::cuda::Via;
use gdsync_device::error::{Error, Result};

/// Whether the CPU, after it has written a completion that a GPU waits for, prods the GPU to look at it.
///
/// It does so with a memory operation on a stream of its own: 0.7 us of CPU time. Only the software HCA can; a card
/// writes its completions alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Nudge {
    /// For streams of [`Via::MemOp`], whose waits it shortens.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl fmt::Display for Nudge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Nudge::Auto => "auto",
            Nudge::On => "on",
            Nudge::Off => "off",
        })
    }
}

impl FromStr for Nudge {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        match word {
            "auto" => Ok(Nudge::Auto),
            "on" => Ok(Nudge::On),
            "off" => Ok(Nudge::Off),
            _ => Err(Error::invalid("nudge", format!("'{word}'"), "auto, on or off")),
        }
    }
}
/// How a stream on a GPU behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaStreamConfig {
    /// The stream's name in errors. Not empty.
    pub name: String,
    /// How many calls into the driver may be pending, 1 to 512: about one for each submission. From 1,020 on the driver blocks
    /// the caller, and whoever else calls it, until the stream moves; what the application has queued on the stream counts, too,
    /// and what is queued on other streams that share its channel of the GPU.
    pub depth: usize,
    /// How long a single wait may hold the stream before the stream fails. Not zero.
    ///
    /// It counts from when all that this library queued before the wait is done, but for host functions: these, and kernels
    /// that the application queued in between, count too.
    pub wait_limit: Duration,
    /// What runs the operations.
    pub via: Via,
    /// Whether the CPU prods the GPU after completions.
    pub nudge: Nudge,
    /// Whether the application, which knows the stream, may capture it by other means than [`Stream::capture`]: with
    /// `cuStreamBeginCapture`, or by an event of a stream that is being captured. Then CUDA is asked before each submission, which takes
    /// some 40 ns, and within such a capture none is taken. `false` is a promise: were it broken, sends and waits would go into
    /// that graph, and not run.
    ///
    /// [`Stream::capture`]: crate::stream::Stream::capture
    pub captured_by_others: bool,
}

impl Default for CudaStreamConfig {
    fn default() -> Self {
        Self {
            name: "cuda stream".to_owned(),
            depth: 256,
            wait_limit: Duration::from_secs(30),
            via: Via::default(),
            nudge: Nudge::default(),
            captured_by_others: true,
        }
    }
}

impl CudaStreamConfig {
    pub(super) fn check(&self) -> Result<()> {
        if self.name.is_empty() {
            return Err(Error::invalid("stream name", "''", "a name"));
        }
        if !(1..=512).contains(&self.depth) {
            return Err(Error::invalid("stream depth", self.depth, "1 to 512 calls"));
        }
        if self.wait_limit.is_zero() {
            return Err(Error::invalid("stream wait limit", "0", "a duration above 0"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_back() {
        for via in [Via::MemOp, Via::Kernel, Via::Auto] {
            assert_eq!(via.to_string().parse::<Via>().unwrap(), via);
        }
        for nudge in [Nudge::Auto, Nudge::On, Nudge::Off] {
            assert_eq!(nudge.to_string().parse::<Nudge>().unwrap(), nudge);
        }
        assert!("MemOp".parse::<Via>().unwrap_err().to_string().contains("memop, kernel or auto"));
    }
}
