//! Reads the place of this process in its job from the environment.

use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::{Error, Result};

/// Most ranks of one job: each is a connection to rank 0.
const MAX_SIZE: usize = 1 << 16;

/// The default port of torchrun.
const TORCH_PORT: u16 = 29500;

/// The launcher that started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// torchrun, [`spawn_self`](crate::launch::spawn_self), or a person: `RANK` and `WORLD_SIZE`.
    Env,
    /// Open MPI's mpirun.
    OpenMpi,
    /// A launcher that speaks PMI: MPICH's Hydra, Intel MPI, HPE PALS.
    Pmi,
    /// Slurm's srun.
    Slurm,
}

/// The place of this process in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// This process, 0 to `size - 1`.
    pub rank: usize,
    /// Processes of the job, 1 to 65536.
    pub size: usize,
    /// This process among those on the same host: picks the GPU. When the launcher does not say,
    /// the rank if rank 0 is at a loopback address (all ranks are here then), else 0.
    pub local_rank: usize,
    /// Processes on this host, if known.
    pub local_size: Option<usize>,
    /// Where the ranks find rank 0.
    pub root: Root,
    /// Equal in all ranks of the job, different in others; 0 if unknown.
    pub token: u64,
    /// The launcher that started this process.
    pub launcher: Launcher,
}

/// Where the ranks find rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Root {
    /// It listens at this `host:port`; an IPv6 address is in brackets.
    At(String),
    /// It takes a free port and tells the others through the launcher's PMI.
    Pmi {
        /// The name or address of its own host that rank 0 gives to the others; without one, what the system calls it.
        host: Option<String>,
    },
    /// It takes a free port of loopback and writes it to this file, of which there is one for each job.
    File(PathBuf),
}

/// The variables of one kind of launcher.
struct Family {
    launcher: Launcher,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
    job: &'static [&'static str],
}

