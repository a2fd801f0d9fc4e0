//! The layouts of kernel interfaces: numbers that gcc printed on x86-64 for the headers that `src/backend/rm/abi.rs` and
//! `src/backend/gdrdrv/abi.rs` name.

use std::mem::offset_of;

use crate::gdrdrv_abi::{
    GetAttr, GetCallbackFlag, GetInfo, GetInfoV2, GetVersion, PinBuffer, PinBufferV2, PinDmaBuf,
    ReqMappingType, Request, UnpinBuffer,
};
use crate::rm_abi::*;

/// Checks sizes, and where fields lie.
macro_rules! layouts {
    ($($ty:ident $size:literal { $($field:ident $offset:literal),* $(,)? })*) => {$(
        assert_eq!(size_of::<$ty>(), $size, stringify!($ty));
        $(assert_eq!(offset_of!($ty, $field), $offset, "{}.{}", stringify!($ty), stringify!($field));)*
    )*};
}

#[test]
fn fields_lie_where_the_headers_put_them() {
    layouts! {
        Alloc 48 {
            root 0, parent 4, object 8, class 12, params 16, rights 24, params_size 32, flags 36, status 40,
        }
        Free 16 { root 0, parent 4, object 8, status 12 }
        ControlCall 32 { client 0, object 4, command 8, flags 12, params 16, params_size 24, status 28 }
        Dup 28 { client 0, parent 4, object 8, source_client 12, source_object 16, flags 20, status 24 }
        Map 56 {
            client 0, device 4, memory 8, offset 16, length 24, linear 32, status 40, flags 44, fd 48,
        }
        Unmap 32 { client 0, device 4, memory 8, linear 16, status 24, flags 28 }
        RegisterFd 4 { control_fd 0 }
        Card 72 {
            valid 0, domain 4, bus 8, slot 9, function 10, vendor 12, device 14, gpu_id 16, interrupt 20,
            registers 24, registers_size 32, framebuffer 40, framebuffer_size 48, minor 56, name 60,
        }
        Device 56 {
            instance 0, client_share 4, target_client 8, target_device 12, flags 16, va_size 24, va_start 32,
            va_limit 40, va_mode 48,
        }
        Subdevice 4 { instance 0 }
        IdInfo 32 { gpu_id 0, flags 4, device 8, subdevice 12, sli 16, board 20, gpu 24, numa 28 }
        GpuInfoEntry 8 { index 0, data 4 }
        GpuInfoQuery 16 { entries 0, list 8 }
        ConfidentialCompute 4 { client 0 }
        CcCapabilities 6 { cpu 0, gpus 1, environment 2, feature 3, dev_tools 4, multi_gpu 5 }

        PinBuffer 40 { size 8, p2p_token 16, va_space 24, handle 32 }
        UnpinBuffer 8 { handle 0 }
        GetCallbackFlag 16 { flag 8 }
        GetInfo 48 { va 8, mapped_size 16, page_size 24, tsc_khz 28, tm_cycles 32, mapped 40, wc_mapping 44 }
        GetInfoV2 48 { page_size 24, mapping_type 40 }
        GetAttr 8 { val 4 }
        PinBufferV2 32 { flags 16, handle 24 }
        ReqMappingType 16 { mapping_type 8 }
        PinDmaBuf 32 { flags 4, offset 8, size 16, handle 24 }
        GetVersion 8 { minimum_library 4 }
    }
}

#[test]
fn numbers_are_those_of_the_headers() {
    let numbers = [
        (Alloc::REQUEST, 0xc030_462b),
        (Free::REQUEST, 0xc010_4629),
        (ControlCall::REQUEST, 0xc020_462a),
        (Dup::REQUEST, 0xc01c_4634),
        (Map::REQUEST, 0xc038_464e),
        (Unmap::REQUEST, 0xc020_464f),
        (RegisterFd::REQUEST, 0xc004_46c9),
        (Cards::REQUEST, 0xc900_46c8),
        // `NVOS33_FLAGS_MAPPING_DIRECT` and `NVOS33_FLAGS_CACHING_TYPE_DEFAULT` in their places.
        (Map::FLAGS, 0x300_8000),
        (PinBuffer::CODE, 0xC028_DA01),
        (UnpinBuffer::CODE, 0xC008_DA02),
        (GetCallbackFlag::CODE, 0xC008_DA03),
        (GetInfo::CODE, 0xC008_DA04),
        (GetInfoV2::CODE, 0xC008_DA05),
        (GetAttr::CODE, 0xC008_DA06),
        (PinBufferV2::CODE, 0xC020_DA07),
        (ReqMappingType::CODE, 0xC008_DA08),
        (PinDmaBuf::CODE, 0xC020_DAC0),
        (GetVersion::CODE, 0xC008_DAFF),
    ];
    for (ours, header) in numbers {
        assert_eq!(ours, header, "{header:#x}");
    }
}
