//! The functions of `mp.h`.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use gdsync::Error;
use gdsync::cuda::RawStream;
use gdsync::memory::Word32;
use gdsync::shm::Backoff;
use gdsync::stream::{Cond, PreparedSend};
use gdsync::verbs::{RecvWr, RemoteAddr, SendWr, Sge};
use gdsync_capi_support::handles::MARK;
use gdsync_capi_support::{guard, pages};
use libc::iovec;
use smallvec::SmallVec;

use crate::abi::*;
use crate::failure::{Failure, LIBRARY, Result};
use crate::job::{self, Job, MAX_PIECES, exchange_limit, job};
use crate::memory::{REGISTRATIONS, Registration, WINDOWS, Window, length};
use crate::request::{Peer, REQUESTS, Request, State, find, patience, pause};
use crate::submission::{Item, Items, LISTS};

/// Requests of one call.
const MAX_COUNT: u32 = 1 << 20;

fn status(name: &'static str, call: impl FnOnce() -> Result<()>) -> c_int {
    LIBRARY.status(name, call)
}

/// The handle that a pointer of the program points to.
fn read(what: &'static str, from: *const Handle) -> Result<Handle> {
    let from = guard::non_null(what, from)?;
    // SAFETY: the program passes a pointer to a handle.
    Ok(unsafe { from.read() })
}

/// Stores a result for the program.
///
/// # Safety
/// `to` must be null or writable.
unsafe fn store<T>(what: &'static str, to: *mut T, make: impl FnOnce() -> Result<T>) -> Result<()> {
    let to = guard::non_null(what, to)?;
    let value = make()?;
    // SAFETY: the caller guarantees it.
    unsafe { to.write(value) };
    Ok(())
}

/// Items of an array of the program.
fn items<'a, T>(what: &'static str, first: *const T, count: u32) -> Result<&'a [T]> {
    if count > MAX_COUNT {
        return Err(Failure::invalid(what, count, "at most 1048576"));
    }
    if count == 0 {
        return Ok(&[]);
    }
    // SAFETY: the program passes so many.
    Ok(unsafe { std::slice::from_raw_parts(guard::non_null(what, first)?.as_ptr(), count as usize) })
}

/// The buffers of a message.
type Pieces = SmallVec<[Sge; 4]>;

/// What a message is of, checked.
struct Message {
    peer: Arc<Peer>,
    pieces: Pieces,
}

impl Message {
    /// One buffer.
    fn new(buf: *const c_void, size: c_int, peer: c_int, reg: *const Handle) -> Result<Self> {
        let job = job()?;
        let peer = job.peer(peer)?.clone();
        let registration = REGISTRATIONS.get(read("mp_reg_t *", reg)?)?;
        registration.check(job.number)?;
        let pieces = registration.sge(buf.expose_provenance(), length(size)?)?.into_iter().collect();
        Ok(Self { peer, pieces })
    }

    /// Several buffers.
    fn vector(vector: *const iovec, count: c_int, peer: c_int, reg: *const Handle) -> Result<Self> {
        let refuse = || Failure::invalid("nblocks", count, "1 to 30");
        let count = u32::try_from(count).ok().filter(|count| (1..=MAX_PIECES).contains(count));
        let job = job()?;
        let peer = job.peer(peer)?.clone();
        let vector = items("iovec", vector, count.ok_or_else(refuse)?)?;
        let registration = REGISTRATIONS.get(read("mp_reg_t *", reg)?)?;
        registration.check(job.number)?;
        let piece = |v: &iovec| registration.sge(v.iov_base.expose_provenance(), v.iov_len).transpose();
        Ok(Self { peer, pieces: vector.iter().filter_map(piece).collect::<Result<_>>()? })
    }

    fn irecv(&self) -> Result<Handle> {
        let wr = RecvWr::new(&self.pieces);
        let request = self.peer.add_now((false, false), |qp| qp.post_recv(&[wr]))?;
        Ok(REQUESTS.insert(request)?)
    }

    fn send(&self, how: How) -> Result<Handle> {
        how.send(&self.peer, &SendWr::send(&self.pieces), false)
    }
}

