//! The devices that can be opened: RDMA devices of the machine, and the software HCA.

use std::net::IpAddr;
use std::ptr::NonNull;
use std::sync::Arc;

use gdsync_device::cuda::Gpu;
use gdsync_device::env::variable;
use gdsync_device::{Error, Provider as _, Result};
use gdsync_rdma::direct::Direct;
use gdsync_rdma::proxy::Proxy;
use gdsync_rdma::{DeviceConfig, NearGpu, Port, Route, Survey};
use gdsync_soft::{SoftHcaConfig, tcp_address};
use rdma_core_sys::verbs::{ibv_context, ibv_pd};

use crate::probe::{probe, self_test, test_gpu_memory};
use crate::verbs::{Context, Pd};

/// Name of the software HCA.
const SOFT: &str = "soft0";
/// Name of the software HCA over TCP, perhaps followed by `:ADDRESS`.
const TCP: &str = "tcp";

/// Begin of the name of the software HCA over libfabric: `fabric:PROVIDER`, perhaps followed by `/DOMAIN` and `@ADDRESS`.
const FABRIC: &str = "fabric:";

/// A device that can be opened: an RDMA device of the machine, or the software HCA, which always exists: `soft0` for processes of
/// this host, over shared memory, and `tcp` for those of other hosts, over TCP. `fabric:PROVIDER` is the software HCA over libfabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device(Kind);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Soft,
    /// Over TCP, or a provider of libfabric.
    Tcp {
        name: String,
        address: IpAddr,
        fabric: Option<String>,
    },
    Rdma(Box<Survey>),
}

impl Device {
    /// All devices of this machine, the software HCA `soft0` last. Cheap; without libibverbs only `soft0`.
    pub fn list() -> Vec<Device> {
        let rdma = gdsync_rdma::survey().into_iter().map(|survey| Device(Kind::Rdma(Box::new(survey))));
        rdma.chain([Device(Kind::Soft)]).collect()
    }

    /// The device called `name`, else the one that `GDSYNC_DEVICE` names, else the usable one nearest to a GPU, else
    /// `soft0`; a log line says why.
    ///
    /// `tcp` is the software HCA over TCP, at the address from which this host reaches `MASTER_ADDR`, or else other hosts;
    /// `tcp:ADDRESS` names the address, or the network interface that has it. It listens there on a port that the system chooses.
    /// The addresses of its queue pairs hold both: the GID is the IP address, the LID the port.
    ///
    /// `fabric:PROVIDER` is the software HCA over a provider of libfabric (`efa`, `cxi`, `tcp`, `tcp;ofi_rxm`, `shm`), which is loaded
    /// when the device is opened; `fabric:PROVIDER/DOMAIN` names one of its domains, as `fi_info` lists them. TCP connections tell
    /// the end of a peer: their address is chosen as that of `tcp`, or named: `fabric:PROVIDER@ADDRESS`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] lists the existing devices; [`Error::InvalidArgument`] if `tcp` or `fabric:` has no address;
    /// [`Error::Library`] if the library that `GDSYNC_LIBIBVERBS` or
    /// `GDSYNC_LIBMLX5` names cannot be loaded, except for `soft0`.
    pub fn find(name: Option<&str>) -> Result<Device> {
        let wanted = name.map(str::to_owned).or_else(|| variable("GDSYNC_DEVICE"));
        match wanted {
            Some(wanted) if wanted == SOFT => Ok(Device(Kind::Soft)),
            Some(name) if name.split(':').next() == Some(TCP) => {
                let address = tcp_address(name.split_once(':').map(|(_, address)| address))?;
                Ok(Device(Kind::Tcp { name, address, fabric: None }))
            }
            Some(name) if name.starts_with(FABRIC) && name.len() > FABRIC.len() => {
                let (provider, address) = match name[FABRIC.len()..].split_once('@') {
                    Some((provider, address)) => (provider, Some(address)),
                    None => (&name[FABRIC.len()..], None),
                };
                let (fabric, address) = (Some(provider.to_owned()), tcp_address(address)?);
                Ok(Device(Kind::Tcp { name, address, fabric }))
            }
            Some(wanted) => {
                gdsync_rdma::check_named()?;
                let all = Self::list();
                let available = || {
                    all.iter()
                        .map(Device::name)
                        .chain([TCP, "fabric:PROVIDER"])
                        .collect::<Vec<_>>()
                        .join(", ")
                };
                let found = all.iter().find(|device| device.name() == wanted).cloned();
                found.ok_or_else(|| Error::NoDevice { name: wanted, available: available() })
            }
            None if DeviceConfig::from_env()?.route == Some(Route::Soft) => Ok(Device(Kind::Soft)),
            None => Self::preferred(None),
        }
    }

