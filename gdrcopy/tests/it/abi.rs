//! The layouts of kernel interfaces, against numbers of the C compiler.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

use crate::gdrdrv_abi::{
    GetAttr, GetCallbackFlag, GetInfo, GetInfoV2, GetVersion, PinBuffer, PinBufferV2, PinDmaBuf,
    ReqMappingType, Request, UnpinBuffer,
};
use crate::rm_abi::*;

/// What a C expression must be, and what it is in Rust.
struct Fact {
    c: String,
    number: usize,
    rust: usize,
}

macro_rules! layouts {
    ($($rust:ident = $c:ident, $size:literal { $($field:ident = $member:literal at $offset:literal),* $(,)? })*) => {
        vec![$(
            Fact { c: format!("sizeof({})", stringify!($c)), number: $size, rust: size_of::<$rust>() },
            $(Fact {
                c: format!("offsetof({}, {})", stringify!($c), $member),
                number: $offset,
                rust: offset_of!($rust, $field),
            },)*
        )*]
    };
}

macro_rules! numbers {
    ($($c:literal = $number:literal is $rust:expr),* $(,)?) => {
        vec![$(Fact { c: $c.into(), number: $number, rust: usize::try_from($rust).unwrap() }),*]
    };
}

/// The numbers are what gcc 12 printed for x86-64 and the headers named in `src/backend/rm/abi.rs`.
fn facts() -> Vec<Fact> {
    let mut facts = layouts! {
        Alloc = NVOS64_PARAMETERS, 48 {
            root = "hRoot" at 0, parent = "hObjectParent" at 4, object = "hObjectNew" at 8, class = "hClass" at 12,
            params = "pAllocParms" at 16, rights = "pRightsRequested" at 24, params_size = "paramsSize" at 32,
            flags = "flags" at 36, status = "status" at 40,
        }
        Free = NVOS00_PARAMETERS, 16 {
            root = "hRoot" at 0, parent = "hObjectParent" at 4, object = "hObjectOld" at 8, status = "status" at 12,
        }
        ControlCall = NVOS54_PARAMETERS, 32 {
            client = "hClient" at 0, object = "hObject" at 4, command = "cmd" at 8, flags = "flags" at 12,
            params = "params" at 16, params_size = "paramsSize" at 24, status = "status" at 28,
        }
        Dup = NVOS55_PARAMETERS, 28 {
            client = "hClient" at 0, parent = "hParent" at 4, object = "hObject" at 8,
            source_client = "hClientSrc" at 12, source_object = "hObjectSrc" at 16, flags = "flags" at 20,
            status = "status" at 24,
        }
        Map = nv_ioctl_nvos33_parameters_with_fd, 56 {
            client = "params.hClient" at 0, device = "params.hDevice" at 4, memory = "params.hMemory" at 8,
            offset = "params.offset" at 16, length = "params.length" at 24, linear = "params.pLinearAddress" at 32,
            status = "params.status" at 40, flags = "params.flags" at 44, fd = "fd" at 48,
        }
        Unmap = NVOS34_PARAMETERS, 32 {
            client = "hClient" at 0, device = "hDevice" at 4, memory = "hMemory" at 8,
            linear = "pLinearAddress" at 16, status = "status" at 24, flags = "flags" at 28,
        }
        RegisterFd = nv_ioctl_register_fd_t, 4 { control_fd = "ctl_fd" at 0 }
        Card = nv_ioctl_card_info_t, 72 {
            valid = "valid" at 0, domain = "pci_info.domain" at 4, bus = "pci_info.bus" at 8,
            slot = "pci_info.slot" at 9, function = "pci_info.function" at 10, vendor = "pci_info.vendor_id" at 12,
            device = "pci_info.device_id" at 14, gpu_id = "gpu_id" at 16, interrupt = "interrupt_line" at 20,
            registers = "reg_address" at 24, registers_size = "reg_size" at 32, framebuffer = "fb_address" at 40,
            framebuffer_size = "fb_size" at 48, minor = "minor_number" at 56, name = "dev_name" at 60,
        }
        Device = NV0080_ALLOC_PARAMETERS, 56 {
            instance = "deviceId" at 0, client_share = "hClientShare" at 4, target_client = "hTargetClient" at 8,
            target_device = "hTargetDevice" at 12, flags = "flags" at 16, va_size = "vaSpaceSize" at 24,
            va_start = "vaStartInternal" at 32, va_limit = "vaLimitInternal" at 40, va_mode = "vaMode" at 48,
        }
        Subdevice = NV2080_ALLOC_PARAMETERS, 4 { instance = "subDeviceId" at 0 }
        IdInfo = NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS, 32 {
            gpu_id = "gpuId" at 0, flags = "gpuFlags" at 4, device = "deviceInstance" at 8,
            subdevice = "subDeviceInstance" at 12, sli = "sliStatus" at 16, board = "boardId" at 20,
            gpu = "gpuInstance" at 24, numa = "numaId" at 28,
        }
        Import = NV0000_CTRL_OS_UNIX_IMPORT_OBJECT_FROM_FD_PARAMS, 20 {
            fd = "fd" at 0, kind = "object.type" at 4, device = "object.data.rmObject.hDevice" at 8,
            parent = "object.data.rmObject.hParent" at 12, object = "object.data.rmObject.hObject" at 16,
        }
        GpuInfoEntry = NV2080_CTRL_GPU_INFO, 8 { index = "index" at 0, data = "data" at 4 }
        GpuInfoQuery = NV2080_CTRL_GPU_GET_INFO_PARAMS, 16 {
            entries = "gpuInfoListSize" at 0, list = "gpuInfoList" at 8,
        }
        ConfidentialCompute = NV_CONFIDENTIAL_COMPUTE_ALLOC_PARAMS, 4 { client = "hClient" at 0 }
        CcCapabilities = NV_CONF_COMPUTE_CTRL_CMD_SYSTEM_GET_CAPABILITIES_PARAMS, 6 {
            cpu = "cpuCapability" at 0, gpus = "gpusCapability" at 1, environment = "environment" at 2,
            feature = "ccFeature" at 3, dev_tools = "devToolsMode" at 4, multi_gpu = "multiGpuMode" at 5,
        }
    };
    facts.extend(numbers! {
        "_IOWR(NV_IOCTL_MAGIC, NV_ESC_RM_ALLOC, NVOS64_PARAMETERS)" = 0xc030_462b is Alloc::REQUEST,
        "_IOWR(NV_IOCTL_MAGIC, NV_ESC_RM_FREE, NVOS00_PARAMETERS)" = 0xc010_4629 is Free::REQUEST,
        "_IOWR(NV_IOCTL_MAGIC, NV_ESC_RM_CONTROL, NVOS54_PARAMETERS)" = 0xc020_462a is ControlCall::REQUEST,
        "_IOWR(NV_IOCTL_MAGIC, NV_ESC_RM_DUP_OBJECT, NVOS55_PARAMETERS)" = 0xc01c_4634 is Dup::REQUEST,
        "_IOWR(NV_IOCTL_MAGIC, NV_ESC_RM_MAP_MEMORY, nv_ioctl_nvos33_parameters_with_fd)"
            = 0xc038_464e is Map::REQUEST,
        "_IOWR(NV_IOCTL_MAGIC, NV_ESC_RM_UNMAP_MEMORY, NVOS34_PARAMETERS)" = 0xc020_464f is Unmap::REQUEST,
        "_IOWR(NV_IOCTL_MAGIC, NV_ESC_REGISTER_FD, nv_ioctl_register_fd_t)" = 0xc004_46c9 is RegisterFd::REQUEST,
        "_IOWR(NV_IOCTL_MAGIC, NV_ESC_CARD_INFO, nv_ioctl_card_info_t[NV_MAX_DEVICES])"
            = 0xc900_46c8 is Cards::REQUEST,
        "NV01_ROOT_CLIENT" = 0x41 is ROOT_CLIENT,
        "NV01_DEVICE_0" = 0x80 is Device::CLASS,
        "NV20_SUBDEVICE_0" = 0x2080 is Subdevice::CLASS,
        "NV_CONFIDENTIAL_COMPUTE" = 0xcb33 is ConfidentialCompute::CLASS,
        "NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2" = 0x205 is IdInfo::COMMAND,
        "NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD" = 0x3d06 is Import::COMMAND,
        "NV2080_CTRL_CMD_GPU_GET_INFO" = 0x2080_0101 is GpuInfoQuery::COMMAND,
        "NV_CONF_COMPUTE_CTRL_CMD_SYSTEM_GET_CAPABILITIES" = 0xcb33_0101 is CcCapabilities::COMMAND,
        "NV0000_CTRL_OS_UNIX_EXPORT_OBJECT_TYPE_RM" = 1 is Import::RM,
        "NV2080_CTRL_GPU_INFO_INDEX_GPU_SMC_MODE" = 0x2a is GpuInfoEntry::SMC_MODE,
        "NV2080_CTRL_GPU_INFO_GPU_SMC_MODE_ENABLED" = 1 is GpuInfoEntry::SMC_ENABLED,
        "NVOS33_FLAGS_MAPPING_DIRECT << LOW(NVOS33_FLAGS_MAPPING) | \
         NVOS33_FLAGS_CACHING_TYPE_DEFAULT << LOW(NVOS33_FLAGS_CACHING_TYPE)" = 0x300_8000 is Map::FLAGS,
    });
    facts
}

