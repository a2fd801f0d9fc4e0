//! A shared library that is loaded at run time.

use std::ffi::{CStr, CString, c_void};

use gdasync::results::Result;

/// A loaded library, which stays loaded.
pub(super) struct Library(*mut c_void);

impl Library {
    pub(super) fn load(name: &str) -> Result<Self> {
        let path = CString::new(name)?;
        // SAFETY: a terminated name; the library's initialisers may run at any time.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !library.is_null() {
            return Ok(Self(library));
        }
        // SAFETY: it may be called at any time.
        let why = unsafe { libc::dlerror() };
        if why.is_null() {
            return Err(format!("{name} cannot be loaded").into());
        }
        // SAFETY: a terminated text, until the next call of this thread.
        Err(unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned().into())
    }

    /// The function of this name.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to it.
    pub(super) unsafe fn find<F: Copy>(&self, name: &CStr) -> Result<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: a loaded library, never closed, and a terminated name.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if found.is_null() {
            return Err(format!("it has no {}", name.to_string_lossy()).into());
        }
        // SAFETY: the caller vouches for the type, whose size was checked.
        Ok(unsafe { std::mem::transmute_copy(&found) })
    }
}

/// Declares a table of functions of a library, with their C types.
macro_rules! declare {
    ($(#[$doc:meta])* struct $table:ident {
        $($name:ident: $symbol:literal ($($argument:ident: $type:ty),* $(,)?) -> $result:ty;)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        struct $table {
            $($name: unsafe extern "C" fn($($argument: $type),*) -> $result,)*
        }

        impl $table {
            /// Finds them all.
            ///
            /// # Safety
            /// The library's functions of these names must have these types.
            unsafe fn find(library: &$crate::bench::peers::library::Library) -> gdasync::results::Result<Self> {
                Ok(Self {
                    $(
                        $name: {
                            let symbol = std::ffi::CStr::from_bytes_with_nul(concat!($symbol, "\0").as_bytes())?;
                            // SAFETY: the caller vouches for the types.
                            unsafe { library.find(symbol) }?
                        },
                    )*
                })
            }
        }
    };
}
pub(super) use declare;
