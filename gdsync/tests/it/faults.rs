//! What fails while streams wait for it: on the host and on a GPU, eagerly and in graphs, by memory operations and by kernels,
//! with rings in host and in GPU memory, each fault many times. Streams drain in time, errors tell the root cause, queue pairs
//! can be used again, and nothing is left.

mod gpus;
mod requests;
mod stream_ends;

use std::sync::OnceLock;
use std::time::{Duration, Instant};
use std::{fs, iter, thread};

use gdrcopy::cuda::raw::Api;
use gdsync::cuda::Gpu;
use gdsync::error::{Error, Result};
use gdsync::mlx5::Syndrome;
use gdsync::stream::{Batch, CudaStreamConfig, Graph, Stream};
use gdsync::verbs::{Completion, Context, Qp, QpAttr, QpBuilder, QpState, RecvWr, SendWr, Sge};
use gdsync_testkit::driver::{self, Alive, Control};

use crate::child::own_process;
use crate::common::{PATIENCE, Side, assert_clean, bytes, connect, hca, pattern, stream, stream_with, tier};
use crate::place::{self, Place, WholeGpu, places_on};

/// What this process holds of the things that leak.
#[derive(Debug, PartialEq)]
pub(crate) struct Resources {
    pub(crate) files: usize,
    /// Those of this library.
    pub(crate) threads: usize,
    /// Mappings of memory shared with other HCAs.
    pub(crate) links: usize,
}

impl Resources {
    pub(crate) fn now() -> Self {
        let files = fs::read_dir("/proc/self/fd").unwrap().count();
        let threads = threads().len();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let links = maps.lines().filter(|line| line.contains("memfd:gdsync")).count();
        Self { files, threads, links }
    }
}

/// The names of this library's threads.
pub(crate) fn threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.starts_with("gdsync-")).map(|name| name.trim().to_owned()).collect()
}

/// Timers as short as they go, so that what will not be answered fails at once.
pub(crate) fn hasty(q: QpBuilder) -> QpBuilder {
    q.timeout(5).retry_cnt(1).rnr_retry(1).min_rnr_timer(1)
}

/// Every further call fails at once with the root cause.
pub(crate) fn refuses(s: &Stream, qp: &Qp, root: &Error) {
    let text = root.to_string();
    let nop = [SendWr::nop()];
    let errors = [
        qp.check().unwrap_err(),
        qp.post_send(&nop).unwrap_err(),
        qp.post_recv(&[RecvWr::new(&[])]).unwrap_err(),
        qp.prepare_send(&nop).unwrap_err(),
        qp.prepare_wait_send().unwrap_err(),
        qp.prepare_wait_recv().unwrap_err(),
        s.send(qp, &nop[0]).unwrap_err(),
    ];
    errors.iter().for_each(|error| assert_eq!(error.to_string(), text));
    assert_eq!(qp.state(), QpState::ERR);
}

/// The queue pair broke on this request, says so with everything one needs to know, and stays so.
pub(crate) fn broke(side: &Side, wr_id: u64, syndrome: Syndrome) {
    let error = side.qp.check().unwrap_err();
    let Error::Completion(e) = &error else { panic!("{error}") };
    assert_eq!((e.qpn, e.wr_id, e.syndrome, e.vendor), (side.qp.qpn(), wr_id, syndrome, 0), "{error}");
    let text = error.to_string();
    for part in
        [format!("QP {:#x}", e.qpn), format!("wr_id {wr_id}"), syndrome.to_string(), "vendor code 0x0".into()]
    {
        assert!(text.contains(&part), "{text} lacks {part}");
    }
    refuses(&stream("late"), &side.qp, &error);
}

/// The queue pair broke because the other side is gone, with nothing under way that could fail, and stays so.
pub(crate) fn lost_its_peer(side: &Side) {
    let error = side.qp.check().unwrap_err();
    assert!(matches!(error, Error::PeerGone { qpn } if qpn == side.qp.qpn()), "{error}");
    refuses(&stream("late"), &side.qp, &error);
}

pub(crate) const FLUSH: Option<Syndrome> = Some(Syndrome::WR_FLUSH_ERR);
pub(crate) const RETRY: Option<Syndrome> = Some(Syndrome::RETRY_EXC_ERR);

/// A receiver that is not ready never makes a send fail.
pub(crate) fn patient(q: QpBuilder) -> QpBuilder {
    q.rnr_retry(7).min_rnr_timer(1)
}

/// Writes of one byte each, with ids from 100.
pub(crate) fn writes(to: &Side) -> [SendWr<'static>; 3] {
    let remote = to.mr.remote(0).unwrap();
    std::array::from_fn(|i| SendWr::write_inline(remote, b"x").id(100 + i as u64))
}

