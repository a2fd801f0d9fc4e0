//! Which device the messages with each rank go through: the RDMA device, without one the software HCA over TCP, or for ranks of the
//! same host the software HCA over shared memory.

use std::borrow::Cow;
use std::fmt;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use gdsync::Device;
use gdsync::hca::{SoftHcaConfig, TCP, join_job};
use gdsync::memory::Memory;
use gdsync::verbs::{Context, Pd, Qp, Staging, TransferPath};

use crate::error::{Error, Result};
use crate::exchange::Exchange;
use crate::places;
use crate::registration::{DomainId, Registration};
use crate::shm_memory::{BYTES, FifoPair, share};
use crate::wait::Deadline;

/// The one of `choices` that the value of a variable of the environment names, or `own` where that is not set.
pub(crate) fn choice<T: Clone>(
    own: T,
    name: &'static str,
    value: Option<&str>,
    choices: &[(&str, T)],
    expected: &'static str,
) -> gdsync::Result<T> {
    let Some(value) = value.map(str::trim).filter(|value| !value.is_empty()) else { return Ok(own) };
    match choices.iter().find(|(name, _)| *name == value) {
        Some((_, choice)) => Ok(choice.clone()),
        None => Err(gdsync::Error::InvalidArgument { what: name, value: format!("'{value}'"), expected }),
    }
}

/// The path of messages between ranks of the same host. The environment's `MP_LOCAL` overrides it: `soft`,
/// `queues` or `device`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum IntraHostPath {
    /// The software HCA, and a shared-memory FIFO beside it for short messages of the CPU: also where all other messages go through
    /// a software HCA.
    Soft,
    /// The software HCA, for all messages.
    Queues,
    /// The device that all other messages go through.
    Device,
    /// This device.
    Through(Context),
}

impl IntraHostPath {
    /// With the choice of the environment.
    pub(crate) fn or(self, variable: Option<&str>) -> gdsync::Result<Self> {
        let choices = [("soft", Self::Soft), ("queues", Self::Queues), ("device", Self::Device)];
        choice(self, "MP_LOCAL", variable, &choices, "soft, queues or device")
    }
}

/// How payload in GPU memory is sent: to ranks of the same host through a software HCA, and through an RDMA device that a thread
/// posts to. The environment's `MP_GPU_PATH` overrides it: `size`, `peer` or `staged`.
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
}

impl GpuPath {
    /// With the choice of the environment.
    pub(crate) fn or(self, variable: Option<&str>) -> gdsync::Result<Self> {
        let choices = [("size", Self::BySize), ("peer", Self::PeerToPeer), ("staged", Self::Staged)];
        choice(self, "MP_GPU_PATH", variable, &choices, "size, peer or staged")
    }

    /// Configures a device of a communicator.
    fn apply(self, context: &Context) {
        match self {
            Self::BySize => {}
            Self::PeerToPeer => {
                context.set_by_reference(0);
                context.stage(Staging::Never);
            }
            Self::Staged => {
                context.set_by_reference(usize::MAX);
                context.stage(Staging::Always);
            }
        }
    }
}

/// Whether CUDA streams write and read the windows, and send to the channels and receives, of ranks of the same host by peer copies: they
/// access the memory of the other GPU directly, over NVLink or PCIe. The environment's `MP_NEAR` overrides it: `auto`, `peer` or `queues`.
///
/// See [`Window`](crate::Window#peer-copies) and [`Channel`](crate::Channel#peer-copies);
/// [`Window::path_of`](crate::Window::path_of) and [`Channel::path_of`](crate::Channel::path_of) tell what they do and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NearPath {
    /// Where that is possible.
    Auto,
    /// As [`NearPath::Auto`], and no window or channel is made whose GPU memory, on the same host, is not reached so. Receives into GPU
    /// memory that cannot be exported, and messages of streams where some cannot be opened, are refused if streams copy messages of this
    /// length ([`Communicator::path_of`](crate::Communicator::path_of)).
    PeerCopies,
    /// No: all operations go through queue pairs. Other ranks have no peer copies into memory of this one, either.
    Queues,
}

impl NearPath {
    /// With the choice of the environment.
    pub(crate) fn or(self, variable: Option<&str>) -> gdsync::Result<Self> {
        let choices = [("auto", Self::Auto), ("peer", Self::PeerCopies), ("queues", Self::Queues)];
        choice(self, "MP_NEAR", variable, &choices, "auto, peer or queues")
    }
}

