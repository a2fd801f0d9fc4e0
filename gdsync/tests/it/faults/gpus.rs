//! Several threads, GPUs, contexts and processes at once, and streams that the application lends.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use gdrcopy::Gdr;
use gdrcopy::cuda::raw::Api;
use gdsync::cuda::Gpu;
use gdsync::error::Error;
use gdsync::stream::{Batch, Cond, CudaStreamConfig, Stream, Via};
use gdsync::verbs::{QpAttr, QpBuilder, QpState, RecvWr, SendWr};
use gdsync_testkit::driver::{self, Alive, Control};

use super::stream_ends::{starts_again, stopped};
use super::{Bed, Rig, SIZE, Way, on_gpu, post_recvs};
use crate::child::{Peer, meet_parent, ping, pong, role};
use crate::common::{PATIENCE, Side, assert_clean, bytes, connect, gate, hca, pattern, until};
use crate::place::{self, Place, Site, places_on};

const LIMIT: Duration = Duration::from_millis(3);

#[test]
fn eight_threads_share_a_gpu() {
    let rounds = if place::is_real() { 400 } else { 20 };
    on_gpu(|bed, _| {
        thread::scope(|scope| {
            for n in 0..8 {
                scope.spawn(move || {
                    let place = places_on(&bed.gpu).nth(n % 6).unwrap();
                    let way = if n < 6 { Way::Eager } else { Way::Graph };
                    let rig = Rig::new(Some(&place), way, bed);
                    let (a, b) = rig.pair(|q| q);
                    let mut stream = rig.stream();
                    for round in 0..rounds {
                        rig.message(&stream, &a, &b, round);
                        rig.message(&stream, &b, &a, round + 1);
                        // Every other thread's streams keep failing.
                        if n % 2 == 1 && round % 5 == 0 {
                            let limited = rig.stream_with(LIMIT);
                            post_recvs(&a, 1, &[]);
                            rig.await_receives(&limited, &a, 1);
                            let since = Instant::now();
                            let is = |error: &Error| matches!(error, Error::StreamWait { .. });
                            stopped(&rig, &limited, &a.qp, (since, LIMIT), is);
                            stream = rig.stream();
                            starts_again(&rig, &a, &b);
                        }
                    }
                    assert_clean(&[&a, &b]);
                });
            }
        });
    });
}

#[test]
fn two_gpus_send_to_each_other() {
    on_gpu(|bed, _| {
        let Some(second) = place::gpu(1) else { return };
        for (here, there) in places_on(&bed.gpu).zip(places_on(&second)) {
            for way in [Way::Eager, Way::Graph] {
                let (rig, far) = (Rig::new(Some(&here), way, bed), Rig::new(Some(&there), way, bed));
                let (a, b) = connect(rig.side(&rig.a, |q| q), far.side(&rig.b, |q| q));
                let (sa, sb) = (rig.stream(), far.stream());
                for round in 0..20 {
                    let data = pattern(300, round);
                    a.memory().write(0, &data).unwrap();
                    let sge = b.mr.sge(SIZE / 2, 300).unwrap();
                    b.qp.post_recv(&[RecvWr::new(&[sge]).id(1)]).unwrap();
                    far.queue(&sb, |batch| Ok(vec![batch.wait_recv(&b.qp)?])).unwrap();
                    let ours = [a.mr.sge(0, 300).unwrap()];
                    rig.queue(&sa, |batch| {
                        batch.send(&a.qp, &SendWr::send(&ours))?;
                        Ok(vec![batch.wait_send(&a.qp)?])
                    })
                    .unwrap();
                    sa.synchronize(PATIENCE).unwrap();
                    sb.synchronize(PATIENCE).unwrap();
                    assert!(bytes(&b, SIZE / 2, 300) == data);
                }
                // One stream for the queue pairs of both.
                rig.message(&sa, &a, &b, 1);
                far.message(&sb, &a, &b, 2);
                // What fails on one GPU leaves the other one alone.
                let gate = gate();
                let limited = here.stream(LIMIT);
                let since = Instant::now();
                limited.wait_value32(&gate, 1, Cond::Eq).unwrap();
                far.message(&sb, &b, &a, 3);
                let error = rig.released(&limited, since, LIMIT).unwrap_err();
                assert!(matches!(error, Error::StreamWait { .. }), "{error}");
                far.message(&sb, &a, &b, 4);
                assert_clean(&[&a, &b]);
            }
        }
    });
}

