//! Devices and contexts: their entry points, handles of objects, and each thread's stack of contexts.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::Handle;
use parking_lot::Mutex;

use super::{Outcome, control, get, memory, objects, put, put_wanted, require, stream};

/// How many GPUs there are.
pub(super) const DEVICES: i32 = 2;
/// The highest priority of a stream; the lowest is 0.
const GREATEST_PRIORITY: i32 = -5;

pub(super) static CONTEXTS: Table<Arc<Context>> = Table::new();
thread_local! {
    /// The contexts that this thread has pushed; the last is current.
    static STACK: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

/// A new number, larger than all earlier ones.
pub(super) fn number() -> Handle {
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

/// Live objects of one kind.
pub(super) struct Table<T>(Mutex<BTreeMap<Handle, T>>);

impl<T: Clone> Table<T> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Adds the object that `make` returns for the new handle.
    pub(super) fn insert(&self, make: impl FnOnce(Handle) -> T) -> Handle {
        let handle = number();
        let value = make(handle);
        self.0.lock().insert(handle, value);
        handle
    }

    pub(super) fn get(&self, handle: Handle) -> Outcome<T> {
        self.0.lock().get(&handle).cloned().ok_or(CudaStatus::INVALID_HANDLE)
    }

    pub(super) fn remove(&self, handle: Handle) -> Outcome<T> {
        let removed = self.0.lock().remove(&handle);
        removed.ok_or(CudaStatus::INVALID_HANDLE)
    }

    /// Removes the objects for which `is_so` holds.
    pub(super) fn forget(&self, is_so: impl Fn(&T) -> bool) {
        let forgotten: Vec<T> =
            self.0.lock().extract_if(.., |_, value| is_so(value)).map(|(_, v)| v).collect();
        // Dropped outside of the lock.
        drop(forgotten);
    }

    pub(super) fn find(&self, is_so: impl Fn(&T) -> bool) -> Option<T> {
        self.0.lock().values().find(|value| is_so(value)).cloned()
    }

    pub(super) fn for_each(&self, act: impl Fn(&T)) {
        self.0.lock().values().for_each(act);
    }

    /// How many there are with handles from `first` on.
    pub(super) fn since(&self, first: Handle) -> usize {
        self.0.lock().range(first..).count()
    }
}

/// A context.
pub(super) struct Context {
    pub(super) handle: Handle,
    pub(super) device: i32,
    /// The first error of its work; 0 for none.
    error: AtomicU32,
    /// Contexts whose memory its work may use.
    pub(super) peers: Mutex<BTreeSet<Handle>>,
}

impl Context {
    pub(super) fn make(device: i32) -> Handle {
        CONTEXTS.insert(|handle| {
            Arc::new(Self { handle, device, error: AtomicU32::new(0), peers: Mutex::default() })
        })
    }

    /// Returns the sticky error.
    pub(super) fn check(&self) -> Outcome {
        match self.error.load(Ordering::Acquire) {
            0 => Ok(()),
            status => Err(CudaStatus(status)),
        }
    }

    /// Sets the sticky error; the first one stays.
    pub(super) fn fail(&self, status: CudaStatus) {
        // An earlier error stays.
        _ = self.error.compare_exchange(0, status.0, Ordering::AcqRel, Ordering::Relaxed);
    }

    pub(super) fn mend(&self) {
        self.error.store(0, Ordering::Release);
    }

    /// Whether its work reaches the memory of another context.
    pub(super) fn reaches(&self, other: &Self) -> bool {
        self.device == other.device || self.peers.lock().contains(&other.handle)
    }
}

/// The context of this thread.
pub(super) fn current() -> Outcome<Arc<Context>> {
    let handle = STACK.with_borrow(|stack| stack.last().copied()).ok_or(CudaStatus::INVALID_CONTEXT)?;
    let context = CONTEXTS.get(handle).map_err(|_| CudaStatus::CONTEXT_IS_DESTROYED)?;
    context.check()?;
    Ok(context)
}

static INITIALISED: AtomicBool = AtomicBool::new(false);
static PRIMARIES: Mutex<[Primary; 2]> = Mutex::new([Primary { retained: 0, context: 0 }; 2]);

/// A device's primary context.
#[derive(Clone, Copy)]
struct Primary {
    retained: usize,
    /// 0 while it is not retained.
    context: Handle,
}

/// Makes a context like `cuCtxCreate`, but does not make it current.
///
/// # Panics
/// For a device other than 0 and 1.
pub fn application_context(device: i32) -> Handle {
    Context::make(check(device).expect("0 or 1"))
}

/// Destroys a context and its objects as `cuCtxDestroy` and `cudaDeviceReset` do.
pub fn destroy_context(handle: Handle) {
    let Ok(context) = CONTEXTS.remove(handle) else { return };
    // Ends the waits of its streams.
    context.fail(CudaStatus::CONTEXT_IS_DESTROYED);
    stream::forget_captures(|context| context == handle);
    stream::forget(handle);
    objects::EVENTS.forget(|event| event.context == handle);
    objects::forget_modules(handle);
    objects::EXECS.forget(|exec| exec.context == handle);
    memory::forget(handle);
}

/// Primary contexts retained, less those released.
pub(super) fn retained() -> usize {
    PRIMARIES.lock().iter().map(|primary| primary.retained).sum()
}

fn check(device: i32) -> Outcome<i32> {
    require((0..DEVICES).contains(&device), CudaStatus::INVALID_DEVICE)?;
    Ok(device)
}

fn index(device: i32) -> Outcome<usize> {
    usize::try_from(check(device)?).map_err(|_| CudaStatus::INVALID_DEVICE)
}

pub(super) fn init(flags: u32) -> Outcome {
    require(flags == 0, CudaStatus::INVALID_VALUE)?;
    INITIALISED.store(true, Ordering::Release);
    Ok(())
}

pub(super) fn initialised() -> Outcome {
    require(INITIALISED.load(Ordering::Acquire), CudaStatus::NOT_INITIALIZED)
}

pub(super) fn get_device(device: *mut i32, ordinal: i32) -> Outcome {
    put(device, check(ordinal)?)
}

pub(super) fn name(text: *mut c_char, len: i32, device: i32) -> Outcome {
    check(device)?;
    write_text(text, len, c"Simulated H200")
}

pub(super) fn pci_bus_id(text: *mut c_char, len: i32, device: i32) -> Outcome {
    let ids = [c"0000:0F:00.0", c"0000:10:00.0"];
    write_text(text, len, ids[index(device)?])
}

/// Writes a terminated text, cut to fit.
fn write_text(place: *mut c_char, len: i32, text: &CStr) -> Outcome {
    let len = usize::try_from(len).map_err(|_| CudaStatus::INVALID_VALUE)?;
    require(!place.is_null() && len > 0, CudaStatus::INVALID_VALUE)?;
    let bytes = text.to_bytes();
    let fits = bytes.len().min(len - 1);
    // SAFETY: the caller of the entry point passes a place of `len` bytes.
    unsafe { place.copy_from_nonoverlapping(bytes.as_ptr().cast(), fits) };
    // SAFETY: the last of them, or before it.
    let end = unsafe { place.add(fits) };
    put(end, 0)
}

pub(super) fn attribute(value: *mut i32, number: u32, device: i32) -> Outcome {
    put(value, control::attribute(check(device)?, number)?)
}

pub(super) fn primary_retain(context: *mut Handle, device: i32) -> Outcome {
    let primary = &mut PRIMARIES.lock()[index(device)?];
    if primary.retained == 0 {
        primary.context = Context::make(device);
    }
    primary.retained += 1;
    put(context, primary.context)
}

pub(super) fn primary_release(device: i32) -> Outcome {
    let primary = &mut PRIMARIES.lock()[index(device)?];
    require(primary.retained > 0, CudaStatus::INVALID_CONTEXT)?;
    primary.retained -= 1;
    if primary.retained == 0 {
        destroy_context(primary.context);
    }
    Ok(())
}

pub(super) fn primary_state(device: i32, flags: *mut u32, active: *mut i32) -> Outcome {
    let primary = PRIMARIES.lock()[index(device)?];
    put(flags, 0)?;
    put(active, i32::from(primary.retained > 0))
}

pub(super) fn push(context: Handle) -> Outcome {
    CONTEXTS.get(context).map_err(|_| CudaStatus::INVALID_CONTEXT)?;
    STACK.with_borrow_mut(|stack| stack.push(context));
    Ok(())
}

pub(super) fn pop(context: *mut Handle) -> Outcome {
    let popped = STACK.with_borrow_mut(Vec::pop).ok_or(CudaStatus::INVALID_CONTEXT)?;
    put_wanted(context, popped)
}

pub(super) fn get_current(context: *mut Handle) -> Outcome {
    put(context, STACK.with_borrow(|stack| stack.last().copied().unwrap_or(0)))
}

pub(super) fn current_device(device: *mut i32) -> Outcome {
    put(device, current()?.device)
}

pub(super) fn get_id(context: Handle, id: *mut u64) -> Outcome {
    put(id, CONTEXTS.get(context)?.handle as u64)
}

pub(super) fn priorities(least: *mut i32, greatest: *mut i32) -> Outcome {
    current()?;
    put_wanted(least, 0)?;
    put_wanted(greatest, GREATEST_PRIORITY)
}

pub(super) fn can_access_peer(can: *mut i32, device: i32, peer: i32) -> Outcome {
    put(can, i32::from(check(device)? != check(peer)?))
}

pub(super) fn p2p_attribute(value: *mut i32, attribute: u32, device: i32, peer: i32) -> Outcome {
    require((1..=4).contains(&attribute) && check(device)? != check(peer)?, CudaStatus::INVALID_VALUE)?;
    put(value, control::p2p_attribute(attribute))
}

pub(super) fn enable_peer_access(peer: Handle, flags: u32) -> Outcome {
    let context = current()?;
    stream::unsafe_call()?;
    require(flags == 0, CudaStatus::INVALID_VALUE)?;
    let peer = CONTEXTS.get(peer).map_err(|_| CudaStatus::INVALID_CONTEXT)?;
    require(peer.device != context.device, CudaStatus::INVALID_DEVICE)?;
    require(context.peers.lock().insert(peer.handle), CudaStatus::PEER_ACCESS_ALREADY_ENABLED)
}

pub(super) fn flush_writes(target: u32, scope: u32) -> Outcome {
    current()?;
    require(target == 0 && [100, 200].contains(&scope), CudaStatus::INVALID_VALUE)
}

pub(super) fn exchange_mode(mode: *mut u32) -> Outcome {
    let new = get(mode)?;
    require(new <= stream::RELAXED, CudaStatus::INVALID_VALUE)?;
    put(mode, stream::exchange_mode(new))
}
