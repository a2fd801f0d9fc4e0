//! A client of the resource manager, and its objects.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::abi::{self, Class, Control, Escape, NvStatus};
use crate::cuda::PointerInfo;
use crate::error::{Error, Result};
use crate::fork::Owner;
use crate::system::Kernel;

/// The control device.
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

    /// Imports the object that CUDA exported as a file descriptor, under `device`.
    pub(crate) fn import(self: &Arc<Self>, device: u32, fd: BorrowedFd<'_>) -> Result<Object> {
        let mut import = abi::Import {
            fd: fd.as_raw_fd(),
            kind: abi::Import::RM,
            device,
            parent: device,
            ..Default::default()
        };
        // SAFETY: no pointers.
        unsafe { self.control(self.handle, &mut import) }?;
        Ok(self.adopt(device, import.object))
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

/// Opens a device node of the driver.
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

// The layout of a CUDA IPC handle is not documented. Measured with the driver 580.159.04 (H200): client handle at byte 48, object handle
// at 52, size at 16, size of the block in pages of 4 KiB at 24, offset inside the block at 28. Each number is checked against CUDA's
// information about the allocation, and the mapping is compared afterwards.

/// The block that contains an allocation, as its CUDA IPC handle names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// CUDA's client.
    pub(crate) client: u32,
    /// The block in it.
    pub(crate) object: u32,
    /// Address of the block.
    pub(crate) base: u64,
    /// Size of the block, bytes.
    pub(crate) size: u64,
}

/// Pages in which a handle counts, bytes.
const PAGE: u64 = 4096;
/// Alignment of blocks, bytes: the GPU's pages.
const GRAIN: u64 = crate::types::GPU_PAGE;
/// Handles of clients of user space begin here and are fewer than 2^20: `RS_CLIENT_HANDLE_BASE` and
/// `RS_CLIENT_HANDLE_MAX` in `resserv.h` of the open kernel modules 580.142.
const CLIENTS: u32 = 0xc1d0_0000;

impl Block {
    /// Reads a handle and checks every number against CUDA's.
    pub(crate) fn from_ipc(handle: &[u8; 64], memory: &PointerInfo) -> Result<Self> {
        let word = |at: usize| {
            let bytes = handle[at..].first_chunk().expect("inside the handle");
            u32::from_le_bytes(*bytes)
        };
        let size = u64::from(word(16)) | u64::from(word(20)) << 32;
        let (client, object) = (word(48), word(52));
        let (block, offset) = (u64::from(word(24)) * PAGE, u64::from(word(28)));
        let base = memory.base.checked_sub(offset);

        let wrong = if client & 0xfff0_0000 != CLIENTS {
            Some("no client handle where one was expected")
        } else if object == 0 {
            Some("no object handle where one was expected")
        } else if size < memory.size as u64 || size > block {
            Some("the size is not that of the allocation")
        } else if offset.checked_add(memory.size as u64).is_none_or(|end| end > block) {
            Some("the allocation does not lie inside its block")
        } else if base.is_none_or(|base| !base.is_multiple_of(GRAIN)) {
            Some("the block does not begin at a GPU page")
        } else {
            None
        };
        match (wrong, base) {
            (None, Some(base)) => Ok(Self { client, object, base, size: block }),
            (wrong, _) => Err(Error::Unsupported {
                what: format!(
                    "the IPC handle of {:#x} ({}: client {client:#x}, object {object:#x}, size {size}, \
                     block {block}, offset {offset}, CUDA's size {})",
                    memory.base,
                    wrong.unwrap_or_default(),
                    memory.size
                ),
                by: "the rm backend: this driver lays handles out differently",
                fix: "use cuMemCreate memory or another backend (GDRCOPY_BACKEND), and report the driver's version",
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::MemoryKind;

    /// A handle as an H200 gives it, and what CUDA says of the same memory.
    fn handle() -> ([u8; 64], PointerInfo) {
        let mut handle = [0; 64];
        handle[16..24].copy_from_slice(&1000u64.to_le_bytes());
        handle[24..28].copy_from_slice(&512u32.to_le_bytes());
        handle[28..32].copy_from_slice(&0x1200u32.to_le_bytes());
        handle[48..52].copy_from_slice(&0xc1d0_0042u32.to_le_bytes());
        handle[52..56].copy_from_slice(&0x5c00_0009u32.to_le_bytes());
        let memory = PointerInfo {
            kind: MemoryKind::Malloc,
            device: 0,
            base: 0x7f00_0020_1200,
            size: 1000,
            buffer_id: 5,
            exportable: false,
        };
        (handle, memory)
    }

    #[test]
    fn a_handle_names_the_block() {
        let (handle, memory) = handle();
        let block = Block::from_ipc(&handle, &memory).unwrap();
        let wanted =
            Block { client: 0xc1d0_0042, object: 0x5c00_0009, base: 0x7f00_0020_0000, size: 2 << 20 };
        assert_eq!(block, wanted);
    }

    #[test]
    fn a_handle_that_disagrees_with_cuda_is_refused() {
        let (good, memory) = handle();
        let changed: [(usize, u32, &str); 9] = [
            (48, 0xc1e0_0042, "no client"),
            (48, 0, "no client"),
            (52, 0, "no object"),
            (16, 999, "size"),
            (20, 1, "size"),
            (24, 0, "size"),
            (24, 1, "inside its block"),
            (28, 0x1300, "GPU page"),
            (28, (2 << 20) - 500, "inside its block"),
        ];
        for (at, value, words) in changed {
            let mut handle = good;
            handle[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let error = Block::from_ipc(&handle, &memory).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("differently"), "{at} {value:#x}: {error}");
        }
        // Any other layout: the same numbers elsewhere.
        for turn in [4, 8, 16, 32] {
            let mut handle = good;
            handle.rotate_left(turn);
            assert!(Block::from_ipc(&handle, &memory).is_err(), "{turn}");
        }
    }
}
