//! The structures of NCCL's interface for RMA plug-ins, versions 14 to 16, and of `gda_nccl.h`.

use std::ffi::{c_char, c_int, c_ulong, c_void};

/// `ncclResult_t`
pub type NcclResult = c_int;
/// `ncclSuccess`
pub const SUCCESS: NcclResult = 0;
/// `ncclSystemError`
pub const SYSTEM_ERROR: NcclResult = 2;
/// `ncclInternalError`
pub const INTERNAL_ERROR: NcclResult = 3;
/// `ncclInvalidArgument`
pub const INVALID_ARGUMENT: NcclResult = 4;
/// `ncclRemoteError`
pub const REMOTE_ERROR: NcclResult = 6;

/// Memory of the host, as a type of registrations (`NCCL_PTR_HOST`).
pub const PTR_HOST: c_int = 1;
/// Memory of a GPU (`NCCL_PTR_CUDA`).
pub const PTR_CUDA: c_int = 2;
/// The region may have signals (`NCCL_NET_MR_FLAG_FORCE_SO`).
pub const FORCE_SO: u64 = 1;
/// Signals add 1, whatever their value (`NCCL_NET_SIGNAL_OP_INC`).
pub const SIGNAL_INC: u32 = 1;
/// Signals add their value (`NCCL_NET_SIGNAL_OP_ADD`).
pub const SIGNAL_ADD: u32 = 2;
/// `NCCL_NET_DEVICE_GIN_PROXY`
pub const GIN_PROXY: c_int = 2;
/// Bytes of what `listen` gives to other ranks (`NCCL_NET_HANDLE_MAXSIZE`).
pub const HANDLE_BYTES: usize = 128;

/// `NCCL_LOG_WARN`
pub const LOG_WARN: c_int = 2;
/// `NCCL_LOG_INFO`
pub const LOG_INFO: c_int = 3;
/// `NCCL_INIT | NCCL_NET`
pub const LOG_SUBSYSTEM: c_ulong = 0x11;

/// An object of the plug-in, or a place for one. Handles: pointers to nothing.
pub type Handle = *mut c_void;

/// `ncclDebugLogger_t`
pub type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

/// `ncclRmaConfig_v14_t`, the same in version 16
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Config {
    /// Contexts to make.
    pub contexts: c_int,
    /// -1 for the default.
    pub traffic_class: c_int,
    /// Only ranks at multiples of it are used.
    pub rank_stride: c_int,
}

/// `ncclNetProperties_v12_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Properties {
    /// For logs.
    pub name: *const c_char,
    /// Path of the card in `/sys`, or null.
    pub pci_path: *const c_char,
    /// Tells cards apart.
    pub guid: u64,
    /// [`PTR_HOST`] and [`PTR_CUDA`].
    pub ptr_support: c_int,
    /// Whether registrations serve all communicators.
    pub reg_is_global: c_int,
    /// Whether received data needs a flush.
    pub force_flush: c_int,
    /// Mb/s.
    pub speed: c_int,
    /// Number of the port.
    pub port: c_int,
    /// Microseconds.
    pub latency: f32,
    /// The most communicators.
    pub max_comms: c_int,
    /// NCCL keeps at most 32 times as many requests to a rank under way.
    pub max_recvs: c_int,
    /// [`GIN_PROXY`]
    pub net_device_type: c_int,
    /// 0
    pub net_device_version: c_int,
    /// Physical devices behind this one.
    pub ndevs: c_int,
    /// Their numbers.
    pub devs: [c_int; 8],
    /// The longest transfer.
    pub max_p2p_bytes: usize,
    /// The longest part of a collective.
    pub max_coll_bytes: usize,
    /// 1
    pub max_multi_request_size: c_int,
    /// -1 for unknown.
    pub rail_id: i16,
    /// -1 for unknown.
    pub plane_id: i16,
}

/// `ncclRmaProperties_v16_t`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RmaProperties {
    /// Whether each signal makes all puts visible, also those of other ranks.
    pub flushes_all_puts_on_any_signal: bool,
}

/// `getRmaProperties`, of version 16.
pub type GetRmaProperties = unsafe extern "C" fn(Handle, *mut RmaProperties) -> NcclResult;
/// `iput` of version 14.
pub type Iput14 =
    unsafe extern "C" fn(Handle, c_int, u64, Handle, usize, u64, Handle, u32, *mut Handle) -> NcclResult;
/// `iput` with flags.
pub type Iput =
    unsafe extern "C" fn(Handle, c_int, u64, Handle, usize, u64, Handle, u32, u32, *mut Handle) -> NcclResult;
