//! The types of this crate are those of the header, as the C compiler sees them.

use std::collections::BTreeMap;
use std::mem::offset_of;

use crate::common::Program;
use gdrapi::{
    GDR_MAPPING_TYPE_NONE, GPU_PAGE_SIZE, INFO_MAPPED, INFO_WC_MAPPING, VERSION, gdr_info_v1_t,
    gdr_info_v2_t, gdr_mh_t, gdr_t,
};
use gdrcopy::{Attribute, MappingType, PinFlags};

#[test]
fn layouts_and_numbers_agree() {
    let output = Program::compile("layout").run::<&str>(&[], &[]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut in_c: BTreeMap<&str, usize> = text
        .lines()
        .map(|line| line.rsplit_once(' ').expect("a name and a number"))
        .map(|(name, number)| (name, number.parse().expect("a number")))
        .collect();
    let in_v1 = |offset: usize| offset_of!(gdr_info_v2_t, v1) + offset;
    let here = [
        ("sizeof gdr_t", size_of::<gdr_t>()),
        ("sizeof gdr_mh_t", size_of::<gdr_mh_t>()),
        ("sizeof gdr_info_v2_t", size_of::<gdr_info_v2_t>()),
        ("sizeof gdr_mapping_type_t", 4),
        ("sizeof gdr_attr_t", 4),
        ("offsetof gdr_mh_t h", offset_of!(gdr_mh_t, h)),
        ("offsetof gdr_info_v2_t va", in_v1(offset_of!(gdr_info_v1_t, va))),
        ("offsetof gdr_info_v2_t mapped_size", in_v1(offset_of!(gdr_info_v1_t, mapped_size))),
        ("offsetof gdr_info_v2_t page_size", in_v1(offset_of!(gdr_info_v1_t, page_size))),
        ("offsetof gdr_info_v2_t tm_cycles", in_v1(offset_of!(gdr_info_v1_t, tm_cycles))),
        ("offsetof gdr_info_v2_t cycles_per_ms", in_v1(offset_of!(gdr_info_v1_t, cycles_per_ms))),
        ("offsetof gdr_info_v2_t mapping_type", offset_of!(gdr_info_v2_t, mapping_type)),
        ("GDR_API_MAJOR_VERSION", VERSION.0.into()),
        ("GDR_API_MINOR_VERSION", VERSION.1.into()),
        ("GPU_PAGE_SIZE", GPU_PAGE_SIZE),
        ("GDR_MAPPING_TYPE_NONE", GDR_MAPPING_TYPE_NONE as usize),
        ("GDR_MAPPING_TYPE_WC", MappingType::WriteCombining as usize),
        ("GDR_MAPPING_TYPE_CACHING", MappingType::Cached as usize),
        ("GDR_MAPPING_TYPE_DEVICE", MappingType::Device as usize),
        ("GDR_PIN_FLAG_FORCE_PCIE", PinFlags::FORCE_PCIE.bits() as usize),
        ("GDR_ATTR_USE_PERSISTENT_MAPPING", Attribute::UsePersistentMapping as usize),
        ("GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE", Attribute::SupportPinFlagForcePcie as usize),
        ("GDR_ATTR_USING_DMA_BUF_MMAP", Attribute::UsingDmaBufMmap as usize),
        ("mapped", INFO_MAPPED as usize),
        ("wc_mapping", INFO_WC_MAPPING as usize),
    ];
    for (name, number) in here {
        assert_eq!(in_c.remove(name), Some(number), "{name}");
    }
    assert!(in_c.is_empty(), "printed by layout.c only: {in_c:?}");
    // As in GDRCopy 2.6 on 64-bit platforms.
    assert_eq!((size_of::<gdr_info_v1_t>(), size_of::<gdr_info_v2_t>()), (40, 48));
    assert_eq!(offset_of!(gdr_info_v1_t, bits), 36);
}
