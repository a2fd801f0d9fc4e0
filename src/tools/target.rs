//! The GPU under test: opening the library, allocating, and telling what was found.

use gdrcopy::{BackendKind, Gdr, GpuBuffer, Mapping, MappingType, Pin};

use super::tools_shared::{Failure, Result};
use super::tools_shared::{Common, Memory};
use super::tools_shared::{Output, say};
use super::tools_shared::Setup;

/// The opened library and the chosen GPU.
pub(super) struct Target {
    pub(super) gdr: Gdr,
    pub(super) gpu: i32,
    pub(super) setup: Setup,
}

/// Memory that is mapped. Fields in the order in which they must go.
pub(super) struct Mapped {
    pub(super) mapping: Mapping,
    pub(super) pin: Pin,
    pub(super) buffer: GpuBuffer,
}

impl Target {
    /// Opens the library and lists the GPUs.
    pub(super) fn open(common: &Common, output: &Output) -> Result<Self> {
        let builder = common.backend.into_iter().fold(Gdr::builder(), |builder, kind| builder.backend(kind));
        let gdr = builder.open()?;
        let gpus = gdr.gpus()?;
        for gpu in &gpus {
            let bus = gpu.pci.split_once('.').map_or(&*gpu.pci, |(bus, _)| bus);
            say!(output, "GPU id:{}; name: {}; Bus id: {bus}", gpu.ordinal, gpu.name)?;
        }
        let gpu = common.gpu;
        if gdr.backend() != BackendKind::Host && gpus.iter().all(|found| found.ordinal != gpu) {
            return Err(Failure::Usage(format!("there is no GPU {gpu}; CUDA shows {} of them", gpus.len())));
        }
        say!(output, "selecting device {gpu}")?;
        let setup = Setup::of(&gdr, &gpus, gpu);
        setup.tell(output)?;
        Ok(Self { setup, gdr, gpu })
    }

    /// Allocates and tells where.
    pub(super) fn allocate(&self, len: usize, memory: Memory, output: &Output) -> Result<GpuBuffer> {
        let buffer = self.gdr.alloc_with(self.gpu, len, memory.alloc.kind())?;
        say!(output, "gpu alloc fn: {}", memory.alloc.name())?;
        say!(output, "device ptr: {:#x}", buffer.addr())?;
        say!(output, "allocated size: {len}")?;
        Ok(buffer)
    }

    /// Pins and maps, and tells what that gave.
    pub(super) fn map(&self, buffer: GpuBuffer, memory: Memory, output: &Output) -> Result<Mapped> {
        let pin = buffer.pin()?;
        let mapping = pin.map_as(memory.mapping.request())?;
        let info = pin.info();
        let skip = pin.addr() - info.va;
        let write_combining = mapping.kind() == MappingType::WriteCombining;
        say!(output, "map_d_ptr: {:#x}", mapping.as_ptr().addr() as u64 - skip)?;
        say!(output, "info.va: {:x}", info.va)?;
        say!(output, "info.mapped_size: {}", info.mapped_size)?;
        say!(output, "info.page_size: {}", info.page_size)?;
        say!(output, "info.mapped: {}", u8::from(info.mapped))?;
        say!(output, "info.wc_mapping: {}", u8::from(write_combining))?;
        say!(output, "page offset: {skip}")?;
        say!(output, "user-space pointer: {:#x}", mapping.as_ptr().addr())?;
        say!(output, "mapping type: {}", type_name(mapping.kind()))?;
        Ok(Mapped { mapping, pin, buffer })
    }
}

impl Mapped {
    /// Gives everything back, telling what went wrong.
    pub(super) fn release(self, output: &Output) -> Result<()> {
        say!(output, "unmapping buffer")?;
        self.mapping.unmap()?;
        say!(output, "unpinning buffer")?;
        self.pin.unpin()?;
        drop(self.buffer);
        Ok(())
    }
}

/// The names of GDRCopy's `gdr_get_mapping_type_string`.
pub(super) fn type_name(kind: MappingType) -> &'static str {
    match kind {
        MappingType::WriteCombining => "Write Combining",
        MappingType::Cached => "Caching",
        MappingType::Device => "Device",
        _ => "unknown",
    }
}
