//! Which device the messages with each rank go through: the RDMA device, or for ranks of the same host the software HCA, whose
//! wire is shared memory, with payload in GPU memory copied from GPU to GPU.

mod host;

use std::fmt;
use std::time::Duration;

use gdsync::hca::SoftHcaConfig;
use gdsync::memory::Memory;
use gdsync::verbs::{Access, Context, Pd};

use self::host::Host;
use crate::bootstrap::Exchange;
use crate::communicator::Registration;
use crate::error::{Error, Result};

/// The variable that decides in place of the program.
const VARIABLE: &str = "MP_LOCAL";

/// What the messages between ranks of the same host go through. The environment's `MP_LOCAL` overrides it: `soft` or `device`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Local {
    /// The software HCA.
    Soft,
    /// The device that all other messages go through.
    Device,
    /// This device.
    Through(Context),
}

impl Local {
    pub(crate) fn in_environment(self) -> gdsync::Result<Self> {
        self.with(std::env::var_os(VARIABLE).map(|value| value.to_string_lossy().into_owned()).as_deref())
    }

    fn with(self, variable: Option<&str>) -> gdsync::Result<Self> {
        match variable.map(str::trim) {
            None | Some("") => Ok(self),
            Some("soft") => Ok(Self::Soft),
            Some("device") => Ok(Self::Device),
            Some(other) => Err(gdsync::Error::InvalidArgument {
                what: VARIABLE,
                value: format!("'{other}'"),
                expected: "soft or device",
            }),
        }
    }
}

/// What the messages with a rank go through, and why: see [`Communicator::path`](crate::Communicator::path). It is written as
/// `software HCA over shared memory: the rank is on this host`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    device: String,
    wire: String,
    reason: &'static str,
    is_near: bool,
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
        self.reason
    }

    /// Whether the device is the one for ranks of the same host, beside that of the communicator.
    pub fn is_near(&self) -> bool {
        self.is_near
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} over {}: {}", self.device, self.wire, self.reason)
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
}

/// Why a rank is not reached through the device for ranks of the same host; `None` where it is.
type Refusals = Vec<Option<&'static str>>;

impl Planes {
    /// Decides with the other ranks. All must call it.
    ///
    /// # Errors
    /// Of the exchange, and [`Error::Device`] from a device.
    pub(crate) fn agree(
        far: &Context,
        local: &Local,
        bootstrap: &mut dyn Exchange,
        timeout: Duration,
    ) -> Result<Self> {
        let refusal = match local {
            Local::Soft if far.is_software() => Some("it is the software HCA already"),
            Local::Device => Some("this rank asked for it (MP_LOCAL, or the builder)"),
            Local::Soft | Local::Through(_) => None,
        };
        let host = Host::here();
        let mine = Card { wants: refusal.is_none(), host };
        let cards = bootstrap.allgather(&mine.to_bytes(), timeout)?;
        let refusals = refusals(bootstrap.rank(), refusal, &mine, &cards)?;
        let is_needed =
            refusals.iter().enumerate().any(|(rank, why)| why.is_none() && rank != bootstrap.rank());
        let near = match local {
            _ if !is_needed => None,
            Local::Through(context) => Some(Plane::new(context.clone())?),
            Local::Soft | Local::Device => Some(Plane::new(Context::soft(&SoftHcaConfig::from_env()?)?)?),
        };
        let far = Plane::new(far.clone())?;
        let path = |why: &Option<&'static str>| {
            let (plane, reason) = match (&near, why) {
                (Some(near), None) => (near, "the rank is on this host"),
                (None, None) => (&far, "no other rank is on this host"),
                (_, Some(why)) => (&far, *why),
            };
            let (device, wire) = (plane.context.description().to_owned(), plane.context.wire().to_owned());
            Path { device, wire, reason, is_near: near.is_some() && why.is_none() }
        };
        let paths = refusals.iter().map(path).collect();
        Ok(Self { far, near, paths })
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
    host: Host,
}

impl Card {
    fn to_bytes(&self) -> Vec<u8> {
        [&[u8::from(self.wants)], self.host.as_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (wants, host) = bytes.split_first()?;
        Some(Self { wants: *wants != 0, host: Host::from_bytes(host) })
    }
}

/// Both sides of each pair of ranks come to the same answer.
fn refusals(rank: usize, own: Option<&'static str>, mine: &Card, cards: &[Vec<u8>]) -> Result<Refusals> {
    let refusal = |(peer, card): (usize, &Vec<u8>)| {
        let theirs = Card::from_bytes(card).ok_or_else(|| {
            let fix = "run the same version everywhere";
            Error::bootstrap(format!("rank {peer}"), "it does not say which host it is on", fix)
        })?;
        let is_here = peer == rank || theirs.host.shares_memory_with(&mine.host);
        Ok(match own {
            _ if !is_here => Some("the rank is on another host"),
            Some(why) => Some(why),
            None if !theirs.wants => Some("the rank there asked for it"),
            None => None,
        })
    };
    cards.iter().enumerate().map(refusal).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_ranks_agree() {
        let card = |wants, host: &str| Card { wants, host: Host::from_bytes(host.as_bytes()) };
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
            refusals(rank, own, &cards[rank], &bytes).unwrap()[peer].is_none()
        };
        for (a, b) in (0..cards.len()).flat_map(|a| (0..cards.len()).map(move |b| (a, b))) {
            assert_eq!(near(a, b), near(b, a), "{a} {b}");
            let expected = a == b && a != 2 || a < 2 && b < 2;
            assert_eq!(near(a, b), expected, "{a} {b}: unknown hosts are different ones");
        }
        for (at, card) in cards.iter().enumerate() {
            assert_eq!(Card::from_bytes(&bytes[at]).as_ref(), Some(card));
        }
        assert!(refusals(0, None, &cards[0], &[vec![]]).is_err());
    }

    #[test]
    fn the_environment_decides() {
        assert!(matches!(Local::Soft.with(Some("device")), Ok(Local::Device)));
        assert!(matches!(Local::Device.with(Some(" soft ")), Ok(Local::Soft)));
        assert!(matches!(Local::Device.with(Some("")), Ok(Local::Device)));
        assert!(matches!(Local::Soft.with(None), Ok(Local::Soft)));
        let error = Local::Soft.with(Some("nvlink")).unwrap_err().to_string();
        assert!(
            error.contains("MP_LOCAL") && error.contains("'nvlink'") && error.contains("soft"),
            "{error}"
        );
    }
}
