//! Libraries found at run time: errors, symbols, and tables of entry points with a call for each.

use std::ffi::{CStr, CString, OsStr, OsString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

/// Why an entry point of a library cannot be called.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The library is not there, or cannot be loaded.
    #[error("loading {library}: {cause}; {fix}")]
    Library {
        /// The name or path that was tried.
        library: String,
        /// What the dynamic linker says.
        cause: String,
        /// What the user can do.
        fix: String,
    },
    /// The library is older than this function.
    #[error("{library} has no {symbol}; {fix}")]
    Symbol {
        /// The name or path of the library.
        library: String,
        /// The function.
        symbol: &'static str,
        /// What the user can do.
        fix: String,
    },
}

/// A library as its project installs it.
pub(crate) struct Installed {
    /// What the dynamic linker looks for.
    pub(crate) name: &'static str,
    /// Names another one.
    pub(crate) variable: &'static str,
    /// The packages that bring it.
    pub(crate) packages: &'static str,
    /// Whose versions tell what it has.
    pub(crate) project: &'static str,
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
    installed: &'static Installed,
}

impl Library {
    /// Loads `path`, a name that the dynamic linker searches for or a path with a slash.
    pub(crate) fn open(path: &Path, installed: &'static Installed) -> Result<Self, LoadError> {
        let failed = |cause: String| LoadError::Library {
            library: path.display().to_string(),
            cause,
            fix: format!(
                "install {}, or name the library with {}=PATH",
                installed.packages, installed.variable
            ),
        };
        let name = terminated(path.as_os_str()).ok_or_else(|| failed("the path holds a zero byte".into()))?;
        // SAFETY: the caller of the public functions guarantees the library's initialisers; the name is terminated.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let Some(handle) = NonNull::new(handle) else { return Err(failed(complaint())) };
        Ok(Self { handle, path: path.display().to_string(), installed })
    }

    /// The default version of `symbol`, if the library has it.
    pub(crate) fn find(&self, symbol: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is that of a library which is never closed; the name is terminated.
        NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), symbol.as_ptr()) })
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// `symbol`, which came with version `since` of the project, is not there.
    pub(crate) fn lacks(&self, symbol: &'static str, since: &'static str) -> LoadError {
        let Installed { packages, project, .. } = self.installed;
        let fix = format!("install {packages} of {project} {since} or newer");
        LoadError::Symbol { library: self.path.clone(), symbol, fix }
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

/// Declares a table: those entry points that every supported library has, and those that came with a version of it.
macro_rules! entry_points {
    (
        $(#[$meta:meta])*
        $table:ident from $installed:ident;
        always { $($name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?;)* }
        since { $($version:literal $late:ident($($larg:ident: $lty:ty),*) $(-> $lret:ty)?;)* }
    ) => {
        $(#[$meta])*
        #[derive(Clone)]
        pub struct $table {
            library: std::sync::Arc<str>,
            $(
                #[doc = concat!("`", stringify!($name), "`")]
                pub $name: unsafe extern "C" fn($($ty),*) $(-> $ret)?,
            )*
            $(
                #[doc = concat!("`", stringify!($late), "`, from rdma-core ", $version, " on")]
                pub $late: Option<unsafe extern "C" fn($($lty),*) $(-> $lret)?>,
            )*
        }

        impl $table {
            /// The table of the library that the environment names, or of the installed one: loaded once for the
            /// process.
            ///
            /// # Errors
            /// [`LoadError`]($crate::LoadError), the same one each time.
            pub fn load() -> Result<&'static Self, $crate::LoadError> {
                static LOADED: std::sync::OnceLock<Result<$table, $crate::LoadError>> =
                    std::sync::OnceLock::new();
                LOADED
                    .get_or_init(|| Self::of(std::path::Path::new(&$installed.path())))
                    .as_ref()
                    .map_err(Clone::clone)
            }

            /// The table of the library at `path`. A path with a slash is taken as it is; the dynamic linker searches
            /// for a name without one. The library stays loaded.
            ///
            /// # Safety
            /// The library's initialisers must be sound to run, and its functions of these names must be those of
            /// rdma-core, or behave alike.
            ///
            /// # Errors
            /// [`LoadError`]($crate::LoadError), which names the library and what to install.
            pub unsafe fn load_from(path: &std::path::Path) -> Result<Self, $crate::LoadError> {
                Self::of(path)
            }

            fn of(path: &std::path::Path) -> Result<Self, $crate::LoadError> {
                let library = $crate::load::Library::open(path, &$installed)?;
                Ok(Self {
                    $(
                        $name: {
                            const NAME: &std::ffi::CStr = $crate::load::c_name(concat!(stringify!($name), "\0"));
                            let entry = library.find(NAME).ok_or_else(|| library.lacks(stringify!($name), OLDEST))?;
                            // SAFETY: the type is that of the function in the header.
                            unsafe {
                                std::mem::transmute::<
                                    std::ptr::NonNull<std::ffi::c_void>,
                                    unsafe extern "C" fn($($ty),*) $(-> $ret)?,
                                >(entry)
                            }
                        },
                    )*
                    $(
                        $late: {
                            const NAME: &std::ffi::CStr = $crate::load::c_name(concat!(stringify!($late), "\0"));
                            library.find(NAME).map(|entry| {
                                // SAFETY: the type is that of the function in the header.
                                unsafe {
                                    std::mem::transmute::<
                                        std::ptr::NonNull<std::ffi::c_void>,
                                        unsafe extern "C" fn($($lty),*) $(-> $lret)?,
                                    >(entry)
                                }
                            })
                        },
                    )*
                    library: library.path().into(),
                })
            }

            /// The name or path this table was loaded from.
            #[must_use]
            pub fn library(&self) -> &str {
                &self.library
            }
        }

        #[allow(clippy::too_many_arguments, reason = "those of the library")]
        impl $table {
            $(
                #[doc = concat!("Calls `", stringify!($name), "`.")]
                ///
                /// # Safety
                /// As its manual page asks.
                pub unsafe fn $name(&self, $($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: the caller guarantees the arguments.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }

        impl std::fmt::Debug for $table {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($table)).field("library", &self.library).finish_non_exhaustive()
            }
        }
    };
}
pub(crate) use entry_points;

/// A name for the dynamic linker.
pub(crate) const fn c_name(terminated: &'static str) -> &'static std::ffi::CStr {
    match std::ffi::CStr::from_bytes_with_nul(terminated.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a terminated name"),
    }
}