/// The path of messages with a rank, and why: see [`Communicator::path`](crate::Communicator::path). It is written as
/// `software HCA over shared memory, short messages through a shared-memory FIFO: the rank is on this host`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerPath {
    device: String,
    wire: String,
    reason: Cow<'static, str>,
    is_on_this_host: bool,
    is_intra_host: bool,
    has_fifo: bool,
}

impl PeerPath {
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

    /// Whether the rank is known to be on this host.
    pub(crate) fn is_on_this_host(&self) -> bool {
        self.is_on_this_host
    }

    /// Whether the device is the one for ranks of the same host, beside that of the communicator.
    pub fn is_intra_host(&self) -> bool {
        self.is_intra_host
    }

    /// Whether short messages from CPU to CPU go through a shared-memory FIFO, beside the device.
    pub fn has_fifo(&self) -> bool {
        self.has_fifo
    }

    /// The path of a buffer, which takes the FIFO only if it fits.
    pub(crate) fn with_fifo_if(self, fits: bool) -> Self {
        Self { has_fifo: self.has_fifo && fits, ..self }
    }

    /// The path of a window, through the intra-host device or through this other one.
    pub(crate) fn of_windows(&self, intra_host: bool, other: &Context) -> Self {
        let same = self.clone().with_fifo_if(false);
        if intra_host == self.is_intra_host {
            return same;
        }
        let (device, wire) = (other.description().to_owned(), other.wire().to_owned());
        let reason = "a rank of the window is not reached as this one is".into();
        Self { device, wire, reason, is_intra_host: intra_host, ..same }
    }
}

impl fmt::Display for PeerPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fifo = if self.has_fifo { ", short messages through a shared-memory FIFO" } else { "" };
        write!(f, "{} over {}{fifo}: {}", self.device, self.wire, self.reason)
    }
}

/// The path of bytes of a buffer to a rank, and why: see [`Communicator::path_of`](crate::Communicator::path_of) and
/// [`Window::path_of`](crate::Window::path_of). It is written as `software HCA over shared memory: the rank is on this host;
/// copied by the CPU: it is host memory`; of a window with what streams do: `; by CUDA streams with peer copies`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferPath {
    path: PeerPath,
    transfer: TransferPath,
    /// Of windows.
    copies: Option<CopiesOrNot>,
}

/// Whether streams use peer copies, or why not.
pub(crate) type CopiesOrNot = std::result::Result<(), Cow<'static, str>>;

impl BufferPath {
    /// The device. [`PeerPath::has_fifo`] says whether these bytes go through the FIFO instead while it is open: they are short and in
    /// host memory.
    pub fn path(&self) -> &PeerPath {
        &self.path
    }

    /// What moves them out of the buffer, for the device.
    pub fn transfer_path(&self) -> &TransferPath {
        &self.transfer
    }

    /// The path of the bytes `range` of a buffer by this queue pair of the device of `path`.
    pub(crate) fn new(path: PeerPath, qp: &Qp, buffer: &Registration, range: &Range<usize>) -> Result<Self> {
        let len = buffer.sge(path.is_intra_host, range)?.len as usize;
        Ok(Self { transfer: qp.transfer_path(buffer.mr(path.is_intra_host), len)?, path, copies: None })
    }

    /// The path of a window whose streams have peer copies, or not.
    pub(crate) fn with_copies(self, copies: CopiesOrNot) -> Self {
        Self { copies: Some(copies), ..self }
    }

    /// Whether CUDA streams move the bytes by [peer copies](crate::Window#peer-copies), without the device; or why not.
    ///
    /// # Errors
    /// The reason.
    pub fn peer_copies(&self) -> std::result::Result<(), &str> {
        match &self.copies {
            Some(Ok(())) => Ok(()),
            Some(Err(why)) => Err(why),
            None => Err("messages go through queue pairs"),
        }
    }
}

impl fmt::Display for BufferPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.path, self.transfer)?;
        match &self.copies {
            Some(Ok(())) => f.write_str("; by CUDA streams with peer copies"),
            Some(Err(why)) => write!(f, "; by CUDA streams no other way: {why}"),
            None => Ok(()),
        }
    }
}

/// A device, and the protection domain that a communicator has there.
#[derive(Clone, Debug)]
pub(crate) struct DeviceDomain {
    pub(crate) context: Context,
    pub(crate) pd: Pd,
}