/// A context of the application with a stream, current for this thread.
pub(crate) struct Application {
    api: Api,
    pub(crate) context: usize,
    pub(crate) stream: usize,
    /// What was there before.
    before: Option<Alive>,
}

impl Application {
    pub(crate) fn new(bed: &Bed) -> Self {
        let api = if place::is_real() { Api::load().unwrap() } else { driver::api() };
        // Contexts of its own can only be made where they are simulated.
        let context = match bed.control {
            Some(_) => driver::application_context(0),
            None => bed.gpu.raw_context(),
        };
        let before = bed.control.as_ref().map(Control::alive);
        let mut stream = 0;
        // SAFETY: a context that lives until the end of this value.
        unsafe { api.ctx_push_current(context) }.unwrap();
        // SAFETY: a place for the answer; a context is current.
        unsafe { api.stream_create(&mut stream, 1, 0) }.unwrap();
        Self { api, context, stream, before }
    }

    pub(crate) fn gpu(&self, raw: usize) -> Gpu {
        let (api, gdr): (_, Option<Gdr>) = match place::is_real() {
            true => (Api::load().unwrap(), None),
            false => (driver::api(), Some(crate::simulated::gdr())),
        };
        // SAFETY: a live stream, whose context lives until the end of this value.
        unsafe { Gpu::of_stream_with(api, raw, gdr) }.unwrap()
    }

    /// All that is on a stream is over, and nothing of it failed.
    fn synchronize(&self, raw: usize) {
        // SAFETY: a live stream of the current context.
        unsafe { self.api.stream_synchronize(raw) }.unwrap();
    }

    /// The simulated context has failed.
    pub(crate) fn lose(self) {
        // SAFETY: a place for the answer.
        unsafe { self.api.ctx_pop_current(&mut 0) }.unwrap();
        driver::destroy_context(self.context);
    }

    fn end(self, bed: &Bed) {
        // SAFETY: nobody uses it any more.
        unsafe { self.api.stream_destroy(self.stream) }.unwrap();
        // SAFETY: a place for the answer.
        unsafe { self.api.ctx_pop_current(&mut 0) }.unwrap();
        if let Some(control) = &bed.control {
            let start = Instant::now();
            while Some(control.alive()) != self.before {
                assert!(start.elapsed() < PATIENCE, "{:?}", control.alive());
                thread::sleep(Duration::from_millis(1));
            }
            driver::destroy_context(self.context);
        }
    }
}

#[test]
fn streams_of_the_application_are_lent() {
    on_gpu(|bed, _| {
        let app = Application::new(bed);
        // The second and third are the legacy default stream.
        for raw in [app.stream, 0, 1] {
            let gpu = app.gpu(raw);
            assert_eq!(gpu.raw_context(), app.context);
            for place in places_on(&gpu) {
                lend(bed, &app, raw, &place);
            }
        }
        app.end(bed);
    });
}

fn lent(raw: usize, place: &Place, wait_limit: Duration) -> Stream {
    let config =
        CudaStreamConfig { name: "lent".into(), via: place.via, wait_limit, ..CudaStreamConfig::default() };
    // SAFETY: a stream of the GPU's context that outlives all of this.
    unsafe { Stream::cuda_from_raw(&place.gpu, raw, config) }.unwrap()
}

