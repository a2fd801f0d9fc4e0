//! `gdasync bench peers`: messages between two GPUs of a host, beside those of NCCL and NVSHMEM in the same run.

mod nccl;
mod nvshmem;

use std::time::{Duration, Instant};

use clap::Args;
use cudarc::driver::{result, sys};
use gdasync::app_stream::{AppStream, Engine, Kernels, Place, Placed, Queues, own_gpu};
use gdasync::gdsync::stream::{Batch, Cond, Graph, Via};
use gdasync::measure::Samples;
use gdasync::mp::{Channel, Communicator, CommunicatorBuilder, Registration, Rma, Signal, Window};
use gdasync::pingpong::{HALF_RTT, PTX, Work};
use gdasync::results::{Checks, Output, Point, Result, Sheet, Unit, objection, size_label};
use libloading::Library;
use serde_json::json;

use super::two_ranks;

/// Declares a table of functions of a library, with their C types.
macro_rules! declare {
    ($(#[$doc:meta])* struct $table:ident {
        $($name:ident: $symbol:literal ($($argument:ident: $type:ty),* $(,)?) -> $result:ty;)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        struct $table {
            $($name: unsafe extern "C" fn($($argument: $type),*) -> $result,)*
        }

        impl $table {
            /// Finds them all.
            ///
            /// # Safety
            /// The library's functions of these names must have these types.
            unsafe fn find(library: &libloading::Library) -> gdasync::results::Result<Self> {
                Ok(Self {
                    $(
                        // SAFETY: the caller vouches for the types.
                        $name: *unsafe { library.get($symbol) }?,
                    )*
                })
            }
        }
    };
}
use declare;

/// Loads a library for good.
fn load(name: &str) -> Result<&'static Library> {
    // SAFETY: the library's initialisers may run at any time.
    Ok(Box::leak(Box::new(unsafe { Library::new(name) }?)))
}

/// Options of `gdasync bench peers`.
#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: half of a round trip, of a put with a signal and a wait for it at each rank (NCCL: send and recv, too; \
mp: a channel and messages of isend and irecv, too, which graphs refuse), as \
the streams of both ranks do it; one sample is the mean of --ahead round trips. The libraries take turns. Ratios are to the best \
of NCCL and NVSHMEM, eager or in graphs. The last message of each sample is checked.")]
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
pub(super) struct Rig<'a> {
    comm: &'a Communicator,
    kernels: &'a Kernels,
    /// Bytes of the longest message.
    room: usize,
    timeout: Duration,
}

impl Rig<'_> {
    fn peer(&self) -> usize {
        1 - self.comm.rank()
    }

    /// What rank 0 has of these bytes, at both ranks.
    fn of_first<const N: usize>(&self, own: [u8; N]) -> Result<[u8; N]> {
        let all = self.comm.exchange(&own, self.timeout)?;
        Ok(*all[0].first_chunk().ok_or("rank 0 runs another version")?)
    }
}

/// A way to exchange messages between streams.
pub(super) trait Way {
    fn name(&self) -> String;

    /// The addresses of what is sent and of what is received.
    fn buffers(&self) -> (u64, u64);

    /// Puts message `n` of so many bytes on the stream. No two in a row have the same number.
    fn send(&self, bytes: usize, n: u64) -> Result<()>;

    /// Puts the wait for message `n` on the stream.
    fn receive(&self, bytes: usize, n: u64) -> Result<()>;

