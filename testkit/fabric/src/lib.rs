//! A stand-in for libfabric, named by `GDSYNC_LIBFABRIC`: its providers have the properties of those that need cards, and carry
//! messages between the endpoints of one process.
//!
//! | provider | what it does |
//! |---|---|
//! | `efa` | messages overtake each other, some arrive twice, all memory must be registered, sends complete late, no descriptor to sleep on, an endpoint needs a queue for events |
//! | `cxi` | in order, regions belong to the endpoint, nothing is injected, a descriptor, few sends at once |
//! | `cxi;late` | as `cxi`, and sends complete with an error from the 200th on |
//! | `cxi;stuck` | as `cxi`, and sends never complete |
//! | `efa-direct` | messages of at most 8 KiB |
//! | `msg` | connected endpoints only |
//! | `prefix` | wants room ahead of each message |

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rdma_core_sys::fabric::*;

/// What a provider is.
#[derive(Clone, Copy, Debug)]
struct Kind {
    name: &'static CStr,
    is_ordered: bool,
    mr_mode: c_int,
    inject: usize,
    name_len: usize,
    has_fd: bool,
    fails_late: bool,
    is_stuck: bool,
    max_msg: usize,
    ep_type: c_int,
    mode: u64,
}

const EFA: Kind = Kind {
    name: c"efa",
    is_ordered: false,
    mr_mode: FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY,
    inject: 64,
    name_len: 32,
    has_fd: false,
    fails_late: false,
    is_stuck: false,
    max_msg: usize::MAX,
    ep_type: FI_EP_RDM,
    mode: 0,
};
const CXI: Kind = Kind {
    name: c"cxi",
    is_ordered: true,
    mr_mode: FI_MR_LOCAL | FI_MR_ENDPOINT | FI_MR_ALLOCATED,
    inject: 0,
    name_len: 8,
    has_fd: true,
    ..EFA
};
const KINDS: [Kind; 7] = [
    EFA,
    CXI,
    Kind { name: c"cxi;late", fails_late: true, ..CXI },
    Kind { name: c"cxi;stuck", is_stuck: true, ..CXI },
    Kind { name: c"efa-direct", max_msg: 8192, mode: FI_CONTEXT2, ..EFA },
    Kind { name: c"msg", ep_type: FI_EP_RDM - 2, ..CXI },
    Kind { name: c"prefix", mode: 1 << 58, ..CXI },
];
/// Requests of one kind that an endpoint takes.
const REQUESTS: usize = 4096;
/// Sends at once.
const SENDS: usize = 16;
/// Addresses that a vector holds.
const ADDRESSES: usize = 32;

/// An info and its parts.
#[repr(C)]
struct Info {
    info: fi_info,
    tx: fi_tx_attr,
    rx: fi_rx_attr,
    ep: fi_ep_attr,
    domain: fi_domain_attr,
    fabric: fi_fabric_attr,
}

fn new_info(kind: Option<&Kind>) -> *mut fi_info {
    let info = Box::leak(Box::new(Info {
        info: fi_info::zeroed(),
        tx: fi_tx_attr::zeroed(),
        rx: fi_rx_attr::zeroed(),
        ep: fi_ep_attr::zeroed(),
        domain: fi_domain_attr::zeroed(),
        fabric: fi_fabric_attr::zeroed(),
    }));
    if let Some(kind) = kind {
        (info.info.caps, info.info.mode) = (FI_MSG, kind.mode);
        (info.tx.size, info.rx.size, info.tx.inject_size) = (SENDS, REQUESTS, kind.inject);
        (info.ep.type_, info.ep.max_msg_size) = (kind.ep_type, kind.max_msg);
        info.domain.mr_mode = kind.mr_mode;
        info.fabric.prov_name = CString::from(kind.name).into_raw();
    }
    info.info.tx_attr = &raw mut info.tx;
    info.info.rx_attr = &raw mut info.rx;
    info.info.ep_attr = &raw mut info.ep;
    info.info.domain_attr = &raw mut info.domain;
    info.info.fabric_attr = &raw mut info.fabric;
    (&raw mut *info).cast()
}

