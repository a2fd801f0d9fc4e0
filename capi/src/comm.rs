//! Communicators: their ranks, parts and end.

use std::ffi::c_int;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gdsync_capi_support::handles::{Guard, Table};
use mp::Communicator;
use mp::collective::Collectives;
use mp::tagged::Tagged;
use parking_lot::{Mutex, MutexGuard};

use crate::abi::{KINDS, Raw};
use crate::context::{Ctx, Progress};
use crate::guard::{Error, Result, c_number, invalid, number, place, ranks, status, timeout};
use crate::words::in_c;

const TAGGED: u32 = 1;
const COLLECTIVES: u32 = 2;

/// A communicator, with what its flags ask for.
#[derive(Debug)]
pub(crate) struct Comm {
    /// Its requests may refer to this communicator.
    ctx: Weak<Ctx>,
    /// Fails at once where a queue is full.
    pub(crate) comm: Communicator,
    pub(crate) tagged: Option<Tagged>,
    pub(crate) collectives: Option<Collectives>,
    /// Held during a collective, also of a stream.
    calling: Mutex<()>,
    flags: u32,
    /// Its handle has ended; memory and requests may still refer to it.
    has_ended: AtomicBool,
    /// The connections to the other ranks have ended: requests that are not complete never will be.
    is_gone: AtomicBool,
}

pub(crate) static COMMS: Table<Arc<Comm>> = Table::new(2, &KINDS);

pub(crate) fn comm(raw: Raw) -> Result<Guard<Arc<Comm>>> {
    Ok(COMMS.get(raw)?)
}

/// The rest of a timeout that several calls share.
pub(crate) struct Remaining(Instant, Duration);

impl Remaining {
    pub(crate) fn new(limit: Duration) -> Self {
        Self(Instant::now(), limit)
    }

    pub(crate) fn of(ns: i64) -> Result<Self> {
        Ok(Self::new(timeout(ns)?))
    }

    pub(crate) fn get(&self) -> Duration {
        self.1.saturating_sub(self.0.elapsed())
    }
}

pub(crate) fn check_flags(flags: u32) -> Result<()> {
    match flags & !(TAGGED | COLLECTIVES) {
        0 => Ok(()),
        _ => Err(invalid("flags", format_args!("{flags:#x}"), "GDA_TAGGED, GDA_COLLECTIVES or 0")),
    }
}

impl Comm {
    pub(crate) fn new(
        ctx: &Weak<Ctx>,
        built: Communicator,
        flags: u32,
        limit: &Remaining,
    ) -> Result<Arc<Self>> {
        let comm = built.with_timeout(Duration::ZERO);
        let tagged = (flags & TAGGED != 0).then(|| Tagged::new(&comm, limit.get())).transpose()?;
        let collectives =
            (flags & COLLECTIVES != 0).then(|| Collectives::new(&built, limit.get())).transpose()?;
        let (kept, (calling, has_ended, is_gone)) = (ctx.clone(), Default::default());
        let made = Self { ctx: kept, comm, tagged, collectives, calling, flags, has_ended, is_gone };
        let made = Arc::new(made);
        let comm: Arc<dyn Progress> = made.clone();
        if let Some(ctx) = ctx.upgrade() {
            ctx.comms.lock().push(Arc::downgrade(&comm));
        }
        Ok(made)
    }

    /// Refuses a communicator that was destroyed.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        match self.has_ended.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(invalid("the communicator", "destroyed", "one that lives")),
        }
    }

    /// Lets one collective start at a time.
    pub(crate) fn call(&self, limit: &Remaining) -> Result<MutexGuard<'_, ()>> {
        let late =
            || Error::Own(libc::ETIMEDOUT, "a collective of another thread goes on; call it later".into());
        self.calling.try_lock_for(limit.get()).ok_or_else(late)
    }

    /// Whether operations under way can no longer complete.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    fn destroy(&self, limit: &Remaining) -> Result<()> {
        self.has_ended.store(true, Ordering::Relaxed);
        let collectives = self.collectives.as_ref().map(|collectives| collectives.destroy(limit.get()));
        let tagged = self.tagged.clone().map(|tagged| tagged.destroy(limit.get()));
        let ended = self.comm.clone().finalize(limit.get());
        self.is_gone.store(true, Ordering::Relaxed);
        if ended.is_err() {
            // Other threads may still wait, as for ranks that have not come.
            self.comm.close();
        }
        match collectives {
            Some(Err(error @ mp::Error::Collective { .. })) => {
                Err(Error::Own(libc::EINVAL, format!("an earlier collective has failed: {}", in_c(&error))))
            }
            collectives => Ok(collectives.unwrap_or(Ok(())).and(tagged.unwrap_or(Ok(()))).and(ended)?),
        }
    }
}