    /// The usable device nearest to this GPU, unless `GDSYNC_DEVICE` names one: see [`Device::find`].
    ///
    /// # Errors
    /// [`Error::NoDevice`] and [`Error::Library`], see [`Device::find`].
    pub fn near(gpu: &Gpu) -> Result<Device> {
        let is_chosen =
            variable("GDSYNC_DEVICE").is_some() || variable("GDSYNC_PATH").as_deref() == Some("soft");
        if is_chosen { Self::find(None) } else { Self::preferred(gpu.pci_address()) }
    }

    fn preferred(gpu: Option<&str>) -> Result<Device> {
        gdsync_rdma::check_named()?;
        let mut devices = gdsync_rdma::survey();
        if let Some(at) = gdsync_rdma::preferred(&devices, gpu) {
            return Ok(Device(Kind::Rdma(Box::new(devices.swap_remove(at)))));
        }
        for device in &devices {
            let why = device.refusal().unwrap_or_default();
            tracing::info!(device = %device.name, why, "RDMA device not usable");
        }
        tracing::info!("using the software HCA: no usable RDMA device");
        Ok(Device(Kind::Soft))
    }

    /// The device's name, such as `mlx5_0`, `soft0`, `tcp:10.1.2.3`, or `fabric:efa`.
    pub fn name(&self) -> &str {
        match &self.0 {
            Kind::Soft => SOFT,
            Kind::Tcp { name, .. } => name,
            Kind::Rdma(survey) => &survey.name,
        }
    }

    /// Whether it is the software HCA.
    pub fn is_software(&self) -> bool {
        matches!(self.0, Kind::Soft | Kind::Tcp { .. })
    }

    fn survey(&self) -> Option<&Survey> {
        if let Kind::Rdma(survey) = &self.0 { Some(survey) } else { None }
    }

    /// The PCI address of its card, `domain:bus:device.function` in lower-case hexadecimal; for a software RDMA device,
    /// of its network card. `None` without one.
    pub fn pci_address(&self) -> Option<&str> {
        Some(&self.survey()?.place.as_ref()?.address)
    }

    /// The NUMA node of its card, if the kernel knows it.
    pub fn numa_node(&self) -> Option<u32> {
        self.survey()?.place.as_ref()?.numa
    }

    /// Its ports; empty for the software HCA.
    pub fn ports(&self) -> &[Port] {
        self.survey().map_or(&[], |survey| &survey.ports)
    }

    /// The machine's GPUs, nearest to its card first; empty without a card.
    pub fn gpus(&self) -> &[NearGpu] {
        self.survey().map_or(&[], |survey| &survey.gpus)
    }

    /// Why it cannot be used, with the fix; `None` if it can.
    pub fn refusal(&self) -> Option<String> {
        self.survey()?.refusal()
    }

    /// Opens the device as configured by the environment: see [`DeviceConfig`]. On the software HCA, the faults in
    /// `GDSYNC_FAULTS` are injected from the start: see [`FaultPlan`](crate::hca::FaultPlan).
    ///
    /// # Errors
    /// [`Error::Library`], [`Error::Verbs`] and [`Error::Device`] of an RDMA device, [`Error::Library`] and [`Error::Device`] also over
    /// libfabric: they name what is missing; [`Error::Sys`] when the system refuses memory, sockets or a thread;
    /// [`Error::InvalidArgument`] for a bad variable.
    pub fn open(&self) -> Result<Context> {
        self.open_with(&DeviceConfig::from_env()?)
    }

