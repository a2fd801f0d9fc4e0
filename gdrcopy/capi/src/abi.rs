//! The types and numbers of `gdrapi.h`, checked against a C compiler in `tests/it/c_abi.rs`.

use std::ffi::{c_uint, c_ulong};

/// Version of the interface, as in `GDR_API_MAJOR_VERSION` and `GDR_API_MINOR_VERSION`.
pub const VERSION: (u16, u16) = (2, 6);

/// `GPU_PAGE_SIZE`, bytes.
pub const GPU_PAGE_SIZE: usize = 1 << 16;

/// `GDR_MAPPING_TYPE_NONE`: not mapped. The other types are those of [`gdrcopy::MappingType`].
pub const GDR_MAPPING_TYPE_NONE: c_uint = 0;

/// What `gdr_t` points to: nothing. The "pointer" is a number that is never used twice.
#[repr(C)]
#[derive(Debug)]
pub struct gdr {
    _opaque: [u8; 0],
}

/// An opened library.
#[expect(non_camel_case_types, reason = "the name in C")]
pub type gdr_t = *mut gdr;

/// A pin; the number is never used twice, and 0 is never one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct gdr_mh_t {
    /// The handle.
    pub h: c_ulong,
}

/// What the symbol `gdr_get_info` fills, for programs built before GDRCopy 2.4: 40 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct gdr_info_v1_t {
    /// First GPU address that is pinned.
    pub va: u64,
    /// Bytes pinned from there.
    pub mapped_size: u64,
    /// Granularity of pins, bytes.
    pub page_size: u32,
    _padding: u32,
    /// Always 0.
    pub tm_cycles: u64,
    /// Always 0.
    pub cycles_per_ms: u32,
    /// Two bit fields of C: bit 0 is `mapped`, bit 1 is `wc_mapping`.
    pub bits: u32,
}

/// What `gdr_get_info_v2` fills: 48 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct gdr_info_v2_t {
    /// The part that is as in version 1.
    pub v1: gdr_info_v1_t,
    /// The type of the mapping; [`GDR_MAPPING_TYPE_NONE`] without one.
    pub mapping_type: c_uint,
    _padding: u32,
}

/// `mapped` in [`gdr_info_v1_t::bits`].
pub const INFO_MAPPED: u32 = 1;
/// `wc_mapping` in [`gdr_info_v1_t::bits`].
pub const INFO_WC_MAPPING: u32 = 2;

impl gdr_info_v2_t {
    pub(crate) fn new(pinned: gdrcopy::PinInfo, mapping: Option<gdrcopy::MappingType>) -> Self {
        let wc = if mapping == Some(gdrcopy::MappingType::WriteCombining) { INFO_WC_MAPPING } else { 0 };
        let mapped = if mapping.is_some() { INFO_MAPPED } else { 0 };
        Self {
            v1: gdr_info_v1_t {
                va: pinned.va,
                mapped_size: pinned.mapped_size as u64,
                page_size: pinned.page_size,
                bits: mapped | wc,
                ..gdr_info_v1_t::default()
            },
            mapping_type: mapping.map_or(GDR_MAPPING_TYPE_NONE, |kind| kind as c_uint),
            ..Self::default()
        }
    }
}

// A handle is a counter and an index in one `unsigned long`.
const _: () = assert!(size_of::<c_ulong>() == 8, "64-bit platforms only, as with GDRCopy");
