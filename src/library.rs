//! A shared library that is loaded at run time.

use std::ffi::{CStr, CString, c_void};

/// A loaded library, which stays loaded.
#[derive(Debug)]
pub struct Library(*mut c_void);

impl Library {
    /// Loads it.
    ///
    /// # Errors
    /// The loader's text.
    pub fn load(name: &str) -> Result<Self, String> {
        let path = CString::new(name).map_err(|error| error.to_string())?;
        // SAFETY: a terminated name; the library's initialisers may run at any time.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !library.is_null() {
            return Ok(Self(library));
        }
        // SAFETY: it may be called at any time.
        let why = unsafe { libc::dlerror() };
        if why.is_null() {
            return Err(format!("{name} cannot be loaded"));
        }
        // SAFETY: a terminated text, until the next call of this thread.
        Err(unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned())
    }

    /// The function of this name.
    ///
    /// # Errors
    /// A text that names it if the library has none.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to it.
    pub unsafe fn find<F: Copy>(&self, name: &CStr) -> Result<F, String> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: a loaded library, never closed, and a terminated name.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if found.is_null() {
            return Err(format!("it has no {}", name.to_string_lossy()));
        }
        // SAFETY: the caller vouches for the type, whose size was checked.
        Ok(unsafe { std::mem::transmute_copy(&found) })
    }
}
