//! Making communicators: over an exchange of the caller, by a launcher's variables, or of two processes that meet when they like.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;
use std::{io, slice};

use gdsync_capi_support::handles::Table;
use mp::launch::Listener;
use mp::{Communicator, CommunicatorBuilder, Exchange};

use crate::abi::{KINDS, Raw, gda_exchange};
use crate::comm::{COMMS, Comm, Remaining, check_flags};
use crate::context::{Ctx, context};
use crate::guard::{Foreign, Result, input, invalid, non_null, place, rank, status, timeout, values};
use crate::request::{Joined, join};

/// Ranks of an exchange.
const MAX_SIZE: usize = 1 << 16;

/// Bytes of all ranks in a call of the exchange, unless there are very many ranks. Longer contributions take several calls, so a rank that
/// claims a long one does not make this one allocate as much for each.
const GATHERED: usize = 16 << 20;

/// An exchange of the caller.
#[derive(Debug)]
struct Embedded(gda_exchange, usize, usize);

// SAFETY: the header says on which threads its functions are called: those of the library, too.
unsafe impl Send for Embedded {}

impl Embedded {
    fn new(exchange: gda_exchange) -> Result<Self> {
        // Also one that is refused is released.
        let mut made = Self(exchange, 0, 0);
        (made.1, made.2) = (rank(exchange.rank)?, rank(exchange.size)?);
        if exchange.allgather.is_none() {
            return Err(invalid("allgather", "NULL", "a function"));
        }
        if exchange.reserved != 0 {
            return Err(invalid("reserved", exchange.reserved, "0"));
        }
        if made.2 > MAX_SIZE {
            return Err(invalid("size", made.2, "at most 65536 ranks"));
        }
        Ok(made)
    }

    /// As many bytes of each rank as `mine` has.
    fn gather(&self, mine: &[u8], timeout: Duration) -> mp::Result<Vec<u8>> {
        let (Self(exchange, _, size), mut all) = (self, vec![0; mine.len() * self.2]);
        let ns = i64::try_from(timeout.as_nanos()).unwrap_or(-1);
        let (from, to) = (mine.as_ptr().cast::<c_void>(), all.as_mut_ptr().cast::<c_void>());
        let allgather = exchange.allgather.expect("checked by new");
        // SAFETY: the caller's function, with as many bytes to read and to write as it is told.
        let result = unsafe { allgather(exchange.this, from, mine.len(), to, ns) };
        let (what, errno, fix) = match result {
            0 => return Ok(all),
            1.. => {
                (format!("allgather returned {result}"), libc::EINVAL, "return 0 or a negative error number")
            }
            _ => {
                let what = format!("allgather over {size} ranks has failed");
                (what, result.checked_neg().unwrap_or(libc::EIO), "see the program that embeds this")
            }
        };
        let cause = Arc::new(io::Error::from_raw_os_error(errno));
        Err(mp::Error::Bootstrap { peer: "the exchange".into(), what, cause: Some(cause), fix })
    }
}

impl Exchange for Embedded {
    fn rank(&self) -> usize {
        self.1
    }

    fn size(&self) -> usize {
        self.2
    }

    fn allgather(&mut self, bytes: &[u8], timeout: Duration) -> mp::Result<Vec<Vec<u8>>> {
        let limit = Remaining::new(timeout);
        let lens = self.gather(&bytes.len().to_ne_bytes(), limit.get())?;
        let (lens, _) = lens.as_chunks();
        let lens: Vec<_> = lens.iter().map(|len| usize::from_ne_bytes(*len)).collect();
        let most = lens.iter().copied().max().unwrap_or(0);
        // A rank that sends nonsense must not make this one run out of memory.
        if most > mp::launch::MAX_PAYLOAD {
            let what = format!("has returned a length of {most} bytes");
            let (peer, fix) =
                ("the exchange".into(), "let allgather return what each rank passed, in rank order");
            return Err(mp::Error::Bootstrap { peer, what, cause: None, fix });
        }
        let chunk = (GATHERED / self.2).max(1024);
        let mut all = vec![Vec::new(); lens.len()];
        for at in (0..most).step_by(chunk) {
            let len = chunk.min(most - at);
            let mut mine: Vec<u8> = bytes.iter().skip(at).take(len).copied().collect();
            mine.resize(len, 0);
            let gathered = self.gather(&mine, limit.get())?;
            for ((one, of), part) in all.iter_mut().zip(&lens).zip(gathered.chunks(len)) {
                one.extend_from_slice(&part[..len.min(of.saturating_sub(at))]);
            }
        }
        Ok(all)
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        if let Some(release) = self.0.release {
            // SAFETY: the caller's function, once.
            unsafe { release(self.0.this) };
        }
    }
}

/// Makes a communicator, on this thread or on one of its own.
fn make(
    ctx: &Arc<Ctx>,
    (flags, timeout_ns): (u32, i64),
    (comm, req): (*mut Raw, *mut Raw),
    connect: impl FnOnce(CommunicatorBuilder) -> mp::Result<Communicator> + Send + 'static,
) -> Result<()> {
    let to = place("comm", comm)?;
    check_flags(flags)?;
    timeout(timeout_ns)?;
    let ctx = ctx.clone();
    let make = move || -> Result<Joined> {
        let limit = Remaining::of(timeout_ns)?;
        let built = connect(ctx.builder().timeout(limit.get()))?;
        Ok(COMMS.insert(Comm::new(&Arc::downgrade(&ctx), built, flags, &limit)?)?)
    };
    if req.is_null() {
        *to = make()?;
        return Ok(());
    }
    join(Foreign(comm.cast()), place("req", req)?, make)
}

