//! The numbers and layouts of the module's interface.

use std::mem::offset_of;

use crate::gdrdrv_abi::*;

/// Compiled from gdrdrv.h 2.6 with a C compiler on x86-64.
#[test]
fn numbers_and_sizes_are_those_of_the_header() {
    let requests = [
        (PinBuffer::CODE, size_of::<PinBuffer>(), 0xC028_DA01, 40),
        (UnpinBuffer::CODE, size_of::<UnpinBuffer>(), 0xC008_DA02, 8),
        (GetCallbackFlag::CODE, size_of::<GetCallbackFlag>(), 0xC008_DA03, 16),
        (GetInfo::CODE, size_of::<GetInfo>(), 0xC008_DA04, 48),
        (GetInfoV2::CODE, size_of::<GetInfoV2>(), 0xC008_DA05, 48),
        (GetAttr::CODE, size_of::<GetAttr>(), 0xC008_DA06, 8),
        (PinBufferV2::CODE, size_of::<PinBufferV2>(), 0xC020_DA07, 32),
        (ReqMappingType::CODE, size_of::<ReqMappingType>(), 0xC008_DA08, 16),
        (PinDmaBuf::CODE, size_of::<PinDmaBuf>(), 0xC020_DAC0, 32),
        (GetVersion::CODE, size_of::<GetVersion>(), 0xC008_DAFF, 8),
    ];
    for (code, size, header_code, header_size) in requests {
        assert_eq!((code, size), (header_code, header_size), "{header_code:#x}");
    }
}

#[test]
fn fields_lie_where_the_header_puts_them() {
    assert_eq!(offset_of!(PinBuffer, size), 8);
    assert_eq!(offset_of!(PinBuffer, p2p_token), 16);
    assert_eq!(offset_of!(PinBuffer, va_space), 24);
    assert_eq!(offset_of!(PinBuffer, handle), 32);
    assert_eq!(offset_of!(GetCallbackFlag, flag), 8);
    assert_eq!(offset_of!(GetInfo, va), 8);
    assert_eq!(offset_of!(GetInfo, mapped_size), 16);
    assert_eq!(offset_of!(GetInfo, page_size), 24);
    assert_eq!(offset_of!(GetInfo, tsc_khz), 28);
    assert_eq!(offset_of!(GetInfo, tm_cycles), 32);
    assert_eq!(offset_of!(GetInfo, mapped), 40);
    assert_eq!(offset_of!(GetInfo, wc_mapping), 44);
    assert_eq!(offset_of!(GetInfoV2, page_size), 24);
    assert_eq!(offset_of!(GetInfoV2, mapping_type), 40);
    assert_eq!(offset_of!(GetAttr, val), 4);
    assert_eq!(offset_of!(PinBufferV2, flags), 16);
    assert_eq!(offset_of!(PinBufferV2, handle), 24);
    assert_eq!(offset_of!(ReqMappingType, mapping_type), 8);
    assert_eq!(offset_of!(GetVersion, minimum_library), 4);
}