/// `T` behind a pointer of the caller.
fn at<'a, T>(pointer: *mut T) -> &'a mut T {
    // SAFETY: callers of this library pass what its manual asks for; the tests are the only ones.
    unsafe { &mut *pointer }
}

/// The provider of an info.
fn kind_of(name: *const c_char) -> Option<&'static Kind> {
    // SAFETY: names in infos are terminated.
    KINDS.iter().find(|kind| !name.is_null() && unsafe { CStr::from_ptr(name) } == kind.name)
}

/// Version 1.20.
#[unsafe(no_mangle)]
pub extern "C" fn fi_version() -> u32 {
    1 << 16 | 20
}

/// Offers the provider that the hints name, if it can what they ask.
///
/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_getinfo(
    _version: u32,
    _node: *const c_char,
    _service: *const c_char,
    _flags: u64,
    hints: *mut fi_info,
    info: *mut *mut fi_info,
) -> c_int {
    let hints = at(hints);
    let Some(kind) = kind_of(at(hints.fabric_attr).prov_name) else { return -FI_ENODATA };
    let (ep, order) = (at(hints.ep_attr).type_, at(hints.tx_attr).msg_order);
    let lacks = ep != 0 && ep != kind.ep_type
        || order & FI_ORDER_SAS != 0 && !kind.is_ordered
        || kind.mode & !hints.mode != 0
        || kind.mr_mode & !at(hints.domain_attr).mr_mode != 0;
    if lacks {
        return -FI_ENODATA;
    }
    *at(info) = new_info(Some(kind));
    0
}

/// Leaves the memory: the tests make few.
#[unsafe(no_mangle)]
pub extern "C" fn fi_freeinfo(_info: *mut fi_info) {}

/// An empty info.
#[unsafe(no_mangle)]
pub extern "C" fn fi_dupinfo(_info: *const fi_info) -> *mut fi_info {
    new_info(None)
}

/// As the system says it.
#[unsafe(no_mangle)]
pub extern "C" fn fi_strerror(number: c_int) -> *const c_char {
    // SAFETY: the system has a text for each number.
    unsafe { libc::strerror(number) }
}

/// An object of this library: the public struct first, the private state behind it.
#[repr(C)]
struct Object<F, T> {
    seen: F,
    inner: T,
}

fn new_object<F, T>(seen: F, inner: T, place: *mut *mut F) -> c_int {
    *at(place) = Box::into_raw(Box::new(Object { seen, inner })).cast();
    0
}

fn base(control: bool) -> fid {
    static PLAIN: Table<fi_ops> =
        Table(fi_ops { size: size_of::<fi_ops>(), close: Some(close), ..fi_ops::zeroed() });
    static FULL: Table<fi_ops> = Table(fi_ops {
        size: size_of::<fi_ops>(),
        close: Some(close),
        bind: Some(bind),
        control: Some(self::control),
    });
    let ops = if control { FULL.get() } else { PLAIN.get() };
    fid { ops, ..fid::zeroed() }
}

/// A table of functions, which callers only read.
struct Table<T>(T);

// SAFETY: nothing writes to it.
unsafe impl<T> Sync for Table<T> {}

impl<T> Table<T> {
    fn get(&'static self) -> *mut T {
        (&raw const self.0).cast_mut()
    }
}

/// What endpoints, their queues and regions share.
#[derive(Debug)]
struct Shared {
    kind: Kind,
    state: Mutex<State>,
    event: OwnedFd,
}