/// How a send, put or get starts.
#[derive(Clone, Copy)]
enum How {
    ByCpu,
    Prepared,
    /// By a stream, which may also wait for its completion.
    Stream(RawStream, bool),
}

impl How {
    fn send(self, peer: &Arc<Peer>, wr: &SendWr<'_>, is_unwaited: bool) -> Result<Handle> {
        let mark = if is_unwaited { MARK } else { 0 };
        let wr = std::slice::from_ref(wr);
        let prepare = |in_turn, patience| {
            peer.add((true, is_unwaited), in_turn, patience, |qp| {
                let send = qp.prepare_send(wr)?;
                Ok((send.completion(), State::Prepared(send)))
            })
        };
        let request = match self {
            Self::ByCpu => {
                let _submit = peer.lock_submit(patience())?;
                peer.add_now((true, is_unwaited), |qp| qp.post_send(wr))?
            }
            Self::Prepared => return Ok(REQUESTS.insert(prepare(false, patience())?)? | mark),
            Self::Stream(stream, waits) => {
                let _submit = peer.lock_submit(guard::wait_limit())?;
                let request = prepare(true, guard::wait_limit())?;
                let mut items = Items::default();
                items.add(Item::Send(request.clone(), request.take_prepared(State::Listed)?));
                if waits {
                    items.add(Item::Wait(request.clone()));
                }
                items.post_locked(stream)?;
                request
            }
        };
        let handle = REQUESTS.insert(request)?;
        if is_unwaited {
            REQUESTS.take(handle)?;
        }
        Ok(handle | mark)
    }
}

/// The arguments of a put or get.
struct Access {
    buf: *const c_void,
    size: c_int,
    reg: *const Handle,
    peer: c_int,
    displ: usize,
    window: *const Handle,
}

impl Access {
    fn resolve(&self) -> Result<(Message, RemoteAddr)> {
        let message = Message::new(self.buf, self.size, self.peer, self.reg)?;
        let window = WINDOWS.get(read("mp_window_t *", self.window)?)?;
        let remote = window.remote(message.peer.rank, self.displ, length(self.size)?)?;
        Ok((message, remote))
    }

    fn put(&self, flags: c_int, how: How) -> Result<Handle> {
        if flags & !(PUT_INLINE | PUT_NOWAIT) != 0 {
            return Err(Failure::invalid("flags", flags, "MP_PUT_INLINE and MP_PUT_NOWAIT"));
        }
        let (message, remote) = self.resolve()?;
        let mut wr = SendWr::write(remote, &message.pieces);
        if flags & PUT_INLINE != 0 && self.size > 0 {
            REGISTRATIONS.get(read("mp_reg_t *", self.reg)?)?.check_host()?;
            // SAFETY: the bytes are registered host memory of the program.
            let bytes = unsafe { std::slice::from_raw_parts(self.buf.cast::<u8>(), length(self.size)?) };
            wr = SendWr::write_inline(remote, bytes);
        }
        how.send(&message.peer, &wr, flags & PUT_NOWAIT != 0)
    }

    fn get(&self, how: How) -> Result<Handle> {
        let (message, remote) = self.resolve()?;
        how.send(&message.peer, &SendWr::read(remote, &message.pieces), false)
    }
}

/// A prepared send that a list or a stream takes. Without a handle to wait for, its request ends here.
fn take_prepared(handle: Handle) -> Result<(Arc<Request>, PreparedSend)> {
    let request = REQUESTS.get(handle & !MARK)?.clone();
    let send = request.take_prepared(State::Listed)?;
    if request.is_unwaited {
        REQUESTS.take(handle & !MARK)?;
    }
    Ok((request, send))
}

/// Posts prepared sends to a stream, which may also wait for them.
fn post_prepared(handles: &[Handle], stream: RawStream, waits: bool) -> Result<()> {
    let mut items = Items::default();
    for &handle in handles {
        let (request, send) = take_prepared(handle)?;
        items.add(Item::Send(request, send));
    }
    if waits {
        for &handle in handles.iter().filter(|&handle| handle & MARK == 0) {
            items.add(Item::Wait(REQUESTS.get(handle)?.clone()));
        }
    }
    items.post(stream)
}

