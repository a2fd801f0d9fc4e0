//! Building a communicator from a launcher's job, or by starting the other ranks.

use super::bootstrap::Bootstrap;
use super::environment::Launch;
use super::spawn::{Children, spawn_self};
use crate::builder::CommunicatorBuilder;
use crate::communicator::Communicator;
use crate::deadline::Deadline;
use crate::error::{Error, Result};

impl CommunicatorBuilder {
    /// Joins the job. Every rank must call this.
    ///
    /// # Errors
    /// [`Error::Launch`] when there is no launcher, and nothing to spawn; [`Error::Bootstrap`] and [`Error::Deadline`] name the rank
    /// or address at fault; [`Error::Child`] when a process of [`CommunicatorBuilder::spawn`] ends before; [`Error::Device`] from
    /// the RDMA device, for a setting out of range, or for an `MP_REG_CACHE`, `MP_LOCAL` or `MP_GPU_PATH` that means nothing.
    pub fn init(self) -> Result<Communicator> {
        let deadline = Deadline::after(self.0.timeout);
        let resolved = self.resolve()?;
        let (mut bootstrap, mut children) = self.join()?;
        let opened = bootstrap.open_listeners(deadline.remaining());
        let communicator = opened.and_then(|()| self.build(Box::new(bootstrap), resolved, deadline));
        let communicator = communicator.map_err(|error| match &mut children {
            Some(children) => children.explain_by_child(error),
            None => error,
        })?;
        *communicator.0.children.lock() = children.map(|children| Box::new(children) as _);
        Ok(communicator)
    }

    fn join(&self) -> Result<(Bootstrap, Option<Children>)> {
        if let Some(launch) = Launch::detect()? {
            return Ok((Bootstrap::connect(&launch, self.0.timeout)?, None));
        }
        let fix = "start it with mpirun or srun, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or let it spawn its peers";
        let size = self.0.spawn.ok_or_else(|| Error::launch("no launcher started this process", fix))?;
        let (launch, listener, mut children) = spawn_self(size)?;
        let check = &mut || children.check_all_run();
        let bootstrap = Bootstrap::root_while(listener, &launch, self.0.timeout, check)
            .map_err(|error| children.explain_by_child(error))?;
        Ok((bootstrap, Some(children)))
    }
}

impl Communicator {
    /// Joins the job of the launcher that started this process.
    ///
    /// # Errors
    /// As [`CommunicatorBuilder::init`].
    pub fn init() -> Result<Self> {
        Self::builder().init()
    }
}
