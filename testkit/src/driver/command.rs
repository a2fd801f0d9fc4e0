//! What can be enqueued on a stream.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;

use super::context::Context;
use super::kernel::Launch;
use super::memop::{Deferred, Op};
use super::memory::{Kind, Region, find};
use super::queue::Ticket;
use super::{Outcome, control, require};
use gdrcopy::cuda::CudaStatus;

thread_local! {
    /// This thread runs work of a stream.
    static WORKING: Cell<bool> = const { Cell::new(false) };
}

/// From now on this thread may not call the driver.
pub(super) fn begin_working() {
    WORKING.set(true);
}

/// Refuses calls of the driver by kernels and host functions.
pub(super) fn not_working() -> Outcome {
    if WORKING.get() {
        control::misplaced();
    }
    require(!WORKING.get(), CudaStatus::NOT_PERMITTED)
}

/// Work of a stream.
#[derive(Clone)]
pub(super) enum Command {
    MemOps(Vec<Op>),
    Kernel(Launch),
    /// A function of the application and the address of its data.
    Host(extern "C" fn(*mut c_void), usize),
    Copy(Copy),
    Fill(Fill),
    /// Nothing, to be waited for.
    Mark,
    /// Waits until other work is done.
    After(Ticket),
    /// The nodes of a graph.
    Graph(Vec<Command>),
}

impl Command {
    /// Runs it on a stream of a context.
    pub(super) fn run(&self, context: &Context, deferred: &Deferred) -> Outcome {
        // What follows shows the writes before it, unless it waits.
        if !matches!(self, Self::MemOps(_) | Self::After(_) | Self::Graph(_)) {
            deferred.flush()?;
        }
        match self {
            Self::MemOps(ops) => ops.iter().try_for_each(|op| op.run(context, deferred)),
            Self::Kernel(launch) => {
                launch.run();
                Ok(())
            }
            Self::Host(function, data) => {
                function(with_exposed_provenance_mut(*data));
                Ok(())
            }
            Self::Copy(copy) => {
                control::copying(context.device);
                copy.run()
            }
            Self::Fill(fill) => fill.run(),
            Self::Mark => Ok(()),
            Self::After(ticket) => ticket.wait_in(context),
            Self::Graph(nodes) => nodes.iter().try_for_each(|node| {
                context.check()?;
                node.run(context, deferred)
            }),
        }
    }

    /// Whether it can be captured.
    pub(super) fn can_be_node(&self) -> bool {
        match self {
            Self::MemOps(_) | Self::Kernel(_) | Self::Host(..) | Self::Fill(_) => true,
            Self::Copy(copy) => !copy.uses_pageable(),
            Self::Mark | Self::After(_) | Self::Graph(_) => false,
        }
    }
}

/// Memory of a copy: that of the driver, or pageable.
#[derive(Clone)]
pub(super) struct Side {
    region: Option<Arc<Region>>,
    addr: usize,
}

impl Side {
    /// Memory of the driver, or whatever else it is.
    pub(super) fn any(addr: usize, len: usize) -> Outcome<Self> {
        let region = find(addr, len);
        // A range that leaves its memory is not pageable.
        let whole = region.is_some() || find(addr, 1).is_none();
        require(addr != 0 && whole, CudaStatus::INVALID_VALUE)?;
        Ok(Self { region, addr })
    }

    /// Memory of a GPU.
    pub(super) fn device(addr: usize, len: usize) -> Outcome<Self> {
        let region = find(addr, len).filter(|region| region.kind == Kind::Device);
        require(region.is_some(), CudaStatus::INVALID_VALUE)?;
        Ok(Self { region, addr })
    }

    /// Uses the memory, if it is still there.
    fn touch<T>(&self, act: impl FnOnce() -> T) -> Outcome<T> {
        match &self.region {
            Some(region) => region.touch(act),
            None => Ok(act()),
        }
    }
}

/// A copy of bytes.
#[derive(Clone)]
pub(super) struct Copy {
    to: Side,
    from: Source,
    len: usize,
}

#[derive(Clone)]
enum Source {
    Side(Side),
    /// Pageable memory is read by the call.
    Bytes(Arc<[u8]>),
}

impl Copy {
    pub(super) fn new(to: Side, from: Side, len: usize) -> Self {
        let pageable = from.region.is_none().then(|| {
            // SAFETY: memory of the application, which the caller of the entry point vouches for.
            let bytes = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(from.addr), len) };
            Source::Bytes(bytes.into())
        });
        Self { to, from: pageable.unwrap_or(Source::Side(from)), len }
    }

    /// Whether the call returns only when the bytes are there.
    pub(super) fn is_synchronous(&self) -> bool {
        self.to.region.is_none()
    }

    fn uses_pageable(&self) -> bool {
        self.is_synchronous() || matches!(self.from, Source::Bytes(_))
    }

    fn run(&self) -> Outcome {
        let to = with_exposed_provenance_mut::<u8>(self.to.addr);
        let copy = |from: *const u8| {
            // SAFETY: inside memory that stays for now, or that the caller of the entry point vouches for.
            self.to.touch(|| unsafe { to.copy_from(from, self.len) })
        };
        match &self.from {
            Source::Side(side) => side.touch(|| copy(with_exposed_provenance(side.addr)))?,
            Source::Bytes(bytes) => copy(bytes.as_ptr()),
        }
    }
}

/// Words of 32 bits in GPU memory.
#[derive(Clone)]
pub(super) struct Fill {
    pub(super) to: Side,
    pub(super) value: u32,
    pub(super) count: usize,
}

impl Fill {
    fn run(&self) -> Outcome {
        let to = with_exposed_provenance_mut::<u32>(self.to.addr);
        self.to.touch(|| {
            for index in 0..self.count {
                // SAFETY: inside the memory, whose length was checked.
                let word = unsafe { to.add(index) };
                // SAFETY: aligned, in memory that stays for now.
                unsafe { word.write(self.value) };
            }
        })
    }
}
