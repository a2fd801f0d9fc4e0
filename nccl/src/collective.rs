//! The ranks of a communicator: how they connect, how the loss of one is noticed, and the release of all that waits then.
//!
//! Beside the queue pairs of puts the ranks have those of an [`mp`] communicator. Each keeps a receive from every other one posted. It
//! fails when that rank's process is gone or does not answer, and it brings what the rank has to say: that it leaves, or that a third
//! one is lost. A rank that leaves so does not count as lost.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle, park_timeout};
use std::time::{Duration, Instant};

use gdsync::env::variable;
use gdsync::memory::Memory;
use gdsync::verbs::Context;
use mp::{AnyRequest, Communicator, Error, IntraHostPath, NearPath, Registration, Request, Result, Window};
use parking_lot::Mutex;

use crate::abi::HANDLE_BYTES;
use crate::listen::Listener;
use crate::region::Region;
use crate::release::Release;
use crate::{device, report};

/// How often the watching thread looks after the other ranks.
const LOOK: Duration = Duration::from_millis(10);
/// How long an operation waits for room in a queue before its rank counts as lost, and how long the release of words may take.
const ROOM: Duration = Duration::from_secs(10);
/// How long the end of a registration waits for a release, whose device may hang.
const RELEASE_LIMIT: Duration = Duration::from_secs(60);
/// How long a rank that leaves waits until the others know.
const FAREWELL: Duration = Duration::from_secs(2);
/// Seconds that ranks may take to connect, and to register memory.
const CONNECT: &str = "GDA_NCCL_CONNECT_S";

/// What a rank says: its kind, and the rank that it is about.
const MESSAGE: usize = 8;
const LEAVES: u32 = 1;
const LOST: u32 = 2;

/// Another rank.
#[derive(Debug, Default)]
struct Other {
    /// The posted receive; none from a rank that says nothing more.
    receive: Option<Request>,
    has_left: bool,
}

/// A communicator of NCCL, or a rail of one.
#[derive(Debug)]
pub(crate) struct Collective {
    /// NCCL's hash of it.
    id: u64,
    comm: Communicator,
    /// The devices that operations go through.
    devices: Vec<Context>,
    /// Bytes in no use, for windows without a part of their own.
    nothing: Registration,
    /// The connections for releasing words.
    own: Window,
    connect_limit: Duration,
    /// Regions that may hold signals.
    release: Release<Arc<Region>>,
    others: Mutex<Vec<Other>>,
    /// What the others write, by rank, and behind it what this one writes to them.
    messages: Registration,
    watcher: Mutex<Option<JoinHandle<()>>>,
    has_ended: AtomicBool,
}

/// Numbers as a message.
fn message(kind: u32, rank: usize) -> [u8; MESSAGE] {
    let rank = u32::try_from(rank).unwrap_or(u32::MAX);
    [kind.to_le_bytes(), rank.to_le_bytes()].concat().try_into().expect("two numbers of four bytes")
}

/// Why an operation has failed, without what only users of [`mp`] can do.
pub(crate) fn why(error: &Error) -> String {
    match error {
        Error::Message { operation, cause, .. } => {
            let text = cause.of_rank();
            format!("{operation}: {}", text.split("; go on without it").next().unwrap_or(&text))
        }
        other => other.to_string(),
    }
}

fn connect_limit() -> Result<Duration> {
    let Some(text) = variable(CONNECT) else {
        return Ok(Duration::from_secs(60));
    };
    let seconds = text.parse().ok().filter(|seconds| (1..=86_400).contains(seconds));
    let wrong = || gdsync::Error::invalid(CONNECT, text, "seconds, 1 to 86400");
    Ok(Duration::from_secs(seconds.ok_or_else(wrong)?))
}

