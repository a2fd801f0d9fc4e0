//! Which device the messages with each rank go through: the RDMA device, or for ranks of the same host the software HCA, whose
//! wire is shared memory, with payload in GPU memory copied from GPU to GPU.

mod buffer;
mod duel;
mod gpu;
mod host;
mod measure;

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use gdsync::cuda::Gpu;
use gdsync::hca::SoftHcaConfig;
use gdsync::memory::Memory;
use gdsync::verbs::{Access, Context, Pd};

pub use self::buffer::BufferPath;
pub use self::gpu::GpuPath;
use self::host::Host;
use self::measure::measure;
use crate::bootstrap::Exchange;
use crate::communicator::{Inner, Registration};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::slots::{Slots, share};

/// The variable that decides in place of the program.
const VARIABLE: &str = "MP_LOCAL";

/// What the messages between ranks of the same host go through. The environment's `MP_LOCAL` overrides it: `soft`,
/// `queues`, `device` or `measure`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Local {
    /// The software HCA, and short messages of the CPU through slots of shared memory beside it: also where all other messages
    /// go through a software HCA too.
    Soft,
    /// The software HCA, for all messages.
    Queues,
    /// The device that all other messages go through.
    Device,
    /// This device.
    Through(Context),
    /// The software HCA or the device that all other messages go through, whichever is quicker between the first two ranks
    /// of the host when the communicator is built, if these ask for it.
    Measured,
}

impl Local {
    pub(crate) fn in_environment(self) -> gdsync::Result<Self> {
        self.with(std::env::var_os(VARIABLE).map(|value| value.to_string_lossy().into_owned()).as_deref())
    }

    fn with(self, variable: Option<&str>) -> gdsync::Result<Self> {
        match variable.map(str::trim) {
            None | Some("") => Ok(self),
            Some("soft") => Ok(Self::Soft),
            Some("queues") => Ok(Self::Queues),
            Some("device") => Ok(Self::Device),
            Some("measure") => Ok(Self::Measured),
            Some(other) => Err(gdsync::Error::InvalidArgument {
                what: VARIABLE,
                value: format!("'{other}'"),
                expected: "soft, queues, device or measure",
            }),
        }
    }
}

/// What the messages with a rank go through, and why: see [`Communicator::path`](crate::Communicator::path). It is written as
/// `software HCA over shared memory, short messages through slots: the rank is on this host`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    device: String,
    wire: String,
    reason: Cow<'static, str>,
    is_near: bool,
    has_slots: bool,
}

impl Path {
    /// A description of the device: what reads the queues.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// How bytes travel.
    pub fn wire(&self) -> &str {
        &self.wire
    }

    /// Why it is this one.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Whether the device is the one for ranks of the same host, beside that of the communicator.
    pub fn is_near(&self) -> bool {
        self.is_near
    }

    /// That of a window, which goes through the device for ranks of the same host or through this one.
    pub(crate) fn of_windows(&self, near: bool, far: &Context) -> Self {
        let same = Self { has_slots: false, ..self.clone() };
        if near == self.is_near {
            return same;
        }
        let (device, wire) = (far.description().to_owned(), far.wire().to_owned());
        Self {
            device,
            wire,
            reason: "a rank of the window is not reached as this one is".into(),
            is_near: near,
            ..same
        }
    }

    /// Whether short messages from CPU to CPU are copied through slots of shared memory, beside the device.
    pub fn has_slots(&self) -> bool {
        self.has_slots
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = if self.has_slots { ", short messages through slots" } else { "" };
        write!(f, "{} over {}{slots}: {}", self.device, self.wire, self.reason)
    }
}

/// A device, and the domain that a communicator has there.
#[derive(Clone, Debug)]
pub(crate) struct Plane {
    pub(crate) context: Context,
    pub(crate) pd: Pd,
}

impl Plane {
    fn new(context: Context) -> gdsync::Result<Self> {
        let pd = context.alloc_pd()?;
        Ok(Self { context, pd })
    }
}

/// The devices of a communicator, and which rank is reached through which.
#[derive(Debug)]
pub(crate) struct Planes {
    pub(crate) far: Plane,
    pub(crate) near: Option<Plane>,
    pub(crate) paths: Vec<Path>,
    /// Those shared with each rank.
    pub(crate) slots: Vec<Option<Slots>>,
}

/// Why a rank is not reached through the device for ranks of the same host; `None` where it is.
type Refusals = Vec<Option<&'static str>>;

