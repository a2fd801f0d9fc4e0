//! Libraries that are loaded at run time.

use libloading::Library;

/// Declares a table of functions of a library, with their C types.
#[macro_export]
macro_rules! declare {
    ($(#[$doc:meta])* struct $table:ident {
        $($name:ident: $symbol:literal ($($argument:ident: $type:ty),* $(,)?) -> $result:ty;)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        struct $table {
            $($name: unsafe extern "C" fn($($argument: $type),*) -> $result,)*
        }

        impl $table {
            /// Finds them all.
            ///
            /// # Safety
            /// The library's functions of these names must have these types.
            unsafe fn find(library: &::libloading::Library) -> ::std::result::Result<Self, ::libloading::Error> {
                Ok(Self {
                    $(
                        $name: {
                            let symbol: &str = $symbol;
                            // SAFETY: the caller vouches for the types.
                            *unsafe { library.get(symbol) }?
                        },
                    )*
                })
            }
        }
    };
}

/// Loads a library for good.
pub fn load(name: &str) -> Result<&'static Library, libloading::Error> {
    // SAFETY: the library's initialisers may run at any time.
    Ok(Box::leak(Box::new(unsafe { Library::new(name) }?)))
}

/// Fails unless the call of a library returned 0.
pub fn checked(call: &str, status: i32) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(format!("{call}: status {status}")) }
}