/// A request that a stream or list is to wait for; `None` if it was ended.
fn awaited(handle: Handle, list: bool) -> Result<Option<Arc<Request>>> {
    if handle & MARK != 0 {
        return Err(Failure::invalid("request to wait for", "a put with MP_PUT_NOWAIT", "one without"));
    }
    let request = find(handle)?;
    request.iter().try_for_each(|request| request.check_waitable(list))?;
    Ok(request)
}

fn wait_on_stream(handles: &[Handle], stream: RawStream) -> Result<()> {
    let mut items = Items::default();
    for &handle in handles {
        if let Some(request) = awaited(handle, false)? {
            items.add(Item::Wait(request));
        }
    }
    items.post(stream)
}

fn wait_all(handles: &[Handle]) -> Result<()> {
    let requests: Vec<_> = handles.iter().map(|&handle| awaited(handle, false)).collect::<Result<_>>()?;
    let mut failed = None;
    for (request, handle) in requests.iter().zip(handles).filter_map(|(r, h)| Some((r.as_ref()?, *h))) {
        let done = request.wait();
        if request.outcome().is_some() {
            // Another thread may have ended it.
            let _ = REQUESTS.take(handle);
        }
        failed = failed.or(done.err());
    }
    failed.map_or(Ok(()), Err)
}

/// A word of the program for streams and kernels.
fn word(ptr: *mut u32) -> Result<Word32> {
    // SAFETY: the program keeps the page mapped, see the header.
    Ok(unsafe { pages::word(ptr.expose_provenance()) }?)
}

/// The program's number of a condition; there are `count`.
fn cond(flags: c_int, count: usize) -> Result<Cond> {
    let all = [Cond::Geq, Cond::Eq, Cond::And, Cond::Nor];
    let found = usize::try_from(flags).ok().and_then(|at| all[..count].get(at).copied());
    found.ok_or_else(|| Failure::invalid("flags", flags, "a condition: MP_WAIT_GEQ, _EQ or _AND"))
}

fn list(queue: *const Handle, add: impl FnOnce(&mut Items) -> Result<()>) -> Result<()> {
    let list = LISTS.get(read("mp_desc_queue_t *", queue)?)?.clone();
    add(&mut list.0.lock())
}

/// `mp_query_param`
///
/// # Safety
/// `value` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_query_param(param: c_int, value: *mut c_int) -> c_int {
    status("mp_query_param", || {
        let refuse = || Err(Failure::invalid("param", param, "MP_PARAM_VERSION, which is 0"));
        // SAFETY: the caller guarantees it.
        unsafe { store("value", value, || if param == 0 { Ok(VERSION) } else { refuse() }) }
    })
}

/// `mp_init_with`
///
/// # Safety
/// `exchange` must be null or have functions that may be called in every call of this library; `peers` null or so many ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_init_with(
    exchange: *const mp_exchange,
    peers: *const c_int,
    count: c_int,
    flags: c_int,
    gpu_id: c_int,
) -> c_int {
    status("mp_init_with", || {
        // SAFETY: the caller guarantees it.
        let exchange = unsafe { guard::non_null("exchange", exchange)?.read() };
        job::init_with(&exchange, || peers_of(peers, count), flags, gpu_id)
    })
}

/// `mp_init_env`
///
/// # Safety
/// `peers` must be null or so many ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_init_env(
    peers: *const c_int,
    count: c_int,
    flags: c_int,
    gpu_id: c_int,
) -> c_int {
    status("mp_init_env", || job::init_env(|| peers_of(peers, count), flags, gpu_id))
}

fn peers_of<'a>(peers: *const c_int, count: c_int) -> Result<&'a [c_int]> {
    items("peers", peers, u32::try_from(count).map_err(|_| Failure::invalid("count", count, "0 or more"))?)
}

/// `mp_finalize`
#[unsafe(no_mangle)]
pub extern "C" fn mp_finalize() {
    status("mp_finalize", job::finalize);
}

