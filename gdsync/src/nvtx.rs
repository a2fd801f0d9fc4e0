//! Ranges for NVIDIA's profilers (Nsight Systems, CUPTI), with the cargo feature `nvtx`; nothing otherwise.
//!
//! Calls that submit, post, launch and wait show as ranges of the thread that makes them, in the domain `gdsync`; those of
//! messages in the domain `mp`. A profiler names its library in `NVTX_INJECTION64_PATH`, which is loaded at the first range;
//! where there is none a range costs two loads and a branch.

#[cfg(feature = "nvtx")]
mod injection;

use std::ffi::CStr;
use std::marker::PhantomData;
#[cfg(feature = "nvtx")]
use std::sync::OnceLock;

/// What ranges belong together in a profiler.
#[derive(Debug)]
pub struct Domain {
    #[cfg(feature = "nvtx")]
    name: &'static CStr,
    #[cfg(feature = "nvtx")]
    made: OnceLock<Option<injection::Domain>>,
}

/// Ends when it is dropped. It belongs to its thread.
#[derive(Debug)]
#[must_use]
pub struct Range {
    #[cfg(feature = "nvtx")]
    domain: Option<injection::Domain>,
    _of_thread: PhantomData<*const ()>,
}

/// The domain of this crate.
pub(crate) static DOMAIN: Domain = Domain::new(c"gdsync");

impl Domain {
    /// A domain of this name. Profilers hear of it with its first range.
    #[cfg_attr(not(feature = "nvtx"), expect(unused_variables, reason = "there are no ranges"))]
    pub const fn new(name: &'static CStr) -> Self {
        Self {
            #[cfg(feature = "nvtx")]
            name,
            #[cfg(feature = "nvtx")]
            made: OnceLock::new(),
        }
    }

    /// Begins a range within those that the thread has begun and not ended.
    #[cfg_attr(not(feature = "nvtx"), expect(unused_variables, reason = "there are no ranges"))]
    #[inline]
    pub fn range(&self, name: &'static CStr) -> Range {
        Range {
            #[cfg(feature = "nvtx")]
            domain: self
                .made
                .get_or_init(|| injection::Domain::new(self.name))
                .inspect(|made| made.push(name)),
            _of_thread: PhantomData,
        }
    }
}

#[cfg(feature = "nvtx")]
impl Drop for Range {
    #[inline]
    fn drop(&mut self) {
        if let Some(domain) = &self.domain {
            domain.pop();
        }
    }
}