fn lend(bed: &Bed, app: &Application, raw: usize, place: &Place) {
    let own = raw == app.stream;
    let rig = Rig::new(Some(place), if own { Way::Graph } else { Way::Eager }, bed);
    let (a, b) = rig.pair(|q| q);
    let stream = lent(raw, place, PATIENCE);
    assert_eq!(stream.raw(), Some(raw));
    rig.message(&stream, &a, &b, 1);
    // The application's own work is in order with ours.
    let memory = place.gpu.alloc(64).unwrap();
    let (from, word) = (memory.gpu_addr(&place.gpu).unwrap(), gate());
    let gate = gate();
    stream.wait_value32(&gate, 1, Cond::Eq).unwrap();
    // SAFETY: memory of the GPU, and a stream of its context.
    unsafe { app.api.memset_d32_async(from, 5, 1, raw) }.unwrap();
    let mut batch = Batch::new();
    batch.wait_value32(&memory.word32(0).unwrap(), 5, Cond::Eq);
    batch.write_value32(&word, 6);
    stream.submit(&mut batch).unwrap();
    assert_eq!((memory.word32(0).unwrap().load(), word.load()), (0, 0));
    gate.store(1);
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(word.load(), 6);
    if !own {
        let refused = stream.capture(|_| Ok(())).unwrap_err();
        assert!(matches!(refused, Error::Cuda { .. }), "{refused}");
        rig.message(&stream, &a, &b, 2);
    }
    drop(stream);

    // What fails on it, or is dropped while it waits, leaves it to the application.
    let limited = lent(raw, place, LIMIT);
    post_recvs(&a, 1, &[]);
    let since = Instant::now();
    rig.await_receives(&limited, &a, 1);
    stopped(&rig, &limited, &a.qp, (since, LIMIT), |error| matches!(error, Error::StreamWait { .. }));
    app.synchronize(raw);
    drop(limited);
    let again = lent(raw, place, PATIENCE);
    rig.recover(&again, &a, &b);
    post_recvs(&a, 1, &[]);
    rig.await_receives(&again, &a, 1);
    // The application keeps its stream until what waits there is done.
    drop(again);
    b.qp.post_send(&[SendWr::send(&[])]).unwrap();
    app.synchronize(raw);
    b.qp.send_cq().wait(PATIENCE).unwrap().ok().unwrap();
    until(|| !a.qp.is_awaited());
    let last = lent(raw, place, PATIENCE);
    rig.message(&last, &a, &b, 3);
    post_recvs(&a, 1, &[]);
    rig.await_receives(&last, &a, 1);
    last.abort();
    drop(last);
    app.synchronize(raw);
    // The first of the two streams notices a few milliseconds later that its work is done.
    until(|| a.qp.modify(&QpAttr::to(QpState::RESET)).is_ok());
    rig.recover(&lent(raw, place, PATIENCE), &a, &b);
}

/// Handle 2 names another stream in each thread, and a stream here is served by several.
#[test]
fn default_stream_of_a_thread_is_refused() {
    on_gpu(|bed, _| {
        let app = Application::new(bed);
        let gpu = app.gpu(2);
        assert_eq!(gpu.raw_context(), app.context);
        for via in [Via::MemOp, Via::Kernel] {
            let config = CudaStreamConfig { via, ..CudaStreamConfig::default() };
            // SAFETY: the thread's default stream of the current context.
            let error = unsafe { Stream::cuda_from_raw(&gpu, 2, config) }.unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        }
        // One of its own does.
        let own = Stream::cuda(&gpu, CudaStreamConfig::default()).unwrap();
        own.host_fn(|| {}).unwrap();
        own.synchronize(PATIENCE).unwrap();
        drop((own, gpu));
        app.end(bed);
    });
}

/// Rounds that both sides queue ahead.
const DEPTH: u64 = 16;
/// Rounds of a game that is played to its end.
const ROUNDS: u64 = 200;
/// What a release may take after the death, on a loaded machine.
const SLACK: Duration = Duration::from_secs(5);

/// The acknowledge timeout runs out in 8 x 268 ms; a peer that died is noticed before.
fn side(site: &Site) -> Side {
    site.side(&hca(), 4096, |q: QpBuilder| q.timeout(16).retry_cnt(7).rnr_retry(7).min_rnr_timer(1))
}

/// The host, and places on a GPU, by number.
fn site(n: usize, gpu: &Gpu) -> Option<Site> {
    match n.checked_sub(1) {
        None => Some(Site::Host),
        Some(n) => places_on(gpu).nth(n).map(Site::Gpu),
    }
}

fn sites(gpu: &Gpu) -> impl Iterator<Item = Site> {
    (0..).map_while(|n| site(n, gpu))
}

