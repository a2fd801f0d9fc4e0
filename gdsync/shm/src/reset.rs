//! Queue pair reset against hand-over of requests to a stream: only one of them wins.
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
//! *No request outlives a reset.* If the reset locks first, the sender sees the new state. If the sender locks first,
//! the reset sees the outstanding request and a hold: the sender's, or the stream's, which lasts until the request has
//! run.

/// Hands a request to a stream. `hand` takes the lock, checks the state, and returns once the stream has its own hold.
/// Then the caller's `hold` is dropped.
#[inline]
pub fn hand_over<H, T>(hold: H, hand: impl FnOnce() -> T) -> T {
    let done = hand();
    drop(hold);
    done
}

/// Changes the state by `close` under the locks, unless requests have an owner.
///
/// # Errors
/// The owner; nothing was changed.
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
