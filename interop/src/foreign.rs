//! The other side: a queue pair and a buffer of the `ibverbs` crate.

use std::time::Instant;

use ibverbs::{
    CompletionQueue, Context, MemoryRegion, PreparedQueuePair, ProtectionDomain, QueuePair, ibv_wc,
};

use crate::tables::gid_bytes;
use crate::{PATIENCE, Result};

/// Completions that may wait on the queue.
pub(crate) const CQ_ENTRIES: i32 = 256;

/// Opens the device of this name.
pub(crate) fn open(name: &str) -> Result<Context> {
    let devices = ibverbs::devices()?;
    let found =
        devices.iter().find(|device| device.name().is_some_and(|its| its.to_bytes() == name.as_bytes()));
    Ok(found.ok_or_else(|| format!("the ibverbs crate sees no {name}"))?.open()?)
}

/// A queue pair that uses the entry of the GID table which is `gid`, and expects `psn` first.
pub(crate) fn prepare<'res>(
    context: &Context,
    pd: &'res ProtectionDomain<'res>,
    cq: &'res CompletionQueue<'res>,
    gid: [u8; 16],
    psn: u32,
) -> Result<PreparedQueuePair<'res>> {
    let entry = context.gid_table().iter().find(|entry| gid_bytes(&entry.gid) == gid);
    let index = entry.ok_or("the ibverbs crate does not see the GID that gdsync uses")?.gid_index;
    let access = ibverbs::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
        | ibverbs::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
        | ibverbs::ibv_access_flags::IBV_ACCESS_REMOTE_READ
        | ibverbs::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC;
    let mut builder = pd.create_qp(cq, cq, ibverbs::ibv_qp_type::IBV_QPT_RC);
    builder.set_gid_index(index).set_access(access).set_rq_psn(psn).set_max_dest_rd_atomic(16);
    builder.set_timeout(14).set_retry_count(7).set_max_send_wr(64).set_max_recv_wr(64);
    Ok(builder.build()?)
}

/// A connected queue pair, its buffer, and its completions.
pub(crate) struct Foreign<'res> {
    pub(crate) qp: QueuePair<'res>,
    pub(crate) buffer: MemoryRegion<u8>,
    pub(crate) cq: &'res CompletionQueue<'res>,
}

impl Foreign<'_> {
    /// Sends `length` bytes of its buffer from `offset`.
    pub(crate) fn send(&mut self, offset: usize, length: usize, id: u64) -> Result {
        // SAFETY: nobody writes to the buffer before the completion of everything posted has been polled, and it outlives the
        // queue pair's work: `traffic` waits for each.
        unsafe { self.qp.post_send(&mut self.buffer, offset..offset + length, id) }?;
        Ok(())
    }

    /// Receives into `length` bytes of its buffer from `offset`.
    pub(crate) fn receive(&mut self, offset: usize, length: usize, id: u64) -> Result {
        // SAFETY: as in `send`; the buffer is read only when the completion is there.
        unsafe { self.qp.post_receive(&mut self.buffer, offset..offset + length, id) }?;
        Ok(())
    }

    /// The next completion.
    pub(crate) fn completion(&self) -> Result<ibv_wc> {
        let end = Instant::now() + PATIENCE;
        let mut one = [ibv_wc::default()];
        while Instant::now() < end {
            if let [wc] = self.cq.poll(&mut one)? {
                return Ok(*wc);
            }
            std::thread::yield_now();
        }
        Err("no completion on the side of the ibverbs crate".into())
    }

    /// The next completion, which must be a success of this request.
    pub(crate) fn completed(&self, id: u64) -> Result<ibv_wc> {
        let wc = self.completion()?;
        match wc.error() {
            Some((status, vendor)) => {
                Err(format!("ibverbs: request {id}: status {status}, vendor {vendor:#x}").into())
            }
            None if wc.wr_id() == id => Ok(wc),
            None => Err(format!("ibverbs: request {} completed before {id}", wc.wr_id()).into()),
        }
    }

    /// Address of a byte of its buffer.
    pub(crate) fn addr(&self, offset: usize) -> u64 {
        (&raw const self.buffer[offset]).addr() as u64
    }
}