#[test]
fn layouts_are_those_of_the_driver() {
    for Fact { c, number, rust } in facts() {
        assert_eq!(rust, number, "{c}");
    }
}

/// For maintainers: set `NVIDIA_OPEN_SRC` to a checkout of NVIDIA/open-gpu-kernel-modules, 550 or newer.
#[test]
fn numbers_are_those_of_a_checkout_of_the_driver() {
    let Some(source) = std::env::var_os("NVIDIA_OPEN_SRC") else {
        eprintln!("skipped: NVIDIA_OPEN_SRC does not name a checkout of NVIDIA/open-gpu-kernel-modules");
        return;
    };
    let source = Path::new(&source);
    let facts = facts();
    let mut program = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <sys/ioctl.h>\n#include \"nvtypes.h\"\n\
         #include \"nvos.h\"\n#include \"nvlimits.h\"\n#include \"nv_escape.h\"\n#include \"nv-ioctl.h\"\n\
         #include \"nv-unix-nvos-params-wrappers.h\"\n#include \"class/cl0080.h\"\n#include \"class/cl2080.h\"\n\
         #include \"class/clcb33.h\"\n#include \"ctrl/ctrl0000/ctrl0000gpu.h\"\n\
         #include \"ctrl/ctrl0000/ctrl0000unix.h\"\n#include \"ctrl/ctrl2080/ctrl2080gpu.h\"\n\
         #include \"ctrl/ctrlcb33.h\"\n#define LOW(range) (0 ? range)\nint main(void) {\n",
    );
    for (index, Fact { c, .. }) in facts.iter().enumerate() {
        writeln!(program, "printf(\"{index} %zu\\n\", (size_t)({c}));").unwrap();
    }
    program.push_str("return 0;\n}\n");

    let folder = std::env::temp_dir().join(format!("gdrcopy-rm-layout-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (c, binary) = (folder.join("layout.c"), folder.join("layout"));
    std::fs::write(&c, program).unwrap();
    let mut compiler = Command::new("cc");
    for include in ["src/common/sdk/nvidia/inc", "src/nvidia/arch/nvalloc/unix/include"] {
        compiler.arg("-I").arg(source.join(include));
    }
    let compiled = compiler.arg("-w").arg(&c).arg("-o").arg(&binary).output().expect("a C compiler named cc");
    let output = Command::new(&binary).output();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));

    let printed: BTreeMap<usize, usize> = String::from_utf8(output.unwrap().stdout)
        .unwrap()
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(index, number)| (index.parse().unwrap(), number.parse().unwrap()))
        .collect();
    for (index, Fact { c, number, .. }) in facts.iter().enumerate() {
        assert_eq!(printed.get(&index), Some(number), "{c}");
    }
}

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

/// Checks where fields lie.
macro_rules! offsets {
    ($($ty:ident { $($field:ident $offset:literal),* })*) => {
        $($(assert_eq!(offset_of!($ty, $field), $offset, stringify!($ty.$field));)*)*
    };
}

#[test]
fn fields_lie_where_the_header_puts_them() {
    offsets! {
        PinBuffer { size 8, p2p_token 16, va_space 24, handle 32 }
        GetCallbackFlag { flag 8 }
        GetInfo { va 8, mapped_size 16, page_size 24, tsc_khz 28, tm_cycles 32, mapped 40, wc_mapping 44 }
        GetInfoV2 { page_size 24, mapping_type 40 }
        GetAttr { val 4 }
        PinBufferV2 { flags 16, handle 24 }
        ReqMappingType { mapping_type 8 }
        GetVersion { minimum_library 4 }
    }
}
