//! What libibverbs and libmlx5 say, and whether their devices open.

use std::ffi::CStr;
use std::io;
use std::path::PathBuf;
use std::ptr::NonNull;

use rdma_core_sys::mlx5::{mlx5dv_context_attr, mlx5dv_context_attr_flags};
use rdma_core_sys::verbs::{ibv_context, ibv_device};
use rdma_core_sys::{Mlx5, Verbs};
use serde::{Deserialize, Serialize};

use super::Teller;

/// All that the libraries told. What is `None` was not come to.
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

/// One device.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(in crate::doctor) struct DeviceFacts {
    pub(in crate::doctor) name: String,
    /// libmlx5 drives it.
    pub(in crate::doctor) mlx5: bool,
    pub(in crate::doctor) open: Option<Result<(), String>>,
    /// Opening it for commands of our own.
    pub(in crate::doctor) devx: Option<Result<(), String>>,
}

pub(super) fn tell(teller: &Teller) {
    let mut facts = VerbsFacts::default();
    teller.step("loading libibverbs");
    let verbs = Verbs::load();
    facts.libibverbs = Some(match verbs {
        Ok(verbs) => Ok(file_of("libibverbs", verbs.library())),
        Err(ref error) => Err(error.to_string()),
    });
    teller.facts(&facts);
    let Ok(verbs) = verbs else { return };
    facts.dma_bufs = verbs.ibv_reg_dmabuf_mr.is_some();
    teller.step("loading libmlx5");
    let mlx5 = Mlx5::load();
    facts.libmlx5 = Some(match mlx5 {
        Ok(mlx5) => Ok(file_of("libmlx5", mlx5.library())),
        Err(ref error) => Err(error.to_string()),
    });
    teller.step("ibv_get_device_list");
    let mut count = 0;
    // SAFETY: a place for the answer. The list is never freed: the process ends soon.
    let list = unsafe { verbs.ibv_get_device_list(&raw mut count) };
    let Some(list) = NonNull::new(list) else {
        facts.no_list = Some(io::Error::last_os_error().to_string());
        return teller.facts(&facts);
    };
    // SAFETY: the list has so many entries, and stays.
    let list = unsafe { std::slice::from_raw_parts(list.as_ptr(), usize::try_from(count).unwrap_or(0)) };
    teller.facts(&facts);
    for &device in list {
        facts.devices.push(DeviceFacts::default());
        let mut one = DeviceFacts { name: name_of(verbs, device), ..DeviceFacts::default() };
        teller.step(format!("opening {}", one.name));
        // SAFETY: the device is listed.
        one.open = Some(opened(verbs, unsafe { verbs.ibv_open_device(device) }));
        if let Ok(mlx5) = mlx5 {
            // SAFETY: the device is listed.
            one.mlx5 = unsafe { mlx5.mlx5dv_is_supported(device) };
            if one.mlx5 {
                teller.step(format!("opening {} for DevX", one.name));
                one.devx = Some(open_devx(verbs, mlx5, device));
            }
        }
        if let Some(last) = facts.devices.last_mut() {
            *last = one;
        }
        teller.facts(&facts);
    }
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