impl Planes {
    /// Decides with the other ranks. All must call it. Slots need the thread that watches.
    ///
    /// # Errors
    /// Of the exchange, and [`Error::Device`] from a device.
    pub(crate) fn agree(
        far: &Context,
        (local, gpu_path, gpu): (&Local, GpuPath, Option<&Gpu>),
        watched: bool,
        bootstrap: &mut dyn Exchange,
        timeout: Duration,
    ) -> Result<Self> {
        let refusal = match local {
            Local::Soft | Local::Queues if far.is_software() => Some("it is the software HCA already"),
            Local::Device => Some("this rank asked for it (MP_LOCAL, or the builder)"),
            Local::Soft | Local::Queues | Local::Through(_) | Local::Measured => None,
        };
        let deadline = Deadline::after(timeout);
        let measures = matches!(local, Local::Measured);
        let slots = watched && matches!(local, Local::Soft);
        let measures_gpu = gpu_path == GpuPath::Measured && gpu.is_some();
        let mine = Card { wants: refusal.is_none(), measures, measures_gpu, slots, host: Host::here() };
        let cards = read(&bootstrap.allgather(&mine.to_bytes(), timeout)?)?;
        let refusals = refusals(bootstrap.rank(), refusal, &mine, &cards);
        let is_needed =
            refusals.iter().enumerate().any(|(rank, why)| why.is_none() && rank != bootstrap.rank());
        let near = match local {
            _ if !is_needed => None,
            Local::Through(context) => Some(Plane::new(context.clone())?),
            Local::Soft | Local::Queues | Local::Device | Local::Measured => {
                Some(Plane::new(Context::soft(&SoftHcaConfig::from_env()?)?)?)
            }
        };
        let far = Plane::new(far.clone())?;
        near.iter().chain([&far]).for_each(|plane| gpu_path.apply(&plane.context));
        let costs = match cards.iter().any(|card| card.measures) {
            true => {
                let pair = pair(&refusals, &cards);
                measure(pair, [near.as_ref(), Some(&far)], bootstrap, deadline.remaining())?
            }
            false => None,
        };
        let path = |why: &Option<&'static str>| {
            let (plane, reason) = match (&near, why, costs) {
                (Some(near), None, Some(costs)) if costs.is_near_better() => (near, costs.reason().into()),
                (Some(_), None, Some(costs)) => (&far, costs.reason().into()),
                (Some(near), None, None) => (near, "the rank is on this host".into()),
                (None, None, _) => (&far, "no other rank is on this host".into()),
                (_, Some(why), _) => (&far, (*why).into()),
            };
            let is_near = near.as_ref().is_some_and(|near| std::ptr::eq(plane, near));
            let (device, wire) = (plane.context.description().to_owned(), plane.context.wire().to_owned());
            Path { device, wire, reason, is_near, has_slots: false }
        };
        let mut paths: Vec<_> = refusals.iter().map(path).collect();
        let near = near.filter(|_| paths.iter().any(Path::is_near));
        if cards.iter().any(|card| card.measures_gpu) {
            // Ranks of a host are all reached alike, or do not measure.
            let pair = gpu_pair(&mine, &cards)
                .filter(|[first, second]| paths[*first].is_near == paths[*second].is_near);
            let is_near = pair.is_some_and(|[first, _]| paths[first].is_near);
            let plane = near.as_ref().filter(|_| is_near).unwrap_or(&far);
            let pair = pair.filter(|_| mine.measures_gpu && plane.context.is_software());
            gpu::measure(pair, plane, gpu, bootstrap, deadline.remaining())?;
        }
        let is_beside = |(peer, theirs): (usize, &Card)| {
            let is_here = peer != bootstrap.rank() && theirs.host.shares_memory_with(&mine.host);
            mine.slots && theirs.slots && is_here
        };
        let wanted: Vec<_> = cards.iter().enumerate().map(is_beside).collect();
        let slots = share(&wanted, bootstrap, deadline.remaining())?;
        for (path, slots) in paths.iter_mut().zip(&slots) {
            path.has_slots = slots.is_some();
        }
        Ok(Self { far, near, paths, slots })
    }

    /// Those of a communicator, with slots of their own where ranks have some and are watched here and there. All ranks must
    /// call it.
    ///
    /// # Errors
    /// Of the exchange.
    pub(crate) fn again(
        of: &Inner,
        watched: bool,
        bootstrap: &mut dyn Exchange,
        timeout: Duration,
    ) -> Result<Self> {
        let wanted: Vec<_> = of.paths.iter().map(|path| watched && path.has_slots).collect();
        let slots = share(&wanted, bootstrap, timeout)?;
        let path =
            |(path, slots): (&Path, &Option<Slots>)| Path { has_slots: slots.is_some(), ..path.clone() };
        let paths = of.paths.iter().zip(&slots).map(path).collect();
        let far = Plane { context: of.context.clone(), pd: of.pd.clone() };
        Ok(Self { far, near: of.near.clone(), paths, slots })
    }

    /// Whether a rank is reached through the device for ranks of the same host.
    pub(crate) fn is_near(&self, rank: usize) -> bool {
        self.paths[rank].is_near
    }

    /// The domain that a rank is reached in.
    pub(crate) fn pd(&self, rank: usize) -> &Pd {
        match &self.near {
            Some(near) if self.is_near(rank) => &near.pd,
            _ => &self.far.pd,
        }
    }
}

/// Registers memory with all devices of a communicator.
pub(crate) fn register(
    far: &Pd,
    near: Option<&Plane>,
    memory: &Memory,
    access: Access,
) -> gdsync::Result<Registration> {
    let near = near.map(|near| near.pd.register(memory, access)).transpose()?;
    Ok(Registration(far.register(memory, access)?, near))
}

