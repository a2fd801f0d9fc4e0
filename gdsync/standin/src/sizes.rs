//! The sizes that libmlx5 gives to queues (`mlx5_calc_wq_size` and `create_cq` in rdma-core's `providers/mlx5/verbs.c`).

use std::ffi::c_int;

use rdma_core_sys::verbs::{ibv_qp_cap, ibv_qp_create_send_ops_flags as ops};

use crate::pages::PAGE;

/// Bytes of a block of the send queue.
pub(crate) const BLOCK: u32 = 64;
/// Bytes of a CQE.
pub(crate) const CQE: usize = 64;
/// Bytes of the largest send.
const MAX_SEND: u32 = 1024;
/// Bytes of the largest receive.
const MAX_RECEIVE: u32 = 512;
/// Blocks of the largest send queue.
const MAX_BLOCKS: u32 = 32768;
/// Entries of the largest receive queue.
pub(crate) const MAX_RECEIVES: u32 = 32768;
/// Entries of the largest completion queue.
pub(crate) const MAX_CQES: u32 = 1 << 22;
/// Buffers of the largest send.
pub(crate) const MAX_SGES: u8 = 30;

/// What a queue pair is laid out as: the receive queue, and the send queue behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QpSize {
    /// Blocks of the send queue.
    pub(crate) blocks: u32,
    /// Entries of the receive queue.
    pub(crate) receives: u32,
    /// Bytes of an entry.
    pub(crate) stride: u32,
    /// What the application is told that it has.
    pub(crate) cap: Granted,
}

/// What of `struct ibv_qp_cap` is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granted {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// Bytes of a send beside its buffers, for the largest of the operations (`_sq_overhead`).
fn overhead(operations: ops) -> u32 {
    let (control, remote, atomic) = (16, 16, 16);
    let (umr, key, list) = (48, 64, 64);
    let mut size = control;
    let rdma = ops::IBV_QP_EX_WITH_RDMA_WRITE
        | ops::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        | ops::IBV_QP_EX_WITH_RDMA_READ;
    if operations.intersects(rdma) {
        size = size.max(control + remote);
    }
    if operations
        .intersects(ops::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | ops::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)
    {
        size = size.max(control + remote + atomic);
    }
    if operations.intersects(ops::IBV_QP_EX_WITH_BIND_MW | ops::IBV_QP_EX_WITH_LOCAL_INV) {
        size = size.max(control + umr + key + list);
    }
    size
}

/// The operations of a queue pair whose creator names none.
fn all_operations() -> ops {
    ops::all().difference(ops::IBV_QP_EX_WITH_TSO | ops::IBV_QP_EX_WITH_ATOMIC_WRITE)
}

fn power_of_two(value: u32) -> Result<u32, c_int> {
    value.checked_next_power_of_two().ok_or(libc::EINVAL)
}

impl QpSize {
    /// # Errors
    /// `EINVAL`.
    pub(crate) fn of(cap: &ibv_qp_cap, operations: Option<ops>) -> Result<Self, c_int> {
        let mut size = Self {
            blocks: 0,
            receives: 0,
            stride: 1,
            cap: Granted {
                max_send_wr: 0,
                max_recv_wr: 0,
                max_recv_sge: 0,
                max_inline_data: cap.max_inline_data,
            },
        };
        if cap.max_send_wr > 0 {
            size.sends(cap, overhead(operations.unwrap_or_else(all_operations)))?;
        }
        if cap.max_recv_wr > 0 {
            size.receives(cap)?;
        }
        Ok(size)
    }

    fn sends(&mut self, cap: &ibv_qp_cap, overhead: u32) -> Result<(), c_int> {
        if cap.max_send_sge > (MAX_SEND - overhead) / 16 || cap.max_inline_data > MAX_SEND {
            return Err(libc::EINVAL);
        }
        let in_line = if cap.max_inline_data > 0 {
            overhead + (4 + cap.max_inline_data).next_multiple_of(16)
        } else {
            0
        };
        let wqe = (overhead + 16 * cap.max_send_sge).max(in_line);
        if wqe > MAX_SEND || cap.max_send_wr > 0x7fff_ffff / MAX_SEND {
            return Err(libc::EINVAL);
        }
        let wqe = wqe.next_multiple_of(BLOCK);
        let bytes = power_of_two(cap.max_send_wr * wqe)?;
        self.blocks = bytes / BLOCK;
        self.cap.max_send_wr = bytes / wqe;
        self.cap.max_inline_data = wqe - overhead - 4;
        if self.blocks > MAX_BLOCKS { Err(libc::EINVAL) } else { Ok(()) }
    }

