//! Reads the resource manager's handles of an allocation from its CUDA IPC handle.
//!
//! The layout is not documented. Measured with the driver 580.159.04 (H200): client handle at byte 48, object
//! handle at 52, size at 16, size of the block in pages of 4 KiB at 24, offset inside the block at 28. Each
//! number is checked against CUDA's information about the allocation, and the mapping is compared afterwards.

use crate::cuda::PointerInfo;
use crate::error::{Error, Result};

/// The block that contains an allocation.
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
