//! Configuration of an RDMA device.

use std::fmt;
use std::str::FromStr;

use gdsync_device::cuda::Gpu;
use gdsync_device::env::{variable, warn_of_misspelt};
use gdsync_device::error::{Error, Result};

/// What consumes a device's rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// The mlx5 card; the CPU or GPU that triggers a send rings its doorbell.
    Direct,
    /// A thread of this process, which posts to any RDMA device.
    Proxy,
    /// The software HCA, without a device.
    Soft,
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Proxy => "proxy",
            Self::Soft => "soft",
        })
    }
}

impl FromStr for Route {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "direct" => Ok(Self::Direct),
            "proxy" => Ok(Self::Proxy),
            "soft" => Ok(Self::Soft),
            other => Err(Error::invalid("route", format!("'{other}'"), "direct, proxy or soft")),
        }
    }
}

/// What to use of a device. `None` is chosen when the device is opened.
#[derive(Clone, Debug, Default)]
pub struct DeviceConfig {
    /// What consumes the rings (`GDSYNC_PATH=direct|proxy|soft`). Default: the first of these that the device supports.
    pub route: Option<Route>,
    /// Port number, from 1 (`GDSYNC_PORT`). Default: the first usable one.
    pub port: Option<u8>,
    /// Index in the port's GID table (`GDSYNC_GID_INDEX`). Default: see [`Port::best_gid`](super::Port::best_gid).
    pub gid_index: Option<u8>,
    /// Index in the port's P_Key table (`GDSYNC_PKEY_INDEX`).
    pub pkey_index: u16,
    /// Service level on InfiniBand, priority on Ethernet, 0 to 15 (`GDSYNC_SERVICE_LEVEL`).
    pub service_level: u8,
    /// Traffic class; on Ethernet that of the IP header (`GDSYNC_TRAFFIC_CLASS`).
    pub traffic_class: u8,
    /// GPU whose streams will trigger sends. The direct route requires that it may write the card's doorbells. Default:
    /// the GPUs that this process has opened.
    pub gpu: Option<Gpu>,
}

impl DeviceConfig {
    /// Reads the environment variables. The log warns of those that are misspelt.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a value that does not parse.
    pub fn from_env() -> Result<Self> {
        warn_of_misspelt();
        Self::from_variables(variable)
    }

    /// Reads variables of these names from `variable`, which returns `None` for unset ones.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a value that does not parse.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let config = Self {
            route: parsed(&variable, "GDSYNC_PATH", "direct, proxy or soft")?,
            port: parsed(&variable, "GDSYNC_PORT", "the number of a port, from 1")?,
            gid_index: parsed(&variable, "GDSYNC_GID_INDEX", "an index of the port's GID table, 0 to 255")?,
            pkey_index: parsed(
                &variable,
                "GDSYNC_PKEY_INDEX",
                "an index of the port's table of partition keys",
            )?
            .unwrap_or(0),
            service_level: parsed(&variable, "GDSYNC_SERVICE_LEVEL", "0 to 15")?.unwrap_or(0),
            traffic_class: parsed(&variable, "GDSYNC_TRAFFIC_CLASS", "0 to 255")?.unwrap_or(0),
            gpu: None,
        };
        config.check()?;
        Ok(config)
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.service_level > 15 {
            return Err(Error::invalid("service level", self.service_level, "0 to 15"));
        }
        if self.port == Some(0) {
            return Err(Error::invalid("port", 0, "the number of a port, from 1"));
        }
        Ok(())
    }
}

fn parsed<T: FromStr>(
    variable: &impl Fn(&str) -> Option<String>,
    name: &'static str,
    expected: &'static str,
) -> Result<Option<T>> {
    let read = |text: String| text.parse().map_err(|_| Error::invalid(name, format!("'{text}'"), expected));
    variable(name).map(read).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_parse_from_their_names() {
        for route in [Route::Direct, Route::Proxy, Route::Soft] {
            assert_eq!(route.to_string().parse::<Route>().unwrap(), route);
        }
        assert!("gpu".parse::<Route>().unwrap_err().to_string().contains("direct, proxy or soft"));
    }

    #[test]
    fn variables_are_named() {
        for (name, expected) in
            [("GDSYNC_PATH", "direct, proxy or soft"), ("GDSYNC_PORT", "number of a port")]
        {
            let error =
                DeviceConfig::from_variables(|asked| (asked == name).then(|| "foo".into())).unwrap_err();
            assert!(error.to_string().starts_with(&format!("{name} is 'foo': expected ")), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn values_out_of_range_are_refused() {
        assert!(DeviceConfig::default().check().is_ok());
        assert!(DeviceConfig { service_level: 16, ..DeviceConfig::default() }.check().is_err());
        assert!(DeviceConfig { port: Some(0), ..DeviceConfig::default() }.check().is_err());
    }
}
