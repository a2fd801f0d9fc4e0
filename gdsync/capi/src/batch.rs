//! Lists of descriptors: first everything is taken and checked, then one batch goes to a stream or is run.

use std::ffi::c_int;
use std::sync::Arc;

use gdsync::cuda::Gpu;
use gdsync::memory::Word32;
use gdsync::stream::{Batch, Cond, PreparedSend, PreparedWait};
use gdsync::verbs::Completion;

use crate::abi::{
    WAIT_POST_FLUSH, WRITE_MEMORY_POST_BARRIER, WRITE_MEMORY_PRE_BARRIER, WRITE_PRE_BARRIER, gds_descriptor,
    gds_qp, gds_request, gds_wait_value32, gds_write_memory, gds_write_value32,
};
use crate::guard::{Error, Result, wait_limit};
use crate::pairs::{self, Cq, Pair};
use crate::words::{check_flags, word};
use gdsync_capi_support::streams::Lent;

/// Bytes of a `gds_write_memory_t`: each word is an operation.
const MAX_BYTES: usize = 4096;

/// What runs the list.
pub(crate) enum Target<'a> {
    Stream(&'a Lent),
    Cpu,
}

enum Item {
    Sends(Arc<Pair>, u64, Vec<PreparedSend>),
    Wait(Cq, u64, PreparedWait),
    WaitWord(Word32, u32, Cond, bool),
    Write(Word32, u32),
    Barrier,
}

/// A list that was taken; what is not posted is given back on drop.
pub(crate) struct List<'a> {
    target: Target<'a>,
    items: Vec<Item>,
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        for item in self.items.drain(..) {
            match item {
                Item::Sends(pair, id, sends) => pair.put_sends(id, sends),
                Item::Wait(cq, id, wait) => cq.put_wait(id, wait),
                Item::WaitWord(..) | Item::Write(..) | Item::Barrier => {}
            }
        }
    }
}

fn identify(request: &gds_request) -> Result<(usize, u64)> {
    let gds_request { magic, of, id, .. } = *request;
    match usize::try_from(of) {
        Ok(of) if magic == gds_request::MAGIC => Ok((of, id)),
        _ => Err(Error::invalid(
            "request",
            "one that was never prepared",
            "one of gds_prepare_send or gds_prepare_wait_cq",
        )),
    }
}

/// The condition of a number of the program.
pub(crate) fn cond(number: u32) -> Result<Cond> {
    match number {
        0 => Ok(Cond::Geq),
        1 => Ok(Cond::Eq),
        2 => Ok(Cond::And),
        3 => Ok(Cond::Nor),
        other => Err(Error::invalid("condition", other, "GDS_WAIT_COND_GEQ, _EQ, _AND or _NOR")),
    }
}

/// The sends of a request, taken to be posted.
pub(crate) fn take_sends(request: &gds_request) -> Result<(Arc<Pair>, u64, Vec<PreparedSend>)> {
    let (of, id) = identify(request)?;
    let pair = pairs::pair(std::ptr::without_provenance::<gds_qp>(of))?;
    let sends = pair.take_sends(id)?;
    Ok((pair, id, sends))
}

/// The wait of a request, taken to be posted or given back; of `cq`, if there is one.
pub(crate) fn take_wait(request: &gds_request, cq: Option<usize>) -> Result<(Cq, u64, PreparedWait)> {
    let (of, id) = identify(request)?;
    if cq.is_some_and(|cq| cq != of) {
        return Err(Error::invalid("request", "one of another queue", "one of this completion queue"));
    }
    let cq = pairs::cq(of)?;
    let wait = cq.take_wait(id)?;
    Ok((cq, id, wait))
}

impl<'a> List<'a> {
    pub(crate) fn new(target: Target<'a>) -> Self {
        Self { target, items: Vec::new() }
    }

    fn gpu(&self) -> Option<&Gpu> {
        match self.target {
            Target::Stream(lent) => Some(&lent.gpu),
            Target::Cpu => None,
        }
    }

    pub(crate) fn sends(&mut self, request: &gds_request) -> Result<()> {
        let (pair, id, sends) = take_sends(request)?;
        self.items.push(Item::Sends(pair, id, sends));
        Ok(())
    }

    pub(crate) fn wait(&mut self, request: &gds_request) -> Result<()> {
        let (cq, id, wait) = take_wait(request, None)?;
        self.items.push(Item::Wait(cq, id, wait));
        Ok(())
    }

