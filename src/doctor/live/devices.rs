//! The ways to map GPU memory, libibverbs and libmlx5, and what this library opens: each tried.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::path::PathBuf;
use std::ptr::NonNull;

use gdrcopy::{BackendKind, Gdr};
use gdsync::Device;
use gdsync::cuda::Gpu;
use gdsync::hca::{fabric_providers, tcp_address};
use rdma_core_sys::mlx5::{mlx5dv_context_attr, mlx5dv_context_attr_flags};
use rdma_core_sys::verbs::{ibv_context, ibv_device};
use rdma_core_sys::{Fabric, Mlx5, Verbs};
use serde::{Deserialize, Serialize};

use super::{Reporter, await_first_gpu};
use crate::library::load;

/// Trials of mapping GPU memory.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(in crate::doctor) struct MappingFacts {
    /// What a trial of each backend showed, or why it does not serve; those not reached are missing.
    pub(in crate::doctor) backends: Vec<(String, Result<String, String>)>,
    /// What opened in the `libgdrapi.so` that NCCL would load, or why it did not; `None` where there is no such library.
    pub(in crate::doctor) gdrapi: Option<Result<String, String>>,
}

pub(super) fn probe_mapping(reporter: &Reporter) {
    let mut facts = MappingFacts::default();
    reporter.step("cuInit");
    await_first_gpu();
    for kind in BackendKind::ALL.into_iter().filter(|kind| *kind != BackendKind::Host) {
        reporter.step(format!("mapping GPU memory by {kind}"));
        facts.backends.push((kind.name().to_owned(), attempt(kind)));
        reporter.facts(&facts);
    }
    reporter.step("gdr_open of libgdrapi.so");
    facts.gdrapi = open_gdrapi();
    reporter.facts(&facts);
}

/// Loads `libgdrapi.so` as NCCL does, and opens it.
fn open_gdrapi() -> Option<Result<String, String>> {
    type Open = unsafe extern "C" fn() -> *mut c_void;
    type Describe = unsafe extern "C" fn(*mut c_void, *mut c_char, usize) -> c_int;
    let library = load("libgdrapi.so").ok()?;
    // SAFETY: the type is that of the function of GDRCopy's interface.
    let Ok(open) = (unsafe { library.get::<Open>("gdr_open") }) else {
        return Some(Err("it has no gdr_open".into()));
    };
    // SAFETY: always callable.
    let opened = unsafe { open() };
    if opened.is_null() {
        return Some(Err(
            "gdr_open fails; GDRCOPY_ENABLE_LOGGING=1 GDRCOPY_LOG_LEVEL=1 has it say why".into()
        ));
    }
    // SAFETY: the type is that of the function of our own library.
    let Ok(describe) = (unsafe { library.get::<Describe>("gdrx_describe") }) else {
        return Some(Ok("the library of NVIDIA".into()));
    };
    let mut line = [0_u8; 64];
    // SAFETY: what was opened above, and a place of this size.
    unsafe { describe(opened, line.as_mut_ptr().cast(), line.len()) };
    let line = String::from_utf8_lossy(&line);
    let backend = line.split([' ', ';', '\0']).next().unwrap_or_default();
    Some(Ok(backend.to_owned()))
}

/// Maps memory of the first GPU, and reads back what was written.
fn attempt(kind: BackendKind) -> Result<String, String> {
    const VALUE: u64 = 0x6764_6173_796e_6321;
    let open = || {
        let gdr = Gdr::builder().backend(kind).open()?;
        let mapping = gdr.alloc(0, 64 << 10)?.map()?;
        mapping.store(0, VALUE)?;
        mapping.flush()?;
        Ok((mapping.load::<u64>(0)?, gdr.driver_version()))
    };
    let (read, version) = open().map_err(|error: gdrcopy::Error| match error {
        gdrcopy::Error::NoBackend(refusals) => {
            refusals.iter().map(|refusal| refusal.error.to_string()).collect::<Vec<_>>().join("; ")
        }
        other => other.to_string(),
    })?;
    if read != VALUE {
        return Err(format!("{VALUE:#x} was written through a mapping, and {read:#x} read"));
    }
    let version = version.map(|(major, minor)| format!(", module {major}.{minor}"));
    Ok(format!("64 KiB of GPU 0 mapped, written and read back{}", version.unwrap_or_default()))
}

