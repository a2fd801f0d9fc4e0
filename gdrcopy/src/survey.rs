//! What would serve, found without CUDA, and opened when it is needed.

use std::fmt;

use crate::backend::dmabuf::DmaBuf;
use crate::backend::gdrdrv::Gdrdrv;
use crate::backend::host::Host;
use crate::backend::rm::Rm;
use crate::backend::{Attribute, BackendKind};
use crate::builder::{Ladder, Rung};
use crate::error::Result;
use crate::fork::Owner;
use crate::gdr::Gdr;
use crate::system::Lazy;

/// A library that opens at the first need; [`GdrBuilder::survey`](crate::GdrBuilder::survey) makes it.
///
/// Until then nothing has been proved to work, and nothing is kept open but the device file of `gdrdrv`, which takes no
/// CUDA. Any thread may use it; a forked child must make its own.
#[derive(Debug)]
pub struct Survey {
    ladder: Ladder,
    rung: Rung<Found>,
    owner: Owner,
}

/// What one look at a backend gave.
#[derive(Debug)]
enum Found {
    /// Opening it took no CUDA.
    Open(Gdr),
    /// It may serve. If it does, these are its attributes.
    Likely { attribute: fn(Attribute) -> u32, opened: Lazy<Gdr> },
}

impl Found {
    fn likely(attribute: fn(Attribute) -> u32) -> Self {
        Self::Likely { attribute, opened: Lazy::new() }
    }
}

impl Survey {
    pub(crate) fn new(ladder: Ladder) -> Result<Self> {
        let system = &ladder.system;
        // The device files of a GPU are not there when plain memory's turn comes.
        let rung = ladder.climb(
            || false,
            |kind| {
                Ok(match kind {
                    BackendKind::Gdrdrv => {
                        let backend = Gdrdrv::open(system, ladder.allow_volatile)?;
                        // The first of the ladder: there is none before it.
                        Found::Open(Gdr::new(Box::new(backend), Vec::new(), system.clone()))
                    }
                    BackendKind::DmaBuf => {
                        DmaBuf::survey(system)?;
                        Found::likely(DmaBuf::attribute_of)
                    }
                    BackendKind::Rm => {
                        Rm::survey(system)?;
                        Found::likely(Rm::attribute_of)
                    }
                    BackendKind::Host => Found::likely(Host::attribute_of),
                })
            },
        )?;
        let survey = Self { ladder, rung, owner: Owner::this_process() };
        if survey.opened().is_none() {
            tracing::info!("likely to serve: {survey}");
        }
        Ok(survey)
    }

    /// The library; opened by the first call, as by [`GdrBuilder::open`](crate::GdrBuilder::open). Another backend than
    /// [`backend`](Self::backend) said may serve then.
    ///
    /// # Errors
    /// [`Error::NoBackend`](crate::Error::NoBackend) with the reason of every backend; the next call tries again.
    /// [`Error::OtherProcess`](crate::Error::OtherProcess) in a forked child.
    pub fn open(&self) -> Result<&Gdr> {
        // Also because a thread that the child does not have may have been opening.
        self.owner.check()?;
        match &self.rung.found {
            Found::Open(gdr) => Ok(gdr),
            Found::Likely { opened, .. } => opened.get_or_try_init(|| self.ladder.open()),
        }
    }

    /// The library, if it has been opened.
    pub fn opened(&self) -> Option<&Gdr> {
        match &self.rung.found {
            Found::Open(gdr) => Some(gdr),
            Found::Likely { opened, .. } => opened.get(),
        }
    }

    /// The backend in use, or the one that will most probably be.
    pub fn backend(&self) -> BackendKind {
        self.opened().map_or(self.rung.kind, Gdr::backend)
    }

    /// As [`Gdr::driver_version`]; does not open.
    pub fn driver_version(&self) -> Option<(u16, u16)> {
        self.opened().and_then(Gdr::driver_version)
    }

    /// As [`Gdr::attribute`], of the backend that [`backend`](Self::backend) names; does not open.
    ///
    /// # Errors
    /// What the backend says.
    pub fn attribute(&self, attribute: Attribute) -> Result<u32> {
        match &self.rung.found {
            Found::Open(gdr) => gdr.attribute(attribute),
            Found::Likely { attribute: of, opened } => {
                opened.get().map_or_else(|| Ok(of(attribute)), |gdr| gdr.attribute(attribute))
            }
        }
    }
}

/// The backend, whether it is in use yet, and why the earlier ones are not, on one line.
impl fmt::Display for Survey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(gdr) = self.opened() {
            return gdr.fmt(f);
        }
        write!(f, "{} (to be opened at first use)", self.rung.kind)?;
        self.rung.refusals.iter().try_for_each(|refusal| write!(f, "; not {refusal}"))
    }
}
