//! A client of the resource manager, and its objects.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::abi::{self, Class, Control, Escape, NvStatus};
use crate::error::{Error, Result};
use crate::fork::Owner;
use crate::system::Kernel;

const CONTROL: &CStr = c"/dev/nvidiactl";

/// An open control device with a root client, the parent of all other objects.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) kernel: Arc<dyn Kernel>,
    control: OwnedFd,
    handle: u32,
    owner: Owner,
}

impl Client {
    pub(crate) fn open(kernel: Arc<dyn Kernel>) -> Result<Arc<Self>> {
        let control = open_node(&*kernel, CONTROL)?;
        let mut root = abi::Alloc { class: abi::ROOT_CLIENT, ..Default::default() };
        // SAFETY: the class has no parameters.
        let status = unsafe { escape(&*kernel, control.as_fd(), &mut root) }?;
        accept(status, abi::Alloc::NAME)?;
        Ok(Arc::new(Self { kernel, control, handle: root.object, owner: Owner::this_process() }))
    }

    pub(crate) fn handle(&self) -> u32 {
        self.handle
    }

    pub(crate) fn control_fd(&self) -> i32 {
        self.control.as_raw_fd()
    }

    /// Returns an error in a child forked since.
    pub(crate) fn check_owner(&self) -> Result<()> {
        self.owner.check()
    }

    /// A call on the control device.
    ///
    /// # Safety
    /// Pointers in `arg` must be valid for the call.
    pub(crate) unsafe fn escape<E: Escape>(&self, arg: &mut E) -> Result<NvStatus> {
        // SAFETY: the caller guarantees the pointers.
        unsafe { escape(&*self.kernel, self.control.as_fd(), arg) }
    }

    /// A control call on an object.
    ///
    /// # Safety
    /// Pointers in `params` must be valid for the call.
    pub(crate) unsafe fn control<C: Control>(&self, object: u32, params: &mut C) -> Result<()> {
        let mut call = abi::ControlCall {
            client: self.handle,
            object,
            command: C::COMMAND,
            params: address(params),
            params_size: size(params),
            ..Default::default()
        };
        // SAFETY: `params` has the command's layout and outlives the call; the caller guarantees the rest.
        let status = unsafe { self.escape(&mut call) }?;
        accept(status, C::NAME)
    }

    /// Allocates an object under `parent`.
    pub(crate) fn alloc<C: Class>(self: &Arc<Self>, parent: u32, params: &mut C) -> Result<Object> {
        let mut alloc = abi::Alloc {
            root: self.handle,
            parent,
            class: C::CLASS,
            params: address(params),
            params_size: size(params),
            ..Default::default()
        };
        // SAFETY: `params` has the class's layout and outlives the call.
        let status = unsafe { self.escape(&mut alloc) }?;
        accept(status, C::NAME)?;
        Ok(self.adopt(parent, alloc.object))
    }

    /// Duplicates the object of another client under `parent`. The duplicate keeps the memory.
    pub(crate) fn dup(self: &Arc<Self>, parent: u32, client: u32, object: u32) -> Result<Object> {
        let mut dup = abi::Dup {
            client: self.handle,
            parent,
            source_client: client,
            source_object: object,
            ..Default::default()
        };
        // SAFETY: no pointers.
        let status = unsafe { self.escape(&mut dup) }?;
        accept(status, abi::Dup::NAME)?;
        Ok(self.adopt(parent, dup.object))
    }

    fn adopt(self: &Arc<Self>, parent: u32, handle: u32) -> Object {
        Object { client: self.clone(), parent, handle, live: true }
    }

    fn free(&self, parent: u32, object: u32) -> Result<()> {
        let mut free = abi::Free { root: self.handle, parent, object, ..Default::default() };
        // SAFETY: no pointers.
        let status = unsafe { self.escape(&mut free) }?;
        accept(status, abi::Free::NAME)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Forked children share the file, but the client is the parent's.
        if self.owner.is_caller()
            && let Err(error) = self.free(0, self.handle)
        {
            tracing::warn!(%error, "resource-manager client {:#x} not freed", self.handle);
        }
    }
}

/// An object of a client; freed when dropped.
#[derive(Debug)]
pub(crate) struct Object {
    client: Arc<Client>,
    parent: u32,
    handle: u32,
    live: bool,
}

impl Object {
    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    pub(crate) fn handle(&self) -> u32 {
        self.handle
    }

    /// Frees the object, and returns the error that a drop can only log.
    pub(crate) fn free(mut self) -> Result<()> {
        self.release()
    }

    fn release(&mut self) -> Result<()> {
        // In a forked child the object is the parent's.
        if !std::mem::take(&mut self.live) || !self.client.owner.is_caller() {
            return Ok(());
        }
        self.client.free(self.parent, self.handle)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            tracing::warn!(%error, "resource-manager object {:#x} not freed", self.handle);
        }
    }
}

pub(crate) fn open_node(kernel: &dyn Kernel, path: &CStr) -> Result<OwnedFd> {
    kernel.open(path).map_err(|error| {
        let fix = match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => {
                "load the NVIDIA driver and make its nodes (nvidia-modprobe -u -c=0), or give the container the \
                 GPU (--gpus all, or --device for this node)"
            }
            Some(libc::EACCES | libc::EPERM) => {
                "this user needs read and write permission on the node (or the container its device cgroup)"
            }
            Some(libc::EMFILE | libc::ENFILE) => "raise the limit on open files (ulimit -n); a mapping needs one",
            _ => "see the kernel's log for NVRM messages",
        };
        Error::sys(format!("open {}", path.to_string_lossy()), error, fix)
    })
}

/// Calls the driver; returns the resource manager's status from the structure.
///
/// # Safety
/// Pointers in `arg` must be valid for the call.
pub(crate) unsafe fn escape<E: Escape>(
    kernel: &dyn Kernel,
    fd: BorrowedFd<'_>,
    arg: &mut E,
) -> Result<NvStatus> {
    // SAFETY: `arg` has the layout of this request; the caller guarantees what it points to.
    unsafe { kernel.ioctl(fd, E::REQUEST, (&raw mut *arg).cast()) }.map_err(|error| {
        let fix = match error.raw_os_error() {
            Some(libc::EINVAL | libc::ENOTTY) => {
                "this driver's interface is not the one of versions 535 to 595; use another backend \
                 (GDRCOPY_BACKEND)"
            }
            _ => "see the kernel's log for NVRM messages",
        };
        Error::sys(format!("ioctl ({})", E::NAME), error, fix)
    })?;
    Ok(NvStatus(arg.status()))
}

/// The error of a refused call.
pub(crate) fn refused(status: NvStatus, call: &'static str) -> Error {
    let (name, fix) = status.explain();
    Error::Rm { call, status: status.0, name, fix }
}

fn accept(status: NvStatus, call: &'static str) -> Result<()> {
    if status == NvStatus::OK { Ok(()) } else { Err(refused(status, call)) }
}

/// The address of parameters, as the driver's structures hold it.
pub(crate) fn address<T>(params: &mut T) -> u64 {
    (&raw mut *params).expose_provenance() as u64
}

#[expect(clippy::cast_possible_truncation, reason = "parameters are below 4 KiB")]
fn size<T>(_: &T) -> u32 {
    size_of::<T>() as u32
}