/// What the libraries reported. `None`: not reached.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(in crate::doctor) struct VerbsFacts {
    /// The file of libibverbs, or why there is none.
    pub(in crate::doctor) libibverbs: Option<Result<PathBuf, String>>,
    pub(in crate::doctor) libmlx5: Option<Result<PathBuf, String>>,
    /// libibverbs can register dma-bufs.
    pub(in crate::doctor) dma_bufs: bool,
    /// Why no devices could be listed.
    pub(in crate::doctor) no_list: Option<String>,
    pub(in crate::doctor) devices: Vec<DeviceFacts>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(in crate::doctor) struct DeviceFacts {
    pub(in crate::doctor) name: String,
    /// libmlx5 drives it.
    pub(in crate::doctor) mlx5: bool,
    pub(in crate::doctor) open: Option<Result<(), String>>,
    /// Opening it for commands of our own.
    pub(in crate::doctor) devx: Option<Result<(), String>>,
}

pub(super) fn probe_verbs(reporter: &Reporter) {
    let mut facts = VerbsFacts::default();
    reporter.step("loading libibverbs");
    let verbs = Verbs::load();
    let file = verbs.as_ref().map(|verbs| file_of("libibverbs", verbs.library()));
    facts.libibverbs = Some(file.map_err(ToString::to_string));
    reporter.facts(&facts);
    let Ok(verbs) = verbs else { return };
    facts.dma_bufs = verbs.ibv_reg_dmabuf_mr.is_some();
    reporter.step("loading libmlx5");
    let mlx5 = Mlx5::load();
    let file = mlx5.as_ref().map(|mlx5| file_of("libmlx5", mlx5.library()));
    facts.libmlx5 = Some(file.map_err(ToString::to_string));
    reporter.step("ibv_get_device_list");
    let mut count = 0;
    // SAFETY: a place for the answer. The list is never freed: the process ends soon.
    let list = unsafe { verbs.ibv_get_device_list(&raw mut count) };
    let Some(list) = NonNull::new(list) else {
        facts.no_list = Some(io::Error::last_os_error().to_string());
        return reporter.facts(&facts);
    };
    // SAFETY: the list has so many entries, and stays.
    let list = unsafe { std::slice::from_raw_parts(list.as_ptr(), usize::try_from(count).unwrap_or(0)) };
    reporter.facts(&facts);
    for &device in list {
        let mut one = DeviceFacts { name: name_of(verbs, device), ..DeviceFacts::default() };
        reporter.step(format!("opening {}", one.name));
        // SAFETY: the device is listed.
        one.open = Some(opened(verbs, unsafe { verbs.ibv_open_device(device) }));
        if let Ok(mlx5) = mlx5 {
            // SAFETY: the device is listed.
            one.mlx5 = unsafe { mlx5.mlx5dv_is_supported(device) };
            if one.mlx5 {
                reporter.step(format!("opening {} for DevX", one.name));
                one.devx = Some(open_devx(verbs, mlx5, device));
            }
        }
        facts.devices.push(one);
        reporter.facts(&facts);
    }
}

/// What libfabric reported. `None`: not reached.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(in crate::doctor) struct FabricFacts {
    /// Its version and file, or why there is none.
    pub(in crate::doctor) library: Option<Result<String, String>>,
    /// The properties of each provider, or what it lacks.
    pub(in crate::doctor) providers: Vec<(String, Result<String, String>)>,
}

pub(super) fn probe_fabric(reporter: &Reporter) {
    let mut facts = FabricFacts::default();
    reporter.step("loading libfabric");
    let library = Fabric::load().map(|fabric| {
        // SAFETY: it may be called at any time.
        let version = unsafe { fabric.fi_version() };
        let file = file_of("libfabric", fabric.library());
        format!("libfabric {}.{} ({})", version >> 16, version & 0xffff, file.display())
    });
    facts.library = Some(library.map_err(|error| error.to_string()));
    reporter.facts(&facts);
    reporter.step("fi_getinfo");
    let providers = fabric_providers().unwrap_or_default().into_iter();
    facts.providers =
        providers.map(|(name, found)| (name, found.map_err(|error| error.to_string()))).collect();
    reporter.facts(&facts);
}

