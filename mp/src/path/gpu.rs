//! How payload in GPU memory leaves.

use std::time::Duration;

use gdsync::cuda::Gpu;
use gdsync::verbs::{Context, Staging};

use super::Plane;
use super::duel::{End, duel};
use crate::bootstrap::Exchange;
use crate::error::Result;

/// The variable that decides in place of the program.
const VARIABLE: &str = "MP_GPU_PATH";

/// How payload in GPU memory leaves: to ranks of the same host through a software HCA, and through an RDMA device that a thread
/// posts to. The environment's `MP_GPU_PATH` overrides it: `size`, `peer`, `staged` or `measure`.
///
/// What another rank of the host cannot open is staged whatever this says: see
/// [`Communicator::path_of`](crate::Communicator::path_of). A card that reads the rings itself reaches GPU memory itself, or refuses
/// to register it. Opened without `GDSYNC_PATH` after a [`Gpu`](gdsync::cuda::Gpu) that it does not reach, it leaves the rings to a
/// thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GpuPath {
    /// As the software HCA is set up: long payload is fetched by a copy engine of the receiver's GPU, other payload is staged.
    /// `GDSYNC_BY_REFERENCE` says what is long. As the RDMA device is: it reads and writes what it can register (GPUDirect RDMA),
    /// other memory is staged.
    BySize,
    /// All of it is fetched by a copy engine of the receiver's GPU: peer to peer, over NVLink or PCIe, between processes by CUDA
    /// IPC. Memory that the RDMA device cannot register is refused.
    PeerToPeer,
    /// None of it is: it goes through pinned host memory, for an RDMA device too.
    Staged,
    /// What is as long as what is fetched more quickly than staged between the first two ranks of the host when the communicator
    /// is built, if these ask for it and have a GPU ([`Builder::gpu`](crate::Builder::gpu)); otherwise as [`GpuPath::BySize`].
    Measured,
}

impl GpuPath {
    pub(crate) fn in_environment(self) -> gdsync::Result<Self> {
        self.with(std::env::var_os(VARIABLE).map(|value| value.to_string_lossy().into_owned()).as_deref())
    }

    fn with(self, variable: Option<&str>) -> gdsync::Result<Self> {
        match variable.map(str::trim) {
            None | Some("") => Ok(self),
            Some("size") => Ok(Self::BySize),
            Some("peer") => Ok(Self::PeerToPeer),
            Some("staged") => Ok(Self::Staged),
            Some("measure") => Ok(Self::Measured),
            Some(other) => Err(gdsync::Error::InvalidArgument {
                what: VARIABLE,
                value: format!("'{other}'"),
                expected: "size, peer, staged or measure",
            }),
        }
    }

    /// Sets a device of a communicator up.
    pub(super) fn apply(self, context: &Context) {
        match self {
            Self::BySize | Self::Measured => {}
            Self::PeerToPeer => {
                context.leave_by_reference(0);
                context.stage(Staging::Never);
            }
            Self::Staged => {
                context.leave_by_reference(usize::MAX);
                context.stage(Staging::Always);
            }
        }
    }
}

/// Bytes of the messages, each twice the one before.
const SIZES: [usize; 6] = [8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10];
/// Round trips of each size.
const ROUNDS: u32 = 20;

/// Has the two ranks of `pair` send each other GPU memory through this device, fetched and staged, and sets the device of all
/// ranks up that were given the pair. All ranks must call it.
///
/// # Errors
/// Of the exchange. What cannot be measured is not.
pub(super) fn measure(
    pair: Option<[usize; 2]>,
    plane: &Plane,
    gpu: Option<&Gpu>,
    bootstrap: &mut dyn Exchange,
    timeout: Duration,
) -> Result<()> {
    let mut before = None;
    let make = || match gpu {
        Some(gpu) => Ok(vec![End::new(plane, &gpu.alloc(2 * SIZES[SIZES.len() - 1])?)?]),
        None => Ok(Vec::new()),
    };
    let play = |ends: &[End], patience: Duration| {
        let mut costs = [[Duration::ZERO; 2]; SIZES.len()];
        for end in ends {
            for (&bytes, costs) in SIZES.iter().zip(&mut costs) {
                for (least, cost) in [0, usize::MAX].into_iter().zip(costs) {
                    let was = plane.context.leave_by_reference(least);
                    before = before.or(was);
                    *cost = end.cost(bytes, ROUNDS, patience / 4)?;
                }
            }
        }
        Ok((least(&costs) as u64).to_be_bytes().to_vec())
    };
    let found = duel(pair, make, play, bootstrap, timeout)?;
    let found = found.and_then(|found| Some(u64::from_be_bytes(*found.first_chunk()?)));
    if let Some(least) = found.and_then(|least| usize::try_from(least).ok()).or(before) {
        tracing::info!(
            least,
            "payload in GPU memory of so many bytes is fetched by copy engines of receivers"
        );
        plane.context.leave_by_reference(least);
    }
    Ok(())
}

/// From how many bytes on fetching is not slower than staging, of what both cost.
fn least(costs: &[[Duration; 2]; SIZES.len()]) -> usize {
    let slower = costs.iter().rposition(|[fetched, staged]| fetched > staged);
    SIZES.get(slower.map_or(0, |last| last + 1)).copied().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_decides() {
        for (variable, expected) in [
            (None, GpuPath::Staged),
            (Some(""), GpuPath::Staged),
            (Some("size"), GpuPath::BySize),
            (Some(" peer "), GpuPath::PeerToPeer),
            (Some("measure"), GpuPath::Measured),
        ] {
            assert_eq!(GpuPath::Staged.with(variable).unwrap(), expected, "{variable:?}");
        }
        let error = GpuPath::BySize.with(Some("ipc")).unwrap_err().to_string();
        assert!(
            error.contains("MP_GPU_PATH") && error.contains("'ipc'") && error.contains("staged"),
            "{error}"
        );
    }

    #[test]
    fn what_is_fetched_is_never_slower_when_it_is_longer() {
        let staged = Duration::from_micros(30);
        let costs = |fetched: [u64; SIZES.len()]| fetched.map(|us| [Duration::from_micros(us), staged]);
        assert_eq!(least(&costs([20; 6])), SIZES[0]);
        assert_eq!(least(&costs([40, 40, 30, 29, 20, 20])), SIZES[2]);
        assert_eq!(least(&costs([40, 20, 40, 20, 20, 20])), SIZES[3], "one that was quick by chance");
        assert_eq!(least(&costs([20, 20, 20, 20, 20, 40])), usize::MAX);
    }
}
