//! DevX: commands of a program to the firmware, which make queues in registered memory, change them and ask about them.
//!
//! The kernel's part is here: attributes, handles, and which object a command is for. What the firmware does with a command,
//! a function of its bytes, is in the modules below.

mod firmware;
mod queues;
mod steps;
mod umem;

use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;

use self::firmware::{Refusal, Response};
use super::device::VECTORS;
use super::ioctl::Call;
use super::{Context, Events, Result, Table};
use crate::abi;
use crate::events::EventPipe;
use crate::hca::EventKind;
use crate::log::log;

/// What a context has of DevX.
#[derive(Debug, Default)]
pub(super) struct Devx {
    /// Set if GET_CONTEXT asked for it.
    granted: OnceLock<()>,
    objects: Table<queues::Object>,
    /// By number, which is also the handle.
    umems: Table<umem::Umem>,
}

impl Devx {
    pub(super) fn grant(&self) {
        _ = self.granted.set(());
    }

    fn check(&self) -> Result<()> {
        self.granted.get().copied().ok_or(Errno::INVAL)
    }
}

/// `MLX5_IB_UAPI_DEVX_CR_EV_CH_FLAGS_OMIT_DATA`
const OMIT_DATA: u64 = 1;
/// Number of the event queue of vector 0.
const EQN: u32 = 7;

/// Event queues, one for each completion vector.
fn is_event_queue(eqn: u32) -> bool {
    (EQN..EQN + VECTORS).contains(&eqn)
}

/// A handle of an attribute.
fn handle(call: &Call<'_>, id: u16) -> Result<u32> {
    u32::try_from(call.number(id)?).map_err(|_| Errno::NOENT)
}

/// Ends an object.
///
/// # Errors
/// `ENOENT` if it is not there, `EBUSY` if another object uses it.
fn remove<T>(objects: &Table<T>, handle: u32) -> Result<()> {
    match objects.remove(handle) {
        Err(Errno::INVAL) => Err(Errno::NOENT),
        removed => removed.map(drop),
    }
}

