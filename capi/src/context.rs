//! Contexts: a device, its settings, and what moves its messages along.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Weak};

use gdsync::Device;
use gdsync::cuda::Gpu;
use gdsync::rdma::DeviceConfig;
use gdsync::verbs::Context;
use gdsync_capi_support::handles::Table;
use mp::{Communicator, CommunicatorBuilder, RequestSet};
use parking_lot::Mutex;

use crate::abi::{IN_PROGRESS, KINDS, Raw, VERSION, gda_config, gda_info_t};
use crate::guard::{
    Error, Result, checked_size, end, input, invalid, number, output, place, set_logger, status, text,
};
use crate::words::in_c;

/// What `gda_progress` moves along.
pub(crate) trait Progress: fmt::Debug + Send + Sync {
    fn progress(&self);
}

/// An open device.
#[derive(Debug)]
pub(crate) struct Ctx {
    device: Context,
    gpu: Option<Gpu>,
    builder: CommunicatorBuilder,
    /// Requests with functions to call.
    pub(crate) requests: RequestSet,
    pub(crate) comms: Mutex<Vec<Weak<dyn Progress>>>,
}

pub(crate) static CONTEXTS: Table<Arc<Ctx>> = Table::new(1, &KINDS);

pub(crate) fn context(raw: Raw) -> Result<Arc<Ctx>> {
    Ok(CONTEXTS.get(raw)?.clone())
}

impl Ctx {
    fn open(config: &gda_config) -> Result<Self> {
        // SAFETY: a text, or NULL: the header asks for it.
        let name = unsafe { text("device", config.device) }?;
        let within = |what: &str, value: u32, most: u32| match value <= most {
            true => Ok(()),
            false => Err(invalid(what, value, &format!("at most {most}"))),
        };
        within("depth", config.depth, 32768)?;
        within("max_pieces", config.max_pieces, 30)?;
        let open = |gpu| {
            Gpu::open(gpu).map_err(|error| {
                let text = format!("gpu is {gpu}: {}; set it to -1 for no GPU", in_c(&error));
                Error::Own(error.errno(), text)
            })
        };
        let gpu = if config.gpu < 0 { None } else { Some(open(config.gpu)?) };
        let wanted = DeviceConfig { gpu: gpu.clone(), ..DeviceConfig::from_env()? };
        let device = Device::find(name)?.open_with(&wanted)?;
        let mut builder = Communicator::builder().context(&device);
        if config.depth != 0 {
            builder = builder.depth(config.depth as usize);
        }
        if config.max_pieces != 0 {
            builder = builder.max_pieces(config.max_pieces);
        }
        if let Some(gpu) = &gpu {
            builder = builder.gpu(gpu);
        }
        Ok(Self { device, gpu, builder, requests: RequestSet::new()?, comms: Mutex::default() })
    }

    pub(crate) fn builder(&self) -> CommunicatorBuilder {
        self.builder.clone()
    }

    pub(crate) fn gpu(&self) -> Result<&Gpu> {
        let expected = "the CUDA device in gda_config; streams without CUDA are GDA_STREAM_HOST";
        self.gpu.as_ref().ok_or_else(|| invalid("gpu of the context", -1, expected))
    }

    fn progress(&self) {
        let comms: Vec<_> = {
            let mut comms = self.comms.lock();
            comms.retain(|comm| comm.strong_count() > 0);
            comms.iter().filter_map(Weak::upgrade).collect()
        };
        comms.iter().for_each(|comm| comm.progress());
        self.requests.progress();
    }
}

/// The version of the library.
#[unsafe(no_mangle)]
pub extern "C" fn gda_version() -> u32 {
    VERSION
}

/// The reason of the last failure of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn gda_last_error() -> *const c_char {
    gdsync_capi_support::guard::last_error()
}

/// See the header.
///
/// # Safety
/// The function must stay callable with `this` until another one is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_set_logger(
    logger: Option<unsafe extern "C" fn(*mut c_void, c_int, *const c_char)>,
    this: *mut c_void,
    level: c_int,
) -> c_int {
    status("gda_set_logger", || set_logger(logger, this, level))
}

/// See the header.
///
/// # Safety
/// The structure must be as long as it says, the name in it terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_open(config: *const gda_config, ctx: *mut Raw) -> c_int {
    status("gda_open", || {
        let ctx = place("ctx", ctx)?;
        // SAFETY: the caller vouches for its size.
        let config = unsafe { input("config", config) }?;
        *ctx = CONTEXTS.insert(Arc::new(Ctx::open(&config)?))?;
        Ok(())
    })
}

/// See the header.
///
/// # Safety
/// The structure must be as long as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_info(ctx: Raw, info: *mut gda_info_t) -> c_int {
    status("gda_info", || {
        checked_size("info", info)?;
        let device = context(ctx)?.device.clone();
        // SAFETY: its size is checked.
        unsafe {
            output(info, |info| {
                info.is_software = u32::from(device.is_software());
                info.is_direct = u32::from(!device.is_software() && device.not_direct().is_none());
                info.max_inline = u32::try_from(mp::MAX_INLINE).unwrap_or(0);
                info.device = [0; 128];
                let name = device.description().bytes().take(info.device.len() - 1);
                info.device.iter_mut().zip(name).for_each(|(to, from)| *to = from.cast_signed());
            });
        };
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_close(ctx: Raw) -> c_int {
    end("gda_close", &CONTEXTS, ctx)
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_progress(ctx: Raw) -> c_int {
    status("gda_progress", || {
        context(ctx)?.progress();
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_event_fd(ctx: Raw) -> c_int {
    number("gda_event_fd", || Ok(context(ctx)?.requests.event_fd().as_raw_fd()))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_arm(ctx: Raw) -> c_int {
    number("gda_arm", || Ok(if context(ctx)?.requests.arm()? { 0 } else { IN_PROGRESS }))
}
