//! The functions that NCCL calls, and the tables it finds them in.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use gdsync_capi_support::guard::no_panic;
use gdsync_capi_support::handles::{self, Table};
use gdsync_capi_support::process;

use crate::abi::{
    Config, GetRmaProperties, HANDLE_BYTES, Handle, INTERNAL_ERROR, INVALID_ARGUMENT, Iput, Iput14,
    IputSignal, IputSignal14, Logger, NcclResult, PTR_CUDA, PTR_HOST, Properties, REMOTE_ERROR, Rma14, Rma15,
    Rma16, RmaProperties, SUCCESS, SYSTEM_ERROR,
};
use crate::collective::Collective;
use crate::listen::Listener;
use crate::operation::{At, Contexts, KINDS, REGIONS, Request, SignalAt};
use crate::{device, report};

/// The plug-in, as opened for a communicator with this hash.
static OPENED: Table<u64> = Table::new(1, &KINDS);
static LISTENERS: Table<Arc<Listener>> = Table::new(2, &KINDS);
static COLLECTIVES: Table<Arc<Collective>> = Table::new(3, &KINDS);
static CONTEXTS: Table<Arc<Contexts>> = Table::new(4, &KINDS);
static REQUESTS: Table<Arc<Request>> = Table::new(6, &KINDS);

/// Contexts of one call; NCCL makes a few.
const MAX_CONTEXTS: c_int = 1024;

/// Why a call is refused, and its result.
#[derive(Debug)]
struct Refusal {
    result: NcclResult,
    text: String,
}

type Result<T = ()> = std::result::Result<T, Refusal>;

impl From<gdsync::Error> for Refusal {
    fn from(error: gdsync::Error) -> Self {
        let is_argument =
            matches!(error, gdsync::Error::InvalidArgument { .. } | gdsync::Error::OutOfBounds { .. });
        let result = if is_argument { INVALID_ARGUMENT } else { SYSTEM_ERROR };
        Self { result, text: error.to_string() }
    }
}

impl From<handles::Refusal> for Refusal {
    fn from(refusal: handles::Refusal) -> Self {
        Self { result: INVALID_ARGUMENT, text: refusal.text }
    }
}

impl From<mp::Error> for Refusal {
    fn from(error: mp::Error) -> Self {
        match error {
            mp::Error::Device(error) => error.into(),
            error => Self { result: REMOTE_ERROR, text: error.to_string() },
        }
    }
}

fn invalid(what: &'static str, value: impl fmt::Display, expected: &'static str) -> Refusal {
    gdsync::Error::invalid(what, value, expected).into()
}

/// Runs a call. A refusal is a line in the log.
fn status(name: &str, call: impl FnOnce() -> Result) -> NcclResult {
    let checked = || {
        process::check()?;
        call()
    };
    let refusal = match no_panic(checked) {
        Ok(Ok(())) => return SUCCESS,
        Ok(Err(refusal)) => refusal,
        Err(panicked) => Refusal { result: INTERNAL_ERROR, text: panicked.to_string() },
    };
    // A panic here would be one in the log's text.
    let _ = no_panic(|| report::warn(&format!("{name}: {}", refusal.text)));
    refusal.result
}

/// A place for an answer of the call.
///
/// # Safety
/// `place` must be null or writable.
unsafe fn put<T>(what: &'static str, place: *mut T, value: T) -> Result {
    if place.is_null() {
        return Err(invalid(what, "NULL", "a place for the answer"));
    }
    // SAFETY: not null, so writable: the caller's promise.
    unsafe { place.write(value) };
    Ok(())
}

fn to_handle(number: usize) -> Handle {
    ptr::without_provenance_mut(number)
}

/// Starts an operation, whose request goes to `place`. A failure is none of the result: NCCL would end its thread, and leave streams
/// waiting. It releases the streams.
///
/// # Safety
/// `place` must be null or writable.
unsafe fn start(
    name: &str,
    contexts: Handle,
    place: *mut Handle,
    call: impl FnOnce(&Contexts) -> Request,
) -> NcclResult {
    status(name, || {
        let contexts = CONTEXTS.get(contexts.addr())?.clone();
        let request = no_panic(|| call(&contexts)).unwrap_or_else(|panicked| {
            contexts.collective.fail(contexts.collective.rank(), &panicked.to_string());
            Request::Ready
        });
        let request = REQUESTS.insert(Arc::new(request))?;
        // SAFETY: the caller's promise.
        unsafe { put("the place for the request", place, to_handle(request)) }
    })
}