/// See the header.
///
/// # Safety
/// The structure must be as long as it says, and its functions callable until it is released; `comm` must be valid for a write until
/// the request has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_comm_create(
    ctx: Raw,
    exchange: *const gda_exchange,
    flags: u32,
    timeout_ns: i64,
    comm: *mut Raw,
    req: *mut Raw,
) -> c_int {
    status("gda_comm_create", || {
        let exchange = match exchange.is_null() {
            true => None,
            // SAFETY: the caller vouches for its size.
            false => Some(Embedded::new(unsafe { input("exchange", exchange) }?)?),
        };
        make(&context(ctx)?, (flags, timeout_ns), (comm, req), move |builder| match exchange {
            None => builder.init(),
            Some(exchange) => builder.init_over(exchange),
        })
    })
}

/// `GDA_ADDRESS_MAX`
const ADDRESS_MAX: c_int = 64;

static LISTENERS: Table<Arc<(Arc<Ctx>, Listener)>> = Table::new(3, &KINDS);

/// See the header.
///
/// # Safety
/// `address` must be valid for `*len` writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_listen(
    ctx: Raw,
    address: *mut c_void,
    len: *mut usize,
    listener: *mut Raw,
) -> c_int {
    status("gda_listen", || {
        let (len, listener) = (place("len", len)?, place("listener", listener)?);
        let (ctx, to) = (context(ctx)?, non_null("address", address.cast::<u8>())?);
        let made = Listener::bind(None)?;
        let bytes = made.address()?;
        if *len < bytes.len() {
            return Err(invalid("len", *len, "GDA_ADDRESS_MAX"));
        }
        // SAFETY: the place has as many bytes: the caller guarantees it.
        unsafe { slice::from_raw_parts_mut(to, bytes.len()) }.copy_from_slice(&bytes);
        *len = bytes.len();
        *listener = LISTENERS.insert(Arc::new((ctx, made)))?;
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_listen_close(listener: Raw) -> c_int {
    status("gda_listen_close", || {
        LISTENERS.take(listener)?.1.close();
        Ok(())
    })
}

/// See the header.
///
/// # Safety
/// `comm` must be valid for a write until the request has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_accept(
    listener: Raw,
    flags: u32,
    timeout_ns: i64,
    comm: *mut Raw,
    req: *mut Raw,
) -> c_int {
    status("gda_accept", || {
        let listener = LISTENERS.get(listener)?.clone();
        let ctx = listener.0.clone();
        make(&ctx, (flags, timeout_ns), (comm, req), move |builder| listener.1.accept(builder))
    })
}

/// See the header.
///
/// # Safety
/// `address` must be valid for `len` bytes; `comm` for a write until the request has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_connect(
    ctx: Raw,
    address: *const c_void,
    len: usize,
    flags: u32,
    timeout_ns: i64,
    comm: *mut Raw,
    req: *mut Raw,
) -> c_int {
    status("gda_connect", || {
        let n = c_int::try_from(len).ok().filter(|&n| n <= ADDRESS_MAX);
        let n = n.ok_or_else(|| invalid("len", len, "what gda_listen has set"))?;
        // SAFETY: the caller vouches for the length.
        let address = unsafe { values("address", address.cast::<u8>(), n) }?.to_vec();
        make(&context(ctx)?, (flags, timeout_ns), (comm, req), move |builder| builder.connect_to(&address))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const RANKS: usize = 64;

    /// The exchange of ranks that all contribute the same as rank 0. Records the most bytes of a call.
    ///
    /// # Safety
    /// As `gda_exchange::allgather` is called, with an [`AtomicUsize`].
    unsafe extern "C" fn echoes(
        this: *mut c_void,
        mine: *const c_void,
        len: usize,
        all: *mut c_void,
        _: i64,
    ) -> c_int {
        // SAFETY: the number of the test, which outlives the exchange.
        let most = unsafe { &*this.cast::<AtomicUsize>() };
        // SAFETY: `len` bytes, as `Embedded::gather` says.
        let mine = unsafe { slice::from_raw_parts(mine.cast::<u8>(), len) };
        // SAFETY: room for `len` bytes of each rank, as `Embedded::gather` says.
        let all = unsafe { slice::from_raw_parts_mut(all.cast::<u8>(), RANKS * len) };
        most.fetch_max(all.len(), Ordering::Relaxed);
        all.chunks_mut(len).for_each(|one| one.copy_from_slice(mine));
        0
    }

    /// Nothing is allocated for all ranks that one rank claims.
    #[test]
    fn long_contributions_are_gathered_in_parts() {
        let most = AtomicUsize::new(0);
        let exchange = gda_exchange {
            struct_size: 0,
            reserved: 0,
            this: (&raw const most).cast_mut().cast(),
            rank: 0,
            size: c_int::try_from(RANKS).unwrap(),
            allgather: Some(echoes),
            release: None,
        };
        let mut exchange = Embedded::new(exchange).unwrap();
        for len in [0, 1, GATHERED / RANKS, GATHERED / RANKS * 2 + 77] {
            let mine: Vec<u8> = (0..len).map(|at| at.to_le_bytes()[0]).collect();
            let all = exchange.allgather(&mine, Duration::from_secs(10)).unwrap();
            assert!(all.len() == RANKS && all.iter().all(|one| *one == mine), "{len}");
        }
        assert_eq!(most.load(Ordering::Relaxed), GATHERED);
    }
}
