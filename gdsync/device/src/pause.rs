//! What a thread does between two looks at something that will come soon.

use std::thread;
use std::time::Duration;

/// A pause between two looks of a spinning thread: short in the first eighth of `spin`, offering the core to
/// others after it: there may be more ranks than cores. Returns false when it is time to sleep instead.
pub fn breathe(waited: Duration, spin: Duration) -> bool {
    if waited >= spin {
        return false;
    }
    if waited < spin / 8 {
        std::hint::spin_loop();
    } else {
        thread::yield_now();
    }
    true
}