/// `mp_register`
///
/// # Safety
/// The memory must stay allocated until it is deregistered; `reg` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_register(addr: *mut c_void, length: usize, reg: *mut Handle) -> c_int {
    status("mp_register", || {
        let register = || {
            let job = job()?;
            // SAFETY: the caller guarantees it.
            let new = unsafe { Registration::new((&job.pd, job.number), addr.expose_provenance(), length) }?;
            Ok(REGISTRATIONS.insert(new)?)
        };
        // SAFETY: the caller guarantees that it is null or writable.
        unsafe { store("mp_reg_t *", reg, register) }
    })
}

/// `mp_deregister`
///
/// # Safety
/// `reg` must be null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_deregister(reg: *mut Handle) -> c_int {
    status("mp_deregister", || {
        REGISTRATIONS.take(read("mp_reg_t *", reg)?)?;
        Ok(())
    })
}

/// `mp_irecv`
///
/// # Safety
/// The memory must stay allocated until the request is complete; the other pointers must be null or readable, `req` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_irecv(
    buf: *mut c_void,
    size: c_int,
    peer: c_int,
    reg: *mut Handle,
    req: *mut Handle,
) -> c_int {
    // SAFETY: the caller guarantees it.
    status("mp_irecv", || unsafe { store("req", req, || Message::new(buf, size, peer, reg)?.irecv()) })
}

/// `mp_irecvv`
///
/// # Safety
/// As [`mp_irecv`]; `v` must be null or so many buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_irecvv(
    v: *const iovec,
    nblocks: c_int,
    peer: c_int,
    reg: *mut Handle,
    req: *mut Handle,
) -> c_int {
    // SAFETY: the caller guarantees it.
    status("mp_irecvv", || unsafe { store("req", req, || Message::vector(v, nblocks, peer, reg)?.irecv()) })
}

/// Defines sends of one buffer.
macro_rules! sends {
    ($($name:ident($($stream:ident)?) => $how:expr;)*) => {$(
        #[doc = concat!("`", stringify!($name), "`")]
        ///
        /// # Safety
        /// As [`mp_irecv`]; a stream must live.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            buf: *mut c_void,
            size: c_int,
            peer: c_int,
            reg: *mut Handle,
            req: *mut Handle,
            $($stream: RawStream,)?
        ) -> c_int {
            // SAFETY: the caller guarantees it.
            status(stringify!($name), || unsafe {
                store("req", req, || Message::new(buf, size, peer, reg)?.send($how))
            })
        }
    )*};
}

sends! {
    mp_isend() => How::ByCpu;
    mp_send_prepare() => How::Prepared;
    mp_isend_on_stream(stream) => How::Stream(stream, false);
    mp_send_on_stream(stream) => How::Stream(stream, true);
}

/// Defines sends of several buffers.
macro_rules! vectored_sends {
    ($($name:ident($($stream:ident)?) => $how:expr;)*) => {$(
        #[doc = concat!("`", stringify!($name), "`")]
        ///
        /// # Safety
        /// As [`mp_irecvv`]; a stream must live.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            v: *const iovec,
            nblocks: c_int,
            peer: c_int,
            reg: *mut Handle,
            req: *mut Handle,
            $($stream: RawStream,)?
        ) -> c_int {
            // SAFETY: the caller guarantees it.
            status(stringify!($name), || unsafe {
                store("req", req, || Message::vector(v, nblocks, peer, reg)?.send($how))
            })
        }
    )*};
}

vectored_sends! {
    mp_isendv() => How::ByCpu;
    mp_sendv_prepare() => How::Prepared;
    mp_isendv_on_stream(stream) => How::Stream(stream, false);
}

/// Defines puts and gets.
macro_rules! accesses {
    ($($name:ident($($argument:ident: $type:ty),*) => $call:ident($($value:expr),*);)*) => {$(
        #[doc = concat!("`", stringify!($name), "`")]
        ///
        /// # Safety
        /// As [`mp_irecv`]; a stream must live.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            buf: *mut c_void,
            size: c_int,
            reg: *mut Handle,
            peer: c_int,
            displ: usize,
            window: *mut Handle,
            req: *mut Handle,
            $($argument: $type,)*
        ) -> c_int {
            // SAFETY: the caller guarantees it.
            status(stringify!($name), || unsafe {
                store("req", req, || Access { buf, size, reg, peer, displ, window }.$call($($value),*))
            })
        }
    )*};
}

