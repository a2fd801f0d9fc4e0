//! `gdasync bench peers`: messages between two GPUs of a host, beside those of NCCL and NVSHMEM in the same run.

mod nccl;
mod nvshmem;

use std::cell::RefCell;
use std::ffi::c_void;
use std::time::{Duration, Instant};

use clap::Args;
use cudarc::driver::result;
use gdasync::app_stream::{AppStream, Kernels, Placement};
use gdasync::gdsync::stream::{Batch, Cond, Stream, Via};
use gdasync::measure::{Samples, objection};
use gdasync::mp::{Channel, Communicator, Registration, Request, Rma, Signal, Window};
use gdasync::pingpong::{HALF_RTT, PTX, Work};
use gdasync::results::{Checks, Output, Point, Result, Sheet, Unit, size_label};
use serde_json::json;

use super::two_ranks;

#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: half of a round trip, of a put with a signal and a wait for it at each rank (NCCL: send and recv, too; \
mp: a channel and messages of isend and irecv, too, which graphs refuse), as \
the streams of both ranks do it; in batches: each wait and the answer behind it are one submission, with --kernel-us each send and \
the wait behind it; one sample is the mean of --ahead round trips. The libraries take turns. Ratios are to the best \
of NCCL and NVSHMEM, eager or in graphs; the CPU time of a launch is for each send and wait in the graph. The last message of each sample is checked.")]
pub(crate) struct Options {
    /// Message sizes in bytes, multiples of 8 up to 1073741824.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(8..=1 << 30),
          default_values_t = [8, 4096, 65536, 1 << 20, 16 << 20])]
    sizes: Vec<u32>,
    /// Samples of each size.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    iters: u32,
    /// Round trips of a sample, which are enqueued ahead or in a graph.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(2..=100))]
    ahead: u32,
    /// What runs the operations of the streams of `mp`: memop, kernel or auto.
    #[arg(long, default_value_t = Via::Kernel)]
    via: Via,
    /// What makes the copies of `mp`: kernel, memop (the copy engine) or auto.
    #[arg(long, default_value_t = Via::Auto)]
    copies: Via,
    /// GPUs by rank, by their CUDA ordinals [default: the local rank modulo the number of GPUs].
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    device: Vec<i32>,
    /// Microseconds of work on the stream before each send.
    #[arg(long, value_name = "US", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    kernel_us: u32,
    /// The library of NCCL.
    #[arg(long, value_name = "FILE", default_value = "libnccl.so.2")]
    nccl: String,
    /// The host library of NVSHMEM.
    #[arg(long, value_name = "FILE", default_value = "libnvshmem_host.so.3")]
    nvshmem: String,
    #[command(flatten)]
    checks: Checks,
    #[command(flatten)]
    output: Output,
}

/// The two ranks, and the stream of this one.
#[derive(Clone, Copy)]
pub(super) struct Rig<'a> {
    comm: &'a Communicator,
    app: &'a AppStream,
    kernels: &'a Kernels,
    /// Bytes of the longest message.
    room: usize,
    /// Whether there is work before each send.
    works: bool,
    /// Round trips of a sample.
    ahead: u32,
}

impl Rig<'_> {
    fn peer(&self) -> usize {
        1 - self.comm.rank()
    }

    /// Places of a channel, which come in turn in each sample.
    fn places(&self) -> usize {
        if self.ahead.is_multiple_of(2) { 2 } else { 1 }
    }

    /// The stream, for a library in C.
    fn stream(&self) -> *mut c_void {
        self.kernels.stream()
    }

    /// What rank 0 has of these bytes, at both ranks.
    fn of_first<const N: usize>(&self, own: [u8; N]) -> Result<[u8; N]> {
        let all = self.comm.exchange(&own, None)?;
        Ok(*all[0].first_chunk().ok_or("rank 0 runs another version")?)
    }
}

pub(super) trait Way {
    fn name(&self) -> String;

    /// The address of what is sent.
    fn buffer(&self) -> u64;

    /// The address of what is received.
    fn received(&self) -> u64;

    /// Puts message `n` of so many bytes on the stream. No two in a row have the same number.
    fn send(&self, bytes: usize, n: u64) -> Result<()>;

    /// Puts the wait for message `n` on the stream.
    fn receive(&self, bytes: usize, n: u64) -> Result<()>;