    /// Captures what `fill` puts on the stream; `None` where graphs refuse it.
    fn capture(&self, fill: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn Repeat + '_>>>;

    /// Ends it at both ranks.
    fn close(&self) -> Result<()>;
}

/// A graph.
pub(super) trait Repeat {
    fn launch(&self) -> Result<()>;
}

/// A graph that a foreign library was captured in.
pub(super) struct ForeignGraph(cudarc::driver::CudaGraph);

impl Repeat for ForeignGraph {
    fn launch(&self) -> Result<()> {
        Ok(self.0.launch()?)
    }
}

/// Captures what a foreign library puts on the stream.
pub(super) fn capture_foreign(
    kernels: &Kernels,
    fill: &mut dyn FnMut() -> Result<()>,
) -> Result<Option<Box<dyn Repeat>>> {
    let stream = kernels.stream();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let filled = fill();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags);
    filled?;
    Ok(Some(Box::new(ForeignGraph(graph?.ok_or("nothing was captured")?))))
}

/// Puts with signals through a window of mp.
struct Ours<'a> {
    app: &'a AppStream,
    window: Window,
    buffer: Registration,
    room: usize,
    peer: usize,
}

const WORDS: usize = 64;

impl<'a> Ours<'a> {
    fn new(rig: &Rig<'_>, app: &'a AppStream) -> Result<Self> {
        let memory = app.gpu()?.alloc(WORDS + 2 * rig.room)?;
        memory.write(0, &[0; WORDS])?;
        memory.flush()?;
        let buffer = rig.comm.register(&memory)?;
        let window = rig.comm.window(&buffer, 0..memory.len(), rig.timeout)?;
        Ok(Self { app, window, buffer, room: rig.room, peer: rig.peer() })
    }

    fn path(&self) -> Result<String> {
        let path = self.window.path_of(&self.buffer, WORDS..WORDS + 8, self.peer)?;
        Ok(format!("mp: {path}"))
    }
}

impl Way for Ours<'_> {
    fn name(&self) -> String {
        "mp put and signal".into()
    }

    fn buffers(&self) -> (u64, u64) {
        let first = self.buffer.memory().addr() + WORDS as u64;
        (first, first + self.room as u64)
    }

    fn send(&self, bytes: usize, n: u64) -> Result<()> {
        let put = Rma::put(&self.buffer, WORDS..WORDS + bytes, self.peer, WORDS + self.room);
        let put = put.with_signal(Signal::set(0, n));
        Ok(self.window.start_on_stream(&self.app.stream, &put).map(drop)?)
    }

    fn receive(&self, _bytes: usize, n: u64) -> Result<()> {
        Ok(self.window.wait_signal_on_stream(&self.app.stream, 0, n, Cond::Eq)?)
    }

    fn capture(&self, fill: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn Repeat + '_>>> {
        capture_ours(self.app, fill)
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// Messages through a channel of mp, with one place. A rank frees it in the batch of its next send, behind that: the other rank
/// needs it only for its answer.
struct OurChannel<'a> {
    app: &'a AppStream,
    channel: Channel,
    buffer: Registration,
    room: usize,
}

impl<'a> OurChannel<'a> {
    fn new(rig: &Rig<'_>, app: &'a AppStream) -> Result<Self> {
        let buffer = rig.comm.register(&app.gpu()?.alloc(2 * rig.room)?)?;
        let channel = rig.comm.channel(rig.peer(), &[(&buffer, rig.room..2 * rig.room)], rig.timeout)?;
        if rig.comm.rank() > 0 {
            // It receives first.
            channel.post_recv_on_stream(&app.stream)?;
        }
        Ok(Self { app, channel, buffer, room: rig.room })
    }
}

impl Way for OurChannel<'_> {
    fn name(&self) -> String {
        "mp channel".into()
    }

    fn buffers(&self) -> (u64, u64) {
        let first = self.buffer.memory().addr();
        (first, first + self.room as u64)
    }

    fn send(&self, bytes: usize, _n: u64) -> Result<()> {
        let mut batch = Batch::new();
        let _sent = self.channel.isend_in_batch(&mut batch, &self.buffer, 0..bytes)?;
        self.channel.post_recv_in_batch(&mut batch)?;
        Ok(self.app.stream.submit(&mut batch)?)
    }

    fn receive(&self, _bytes: usize, _n: u64) -> Result<()> {
        Ok(self.channel.wait_recv_on_stream(&self.app.stream).map(drop)?)
    }

    fn capture(&self, fill: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn Repeat + '_>>> {
        capture_ours(self.app, fill)
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// Messages of mp: receives of the CPU, sends and waits of the stream.
struct OurMessages<'a> {
    app: &'a AppStream,
    comm: &'a Communicator,
    buffer: Registration,
    room: usize,
    peer: usize,
}

