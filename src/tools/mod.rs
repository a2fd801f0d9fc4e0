//! The tools that users of GDRCopy know, with their options: does mapping GPU memory work on this machine, and how
//! fast is it?
//!
//! Each is a program of its own (`gdrcopy_copybw`) and a subcommand (`gdasync gdrcopy copybw`). They exit with 0 for
//! success, 1 for a failure, 2 for wrong options.

mod apiperf;
mod batches;
mod copies;
mod copybw;
mod copylat;
mod cuda;
mod failure;
mod histogram;
mod options;
mod output;
mod pattern;
mod pplat;
mod report;
mod sanity;
mod target;

use crate::note;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, Command, Subcommand};

pub use apiperf::Apiperf;
pub use copybw::Copybw;
pub use copylat::Copylat;
pub use failure::Failure;
pub use pplat::Pplat;
pub use sanity::Sanity;

/// The tools as subcommands.
#[derive(Debug, Subcommand)]
#[expect(missing_docs, reason = "each has its own")]
pub enum Tool {
    Sanity(Sanity),
    Copybw(Copybw),
    Copylat(Copylat),
    Apiperf(Apiperf),
    Pplat(Pplat),
}

/// A tool, with its options.
pub trait Program: Args {
    /// The name of the program that is this tool alone.
    const NAME: &'static str;

    /// Does what the options say.
    ///
    /// # Errors
    /// Why it could not, or that something is wrong with what it looked at.
    fn run(&self) -> Result<(), Failure>;
}

impl Tool {
    /// Runs it and tells of a failure.
    pub fn run(&self) -> ExitCode {
        match self {
            Self::Sanity(tool) => tell(tool),
            Self::Copybw(tool) => tell(tool),
            Self::Copylat(tool) => tell(tool),
            Self::Apiperf(tool) => tell(tool),
            Self::Pplat(tool) => tell(tool),
        }
    }
}

fn command<P: Program>() -> Command {
    P::augment_args(Command::new(P::NAME).version(env!("CARGO_PKG_VERSION")))
}

fn tell<P: Program>(tool: &P) -> ExitCode {
    match tool.run() {
        Ok(()) => ExitCode::SUCCESS,
        // Ends the process with status 2, as for any option that cannot be understood.
        Err(Failure::Usage(message)) => command::<P>().error(ErrorKind::ValueValidation, message).exit(),
        Err(Failure::Failed(message)) => {
            note!("{}: {message}", P::NAME);
            ExitCode::FAILURE
        }
    }
}

/// The main function of a program that is one tool.
pub fn main<P: Program>() -> ExitCode {
    log_to_stderr();
    let matches = command::<P>().get_matches();
    let tool = P::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    tell(&tool)
}

/// Sends the logs that `RUST_LOG` asks for to standard error.
pub fn log_to_stderr() {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
}