#[derive(Debug, Default)]
struct State {
    peers: Vec<Weak<Shared>>,
    inbox: VecDeque<Vec<u8>>,
    receives: VecDeque<(usize, usize, usize)>,
    /// Context, buffer and message of each send; the buffer must stay as it is until the completion.
    sends: VecDeque<(usize, usize, Vec<u8>)>,
    done: VecDeque<(usize, Result<usize, c_int>)>,
    regions: Vec<std::ops::Range<usize>>,
    has_eq: bool,
    sent: usize,
    random: u64,
}

impl State {
    fn random(&mut self, below: usize) -> usize {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.random >> 33).unwrap_or(0) % below
    }

    /// Hands some of what has arrived to receives, and completes some sends.
    fn progress(&mut self, kind: &Kind) {
        for _ in 0..=self.random(4) {
            if self.inbox.is_empty() || self.receives.is_empty() {
                break;
            }
            let which = if kind.is_ordered { 0 } else { self.random(self.inbox.len().min(6)) };
            let message = self.inbox.remove(which).expect("in the range");
            let (to, room, context) = self.receives.pop_front().expect("not empty");
            let len = message.len().min(room);
            // SAFETY: the caller lends the buffer until its completion.
            unsafe { std::ptr::copy_nonoverlapping(message.as_ptr(), to as *mut u8, len) };
            self.done.push_back((context, if len == message.len() { Ok(len) } else { Err(FI_ETRUNC) }));
        }
        for _ in 0..self.random(4) {
            let Some(send) = self.sends.pop_front().filter(|_| !kind.is_stuck) else { break };
            let (context, buffer, message) = send;
            self.sent += 1;
            // SAFETY: the caller lends the buffer until its completion.
            let sent = unsafe { std::slice::from_raw_parts(buffer as *const u8, message.len()) };
            let fails = kind.fails_late && self.sent >= 200 || sent != message;
            self.done.push_back((context, if fails { Err(libc::EIO) } else { Ok(0) }));
        }
    }

    fn is_idle(&self) -> bool {
        self.done.is_empty() && self.sends.is_empty() && (self.inbox.is_empty() || self.receives.is_empty())
    }

    fn is_registered(&self, kind: &Kind, buffer: usize, len: usize, desc: *mut c_void) -> bool {
        let is_within =
            |region: &std::ops::Range<usize>| region.start <= buffer && buffer + len <= region.end;
        kind.mr_mode & FI_MR_LOCAL == 0
            || self.regions.get((desc as usize).wrapping_sub(1)).is_some_and(is_within)
    }
}

impl Shared {
    fn signal(&self) {
        // SAFETY: the descriptor is open, and eight bytes are read.
        unsafe { libc::write(self.event.as_raw_fd(), (&raw const ONE).cast(), 8) };
    }
}

static ONE: u64 = 1;
/// Endpoints by their names.
static ENDPOINTS: Mutex<BTreeMap<u64, Weak<Shared>>> = Mutex::new(BTreeMap::new());

type Fabric = Object<fid_fabric, Kind>;
type Domain = Object<fid_domain, Arc<Shared>>;
type Queue = Object<fid_cq, Arc<Shared>>;
type Vector = Object<fid_av, Arc<Shared>>;
type Endpoint = Object<fid_ep, (Arc<Shared>, u64)>;

fn shared_of_domain(domain: *mut fid_domain) -> &'static Arc<Shared> {
    &at(domain.cast::<Domain>()).inner
}

fn shared_of_ep(ep: *mut fid_ep) -> &'static Arc<Shared> {
    &at(ep.cast::<Endpoint>()).inner.0
}

/// Opens a fabric.
#[unsafe(no_mangle)]
pub extern "C" fn fi_fabric(
    attr: *mut fi_fabric_attr,
    fabric: *mut *mut fid_fabric,
    _context: *mut c_void,
) -> c_int {
    static OPS: Table<fi_ops_fabric> = Table(fi_ops_fabric {
        size: size_of::<fi_ops_fabric>(),
        domain: Some(open_domain),
        eq_open: Some(open_eq),
        trywait: Some(trywait),
        ..fi_ops_fabric::zeroed()
    });
    let Some(kind) = kind_of(at(attr).prov_name) else { return -libc::EINVAL };
    new_object(fid_fabric { fid: base(false), ops: OPS.get() }, *kind, fabric)
}

