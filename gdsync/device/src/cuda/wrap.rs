//! Memory of the application, told apart by what CUDA knows of its address.

use gdrcopy::cuda::raw::layout::pointer_attribute;
use gdrcopy::cuda::raw::pointer_info;
use gdrcopy::cuda::{MemoryKind, PointerInfo};

use super::{Gpu, Registered};
use crate::error::{Error, Result};
use crate::memory::Memory;

impl Gpu {
    /// Memory of the application by its address, told apart by what CUDA knows of it:
    ///
    /// | memory | what the result is |
    /// |---|---|
    /// | `cudaMalloc`; `cuMemCreate`, exportable | GPU memory, mapped for the CPU |
    /// | `cudaHostAlloc`, `cudaHostRegister` | host memory, which GPUs reach already |
    /// | `cudaMallocAsync`; what cannot be mapped here | GPU memory that copy engines move and the CPU does not reach: [`Memory::is_mapped`] |
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an address that CUDA does not know, memory of another GPU, and a range that leaves its
    /// allocation; [`Error::Unsupported`] for managed memory; [`Error::Cuda`].
    ///
    /// # Safety
    /// The memory must stay allocated until every clone of the result is gone, and no Rust reference to it may be used
    /// meanwhile.
    pub unsafe fn wrap(&self, addr: u64, len: usize) -> Result<Memory> {
        let current = self.enter()?;
        let info = pointer_info(self.api(), addr).map_err(Error::cuda("asking CUDA what an address is"))?;
        match info.kind {
            MemoryKind::Malloc | MemoryKind::Vmm | MemoryKind::Pool => {
                if info.device != self.ordinal() {
                    let value = format!("memory of GPU {} for GPU {}", info.device, self.ordinal());
                    return Err(Error::invalid("GPU", value, "the GPU that the memory is on"));
                }
                check_range(&info, addr, len)?;
                drop(current);
                Ok(self.wrap_own(&info, addr, len))
            }
            MemoryKind::Host => {
                check_range(&info, addr, len)?;
                let host = self.attribute(pointer_attribute::HOST_POINTER, addr)?;
                let device = self.attribute(pointer_attribute::DEVICE_POINTER, addr)?;
                let host = usize::try_from(host).map_err(|_| unknown(addr))?;
                let ptr = std::ptr::with_exposed_provenance_mut(host);
                // SAFETY: CUDA knows the range as host memory; the caller promised the rest.
                unsafe { Memory::known(ptr, len, Registered::of_application(device)) }
            }
            MemoryKind::Managed => Err(Error::Unsupported {
                what: "managed memory",
                by: "a memory region, whose bytes must stay where they are",
                fix: "use memory of cudaMalloc, or host memory of cudaHostAlloc",
            }),
            _ => Err(unknown(addr)),
        }
    }

    /// Memory of this GPU, mapped if that can be done.
    fn wrap_own(&self, info: &PointerInfo, addr: u64, len: usize) -> Memory {
        let mapped = self.gdr().and_then(|gdr| gdr.map(addr, len).map_err(Error::cuda("mapping GPU memory")));
        match mapped {
            Ok(mapping) => Memory::on_gpu(self, mapping),
            Err(error) => {
                tracing::info!(addr, len, kind = ?info.kind, %error, "GPU memory without a mapping: copy engines move it");
                Memory::unmapped(self, addr, len, error.to_string())
            }
        }
    }

    /// An attribute of an address, of eight bytes.
    fn attribute(&self, attribute: u32, addr: u64) -> Result<u64> {
        let mut value = 0u64;
        // SAFETY: a place for the answer, which has eight bytes.
        unsafe { self.api().pointer_get_attribute((&raw mut value).cast(), attribute, addr) }
            .map_err(Error::cuda("finding host memory on the GPU"))?;
        Ok(value)
    }
}

fn unknown(addr: u64) -> Error {
    Error::invalid(
        "address",
        format!("{addr:#x}"),
        "live memory of cudaMalloc, cuMemCreate, cudaMallocAsync or cudaHostRegister; for other host memory, Memory::from_raw",
    )
}

/// Checks that a range lies in its allocation. Old drivers do not tell the bounds of some.
fn check_range(info: &PointerInfo, addr: u64, len: usize) -> Result<()> {
    let fits = || {
        let offset = usize::try_from(addr.checked_sub(info.base)?).ok()?;
        offset.checked_add(len).filter(|&end| end <= info.size)
    };
    if len > 0 && (info.size == 0 || fits().is_some()) {
        return Ok(());
    }
    let allocation =
        format!("{len} bytes at {addr:#x}, in an allocation of {} bytes at {:#x}", info.size, info.base);
    Err(Error::invalid("range", allocation, "at least one byte, inside one allocation"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_must_lie_in_its_allocation() {
        let info = PointerInfo {
            kind: MemoryKind::Malloc,
            device: 0,
            base: 0x1000,
            size: 0x100,
            buffer_id: 1,
            exportable: false,
        };
        for (addr, len, ok) in [
            (0x1000, 0x100, true),
            (0x10ff, 1, true),
            (0x1000, 0x101, false),
            (0x10ff, 2, false),
            (0xfff, 1, false),
            (0x1000, 0, false),
            (0x1001, usize::MAX, false),
        ] {
            assert_eq!(check_range(&info, addr, len).is_ok(), ok, "{addr:#x} {len:#x}");
        }
        check_range(&PointerInfo { size: 0, ..info }, 0x5000, 10).unwrap();
    }
}