/// Empty sends, with ids from 100.
pub(crate) fn messages() -> [SendWr<'static>; 3] {
    std::array::from_fn(|i| SendWr::send(&[]).id(100 + i as u64))
}

pub(crate) fn post_recvs(side: &Side, count: u64, sges: &[Sge]) -> Completion {
    let wrs: Vec<_> = (0..count).map(|i| RecvWr::new(sges).id(200 + i)).collect();
    side.qp.post_recv(&wrs).unwrap()
}

/// How far a GPU's free memory may differ, in bytes: CUDA allocates memory for itself late.
const TOLERANCE: usize = 32 << 20;
/// Files of one more block of small pieces, which the GPU keeps: how many it takes depends on which streams end late.
const BLOCK: usize = 1;

/// Keeps a GPU's primary context, so that it is not the end of the context that cleans up.
struct ContextGuard {
    api: Api,
    device: i32,
    context: usize,
}

impl ContextGuard {
    fn new(device: i32) -> Self {
        let api = if place::is_real() { Api::load().unwrap() } else { driver::api() };
        let mut context = 0;
        // SAFETY: no flags are defined.
        unsafe { api.init(0) }.unwrap();
        // SAFETY: a place for the answer.
        unsafe { api.primary_ctx_retain(&mut context, device) }.unwrap();
        Self { api, device, context }
    }

    /// Bytes of GPU memory.
    fn free(&self) -> usize {
        let (mut free, mut total, mut popped) = (0, 0, 0);
        // SAFETY: retained by this value.
        unsafe { self.api.ctx_push_current(self.context) }.unwrap();
        // SAFETY: places for the answers.
        unsafe { self.api.mem_get_info(&mut free, &mut total) }.unwrap();
        // SAFETY: a place for the answer.
        unsafe { self.api.ctx_pop_current(&mut popped) }.unwrap();
        free
    }
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        // SAFETY: retained once, given back once.
        unsafe { self.api.primary_ctx_release(self.device) }.unwrap();
    }
}

/// A GPU that no other test uses.
pub(crate) struct Bed {
    pub(crate) gpu: Gpu,
    /// Of the simulated driver.
    pub(crate) control: Option<Control>,
}

/// Runs a test on the first GPU, in a process of its own: once to settle what is made only once, and then to see that all is given
/// back.
pub(crate) fn on_gpu(mut test: impl FnMut(&Bed, Pass)) {
    let _gpu = WholeGpu::take();
    own_process!();
    threads_of_the_process();
    let mut control = (!place::is_real()).then(Control::take);
    let guard = ContextGuard::new(0);
    let mut before = None;
    for pass in [Pass::First, Pass::Counted] {
        let bed = Bed { gpu: place::gpu(0).expect("there is one, real or simulated"), control };
        test(&bed, pass);
        control = bed.control;
        drop(bed.gpu);
        before = Some(given_back(&guard, control.as_ref(), before));
        let stray = control.as_ref().map_or(0, Control::stray);
        assert_eq!(stray, 0, "calls with handles of streams that are gone");
    }
}

/// Which run it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pass {
    /// May be short.
    First,
    /// Its remaining objects are counted.
    Counted,
}

/// Files that are open and bytes of the GPU that are free, when all that a test made has been given back: as there were `before`.
fn given_back(
    guard: &ContextGuard,
    control: Option<&Control>,
    before: Option<(usize, usize)>,
) -> (usize, usize) {
    let only_guard = Alive { retained: 1, ..Alive::default() };
    let start = Instant::now();
    loop {
        let (held, free, alive) = (Resources::now(), guard.free(), control.map(Control::alive));
        let as_before =
            before.is_none_or(|(files, most)| held.files <= files + BLOCK && free + TOLERANCE >= most);
        let nothing_runs = held.threads <= threads_of_the_process() && held.links == 0;
        if as_before && nothing_runs && alive.is_none_or(|alive| alive == only_guard) {
            return (held.files, free);
        }
        // Streams and threads end a moment after they were told to.
        assert!(
            start.elapsed() < PATIENCE,
            "before: {before:?} (files, bytes), after: {held:?} {:?} and {free} bytes free, {alive:?}",
            threads()
        );
        thread::sleep(Duration::from_millis(1));
    }
}

/// Threads of this library that stay for ever, once there was a GPU.
fn threads_of_the_process() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| {
        let gpu = place::gpu(0).expect("there is one, real or simulated");
        drop(Stream::cuda(&gpu, CudaStreamConfig::default()).unwrap());
        drop(gpu);
        let looks = std::iter::repeat_with(|| {
            thread::sleep(Duration::from_millis(5));
            Resources::now().threads
        });
        looks.take(40).min().expect("some looks")
    })
}