extern "C" fn close(object: *mut fid) -> c_int {
    // The memory stays; a name is not found any more.
    ENDPOINTS.lock().remove(&(object as u64));
    0
}

extern "C" fn open_domain(
    fabric: *mut fid_fabric,
    _info: *mut fi_info,
    domain: *mut *mut fid_domain,
    _context: *mut c_void,
) -> c_int {
    static OPS: Table<fi_ops_domain> = Table(fi_ops_domain {
        size: size_of::<fi_ops_domain>(),
        av_open: Some(open_av),
        cq_open: Some(open_cq),
        endpoint: Some(open_ep),
    });
    static MR: Table<fi_ops_mr> = Table(fi_ops_mr { size: size_of::<fi_ops_mr>(), reg: Some(register) });
    // SAFETY: a plain call.
    let event = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
    // SAFETY: a new descriptor, which nothing else owns.
    let event = unsafe { OwnedFd::from_raw_fd(event) };
    let shared = Shared { kind: at(fabric.cast::<Fabric>()).inner, state: Mutex::default(), event };
    new_object(fid_domain { fid: base(false), ops: OPS.get(), mr: MR.get() }, Arc::new(shared), domain)
}

extern "C" fn open_eq(_: *mut fid_fabric, _: *mut fi_eq_attr, eq: *mut *mut fid_eq, _: *mut c_void) -> c_int {
    extern "C" fn read(_: *mut fid_eq, _: *mut u32, _: *mut c_void, _: usize, _: u64) -> isize {
        -FI_EAGAIN
    }
    static OPS: Table<fi_ops_eq> =
        Table(fi_ops_eq { size: size_of::<fi_ops_eq>(), read: Some(read), ..fi_ops_eq::zeroed() });
    new_object(fid_eq { fid: fid { fclass: EQ, ..base(false) }, ops: OPS.get() }, (), eq)
}

/// Class of queues for events.
const EQ: usize = 13;

extern "C" fn open_av(
    domain: *mut fid_domain,
    _: *mut fi_av_attr,
    av: *mut *mut fid_av,
    _: *mut c_void,
) -> c_int {
    extern "C" fn insert(
        av: *mut fid_av,
        addr: *const c_void,
        _count: usize,
        address: *mut fi_addr_t,
        _flags: u64,
        _context: *mut c_void,
    ) -> c_int {
        let name = u64::from_le_bytes(*at(addr.cast_mut().cast::<[u8; 8]>()));
        let peer = ENDPOINTS.lock().get(&name).cloned();
        let Some(peer) = peer else { return 0 };
        let peers = &mut at(av.cast::<Vector>()).inner.state.lock().peers;
        let free = peers.iter().position(|peer| peer.ptr_eq(&Weak::new())).unwrap_or(peers.len());
        if free == ADDRESSES {
            return 0;
        }
        *at(address) = free as u64;
        peers.resize(peers.len().max(free + 1), Weak::new());
        peers[free] = peer;
        1
    }
    extern "C" fn remove(av: *mut fid_av, address: *mut fi_addr_t, _count: usize, _flags: u64) -> c_int {
        let address = usize::try_from(*at(address)).expect("one of the vector");
        at(av.cast::<Vector>()).inner.state.lock().peers[address] = Weak::new();
        0
    }
    static OPS: Table<fi_ops_av> = Table(fi_ops_av {
        size: size_of::<fi_ops_av>(),
        insert: Some(insert),
        remove: Some(remove),
        ..fi_ops_av::zeroed()
    });
    new_object(fid_av { fid: base(false), ops: OPS.get() }, shared_of_domain(domain).clone(), av)
}

