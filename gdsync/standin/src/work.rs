//! Work requests: `ibv_post_send` and `ibv_post_recv`, into the rings that the HCA reads.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::slice;
use std::sync::atomic::Ordering;

use gdsync::mlx5;
use gdsync::mlx5::{BB, CE_MASK, DataSeg, Payload, RemoteAddr, SendOp, WqeFlags};
use gdsync::verbs::QpState;
use rdma_core_sys::verbs::{
    ibv_qp, ibv_recv_wr, ibv_send_flags as flags, ibv_send_wr, ibv_sge, ibv_wr_opcode as opcode,
};

use crate::qp::Qp;

/// Offset of the byte of a WQE that says when it completes.
const COMPLETES: usize = 11;

/// What was posted and has not been polled.
#[derive(Debug, Default)]
pub(crate) struct Work {
    /// Blocks written.
    head: u64,
    sends: VecDeque<Sent>,
    /// Receives written.
    received: u64,
    receives: VecDeque<u64>,
    /// Completions of before a reset that stand in the queues still, of sends and receives.
    pub(crate) stale: [u64; 2],
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    /// The low bits of the index of its first block.
    index: u16,
    blocks: u64,
    pub(crate) wr_id: u64,
    pub(crate) signaled: bool,
}

impl Work {
    /// The queue pair was reset.
    pub(crate) fn forget(&mut self, stale: [u64; 2]) {
        *self = Self { stale, ..Self::default() };
    }

    /// The send that completed with this index. Those before it have completed too, without saying so.
    pub(crate) fn sent(&mut self, index: u16) -> Option<Sent> {
        let at = self.sends.iter().position(|sent| sent.index == index)?;
        self.sends.drain(..=at).next_back()
    }

    /// The request of the next receive to complete.
    pub(crate) fn received(&mut self) -> Option<u64> {
        self.receives.pop_front()
    }

    fn outstanding_blocks(&self) -> u64 {
        self.sends.iter().map(|sent| sent.blocks).sum()
    }
}

/// The buffers of a request, without empty ones.
///
/// # Safety
/// `list` must have `count` entries.
unsafe fn segments(list: *const ibv_sge, count: c_int) -> Result<Vec<DataSeg>, c_int> {
    let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
    if count == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the caller vouches for so many.
    let entries = unsafe { slice::from_raw_parts(list, count) };
    let segment = |sge: &ibv_sge| DataSeg { addr: sge.addr, len: sge.length, lkey: sge.lkey };
    Ok(entries.iter().filter(|sge| sge.length > 0).map(segment).collect())
}

impl Qp {
    /// # Safety
    /// The request must be as its manual page asks.
    unsafe fn send(&self, wr: &ibv_send_wr) -> Result<(), c_int> {
        // SAFETY: the caller vouches for the list.
        let sges = unsafe { segments(wr.sg_list, wr.num_sge) }?;
        if u32::try_from(wr.num_sge).map_err(|_| libc::EINVAL)? > self.max_send_sge() {
            return Err(libc::EINVAL);
        }
        let mut in_line = Vec::new();
        let payload = if wr.send_flags.contains(flags::IBV_SEND_INLINE) {
            for sge in &sges {
                // SAFETY: the caller vouches for the bytes that it has sent inline.
                in_line.extend(unsafe { slice::from_raw_parts(sge.addr as *const u8, sge.len as usize) });
            }
            if in_line.len() > self.size.cap.max_inline_data as usize {
                return Err(libc::ENOMEM);
            }
            Payload::Inline(&in_line)
        } else {
            Payload::Sges(&sges)
        };
        let imm = Some(u32::from_be(wr.imm_data));
        // SAFETY: the fields of the union are plain numbers.
        let rdma = unsafe { wr.wr.rdma };
        // SAFETY: as above.
        let atomic = unsafe { wr.wr.atomic };
        let remote = RemoteAddr { addr: rdma.remote_addr, rkey: rdma.rkey };
        let word = RemoteAddr { addr: atomic.remote_addr, rkey: atomic.rkey };
        let result = || sges.first().copied().ok_or(libc::EINVAL);
        let op = match wr.opcode {
            opcode::IBV_WR_SEND => SendOp::Send { payload, imm: None },
            opcode::IBV_WR_SEND_WITH_IMM => SendOp::Send { payload, imm },
            opcode::IBV_WR_RDMA_WRITE => SendOp::Write { remote, payload, imm: None },
            opcode::IBV_WR_RDMA_WRITE_WITH_IMM => SendOp::Write { remote, payload, imm },
            opcode::IBV_WR_RDMA_READ => SendOp::Read { remote, sges: &sges },
            opcode::IBV_WR_ATOMIC_FETCH_AND_ADD => {
                SendOp::FetchAdd { remote: word, add: atomic.compare_add, result: result()? }
            }
            opcode::IBV_WR_ATOMIC_CMP_AND_SWP => SendOp::CompareSwap {
                remote: word,
                compare: atomic.compare_add,
                swap: atomic.swap,
                result: result()?,
            },
            _ => return Err(libc::EINVAL),
        };
        let options = WqeFlags {
            fence: wr.send_flags.contains(flags::IBV_SEND_FENCE),
            solicited: wr.send_flags.contains(flags::IBV_SEND_SOLICITED),
        };
        let signaled = self.signals_all() || wr.send_flags.contains(flags::IBV_SEND_SIGNALED);
        self.write(&op, options, wr.wr_id, signaled)
    }