impl Progress for Comm {
    fn progress(&self) {
        match &self.tagged {
            Some(tagged) => tagged.progress(),
            None => self.comm.progress(),
        }
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_comm_rank(raw: Raw) -> c_int {
    number("gda_comm_rank", || Ok(c_number(comm(raw)?.comm.rank())))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_comm_size(raw: Raw) -> c_int {
    number("gda_comm_size", || Ok(c_number(comm(raw)?.comm.size())))
}

/// See the header.
///
/// # Safety
/// `part` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_comm_split(
    raw: Raw,
    color: c_int,
    key: c_int,
    timeout_ns: i64,
    part: *mut Raw,
) -> c_int {
    status("gda_comm_split", || {
        let (part, limit) = (place("part", part)?, Remaining::of(timeout_ns)?);
        let whole = comm(raw)?.clone();
        // In the order of the keys, negative ones first.
        let key = u64::from(key.cast_unsigned() ^ 1 << 31);
        let built = whole.comm.split(u64::try_from(color).ok(), key, limit.get())?;
        *part = match built {
            Some(built) => COMMS.insert(Comm::new(&whole.ctx, built, whole.flags, &limit)?)?,
            None => 0,
        };
        Ok(())
    })
}

/// See the header.
///
/// # Safety
/// `survivors` must be null or valid for a write; `former` null, or valid for the size of the communicator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_comm_shrink(
    raw: Raw,
    timeout_ns: i64,
    survivors: *mut Raw,
    former: *mut c_int,
) -> c_int {
    status("gda_comm_shrink", || {
        let (survivors, limit) = (place("survivors", survivors)?, Remaining::of(timeout_ns)?);
        let whole = comm(raw)?.clone();
        let shrunk = whole.comm.shrink(limit.get())?;
        let made = Comm::new(&whole.ctx, shrunk.communicator, whole.flags, &limit)?;
        if !former.is_null() {
            // SAFETY: not null, so as long as the former communicator's size, which is at least this.
            let ranks = unsafe { slice::from_raw_parts_mut(former, shrunk.former.len()) };
            ranks.iter_mut().zip(&shrunk.former).for_each(|(to, rank)| *to = c_number(*rank));
        }
        *survivors = COMMS.insert(made)?;
        Ok(())
    })
}

/// See the header.
///
/// # Safety
/// `ranks` must be null or valid for `room` writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_comm_lost(raw: Raw, ranks: *mut c_int, room: c_int) -> c_int {
    number("gda_comm_lost", || {
        let lost = comm(raw)?.comm.lost();
        let room = if ranks.is_null() { 0 } else { usize::try_from(room).unwrap_or(0) };
        for (place, rank) in lost.iter().take(room).enumerate() {
            // SAFETY: below the room of the caller's list.
            let to = unsafe { ranks.add(place) };
            // SAFETY: writable: the caller guarantees it.
            unsafe { to.write(c_number(*rank)) };
        }
        Ok(c_number(lost.len()))
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_comm_abort(raw: Raw, of: c_int) -> c_int {
    status("gda_comm_abort", || {
        let comm = comm(raw)?.clone();
        for rank in ranks(of, comm.comm.size())? {
            comm.comm.give_up(rank)?;
            comm.tagged.as_ref().map_or(Ok(()), |tagged| tagged.give_up(rank))?;
        }
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_comm_destroy(raw: Raw, timeout_ns: i64) -> c_int {
    status("gda_comm_destroy", || {
        let limit = Remaining::of(timeout_ns)?;
        COMMS.take(raw)?.destroy(&limit)
    })
}