unsafe extern "C" fn init(place: *mut Handle, comm: u64, logger: Option<Logger>) -> NcclResult {
    report::open(logger);
    let opened = status("init", || {
        if device::count() == 0 {
            let expected = "a usable one; `gdasync doctor` says what is missing (GDSYNC_DEVICE chooses)";
            return Err(invalid("the RDMA device", "none", expected));
        }
        // SAFETY: NCCL passes a place.
        unsafe { put("the place for the context", place, to_handle(OPENED.insert(comm)?)) }
    });
    if opened != SUCCESS {
        report::close();
    }
    opened
}

unsafe extern "C" fn finalize(opened: Handle) -> NcclResult {
    status("finalize", || {
        OPENED.take(opened.addr())?;
        report::close();
        Ok(())
    })
}

unsafe extern "C" fn devices(place: *mut c_int) -> NcclResult {
    status("devices", || {
        let count = c_int::try_from(device::count()).unwrap_or(c_int::MAX);
        // SAFETY: NCCL passes a place.
        unsafe { put("the place for the number", place, count) }
    })
}

unsafe extern "C" fn get_rma_properties(_: Handle, place: *mut RmaProperties) -> NcclResult {
    // SAFETY: NCCL passes a place.
    status("getRmaProperties", || unsafe {
        put("the place for the properties", place, RmaProperties::default())
    })
}

unsafe extern "C" fn get_properties(number: c_int, place: *mut Properties) -> NcclResult {
    // SAFETY: NCCL passes a place.
    status("getProperties", || unsafe {
        put("the place for the properties", place, device::properties(number)?)
    })
}

unsafe extern "C" fn listen(
    opened: Handle,
    number: c_int,
    handle: *mut c_void,
    place: *mut Handle,
) -> NcclResult {
    status("listen", || {
        let listener = Listener::open(*OPENED.get(opened.addr())?, number)?;
        // SAFETY: NCCL passes a place of that many bytes.
        unsafe { put("the place for the handle", handle.cast(), listener.handle()?) }?;
        let listener = LISTENERS.insert(Arc::new(listener))?;
        // SAFETY: NCCL passes a place.
        unsafe { put("the place for the listenComm", place, to_handle(listener)) }
    })
}

/// The first argument is the context of another plug-in: NCCL passes that of its network.
unsafe extern "C" fn connect(
    _: Handle,
    handles: *const *const c_void,
    size: c_int,
    rank: c_int,
    listener: Handle,
    place: *mut Handle,
) -> NcclResult {
    status("connect", || {
        let listener = LISTENERS.get(listener.addr())?.clone();
        let ranks = usize::try_from(rank).ok().zip(usize::try_from(size).ok());
        let ranks = ranks.filter(|(rank, size)| rank < size);
        let ranks = ranks.ok_or_else(|| {
            invalid("the rank", format_args!("{rank} of {size}"), "below the number of ranks")
        })?;
        if handles.is_null() {
            return Err(invalid("the handles", "NULL", "one of each rank"));
        }
        // SAFETY: NCCL passes as many as there are ranks, at least one.
        let root = unsafe { handles.read() };
        if root.is_null() {
            return Err(invalid("the handle of rank 0", "NULL", "what listen gave there"));
        }
        // SAFETY: a handle has so many bytes, of any alignment.
        let root = unsafe { root.cast::<[u8; HANDLE_BYTES]>().read_unaligned() };
        let collective = COLLECTIVES.insert(Collective::connect(&listener, &root, ranks)?)?;
        // SAFETY: NCCL passes a place.
        unsafe { put("the place for the collComm", place, to_handle(collective)) }
    })
}

unsafe extern "C" fn close_listen(listener: Handle) -> NcclResult {
    status("closeListen", || Ok(LISTENERS.take(listener.addr()).map(drop)?))
}

