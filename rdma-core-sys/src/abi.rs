//! How the declarations are made, and lists of them for the test that compares them with the headers.

use std::ffi::c_int;

/// What a structure or union is here.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// The type in C.
    pub c_type: &'static str,
    /// Bytes.
    pub size: usize,
    /// Bytes.
    pub align: usize,
    /// Where newer libraries may add fields.
    pub grows: Growth,
    /// Each field: its path in C, and its offset in bytes.
    pub fields: &'static [(&'static str, usize)],
}

/// Where a structure may be larger in C than here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// Nowhere: it is what it is.
    Never,
    /// At its end.
    Back,
    /// At its beginning.
    Front,
}

/// What a constant is here.
#[derive(Clone, Copy, Debug)]
pub struct Constant {
    /// Its name in C.
    pub name: &'static str,
    /// Its value.
    pub value: i128,
}

/// Declares structures and unions, and the list of their layouts.
///
/// `struct name("type in C") { field("path in C"): type }`, where both strings may be left out, as may `grows`.
macro_rules! records {
    ($list:ident; $($(#[$meta:meta])* $kind:ident $name:ident $(($c:literal))? $($grows:ident)? {
        $($(#[$fmeta:meta])* $field:ident $(($path:literal))?: $ty:ty,)*
    })*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`")]
            ///
            $(#[$meta])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub $kind $name {
                $(
                    #[doc = concat!("`", stringify!($name), ".", stringify!($field), "`")]
                    $(#[$fmeta])*
                    pub $field: $ty,
                )*
            }

            impl $name {
                /// All bytes 0.
                #[must_use]
                pub const fn zeroed() -> Self {
                    // SAFETY: fields are integers, pointers, options of functions, arrays and records of these.
                    unsafe { std::mem::zeroed() }
                }
            }

            impl std::fmt::Debug for $name {
                fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.debug_struct(stringify!($name)).finish_non_exhaustive()
                }
            }
        )*

        pub(crate) const $list: &[$crate::abi::Layout] = &[$($crate::abi::Layout {
            c_type: $crate::abi::records!(@type $kind $name $($c)?),
            size: size_of::<$name>(),
            align: align_of::<$name>(),
            grows: $crate::abi::records!(@grows $($grows)?),
            fields: &[$(
                ($crate::abi::records!(@path $field $($path)?), std::mem::offset_of!($name, $field)),
            )*],
        },)*];
    };
    (@type $kind:ident $name:ident) => { concat!(stringify!($kind), " ", stringify!($name)) };
    (@type $kind:ident $name:ident $c:literal) => { $c };
    (@path $field:ident) => { stringify!($field) };
    (@path $field:ident $path:literal) => { $path };
    (@grows) => { $crate::abi::Growth::Never };
    (@grows grows) => { $crate::abi::Growth::Back };
    (@grows grows_in_front) => { $crate::abi::Growth::Front };
}
pub(crate) use records;

/// Declares enumerations as integers with constants, and the list of these.
macro_rules! enumerations {
    ($list:ident; $($(#[$meta:meta])* enum $name:ident: $repr:ty { $($constant:ident = $value:expr,)* })*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`")]
            ///
            $(#[$meta])*
            #[repr(transparent)]
            #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
            pub struct $name(
                /// The value.
                pub $repr,
            );

            impl $name {
                $(
                    #[doc = concat!("`", stringify!($constant), "`")]
                    pub const $constant: Self = Self($value);
                )*

                /// The name of this value, if it has one here.
                #[must_use]
                pub fn name(self) -> Option<&'static str> {
                    match self {
                        $(Self::$constant => Some(stringify!($constant)),)*
                        _ => None,
                    }
                }
            }

            impl From<$name> for $repr {
                fn from(value: $name) -> Self {
                    value.0
                }
            }
        )*

        pub(crate) const $list: &[$crate::abi::Constant] = &[$($($crate::abi::Constant {
            name: stringify!($constant),
            value: $name::$constant.0 as i128,
        },)*)*];
    };
}
pub(crate) use enumerations;

/// Declares sets of flags that keep unknown bits, and the list of the known ones.
macro_rules! flag_sets {
    ($list:ident; $($(#[$meta:meta])* flags $name:ident: $repr:ty { $($constant:ident = $value:expr,)* })*) => {
        $(
            bitflags::bitflags! {
                #[doc = concat!("`", stringify!($name), "`")]
                ///
                $(#[$meta])*
                #[repr(transparent)]
                #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
                pub struct $name: $repr {
                    $(
                        #[doc = concat!("`", stringify!($constant), "`")]
                        const $constant = $value;
                    )*
                    const _ = !0;
                }
            }
        )*

        pub(crate) const $list: &[$crate::abi::Constant] = &[$($($crate::abi::Constant {
            name: stringify!($constant),
            value: $name::$constant.bits() as i128,
        },)*)*];
    };
}
pub(crate) use flag_sets;

/// Declares plain constants, and the list of them.
macro_rules! plain_constants {
    ($list:ident; $($(#[$meta:meta])* $name:ident: $ty:ty = $value:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`")]
            ///
            $(#[$meta])*
            pub const $name: $ty = $value;
        )*

        pub(crate) const $list: &[$crate::abi::Constant] = &[$($crate::abi::Constant {
            name: stringify!($name),
            value: $name as i128,
        },)*];
    };
}
pub(crate) use plain_constants;

/// A function of an old interface that nothing calls.
pub type Unused = Option<unsafe extern "C" fn() -> c_int>;