impl Collective {
    /// Connects all ranks, which must call this.
    pub(crate) fn connect(
        listener: &Listener,
        root: &[u8; HANDLE_BYTES],
        (rank, size): (usize, usize),
    ) -> Result<Arc<Self>> {
        let limit = connect_limit()?;
        let start = Instant::now();
        let left = || limit.saturating_sub(start.elapsed());
        let opened = device::open(listener.device);
        // Also a rank without a device connects: so the others learn of it.
        let bootstrap = listener.connect(root, (rank, size), limit)?;
        let builder = Communicator::builder().context(&opened?).depth(device::DEPTH).timeout(left());
        // The CPU starts all, and NCCL frees its memory while other ranks may have it open. Messages are rare.
        let builder = builder.near(NearPath::Queues).intra_host(IntraHostPath::Queues);
        let comm = builder.init_over(bootstrap)?.with_timeout(ROOM);
        let nothing = comm.register(&Memory::alloc(8)?)?;
        let own = comm.window(&nothing, 0..0, left())?;
        let mut devices = vec![comm.context().clone()];
        for other in 0..size {
            if comm.path(other)?.is_intra_host() {
                devices.push(comm.device(other)?.clone());
                break;
            }
        }
        let messages = comm.register(&Memory::alloc((size + 2) * MESSAGE)?)?;
        messages.memory().write(size * MESSAGE, &message(LEAVES, rank))?;
        let this = Arc::new(Self {
            id: listener.comm,
            comm,
            devices,
            nothing,
            own,
            connect_limit: limit,
            release: Release::new(),
            others: Mutex::new((0..size).map(|_| Other::default()).collect()),
            messages,
            watcher: Mutex::default(),
            has_ended: AtomicBool::new(false),
        });
        for other in (0..size).filter(|&other| other != rank) {
            this.others.lock()[other].receive = Some(this.receive(other)?);
        }
        let watching = this.clone();
        let watch = move || {
            while !watching.has_ended.load(Ordering::Acquire) {
                watching.look();
                park_timeout(LOOK);
            }
        };
        let watcher = Builder::new().name("gda-nccl-watch".to_owned()).spawn(watch);
        let watcher = watcher.map_err(|_| gdsync::Error::Unsupported {
            what: "another thread",
            by: "this process",
            fix: "raise its limit (ulimit -u)",
        })?;
        *this.watcher.lock() = Some(watcher);
        report::info(&format!(
            "rank {rank} of {size} is connected, by {}",
            this.comm.context().description()
        ));
        Ok(this)
    }

    /// Posts the receive from a rank.
    fn receive(&self, rank: usize) -> Result<Request> {
        self.comm.irecv(&self.messages, rank * MESSAGE..(rank + 1) * MESSAGE, rank)
    }

    /// Sends the message of a kind to a rank.
    fn say(&self, kind: u32, rank: usize) -> Result<Request> {
        let at = (self.comm.size() + usize::from(kind == LOST)) * MESSAGE;
        self.comm.with_timeout(Duration::ZERO).isend(&self.messages, at..at + MESSAGE, rank)
    }

    /// Queue pairs to all ranks, which must call this: an order of operations of its own.
    pub(crate) fn connections(&self) -> Result<Window> {
        self.comm.window(&self.nothing, 0..0, self.connect_limit)
    }

    /// Registers memory of all ranks, which must call this.
    ///
    /// # Safety
    /// As [`region::memory`](crate::region::memory), until the region is removed.
    pub(crate) unsafe fn register(
        &self,
        (data, size): (*mut std::ffi::c_void, usize),
        kind: c_int,
        flags: u64,
    ) -> Result<Arc<Region>> {
        if self.has_failed() {
            let why = "a rank is lost; call ncclCommAbort".to_owned();
            return Err(gdsync::Error::Aborted { why }.into());
        }
        // SAFETY: the caller's promise.
        let memory = unsafe { crate::region::memory(data, size, kind) };
        let made = memory.map_err(Error::from).and_then(|memory| self.comm.register(&memory));
        if let Ok(made) = &made
            && let Err(error) = made.memory().word64(0)
        {
            report::info(&format!(
                "copy engines move {size} bytes at {data:?}, at a higher latency: {error}"
            ));
        }
        // If it fails at one rank it must fail at all, before keys are exchanged: NCCL tries it again.
        let votes = self.comm.exchange(&[u8::from(made.is_ok())], self.connect_limit)?;
        let registration = made?;
        if let Some(rank) = votes.iter().position(|vote| vote[..] != [1]) {
            return Err(Error::Bootstrap {
                peer: format!("rank {rank}"),
                what: "it could not register its part of the memory".to_owned(),
                cause: None,
                fix: "see the error of that rank",
            });
        }
        let len = registration.memory().len();
        let window = self.own.beside(&registration, 0..len, self.connect_limit)?;
        let region = Arc::new(Region::new(registration, window, flags));
        if region.has_signals {
            // A rank was lost meanwhile, and the others are released.
            if let Err(late) = self.release.add(region.clone()) {
                late.release(&self.comm)?;
            }
        }
        Ok(region)
    }