accesses! {
    mp_iput(flags: c_int) => put(flags, How::ByCpu);
    mp_put_prepare(flags: c_int) => put(flags, How::Prepared);
    mp_iput_on_stream(flags: c_int, stream: RawStream) => put(flags, How::Stream(stream, false));
    mp_iget() => get(How::ByCpu);
    mp_iget_on_stream(stream: RawStream) => get(How::Stream(stream, false));
}

/// Defines calls with requests and a stream.
macro_rules! on_stream {
    ($($one:ident, $all:ident => $call:expr;)*) => {$(
        #[doc = concat!("`", stringify!($one), "`")]
        ///
        /// # Safety
        /// `req` must be null or readable; the stream must live.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $one(req: *mut Handle, stream: RawStream) -> c_int {
            status(stringify!($one), || $call(items("req", req, 1)?, stream))
        }

        #[doc = concat!("`", stringify!($all), "`")]
        ///
        /// # Safety
        /// `req` must be null or so many requests; the stream must live.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $all(count: u32, req: *mut Handle, stream: RawStream) -> c_int {
            status(stringify!($all), || $call(items("req", req, count)?, stream))
        }
    )*};
}

on_stream! {
    mp_wait_on_stream, mp_wait_all_on_stream => wait_on_stream;
    mp_isend_post_on_stream, mp_isend_post_all_on_stream => |all, stream| post_prepared(all, stream, false);
    mp_send_post_on_stream, mp_send_post_all_on_stream => |all, stream| post_prepared(all, stream, true);
    mp_iput_post_on_stream, mp_iput_post_all_on_stream => |all, stream| post_prepared(all, stream, false);
}

/// `mp_wait`
///
/// # Safety
/// `req` must be null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_wait(req: *mut Handle) -> c_int {
    status("mp_wait", || wait_all(items("req", req, 1)?))
}

/// `mp_wait_all`
///
/// # Safety
/// `req` must be null or so many requests.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_wait_all(count: u32, req: *mut Handle) -> c_int {
    status("mp_wait_all", || wait_all(items("req", req, count)?))
}

/// `mp_progress_all`
///
/// # Safety
/// `req` must be null or so many requests.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_progress_all(count: u32, req: *mut Handle) -> c_int {
    let complete = LIBRARY.run("mp_progress_all", || {
        let mut complete = 0;
        for &handle in items("req", req, count)? {
            let Some(request) = find(handle)? else {
                complete += 1;
                continue;
            };
            if request.outcome().is_none() {
                request.peer.progress();
            }
            complete += c_int::from(request.outcome().is_some());
        }
        Ok::<_, Failure>(complete)
    });
    // A count cannot tell of a failure, which was printed.
    complete.unwrap_or(0)
}

/// `mp_window_create`
///
/// # Safety
/// The memory must stay allocated until the window is destroyed; `window` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_window_create(addr: *mut c_void, size: usize, window: *mut Handle) -> c_int {
    status("mp_window_create", || {
        let create = || {
            let job = job()?;
            // SAFETY: the caller guarantees it.
            let own = unsafe { Registration::new((&job.pd, job.number), addr.expose_provenance(), size) };
            let new = job.exchange(|exchange| Window::new(own, size, exchange, exchange_limit()))?;
            Ok(WINDOWS.insert(new)?)
        };
        // SAFETY: the caller guarantees that it is null or writable.
        unsafe { store("mp_window_t *", window, create) }
    })
}

/// `mp_window_destroy`
///
/// # Safety
/// `window` must be null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_window_destroy(window: *mut Handle) -> c_int {
    status("mp_window_destroy", || {
        WINDOWS.take(read("mp_window_t *", window)?)?;
        Ok(())
    })
}

