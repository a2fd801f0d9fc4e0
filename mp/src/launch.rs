//! Launching: how the processes of a job learn their ranks and connect, from the environment of a launcher or by starting each
//! other. Nothing else in this crate depends on it.
//!
//! [`Launch`] is read from the environment:
//!
//! | launcher | rank, size | place on the host | job id |
//! |---|---|---|---|
//! | torchrun, or by hand | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `TORCHELASTIC_RUN_ID` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `_SIZE` | `PMIX_NAMESPACE`, `OMPI_MCA_ess_base_jobid` |
//! | MPICH, Intel MPI, PALS | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` (or `PMI_LOCAL_RANK`, `_SIZE`) | `PMI_JOBID`, `PALS_APID`, `PBS_JOBID`, `LSB_JOBID` |
//! | srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID` | `SLURM_JOB_ID`, `SLURM_STEP_ID` |
//!
//! The first row that applies wins. An empty variable counts as unset.
//!
//! Rank 0 listens at `MASTER_ADDR`:`MASTER_PORT`. Where these are not set:
//!
//! - **MPICH, Intel MPI** (`PMI_FD`): rank 0 takes a free port and publishes it through the launcher's PMI, version 1, also to
//!   other hosts, which dial `MASTER_ADDR` or the name by which the launcher knows its host. A process can use PMI only
//!   once: later communicators use the same port, and MPI cannot be initialized afterwards. If an MPI library is
//!   loaded, PMI belongs to it: boot over MPI then ([`CommunicatorBuilder::init_over`](crate::CommunicatorBuilder::init_over)), or
//!   set both variables.
//! - **Open MPI** on one host: rank 0 takes a free port and writes it to a file in the job's folder
//!   (`PMIX_SERVER_TMPDIR`). Several hosts need `MASTER_ADDR` (`mpirun -x MASTER_ADDR=HOST`): only a PMIx library knows
//!   the host of rank 0.
//! - **srun**: the first node of the step (with `--distribution=arbitrary` rank 0 may be elsewhere: set `MASTER_ADDR` then).
//! - else 127.0.0.1 when all ranks are on this host.
//!
//! Without `MASTER_PORT` the port is 29500 for the first row, as in torchrun,
//! and otherwise 20000 + FNV-1a-64(job id) mod 10000, which is below the ports Linux hands out itself.
//! torchrun keeps `MASTER_PORT` for its own store (`TORCHELASTIC_USE_AGENT_STORE=True`); then the same
//! formula over the run id and that port gives another one.
//!
//! `GDSYNC_JOB_TOKEN` (64-bit decimal) keeps jobs apart that share a port; it defaults to the hash of
//! the job id (for PMI that of its key-value space), or 0.

//!
//! [`Bootstrap`] connects the ranks by TCP through rank 0, and [`spawn_self`] starts the other ranks on this host.
//! [`CommunicatorBuilder::spawn`](crate::CommunicatorBuilder::spawn) also binds each of them to CPUs of its own. Processes without a
//! job connect in pairs, when they like: [`Listener`]. [`Communicator::split`](crate::Communicator::split) makes parts of a job.

mod binding;
mod bootstrap;
mod connection;
mod environment;
mod pairwise;
mod pmi;
mod regroup;
mod rendezvous;
mod spawn;
mod split;

pub use bootstrap::Bootstrap;
pub use connection::MAX_PAYLOAD;
pub use environment::{Launch, Launcher, Root};
pub use pairwise::Listener;
pub use spawn::{Children, spawn_command, spawn_self};