unsafe extern "C" fn create_context(
    collective: Handle,
    config: *const Config,
    place: *mut Handle,
) -> NcclResult {
    status("createContext", || {
        let collective = COLLECTIVES.get(collective.addr())?.clone();
        // SAFETY: NCCL passes a configuration.
        let config = unsafe { config.as_ref() }.ok_or_else(|| invalid("the configuration", "NULL", "one"))?;
        let count = config.contexts;
        let count = usize::try_from(count).ok().filter(|_| count <= MAX_CONTEXTS);
        let count = count.ok_or_else(|| invalid("the number of contexts", config.contexts, "1 to 1024"))?;
        let contexts = CONTEXTS.insert(Arc::new(Contexts::new(collective, count)?))?;
        // SAFETY: NCCL passes a place.
        unsafe { put("the place for the rmaCtx", place, to_handle(contexts)) }
    })
}

unsafe extern "C" fn destroy_context(contexts: Handle) -> NcclResult {
    status("destroyContext", || Ok(CONTEXTS.take(contexts.addr()).map(drop)?))
}

unsafe extern "C" fn reg_mr_sym(
    collective: Handle,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    flags: u64,
    place: *mut Handle,
) -> NcclResult {
    status("regMrSym", || {
        let collective = COLLECTIVES.get(collective.addr())?.clone();
        if kind != PTR_HOST && kind != PTR_CUDA {
            return Err(invalid("the type of the memory", kind, "NCCL_PTR_HOST (1) or NCCL_PTR_CUDA (2)"));
        }
        // SAFETY: NCCL keeps it allocated until it is deregistered.
        let region = unsafe { collective.register((data, size), kind, flags) }?;
        let region = REGIONS.insert(region)?;
        // SAFETY: NCCL passes a place.
        unsafe { put("the place for the mhandle", place, to_handle(region)) }
    })
}

/// The address says more than the descriptor.
unsafe extern "C" fn reg_mr_sym_dma_buf(
    collective: Handle,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    _offset: u64,
    _fd: c_int,
    flags: u64,
    place: *mut Handle,
) -> NcclResult {
    // SAFETY: as the caller promises.
    unsafe { reg_mr_sym(collective, data, size, kind, flags, place) }
}

unsafe extern "C" fn dereg_mr_sym(collective: Handle, region: Handle) -> NcclResult {
    status("deregMrSym", || {
        let region = REGIONS.take(region.addr())?;
        if let Ok(collective) = COLLECTIVES.get(collective.addr()).map(|found| found.clone()) {
            collective.remove(region);
        }
        Ok(())
    })
}

unsafe extern "C" fn close_coll(collective: Handle) -> NcclResult {
    status("closeColl", || {
        COLLECTIVES.take(collective.addr())?.close();
        Ok(())
    })
}

fn at(region: Handle, offset: u64) -> At {
    At { region: region.addr(), offset }
}

/// The arguments of a put, without flags, which are hints.
#[rustfmt::skip]
unsafe extern "C" fn iput14(
    contexts: Handle, context: c_int, from: u64, source: Handle, size: usize, to: u64, target: Handle, rank: u32,
    place: *mut Handle,
) -> NcclResult {
    // SAFETY: NCCL passes a place.
    unsafe { start("iput", contexts, place, |all| all.put(context, (at(source, from), at(target, to)), size, rank, None)) }
}

#[rustfmt::skip]
unsafe extern "C" fn iput(
    contexts: Handle, context: c_int, from: u64, source: Handle, size: usize, to: u64, target: Handle, rank: u32,
    _flags: u32, place: *mut Handle,
) -> NcclResult {
    // SAFETY: as the caller promises.
    unsafe { iput14(contexts, context, from, source, size, to, target, rank, place) }
}

/// A weak signal is as strong: a context has one queue to each rank.
#[rustfmt::skip]
unsafe extern "C" fn iput_signal14(
    contexts: Handle, context: c_int, from: u64, source: Handle, size: usize, to: u64, target: Handle, rank: u32,
    signal_offset: u64, signals: Handle, value: u64, op: u32, _is_strong: bool, place: *mut Handle,
) -> NcclResult {
    let signal = SignalAt { at: at(signals, signal_offset), value, op };
    let call = |all: &Contexts| all.put(context, (at(source, from), at(target, to)), size, rank, Some(signal));
    // SAFETY: NCCL passes a place.
    unsafe { start("iputSignal", contexts, place, call) }
}

