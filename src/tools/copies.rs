//! Copies by the routines that the options name.

use clap::Args;
use gdrcopy::copy::{self, Copier, Routine};
use gdrcopy::{Mapping, MappingType};
use serde::{Serialize, Serializer};

use super::tools_shared::{Failure, Result};

/// Which routines copy, where the mapping is write-combining.
#[derive(Args, Clone, Copy, Debug, Serialize)]
pub(super) struct Routines {
    /// Routine that writes: scalar, sse2, avx, avx512, movdir64b or neon [default: the best].
    #[arg(long, value_name = "ROUTINE")]
    #[serde(serialize_with = "name")]
    store: Option<Routine>,
    /// Routine that reads: scalar, sse2, sse41, avx, avx2, avx512 or neon [default: the best].
    #[arg(long, value_name = "ROUTINE")]
    #[serde(serialize_with = "name")]
    load: Option<Routine>,
}

fn name<S: Serializer>(routine: &Option<Routine>, to: S) -> std::result::Result<S::Ok, S::Error> {
    routine.map(Routine::name).serialize(to)
}

/// How to copy: as every user of the library does, or by chosen routines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copies(Option<Copier>);

impl Routines {
    /// The copies of these routines.
    pub(super) fn copies(self) -> Result<Copies> {
        if self.store.is_none() && self.load.is_none() {
            return Ok(Copies(None));
        }
        let best = Copier::best();
        let (store, load) = (self.store.unwrap_or(best.store()), self.load.unwrap_or(best.load()));
        let copier = Copier::new(store, load).ok_or_else(|| {
            let wrong = if store.supported() && store.stores() { load } else { store };
            Failure::Usage(format!("{wrong} cannot do this on this CPU"))
        })?;
        Ok(Copies(Some(copier)))
    }
}

impl Copies {
    /// Which routines write to and read from a mapping of this type.
    pub(super) fn describe(&self, kind: MappingType) -> String {
        match kind {
            MappingType::WriteCombining => {
                let copier = self.0.as_ref().unwrap_or(Copier::best());
                format!("{} to the GPU, {} from it", copier.store(), copier.load())
            }
            MappingType::Cached => "those of any memory; the mapping is cached".into(),
            _ => "aligned words; the mapping is of device memory".into(),
        }
    }

    /// As [`Mapping::write`].
    #[inline]
    pub(super) fn write(&self, mapping: &Mapping, offset: usize, data: &[u8]) -> gdrcopy::Result<()> {
        let Some(copier) = &self.0 else { return mapping.write(offset, data) };
        let dst = at(mapping, offset, data.len())?;
        // SAFETY: `at` has checked the range, and a slice cannot overlap a mapping.
        unsafe { copier.to_device(mapping.kind(), dst, data.as_ptr(), data.len()) };
        copy::store_fence(mapping.kind());
        Ok(())
    }

    /// As [`Mapping::read`].
    #[inline]
    pub(super) fn read(&self, mapping: &Mapping, offset: usize, out: &mut [u8]) -> gdrcopy::Result<()> {
        let Some(copier) = &self.0 else { return mapping.read(offset, out) };
        let src = at(mapping, offset, out.len())?;
        // SAFETY: as in `write`, the other way round.
        unsafe { copier.from_device(mapping.kind(), out.as_mut_ptr(), src, out.len()) };
        copy::load_fence(mapping.kind());
        Ok(())
    }
}

fn at(mapping: &Mapping, offset: usize, len: usize) -> gdrcopy::Result<*mut u8> {
    match offset.checked_add(len) {
        Some(end) if end <= mapping.len() => Ok(mapping.as_ptr().wrapping_add(offset)),
        _ => Err(gdrcopy::Error::OutOfBounds { offset, len, size: mapping.len() }),
    }
}
