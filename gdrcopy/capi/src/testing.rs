//! Opening on a simulated machine, for the tests of this crate. Not in the library that is installed.

use std::cell::RefCell;

use gdrcopy::{GdrBuilder, System};

thread_local! {
    static SYSTEM: RefCell<Option<System>> = const { RefCell::new(None) };
}

/// [`gdr_open`](crate::gdr_open) on this thread opens on this machine from now on; `None`: on the real one.
pub fn use_system(system: impl Into<Option<System>>) {
    SYSTEM.set(system.into());
}

pub(crate) fn prepare(builder: GdrBuilder) -> GdrBuilder {
    match SYSTEM.with_borrow(Clone::clone) {
        Some(system) => builder.system(system),
        None => builder,
    }
}