extern "C" fn open_cq(
    domain: *mut fid_domain,
    attr: *mut fi_cq_attr,
    cq: *mut *mut fid_cq,
    _: *mut c_void,
) -> c_int {
    static OPS: Table<fi_ops_cq> = Table(fi_ops_cq {
        size: size_of::<fi_ops_cq>(),
        read: Some(read_cq),
        readerr: Some(read_cq_error),
        ..fi_ops_cq::zeroed()
    });
    let shared = shared_of_domain(domain);
    if at(attr).wait_obj == FI_WAIT_FD && !shared.kind.has_fd {
        return -libc::ENOSYS;
    }
    new_object(fid_cq { fid: base(true), ops: OPS.get() }, shared.clone(), cq)
}

extern "C" fn read_cq(cq: *mut fid_cq, buf: *mut c_void, count: usize) -> isize {
    let shared = &at(cq.cast::<Queue>()).inner;
    let mut state = shared.state.lock();
    state.progress(&shared.kind);
    let entries = buf.cast::<fi_cq_msg_entry>();
    let mut taken = 0;
    while let Some((context, result)) = state.done.front().copied().filter(|_| taken < count) {
        let Ok(len) = result else { break };
        state.done.pop_front();
        *at(entries.wrapping_add(taken)) =
            fi_cq_msg_entry { op_context: context as *mut c_void, flags: 0, len };
        taken += 1;
    }
    match taken {
        0 if state.done.is_empty() => -FI_EAGAIN,
        0 => -FI_EAVAIL,
        _ => taken.cast_signed(),
    }
}

extern "C" fn read_cq_error(cq: *mut fid_cq, entry: *mut fi_cq_err_entry, _: u64) -> isize {
    let done = at(cq.cast::<Queue>()).inner.state.lock().done.pop_front();
    let Some((context, Err(err))) = done else { return -FI_EAGAIN };
    (at(entry).op_context, at(entry).err) = (context as *mut c_void, err);
    1
}

extern "C" fn trywait(_: *mut fid_fabric, objects: *mut *mut fid, _: c_int) -> c_int {
    let shared = &at((*at(objects)).cast::<Queue>()).inner;
    let mut count = 0_u64;
    // SAFETY: the descriptor is open, and eight bytes are written.
    unsafe { libc::read(shared.event.as_raw_fd(), (&raw mut count).cast(), 8) };
    if shared.state.lock().is_idle() { 0 } else { -libc::EAGAIN }
}

extern "C" fn open_ep(
    domain: *mut fid_domain,
    _info: *mut fi_info,
    ep: *mut *mut fid_ep,
    _: *mut c_void,
) -> c_int {
    extern "C" fn name(ep: *mut fid, addr: *mut c_void, len: *mut usize) -> c_int {
        let (shared, name) = &at(ep.cast::<Endpoint>()).inner;
        *at(addr.cast::<[u8; 8]>()) = name.to_le_bytes();
        *at(len) = shared.kind.name_len;
        0
    }
    static CM: Table<fi_ops_cm> =
        Table(fi_ops_cm { size: size_of::<fi_ops_cm>(), getname: Some(name), ..fi_ops_cm::zeroed() });
    static MSG: Table<fi_ops_msg> = Table(fi_ops_msg {
        size: size_of::<fi_ops_msg>(),
        recv: Some(recv),
        send: Some(send),
        inject: Some(inject),
        ..fi_ops_msg::zeroed()
    });
    let shared = shared_of_domain(domain).clone();
    let seen = fid_ep { fid: base(true), ops: std::ptr::null_mut(), cm: CM.get(), msg: MSG.get() };
    new_object(seen, (shared.clone(), 0), ep);
    let name = *at(ep) as u64;
    at((*at(ep)).cast::<Endpoint>()).inner.1 = name;
    ENDPOINTS.lock().insert(name, Arc::downgrade(&shared));
    0
}

