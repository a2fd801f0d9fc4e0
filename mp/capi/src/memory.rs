//! Registered memory, and windows into that of peers.

use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::verbs::{Access, Mr, Pd, RemoteAddr, Sge};
use gdsync_capi_support::handles::Table;
use mp::Exchange;
use std::ffi::c_int;
use std::time::Duration;

use crate::abi::KINDS;
use crate::failure::{Failure, Result};

pub(crate) static REGISTRATIONS: Table<Registration> = Table::new(2, &KINDS);
pub(crate) static WINDOWS: Table<Window> = Table::new(3, &KINDS);

/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`: calls such as `cudaMemset` of this memory return when they are done.
const SYNC_MEMOPS: u32 = 6;

/// Registered memory of the program.
#[derive(Debug)]
pub(crate) struct Registration {
    mr: Mr,
    base: usize,
    /// The number of its job.
    job: u64,
}

impl Registration {
    /// Registers memory.
    ///
    /// # Safety
    /// It must stay allocated until the result is gone.
    pub(crate) unsafe fn new((pd, job): (&Pd, u64), base: usize, len: usize) -> Result<Self> {
        // SAFETY: the caller's promise.
        let memory = match unsafe { Gpu::find(base as u64, len) }? {
            Some(memory) => memory,
            // SAFETY: the caller guarantees that it stays allocated.
            None => unsafe { Memory::from_raw(std::ptr::with_exposed_provenance_mut(base), len) }?,
        };
        if let Some(gpu) = memory.gpu() {
            let on = 1u32;
            // SAFETY: an address of this GPU, and a place of four bytes.
            let set = gpu.within(|api| unsafe {
                api.pointer_set_attribute((&raw const on).cast(), SYNC_MEMOPS, memory.addr())
            });
            if let Err(error) = set {
                tracing::debug!(%error, "memory without SYNC_MEMOPS");
            }
        }
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        Ok(Self { mr: pd.register(&memory, access)?, base, job })
    }

    /// Refuses memory from before `mp_finalize`: the devices of this job do not know it.
    pub(crate) fn check(&self, job: u64) -> Result<()> {
        match self.job == job {
            true => Ok(()),
            false => Err(Failure::invalid("registration", "one of an earlier job", "one since this mp_init")),
        }
    }

    /// Bytes of it; none for a length of 0.
    pub(crate) fn sge(&self, at: usize, len: usize) -> Result<Option<Sge>> {
        let offset = at.checked_sub(self.base).ok_or_else(|| {
            let expected = "inside the registered memory";
            Failure::invalid("buffer", format!("{at:#x}, before {:#x}", self.base), expected)
        })?;
        let sge = self.mr.sge(offset, len)?;
        Ok((len > 0).then_some(sge))
    }

    /// Refuses memory that the CPU cannot read.
    pub(crate) fn check_host(&self) -> Result<()> {
        match self.mr.memory().is_host() {
            true => Ok(()),
            false => Err(Failure::invalid("buffer of an inline put", "GPU memory", "host memory")),
        }
    }
}

/// Memory of all ranks that they can access.
#[derive(Debug)]
pub(crate) struct Window {
    _own: Registration,
    /// That of each rank, and its size.
    parts: Vec<(RemoteAddr, u64)>,
}

impl Window {
    /// Bytes of what ranks exchange: success, address, key, size.
    const LEN: usize = 1 + 8 + 4 + 8;

    /// Registers memory and exchanges its place. All ranks exchange, also one that has failed.
    pub(crate) fn new(
        own: Result<Registration>,
        len: usize,
        exchange: &mut dyn Exchange,
        timeout: Duration,
    ) -> Result<Self> {
        let place = own.and_then(|own| Ok((own.mr.remote(0)?, own)));
        let mut bytes = [0; Self::LEN];
        if let Ok((remote, _)) = &place {
            bytes[0] = 1;
            bytes[1..9].copy_from_slice(&remote.addr.to_be_bytes());
            bytes[9..13].copy_from_slice(&remote.rkey.to_be_bytes());
            bytes[13..].copy_from_slice(&(len as u64).to_be_bytes());
        }
        let all = exchange.allgather(&bytes, timeout);
        let (_, own) = place?;
        let parts = all?.iter().enumerate().map(|(rank, bytes)| part(bytes).ok_or(rank)).collect();
        let failed = |rank| Failure::new(format!("rank {rank} has no window: see its error"));
        Ok(Self { _own: own, parts: std::result::Result::map_err(parts, failed)? })
    }

    /// The place of bytes of a rank.
    pub(crate) fn remote(&self, rank: usize, displ: usize, len: usize) -> Result<RemoteAddr> {
        let (base, size) = self.parts[rank];
        let end = displ.checked_add(len).filter(|&end| end as u64 <= size);
        if end.is_none() {
            let value = format!("{len} bytes at {displ} of {size}");
            return Err(Failure::invalid("range of the window", value, "one inside the peer's window"));
        }
        Ok(RemoteAddr { addr: base.addr + displ as u64, rkey: base.rkey })
    }
}

/// What a rank has said of its memory.
fn part(bytes: &[u8]) -> Option<(RemoteAddr, u64)> {
    let (ok, rest) = bytes.split_first()?;
    let (addr, rest) = rest.split_first_chunk()?;
    let (rkey, rest) = rest.split_first_chunk()?;
    let (size, rest) = rest.split_first_chunk()?;
    let (addr, size) = (u64::from_be_bytes(*addr), u64::from_be_bytes(*size));
    addr.checked_add(size)?;
    let remote = RemoteAddr { addr, rkey: u32::from_be_bytes(*rkey) };
    (*ok == 1 && rest.is_empty()).then_some((remote, size))
}

/// A length of the program.
pub(crate) fn length(size: c_int) -> Result<usize> {
    usize::try_from(size).map_err(|_| Failure::invalid("size", size, "0 or more"))
}