    /// Forgets a region. NCCL frees its memory then: returns when no release writes there any more.
    pub(crate) fn remove(&self, mut region: Arc<Region>) {
        self.release.retain(|one| !Arc::ptr_eq(one, &region));
        let start = Instant::now();
        while Arc::get_mut(&mut region).is_none() && start.elapsed() < RELEASE_LIMIT {
            park_timeout(Duration::from_millis(1));
        }
    }

    /// Moves requests along, those of other ranks, too.
    pub(crate) fn progress(&self) {
        self.devices.iter().for_each(|device| _ = device.progress());
    }

    /// The own rank.
    pub(crate) fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Whether a rank is lost.
    pub(crate) fn has_failed(&self) -> bool {
        self.release.has_begun()
    }

    /// Whether requests count as complete: a rank is lost, and all words are released.
    pub(crate) fn is_released(&self) -> bool {
        self.release.is_over()
    }

    /// An operation on a rank has failed. If the rank has not left, it is lost.
    pub(crate) fn operation_failed(&self, rank: usize, why: &str) {
        // It may have said so just before.
        self.look();
        if !self.others.lock().get(rank).is_some_and(|other| other.has_left) {
            self.fail(rank, why);
        }
    }

    /// Looks what the other ranks have said, and whether they are there.
    fn look(&self) {
        let mut lost = None;
        {
            let mut others = self.others.lock();
            for (rank, other) in others.iter_mut().enumerate() {
                let Some(known) = other.receive.as_ref().and_then(Request::outcome) else { continue };
                other.receive = None;
                match known.and_then(|_| self.take(rank)) {
                    Ok((LEAVES, _)) => other.has_left = true,
                    Ok((_, third)) => {
                        lost.get_or_insert((
                            third,
                            format!("rank {rank} has noticed it first, and says why"),
                        ));
                        other.receive = self.receive(rank).ok();
                    }
                    Err(error) => _ = lost.get_or_insert((rank, why(&error))),
                }
            }
        }
        if let Some((rank, why)) = lost {
            self.fail(rank, &why);
        }
    }

    /// Reads what a rank has written.
    fn take(&self, rank: usize) -> Result<(u32, usize)> {
        let mut bytes = [0; MESSAGE];
        self.messages.memory().read(rank * MESSAGE, &mut bytes)?;
        let [kind, about] = [0, 4].map(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four")));
        // A rank that is none of them is this one's own mistake.
        Ok((
            kind,
            usize::try_from(about).map_or(rank, |about| if about < self.comm.size() { about } else { rank }),
        ))
    }

    /// Releases everything, once: a rank is lost.
    pub(crate) fn fail(&self, rank: usize, why: &str) {
        if !self.release.begin() {
            return;
        }
        let own = self.comm.rank();
        // So that ranks that wait for a third one end their waits, too.
        if self.messages.memory().write((self.comm.size() + 1) * MESSAGE, &message(LOST, rank)).is_ok() {
            for other in (0..self.comm.size()).filter(|&other| other != own && other != rank) {
                // It may be gone as well.
                let _ = self.say(LOST, other);
            }
        }
        if rank != own {
            // It may only have been stopped: it learns that it is lost.
            let _ = self.comm.give_up(rank);
        }
        // Words before requests: nothing that goes on finds a word that is not released.
        let mut regions = self.release.take();
        regions.sort_by_key(|region| region.registration.memory().len());
        for region in regions {
            if let Err(error) = region.release(&self.comm) {
                report::warn(&format!("streams may wait for ever: signals cannot be written: {error}"));
            }
        }
        self.release.end();
        report::failed(self.id, own, rank, why);
    }

    /// Leaves the other ranks.
    pub(crate) fn close(&self) {
        self.has_ended.store(true, Ordering::Release);
        if let Some(watcher) = self.watcher.lock().take() {
            watcher.thread().unpark();
            // It returns nothing, and a panic there is printed.
            let _ = watcher.join();
        }
        let others = std::mem::take(&mut *self.others.lock());
        let here = others.iter().enumerate().filter(|(_, other)| other.receive.is_some());
        let mut said: Vec<_> = here.filter_map(|(rank, _)| self.say(LEAVES, rank).ok()).collect();
        let start = Instant::now();
        while !said.is_empty() && start.elapsed() < FAREWELL {
            self.progress();
            said.retain(|request| request.outcome().is_none());
            park_timeout(Duration::from_micros(100));
        }
        (0..self.comm.size())
            .filter(|&rank| rank != self.comm.rank())
            .for_each(|rank| _ = self.comm.give_up(rank));
    }
}
