//! The client: the order of calls of direct verbs that a card asks for, its allocator, and the transitions of its queue pairs.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gdsync::memory::Memory;
use gdsync::mlx5::{self, BB, CQE_OP_OWN_OFFSET, CQE_SIZE, Cqe, DataSeg, RemoteAddr, SendOp, WqeFlags};
use parking_lot::Mutex;
use rdma_core_sys::mlx5::*;
use rdma_core_sys::verbs::*;
use rdma_core_sys::{Mlx5, Verbs};

use crate::setup::library;

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Both libraries.
pub(crate) struct Libraries {
    pub(crate) verbs: Verbs,
    pub(crate) mlx5: Mlx5,
}

pub(crate) fn libraries() -> &'static Libraries {
    static LIBRARIES: OnceLock<Libraries> = OnceLock::new();
    LIBRARIES.get_or_init(|| {
        let path = library();
        // SAFETY: it is the stand-in.
        let verbs = unsafe { Verbs::load_from(&path) }.unwrap();
        // SAFETY: as above.
        let mlx5 = unsafe { Mlx5::load_from(&path) }.unwrap();
        Libraries { verbs, mlx5 }
    })
}

/// `errno`
pub(crate) fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap()
}

/// An open device with its domains.
pub(crate) struct Bed {
    pub(crate) lib: &'static Libraries,
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) td: *mut ibv_td,
    /// The parent domain.
    pub(crate) domain: *mut ibv_pd,
    /// Boxed: the domain knows its address.
    pub(crate) arena: Box<Arena>,
}

impl Bed {
    pub(crate) fn new() -> Self {
        let lib = libraries();
        let mut count = 0;
        // SAFETY: the number is a local variable.
        let list = unsafe { lib.verbs.ibv_get_device_list(&raw mut count) };
        assert_eq!(count, 1);
        // SAFETY: the list has one entry.
        let device = unsafe { *list };
        // SAFETY: the device is a listed one.
        assert!(unsafe { lib.mlx5.mlx5dv_is_supported(device) });
        // SAFETY: as above.
        let context = unsafe { lib.verbs.ibv_open_device(device) };
        assert!(!context.is_null());
        // SAFETY: the open device stays valid.
        unsafe { lib.verbs.ibv_free_device_list(list) };
        // SAFETY: the context is open.
        let pd = unsafe { lib.verbs.ibv_alloc_pd(context) };
        let mut attr = ibv_td_init_attr::zeroed();
        // SAFETY: as above.
        let td = unsafe { ibv_alloc_td(context, &raw mut attr) };
        let arena = Box::new(Arena::default());
        let mut attr = ibv_parent_domain_init_attr {
            pd,
            td,
            comp_mask: ibv_parent_domain_init_attr_mask::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
                | ibv_parent_domain_init_attr_mask::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
            alloc: Some(alloc),
            free: Some(free),
            pd_context: ptr::from_ref(&*arena).cast_mut().cast(),
        };
        // SAFETY: the attributes name live objects.
        let domain = unsafe { ibv_alloc_parent_domain(context, &raw mut attr) };
        assert!(!pd.is_null() && !td.is_null() && !domain.is_null());
        Self { lib, context, pd, td, domain, arena }
    }

    pub(crate) fn gid(&self, index: u32) -> ibv_gid_entry {
        let mut entry = ibv_gid_entry::zeroed();
        // SAFETY: the context is open.
        let result = unsafe { self.lib.verbs.query_gid_ex(self.context, 1, index, &mut entry) };
        assert_eq!(result.unwrap(), 0);
        entry
    }

    /// A completion queue, or the error.
    pub(crate) fn create_cq(&self, cqe: u32) -> Result<*mut ibv_cq, c_int> {
        let mut attr = ibv_cq_init_attr_ex {
            cqe,
            comp_mask: ibv_cq_init_attr_mask::IBV_CQ_INIT_ATTR_MASK_PD
                | ibv_cq_init_attr_mask::IBV_CQ_INIT_ATTR_MASK_FLAGS,
            flags: ibv_create_cq_attr_flags::IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN,
            parent_domain: self.domain,
            ..ibv_cq_init_attr_ex::zeroed()
        };
        // SAFETY: the attributes name live objects.
        let cq = unsafe { ibv_create_cq_ex(self.context, &raw mut attr) };
        if cq.is_null() { Err(errno()) } else { Ok(ibv_cq_ex_to_cq(cq)) }
    }

