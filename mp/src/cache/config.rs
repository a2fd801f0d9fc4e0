//! What the cache keeps.

use gdsync::cuda::Gpu;

/// The variable that decides in place of the program.
const VARIABLE: &str = "MP_REG_CACHE";
/// What a GPU has at least.
const SMALL_WINDOW: u64 = 256 << 20;

/// Which registrations stay when their handles are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// None: memory is registered at each call.
    Nothing,
    /// Those of GPU memory, which prove themselves.
    Gpu,
    /// All.
    All,
}

/// Bounds of a [`Cache`](super::Cache), and what it keeps. The environment's `MP_REG_CACHE` overrides
/// [`CacheConfig::keep`]: `off`, `gpu` or `on`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Which registrations are kept (default all).
    pub keep: Keep,
    /// How many are kept, in use or not (default 1024).
    pub entries: usize,
    /// Their bytes, in host and GPU memory together (default a quarter of the host's memory).
    pub bytes: u64,
    /// Bytes of each GPU's window (BAR1) that they may take, in pages of 64 KiB; `None`, the default, is half of it, or
    /// 128 MiB where the system does not tell its size.
    pub window: Option<u64>,
    /// The application calls [`Cache::invalidate`](super::Cache::invalidate) before it frees GPU memory (default no). Then
    /// CUDA is not asked at each use whether it is still the same.
    pub announced: bool,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self { keep: Keep::All, entries: 1024, bytes: host_memory() / 4, window: None, announced: false }
    }
}

impl CacheConfig {
    /// With what the environment says.
    ///
    /// # Errors
    /// [`gdsync::Error::InvalidArgument`] for a value that means nothing.
    pub(crate) fn in_environment(self) -> gdsync::Result<Self> {
        self.with(std::env::var_os(VARIABLE).map(|value| value.to_string_lossy().into_owned()).as_deref())
    }

    pub(super) fn with(self, variable: Option<&str>) -> gdsync::Result<Self> {
        let keep = match variable.map(str::trim) {
            None | Some("") => self.keep,
            Some("off") => Keep::Nothing,
            Some("gpu") => Keep::Gpu,
            Some("on") => Keep::All,
            Some(other) => {
                return Err(gdsync::Error::InvalidArgument {
                    what: VARIABLE,
                    value: format!("'{other}'"),
                    expected: "on, gpu or off",
                });
            }
        };
        Ok(Self { keep, ..self })
    }

    /// Bytes of this GPU's window that registrations may take.
    pub(super) fn window_of(&self, gpu: &Gpu) -> u64 {
        self.window.unwrap_or_else(|| gpu.window().unwrap_or(SMALL_WINDOW) / 2)
    }
}

/// Bytes of the host's memory.
fn host_memory() -> u64 {
    // SAFETY: it only answers.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    u64::try_from(pages).unwrap_or(0).saturating_mul(gdsync::memory::host_page() as u64)
}