    /// Submits what is left.
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    /// Whether graphs take it.
    fn is_captured(&self) -> bool {
        true
    }

    /// Ends it at both ranks.
    fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// Messages of mp between the two halves of a buffer.
struct Ours<'a> {
    rig: Rig<'a>,
    buffer: Registration,
    by: By,
    /// Operations that are not submitted yet.
    batch: RefCell<Batch>,
    /// Whether one submission has a wait and a send.
    in_batches: bool,
}

/// How mp sends them.
enum By {
    /// Puts with a signal, in the first bytes of the buffer.
    Window(Window),
    /// A channel, mostly with two places. A rank frees the last one in the batch of its next send, behind that.
    Channel(Channel),
    /// Receives of the CPU, sends and waits of the stream. The next receive is posted behind each wait.
    Messages(RefCell<Option<Request>>),
}

/// Bytes before the halves.
const WORDS: usize = 64;

impl<'a> Ours<'a> {
    fn new(
        rig: Rig<'a>,
        in_batches: bool,
        open: impl FnOnce(&Registration) -> gdasync::mp::Result<By>,
    ) -> Result<Self> {
        let memory = rig.app.gpu()?.alloc(WORDS + 3 * rig.room)?;
        memory.write(0, &[0; WORDS])?;
        memory.flush()?;
        let buffer = rig.comm.register(&memory)?;
        let by = open(&buffer)?;
        if let By::Channel(channel) = &by {
            // Rank 1 receives first.
            (1..rig.places() + rig.comm.rank())
                .try_for_each(|_| channel.post_recv_on_stream(&rig.app.stream))?;
        }
        Ok(Self { rig, buffer, by, batch: RefCell::default(), in_batches })
    }

    /// By window, channel and messages; each, and then each in batches.
    fn all(rig: Rig<'a>) -> Result<Vec<Self>> {
        let Rig { comm, room, .. } = rig;
        let window =
            |buffer: &Registration| comm.window(buffer, 0..buffer.memory().len(), None).map(By::Window);
        // The last message is in the last place.
        let places = [2, 1].map(|at| WORDS + at * room..WORDS + (at + 1) * room);
        let channel = |buffer: &Registration| {
            let places = places.clone().map(|place| (buffer, place));
            comm.channel(rig.peer(), &places[2 - rig.places()..], None).map(By::Channel)
        };
        let mut all = Vec::new();
        for in_batches in [false, true] {
            all.push(Self::new(rig, in_batches, window)?);
            all.push(Self::new(rig, in_batches, channel)?);
            all.push(Self::new(rig, in_batches, |_| Ok(By::Messages(RefCell::default())))?);
        }
        Ok(all)
    }

    /// Submits a send or a wait; in batches only the one that is behind.
    fn end_part(&self, batch: &mut Batch, is_behind: bool) -> Result<()> {
        if !self.in_batches || is_behind {
            self.rig.app.stream.submit(batch)?;
        }
        Ok(())
    }

    fn path(&self) -> Result<String> {
        let (to, peer) = (WORDS..WORDS + self.rig.room, self.rig.peer());
        Ok(match &self.by {
            By::Window(window) => window.path_of(&self.buffer, to, peer)?.to_string(),
            By::Channel(channel) => channel.path_of(&self.buffer, to)?.to_string(),
            By::Messages(_) => self.rig.comm.path_of(&self.buffer, to, peer)?.to_string(),
        })
    }
}