impl DeviceDomain {
    fn new(context: Context) -> gdsync::Result<Self> {
        let pd = context.alloc_pd()?;
        Ok(Self { context, pd })
    }
}

/// The devices of a communicator, and which rank is reached through which.
#[derive(Debug)]
pub(crate) struct Devices {
    pub(crate) main: DeviceDomain,
    pub(crate) intra_host: Option<DeviceDomain>,
    pub(crate) domain: DomainId,
    pub(crate) paths: Vec<PeerPath>,
    /// Those shared with each rank.
    pub(crate) fifos: Vec<Option<FifoPair>>,
    /// The tables of receives shared with each rank: to it, and from it.
    pub(crate) places: Vec<Option<[Memory; 2]>>,
}

/// The path of messages with a rank, which the intra-host device does not reach for the reason `why`.
fn peer_path(main: &Context, intra_host: Option<&DeviceDomain>, why: Option<&'static str>) -> PeerPath {
    let near = intra_host.map(|near| &near.context);
    let (device, reason): (_, Cow<'static, str>) = match (near, why) {
        (Some(near), None) => (near, "the rank is on this host".into()),
        (None, None) => (main, "no other rank is on this host".into()),
        (_, Some(ELSEWHERE)) if main.is_software() => {
            (main, format!("{ELSEWHERE}, and no RDMA device is used").into())
        }
        (_, Some(why)) => (main, why.into()),
    };
    PeerPath {
        device: device.description().to_owned(),
        wire: device.wire().to_owned(),
        reason,
        is_on_this_host: why != Some(ELSEWHERE),
        is_intra_host: near.is_some_and(|near| std::ptr::eq(device, near)),
        has_fifo: false,
    }
}

/// Why each rank is not reached through the intra-host device; `None` where it is.
type Refusals = Vec<Option<&'static str>>;

impl Devices {
    /// Decides with the other ranks. All must call it. FIFOs need the watchdog; `places` says whether this rank wants tables of
    /// receives. A context that `is_default`, the software HCA over shared memory, gives way to one over TCP if ranks are on other hosts.
    ///
    /// # Errors
    /// Of the exchange, [`Error::Bootstrap`] if ranks of other hosts are not reached, and [`Error::Device`] from a device.
    pub(crate) fn agree(
        (context, is_default): (&Context, bool),
        (wanted, gpu_path): (&IntraHostPath, GpuPath),
        (has_watchdog, places): (bool, bool),
        exchange: &mut dyn Exchange,
        timeout: Duration,
    ) -> Result<Self> {
        let is_near = !context.reaches_other_hosts();
        let may_change = is_default && is_near;
        let no_device = (is_near && matches!(wanted, IntraHostPath::Soft | IntraHostPath::Queues))
            .then_some("no RDMA device is used");
        let refusal = match wanted {
            IntraHostPath::Soft | IntraHostPath::Queues if !may_change => no_device,
            IntraHostPath::Device => Some("this rank asked for it (MP_LOCAL, or the builder)"),
            IntraHostPath::Soft | IntraHostPath::Queues | IntraHostPath::Through(_) => None,
        };
        let deadline = Deadline::after(timeout);
        let fifo = has_watchdog && matches!(wanted, IntraHostPath::Soft);
        let (wants, network) = (refusal.is_none(), network(context));
        let secret = u64::from_ne_bytes(gdsync_device::random()?);
        let host = host();
        let mine = Card { wants, fifo, places, may_change, secret, network, host };
        let mut cards = read_cards(&exchange.allgather(&mine.to_bytes(), timeout)?)?;
        let is_spread = change_networks(&mut cards);
        let mine = &cards[exchange.rank()];
        if is_spread {
            check_networks(&cards)?;
            join_job(cards[0].secret)?;
        }
        let (refusal, main) = match may_change {
            true if is_spread => (refusal, Device::find(Some("tcp"))?.open()?),
            _ => (no_device.or(refusal), context.clone()),
        };
        let refusals = refusals(exchange.rank(), refusal, mine, &cards);
        let is_needed =
            refusals.iter().enumerate().any(|(rank, why)| why.is_none() && rank != exchange.rank());
        let intra_host = match wanted {
            _ if !is_needed => None,
            IntraHostPath::Through(context) => Some(DeviceDomain::new(context.clone())?),
            _ if may_change => Some(DeviceDomain::new(context.clone())?),
            _ => Some(DeviceDomain::new(Context::soft(&SoftHcaConfig::from_env()?)?)?),
        };
        let main = DeviceDomain::new(main)?;
        intra_host.iter().chain([&main]).for_each(|device| gpu_path.apply(&device.context));
        let near = intra_host.as_ref();
        let mut paths: Vec<_> = refusals.iter().map(|why| peer_path(&main.context, near, *why)).collect();
        // The ranks that share memory with this one, and both want it.
        let me = exchange.rank();
        let shared = |wants: fn(&Card) -> bool| -> Vec<bool> {
            let with = |(peer, theirs): (usize, &Card)| {
                wants(mine) && wants(theirs) && peer != me && theirs.shares_memory_with(mine)
            };
            cards.iter().enumerate().map(with).collect()
        };
        let fifos = fifos(&shared(|card| card.fifo), exchange, deadline.remaining())?;
        let places = match cards.iter().any(|card| card.places) {
            true => share(&shared(|card| card.places), places::BYTES, exchange, deadline.remaining())?,
            false => Vec::new(),
        };
        for (path, fifo) in paths.iter_mut().zip(&fifos) {
            path.has_fifo = fifo.is_some();
        }
        Ok(Self { main, intra_host, domain: DomainId::new(), paths, fifos, places })
    }

