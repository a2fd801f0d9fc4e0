//! A case: what it is given and how it ends.

use crate::note;
use std::fmt::Display;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use gdrcopy::{Attribute, BackendKind, Gdr, GpuBuffer};

use crate::tools::cuda;
use super::super::tools_shared::Failure;
use super::super::tools_shared::{AllocFn, Common};

/// Why a case did not pass.
#[derive(Debug)]
pub(super) enum Stop {
    /// It makes no sense here.
    Waived(String),
    /// Something is wrong.
    Failed(String),
}

/// How a case, or a part of it, ends.
pub(super) type Outcome<T = ()> = Result<T, Stop>;

/// This case makes no sense here, because.
pub(super) fn waive<T>(reason: impl Display) -> Outcome<T> {
    Err(Stop::Waived(reason.to_string()))
}

/// Something is wrong.
pub(super) fn fail<T>(reason: impl Display) -> Outcome<T> {
    Err(Stop::Failed(reason.to_string()))
}

impl<E: std::error::Error> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}

/// `ensure!(condition, "what is wrong {}", value)` fails the case unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($format:tt)*) => {
        if !$condition {
            return $crate::tools::sanity::fail(format_args!($($format)*));
        }
    };
}
pub(super) use ensure;

/// The function of a case.
pub(super) type Run = fn(&Env) -> Outcome;

/// When a case runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group {
    /// By default.
    Standard,
    /// With `-e`.
    Extended,
    /// When named: they test the tool, not the machine.
    Tool,
}

/// A case.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) name: &'static str,
    /// What it looks at, in a line.
    pub(super) what: &'static str,
    pub(super) group: Group,
    /// Which memory it gets from [`Env::alloc`].
    pub(super) alloc: AllocFn,
    /// Whether its time grows with the cycles that the options ask for.
    pub(super) repeats: bool,
    pub(super) run: Run,
}

/// What a case is given.
#[derive(Debug)]
pub(super) struct Env {
    pub(super) common: Common,
    alloc: AllocFn,
    pub(super) cycles: u32,
    pub(super) threads: u16,
    verbose: bool,
}

/// Opens the library as the options say.
pub(super) fn open(common: &Common) -> gdrcopy::Result<Gdr> {
    common.backend.into_iter().fold(Gdr::builder(), |builder, kind| builder.backend(kind)).open()
}

impl Env {
    pub(super) fn new(common: Common, alloc: AllocFn, cycles: u32, threads: u16, verbose: bool) -> Self {
        Self { common, alloc, cycles, threads, verbose }
    }

    /// Says what is being done, if that is wanted.
    pub(super) fn note(&self, what: impl Display) {
        if self.verbose {
            note!("  {what}");
        }
    }

    /// Opens the library.
    pub(super) fn open(&self) -> Outcome<Gdr> {
        Ok(open(&self.common)?)
    }

    /// Opens the library and makes memory; freed only when the value is dropped.
    pub(super) fn open_with(&self, len: usize) -> Outcome<(Gdr, GpuBuffer)> {
        let gdr = self.open()?;
        let buffer = self.alloc(&gdr, len)?;
        Ok((gdr, buffer))
    }

    /// Memory of the kind that the case is about.
    pub(super) fn alloc(&self, gdr: &Gdr, len: usize) -> Outcome<GpuBuffer> {
        if self.alloc == AllocFn::CuMemCreate && gdr.backend() == BackendKind::Host {
            return waive("the host backend has one kind of memory, which other cases test");
        }
        match gdr.alloc_with(self.common.gpu, len, self.alloc.kind()) {
            Err(error @ gdrcopy::Error::Unsupported { .. }) => waive(error),
            result => Ok(result?),
        }
    }

    /// The CUDA context of the GPU; waives the case where there is no GPU.
    pub(super) fn cuda(&self, gdr: &Gdr) -> Outcome<Arc<CudaContext>> {
        if gdr.backend() == BackendKind::Host {
            return waive("needs a GPU");
        }
        match cuda::context(self.common.gpu) {
            Ok(context) => Ok(context),
            Err(Failure::Usage(message) | Failure::Failed(message)) => fail(message),
        }
    }
}

/// Whether mappings survive the freeing of their memory.
pub(super) fn persistent(gdr: &Gdr) -> Outcome<bool> {
    Ok(gdr.attribute(Attribute::UsePersistentMapping)? == 1)
}

/// A call that must fail, with this `errno`.
pub(super) fn refused<T: std::fmt::Debug>(
    env: &Env,
    what: &str,
    errno: i32,
    result: gdrcopy::Result<T>,
) -> Outcome {
    match result {
        Ok(value) => fail(format_args!("{what} was accepted: {value:?}")),
        Err(error) if error.errno() == errno => {
            env.note(format_args!("{what}: refused as it must be: {error}"));
            Ok(())
        }
        Err(error) => {
            let expected = std::io::Error::from_raw_os_error(errno);
            fail(format_args!("{what}: refused with errno {}, expected {expected}: {error}", error.errno()))
        }
    }
}
