//! A shared library, and the symbols in it.

use std::ffi::{CStr, CString, OsStr, OsString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

use crate::LoadError;

/// A library as rdma-core installs it.
pub(crate) struct Installed {
    /// What the dynamic linker looks for.
    pub(crate) name: &'static str,
    /// Names another one.
    pub(crate) variable: &'static str,
    /// The packages that bring it.
    pub(crate) packages: &'static str,
}

impl Installed {
    /// What the environment names, or the installed one.
    pub(crate) fn path(&self) -> OsString {
        std::env::var_os(self.variable)
            .filter(|path| !path.is_empty())
            .unwrap_or_else(|| OsString::from(self.name))
    }
}

/// A loaded library. It stays loaded: addresses of its functions are handed out.
pub(crate) struct Library {
    handle: NonNull<c_void>,
    path: String,
    packages: &'static str,
}

impl Library {
    /// Loads `path`, a name that the dynamic linker searches for or a path with a slash.
    pub(crate) fn open(path: &Path, installed: &Installed) -> Result<Self, LoadError> {
        let failed = |cause: String| LoadError::Library {
            library: path.display().to_string(),
            cause,
            fix: format!(
                "install {}, or name the library with {}=PATH",
                installed.packages, installed.variable
            ),
        };
        let name = terminated(path.as_os_str()).ok_or_else(|| failed("the path holds a zero byte".into()))?;
        // SAFETY: the caller of the public functions vouches for the library's initialisers; the name is terminated.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let Some(handle) = NonNull::new(handle) else { return Err(failed(complaint())) };
        Ok(Self { handle, path: path.display().to_string(), packages: installed.packages })
    }

    /// The default version of `symbol`, if the library has it.
    pub(crate) fn find(&self, symbol: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is that of a library which is never closed; the name is terminated.
        NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), symbol.as_ptr()) })
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// `symbol`, which came with version `since` of rdma-core, is not there.
    pub(crate) fn lacks(&self, symbol: &'static str, since: &'static str) -> LoadError {
        lacks(&self.path, self.packages, symbol, since)
    }
}

/// The error for a library without `symbol`.
pub(crate) fn lacks(
    library: &str,
    packages: &'static str,
    symbol: &'static str,
    since: &'static str,
) -> LoadError {
    LoadError::Symbol {
        library: library.to_owned(),
        symbol,
        fix: format!("install {packages} of rdma-core {since} or newer"),
    }
}

fn terminated(name: &OsStr) -> Option<CString> {
    CString::new(name.as_bytes()).ok()
}

/// What the dynamic linker says of its last failure on this thread.
fn complaint() -> String {
    // SAFETY: it may be called at any time.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".into();
    }
    // SAFETY: it is terminated, and stays until the next call on this thread.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