    fn wait_word(&mut self, wait: &gds_wait_value32) -> Result<()> {
        check_flags(wait.flags, WAIT_POST_FLUSH)?;
        let (cond, flushes) = (cond(wait.cond_flags)?, wait.flags & WAIT_POST_FLUSH != 0);
        let word = word(self.gpu(), wait.ptr.expose_provenance(), wait.flags)?;
        self.items.push(Item::WaitWord(word, wait.value, cond, flushes));
        Ok(())
    }

    fn barrier(&mut self, flags: c_int, flag: c_int) {
        if flags & flag != 0 {
            self.items.push(Item::Barrier);
        }
    }

    fn write_word(&mut self, write: &gds_write_value32) -> Result<()> {
        check_flags(write.flags, WRITE_PRE_BARRIER)?;
        let word = word(self.gpu(), write.ptr.expose_provenance(), write.flags)?;
        self.barrier(write.flags, WRITE_PRE_BARRIER);
        self.items.push(Item::Write(word, write.value));
        Ok(())
    }

    fn write_memory(&mut self, write: &gds_write_memory) -> Result<()> {
        check_flags(write.flags, WRITE_MEMORY_PRE_BARRIER | WRITE_MEMORY_POST_BARRIER)?;
        if !write.count.is_multiple_of(4) || write.count > MAX_BYTES || write.src.is_null() {
            let value = format!("{} bytes from {:p}", write.count, write.src);
            return Err(Error::invalid(
                "memory to write",
                value,
                "a multiple of 4, at most 4096, not from NULL",
            ));
        }
        self.barrier(write.flags, WRITE_MEMORY_PRE_BARRIER);
        // SAFETY: the program passes so many bytes.
        let bytes = unsafe { std::slice::from_raw_parts(write.src, write.count) };
        for (at, bytes) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let dest = write.dest.expose_provenance().wrapping_add(4 * at);
            let word = word(self.gpu(), dest, write.flags)?;
            self.items.push(Item::Write(word, u32::from_ne_bytes(*bytes)));
        }
        self.barrier(write.flags, WRITE_MEMORY_POST_BARRIER);
        Ok(())
    }

    /// Adds a descriptor.
    ///
    /// # Safety
    /// It must be as its tag says, and a request that it points to be readable.
    pub(crate) unsafe fn add(&mut self, descriptor: &gds_descriptor) -> Result<()> {
        let operand = &descriptor.operand;
        let request = || {
            // SAFETY: the caller guarantees the tag.
            let request = crate::guard::non_null("request", unsafe { operand.request })?;
            // SAFETY: the caller guarantees the request, which may lie anywhere.
            Ok::<_, Error>(unsafe { request.as_ptr().read_unaligned() })
        };
        match descriptor.tag {
            0 => self.sends(&request()?),
            1 => self.wait(&request()?),
            // SAFETY: the caller guarantees the tag.
            2 => self.wait_word(&unsafe { operand.wait32 }),
            // SAFETY: the caller guarantees the tag.
            3 => self.write_word(&unsafe { operand.write32 }),
            // SAFETY: the caller guarantees the tag.
            4 => self.write_memory(&unsafe { operand.writemem }),
            other => Err(Error::invalid("tag of a descriptor", other, "0 to 4, see gds_tag_t")),
        }
    }

    /// Posts everything, all or nothing. Sends of a list that is refused are taken back, claims of its waits given back.
    pub(crate) fn post(mut self) -> Result<()> {
        let mut batch = Batch::new();
        let mut posted: Vec<(Arc<Pair>, Vec<Completion>)> = Vec::new();
        let mut claimed = Vec::new();
        let is_flush = |item: &Item| matches!(item, Item::WaitWord(.., true));
        let last_flush = self.items.iter().rposition(is_flush).filter(|_| self.gpu().is_some());
        for (at, item) in self.items.drain(..).enumerate() {
            match item {
                Item::Sends(pair, _, sends) => {
                    posted.push((pair, sends.into_iter().map(|send| batch.post(send)).collect()));
                }
                Item::Wait(cq, _, wait) => claimed.push((cq, batch.post_wait(wait))),
                Item::WaitWord(word, value, cond, _) => batch.wait_value32(&word, value, cond),
                Item::Write(word, value) => batch.write_value32(&word, value),
                Item::Barrier => batch.barrier(),
            }
            if last_flush == Some(at) {
                batch.flush();
            }
        }
        let done = match self.target {
            Target::Stream(lent) => lent.stream.with_timeout(wait_limit()).submit(&mut batch),
            Target::Cpu => batch.run(wait_limit()),
        };
        // The batch keeps the operations that were neither run nor queued.
        if done.is_err() && !batch.is_empty() {
            posted.iter().for_each(|(pair, sends)| pair.forget(sends));
            claimed.iter().for_each(|(cq, claim)| cq.unclaim(claim));
        }
        done
    }
}