impl Context {
    /// Runs a method of DevX.
    ///
    /// # Errors
    /// The `errno` of the kernel. `EREMOTEIO` or `EOPNOTSUPP` if the firmware refuses, whose status is in the answer then.
    pub(super) fn devx(&self, call: &Call<'_>, object: u16, method: u16) -> Result<()> {
        self.devx.check()?;
        match (object, method) {
            (abi::MLX5_IB_OBJECT_DEVX, abi::MLX5_IB_METHOD_DEVX_OTHER) => {
                let (input, output) =
                    (abi::MLX5_IB_ATTR_DEVX_OTHER_CMD_IN, abi::MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT);
                run(call, input, output, |input, response| self.general(input, response))
            }
            (abi::MLX5_IB_OBJECT_DEVX, abi::MLX5_IB_METHOD_DEVX_QUERY_UAR) => {
                // Programs name pages by the card's numbers.
                let page = handle(call, abi::MLX5_IB_ATTR_DEVX_QUERY_UAR_USER_IDX)?;
                call.put(abi::MLX5_IB_ATTR_DEVX_QUERY_UAR_DEV_IDX, &page)
            }
            (abi::MLX5_IB_OBJECT_DEVX, abi::MLX5_IB_METHOD_DEVX_QUERY_EQN) => {
                let vector = handle(call, abi::MLX5_IB_ATTR_DEVX_QUERY_EQN_USER_VEC)?;
                let eqn = EQN.checked_add(vector).filter(|&eqn| is_event_queue(eqn)).ok_or(Errno::NOENT)?;
                call.put(abi::MLX5_IB_ATTR_DEVX_QUERY_EQN_DEV_EQN, &eqn)
            }
            (abi::MLX5_IB_OBJECT_DEVX, abi::MLX5_IB_METHOD_DEVX_SUBSCRIBE_EVENT) => self.subscribe(call),
            (abi::MLX5_IB_OBJECT_DEVX_OBJ, abi::MLX5_IB_METHOD_DEVX_OBJ_CREATE) => self.create_object(call),
            (abi::MLX5_IB_OBJECT_DEVX_OBJ, abi::MLX5_IB_METHOD_DEVX_OBJ_DESTROY) => {
                let handle = handle(call, abi::MLX5_IB_ATTR_DEVX_OBJ_DESTROY_HANDLE)?;
                remove(&self.devx.objects, handle)
            }
            (abi::MLX5_IB_OBJECT_DEVX_OBJ, abi::MLX5_IB_METHOD_DEVX_OBJ_MODIFY) => {
                let handle = handle(call, abi::MLX5_IB_ATTR_DEVX_OBJ_MODIFY_HANDLE)?;
                let (input, output) =
                    (abi::MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_IN, abi::MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_OUT);
                let object = self.devx.objects.get(handle).map_err(|_| Errno::NOENT)?;
                run(call, input, output, |input, _| self.modify_object(&object, input))
            }
            (abi::MLX5_IB_OBJECT_DEVX_OBJ, abi::MLX5_IB_METHOD_DEVX_OBJ_QUERY) => self.query_object(call),
            (abi::MLX5_IB_OBJECT_DEVX_UMEM, abi::MLX5_IB_METHOD_DEVX_UMEM_REG) => self.register_umem(call),
            (abi::MLX5_IB_OBJECT_DEVX_UMEM, abi::MLX5_IB_METHOD_DEVX_UMEM_DEREG) => {
                let handle = handle(call, abi::MLX5_IB_ATTR_DEVX_UMEM_DEREG_HANDLE)?;
                remove(&self.devx.umems, handle)
            }
            (abi::MLX5_IB_OBJECT_DEVX_ASYNC_EVENT_FD, abi::MLX5_IB_METHOD_DEVX_ASYNC_EVENT_FD_ALLOC) => {
                self.alloc_event_fd(call)
            }
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    fn create_object(&self, call: &Call<'_>) -> Result<()> {
        let (input, output) =
            (abi::MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN, abi::MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT);
        let mut created = None;
        run(call, input, output, |input, response| {
            let object = queues::create(self, input)?;
            response.set_number(object.number());
            created = Some(object);
            Ok(())
        })?;
        let handle = self.new_handle();
        call.put_handle(abi::MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE, handle)?;
        if let Some(object) = created {
            self.devx.objects.add(handle, Arc::new(object));
        }
        Ok(())
    }

    /// QUERY of an object of DevX, or of a queue pair of verbs.
    fn query_object(&self, call: &Call<'_>) -> Result<()> {
        let handle = handle(call, abi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_HANDLE)?;
        let (input, output) =
            (abi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_IN, abi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_OUT);
        if let Ok(object) = self.devx.objects.get(handle) {
            return run(call, input, output, |input, response| object.query(self.hca, input, response));
        }
        let qp = self.qps.get(handle).map_err(|_| Errno::NOENT)?;
        run(call, input, output, |input, response| queues::query_verbs_qp(self.hca, qp.qpn, input, response))
    }

    fn alloc_event_fd(&self, call: &Call<'_>) -> Result<()> {
        // Only events without the data of the event queue's entry.
        if call.number(abi::MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_FLAGS)? != OMIT_DATA {
            return Err(Errno::OPNOTSUPP);
        }
        let (pipe, program) = EventPipe::new(size_of::<u64>())?;
        let fd = program.as_raw_fd().cast_unsigned();
        call.put_handle(abi::MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_HANDLE, fd)?;
        self.add_channel(Events::Devx, Arc::new(pipe), program);
        Ok(())
    }

    fn subscribe(&self, call: &Call<'_>) -> Result<()> {
        let fd = call.number(abi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_HANDLE)?;
        let fd = RawFd::try_from(fd).map_err(|_| Errno::BADF)?;
        let pipe = self.channel(Events::Devx, fd)?;
        // An event to another descriptor, and events of the device.
        if call.number(abi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_NUM).is_ok() {
            return Err(Errno::OPNOTSUPP);
        }
        let object = match call.number(abi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_OBJ_HANDLE) {
            Ok(handle) => u32::try_from(handle).ok().and_then(|handle| self.devx.objects.get(handle).ok()),
            Err(_) => return Err(Errno::OPNOTSUPP),
        };
        let object = object.ok_or(Errno::NOENT)?;
        let cookie = call.number(abi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_COOKIE).unwrap_or_default();
        let list = call.bytes(abi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_TYPE_NUM_LIST)?;
        let (kinds, rest) = list.as_chunks();
        let kinds: Vec<_> = kinds.iter().map(|kind| u16::from_ne_bytes(*kind)).collect();
        if !rest.is_empty() || kinds.is_empty() || !kinds.iter().all(|kind| object.events().contains(kind)) {
            return Err(Errno::INVAL);
        }
        kinds.iter().for_each(|&kind| object.source().subscribe(EventKind::Devx(kind), &pipe, cookie));
        Ok(())
    }
}

/// Runs a command of the attribute `input` by `firmware`, and writes the answer to the attribute `output`.
///
/// # Errors
/// `EREMOTEIO` or `EOPNOTSUPP` if it is refused. The answer has the status then.
fn run(
    call: &Call<'_>,
    input: u16,
    output: u16,
    firmware: impl FnOnce(&[u8], &mut Response) -> std::result::Result<(), Refusal>,
) -> Result<()> {
    let bytes = call.bytes(input)?;
    let mut response = Response::new(call.room(output)?);
    let done = firmware::check_lengths(&bytes, &response).and_then(|()| firmware(&bytes, &mut response));
    if let Err(refusal) = &done {
        log!("DevX: {}: {refusal}", firmware::opcode(&bytes).name());
        response.refuse(refusal);
    }
    call.put_bytes(output, response.bytes())?;
    done.map_err(|refusal| refusal.errno())
}

#[cfg(test)]
mod tests;