    /// The devices of a communicator for another one of the same ranks, with FIFOs of its own where the ranks have some. All ranks
    /// must call it.
    ///
    /// # Errors
    /// Of the exchange.
    pub(crate) fn share_again(
        main: DeviceDomain,
        (intra_host, domain): (Option<DeviceDomain>, DomainId),
        paths: &[PeerPath],
        has_watchdog: bool,
        exchange: &mut dyn Exchange,
        timeout: Duration,
    ) -> Result<Self> {
        let wanted: Vec<_> = paths.iter().map(|path| has_watchdog && path.has_fifo).collect();
        let fifos = fifos(&wanted, exchange, timeout)?;
        let path = |(path, fifo): (&PeerPath, &Option<FifoPair>)| path.clone().with_fifo_if(fifo.is_some());
        let paths = paths.iter().zip(&fifos).map(path).collect();
        Ok(Self { main, intra_host, domain, paths, fifos, places: Vec::new() })
    }

    /// The domain that a rank is reached in.
    pub(crate) fn pd(&self, rank: usize) -> &Pd {
        match &self.intra_host {
            Some(device) if self.paths[rank].is_intra_host => &device.pd,
            _ => &self.main.pd,
        }
    }
}

fn fifos(wanted: &[bool], exchange: &mut dyn Exchange, timeout: Duration) -> Result<Vec<Option<FifoPair>>> {
    Ok(share(wanted, BYTES, exchange, timeout)?.into_iter().map(|pair| pair.map(FifoPair::from)).collect())
}

/// What a rank reports to the others.
#[derive(Debug, PartialEq)]
struct Card {
    /// It would use an intra-host device.
    wants: bool,
    /// It would use FIFOs.
    fifo: bool,
    /// It would use tables of receives.
    places: bool,
    /// It takes TCP in place of its device if ranks are on other hosts.
    may_change: bool,
    /// Random; that of rank 0 is the secret of a job that has none.
    secret: u64,
    /// Its [`network`].
    network: String,
    /// Its [`host`].
    host: Vec<u8>,
}

impl Card {
    fn to_bytes(&self) -> Vec<u8> {
        let flags = [self.wants, self.fifo, self.places, self.may_change];
        let len = u8::try_from(self.network.len()).expect("a few words");
        let secret = self.secret.to_be_bytes();
        [&flags.map(u8::from)[..], &[len], &secret, self.network.as_bytes(), &self.host].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (&[ref flags @ .., len], rest) = bytes.split_first_chunk::<5>()?;
        let flags: [u8; 4] = *flags;
        let [wants, fifo, places, may_change] = flags.map(|flag| flag != 0);
        let (secret, rest) = rest.split_first_chunk()?;
        let secret = u64::from_be_bytes(*secret);
        let (network, host) = rest.split_at_checked(len.into())?;
        let network = String::from_utf8(network.to_vec()).ok()?;
        let host = host.to_vec();
        Some(Self { wants, fifo, places, may_change, secret, network, host })
    }