    fn receives(&mut self, cap: &ibv_qp_cap) -> Result<(), c_int> {
        if cap.max_recv_wr > MAX_RECEIVES || cap.max_recv_sge > MAX_RECEIVE / 16 {
            return Err(libc::EINVAL);
        }
        self.stride = power_of_two(16 * cap.max_recv_sge.max(1))?;
        let bytes = (power_of_two(cap.max_recv_wr)? * self.stride).max(BLOCK);
        self.receives = bytes / self.stride;
        self.cap.max_recv_wr = self.receives;
        self.cap.max_recv_sge = self.stride / 16;
        Ok(())
    }

    /// Where the send queue begins.
    pub(crate) fn send_offset(&self) -> usize {
        self.receives as usize * self.stride as usize
    }

    /// Bytes of both queues.
    pub(crate) fn bytes(&self) -> usize {
        self.send_offset() + self.blocks as usize * BLOCK as usize
    }

    /// The alignment that an allocator is asked for (`mlx5_set_custom_qp_alignment`).
    pub(crate) fn align(&self) -> usize {
        let pages = self.bytes().next_multiple_of(PAGE).next_power_of_two();
        let block = if self.blocks > 0 { BLOCK as usize } else { 1 };
        block.max(self.stride as usize).max(pages / 64)
    }
}

/// Entries of a completion queue for which `cqe` are asked.
///
/// # Errors
/// `EINVAL`.
pub(crate) fn cq_entries(cqe: u32) -> Result<u32, c_int> {
    if cqe == 0 || cqe >= MAX_CQES {
        return Err(libc::EINVAL);
    }
    power_of_two(cqe + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cap(max_send_wr: u32, max_recv_wr: u32, sges: u32, max_inline_data: u32) -> ibv_qp_cap {
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge: sges, max_recv_sge: sges, max_inline_data }
    }

    #[test]
    fn a_send_of_any_operation_takes_four_blocks() {
        let size = QpSize::of(&cap(100, 100, 1, 0), None).unwrap();
        // 192 + 16 bytes, and 100 of them in a power of two.
        assert_eq!((size.blocks, size.cap.max_send_wr, size.cap.max_inline_data), (512, 128, 256 - 192 - 4));
        assert_eq!((size.receives, size.stride, size.cap.max_recv_sge), (128, 16, 1));
        assert_eq!((size.send_offset(), size.bytes(), size.align()), (2048, 2048 + 32768, 1024));
    }

    #[test]
    fn a_send_of_few_operations_takes_one() {
        let few = ops::IBV_QP_EX_WITH_SEND
            | ops::IBV_QP_EX_WITH_RDMA_WRITE
            | ops::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
        let size = QpSize::of(&cap(100, 0, 1, 0), Some(few)).unwrap();
        assert_eq!((size.blocks, size.cap.max_send_wr, size.receives), (128, 128, 0));
        assert_eq!(size.cap.max_inline_data, 64 - 48 - 4);
        let size = QpSize::of(&cap(100, 0, 1, 64), Some(few)).unwrap();
        assert_eq!(size.blocks, 256, "48 + 80 bytes are two blocks");
    }

    #[test]
    fn small_receive_queues_fill_a_block() {
        let size = QpSize::of(&cap(0, 1, 1, 0), None).unwrap();
        assert_eq!((size.blocks, size.receives, size.stride), (0, 4, 16));
        let size = QpSize::of(&cap(0, 3, 3, 0), None).unwrap();
        assert_eq!((size.receives, size.stride, size.cap.max_recv_sge), (4, 64, 4));
    }

    #[test]
    fn what_is_too_large_is_refused() {
        for cap in [
            cap(40_000, 0, 1, 0),
            cap(1, 40_000, 1, 0),
            cap(1, 0, 60, 0),
            cap(1, 1, 33, 0),
            cap(1, 0, 1, 1000),
        ] {
            assert_eq!(QpSize::of(&cap, None), Err(libc::EINVAL), "{cap:?}");
        }
    }

    #[test]
    fn completion_queues_have_one_entry_more_at_least() {
        assert_eq!(
            (cq_entries(1), cq_entries(2), cq_entries(3), cq_entries(255)),
            (Ok(2), Ok(4), Ok(4), Ok(256))
        );
        assert_eq!((cq_entries(0), cq_entries(MAX_CQES)), (Err(libc::EINVAL), Err(libc::EINVAL)));
    }
}