/// Of endpoints and regions. The queue for events is told from the others.
extern "C" fn bind(object: *mut fid, to: *mut fid, _: u64) -> c_int {
    if at(to).fclass == EQ {
        shared_of_ep(object.cast()).state.lock().has_eq = true;
    }
    0
}

/// Of endpoints, regions and queues for completions.
extern "C" fn control(object: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    match command {
        FI_GETWAIT => *at(arg.cast::<c_int>()) = at(object.cast::<Queue>()).inner.event.as_raw_fd(),
        FI_ENABLE if at(object).fclass == 0 && !shared_of_ep(object.cast()).state.lock().has_eq => {
            return -libc::EINVAL;
        }
        _ => {}
    }
    0
}

extern "C" fn register(
    domain: *mut fid,
    buf: *const c_void,
    len: usize,
    _access: u64,
    _offset: u64,
    _key: u64,
    _flags: u64,
    mr: *mut *mut fid_mr,
    _: *mut c_void,
) -> c_int {
    let mut state = shared_of_domain(domain.cast()).state.lock();
    state.regions.push(buf as usize..buf as usize + len);
    let mem_desc = state.regions.len() as *mut c_void;
    new_object(fid_mr { fid: fid { fclass: 1, ..base(true) }, mem_desc, key: 0 }, (), mr)
}

extern "C" fn recv(
    ep: *mut fid_ep,
    buf: *mut c_void,
    len: usize,
    desc: *mut c_void,
    _from: fi_addr_t,
    context: *mut c_void,
) -> isize {
    let shared = shared_of_ep(ep);
    let mut state = shared.state.lock();
    if !state.is_registered(&shared.kind, buf as usize, len, desc) {
        return -(libc::EFAULT as isize);
    }
    // Its own, until the completion.
    *at(context.cast::<[u64; 8]>()) = [!0; 8];
    state.receives.push_back((buf as usize, len, context as usize));
    0
}

/// Puts a message into the inbox of its receiver, sometimes twice. Returns false if the provider is busy.
fn put(shared: &Shared, buf: *const c_void, len: usize, to: fi_addr_t) -> bool {
    let mut state = shared.state.lock();
    if state.sends.len() >= SENDS || state.random(8) == 0 {
        return false;
    }
    let is_doubled = !shared.kind.is_ordered && state.random(32) == 0;
    let peer = usize::try_from(to).ok().and_then(|to| state.peers.get(to)?.upgrade());
    drop(state);
    let Some(peer) = peer else { return true };
    // SAFETY: the caller lends the bytes for the call.
    let message = unsafe { std::slice::from_raw_parts(buf.cast::<u8>(), len) };
    let mut theirs = peer.state.lock();
    theirs.inbox.push_back(message.to_vec());
    if is_doubled {
        theirs.inbox.push_back(message.to_vec());
    }
    drop(theirs);
    peer.signal();
    true
}

extern "C" fn send(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    to: fi_addr_t,
    context: *mut c_void,
) -> isize {
    let shared = shared_of_ep(ep);
    if !shared.state.lock().is_registered(&shared.kind, buf as usize, len, desc) {
        return -(libc::EFAULT as isize);
    }
    if !put(shared, buf, len, to) {
        return -FI_EAGAIN;
    }
    *at(context.cast::<[u64; 8]>()) = [!0; 8];
    // SAFETY: the caller lends the bytes.
    let message = unsafe { std::slice::from_raw_parts(buf.cast::<u8>(), len) }.to_vec();
    shared.state.lock().sends.push_back((context as usize, buf as usize, message));
    shared.signal();
    0
}

extern "C" fn inject(ep: *mut fid_ep, buf: *const c_void, len: usize, to: fi_addr_t) -> isize {
    let shared = shared_of_ep(ep);
    assert!(len <= shared.kind.inject, "too long to be injected");
    if put(shared, buf, len, to) { 0 } else { -FI_EAGAIN }
}
