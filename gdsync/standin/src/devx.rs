//! DevX: commands to the firmware that make completion queues and queue pairs in registered memory, and change them.
//!
//! Mailboxes are read field by field, at the offsets of the manual. What a card would refuse is refused with a status and a
//! syndrome; what it would take and misbehave later is refused too, with a complaint.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};

use self::queues::{DevxCq, DevxQp};
use rdma_core_sys::mlx5::{devx_get, devx_set, mlx5dv_devx_obj};
use rdma_core_sys::verbs::{ibv_context, ibv_qp};

use crate::context::Context;
use crate::errno;
use crate::errno::complain;

mod events;
mod memory;
mod queues;

pub(crate) use self::events::raise;

/// What of DevX there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    /// The context has no user context of the firmware.
    None,
    /// The kernel, or a libmlx5 before 43, takes no DMA-BUF.
    NoDmaBuf,
    /// A libmlx5 of 43 or 44: no doorbell page is dedicated.
    NoDedicated,
    All,
}

static LEVEL: AtomicU32 = AtomicU32::new(2);

fn level() -> Level {
    match LEVEL.load(Ordering::SeqCst) {
        0 => Level::None,
        1 => Level::NoDmaBuf,
        3 => Level::NoDedicated,
        _ => Level::All,
    }
}

/// Whether there is any.
pub(crate) fn is_there() -> bool {
    level() != Level::None
}

/// From now on there is no DevX (0), one that takes no DMA-BUF (1) or has no dedicated doorbell pages (1, 3), or all of it (2).
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdsync_standin_devx(level: u32) {
    LEVEL.store(level, Ordering::SeqCst);
}

/// The event queue of vector 0.
const EQN: u32 = 7;
/// Log2 of the largest queues.
const LOG_MAX_QP: u32 = 15;
const LOG_MAX_CQ: u32 = 22;

/// A mailbox of the caller. Fields are read at bit offsets from its beginning.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn get(&self, offset: usize, width: u32) -> u32 {
        devx_get(self.0, offset, width)
    }

    fn get64(&self, offset: usize) -> u64 {
        u64::from(self.get(offset, 32)) << 32 | u64::from(self.get(offset + 32, 32))
    }

    fn opcode(&self) -> u32 {
        self.get(0, 16)
    }

    /// Fields that must have one value, each at an offset with a width: other ones ask for what this card does not do.
    fn require(&self, fields: &[(usize, u32, u32, &str)]) -> Result<(), Refusal> {
        for &(offset, width, value, name) in fields {
            let found = self.get(offset, width);
            if found != value {
                return Err(refuse::parameter(
                    0x10,
                    format!("{name} is {found:#x} where {value:#x} is needed"),
                ));
            }
        }
        Ok(())
    }
}

/// Mailboxes of at least these many bytes.
fn long_enough(input: &[u8], least: usize, output: &[u8], least_output: usize) -> Result<(), Refusal> {
    if input.len() < least {
        return Err(refuse::length(true));
    }
    if output.len() < least_output { Err(refuse::length(false)) } else { Ok(()) }
}

/// Bytes of a mailbox with a context.
const LONG: usize = 272;
/// Bytes of one without.
const SHORT: usize = 16;

/// What `mlx5dv_devx_obj_create` made.
enum Object {
    Cq(DevxCq),
    Qp(DevxQp),
}

impl Object {
    /// Whether it is a completion queue, and its number.
    fn number(&self) -> (bool, u32) {
        match self {
            Self::Cq(cq) => (true, cq.cqn()),
            Self::Qp(qp) => (false, qp.qpn()),
        }
    }
}

fn create(context: &Context, input: &[u8], output: &mut [u8]) -> Result<Object, Refusal> {
    long_enough(input, SHORT, output, SHORT)?;
    let opcode = Input(input).opcode();
    if !matches!(opcode, queues::CREATE_CQ | queues::CREATE_QP) {
        return Err(refuse::operation(0x20, format!("command {opcode:#x} creates nothing here")));
    }
    long_enough(input, LONG, output, SHORT)?;
    let (object, number) = if opcode == queues::CREATE_CQ {
        let cq = DevxCq::create(context.hca, &Input(input))?;
        let cqn = cq.cqn();
        (Object::Cq(cq), cqn)
    } else {
        let qp = DevxQp::create(context.hca, &Input(input))?;
        let qpn = qp.qpn();
        (Object::Qp(qp), qpn)
    };
    output.fill(0);
    devx_set(output, 0x48, 24, number);
    Ok(object)
}

