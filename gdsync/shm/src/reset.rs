//! A queue pair is reset, or a stream takes over requests of it: never both.
//!
//! ```text
//! hands a request to a stream           resets
//!   holds += 1                            lock
//!   lock                                  outstanding, and holds > 0? then unlock: refused
//!   in RTS? then outstanding += 1         state = RESET
//!   unlock                                unlock
//!   the stream takes a hold of its own    reset the device, forget the requests
//!   holds -= 1
//! ```
//!
//! *No request outlives a reset.* If the reset locks first, the sender finds the state changed. If the sender does, the reset finds the
//! request outstanding and its hold, or that of the stream, which keeps it until it has run the request.

/// Hands a request to a stream by `hand`, which takes the lock, checks the state, and returns when the stream has a hold of its own.
/// The `hold` taken before is dropped then.
#[inline(always)]
pub fn hand_over<H, T>(hold: H, hand: impl FnOnce() -> T) -> T {
    let done = hand();
    drop(hold);
    done
}

/// Changes the state by `close`, with the locks, unless requests have an owner.
///
/// # Errors
/// That owner; nothing was changed then.
pub fn close<G, O>(
    locked: G,
    owner: impl FnOnce(&G) -> Option<O>,
    close: impl FnOnce(&mut G),
) -> Result<(), O> {
    let mut locked = locked;
    match owner(&locked) {
        Some(owner) => Err(owner),
        None => {
            close(&mut locked);
            Ok(())
        }
    }
}
