//! Jobs of this program and copies of it.

use std::process::Command;
use std::time::Duration;

use clap::ValueEnum;
use gdasync::mp::Communicator;
use gdasync::mp::launch::{Bootstrap, Children, Launch, spawn_command};

use super::Result;

/// What the ranks of a job play.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Part {
    /// Two ranks with many queue pairs.
    Qps,
    /// Many ranks.
    Ranks,
}

/// A job whose rank 0 is this process.
pub(super) struct Job {
    pub(super) comm: Communicator,
    children: Children,
}

impl Job {
    /// Starts the other ranks with the arguments of this process.
    pub(super) fn start(size: usize, part: Part, timeout: Duration) -> Result<Self> {
        if let Some(launch) = Launch::detect()?.filter(|launch| launch.size > 1) {
            return Err(format!(
                "this process is rank {} of {}: start this benchmark without a launcher, it starts jobs of several sizes itself",
                launch.rank, launch.size
            )
            .into());
        }
        let program = std::env::current_exe()?;
        let name = part.to_possible_value().ok_or("a part without a name")?;
        let (launch, listener, children) = spawn_command(size, |_| {
            let mut command = Command::new(&program);
            command.args(std::env::args_os().skip(1)).args(["--part", name.get_name()]);
            command
        })?;
        let bootstrap = Bootstrap::root(listener, &launch, timeout)?;
        let comm = Communicator::builder().timeout(timeout).init_over(bootstrap)?;
        Ok(Self { comm, children })
    }

    /// The other end: what a process that [`Job::start`] started is a rank of.
    pub(super) fn join(timeout: Duration) -> Result<Communicator> {
        let launch = Launch::detect()?.ok_or("--part is for processes that this benchmark starts")?;
        let bootstrap = Bootstrap::connect(&launch, timeout)?;
        Ok(Communicator::builder().timeout(timeout).init_over(bootstrap)?)
    }

    /// The end of all ranks.
    pub(super) fn end(self, timeout: Duration) -> Result<()> {
        self.comm.finalize(timeout)?;
        Ok(self.children.wait(timeout)?)
    }
}