impl<'a> OurMessages<'a> {
    fn new(rig: &Rig<'a>, app: &'a AppStream) -> Result<Self> {
        let buffer = rig.comm.register(&app.gpu()?.alloc(2 * rig.room)?)?;
        Ok(Self { app, comm: rig.comm, buffer, room: rig.room, peer: rig.peer() })
    }
}

impl Way for OurMessages<'_> {
    fn name(&self) -> String {
        "mp isend and irecv".into()
    }

    fn buffers(&self) -> (u64, u64) {
        let first = self.buffer.memory().addr();
        (first, first + self.room as u64)
    }

    fn send(&self, bytes: usize, _n: u64) -> Result<()> {
        Ok(self.comm.isend_on_stream(&self.app.stream, &self.buffer, 0..bytes, self.peer).map(drop)?)
    }

    fn receive(&self, bytes: usize, _n: u64) -> Result<()> {
        let received = self.comm.irecv(&self.buffer, self.room..self.room + bytes, self.peer)?;
        Ok(self.comm.wait_on_stream(&self.app.stream, &received)?)
    }

    fn capture(&self, _fill: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn Repeat + '_>>> {
        Ok(None)
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }
}

fn capture_ours<'a>(
    app: &'a AppStream,
    fill: &mut dyn FnMut() -> Result<()>,
) -> Result<Option<Box<dyn Repeat + 'a>>> {
    let capture = app.stream.begin_capture()?;
    fill()?;
    Ok(Some(Box::new(OurGraph(app, capture.end()?))))
}

struct OurGraph<'a>(&'a AppStream, Graph);