/// `mp_wait32`
///
/// # Safety
/// `ptr` must be null or a word, which others change.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_wait32(ptr: *mut u32, value: u32, flags: c_int) -> c_int {
    status("mp_wait32", || {
        let (cond, ptr) = (cond(flags, 3)?, guard::non_null("ptr", ptr)?);
        if !ptr.is_aligned() {
            return Err(Failure::invalid("ptr", format!("{ptr:p}"), "a multiple of 4"));
        }
        // SAFETY: an aligned word of the program, which others change as a whole.
        let word = unsafe { AtomicU32::from_ptr(ptr.as_ptr()) };
        let (backoff, limit) = (Backoff::new(Duration::from_micros(50)), guard::wait_limit());
        let job = job().ok();
        while !cond.holds32(word.load(Ordering::Acquire), value) {
            if backoff.waited() > limit {
                return Err(Error::late("a wait for a word", limit, "whoever writes it").into());
            }
            // A put of a peer may be what changes it.
            if !job.as_ref().is_some_and(|job| job.progress()) {
                pause(&backoff);
            }
        }
        Ok(())
    })
}

/// `mp_wait32_on_stream`
///
/// # Safety
/// `ptr` must be null or a word, whose page stays mapped; the stream must live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_wait32_on_stream(
    ptr: *mut u32,
    value: u32,
    flags: c_int,
    stream: RawStream,
) -> c_int {
    status("mp_wait32_on_stream", || {
        let mut items = Items::default();
        items.add(Item::WaitWord(word(ptr)?, value, cond(flags, 3)?));
        items.add(Item::Flush);
        items.post(stream)
    })
}

/// `mp_desc_queue_alloc`
///
/// # Safety
/// `dq` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_desc_queue_alloc(dq: *mut Handle) -> c_int {
    // SAFETY: the caller guarantees it.
    status("mp_desc_queue_alloc", || unsafe {
        store("mp_desc_queue_t *", dq, || Ok(LISTS.insert(Arc::default())?))
    })
}

/// `mp_desc_queue_free`
///
/// # Safety
/// `dq` must be null or readable and writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_desc_queue_free(dq: *mut Handle) -> c_int {
    status("mp_desc_queue_free", || {
        LISTS.take(read("mp_desc_queue_t *", dq)?)?;
        // SAFETY: the caller guarantees it.
        unsafe { store("mp_desc_queue_t *", dq, || Ok(0)) }
    })
}

/// `mp_desc_queue_add_send`
///
/// # Safety
/// The pointers must be null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_desc_queue_add_send(dq: *mut Handle, req: *mut Handle) -> c_int {
    status("mp_desc_queue_add_send", || {
        list(dq, |items| {
            let (request, send) = take_prepared(read("req", req)?)?;
            items.add(Item::Send(request, send));
            Ok(())
        })
    })
}

fn add_wait(dq: *mut Handle, req: *mut Handle, is_send: bool) -> Result<()> {
    list(dq, |items| {
        let Some(request) = awaited(read("req", req)?, true)? else { return Ok(()) };
        if request.is_send != is_send {
            let value = if is_send { "a receive" } else { "a send, put or get" };
            return Err(Failure::invalid("request to wait for", value, "one of the other direction"));
        }
        items.add(Item::Wait(request));
        Ok(())
    })
}

/// `mp_desc_queue_add_wait_send`
///
/// # Safety
/// The pointers must be null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_desc_queue_add_wait_send(dq: *mut Handle, req: *mut Handle) -> c_int {
    status("mp_desc_queue_add_wait_send", || add_wait(dq, req, true))
}

/// `mp_desc_queue_add_wait_recv`
///
/// # Safety
/// The pointers must be null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_desc_queue_add_wait_recv(dq: *mut Handle, req: *mut Handle) -> c_int {
    status("mp_desc_queue_add_wait_recv", || add_wait(dq, req, false))
}

/// `mp_desc_queue_add_wait_value32`
///
/// # Safety
/// `dq` must be null or readable; `ptr` null or a word, whose page stays mapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_desc_queue_add_wait_value32(
    dq: *mut Handle,
    ptr: *mut u32,
    value: u32,
    flags: c_int,
) -> c_int {
    status("mp_desc_queue_add_wait_value32", || {
        list(dq, |items| {
            items.add(Item::WaitWord(word(ptr)?, value, cond(flags, 4)?));
            Ok(())
        })
    })
}