#[rustfmt::skip]
unsafe extern "C" fn iput_signal(
    contexts: Handle, context: c_int, from: u64, source: Handle, size: usize, to: u64, target: Handle, rank: u32,
    signal_offset: u64, signals: Handle, value: u64, op: u32, is_strong: bool, _flags: u32, place: *mut Handle,
) -> NcclResult {
    // SAFETY: as the caller promises.
    unsafe {
        iput_signal14(contexts, context, from, source, size, to, target, rank, signal_offset, signals, value, op, is_strong, place)
    }
}

#[rustfmt::skip]
unsafe extern "C" fn iget14(
    contexts: Handle, context: c_int, from: u64, source: Handle, size: usize, to: u64, target: Handle, rank: u32,
    place: *mut Handle,
) -> NcclResult {
    // SAFETY: NCCL passes a place.
    unsafe { start("iget", contexts, place, |all| all.get(context, (at(source, from), at(target, to)), size, rank)) }
}

#[rustfmt::skip]
unsafe extern "C" fn iget(
    contexts: Handle, context: c_int, from: u64, source: Handle, size: usize, to: u64, target: Handle, rank: u32,
    _flags: u32, place: *mut Handle,
) -> NcclResult {
    // SAFETY: as the caller promises.
    unsafe { iget14(contexts, context, from, source, size, to, target, rank, place) }
}

unsafe extern "C" fn iflush(
    contexts: Handle,
    _: c_int,
    region: Handle,
    _: u32,
    place: *mut Handle,
) -> NcclResult {
    // SAFETY: NCCL passes a place.
    unsafe { start("iflush", contexts, place, |all| all.flush(region.addr())) }
}

unsafe extern "C" fn test(collective: Handle, request: Handle, place: *mut c_int) -> NcclResult {
    status("test", || {
        let (collective, started) =
            (COLLECTIVES.get(collective.addr())?.clone(), REQUESTS.get(request.addr())?.clone());
        let is_complete = no_panic(|| started.is_complete(&collective)).unwrap_or_else(|panicked| {
            collective.fail(collective.rank(), &panicked.to_string());
            true
        });
        if is_complete {
            REQUESTS.take(request.addr())?;
        }
        // SAFETY: NCCL passes a place.
        unsafe { put("the place for the answer", place, is_complete.into()) }
    })
}

unsafe extern "C" fn rma_progress(contexts: Handle) -> NcclResult {
    status("rmaProgress", || {
        CONTEXTS.get(contexts.addr())?.clone().collective.progress();
        Ok(())
    })
}

unsafe extern "C" fn query_last_error(contexts: Handle, place: *mut bool) -> NcclResult {
    status("queryLastError", || {
        let has_failed = CONTEXTS.get(contexts.addr())?.clone().collective.has_failed();
        // SAFETY: NCCL passes a place.
        unsafe { put("the place for the answer", place, has_failed) }
    })
}

/// A table of functions; versions differ in a few entries.
const fn table<P, I, S>(get_rma_properties: P, iput: I, iput_signal: S, iget: I) -> crate::abi::Rma<P, I, S>
where
    P: Copy,
    I: Copy,
    S: Copy,
{
    crate::abi::Rma {
        name: b"GDA\0",
        init,
        devices,
        get_rma_properties,
        get_properties,
        listen,
        connect,
        create_context,
        reg_mr_sym,
        reg_mr_sym_dma_buf,
        dereg_mr_sym,
        destroy_context,
        close_coll,
        close_listen,
        iput,
        iput_signal,
        iget,
        iflush,
        test,
        rma_progress,
        query_last_error,
        finalize,
    }
}

/// For NCCL 2.30.
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v14: Rma14 =
    table((), iput14 as Iput14, iput_signal14 as IputSignal14, iget14 as Iput14);

/// For NCCL 2.31.
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v15: Rma15 = table((), iput as Iput, iput_signal as IputSignal, iget as Iput);

/// For NCCL 2.32.
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v16: Rma16 =
    table(get_rma_properties as GetRmaProperties, iput as Iput, iput_signal as IputSignal, iget as Iput);
