//! Queue pairs for GPU kernels that post and poll by themselves.

use super::cq::CqInner;
use super::qp::Qp;
use gdsync_device::cuda::Gpu;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;
use mlx5_ring::BB;

/// Addresses, sizes and numbers of a queue pair, for a kernel that posts and polls by itself. C has the same layout.
///
/// Formats are those of [`mlx5`](crate::mlx5). All fields of rings and records are big-endian:
///
/// - *Send.* Block `i` of the send queue lies at `sq + (i % sq_blocks) * 64`. After writing the requests: a
///   system-scope fence; the low 16 bits of the next block's index to `send_record` (32 bits); a system-scope fence;
///   the first eight bytes of the last request, in ring byte order, to `doorbell` in one store.
/// - *Receive.* Entry `i` lies at `rq + (i % rq_entries) * rq_stride`. After writing it: a fence, then the low 16 bits
///   of the next index to `recv_record` (32 bits).
/// - *Completions.* Entry `n` lies at `ring + (n % entries) * 64`. It is valid when the lowest bit of its last byte is
///   `(n / entries) % 2`. The high half of that byte is 13 or 14 for an error. The consumer writes the low 24 bits of
///   the next index to `record` (32 bits).
/// - *Keys.* [`Mr::lkey`](super::Mr::lkey) and [`Mr::rkey`](super::Mr::rkey) are in host byte order; requests hold them
///   big-endian.
///
/// All indices start at 0: the queue pair must be fresh, with completion queues of its own.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceQp {
    /// The send queue.
    pub sq: u64,
    /// The receive queue.
    pub rq: u64,
    /// The send word of the doorbell record.
    pub send_record: u64,
    /// The receive word of the doorbell record.
    pub recv_record: u64,
    /// The doorbell register of the card: eight bytes, write-only.
    pub doorbell: u64,
    /// The completion queue of sends.
    pub send_cq: DeviceCq,
    /// The completion queue of receives; equal to `send_cq` if shared.
    pub recv_cq: DeviceCq,
    /// The queue pair number, 24 bits, host byte order.
    pub qpn: u32,
    /// Blocks of the send queue, 64 bytes each: a power of two.
    pub sq_blocks: u32,
    /// Entries of the receive queue: a power of two.
    pub rq_entries: u32,
    /// Bytes of an entry of the receive queue.
    pub rq_stride: u32,
}

/// A completion queue of a [`DeviceQp`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCq {
    /// The ring.
    pub ring: u64,
    /// The consumer index.
    pub record: u64,
    /// The completion queue number, 24 bits, host byte order.
    pub cqn: u32,
    /// Number of entries, 64 bytes each: a power of two.
    pub entries: u32,
}

fn count(bytes: usize, each: usize) -> u32 {
    u32::try_from(bytes / each).expect("rings have 2^22 entries at most")
}

fn cq(inner: &CqInner, gpu: &Gpu) -> Result<DeviceCq> {
    let parts = inner.parts();
    Ok(DeviceCq {
        ring: parts.ring.gpu_addr(gpu)?,
        record: parts.record.gpu_addr(gpu)?,
        cqn: parts.cqn,
        entries: count(parts.ring.len(), mlx5_ring::CQE_SIZE),
    })
}

impl Qp {
    /// Returns what kernels of `gpu` need to post to this queue pair and poll its completions. Queues in host memory
    /// are registered with CUDA; queues in GPU memory (see [`OnGpu`](super::OnGpu)) are fastest.
    ///
    /// From then on only the kernels may use the queue pair. This library does not track their requests: do not post,
    /// poll or submit to streams here. It stays valid until the last clone of the `Qp` is dropped.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where no card reads the rings; [`Error::InvalidArgument`] if something was posted before;
    /// [`Error::Cuda`] if the GPU cannot access a queue or write the doorbell.
    pub fn for_kernels(&self, gpu: &Gpu) -> Result<DeviceQp> {
        let core = self.core();
        if !core.provider.reads_by_itself() {
            return Err(Error::Unsupported {
                what: "posting from kernels",
                by: "a device whose rings a thread of the CPU reads",
                fix: "use an mlx5 card with GDSYNC_PATH=direct",
            });
        }
        let posted = self.send.end.tracker.posted() + self.recv.end.tracker.posted();
        if posted > 0 {
            let expected =
                "none: kernels begin at index 0, so give them a queue pair that nothing was posted to";
            return Err(Error::invalid("posted requests", posted, expected));
        }
        let at = |memory: &Memory| memory.gpu_addr(gpu);
        let ((sq, send_record, doorbell), (rq, recv_record, stride)) =
            (self.send.places(), self.recv.places());
        Ok(DeviceQp {
            sq: at(sq)?,
            rq: at(rq)?,
            send_record: at(send_record)?,
            recv_record: at(recv_record)?,
            doorbell: at(doorbell)?,
            send_cq: cq(&self.send.end.cq, gpu)?,
            recv_cq: cq(&self.recv.end.cq, gpu)?,
            qpn: self.qpn(),
            sq_blocks: count(sq.len(), BB),
            rq_entries: count(rq.len(), stride),
            rq_stride: count(stride, 1),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;

    #[test]
    fn the_layout_matches_c() {
        assert_eq!((size_of::<DeviceCq>(), size_of::<DeviceQp>(), align_of::<DeviceQp>()), (24, 104, 8));
        assert_eq!(
            (offset_of!(DeviceQp, doorbell), offset_of!(DeviceQp, send_cq), offset_of!(DeviceQp, qpn)),
            (32, 40, 88)
        );
        assert_eq!((offset_of!(DeviceCq, record), offset_of!(DeviceCq, entries)), (8, 20));
    }
}