fn name_of(verbs: &Verbs, device: *mut ibv_device) -> String {
    // SAFETY: the device is listed.
    let name = unsafe { verbs.ibv_get_device_name(device) };
    if name.is_null() {
        return String::new();
    }
    // SAFETY: libibverbs returns terminated text that lives as long as the list.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

fn open_devx(verbs: &Verbs, mlx5: &Mlx5, device: *mut ibv_device) -> Result<(), String> {
    let mut attr = mlx5dv_context_attr::zeroed();
    attr.flags = mlx5dv_context_attr_flags::MLX5DV_CONTEXT_FLAGS_DEVX;
    // SAFETY: the device is listed, and driven by libmlx5; attributes as in its manual.
    opened(verbs, unsafe { mlx5.mlx5dv_open_device(device, &raw mut attr) })
}

/// Closes it again.
fn opened(verbs: &Verbs, context: *mut ibv_context) -> Result<(), String> {
    if context.is_null() {
        return Err(io::Error::last_os_error().to_string());
    }
    // SAFETY: just opened, closed once.
    unsafe { verbs.ibv_close_device(context) };
    Ok(())
}

/// The file that the dynamic linker found, whose name has the version; the name it was asked for where that is not known.
fn file_of(part: &str, asked: &str) -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let named = |path: &&str| path.rsplit('/').next().is_some_and(|name| name.starts_with(part));
    let found = if asked.contains('/') { None } else { paths.into_iter().find(named) };
    let path = PathBuf::from(found.unwrap_or(asked));
    path.canonicalize().unwrap_or(path)
}

/// What was opened. `None`: not reached.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(in crate::doctor) struct ChoiceFacts {
    /// The PCI address of the GPU whose streams would trigger, or why there is none.
    pub(in crate::doctor) gpu: Option<Result<String, String>>,
    /// The device that would be used, or why none.
    pub(in crate::doctor) device: Option<Result<String, String>>,
    /// Who reads the rings, or why the device does not open.
    pub(in crate::doctor) route: Option<Result<Route, String>>,
    /// The address of the device `tcp`, or why it has none.
    pub(in crate::doctor) tcp: Option<Result<String, String>>,
    /// How bytes travel.
    pub(in crate::doctor) wire: String,
    pub(in crate::doctor) reaches_other_hosts: bool,
    /// Why the card does not read the rings itself.
    pub(in crate::doctor) not_direct: Option<String>,
}

/// Who reads the rings.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(in crate::doctor) enum Route {
    Direct,
    Proxy,
    Soft,
}

pub(super) fn probe_choice(reporter: &Reporter) {
    let mut facts = ChoiceFacts::default();
    reporter.step("opening GPU 0");
    await_first_gpu();
    let gpu = Gpu::open(0);
    let address = gpu.as_ref().map(|gpu| gpu.pci_address().unwrap_or_default().to_owned());
    facts.gpu = Some(address.map_err(ToString::to_string));
    reporter.facts(&facts);
    reporter.step("looking for the nearest RDMA device");
    let device = match &gpu {
        Ok(gpu) => Device::near(gpu),
        Err(_) => Device::find(None),
    };
    facts.tcp = Some(tcp_address(None).map(|address| address.to_string()).map_err(|error| error.to_string()));
    facts.device = Some(device.as_ref().map(|one| one.name().to_owned()).map_err(ToString::to_string));
    reporter.facts(&facts);
    let Ok(device) = device else { return };
    reporter.step(format!("opening {}", device.name()));
    match device.open() {
        Ok(context) => {
            facts.route = Some(Ok(match context.not_direct() {
                _ if context.is_software() => Route::Soft,
                Some(_) => Route::Proxy,
                None => Route::Direct,
            }));
            facts.wire = context.wire().to_owned();
            facts.reaches_other_hosts = context.reaches_other_hosts();
            facts.not_direct = context.not_direct().map(str::to_owned);
        }
        Err(error) => facts.route = Some(Err(error.to_string())),
    }
    reporter.facts(&facts);
}