    pub(crate) fn describe_cq(&self, cq: *mut ibv_cq) -> mlx5dv_cq {
        let mut out = mlx5dv_cq::zeroed();
        let mut obj =
            mlx5dv_obj { cq: mlx5dv_obj_cq { r#in: cq, out: &raw mut out }, ..mlx5dv_obj::zeroed() };
        // SAFETY: the queue lives, and the place is a local variable.
        let result = unsafe { self.lib.mlx5.mlx5dv_init_obj(&raw mut obj, mlx5dv_obj_type::MLX5DV_OBJ_CQ) };
        assert_eq!(result, 0);
        out
    }

    /// The attributes of a queue pair with these queues.
    pub(crate) fn qp_attr(&self, send_cq: *mut ibv_cq, recv_cq: *mut ibv_cq) -> ibv_qp_init_attr_ex {
        ibv_qp_init_attr_ex {
            send_cq,
            recv_cq,
            cap: ibv_qp_cap {
                max_send_wr: 16,
                max_recv_wr: 16,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 1,
            comp_mask: ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD
                | ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            pd: self.domain,
            send_ops_flags: ibv_qp_create_send_ops_flags::IBV_QP_EX_WITH_SEND
                | ibv_qp_create_send_ops_flags::IBV_QP_EX_WITH_RDMA_WRITE
                | ibv_qp_create_send_ops_flags::IBV_QP_EX_WITH_RDMA_READ
                | ibv_qp_create_send_ops_flags::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
            ..ibv_qp_init_attr_ex::zeroed()
        }
    }

    /// A queue pair without scatter to CQE, or the error.
    pub(crate) fn create_qp(&self, attr: &mut ibv_qp_init_attr_ex) -> Result<*mut ibv_qp, c_int> {
        let mut mlx5 = mlx5dv_qp_init_attr {
            comp_mask: mlx5dv_qp_init_attr_mask::MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS,
            create_flags: mlx5dv_qp_create_flags::MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE,
            ..mlx5dv_qp_init_attr::zeroed()
        };
        // SAFETY: the attributes name live objects.
        let qp = unsafe { self.lib.mlx5.mlx5dv_create_qp(self.context, attr, &raw mut mlx5) };
        if qp.is_null() { Err(errno()) } else { Ok(qp) }
    }

    pub(crate) fn describe_qp(&self, qp: *mut ibv_qp) -> mlx5dv_qp {
        let mut out = mlx5dv_qp::zeroed();
        let mut obj =
            mlx5dv_obj { qp: mlx5dv_obj_qp { r#in: qp, out: &raw mut out }, ..mlx5dv_obj::zeroed() };
        // SAFETY: the queue pair lives, and the place is a local variable.
        let result = unsafe { self.lib.mlx5.mlx5dv_init_obj(&raw mut obj, mlx5dv_obj_type::MLX5DV_OBJ_QP) };
        assert_eq!(result, 0);
        out
    }

    pub(crate) fn register(&self, memory: &Memory, access: ibv_access_flags) -> Result<*mut ibv_mr, c_int> {
        // SAFETY: the memory outlives its registration in these tests.
        let mr =
            unsafe { self.lib.verbs.reg_mr(self.pd, memory.addr() as *mut c_void, memory.len(), access) };
        if mr.is_null() { Err(errno()) } else { Ok(mr) }
    }

    pub(crate) fn deregister(&self, mr: *mut ibv_mr) {
        // SAFETY: nothing uses it any more.
        assert_eq!(unsafe { self.lib.verbs.ibv_dereg_mr(mr) }, 0);
    }

    /// Ends everything, in the right order. Queues must be gone.
    pub(crate) fn close(self) {
        let verbs = &self.lib.verbs;
        // SAFETY: nothing uses them any more.
        assert_eq!(unsafe { verbs.ibv_dealloc_pd(self.domain) }, 0);
        // SAFETY: as above.
        assert_eq!(unsafe { ibv_dealloc_td(self.td) }, 0);
        // SAFETY: as above.
        assert_eq!(unsafe { verbs.ibv_dealloc_pd(self.pd) }, 0);
        // SAFETY: as above.
        assert_eq!(unsafe { verbs.ibv_close_device(self.context) }, 0);
        assert_eq!(self.arena.live(), 0, "all memory came back");
    }
}

/// Memory of a queue, wherever it is.
fn view(addr: *mut c_void, len: usize) -> Memory {
    // SAFETY: the queue's memory stays until the queue is destroyed, which its users outlive nowhere here.
    unsafe { Memory::from_raw(addr.cast(), len) }.unwrap()
}

/// A completion queue in use.
pub(crate) struct CqView {
    pub(crate) raw: *mut ibv_cq,
    pub(crate) ring: Memory,
    pub(crate) log: u32,
    pub(crate) taken: u64,
}

impl CqView {
    fn new(bed: &Bed, cqe: u32) -> Self {
        let raw = bed.create_cq(cqe).unwrap();
        let described = bed.describe_cq(raw);
        assert_eq!(described.cqe_size, 64);
        let ring = view(described.buf, described.cqe_cnt as usize * CQE_SIZE);
        // What a stream that tests the owner alone needs, before the queue is used.
        ring.fill(0, ring.len(), 0xff).unwrap();
        Self { raw, ring, log: described.cqe_cnt.ilog2(), taken: 0 }
    }

    pub(crate) fn poll(&mut self) -> Option<Cqe> {
        let at = usize::try_from(self.taken & ((1 << self.log) - 1)).unwrap() * CQE_SIZE;
        let word = self.ring.atomic32(at + CQE_OP_OWN_OFFSET).unwrap().load(Ordering::Acquire);
        mlx5::owned_by_software(word, self.taken, self.log).then(|| {
            let mut bytes = [0; CQE_SIZE];
            self.ring.read(at, &mut bytes).unwrap();
            self.taken += 1;
            Cqe::decode(&bytes)
        })
    }

    pub(crate) fn wait(&mut self) -> Cqe {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(cqe) = self.poll() {
                return cqe;
            }
            assert!(Instant::now() < end, "completion {} did not come", self.taken);
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

/// A queue pair in use.
pub(crate) struct Queue {
    pub(crate) raw: *mut ibv_qp,
    pub(crate) qpn: u32,
    pub(crate) described: mlx5dv_qp,
    sq: Memory,
    rq: Memory,
    record: Memory,
    register: Memory,
    pub(crate) send_cq: CqView,
    pub(crate) recv_cq: CqView,
    /// Blocks written.
    pub(crate) head: u64,
    pub(crate) received: u64,
}

impl Queue {
    pub(crate) fn new(bed: &Bed) -> Self {
        let (send_cq, recv_cq) = (CqView::new(bed, 63), CqView::new(bed, 63));
        let raw = bed.create_qp(&mut bed.qp_attr(send_cq.raw, recv_cq.raw)).unwrap();
        let described = bed.describe_qp(raw);
        // SAFETY: it was just created.
        let qpn = unsafe { (*raw).qp_num };
        Self {
            raw,
            qpn,
            sq: view(described.sq.buf, described.sq.wqe_cnt as usize * BB),
            rq: view(described.rq.buf, described.rq.wqe_cnt as usize * described.rq.stride as usize),
            record: view(described.dbrec.cast(), 8),
            register: view(described.bf.reg, 8),
            described,
            send_cq,
            recv_cq,
            head: 0,
            received: 0,
        }
    }

    /// Writes a send, its record and its doorbell, as a CPU does.
    pub(crate) fn post(&mut self, op: &SendOp<'_>) {
        let doorbell = self.write(op);
        let record = self.record.atomic32(mlx5::QP_DBREC_SEND).unwrap();
        record.store(mlx5::send_record(self.head), Ordering::Release);
        self.ring(doorbell);
    }

    pub(crate) fn ring(&self, doorbell: u64) {
        self.register.atomic64(0).unwrap().store(doorbell, Ordering::Release);
    }

    /// Writes a send; its record and doorbell are another's.
    pub(crate) fn write(&mut self, op: &SendOp<'_>) -> u64 {
        let index = u16::try_from(self.head & 0xffff).unwrap();
        let wqe = mlx5::encode(op, self.qpn, index, WqeFlags::default()).unwrap();
        let blocks = u64::from(self.described.sq.wqe_cnt);
        for (n, block) in wqe.as_bytes().chunks(BB).enumerate() {
            let at = usize::try_from((self.head + n as u64) % blocks).unwrap() * BB;
            self.sq.write(at, block).unwrap();
        }
        self.head += u64::from(wqe.blocks());
        mlx5::doorbell_word(wqe.first8())
    }

    pub(crate) fn post_recv(&mut self, sges: &[DataSeg]) {
        let stride = self.described.rq.stride as usize;
        let mut wqe = vec![0; stride];
        mlx5::encode_recv(sges, stride, &mut wqe).unwrap();
        let slot = usize::try_from(self.received % u64::from(self.described.rq.wqe_cnt)).unwrap();
        self.rq.write(slot * stride, &wqe).unwrap();
        self.received += 1;
        let record = self.record.atomic32(mlx5::QP_DBREC_RECV).unwrap();
        record.store(mlx5::recv_record(self.received), Ordering::Release);
    }

    pub(crate) fn modify(&self, bed: &Bed, attr: &mut ibv_qp_attr, mask: ibv_qp_attr_mask) -> c_int {
        // SAFETY: the queue pair lives.
        unsafe { bed.lib.verbs.ibv_modify_qp(self.raw, attr, mask) }
    }

    /// Takes a step that must succeed.
    pub(crate) fn step(&self, bed: &Bed, (mut attr, mask): Step) {
        assert_eq!(self.modify(bed, &mut attr, mask), 0, "{:?}", attr.qp_state);
        // SAFETY: the queue pair lives.
        assert_eq!(unsafe { (*self.raw).state }, attr.qp_state);
    }

    /// From RESET to RTS.
    pub(crate) fn connect(&self, bed: &Bed, gid: ibv_gid, qpn: u32) {
        self.step(bed, to_init());
        self.step(bed, to_rtr(gid, qpn));
        self.step(bed, to_rts());
    }

    pub(crate) fn destroy(self, bed: &Bed) {
        let verbs = &bed.lib.verbs;
        // SAFETY: nothing uses it any more.
        assert_eq!(unsafe { verbs.ibv_destroy_qp(self.raw) }, 0);
        for cq in [self.send_cq.raw, self.recv_cq.raw] {
            // SAFETY: as above.
            assert_eq!(unsafe { verbs.ibv_destroy_cq(cq) }, 0);
        }
    }
}

/// Two queue pairs of one context, connected.
pub(crate) fn pair(bed: &Bed) -> (Queue, Queue) {
    let (a, b) = (Queue::new(bed), Queue::new(bed));
    let gid = bed.gid(1).gid;
    a.connect(bed, gid, b.qpn);
    b.connect(bed, gid, a.qpn);
    (a, b)
}

/// Registered memory.
pub(crate) struct Buffer {
    pub(crate) memory: Memory,
    pub(crate) mr: *mut ibv_mr,
    pub(crate) key: u32,
}

impl Buffer {
    pub(crate) fn new(bed: &Bed, len: usize) -> Self {
        let memory = Memory::alloc(len).unwrap();
        let mr = bed.register(&memory, all_access()).unwrap();
        // SAFETY: it was just registered.
        let key = unsafe { (*mr).lkey };
        Self { memory, mr, key }
    }

    pub(crate) fn sge(&self, offset: u64, len: u32) -> DataSeg {
        DataSeg { addr: self.memory.addr() + offset, len, lkey: self.key }
    }

    pub(crate) fn remote(&self, offset: u64) -> RemoteAddr {
        RemoteAddr { addr: self.memory.addr() + offset, rkey: self.key }
    }
}

/// What it does wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Conduct {
    #[default]
    Good,
    /// Leaves it to the library.
    Declines,
    /// Has none.
    Empty,
    /// Gives memory that was used before.
    Dirty,
    /// Gives memory that begins in the middle of a word.
    Askew,
    /// Gives an address where nothing is.
    Nowhere,
    /// Gives memory that cannot be written.
    ReadOnly,
}

/// One call: bytes, alignment, resource.
pub(crate) type Request = (usize, usize, u64);

#[derive(Debug, Default)]
pub(crate) struct Arena {
    pub(crate) conduct: Mutex<Conduct>,
    pub(crate) requests: Mutex<Vec<Request>>,
    /// Address, mapping, length and resource of what is lent.
    live: Mutex<HashMap<usize, (usize, usize, u64)>>,
    /// Resources in the order they came back.
    pub(crate) returned: Mutex<Vec<u64>>,
}

impl Arena {
    pub(crate) fn live(&self) -> usize {
        self.live.lock().len()
    }
}

/// Room before and behind, so that "askew" stays inside.
const MARGIN: usize = 4096;

pub(crate) unsafe extern "C" fn alloc(
    _pd: *mut ibv_pd,
    context: *mut c_void,
    size: usize,
    align: usize,
    resource: u64,
) -> *mut c_void {
    // SAFETY: the context is the arena, which outlives its domains.
    let arena = unsafe { &*context.cast::<Arena>() };
    arena.requests.lock().push((size, align, resource));
    let conduct = *arena.conduct.lock();
    match conduct {
        Conduct::Declines => return IBV_ALLOCATOR_USE_DEFAULT as *mut c_void,
        Conduct::Empty => return ptr::null_mut(),
        // The first page is never mapped.
        Conduct::Nowhere => return align.max(64) as *mut c_void,
        _ => {}
    }
    let len = size + align + MARGIN;
    let protection = match conduct {
        Conduct::ReadOnly => libc::PROT_READ,
        _ => libc::PROT_READ | libc::PROT_WRITE,
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping touches no existing memory.
    let mapping = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, -1, 0) };
    if mapping == libc::MAP_FAILED {
        return ptr::null_mut();
    }
    let mut addr = mapping.addr().next_multiple_of(align);
    match conduct {
        Conduct::Askew => addr += 2,
        // SAFETY: the byte lies inside the mapping.
        Conduct::Dirty => unsafe { (addr as *mut u8).wrapping_add(size - 1).write(1) },
        _ => {}
    }
    arena.live.lock().insert(addr, (mapping.addr(), len, resource));
    addr as *mut c_void
}

pub(crate) unsafe extern "C" fn free(
    _pd: *mut ibv_pd,
    context: *mut c_void,
    addr: *mut c_void,
    resource: u64,
) {
    // SAFETY: the context is the arena, which outlives its domains.
    let arena = unsafe { &*context.cast::<Arena>() };
    arena.returned.lock().push(resource);
    let Some((mapping, len, lent_as)) = arena.live.lock().remove(&addr.addr()) else {
        // "Nowhere" was not lent.
        return;
    };
    assert_eq!(lent_as, resource, "memory comes back as what it went out");
    // SAFETY: it was mapped above, and nobody uses it any more.
    unsafe { libc::munmap(mapping as *mut c_void, len) };
}

pub(crate) type Step = (ibv_qp_attr, ibv_qp_attr_mask);

pub(crate) fn all_access() -> ibv_access_flags {
    ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
        | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
        | ibv_access_flags::IBV_ACCESS_REMOTE_READ
        | ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC
}

pub(crate) fn to(state: ibv_qp_state) -> Step {
    (ibv_qp_attr { qp_state: state, ..ibv_qp_attr::zeroed() }, ibv_qp_attr_mask::IBV_QP_STATE)
}

pub(crate) fn to_init() -> Step {
    let (attr, mask) = to(ibv_qp_state::IBV_QPS_INIT);
    let mask = mask
        | ibv_qp_attr_mask::IBV_QP_PKEY_INDEX
        | ibv_qp_attr_mask::IBV_QP_PORT
        | ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS;
    (ibv_qp_attr { qp_access_flags: all_access(), port_num: 1, ..attr }, mask)
}

/// First packet sequence number of every queue pair here.
const PSN: u32 = 0x12_3456;

pub(crate) fn to_rtr(gid: ibv_gid, qpn: u32) -> Step {
    let (attr, mask) = to(ibv_qp_state::IBV_QPS_RTR);
    let mask = mask
        | ibv_qp_attr_mask::IBV_QP_AV
        | ibv_qp_attr_mask::IBV_QP_PATH_MTU
        | ibv_qp_attr_mask::IBV_QP_DEST_QPN
        | ibv_qp_attr_mask::IBV_QP_RQ_PSN
        | ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC
        | ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER;
    let grh = ibv_global_route { dgid: gid, sgid_index: 1, hop_limit: 64, ..ibv_global_route::zeroed() };
    let attr = ibv_qp_attr {
        ah_attr: ibv_ah_attr { grh, is_global: 1, port_num: 1, ..ibv_ah_attr::zeroed() },
        path_mtu: ibv_mtu::IBV_MTU_1024,
        dest_qp_num: qpn,
        rq_psn: PSN,
        max_dest_rd_atomic: 16,
        min_rnr_timer: 1,
        ..attr
    };
    (attr, mask)
}

pub(crate) fn to_rts() -> Step {
    let (attr, mask) = to(ibv_qp_state::IBV_QPS_RTS);
    let mask = mask
        | ibv_qp_attr_mask::IBV_QP_TIMEOUT
        | ibv_qp_attr_mask::IBV_QP_RETRY_CNT
        | ibv_qp_attr_mask::IBV_QP_RNR_RETRY
        | ibv_qp_attr_mask::IBV_QP_SQ_PSN
        | ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC;
    let attr =
        ibv_qp_attr { timeout: 14, retry_cnt: 7, rnr_retry: 7, sq_psn: PSN, max_rd_atomic: 16, ..attr };
    (attr, mask)
}