    /// Writes a send and its record.
    fn write(&self, op: &SendOp<'_>, options: WqeFlags, wr_id: u64, signaled: bool) -> Result<(), c_int> {
        let mut work = self.work.lock();
        let (index, blocks) = (low16(work.head), u64::from(self.size.blocks));
        let wqe = mlx5::encode(op, self.qpn, index, options).map_err(|_| libc::EINVAL)?;
        let taken = u64::from(wqe.blocks());
        let is_full = work.sends.len() >= self.size.cap.max_send_wr as usize;
        if is_full || work.outstanding_blocks() + taken > blocks {
            return Err(libc::ENOMEM);
        }
        let mut bytes = wqe.as_bytes().to_vec();
        if !signaled {
            bytes[COMPLETES] &= !CE_MASK;
        }
        let (sq, record) = (self.sq()?, self.record()?);
        for (n, block) in bytes.chunks(BB).enumerate() {
            let at = usize::try_from((work.head + n as u64) % blocks).map_err(|_| libc::EINVAL)?;
            sq.write(at * BB, block).map_err(|_| libc::EFAULT)?;
        }
        work.head += taken;
        work.sends.push_back(Sent { index, blocks: taken, wr_id, signaled });
        let word = record.atomic32(mlx5::QP_DBREC_SEND).map_err(|_| libc::EFAULT)?;
        word.store(mlx5::send_record(work.head), Ordering::Release);
        self.write_doorbell(mlx5::doorbell_word(wqe.first8()));
        Ok(())
    }

    /// # Safety
    /// The request must be as its manual page asks.
    unsafe fn receive(&self, wr: &ibv_recv_wr) -> Result<(), c_int> {
        // SAFETY: the caller vouches for the list.
        let sges = unsafe { segments(wr.sg_list, wr.num_sge) }?;
        let mut work = self.work.lock();
        if work.receives.len() >= self.size.receives as usize {
            return Err(libc::ENOMEM);
        }
        let stride = self.size.stride as usize;
        let mut wqe = vec![0; stride];
        mlx5::encode_recv(&sges, stride, &mut wqe).map_err(|_| libc::EINVAL)?;
        let slot =
            usize::try_from(work.received % u64::from(self.size.receives)).map_err(|_| libc::EINVAL)?;
        self.rq()?.write(slot * stride, &wqe).map_err(|_| libc::EFAULT)?;
        work.received += 1;
        work.receives.push_back(wr.wr_id);
        let record = self.record()?;
        let word = record.atomic32(mlx5::QP_DBREC_RECV).map_err(|_| libc::EFAULT)?;
        word.store(mlx5::recv_record(work.received), Ordering::Release);
        Ok(())
    }

    /// # Errors
    /// `EINVAL` in other states than these.
    fn is_one_of(&self, states: &[QpState]) -> Result<(), c_int> {
        let state = self.hca.card.state(self.qpn).map_err(|_| libc::EINVAL)?;
        if states.contains(&state) { Ok(()) } else { Err(libc::EINVAL) }
    }
}

fn low16(value: u64) -> u16 {
    let [.., a, b] = value.to_be_bytes();
    u16::from_be_bytes([a, b])
}

/// `ibv_post_send`
pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller vouches for the queue pair.
    let qp = unsafe { Qp::of(qp) };
    let mut posted = qp.is_one_of(&[QpState::RTS, QpState::ERR]);
    // SAFETY: the caller vouches for the list.
    while let (Ok(()), Some(request)) = (posted, unsafe { wr.as_ref() }) {
        // SAFETY: the caller vouches for the request.
        posted = unsafe { qp.send(request) };
        if posted.is_ok() {
            wr = request.next;
        }
    }
    qp.have_looked();
    refuse(posted, wr, bad)
}

/// `ibv_post_recv`
pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller vouches for the queue pair.
    let qp = unsafe { Qp::of(qp) };
    let mut posted = qp.is_one_of(&[QpState::INIT, QpState::RTR, QpState::RTS, QpState::ERR]);
    // SAFETY: the caller vouches for the list.
    while let (Ok(()), Some(request)) = (posted, unsafe { wr.as_ref() }) {
        // SAFETY: the caller vouches for the request.
        posted = unsafe { qp.receive(request) };
        if posted.is_ok() {
            wr = request.next;
        }
    }
    // What was written in ERR is flushed when the HCA looks.
    qp.have_looked();
    refuse(posted, wr, bad)
}

/// Tells which request was refused.
fn refuse<T>(posted: Result<(), c_int>, wr: *mut T, bad: *mut *mut T) -> c_int {
    let Err(errno) = posted else { return 0 };
    // SAFETY: the callers of the two functions vouch for the place.
    unsafe { bad.write(wr) };
    errno
}