/// `iputSignal` of version 14.
pub type IputSignal14 = unsafe extern "C" fn(
    Handle,
    c_int,
    u64,
    Handle,
    usize,
    u64,
    Handle,
    u32,
    u64,
    Handle,
    u64,
    u32,
    bool,
    *mut Handle,
) -> NcclResult;
/// `iputSignal` with flags.
pub type IputSignal = unsafe extern "C" fn(
    Handle,
    c_int,
    u64,
    Handle,
    usize,
    u64,
    Handle,
    u32,
    u64,
    Handle,
    u64,
    u32,
    bool,
    u32,
    *mut Handle,
) -> NcclResult;

/// `ncclRma_v14_t` to `ncclRma_v16_t`. `iget` has the type of `iput`.
#[repr(C)]
#[derive(Debug)]
pub struct Rma<GetRmaProperties, Iput, IputSignal> {
    /// Terminated by a zero.
    pub name: &'static [u8; 4],
    /// Opens the plug-in for a communicator.
    pub init: unsafe extern "C" fn(*mut Handle, u64, Option<Logger>) -> NcclResult,
    /// The number of devices.
    pub devices: unsafe extern "C" fn(*mut c_int) -> NcclResult,
    /// Only in version 16.
    pub get_rma_properties: GetRmaProperties,
    /// What NCCL's topology needs of a device.
    pub get_properties: unsafe extern "C" fn(c_int, *mut Properties) -> NcclResult,
    /// Opens a socket, and gives its address.
    pub listen: unsafe extern "C" fn(Handle, c_int, *mut c_void, *mut Handle) -> NcclResult,
    /// Connects all ranks.
    pub connect:
        unsafe extern "C" fn(Handle, *const *const c_void, c_int, c_int, Handle, *mut Handle) -> NcclResult,
    /// Makes queue pairs to all ranks.
    pub create_context: unsafe extern "C" fn(Handle, *const Config, *mut Handle) -> NcclResult,
    /// Registers memory of all ranks.
    pub reg_mr_sym: unsafe extern "C" fn(Handle, *mut c_void, usize, c_int, u64, *mut Handle) -> NcclResult,
    /// The same by a dma-buf.
    pub reg_mr_sym_dma_buf:
        unsafe extern "C" fn(Handle, *mut c_void, usize, c_int, u64, c_int, u64, *mut Handle) -> NcclResult,
    /// Ends a registration.
    pub dereg_mr_sym: unsafe extern "C" fn(Handle, Handle) -> NcclResult,
    /// Ends a context.
    pub destroy_context: unsafe extern "C" fn(Handle) -> NcclResult,
    /// Leaves the ranks.
    pub close_coll: unsafe extern "C" fn(Handle) -> NcclResult,
    /// Closes the socket.
    pub close_listen: unsafe extern "C" fn(Handle) -> NcclResult,
    /// Starts a put.
    pub iput: Iput,
    /// Starts a put with a signal.
    pub iput_signal: IputSignal,
    /// Starts a get.
    pub iget: Iput,
    /// Makes what gets have brought visible to the GPU.
    pub iflush: unsafe extern "C" fn(Handle, c_int, Handle, u32, *mut Handle) -> NcclResult,
    /// Whether a request is complete.
    pub test: unsafe extern "C" fn(Handle, Handle, *mut c_int) -> NcclResult,
    /// Moves requests along.
    pub rma_progress: unsafe extern "C" fn(Handle) -> NcclResult,
    /// Whether a rank was lost.
    pub query_last_error: unsafe extern "C" fn(Handle, *mut bool) -> NcclResult,
    /// Closes the plug-in for a communicator.
    pub finalize: unsafe extern "C" fn(Handle) -> NcclResult,
}

/// `ncclRma_v14_t`
pub type Rma14 = Rma<(), Iput14, IputSignal14>;
/// `ncclRma_v15_t`
pub type Rma15 = Rma<(), Iput, IputSignal>;
/// `ncclRma_v16_t`
pub type Rma16 = Rma<GetRmaProperties, Iput, IputSignal>;

// As in the debug information of NCCL 2.32.3.
const _: () = assert!(size_of::<Rma14>() == 21 * size_of::<usize>());
const _: () = assert!(size_of::<Rma15>() == 21 * size_of::<usize>());
const _: () = assert!(size_of::<Rma16>() == 22 * size_of::<usize>());
const _: () = assert!(size_of::<Properties>() == 128);

/// Bytes of [`Failure::cause`].
pub const CAUSE_BYTES: usize = 240;

/// `gda_nccl_failure`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Failure {
    /// NCCL's hash of the communicator, the same at all ranks.
    pub comm: u64,
    /// Nanoseconds since 1970.
    pub time: u64,
    /// The rank that is lost.
    pub rank: i32,
    /// The own rank.
    pub own_rank: i32,
    /// Why, terminated by a zero.
    pub cause: [u8; CAUSE_BYTES],
}