impl Way for Ours<'_> {
    fn name(&self) -> String {
        let name = match self.by {
            By::Window(_) => "mp put and signal",
            By::Channel(_) => "mp channel",
            By::Messages(_) => "mp isend and irecv",
        };
        format!("{name}{}", if self.in_batches { " in batches" } else { "" })
    }

    fn buffer(&self) -> u64 {
        self.buffer.memory().addr() + WORDS as u64
    }

    fn received(&self) -> u64 {
        self.buffer() + self.rig.room as u64
    }

    fn send(&self, bytes: usize, n: u64) -> Result<()> {
        let (batch, buffer, from) = (&mut *self.batch.borrow_mut(), &self.buffer, WORDS..WORDS + bytes);
        let (rig, peer) = (self.rig, self.rig.peer());
        match &self.by {
            By::Window(window) => {
                let put = Rma::put(buffer, from, peer, WORDS + rig.room);
                _ = window.start_in_batch(batch, &put.with_signal(Signal::set(0, n)))?;
            }
            By::Channel(channel) => {
                _ = channel.isend_in_batch(batch, buffer, from)?;
                channel.post_recv_in_batch(batch)?;
            }
            By::Messages(_) => _ = rig.comm.isend_in_batch(batch, buffer, from, peer)?,
        }
        self.end_part(batch, !rig.works)
    }

    fn receive(&self, _: usize, n: u64) -> Result<()> {
        let (batch, rig) = (&mut *self.batch.borrow_mut(), self.rig);
        match &self.by {
            By::Window(window) => window.wait_signal_in_batch(batch, 0, n, Cond::Eq)?,
            By::Channel(channel) => _ = channel.wait_recv_in_batch(batch)?,
            By::Messages(posted) => {
                let into = WORDS + rig.room..WORDS + 2 * rig.room;
                let post = || rig.comm.irecv(&self.buffer, into.clone(), rig.peer());
                let received = posted.take().map_or_else(post, Ok)?;
                rig.comm.wait_in_batch(batch, &received)?;
                // Behind the last one of a sample other messages come.
                let is_last = n.is_multiple_of(rig.ahead.into());
                _ = posted.replace((!is_last).then(post).transpose()?);
            }
        }
        self.end_part(batch, rig.works)
    }

    fn flush(&self) -> Result<()> {
        Ok(self.rig.app.stream.submit(&mut self.batch.borrow_mut())?)
    }

    fn is_captured(&self) -> bool {
        // A graph joins batches by itself.
        !self.in_batches && !matches!(self.by, By::Messages(_))
    }
}

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let timeout = self.checks.timeout();
        let mut placed = Placement::on_gpus(self.via, self.device.clone()).open()?;
        placed.copies = self.copies;
        let comm = two_ranks(placed.builder(), timeout)?;
        let mut sheet = Sheet::new(&self.output, comm.rank() == 0, self.sizes.len())?;
        let app = AppStream::new(&placed, timeout, PTX)?;
        let room = self.sizes.iter().max().copied().unwrap_or(8).next_multiple_of(64);
        let kernels = app.kernels.as_ref().ok_or("no kernels")?;
        let (works, ahead) = (self.kernel_us > 0, self.ahead);
        let rig = Rig { comm: &comm, app: &app, kernels, room: usize::try_from(room)?, works, ahead };
        let mut note = placed.describe(&comm)?.to_string();
        let mut foreign: Vec<Box<dyn Way + '_>> = Vec::new();
        let mut add = |name, opened: Result<(String, Vec<Box<dyn Way>>)>| -> Result<()> {
            // Either rank may lack it.
            let own = opened.as_ref().err().map(|error| format!("{error}; --{name} names its library"));
            match (objection(&comm, own)?, opened) {
                (Some(why), _) => sheet.skip(name, why),
                (None, Ok((version, more))) => {
                    note += &format!("\n{version}");
                    foreign.extend(more.into_iter().map(|way| way as Box<dyn Way + '_>));
                }
                (None, Err(error)) => return Err(error),
            }
            Ok(())
        };
        add("nccl", nccl::open(&self.nccl, rig))?;
        add("nvshmem", nvshmem::open(&self.nvshmem, rig))?;
        let mut names: Vec<String> = Vec::new();
        for (at, &bytes) in self.sizes.iter().enumerate() {
            let bytes = usize::try_from(bytes)?.next_multiple_of(8);
            if !sheet.may_start(&comm, size_label(bytes))? {
                continue;
            }
            // Places are as long as the messages.
            let ours = Ours::all(Rig { room: bytes.next_multiple_of(64), ..rig })?;
            let of_ours = ours.iter().map(|way| way as &dyn Way);
            let ways: Vec<_> = of_ours.chain(foreign.iter().map(|way| &**way)).collect();
            self.of_size(rig, &ways, bytes, &mut sheet)?;
            if at + 1 == self.sizes.len() {
                // Messages learn of each other's memory as they go.
                for way in &ours {
                    note += &format!("\n{}: {}", way.name(), way.path()?);
                    names.extend(MODES.map(|mode| format!("{}, {mode}", way.name())));
                }
            }
        }
        note += &format!("; {} messages came so", comm.device(rig.peer())?.stats().placed);
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        sheet.compare_with_best(HALF_RTT, &names, "best of NCCL and NVSHMEM");
        foreign.iter().try_for_each(|way| way.close())?;
        drop(foreign);
        sheet.note = Some(note.clone());
        let options =
            json!({ "sizes": self.sizes, "ahead": self.ahead, "work_us": self.kernel_us, "place": note });
        drop(app);
        sheet.finish(comm, "peers", options)
    }

    fn of_size(&self, rig: Rig<'_>, ways: &[&dyn Way], bytes: usize, sheet: &mut Sheet) -> Result<()> {
        let app = rig.app;
        let work = Work::new(app, Duration::from_micros(self.kernel_us.into()))?;
        let ahead = u64::from(self.ahead);
        let round = |way: &dyn Way, n: u64| -> Result<()> {
            for turn in 0..2 {
                if turn == rig.comm.rank() {
                    work.enqueue()?;
                    way.send(bytes, n)?;
                } else {
                    way.receive(bytes, n)?;
                }
            }
            Ok(())
        };
        // Graphs repeat the first numbers.
        let mut numbers = vec![ahead; ways.len()];
        let capture = |way: &&dyn Way| {
            let fill = |_: &Stream| (0..ahead).try_for_each(|n| round(*way, n + 1));
            way.is_captured().then(|| app.stream.capture(fill)).transpose()
        };
        let graphs = ways.iter().map(capture).collect::<Result<Vec<_>>>()?;
        let mut samples = vec![[Samples::default(), Samples::default()]; ways.len()];
        let mut launches = vec![Samples::default(); ways.len()];
        for sample in 0..=self.iters {
            for (at, way) in ways.iter().enumerate() {
                for (mode, samples) in samples[at].iter_mut().enumerate() {
                    let graph = graphs[at].as_ref().filter(|_| mode == 1);
                    if mode == 1 && graph.is_none() {
                        continue;
                    }
                    let number = u64::from(sample) * 2 + mode as u64;
                    let source = way.buffer();
                    let sent = self.checks.sent(rig.comm.rank(), number).bytes(bytes);
                    app.finish()?;
                    rig.comm.barrier(None)?;
                    // SAFETY: device memory of the way, as long as the longest message, which nothing uses now.
                    unsafe { result::memcpy_htod_sync(source, &sent) }?;
                    rig.comm.barrier(None)?;
                    let start = Instant::now();
                    if let Some(graph) = graph {
                        graph.launch(&app.stream)?;
                        if sample > 0 {
                            // Sends and waits.
                            launches[at].add_mean(start.elapsed(), 2 * ahead);
                        }
                    } else {
                        for _ in 0..ahead {
                            numbers[at] += 1;
                            round(*way, numbers[at])?;
                        }
                        way.flush()?;
                    }
                    rig.kernels.synchronize()?;
                    // The first warms up.
                    if sample > 0 {
                        samples.add_mean(start.elapsed(), ahead);
                    }
                    app.finish()?;
                    // Takes completions of sends, for which launches of graphs need room.
                    rig.comm.progress();
                    rig.comm.barrier(None)?;
                    let mut came = vec![0; bytes];
                    // SAFETY: device memory of the way, as long as the longest message, which nothing uses now.
                    unsafe { result::memcpy_dtoh_sync(&mut came, way.received()) }?;
                    let right = gdasync::results::expected(rig.peer(), number).bytes(bytes) == came;
                    sheet.wrong(u64::from(!right));
                }
            }
        }
        for (way, samples) in ways.iter().zip(&samples) {
            for (mode, samples) in MODES.iter().zip(samples).filter(|(_, samples)| samples.count() > 0) {
                let point = Point::time(bytes as u64, samples, 2);
                sheet.add_point(HALF_RTT, &format!("{}, {mode}", way.name()), "bytes", Unit::Micros, point);
            }
        }
        for (way, samples) in ways.iter().zip(&launches).filter(|(_, samples)| samples.count() > 0) {
            let point = Point::time(bytes as u64, samples, 2);
            sheet.add_point(LAUNCH_CPU, &way.name(), "bytes", Unit::Micros, point);
        }
        Ok(())
    }
}

const LAUNCH_CPU: &str = "CPU time of a graph's launch, per send or wait";

const MODES: [&str; 2] = ["eager", "graph"];
