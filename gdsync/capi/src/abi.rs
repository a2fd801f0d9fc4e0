//! The types of `gdsync.h`.

#![allow(non_camel_case_types, reason = "the names of libgdsync")]

use std::ffi::{c_int, c_void};
use std::fmt;

use rdma_core_sys::verbs::{ibv_context, ibv_cq, ibv_qp};

/// Version of the interface: `major << 16 | minor`.
pub const VERSION: c_int = 2 << 16 | 2;

pub(crate) const WQ_ON_GPU: c_int = 1;
/// `GDS_CREATE_QP_TX_CQ_ON_GPU`, `_RX_CQ_ON_GPU`, `_WQ_DBREC_ON_GPU`.
pub(crate) const ON_GPU: c_int = 1 << 1 | 1 << 2 | 1 << 5;

pub(crate) const MEMORY_GPU: c_int = 1;
pub(crate) const MEMORY_HOST: c_int = 2;
pub(crate) const MEMORY_MASK: c_int = 7;
pub(crate) const WAIT_POST_FLUSH: c_int = 1 << 3;
pub(crate) const WRITE_PRE_BARRIER: c_int = 1 << 4;
pub(crate) const WRITE_MEMORY_POST_BARRIER: c_int = 1 << 4;
pub(crate) const WRITE_MEMORY_PRE_BARRIER: c_int = 1 << 5;

/// `gds_cq_t`
#[repr(C)]
#[derive(Debug)]
pub struct gds_cq {
    /// The queue of libibverbs.
    pub cq: *mut ibv_cq,
    /// Signalled completions that waits have claimed.
    pub curr_offset: u32,
}

/// `gds_qp_t`
#[repr(C)]
#[derive(Debug)]
pub struct gds_qp {
    /// The queue pair of libibverbs.
    pub qp: *mut ibv_qp,
    /// Completions of sends.
    pub send_cq: *mut gds_cq,
    /// Completions of receives.
    pub recv_cq: *mut gds_cq,
    /// The device.
    pub dev_context: *mut ibv_context,
}

/// `gds_send_request_t` and `gds_wait_request_t`: the number of a prepared request and its queue, at any alignment.
#[repr(C, packed)]
#[derive(Clone, Copy)]
pub struct gds_request {
    /// The mark of a request, unless it was never prepared.
    pub magic: u64,
    /// The address of its `gds_qp_t` or `gds_cq_t`.
    pub of: u64,
    /// Its number.
    pub id: u64,
    /// Nothing.
    pub rest: [u8; 1832],
}

impl gds_request {
    pub(crate) const MAGIC: u64 = 0x6764_7379_6e63_2032;

    pub(crate) fn new(of: usize, id: u64) -> Self {
        Self { magic: Self::MAGIC, of: of as u64, id, rest: [0; 1832] }
    }
}

impl fmt::Debug for gds_request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {} of {:#x}", { self.id }, { self.of })
    }
}

/// `gds_wait_value32_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gds_wait_value32 {
    /// The word.
    pub ptr: *mut u32,
    /// The operand of the condition.
    pub value: u32,
    /// The condition.
    pub cond_flags: u32,
    /// Kind of memory, and a flush afterwards.
    pub flags: c_int,
}

/// `gds_write_value32_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gds_write_value32 {
    /// The word.
    pub ptr: *mut u32,
    /// Its new value.
    pub value: u32,
    /// Kind of memory, and a barrier before.
    pub flags: c_int,
}

/// `gds_write_memory_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gds_write_memory {
    /// The first word to write.
    pub dest: *mut u8,
    /// Its bytes.
    pub src: *const u8,
    /// Number of bytes.
    pub count: usize,
    /// Kind of memory, and barriers.
    pub flags: c_int,
}

/// What a descriptor is, by its tag.
#[repr(C)]
#[derive(Clone, Copy)]
pub union gds_operand {
    /// A prepared send, or wait.
    pub request: *mut gds_request,
    /// A wait for a word.
    pub wait32: gds_wait_value32,
    /// A write of a word.
    pub write32: gds_write_value32,
    /// A write of words.
    pub writemem: gds_write_memory,
}

impl fmt::Debug for gds_operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("gds_operand")
    }
}

/// `gds_descriptor_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gds_descriptor {
    /// `gds_tag_t`
    pub tag: u32,
    /// By the tag.
    pub operand: gds_operand,
}

/// `gds_mem_desc_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gds_mem_desc {
    /// Address on the GPU.
    pub d_ptr: u64,
    /// Address for the CPU.
    pub h_ptr: *mut c_void,
    /// The same.
    pub bar_ptr: *mut c_void,
    /// Kind of memory.
    pub flags: c_int,
    /// Bytes.
    pub alloc_size: usize,
    /// `gdr_mh_t`: not zero, and nothing for GDRCopy.
    pub mh: u64,
}

/// `gds_mlx5_dword_wait_info_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gds_mlx5_dword_wait_info {
    /// The word on the GPU.
    pub ptr: u64,
    /// The operand.
    pub value: u32,
}

/// `gds_mlx5_send_info_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gds_mlx5_send_info {
    /// Two bits: a barrier before the doorbell, of system scope.
    pub membar: u32,
    /// The doorbell record on the GPU.
    pub dbrec_ptr: u64,
    /// What to write there.
    pub dbrec_value: u32,
    /// The doorbell on the GPU.
    pub db_ptr: u64,
    /// What to write there.
    pub db_value: u64,
}

/// `gds_mlx5_wait_info_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gds_mlx5_wait_info {
    /// The condition.
    pub cond: u32,
    /// The word on the GPU.
    pub cqe_ptr: u64,
    /// The operand.
    pub cqe_value: u32,
    /// What to write afterwards, on the GPU.
    pub flag_ptr: u64,
    /// The value to write.
    pub flag_value: u32,
}

const _: () = assert!(size_of::<gds_request>() == 1856 && align_of::<gds_request>() == 1);
