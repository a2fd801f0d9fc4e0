//! Events: marks in streams.

use std::sync::Arc;

use parking_lot::Mutex;

use super::command::Command;
use super::context::current;
use super::handles::Table;
use super::queue::Ticket;
use super::stream::{enqueue, resolve};
use super::{Outcome, capture, put, require};
use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::Handle;

/// `CU_EVENT_BLOCKING_SYNC`, `CU_EVENT_DISABLE_TIMING`, `CU_EVENT_INTERPROCESS`.
const FLAGS: u32 = 1 | NO_TIMING | INTERPROCESS;
const NO_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

pub(super) static EVENTS: Table<Arc<Event>> = Table::new();

pub(super) struct Event {
    pub(super) context: Handle,
    /// What it stands for; nothing before it is recorded.
    recorded: Mutex<Option<Ticket>>,
}

pub(super) fn create(event: *mut Handle, flags: u32) -> Outcome {
    let context = current()?.handle;
    let between = flags & INTERPROCESS == 0 || flags & NO_TIMING != 0;
    require(!event.is_null() && flags & !FLAGS == 0 && between, CudaStatus::INVALID_VALUE)?;
    put(event, EVENTS.insert(|_| Arc::new(Event { context, recorded: Mutex::default() })))
}

pub(super) fn record(event: Handle, stream: Handle) -> Outcome {
    let event = EVENTS.get(event)?;
    require(resolve(stream)?.context.handle == event.context, CudaStatus::INVALID_HANDLE)?;
    let ticket = enqueue(stream, |_| Ok(Command::Mark))?;
    *event.recorded.lock() = ticket;
    Ok(())
}

fn recorded(event: Handle) -> Outcome<Option<Ticket>> {
    Ok(EVENTS.get(event)?.recorded.lock().clone())
}

pub(super) fn wait(stream: Handle, event: Handle, flags: u32) -> Outcome {
    require(flags <= 1, CudaStatus::INVALID_VALUE)?;
    let ticket = recorded(event)?;
    enqueue(stream, |_| Ok(ticket.map_or(Command::Mark, Command::After))).map(drop)
}

pub(super) fn query(event: Handle) -> Outcome {
    let ticket = recorded(event)?;
    capture::unsafe_call()?;
    match ticket {
        Some(ticket) if !ticket.is_done() => Err(CudaStatus::NOT_READY),
        Some(ticket) => ticket.synchronize(),
        None => Ok(()),
    }
}

pub(super) fn synchronize(event: Handle) -> Outcome {
    let ticket = recorded(event)?;
    capture::unsafe_call()?;
    ticket.map_or(Ok(()), |ticket| ticket.synchronize())
}

pub(super) fn destroy(event: Handle) -> Outcome {
    EVENTS.remove(event).map(drop)
}
