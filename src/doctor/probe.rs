//! Probes and their results.

use std::fmt;

use serde::Serialize;

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