impl Repeat for OurGraph<'_> {
    fn launch(&self) -> Result<()> {
        Ok(self.1.launch(&self.0.stream).map(drop)?)
    }
}

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let timeout = self.checks.timeout();
        let gpu = own_gpu(&self.device)?;
        let placed = Placed {
            engine: Engine::Cuda,
            payload: Place::Gpu,
            placement: Queues::Host,
            via: self.via,
            copies: self.copies,
            gpu: Some(gpu.clone()),
        };
        let comm = two_ranks(CommunicatorBuilder::default().gpu(&gpu).allow_overlap(true), timeout)?;
        let mut sheet = Sheet::new(&self.output, comm.rank() == 0, self.sizes.len())?;
        let app = AppStream::new(&placed, timeout, PTX)?;
        let room = self.sizes.iter().max().copied().unwrap_or(8).next_multiple_of(64);
        let kernels = app.kernels.as_ref().ok_or("no kernels")?;
        let rig = Rig { comm: &comm, kernels, room: usize::try_from(room)?, timeout };
        let ours = Ours::new(&rig, &app)?;
        let mut note = format!("{}{}", placed.describe(&comm, timeout)?, ours.path()?);
        let channel = OurChannel::new(&rig, &app)?;
        let messages = OurMessages::new(&rig, &app)?;
        let sent = messages.buffer.clone();
        let mut ways: Vec<Box<dyn Way + '_>> = vec![Box::new(ours), Box::new(channel), Box::new(messages)];
        let mut add = |name, opened: Result<(String, Vec<Box<dyn Way>>)>| -> Result<()> {
            // Either rank may lack it.
            let own = opened.as_ref().err().map(|error| format!("{error}; --{name} names its library"));
            match (objection(&comm, own, timeout)?, opened) {
                (Some(why), _) => sheet.skip(name, why),
                (None, Ok((version, more))) => {
                    note += &format!("\n{version}");
                    ways.extend(more.into_iter().map(|way| way as Box<dyn Way + '_>));
                }
                (None, Err(error)) => return Err(error),
            }
            Ok(())
        };
        add("nccl", nccl::open(&self.nccl, &rig))?;
        add("nvshmem", nvshmem::open(&self.nvshmem, &rig))?;
        for &bytes in &self.sizes {
            let bytes = usize::try_from(bytes)?.next_multiple_of(8);
            if sheet.may_start(&comm, size_label(bytes), timeout)? {
                self.of_size(&rig, &app, &ways, bytes, &mut sheet)?;
            }
        }
        // Messages learn of each other's memory as they go.
        let (path, got) = (comm.path_of(&sent, 0..rig.room, rig.peer())?, comm.device(rig.peer())?.stats());
        note += &format!("\nisend and irecv: {path}; {} messages came so", got.placed);
        let ours = ways[..3].iter().flat_map(|way| MODES.map(|mode| format!("{}, {mode}", way.name())));
        let ours: Vec<_> = ours.collect();
        let ours: Vec<_> = ours.iter().map(String::as_str).collect();
        sheet.compare_with_best(HALF_RTT, &ours, "best of NCCL and NVSHMEM");
        ways.iter().try_for_each(|way| way.close())?;
        drop(ways);
        sheet.set_note(note.clone());
        let options =
            json!({ "sizes": self.sizes, "ahead": self.ahead, "work_us": self.kernel_us, "place": note });
        drop(app);
        sheet.finish(comm, "peers", options, timeout)
    }

    /// Measures all ways by turns.
    fn of_size(
        &self,
        rig: &Rig<'_>,
        app: &AppStream,
        ways: &[Box<dyn Way + '_>],
        bytes: usize,
        sheet: &mut Sheet,
    ) -> Result<()> {
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
        let graphs =
            ways.iter().map(|way| way.capture(&mut || (0..ahead).try_for_each(|n| round(&**way, n + 1))));
        let graphs = graphs.collect::<Result<Vec<_>>>()?;
        let mut samples = vec![[Samples::default(), Samples::default()]; ways.len()];
        for sample in 0..=self.iters {
            for (at, way) in ways.iter().enumerate() {
                for (mode, samples) in samples[at].iter_mut().enumerate() {
                    let is_captured = mode == 1;
                    if is_captured && graphs[at].is_none() {
                        continue;
                    }
                    let number = u64::from(sample) * 2 + mode as u64;
                    let (source, target) = way.buffers();
                    let sent = self.checks.sent(rig.comm.rank(), number).bytes(bytes);
                    app.finish()?;
                    rig.comm.barrier(rig.timeout)?;
                    // SAFETY: device memory of the way, as long as the longest message, which nothing uses now.
                    unsafe { result::memcpy_htod_sync(source, &sent) }?;
                    rig.comm.barrier(rig.timeout)?;
                    let start = Instant::now();
                    if is_captured && let Some(graph) = &graphs[at] {
                        graph.launch()?;
                    } else {
                        for _ in 0..ahead {
                            numbers[at] += 1;
                            round(&**way, numbers[at])?;
                        }
                    }
                    rig.kernels.synchronize()?;
                    // The first warms up.
                    if sample > 0 {
                        samples.add_mean(start.elapsed(), ahead);
                    }
                    app.finish()?;
                    // Takes completions of sends, for which launches of graphs need room.
                    rig.comm.progress();
                    rig.comm.barrier(rig.timeout)?;
                    let mut came = vec![0; bytes];
                    // SAFETY: device memory of the way, as long as the longest message, which nothing uses now.
                    unsafe { result::memcpy_dtoh_sync(&mut came, target) }?;
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
        Ok(())
    }
}

const MODES: [&str; 2] = ["eager", "graph"];