const FAMILIES: [Family; 4] = [
    Family {
        launcher: Launcher::Env,
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
        job: &["TORCHELASTIC_RUN_ID"],
    },
    Family {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    },
    Family {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        job: &["PMI_JOBID", "PALS_APID", "PBS_JOBID", "LSB_JOBID"],
    },
    Family {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        size: "SLURM_STEP_NUM_TASKS",
        local_rank: &["SLURM_LOCALID"],
        local_size: &[],
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
];

/// Variables of launchers that do not tell the number of processes, and what to do then.
const INCOMPLETE: [(&str, &str); 2] = [
    ("PMI_PORT", "start the program without the option -pmi-port of mpiexec"),
    ("PMIX_RANK", "start the program with mpirun, or with prterun --personality ompi"),
];

impl Family {
    fn applies(&self, vars: &Vars<'_>) -> bool {
        let (rank, size) = (vars.text(self.rank), vars.text(self.size));
        match self.launcher {
            // srun with a PMI plug-in sets PMI_RANK too, but only SLURM_* says where the ranks are.
            Launcher::Pmi => {
                let srun = self.local_rank.iter().all(|name| vars.text(name).is_none())
                    && rank == vars.text("SLURM_PROCID")
                    && size == vars.text("SLURM_STEP_NUM_TASKS");
                (rank.is_some() || size.is_some()) && !srun
            }
            // sbatch sets SLURM_PROCID=0 for the batch script, which is no rank of anything; only srun
            // sets the size of a step.
            Launcher::Slurm => rank.is_some() && size.is_some(),
            Launcher::Env | Launcher::OpenMpi => rank.is_some() || size.is_some(),
        }
    }
}

impl Launch {
    /// Reads the environment of this process; `None` when no launcher started it.
    ///
    /// # Errors
    /// [`Error::Launch`] names the variable that is missing, malformed or contradicts another.
    pub fn detect() -> Result<Option<Self>> {
        // Lossy, so that a value that is not UTF-8 is reported as malformed and not overlooked.
        Self::from_vars(&|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Like [`Launch::detect`], with the variables from `get`.
    ///
    /// # Errors
    /// [`Error::Launch`] as [`Launch::detect`].
    pub fn from_vars(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let vars = Vars(get);
        let Some(family) = FAMILIES.iter().find(|family| family.applies(&vars)) else {
            return match INCOMPLETE.iter().find_map(|(name, fix)| Some((name, vars.text(name)?, fix))) {
                Some((name, value, fix)) => {
                    let what =
                        format!("{name} is '{value}', but no variable tells rank and size of this process");
                    Err(Error::launch(what, fix))
                }
                None => Ok(None),
            };
        };
        let rank = vars.required(family.rank, family.size)?;
        let size = vars.required(family.size, family.rank)?;
        // First: later errors would be misleading for such ranks.
        check_rank((family.rank, rank), (family.size, size))?;
        let local_size = match family.launcher {
            Launcher::Slurm => {
                vars.number("SLURM_STEP_NUM_NODES")?.filter(|&nodes: &usize| nodes == 1).map(|_| size)
            }
            _ => vars.first_number(family.local_size)?,
        };
        let job = vars.joined(family.job);
        let (root, all_here) = vars.root(family.launcher, size, local_size, job.as_deref())?;
        let local_rank = match vars.first_number(family.local_rank)? {
            Some(local_rank) => local_rank,
            None if all_here => rank,
            None => 0,
        };
        let token = match vars.number("GDSYNC_JOB_TOKEN")? {
            Some(token) => token,
            None => job.map_or(0, |job| hash(&job)),
        };
        let launch = Self { rank, size, local_rank, local_size, root, token, launcher: family.launcher };
        launch.check(family.rank, family.size)?;
        Ok(Some(launch))
    }

    /// Checks the numbers against each other; `rank` and `size` are their names for the message.
    pub(super) fn check(&self, rank: &str, size: &str) -> Result<()> {
        check_rank((rank, self.rank), (size, self.size))?;
        match self.local_size {
            Some(local) if local > self.size || self.local_rank >= local => Err(Error::launch(
                format!("local rank {} of {local} does not fit {size} {}", self.local_rank, self.size),
                "make the local rank smaller than the local size, and that not larger than the job",
            )),
            _ => Ok(()),
        }
    }
}

/// Checks a rank and a size, each with its name.
fn check_rank((rank_name, rank): (&str, usize), (size_name, size): (&str, usize)) -> Result<()> {
    let fix = "give every rank of the job the same size, and each rank below it once";
    if size == 0 || size > MAX_SIZE {
        return Err(Error::launch(format!("{size_name} is {size}: expected 1 to {MAX_SIZE}"), fix));
    }
    if rank >= size {
        return Err(Error::launch(format!("{rank_name} is {rank} but {size_name} is {size}"), fix));
    }
    Ok(())
}

/// Whether a host is a loopback address.
pub(super) fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The environment, or a map of a test.
struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    fn number<T: FromStr>(&self, name: &str) -> Result<Option<T>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(Error::launch(
                match name {
                    "MASTER_PORT" => format!("{name} is '{text}': expected 1 to 65535"),
                    _ => format!("{name} is '{text}': not a number in its range"),
                },
                "set it to a decimal number, or start the program through its launcher",
            )),
        }
    }

    fn first_number(&self, names: &[&str]) -> Result<Option<usize>> {
        let set = names.iter().find(|name| self.text(name).is_some());
        set.map_or(Ok(None), |name| self.number(name))
    }

    fn required(&self, name: &str, other: &str) -> Result<usize> {
        self.number(name)?.ok_or_else(|| {
            let other = format!("{other} is '{}'", self.text(other).unwrap_or_default());
            Error::launch(format!("{name} is not set although {other}"), "set both of them or none")
        })
    }

    fn joined(&self, names: &[&str]) -> Option<String> {
        let set: Vec<String> = names.iter().filter_map(|name| self.text(name)).collect();
        (!set.is_empty()).then(|| set.join("."))
    }

    /// Where rank 0 is, and whether that is this host.
    fn root(
        &self,
        launcher: Launcher,
        size: usize,
        local_size: Option<usize>,
        job: Option<&str>,
    ) -> Result<(Root, bool)> {
        let (given, port) = (self.text("MASTER_ADDR"), self.text("MASTER_PORT"));
        let here = size == 1 || local_size == Some(size);
        if launcher == Launcher::Pmi && port.is_none() && self.text("PMI_FD").is_some() {
            let host = match given.is_some() || here {
                true => Some(self.root_host(launcher, size, local_size)?),
                // The first up to MPICH 4, the second since.
                false => ["MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "PMI_HOSTNAME"]
                    .iter()
                    .find_map(|name| self.text(name)),
            };
            return Ok((Root::Pmi { host }, here));
        }
        if let (Launcher::OpenMpi, None, None, true) = (launcher, &given, &port, here)
            && let (Some(folder), Some(job)) = (self.text("PMIX_SERVER_TMPDIR"), job)
        {
            // The key of the job's transports is random, the name of the job is not.
            let key = self.text("OMPI_MCA_orte_precondition_transports").unwrap_or_default();
            let name = format!("gdsync-{:016x}", hash(&format!("{job}:{key}")));
            return Ok((Root::File(Path::new(&folder).join(name)), here));
        }
        let host = self.root_host(launcher, size, local_size)?;
        let port = self.root_port(launcher, job)?;
        let root = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        Ok((Root::At(root), is_loopback(&host)))
    }

    fn root_host(&self, launcher: Launcher, size: usize, local_size: Option<usize>) -> Result<String> {
        const FIX: &str = "set MASTER_ADDR to the host name or address of rank 0, alike for all ranks \
                           (mpirun -x MASTER_ADDR=HOST, mpiexec -genv MASTER_ADDR HOST)";
        if let Some(host) = self.text("MASTER_ADDR") {
            let bare = host.trim_start_matches('[').trim_end_matches(']');
            // Two colons or more are an IPv6 address.
            if bare.matches(':').count() == 1 || bare.contains(char::is_whitespace) {
                return Err(Error::launch(
                    format!("MASTER_ADDR is '{host}': not a host (the port has its own variable)"),
                    FIX,
                ));
            }
            return Ok(bare.to_owned());
        }
        if size == 1 || local_size == Some(size) {
            return Ok("127.0.0.1".to_owned());
        }
        let nodes =
            ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"].into_iter().find(|name| self.text(name).is_some());
        match nodes {
            Some(name) if launcher == Launcher::Slurm => {
                let list = self.text(name).unwrap_or_default();
                first_host(&list)
                    .ok_or_else(|| Error::launch(format!("{name} is '{list}': not a list of hosts"), FIX))
            }
            _ => Err(Error::launch(
                format!("MASTER_ADDR is not set, and nothing says that all {size} ranks are on this host"),
                FIX,
            )),
        }
    }

    fn root_port(&self, launcher: Launcher, job: Option<&str>) -> Result<u16> {
        let port = self.number("MASTER_PORT")?.map(NonZeroU16::get);
        if launcher == Launcher::Env {
            let port = port.unwrap_or(TORCH_PORT);
            let taken = self.text("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
            return Ok(if taken { port_of(&format!("{}:{port}", job.unwrap_or_default())) } else { port });
        }
        port.or_else(|| job.map(port_of)).ok_or_else(|| {
            Error::launch(
                "MASTER_PORT is not set, and the launcher gives no job id to choose a port by",
                "set MASTER_PORT to a free port of rank 0's host, alike for all ranks (mpiexec -genv MASTER_PORT 29500)",
            )
        })
    }
}

/// FNV-1a, 64 bits: short, and the same in every build and on every host.
pub(super) fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, byte| (h ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn port_of(job: &str) -> u16 {
    20_000 + u16::try_from(hash(job) % 10_000).expect("a remainder of 10000 fits 16 bits")
}

/// The first host of a Slurm node list such as `node[003-007,9],gpu1`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        match c {
            ',' => break,
            '[' => {
                let (range, after) = rest.split_once(']')?;
                let number = range.split(['-', ',']).next().filter(|n| !n.is_empty())?;
                if !number.bytes().all(|b| b.is_ascii_digit()) {
                    return None;
                }
                host.push_str(number);
                rest = after;
            }
            ']' => return None,
            c if c.is_whitespace() => return None,
            c => host.push(c),
        }
    }
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Detects from `NAME=value` words.
    fn detect(vars: &str) -> Result<Option<Launch>> {
        Launch::from_vars(&|name| {
            let found =
                vars.split_whitespace().filter_map(|word| word.split_once('=')).find(|(key, _)| *key == name);
            found.map(|(_, value)| value.to_owned())
        })
    }

    fn launch(vars: &str) -> Launch {
        detect(vars).unwrap().expect("a launcher")
    }

    fn at(root: impl Into<String>) -> Root {
        Root::At(root.into())
    }

    fn by_pmi(host: Option<&str>) -> Root {
        Root::Pmi { host: host.map(str::to_owned) }
    }

    fn error(vars: &str) -> String {
        match detect(vars) {
            Err(error @ Error::Launch { .. }) => error.to_string(),
            other => panic!("expected a launch error, got {other:?}"),
        }
    }

    const TORCHRUN: &str = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=1234 \
                            TORCHELASTIC_RUN_ID=job";
    const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 \
                            OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=prterun-n1-77@1";
    const HYDRA: &str = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
    const SEVERAL: &str = "PMI_RANK=1 PMI_SIZE=4 PMI_FD=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
    const SRUN: &str = "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=0 SLURM_JOB_ID=42 SLURM_STEP_ID=1 \
                        SLURM_JOB_NODELIST=other[1-9] SLURM_STEP_NODELIST=node[003-007,9],gpu1";

    /// `sbatch` sets the last one for its script, which is no rank of anything.
    #[test]
    fn no_launcher_is_none() {
        let unset = "MASTER_ADDR=a MASTER_PORT=1 PATH=/bin RANK= WORLD_SIZE=";
        for vars in ["", unset, "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=1"] {
            assert_eq!(detect(vars).unwrap(), None, "{vars}");
        }
    }

    #[test]
    fn launchers_tell_places() {
        for (vars, launcher, rank, size, local_rank, local_size, job) in [
            (TORCHRUN, Launcher::Env, 5, 8, 1, Some(4), "job"),
            (OPEN_MPI, Launcher::OpenMpi, 3, 4, 3, Some(4), "prterun-n1-77@1"),
            (&format!("{HYDRA} PALS_APID=x"), Launcher::Pmi, 1, 2, 1, Some(2), "x"),
            (
                "PMI_RANK=1 PMI_SIZE=2 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2 PALS_APID=x",
                Launcher::Pmi,
                1,
                2,
                1,
                Some(2),
                "x",
            ),
            (SRUN, Launcher::Slurm, 2, 4, 0, None, "42.1"),
            (&format!("{SRUN} SLURM_STEP_NUM_NODES=1"), Launcher::Slurm, 2, 4, 0, Some(4), "42.1"),
        ] {
            let root = launch(vars).root;
            let token = hash(job);
            let expected = Launch { rank, size, local_rank, local_size, root, token, launcher };
            assert_eq!(launch(vars), expected, "{vars}");
        }
        // By hand: all ranks are here if rank 0 is at a loopback address.
        for (address, local_rank) in [("127.0.0.1", 1), ("::1", 1), ("n1", 0)] {
            let found = launch(&format!("RANK=1 WORLD_SIZE=2 MASTER_ADDR={address}"));
            assert_eq!((found.local_rank, found.local_size, found.token), (local_rank, None, 0), "{address}");
        }
    }

    /// Variables set by hand win, then what starts the ranks, not what is around it.
    #[test]
    fn the_innermost_launcher_wins() {
        for (vars, launcher) in [
            (format!("{OPEN_MPI} SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1"), Launcher::OpenMpi),
            (format!("{OPEN_MPI} RANK=0 WORLD_SIZE=1"), Launcher::Env),
            // srun with a PMI plug-in, and Hydra inside an allocation.
            (format!("{SRUN} PMI_RANK=2 PMI_SIZE=4"), Launcher::Slurm),
            (format!("{SRUN} PMI_RANK=2 PMI_SIZE=4 PMI_FD=5"), Launcher::Slurm),
            (format!("{SRUN} PMIX_RANK=2"), Launcher::Slurm),
            (
                format!("{SRUN} PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MASTER_ADDR=n MASTER_PORT=1"),
                Launcher::Pmi,
            ),
        ] {
            assert_eq!(launch(&vars).launcher, launcher, "{vars}");
        }
    }

    #[test]
    fn rank_0_is_found() {
        let agent = "TORCHELASTIC_USE_AGENT_STORE=True";
        for (vars, root) in [
            (TORCHRUN.to_owned(), at("n1:1234")),
            // The agent of torchrun keeps the port.
            (format!("{TORCHRUN} {agent}"), at(format!("n1:{}", port_of("job:1234")))),
            ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1".to_owned(), at("127.0.0.1:29500")),
            ("RANK=0 WORLD_SIZE=1".to_owned(), at("127.0.0.1:29500")),
            ("RANK=0 WORLD_SIZE=2 MASTER_PORT=5 MASTER_ADDR=fe80::1".to_owned(), at("[fe80::1]:5")),
            ("RANK=0 WORLD_SIZE=2 MASTER_PORT=5 MASTER_ADDR=[fe80::1]".to_owned(), at("[fe80::1]:5")),
            (OPEN_MPI.to_owned(), at(format!("127.0.0.1:{}", port_of("prterun-n1-77@1")))),
            (format!("{HYDRA} MASTER_PORT=7000"), at("127.0.0.1:7000")),
            (format!("{HYDRA} PMI_FD=8 MPIR_CVAR_CH3_INTERFACE_HOSTNAME=n1"), by_pmi(Some("127.0.0.1"))),
            (SEVERAL.to_owned(), by_pmi(None)),
            (format!("{SEVERAL} MPIR_CVAR_CH3_INTERFACE_HOSTNAME=n1"), by_pmi(Some("n1"))),
            (format!("{SEVERAL} PMI_HOSTNAME=n3"), by_pmi(Some("n3"))),
            (format!("{SEVERAL} MASTER_ADDR=n2"), by_pmi(Some("n2"))),
            (format!("{SEVERAL} MASTER_ADDR=n2 MASTER_PORT=5"), at("n2:5")),
            (SRUN.to_owned(), at(format!("node003:{}", port_of("42.1")))),
            (format!("{SRUN} PMI_RANK=2 PMI_SIZE=4 PMI_FD=5"), at(format!("node003:{}", port_of("42.1")))),
            (format!("{SRUN} SLURM_STEP_NUM_NODES=1"), at(format!("127.0.0.1:{}", port_of("42.1")))),
            (format!("{SRUN} MASTER_ADDR=m MASTER_PORT=9"), at("m:9")),
        ] {
            assert_eq!(launch(&vars).root, root, "{vars}");
        }
    }

    #[test]
    fn open_mpi_by_file() {
        let one = format!("{OPEN_MPI} PMIX_SERVER_TMPDIR=/tmp/x");
        let file = |vars: &str| match launch(vars).root {
            Root::File(path) => path,
            other => panic!("{other:?}"),
        };
        assert_eq!(file(&one).parent(), Some(Path::new("/tmp/x")));
        assert_ne!(file(&one), file(&format!("{one} OMPI_MCA_orte_precondition_transports=12-34")));
        assert_ne!(file(&one), file(&one.replace("77@1", "78@1")));
        assert_eq!(launch(&format!("{one} MASTER_PORT=5")).root, at("127.0.0.1:5"));
        let elsewhere = one.replace("LOCAL_SIZE=4", "LOCAL_SIZE=2").replace("RANK=3", "RANK=1");
        assert!(error(&elsewhere).contains("set MASTER_ADDR"));
    }

    #[test]
    fn tokens_may_be_given() {
        assert_eq!(launch(&format!("{SRUN} GDSYNC_JOB_TOKEN={}", u64::MAX)).token, u64::MAX);
        assert_eq!(launch(&format!("{HYDRA} PMI_FD=8")).token, 0, "none is given");
    }

    #[test]
    fn errors_name_variable_and_value() {
        let cases = [
            ("RANK=1", "WORLD_SIZE is not set although RANK is '1'"),
            ("WORLD_SIZE=1", "RANK is not set although WORLD_SIZE is '1'"),
            ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK is not set"),
            ("PMI_RANK=0", "PMI_SIZE is not set"),
            ("RANK=x WORLD_SIZE=2", "RANK is 'x'"),
            ("RANK=-1 WORLD_SIZE=2", "RANK is '-1'"),
            ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=a", "RANK is 2 but WORLD_SIZE is 2"),
            ("RANK=5 WORLD_SIZE=2", "RANK is 5 but WORLD_SIZE is 2"),
            ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE is 0"),
            ("RANK=0 WORLD_SIZE=0 MASTER_ADDR=a", "WORLD_SIZE is 0"),
            ("RANK=0 WORLD_SIZE=65537 MASTER_ADDR=a", "WORLD_SIZE is 65537"),
            (
                "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65536",
                "MASTER_PORT is '65536': expected 1 to 65535",
            ),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", "MASTER_PORT is '0'"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a:1", "MASTER_ADDR is 'a:1'"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a LOCAL_RANK=y", "LOCAL_RANK is 'y'"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "local rank 2 of 2"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a LOCAL_WORLD_SIZE=3", "local rank 0 of 3"),
            (
                "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=1 SLURM_STEP_NODELIST=n[1",
                "SLURM_STEP_NODELIST is 'n[1'",
            ),
            (&format!("{SRUN} GDSYNC_JOB_TOKEN=-1"), "GDSYNC_JOB_TOKEN is '-1'"),
            (HYDRA, "set MASTER_PORT"),
            ("RANK=0 WORLD_SIZE=2", "set MASTER_ADDR"),
            (
                &OPEN_MPI.replace("LOCAL_SIZE=4", "LOCAL_SIZE=2").replace("RANK=3", "RANK=1"),
                "set MASTER_ADDR",
            ),
            ("PMI_PORT=n1:4000 PMI_ID=0", "-pmi-port"),
            ("PMIX_RANK=1 PMIX_NAMESPACE=prterun-n1-7@1", "--personality ompi"),
        ];
        for (vars, expected) in cases {
            let message = error(vars);
            assert!(message.contains(expected), "{vars}: {message}");
        }
    }

    #[test]
    fn derived_ports_are_stable_and_in_range() {
        // Reference values of FNV-1a-64.
        assert_eq!(hash(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(hash("foobar"), 0x8594_4171_f739_67e8);
        for job in 0..1000 {
            assert!((20_000..30_000).contains(&port_of(&job.to_string())));
        }
    }

    #[test]
    fn first_host_of_a_node_list() {
        let cases = [
            ("gpu1", Some("gpu1")),
            ("gpu1,gpu2", Some("gpu1")),
            ("node[003-007,9],gpu1", Some("node003")),
            ("node[9,003-007]", Some("node9")),
            ("node[12]", Some("node12")),
            ("rack[1-2]node[01-04]-ib,x", Some("rack1node01-ib")),
            ("n-a.example.org,b", Some("n-a.example.org")),
            ("", None),
            (",a", None),
            ("node[", None),
            ("node[1-2", None),
            ("node[]", None),
            ("node[-3]", None),
            ("node[a-b]", None),
            ("node]1[", None),
            ("a b", None),
        ];
        for (list, expected) in cases {
            assert_eq!(first_host(list).as_deref(), expected, "{list}");
        }
    }

    /// Any values of the variables that are asked for.
    #[test]
    fn any_environment_is_a_launch_or_an_error() {
        bolero::check!().with_type::<(u64, Vec<u8>)>().for_each(|(chosen, bytes)| {
            let (words, asked) = (String::from_utf8_lossy(bytes), std::cell::Cell::new(0));
            let found = Launch::from_vars(&|name| {
                let n: u32 = asked.replace(asked.get() + 1);
                let number = u64::from(bytes.get(n as usize).copied().unwrap_or_default() % 8);
                match chosen >> (n * 2 % 64) & 3 {
                    0 => None,
                    1 => words.split('\n').nth(n as usize).map(str::to_owned),
                    _ if name.ends_with("SIZE") => Some((number + 1).to_string()),
                    _ => Some(number.to_string()),
                }
            });
            match found {
                Ok(launch) => {
                    assert!(launch.is_none_or(|launch| launch.rank < launch.size && launch.size <= MAX_SIZE))
                }
                Err(error) => assert!(!error.to_string().chars().any(char::is_control), "{error}"),
            }
        });
    }
}