/// `mp_desc_queue_add_write_value32`
///
/// # Safety
/// As [`mp_desc_queue_add_wait_value32`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_desc_queue_add_write_value32(
    dq: *mut Handle,
    ptr: *mut u32,
    value: u32,
) -> c_int {
    status("mp_desc_queue_add_write_value32", || {
        list(dq, |items| {
            items.add(Item::Write(word(ptr)?, value));
            Ok(())
        })
    })
}

/// `mp_desc_queue_post_on_stream`
///
/// # Safety
/// `dq` must be null or readable; the stream must live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_desc_queue_post_on_stream(
    stream: RawStream,
    dq: *mut Handle,
    flags: c_int,
) -> c_int {
    status("mp_desc_queue_post_on_stream", || {
        guard::no_flags(flags)?;
        let mut items = Items::default();
        list(dq, |listed| {
            std::mem::swap(listed, &mut items);
            Ok(())
        })?;
        items.post(stream)
    })
}

/// `mpx_get_word`
///
/// # Safety
/// `ptr` must be null or a word, whose page stays mapped; `words` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mpx_get_word(ptr: *mut u32, value: u32, words: *mut mp_word_words) -> c_int {
    status("mpx_get_word", || {
        let get = || Ok(mp_word_words { ptr: word(ptr)?.memory().gpu_addr(&job()?.gpu)?, value });
        // SAFETY: the caller guarantees it.
        unsafe { store("words", words, get) }
    })
}

/// `mpx_get_send`
///
/// # Safety
/// `req` must be null or readable, `words` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mpx_get_send(req: *mut Handle, words: *mut mp_send_words) -> c_int {
    status("mpx_get_send", || {
        let get = || {
            let job = job()?;
            let (request, send) = take_prepared(read("req", req)?)?;
            let got = request.peer.hand_over(&request, || send.words(&job.gpu))?;
            let (db_ptr, db_value) = (got.doorbell, got.doorbell_value);
            Ok(mp_send_words { dbrec_ptr: got.record, db_ptr, db_value, dbrec_value: got.record_value })
        };
        // SAFETY: the caller guarantees it.
        unsafe { store("words", words, get) }
    })
}

/// What a kernel waits for: the completion of a request, unless that has ended.
fn wait_words(job: &Job, request: Option<&Request>) -> Result<mp_wait_words> {
    if let Some(request) = request {
        let peer = &request.peer;
        let mut words = None;
        let got = peer.while_busy(|| {
            words = Some(peer.qp.prepare_wait(&request.completion)?.words(&job.gpu)?);
            Ok(())
        });
        if let Some(words) = words {
            let cond = match words.cond {
                Cond::Geq => 0,
                Cond::Eq => 1,
                Cond::And => 2,
                Cond::Nor => 3,
            };
            let (sema_ptr, flag_ptr) = (words.word, words.index);
            let (sema_value, flag_value) = (words.value, words.index_value);
            return Ok(mp_wait_words { sema_ptr, flag_ptr, sema_value, flag_value, cond });
        }
        peer.progress();
        // The CPU may have taken the completion already.
        request.outcome().unwrap_or(got.map_err(Failure::from))?;
    }
    let at = job.complete.gpu_addr(&job.gpu)?;
    let (sema_ptr, flag_ptr) = (at, at + 4);
    Ok(mp_wait_words { sema_ptr, flag_ptr, sema_value: 0, flag_value: 0, cond: 1 })
}

/// `mpx_get_wait`
///
/// # Safety
/// `req` must be null or readable, `words` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mpx_get_wait(req: *mut Handle, words: *mut mp_wait_words) -> c_int {
    status("mpx_get_wait", || {
        let get = || wait_words(&*job()?, awaited(read("req", req)?, false)?.as_deref());
        // SAFETY: the caller guarantees it.
        unsafe { store("words", words, get) }
    })
}

/// `mpx_last_error`: the text stays until the next failure of the calling thread.
#[unsafe(no_mangle)]
pub extern "C" fn mpx_last_error() -> *const c_char {
    guard::last_error()
}

/// `mpx_set_wait_limit`
#[unsafe(no_mangle)]
pub extern "C" fn mpx_set_wait_limit(milliseconds: u64) -> c_int {
    guard::set_wait_limit(milliseconds);
    0
}
