//! A table of entry points, and a call for each.

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
                let library = $crate::library::Library::open(path, &$installed)?;
                Ok(Self {
                    $(
                        $name: {
                            const NAME: &std::ffi::CStr = $crate::table::c_name(concat!(stringify!($name), "\0"));
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
                            const NAME: &std::ffi::CStr = $crate::table::c_name(concat!(stringify!($late), "\0"));
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

        #[allow(clippy::too_many_arguments, reason = "those of rdma-core")]
        impl $table {
            $(
                #[doc = concat!("Calls `", stringify!($name), "`.")]
                ///
                /// # Safety
                /// As its manual page asks.
                pub unsafe fn $name(&self, $($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: the caller vouches for the arguments.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
            $(
                #[doc = concat!("Calls `", stringify!($late), "`.")]
                ///
                /// # Errors
                #[doc = concat!("[`LoadError::Symbol`]($crate::LoadError::Symbol) before rdma-core ", $version, ".")]
                ///
                /// # Safety
                /// As its manual page asks.
                pub unsafe fn $late(&self, $($larg: $lty),*)
                    -> Result<$crate::table::ret!($($lret)?), $crate::LoadError>
                {
                    let entry = self.$late.ok_or_else(|| {
                        $crate::library::lacks(&self.library, $installed.packages, stringify!($late), $version)
                    })?;
                    // SAFETY: the caller vouches for the arguments.
                    Ok(unsafe { entry($($larg),*) })
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

/// What a function returns.
macro_rules! ret {
    () => {
        ()
    };
    ($ret:ty) => {
        $ret
    };
}
pub(crate) use ret;

/// A name for the dynamic linker.
pub(crate) const fn c_name(terminated: &'static str) -> &'static std::ffi::CStr {
    match std::ffi::CStr::from_bytes_with_nul(terminated.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a terminated name"),
    }
}