/// Beyond its deadline, a release may take 10 ms; that much is allowed where a loaded machine is late.
const SLACK: Duration = Duration::from_secs(5);
/// Bytes of the memory of a side: halves for what goes and what comes, the last word for what ends a stream's work.
pub(crate) const SIZE: usize = 4096;
const END: usize = SIZE - 4;

/// How work gets on the stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Way {
    Eager,
    Graph,
}

/// Where and how a fault is met.
pub(crate) struct Rig<'p> {
    /// On a GPU, or on streams of the host.
    pub(crate) place: Option<&'p Place>,
    pub(crate) way: Way,
    pub(crate) bed: &'p Bed,
    pub(crate) a: Context,
    pub(crate) b: Context,
}

/// How often a fault is met.
fn times(place: Option<&Place>) -> u32 {
    match place {
        None => tier(3, 30, 300),
        Some(_) => tier(1, if place::is_real() { 100 } else { 1 }, 100),
    }
}

/// Meets a fault on streams of the host and in each place of a GPU, each way; nothing is left.
pub(crate) fn matrix(name: &str, once: impl Fn(&Rig<'_>)) {
    on_gpu(|bed, pass| {
        for place in iter::once(None).chain(places_on(&bed.gpu).map(Some)) {
            for way in [Way::Eager, Way::Graph] {
                let rig = Rig::new(place.as_ref(), way, bed);
                let all = times(place.as_ref());
                // Enough that the driver has allocated what it keeps.
                let times = if pass == Pass::First { all.min(10) } else { all };
                (0..times).for_each(|_| once(&rig));
                eprintln!("{name}: {place:?}, {way:?}, {times} times");
            }
        }
    });
}

impl<'p> Rig<'p> {
    pub(crate) fn new(place: Option<&'p Place>, way: Way, bed: &'p Bed) -> Self {
        Self { place, way, bed, a: hca(), b: hca() }
    }

    pub(crate) fn stream(&self) -> Stream {
        self.stream_with(PATIENCE)
    }

    pub(crate) fn stream_with(&self, wait_limit: Duration) -> Stream {
        self.place.map_or_else(|| stream_with("host", wait_limit), |place| place.stream(wait_limit))
    }

    /// A side on one of the devices.
    pub(crate) fn side(&self, context: &Context, build: impl Fn(QpBuilder) -> QpBuilder) -> Side {
        match self.place {
            Some(place) => place.side(context, SIZE, build),
            None => Side::new(context, SIZE, build),
        }
    }

    /// Two fresh sides, connected.
    pub(crate) fn pair(&self, build: impl Fn(QpBuilder) -> QpBuilder) -> (Side, Side) {
        connect(self.side(&self.a, &build), self.side(&self.b, &build))
    }

    /// Queues what `record` puts into a batch, by itself or as the launch of a graph. Returns its completions.
    pub(crate) fn queue(
        &self,
        stream: &Stream,
        record: impl Fn(&mut Batch) -> Result<Vec<Completion>>,
    ) -> Result<Queued> {
        let mut batch = Batch::new();
        if self.way == Way::Eager {
            let completions = record(&mut batch)?;
            stream.submit(&mut batch)?;
            return Ok(Queued { completions, _graph: None });
        }
        let graph = stream.capture(|stream| {
            record(&mut batch)?;
            stream.submit(&mut batch)
        })?;
        let completions = graph.launch(stream)?.completions().to_vec();
        Ok(Queued { completions, _graph: Some(graph) })
    }

    /// Waits for the stream, which must have run to its end `deadline` after `since`.
    pub(crate) fn released(&self, stream: &Stream, since: Instant, deadline: Duration) -> Result<()> {
        let result = stream.synchronize(PATIENCE);
        let took = since.elapsed();
        assert!(!matches!(result, Err(Error::Deadline { .. })), "the stream still waits after {took:?}");
        assert!(took < deadline + SLACK, "{took:?} for a deadline of {deadline:?}: {result:?}");
        assert_eq!(stream.query().pending, 0, "{result:?}");
        result
    }

    /// Sends `wrs` on the stream, lets something happen `meanwhile`, and returns how each of them ended. They fail within
    /// `deadline` of that.
    pub(crate) fn sends(
        &self,
        stream: &Stream,
        side: &Side,
        wrs: &[SendWr<'_>],
        deadline: Duration,
        meanwhile: impl FnOnce(),
    ) -> Vec<Option<Syndrome>> {
        let end = side.memory().word32(END).unwrap();
        end.store(0);
        let queued = self
            .queue(stream, |batch| {
                let mut completions: Vec<_> =
                    wrs.iter().map(|wr| batch.send(&side.qp, wr)).collect::<Result<_>>()?;
                for _ in wrs {
                    completions.push(batch.wait_send(&side.qp)?);
                }
                batch.write_value32(&end, 1);
                Ok(completions)
            })
            .unwrap();
        meanwhile();
        let since = Instant::now();
        let result = self.released(stream, since, deadline);
        assert_eq!(end.load(), 1, "the stream ran to its end: {result:?}");
        self.told(stream, side, result);
        let ids = wrs.iter().map(|wr| wr.wr_id);
        let (sent, waits) = queued.completions.split_at(wrs.len());
        let outcomes = ended(side, sent, ids.clone());
        assert_eq!(outcomes, ended(side, waits, ids));
        outcomes
    }

    /// Has the stream wait for receives.
    pub(crate) fn await_receives(&self, stream: &Stream, side: &Side, count: usize) -> Queued {
        self.queue(stream, |batch| (0..count).map(|_| batch.wait_recv(&side.qp)).collect()).unwrap()
    }

    /// How the receives ended, with ids from 200.
    pub(crate) fn receives(
        &self,
        stream: &Stream,
        side: &Side,
        queued: &Queued,
        since: Instant,
        deadline: Duration,
    ) -> Vec<Option<Syndrome>> {
        let result = self.released(stream, since, deadline);
        self.told(stream, side, result);
        ended(side, &queued.completions, 200..)
    }

    /// The stream tells the root cause, and that it is the queue pair's.
    fn told(&self, stream: &Stream, side: &Side, result: Result<()>) {
        assert_eq!(result.map_err(|e| e.to_string()), side.qp.check().map_err(|e| e.to_string()));
        assert!(stream.query().error.is_none(), "the queue pair failed, not the stream");
        if let Err(error) = side.qp.check() {
            refuses(stream, &side.qp, &error);
        }
    }

    /// Resets both queue pairs, connects them again, and sends messages both ways.
    pub(crate) fn recover(&self, stream: &Stream, a: &Side, b: &Side) {
        for side in [a, b] {
            side.context.inject(gdsync::hca::FaultPlan::default()).unwrap();
        }
        for qp in [&a.qp, &b.qp] {
            qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
        }
        connect_patiently(&a.qp, &b.qp);
        connect_patiently(&b.qp, &a.qp);
        self.message(stream, a, b, 1);
        self.message(stream, b, a, 2);
        assert_clean(&[a, b]);
    }

    /// One message, sent and awaited by the stream.
    pub(crate) fn message(&self, stream: &Stream, from: &Side, to: &Side, seed: usize) {
        const LEN: usize = 700;
        let data = pattern(LEN, seed);
        from.memory().write(0, &data).unwrap();
        to.memory().fill(SIZE / 2, LEN, 0).unwrap();
        to.qp.post_recv(&[RecvWr::new(&[to.mr.sge(SIZE / 2, LEN).unwrap()]).id(8)]).unwrap();
        let ours = [from.mr.sge(0, LEN).unwrap()];
        let queued = self
            .queue(stream, |batch| {
                batch.send(&from.qp, &SendWr::send(&ours).id(7))?;
                Ok(vec![batch.wait_send(&from.qp)?, batch.wait_recv(&to.qp)?])
            })
            .unwrap();
        stream.synchronize(PATIENCE).unwrap();
        let last = queued.completions.iter().rev().take(2).map(|done| done.status().unwrap().unwrap().wr_id);
        assert_eq!(last.collect::<Vec<_>>(), [8, 7]);
        assert!(bytes(to, SIZE / 2, LEN) == data);
    }
}

/// Takes a queue pair to RTS with timers that a loaded machine keeps, whatever it was built with.
fn connect_patiently(qp: &Qp, peer: &Qp) {
    qp.init().unwrap();
    let rtr = QpAttr::to(QpState::RTR).remote(peer.address()).path_mtu(4096);
    qp.modify(&rtr.max_dest_rd_atomic(16).min_rnr_timer(1)).unwrap();
    let rts = QpAttr::to(QpState::RTS).timeout(14).retry_cnt(7).rnr_retry(7);
    qp.modify(&rts.max_rd_atomic(16)).unwrap();
}

/// The work on a stream.
pub(crate) struct Queued {
    pub(crate) completions: Vec<Completion>,
    _graph: Option<Graph>,
}

fn ended(side: &Side, completions: &[Completion], ids: impl Iterator<Item = u64>) -> Vec<Option<Syndrome>> {
    let end = |(completion, id): (&Completion, u64)| match completion.status() {
        Ok(wc) => {
            let wc = wc.expect("the stream waited for it");
            assert_eq!((wc.qpn, wc.wr_id), (side.qp.qpn(), id));
            None
        }
        Err(Error::Completion(e)) => {
            assert_eq!((e.qpn, e.wr_id, e.vendor), (side.qp.qpn(), id, 0));
            Some(e.syndrome)
        }
        Err(other) => panic!("{other}"),
    };
    completions.iter().zip(ids).map(end).collect()
}