    fn shares_memory_with(&self, other: &Self) -> bool {
        !self.host.is_empty() && self.host == other.host
    }
}

/// Over shared memory, by software.
const SHARED_MEMORY: &str = "the software HCA over shared memory (soft0)";

/// What carries the messages of a device: ranks of other hosts must have the same.
fn network(context: &Context) -> String {
    match (context.is_software(), context.reaches_other_hosts()) {
        (false, _) => "an RDMA device".into(),
        (true, false) => SHARED_MEMORY.into(),
        (true, true) => software_over(context.wire()),
    }
}

fn software_over(wire: &str) -> String {
    format!("the software HCA over {wire}")
}

/// Whether ranks are on different hosts. Those that may change take TCP then, and without it no intra-host device.
fn change_networks(cards: &mut [Card]) -> bool {
    let mut known = cards.iter().filter(|card| !card.host.is_empty());
    let is_spread = known.next().is_some_and(|first| known.any(|card| card.host != first.host));
    for card in cards.iter_mut().filter(|card| card.may_change) {
        if is_spread {
            card.network = software_over(TCP);
        } else {
            card.wants = false;
        }
    }
    is_spread
}

/// Checks that ranks of different hosts have one network, which leaves the host. All ranks come to the same answer.
fn check_networks(cards: &[Card]) -> Result<()> {
    let mut known = cards.iter().enumerate().filter(|(_, card)| !card.host.is_empty());
    let Some((first, one)) = known.next() else { return Ok(()) };
    let Some((rank, other)) =
        known.find(|(_, card)| card.network != one.network || card.network == SHARED_MEMORY)
    else {
        return Ok(());
    };
    let what = format!(
        "it uses {}, rank {first} {}, and they are on different hosts, or others are",
        other.network, one.network
    );
    let fix = "let all ranks use RDMA devices, or GDSYNC_DEVICE=tcp; `gdasync doctor` says what a host has";
    Err(Error::bootstrap(format!("rank {rank}"), what, fix))
}

/// Why a rank is not reached through the intra-host device.
const ELSEWHERE: &str = "the rank is on another host";

fn read_cards(cards: &[Vec<u8>]) -> Result<Vec<Card>> {
    let read = |(peer, card): (usize, &Vec<u8>)| {
        Card::from_bytes(card).ok_or_else(|| {
            let fix = "run the same version everywhere";
            Error::bootstrap(format!("rank {peer}"), "its record has no host", fix)
        })
    };
    cards.iter().enumerate().map(read).collect()
}

/// Why the intra-host device is not used. Both ranks of a pair come to the same answer.
fn refusals(rank: usize, own: Option<&'static str>, mine: &Card, cards: &[Card]) -> Refusals {
    let refusal = |(peer, theirs): (usize, &Card)| {
        let is_here = peer == rank || theirs.shares_memory_with(mine);
        match own {
            _ if !is_here => Some(ELSEWHERE),
            Some(why) => Some(why),
            None if !theirs.wants => Some("the other rank asked for it"),
            None => None,
        }
    };
    cards.iter().enumerate().map(refusal).collect()
}