/// The buffers of a command.
///
/// # Safety
/// They must be as long as told, and the caller's alone.
unsafe fn mailboxes<'a>(
    (input, input_len): (*const c_void, usize),
    (output, output_len): (*mut c_void, usize),
) -> (&'a [u8], &'a mut [u8]) {
    // SAFETY: the caller vouches for it.
    let input = unsafe { std::slice::from_raw_parts(input.cast(), input_len) };
    // SAFETY: as above.
    (input, unsafe { std::slice::from_raw_parts_mut(output.cast(), output_len) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_devx_obj_create(
    context: *mut ibv_context,
    input: *const c_void,
    input_len: usize,
    output: *mut c_void,
    output_len: usize,
) -> *mut mlx5dv_devx_obj {
    if !is_there() {
        return errno::null(libc::EOPNOTSUPP);
    }
    // SAFETY: the caller vouches for the buffers.
    let (input, output) = unsafe { mailboxes((input, input_len), (output, output_len)) };
    // SAFETY: the caller vouches for the context.
    let context = unsafe { Context::of(context) };
    match create(context, input, output) {
        Ok(object) => Box::into_raw(Box::new(object)).cast(),
        Err(refusal) => errno::null(refusal.answer(output)),
    }
}

/// Runs a command on a queue pair.
unsafe fn on_qp(
    object: *mut mlx5dv_devx_obj,
    input: &[u8],
    output: &mut [u8],
    run: impl FnOnce(&DevxQp, &[u8], &mut [u8]) -> Result<(), Refusal>,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let object = unsafe { &*object.cast::<Object>() };
    let done = long_enough(input, SHORT, output, SHORT).and_then(|()| match object {
        Object::Qp(qp) if Input(input).get(0x48, 24) == qp.qpn() => run(qp, input, output),
        Object::Qp(qp) => {
            Err(refuse::resource(0x21, format!("a command names another queue pair than {:#x}", qp.qpn())))
        }
        Object::Cq(_) => Err(refuse::operation(0x22, "completion queues are neither changed nor asked here")),
    });
    done.map_or_else(|refusal| refusal.answer(output), |()| 0)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_devx_obj_modify(
    object: *mut mlx5dv_devx_obj,
    input: *const c_void,
    input_len: usize,
    output: *mut c_void,
    output_len: usize,
) -> c_int {
    // SAFETY: the caller vouches for the buffers.
    let (input, output) = unsafe { mailboxes((input, input_len), (output, output_len)) };
    // SAFETY: the caller vouches for the object.
    unsafe {
        on_qp(object, input, output, |qp, input, output| {
            queues::run(qp, input)?;
            output.fill(0);
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_devx_obj_query(
    object: *mut mlx5dv_devx_obj,
    input: *const c_void,
    input_len: usize,
    output: *mut c_void,
    output_len: usize,
) -> c_int {
    // SAFETY: the caller vouches for the buffers.
    let (input, output) = unsafe { mailboxes((input, input_len), (output, output_len)) };
    // SAFETY: the caller vouches for the object.
    unsafe { on_qp(object, input, output, DevxQp::query) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_devx_obj_destroy(object: *mut mlx5dv_devx_obj) -> c_int {
    // SAFETY: the caller vouches for it.
    if let Object::Cq(cq) = unsafe { &*object.cast::<Object>() }
        && let Err(errno) = cq.leave()
    {
        return errno;
    }
    // SAFETY: a box of this module that nothing uses any more.
    let object = unsafe { Box::from_raw(object.cast::<Object>()) };
    events::forget(&object);
    drop(object);
    0
}

fn general(input: &[u8], output: &mut [u8]) -> Result<(), Refusal> {
    /// `QUERY_HCA_CAP`
    const QUERY: u32 = 0x100;
    long_enough(input, SHORT, output, SHORT)?;
    let (opcode, general_now) = (Input(input).opcode(), Input(input).get(0x30, 16) == 1);
    if opcode != QUERY || !general_now {
        return Err(refuse::operation(0x23, format!("command {opcode:#x} is not one of a device here")));
    }
    long_enough(input, SHORT, output, SHORT + 0x8000 / 8)?;
    output.fill(0);
    devx_set(output, 0x80 + 0x88, 8, LOG_MAX_QP);
    devx_set(output, 0x80 + 0xc8, 8, LOG_MAX_CQ);
    Ok(())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_devx_general_cmd(
    _context: *mut ibv_context,
    input: *const c_void,
    input_len: usize,
    output: *mut c_void,
    output_len: usize,
) -> c_int {
    if !is_there() {
        return libc::EOPNOTSUPP;
    }
    // SAFETY: the caller vouches for the buffers.
    let (input, output) = unsafe { mailboxes((input, input_len), (output, output_len)) };
    general(input, output).map_or_else(|refusal| refusal.answer(output), |()| 0)
}

/// Queue pairs of verbs are not asked by commands here.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mlx5dv_devx_qp_query(
    _qp: *mut ibv_qp,
    _input: *const c_void,
    _input_len: usize,
    _output: *mut c_void,
    _output_len: usize,
) -> c_int {
    libc::EOPNOTSUPP
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn mlx5dv_devx_query_eqn(
    _context: *mut ibv_context,
    vector: u32,
    eqn: &mut MaybeUninit<u32>,
) -> c_int {
    if !is_there() || vector != 0 {
        return if vector == 0 { libc::EOPNOTSUPP } else { libc::EINVAL };
    }
    eqn.write(EQN);
    0
}

/// A command that was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    status: u32,
    syndrome: u32,
}

/// The syndromes of this firmware, which are no card's, begin here.
const SYNDROMES: u32 = 0x005d_0000;

/// Reasons. Each says the rule that was broken, as it is one that a program could not break by accident of a peer; its
/// number is the syndrome's low half.
pub(super) mod refuse {
    use super::{Refusal, SYNDROMES, complain};

    fn because(status: u32, number: u32, why: impl Into<String>) -> Refusal {
        let why = why.into();
        complain(format!("DevX: {why}"));
        Refusal { status, syndrome: SYNDROMES | number }
    }

    /// `BAD_OP`
    pub(in crate::devx) fn operation(number: u32, why: impl Into<String>) -> Refusal {
        because(0x02, number, why)
    }

    /// `BAD_PARAM`
    pub(in crate::devx) fn parameter(number: u32, why: impl Into<String>) -> Refusal {
        because(0x03, number, why)
    }

    /// `BAD_RES`
    pub(in crate::devx) fn resource(number: u32, why: impl Into<String>) -> Refusal {
        because(0x05, number, why)
    }

    /// `LIM_ERR`
    pub(in crate::devx) fn limit(number: u32, why: impl Into<String>) -> Refusal {
        because(0x08, number, why)
    }

    /// `BAD_SIZE`
    pub(in crate::devx) fn size(number: u32, why: impl Into<String>) -> Refusal {
        because(0x40, number, why)
    }

    /// `BAD_INP_LEN` or `BAD_OUTP_LEN`
    pub(in crate::devx) fn length(is_input: bool) -> Refusal {
        because(if is_input { 0x50 } else { 0x51 }, 8, "a mailbox is too short")
    }

    /// `BAD_QP_STATE`, which a failure may bring about: no complaint.
    pub(in crate::devx) fn state() -> Refusal {
        Refusal { status: 0x10, syndrome: SYNDROMES | 9 }
    }
}

impl Refusal {
    /// Writes it into an answer. Returns the number that libmlx5 makes of it.
    pub(super) fn answer(self, output: &mut [u8]) -> c_int {
        if output.len() >= 16 {
            output.fill(0);
            devx_set(output, 0, 8, self.status);
            devx_set(output, 0x20, 32, self.syndrome);
        }
        match self.status {
            0x08 => libc::ENOMEM,
            0x50 | 0x51 => libc::EIO,
            _ => libc::EINVAL,
        }
    }
}