/// Not a test of its own: the other process, which sends back what it gets until it is killed. Its role is the number of a site.
#[test]
fn child() {
    let Some(role) = role() else { return };
    let gpu = place::gpu(0).unwrap();
    let site = site(role.parse().unwrap(), &gpu).unwrap();
    let (side, stream) = (side(&site), site.stream(PATIENCE));
    meet_parent(&side);
    println!("ready");
    for i in 0.. {
        // A child whose parent is gone just ends.
        if pong(&stream, &side, i).is_err() || i % DEPTH == 0 && stream.synchronize(PATIENCE).is_err() {
            return;
        }
    }
}

/// Plays to the end of the rounds.
fn play(stream: &Stream, side: &Side) {
    let right = Arc::default();
    for i in 0..ROUNDS {
        ping(stream, side, i, &right).unwrap();
        if i % DEPTH == 0 {
            stream.synchronize(PATIENCE).unwrap();
        }
    }
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(right.load(Ordering::Relaxed), ROUNDS);
}

/// Plays on until the peer, killed `after` so long, is missed. The error that told so, and the time since the death.
fn play_until_death(stream: &Stream, side: &Side, peer: &mut Peer, after: Duration) -> (Error, Duration) {
    let right = Arc::default();
    let end = Instant::now() + after;
    let mut died = None;
    for i in 0.. {
        if died.is_none() && Instant::now() > end {
            peer.kill();
            died = Some(Instant::now());
        }
        let played = ping(stream, side, i, &right);
        let played = if i % DEPTH == 0 { played.and(stream.synchronize(PATIENCE)) } else { played };
        if let Err(error) = played {
            return (error, died.expect("it lived").elapsed());
        }
    }
    unreachable!("without end")
}

#[test]
fn killed_process_releases_the_other_one() {
    // Whether a send was under way depends on the moment.
    let tells_the_death = |error: &Error| matches!(error, Error::Completion(_) | Error::PeerGone { .. });
    on_gpu(|bed, _| {
        for (n, site) in sites(&bed.gpu).enumerate() {
            let (side, stream) = (side(&site), site.stream(PATIENCE));
            let start = || Peer::start("faults::gpus::child", &n.to_string(), &side).0;
            for round in 0..if n == 0 { 20 } else { 2 } {
                let mut peer = start();
                let after = Duration::from_millis(2 + 5 * round);
                let (error, took) = play_until_death(&stream, &side, &mut peer, after);
                eprintln!("{site:?}: told {took:?} after the death: {error}");
                assert!(tells_the_death(&error), "{error}");
                assert!(took < SLACK, "{took:?}");
                let drained = stream.synchronize(PATIENCE);
                assert!(drained.as_ref().map_or_else(tells_the_death, |()| true), "{drained:?}");
                assert_eq!(stream.query().pending, 0);
                assert!(stream.query().error.is_none(), "the queue pair failed, not the stream");
                // The next peer, a process that has just come to the GPU, finds all as before.
                side.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
            }
            let _peer = start();
            play(&stream, &side);
            assert_clean(&[&side]);
        }
    });
}

/// A stream that waits for the peer alone, and for nothing that can be answered any more.
#[test]
fn stream_that_waits_for_a_killed_process_is_released() {
    on_gpu(|bed, _| {
        for (n, site) in sites(&bed.gpu).enumerate() {
            let (side, stream) = (side(&site), site.stream(PATIENCE));
            let (mut peer, _) = Peer::start("faults::gpus::child", &n.to_string(), &side);
            let right = Arc::default();
            ping(&stream, &side, 0, &right).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            side.qp.post_recv(&[RecvWr::new(&[]).id(77)]).unwrap();
            let got = stream.wait_recv(&side.qp).unwrap();
            assert!(matches!(stream.synchronize(Duration::from_millis(2)), Err(Error::Deadline { .. })));
            peer.kill();
            let died = Instant::now();
            let error = stream.synchronize(PATIENCE).unwrap_err();
            assert!(died.elapsed() < SLACK, "{:?}", died.elapsed());
            assert!(matches!(error, Error::PeerGone { qpn } if qpn == side.qp.qpn()), "{error}");
            assert!(matches!(got.status(), Err(Error::Completion(c)) if c.wr_id == 77 && c.is_flush()));
            assert_eq!(stream.query().pending, 0);
        }
    });
}