/// What processes have in common that can reach each other through shared memory: a running kernel, and its network namespace,
/// where the software HCA's sockets have their addresses. Empty where it is not known.
fn host() -> Vec<u8> {
    let text = |path| fs::read_to_string(path).map(|text| text.trim().to_owned());
    let boot = text("/proc/sys/kernel/random/boot_id").ok();
    let net = fs::metadata("/proc/self/ns/net").map(|net| (net.dev(), net.ino())).ok();
    // Copies of one virtual machine may have the same boot id.
    let name = text("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = boot.zip(net).map(|(boot, (dev, ino))| format!("{boot} {dev} {ino} {name}"));
    host.unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_ranks_agree() {
        let card = |wants, host: &str| Card {
            wants,
            fifo: false,
            places: true,
            may_change: false,
            secret: 1,
            network: SHARED_MEMORY.into(),
            host: host.into(),
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
            let own = (!cards[rank].wants).then_some("own choice");
            refusals(rank, own, &cards[rank], &cards)[peer].is_none()
        };
        for (a, b) in (0..cards.len()).flat_map(|a| (0..cards.len()).map(move |b| (a, b))) {
            assert_eq!(near(a, b), near(b, a), "{a} {b}");
            let expected = a == b && a != 2 || a < 2 && b < 2;
            assert_eq!(near(a, b), expected, "{a} {b}: unknown hosts are different ones");
        }
        assert_eq!(read_cards(&bytes).unwrap(), cards);
        assert!(read_cards(&[vec![1]]).is_err());
    }

    #[test]
    fn ranks_of_other_hosts_have_the_same_network() {
        let card = |may_change, network: &str, host: &str| Card {
            wants: true,
            fifo: false,
            places: true,
            may_change,
            secret: 2,
            network: network.into(),
            host: host.into(),
        };
        let (rdma, tcp) = ("an RDMA device", &*software_over(TCP));
        let decide = |mut cards: Vec<Card>| {
            let is_spread = change_networks(&mut cards);
            (is_spread, check_networks(&cards).map_err(|error| error.to_string()), cards)
        };
        let near = decide(vec![card(true, SHARED_MEMORY, "a"), card(true, SHARED_MEMORY, "a")]);
        assert!(!near.0 && near.2.iter().all(|card| !card.wants), "one host stays as it was");
        assert!(!decide(vec![card(true, SHARED_MEMORY, "a"), card(false, SHARED_MEMORY, "")]).0, "not known");
        let far = decide(vec![card(true, SHARED_MEMORY, "a"), card(true, SHARED_MEMORY, "b")]);
        assert!(far.0 && far.1.is_ok() && far.2.iter().all(|card| card.network == tcp && card.wants));
        let named =
            decide(vec![card(false, tcp, "a"), card(true, SHARED_MEMORY, "b"), card(false, tcp, "a")]);
        assert!(named.0 && named.1.is_ok());
        for (first, second) in [(tcp, rdma), (rdma, SHARED_MEMORY), (SHARED_MEMORY, SHARED_MEMORY)] {
            let error = decide(vec![card(false, first, "a"), card(false, second, "b")]).1.unwrap_err();
            assert!(
                [first, second, "rank 1", "GDSYNC_DEVICE=tcp"].iter().all(|part| error.contains(part)),
                "{error}"
            );
        }
    }

    #[test]
    fn the_environment_overrides() {
        assert!(matches!(IntraHostPath::Soft.or(Some("device")), Ok(IntraHostPath::Device)));
        assert!(matches!(IntraHostPath::Device.or(Some(" soft ")), Ok(IntraHostPath::Soft)));
        assert!(matches!(IntraHostPath::Device.or(Some("")), Ok(IntraHostPath::Device)));
        assert!(matches!(IntraHostPath::Soft.or(None), Ok(IntraHostPath::Soft)));
        let error = IntraHostPath::Soft.or(Some("nvlink")).unwrap_err().to_string();
        assert!(
            error.contains("MP_LOCAL") && error.contains("'nvlink'") && error.contains("soft"),
            "{error}"
        );
    }

    #[test]
    fn the_environment_overrides_the_gpu_path() {
        for (variable, expected) in [
            (None, GpuPath::Staged),
            (Some(""), GpuPath::Staged),
            (Some("size"), GpuPath::BySize),
            (Some(" peer "), GpuPath::PeerToPeer),
        ] {
            assert_eq!(GpuPath::Staged.or(variable).unwrap(), expected, "{variable:?}");
        }
        assert_eq!(NearPath::Auto.or(Some(" peer ")).unwrap(), NearPath::PeerCopies);
        assert_eq!(NearPath::PeerCopies.or(Some("queues")).unwrap(), NearPath::Queues);
        assert_eq!(NearPath::Queues.or(None).unwrap(), NearPath::Queues);
        let error = NearPath::Auto.or(Some("nvlink")).unwrap_err().to_string();
        assert!(error.contains("MP_NEAR") && error.contains("'nvlink'"), "{error}");
        let error = GpuPath::BySize.or(Some("ipc")).unwrap_err().to_string();
        assert!(
            error.contains("MP_GPU_PATH") && error.contains("'ipc'") && error.contains("staged"),
            "{error}"
        );
    }

    #[test]
    fn processes_are_on_their_own_host() {
        let card = |host| {
            let [wants, fifo, places, may_change] = [false; 4];
            let network = String::new();
            Card { wants, fifo, places, may_change, secret: 1, network, host }
        };
        let (here, elsewhere) = (card(host()), card([&host()[..], b"!"].concat()));
        assert!(here.shares_memory_with(&card(host())), "{here:?}");
        assert!(!here.shares_memory_with(&elsewhere));
    }
}
