//! What is looked at, by area: each has its probes in a file.

/// An area and its checks: constant and name of each, what is tried, and why it matters.
macro_rules! area {
    (
        $area:ident $name:literal $title:literal asks [$($live:expr),*] probes by $probe:expr;
        $($check:ident $full:literal tried $tried:expr, why $why:expr;)+
    ) => {
        $(const $check: Check = Check { name: $full, tried: $tried, why: $why };)+

        pub(super) const $area: Area = Area {
            name: $name,
            title: $title,
            checks: &[$(&$check),+],
            asks: &[$($live),*],
            probe: $probe,
        };
    };
}

mod driver;
mod fabric;
pub(super) mod gpu;
pub(super) mod pci;
pub(super) mod process;
pub(super) mod rdma;

use std::fmt;

use serde::Serialize;

use super::live::Live;
use super::machine::Machine;

pub(super) struct Area {
    /// What the names of its probes begin with.
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) checks: &'static [&'static Check],
    /// Who must be asked before.
    pub(super) asks: &'static [Live],
    pub(super) probe: fn(&Machine) -> Vec<Probe>,
}

/// All areas, in the order of the report.
pub(super) const AREAS: &[Area] = &[
    driver::DRIVER_AREA,
    gpu::GPU_AREA,
    driver::MAPPING_AREA,
    driver::MODULES_AREA,
    rdma::RDMA_AREA,
    rdma::LIMITS_AREA,
    fabric::FABRIC_AREA,
    pci::IOMMU_AREA,
    pci::TOPOLOGY_AREA,
    process::CONTAINER_AREA,
    process::ENVIRONMENT_AREA,
    process::CHOICE_AREA,
];

/// Whether `--only` selects a probe; it lists probes or areas, and an empty list selects all.
pub(super) fn is_wanted(name: &str, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|wanted| wanted == name || wanted == area_of(name))
}

/// A number of bytes for people.
fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut scale = 1;
    while unit + 1 < UNITS.len() && count / scale >= 1024 {
        scale *= 1024;
        unit += 1;
    }
    match (count / scale, count % scale * 10 / scale) {
        (whole, 0) => format!("{whole} {}", UNITS[unit]),
        (whole, tenths) => format!("{whole}.{tenths} {}", UNITS[unit]),
    }
}

/// How a probe ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Nothing to look at here.
    Skip,
    /// It works, but slower or less than it could.
    Warn,
    /// Something that is there does not work.
    Fail,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Skip => "skip",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
        })
    }
}

/// What was tried, what happened, why it matters, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Probe {
    /// `area.what`; the same for all devices.
    pub name: &'static str,
    /// The device, where there may be several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// How it ended.
    pub status: Status,
    /// What was done to find out.
    pub tried: &'static str,
    /// What was seen.
    pub found: String,
    /// Why one wants to know.
    pub why: &'static str,
    /// What to do; of warnings and failures always.
    pub fix: Option<String>,
}

impl Probe {
    /// The same, of this device.
    pub(super) fn about(self, subject: impl Into<String>) -> Self {
        Self { subject: Some(subject.into()), ..self }
    }

    /// The same, with advice.
    pub(super) fn advice(self, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..self }
    }
}

/// What is the same of a probe whatever it finds.
#[derive(Debug)]
pub(super) struct Check {
    /// `area.what`
    pub(super) name: &'static str,
    pub(super) tried: &'static str,
    pub(super) why: &'static str,
}

impl Check {
    fn probe(&self, status: Status, found: impl Into<String>, fix: Option<String>) -> Probe {
        let Self { name, tried, why } = *self;
        Probe { name, subject: None, status, tried, found: found.into(), why, fix }
    }

    pub(super) fn ok(&self, found: impl Into<String>) -> Probe {
        self.probe(Status::Ok, found, None)
    }

    pub(super) fn skip(&self, found: impl Into<String>) -> Probe {
        self.probe(Status::Skip, found, None)
    }

    pub(super) fn warn(&self, found: impl Into<String>, fix: impl Into<String>) -> Probe {
        self.probe(Status::Warn, found, Some(fix.into()))
    }

    pub(super) fn fail(&self, found: impl Into<String>, fix: impl Into<String>) -> Probe {
        self.probe(Status::Fail, found, Some(fix.into()))
    }
}

/// The part of a probe's name that names its area.
pub(super) fn area_of(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}