/// What a rank tells the others.
#[derive(Debug, PartialEq)]
struct Card {
    /// It would use a device of its own for ranks of its host.
    wants: bool,
    /// It would have it measured.
    measures: bool,
    /// And how payload in its GPU's memory leaves.
    measures_gpu: bool,
    /// It has slots for ranks of its host that have them too.
    slots: bool,
    host: Host,
}

impl Card {
    fn to_bytes(&self) -> Vec<u8> {
        let flags = [self.wants, self.measures, self.measures_gpu, self.slots];
        [&flags.map(u8::from), self.host.as_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (flags, host) = bytes.split_first_chunk()?;
        let [wants, measures, measures_gpu, slots] = flags.map(|flag| flag != 0);
        Some(Self { wants, measures, measures_gpu, slots, host: Host::from_bytes(host) })
    }
}

fn read(cards: &[Vec<u8>]) -> Result<Vec<Card>> {
    let read = |(peer, card): (usize, &Vec<u8>)| {
        Card::from_bytes(card).ok_or_else(|| {
            let fix = "run the same version everywhere";
            Error::bootstrap(format!("rank {peer}"), "it does not say which host it is on", fix)
        })
    };
    cards.iter().enumerate().map(read).collect()
}

/// Both sides of each pair of ranks come to the same answer.
fn refusals(rank: usize, own: Option<&'static str>, mine: &Card, cards: &[Card]) -> Refusals {
    let refusal = |(peer, theirs): (usize, &Card)| {
        let is_here = peer == rank || theirs.host.shares_memory_with(&mine.host);
        match own {
            _ if !is_here => Some("the rank is on another host"),
            Some(why) => Some(why),
            None if !theirs.wants => Some("the rank there asked for it"),
            None => None,
        }
    };
    cards.iter().enumerate().map(refusal).collect()
}

/// The two ranks that measure for this host, if they shall: the same for all ranks that are reached alike.
fn pair(refusals: &Refusals, cards: &[Card]) -> Option<[usize; 2]> {
    let mut alike = refusals.iter().enumerate().filter(|(_, why)| why.is_none()).map(|(rank, _)| rank);
    let pair = [alike.next()?, alike.next()?];
    pair.iter().all(|&rank| cards[rank].measures).then_some(pair)
}

/// The two ranks of this host that measure how payload in GPU memory leaves, if both ask for it.
fn gpu_pair(mine: &Card, cards: &[Card]) -> Option<[usize; 2]> {
    let mut here = cards.iter().enumerate().filter(|(_, card)| card.host.shares_memory_with(&mine.host));
    let pair = [here.next()?, here.next()?];
    pair.iter().all(|(_, card)| card.measures_gpu).then_some(pair.map(|(rank, _)| rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_ranks_agree() {
        let card = |wants, host: &str| Card {
            wants,
            measures: host == "a",
            measures_gpu: host == "b",
            slots: false,
            host: Host::from_bytes(host.as_bytes()),
        };
        let cards = [
            card(true, "a"),
            card(true, "a"),
            card(false, "a"),
            card(true, "b"),
            card(true, ""),
            card(true, ""),
        ];
        let bytes: Vec<_> = cards.iter().map(Card::to_bytes).collect();
        let near = |rank: usize, peer: usize| {
            let own = (!cards[rank].wants).then_some("own wish");
            refusals(rank, own, &cards[rank], &cards)[peer].is_none()
        };
        for (a, b) in (0..cards.len()).flat_map(|a| (0..cards.len()).map(move |b| (a, b))) {
            assert_eq!(near(a, b), near(b, a), "{a} {b}");
            let expected = a == b && a != 2 || a < 2 && b < 2;
            assert_eq!(near(a, b), expected, "{a} {b}: unknown hosts are different ones");
        }
        let pair = |rank: usize| pair(&refusals(rank, None, &cards[rank], &cards), &cards);
        assert_eq!([0, 1, 3, 4].map(pair), [Some([0, 1]), Some([0, 1]), None, None]);
        assert_eq!(read(&bytes).unwrap(), cards);
        assert!(read(&[vec![1]]).is_err());
    }

    #[test]
    fn the_environment_decides() {
        assert!(matches!(Local::Soft.with(Some("device")), Ok(Local::Device)));
        assert!(matches!(Local::Device.with(Some(" soft ")), Ok(Local::Soft)));
        assert!(matches!(Local::Device.with(Some("")), Ok(Local::Device)));
        assert!(matches!(Local::Soft.with(None), Ok(Local::Soft)));
        assert!(matches!(Local::Soft.with(Some("measure")), Ok(Local::Measured)));
        let error = Local::Soft.with(Some("nvlink")).unwrap_err().to_string();
        assert!(
            error.contains("MP_LOCAL") && error.contains("'nvlink'") && error.contains("soft"),
            "{error}"
        );
    }
}