    /// Opens the device.
    ///
    /// # Errors
    /// [`Error::Library`], [`Error::Verbs`] and [`Error::Device`] of an RDMA device or over libfabric; [`Error::Sys`] when the system
    /// refuses memory, sockets or a thread.
    pub fn open_with(&self, config: &DeviceConfig) -> Result<Context> {
        match (&self.0, config.route) {
            (Kind::Soft | Kind::Tcp { .. }, Some(route @ (Route::Direct | Route::Proxy))) => {
                let expected = "soft, the only path of soft0, tcp and fabric: direct needs an mlx5 card, proxy an RDMA device: name one in \
                                GDSYNC_DEVICE, if this machine has one, or no path (unset GDSYNC_PATH)";
                Err(Error::invalid("the path (GDSYNC_PATH, DeviceConfig::route)", route, expected))
            }
            (Kind::Tcp { address, fabric, .. }, _) => {
                let (tcp, fabric) = (Some(*address), fabric.clone());
                Context::soft(&SoftHcaConfig { tcp, fabric, ..SoftHcaConfig::from_env()? })
            }
            (Kind::Soft, _) | (_, Some(Route::Soft)) => Context::soft(&SoftHcaConfig::from_env()?),
            (Kind::Rdma(survey), _) => connect(survey, config),
        }
    }
}

impl Device {
    /// Uses a device and a protection domain that the application has opened by libibverbs, of an mlx5 card that reads the rings
    /// itself. Keys of regions of this domain serve in the work requests of its queue pairs. Both stay the application's,
    /// as do the events of the device: a failure that only an event reports is not noticed here.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless it is an mlx5 card; [`Error::Library`], [`Error::Verbs`] and [`Error::Device`] as in
    /// [`Device::open`], also if the self-test of the card fails.
    ///
    /// # Safety
    /// `context` must be open and `pd` be one of it, until the result, its clones and all that is made with them are gone:
    /// see [`Qp::destroy`](crate::verbs::Qp::destroy).
    pub unsafe fn adopt(context: NonNull<ibv_context>, pd: NonNull<ibv_pd>) -> Result<Pd> {
        // SAFETY: as the caller promises.
        let open = unsafe { gdsync_rdma::Open::adopt(context, &DeviceConfig::from_env()?) }?;
        let direct = Direct::start(&open)?;
        // SAFETY: as the caller promises.
        let pdn = unsafe { direct.adopt_pd(pd) };
        let pd = Context::with(Arc::new(direct), None, probe)?.pd(pdn);
        self_test(&pd)?;
        Ok(pd)
    }
}

/// Opens an RDMA device. The card reads the rings itself if a self-test passes, each GPU that will ring can, and it
/// reaches the memory of the GPUs. Otherwise a CPU thread reads them, which also stages what the card does not reach.
fn connect(survey: &Survey, config: &DeviceConfig) -> Result<Context> {
    let open = gdsync_rdma::Open::device(&survey.name, config)?;
    let SoftHcaConfig { strict, faults, .. } = SoftHcaConfig::from_env()?;
    let direct = || {
        let gpus = config.gpu.clone().map_or_else(Gpu::opened, |gpu| vec![gpu]);
        let direct = Direct::start(&open)?;
        direct.inject(faults.clone())?;
        let context = Context::with(Arc::new(direct), None, probe)?;
        if config.route.is_none() {
            let tested = self_test(&context.alloc_pd()?);
            tested.inspect_err(|error| {
                let device = open.name();
                tracing::warn!(device, %error, "the card is not used directly: its self-test failed");
            })?;
        }
        for gpu in &gpus {
            let pd = context.alloc_pd()?;
            context.provider.admit(gpu, &mut || probe(&pd, gpu))?;
            if config.route.is_none() {
                test_gpu_memory(&pd, gpu)?;
            }
        }
        Ok(context)
    };
    let not_direct = match config.route {
        Some(Route::Direct) => return direct(),
        Some(_) => "another route was requested (GDSYNC_PATH)".into(),
        None => match direct() {
            Ok(context) => return Ok(context),
            Err::<_, Error>(why) => why.to_string(),
        },
    };
    tracing::info!(
        device = open.name(),
        why = not_direct,
        "a CPU thread reads the rings instead of the card"
    );
    let proxy = Proxy::start(open, strict)?;
    proxy.inject(faults)?;
    Context::with(Arc::new(proxy), Some(not_direct.into()), |_, _| Ok(()))
}
