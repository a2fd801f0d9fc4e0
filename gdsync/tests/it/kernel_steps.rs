//! Kernels of the application that run sends and waits by themselves: on a GPU that of `kernel.cu`, otherwise the same in
//! Rust on the simulated driver.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use gdsync::Error;
use gdsync::memory::{Memory, PeerMemory};
use gdsync::stream::{Batch, Cond, KernelSteps, Launch, PeerSignal, Stream, Via};
use gdsync::verbs::{QpBuilder, RecvWr, SendWr};
use gdsync_testkit::driver;

use crate::common::{PATIENCE, Side, assert_clean, gates, pattern, tier, until};
use crate::peer_copies::Slots;
use crate::place::{Place, is_real, places, shared};
use gdsync_testkit::kernels::{COMPLETION_ERROR, FAILED, OK, Progress};

/// Messages of a launch, in each direction.
const BOUNCES: u32 = 6;

/// Two sides of a ping-pong on a GPU. A message leaves from the first 8 bytes of a side, and arrives at the other's byte 64.
struct Table<'a> {
    place: &'a Place,
    sides: [Side; 2],
    streams: [Stream; 2],
    posted: [u64; 2],
}

impl<'a> Table<'a> {
    fn new(place: &'a Place) -> Self {
        let build = |q: gdsync::verbs::QpBuilder| q.max_send_wr(64).max_recv_wr(64);
        let (a, b) = pair(place, 256, build);
        let streams = [place.stream(PATIENCE), place.stream(PATIENCE)];
        Self { place, sides: [a, b], streams, posted: [0; 2] }
    }

    fn receive(&mut self, who: usize, count: u32) {
        let side = &self.sides[who];
        for _ in 0..count {
            let sges = [side.mr.sge(64, 8).unwrap()];
            let post = || side.qp.post_recv(&[RecvWr::new(&sges).id(self.posted[who])]);
            // The stream may still have to pass completions that were seen.
            until(|| match post() {
                Ok(_) => true,
                Err(Error::QueueFull { .. }) => false,
                Err(error) => panic!("{error}"),
            });
            self.posted[who] += 1;
        }
    }

    fn send(&self, who: usize, batch: &mut Batch) -> gdsync::Result<()> {
        let side = &self.sides[who];
        batch.send(&side.qp, &SendWr::send(&[side.mr.sge(0, 8)?]).id(5)).map(drop)
    }

    /// Blocks until both streams are done, and all went well.
    fn finish(&self) {
        for stream in &self.streams {
            stream.synchronize(PATIENCE).unwrap();
        }
        assert_clean(&[&self.sides[0], &self.sides[1]]);
    }

    /// The first sends and waits in one step, the second waits in one and sends in the next.
    fn steps(&mut self, who: usize) -> KernelSteps {
        let stream = self.streams[who].clone();
        self.receive(who, BOUNCES);
        stream
            .record_steps(|stream| {
                for _ in 0..BOUNCES {
                    let mut batch = Batch::new();
                    if who == 1 {
                        batch.wait_recv(&self.sides[who].qp)?;
                        stream.submit(&mut batch)?;
                    }
                    self.send(who, &mut batch)?;
                    if who == 0 {
                        batch.wait_recv(&self.sides[who].qp)?;
                    }
                    batch.wait_all_sends(&self.sides[who].qp)?;
                    stream.submit(&mut batch)?;
                }
                gdsync::Result::Ok(())
            })
            .unwrap()
    }
}

/// All steps of a side, in order.
fn all(who: usize) -> Vec<u32> {
    (0..BOUNCES * if who == 0 { 1 } else { 2 }).collect()
}

/// Two kernels play, two launches of each under way, with eager messages between them. Rings go round often.
#[test]
fn kernels_bounce_messages() {
    let rounds = tier(30, 200, 5000);
    for place in kernel_places() {
        let mut table = Table::new(&place);
        let steps = [0, 1].map(|who| table.steps(who));
        assert_eq!([0, 1].map(|who| steps[who].len()), [0, 1].map(|who| all(who).len()));
        let mut idle: VecDeque<_> = (0..2).map(|_| [0, 1].map(|who| App::new(&place, &all(who)))).collect();
        let mut under_way = VecDeque::new();
        for round in 0..rounds {
            if under_way.len() == 2 {
                idle.push_back(check(&table, under_way.pop_front().unwrap()));
            }
            let apps = idle.pop_front().unwrap();
            // The receives of the recording are those of the first round. All are posted before anybody sends: a peer that is not
            // ready is not asked for ever.
            if round > 0 {
                (0..2).for_each(|who| table.receive(who, BOUNCES));
            }
            let launches = [0, 1].map(|who| {
                apps[who].forget();
                launch(&table, who, &steps[who], &apps[who], 1000 * round)
            });
            under_way.push_back((round, apps, launches));
            if round % 7 == 3 {
                table.receive(1, 1);
                let mut batch = Batch::new();
                table.send(0, &mut batch).unwrap();
                batch.wait_all_sends(&table.sides[0].qp).unwrap();
                table.streams[0].submit(&mut batch).unwrap();
                table.streams[1].wait_recv(&table.sides[1].qp).unwrap();
            }
        }
        for round in under_way {
            check(&table, round);
        }
        table.finish();
    }
}

/// What a round has received, in the order of its steps.
fn check(table: &Table<'_>, (round, apps, launches): (u64, [App; 2], [Launch; 2])) -> [App; 2] {
    for (who, (app, launch)) in apps.iter().zip(&launches).enumerate() {
        launch.wait(&table.streams[who], PATIENCE).unwrap();
        assert!(launch.completions().iter().all(|completion| completion.wait(PATIENCE).is_ok()));
        let log = app.log();
        assert!(log.iter().all(|(result, _)| *result == OK), "{:?} round {round}: {log:?}", table.place);
        // Behind a step that only sends, the next message may be there already.
        let received: Vec<_> = log.iter().step_by(1 + who).map(|(_, received)| *received).collect();
        let of_other = |n| 1000 * round + if who == 0 { 2 * n + 1 } else { n };
        let expected: Vec<_> = (0..u64::from(BOUNCES)).map(of_other).collect();
        assert_eq!(received, expected, "{:?} round {round}", table.place);
    }
    apps
}

/// Launches a kernel that runs steps, and sends numbers from `first` on.
fn launch(table: &Table<'_>, who: usize, steps: &KernelSteps, app: &App, first: u64) -> Launch {
    let (stream, memory) = (&table.streams[who], table.sides[who].memory());
    let launched = steps.launch(stream, |program| {
        app.launch(table.place, stream, program, memory, first);
        Ok::<_, Error>(())
    });
    launched.unwrap()
}

/// A kernel ends early, or is never launched: the stream runs what is left, and the other side need not wait.
#[test]
fn steps_that_are_left_are_run_by_the_stream() {
    for place in kernel_places() {
        let mut table = Table::new(&place);
        let steps = [0, 1].map(|who| table.steps(who));
        let two = App::new(&place, &[0, 1]);
        let apps = [0, 1].map(|who| App::new(&place, &all(who)));
        launch(&table, 0, &steps[0], &two, 0);
        steps[1].launch(&table.streams[1], |_| Ok::<_, Error>(())).unwrap();
        table.finish();
        assert_eq!(two.results(), [OK; 2]);
        // The rings are as if all had been run: another round is whole.
        (0..2).for_each(|who| table.receive(who, BOUNCES));
        (0..2).for_each(|who| drop(launch(&table, who, &steps[who], &apps[who], 0)));
        table.finish();
        assert!(apps.iter().all(|app| app.results().iter().all(|result| *result == OK)));
        assert_eq!(table.sides[1].memory().word64(64).unwrap().load(), u64::from(BOUNCES) - 1);
    }
}

/// A step that is not the next one does nothing, and the kernel is told.
#[test]
fn steps_run_once_and_in_order() {
    for place in kernel_places() {
        let mut table = Table::new(&place);
        let steps = [0, 1].map(|who| table.steps(who));
        let apps = [App::new(&place, &[1, 0, 0, 1, 2, 3, 4, 99, 5, 6, 5]), App::new(&place, &all(1))];
        (0..2).for_each(|who| drop(launch(&table, who, &steps[who], &apps[who], 0)));
        table.finish();
        let told = gdsync_testkit::kernels::OUT_OF_ORDER;
        assert_eq!(apps[0].results(), [told, OK, told, OK, OK, OK, OK, told, OK, told, told]);
    }
}

/// One launch may have several kernels, one after the other.
#[test]
fn second_kernel_goes_on_where_the_first_ended() {
    for place in kernel_places() {
        let mut table = Table::new(&place);
        let steps = [0, 1].map(|who| table.steps(who));
        let apps = [App::new(&place, &[0, 1]), App::new(&place, &[1, 2, 3, 4, 5])];
        let other = App::new(&place, &all(1));
        let (stream, memory) = (&table.streams[0], table.sides[0].memory());
        let launched = steps[0].launch(stream, |program| {
            apps.iter().for_each(|app| app.launch(&place, stream, program, memory, 0));
            Ok::<_, Error>(())
        });
        launched.unwrap();
        launch(&table, 1, &steps[1], &other, 0);
        table.finish();
        assert_eq!(apps[0].results(), [OK, OK]);
        assert_eq!(apps[1].results(), [gdsync_testkit::kernels::OUT_OF_ORDER, OK, OK, OK, OK]);
    }
}

/// A copy in each step, of what the kernel has written before it: by its block; by the stream for steps that are left.
#[test]
fn steps_copy_into_memory_of_a_peer() {
    const LENGTHS: [usize; 5] = [8, 4_000, 100_001, 17, 30_000];
    const ROOM: usize = 100_096;
    const WORD: usize = 5 * ROOM;
    for (place, ran) in kernel_places().take(1).flat_map(|place| [5, 3, 0].map(|ran| (place.clone(), ran))) {
        let there = shared(1).unwrap_or_else(|| place.gpu.clone());
        let (from, to) = (place.gpu.alloc(ROOM).unwrap(), there.alloc(WORD + 8).unwrap());
        let bytes = pattern(ROOM, ran);
        from.write(0, &bytes).unwrap();
        to.fill(0, to.len(), 0).unwrap();
        to.flush().unwrap();
        let peer = PeerMemory::open(&place.gpu, &to.export().unwrap()).unwrap();
        let gate = Memory::alloc(8).unwrap().word64(0).unwrap();
        gate.memory().gpu_addr(&place.gpu).unwrap();
        let stream = place.stream(PATIENCE);
        let steps = stream.record_steps(|stream| {
            (0..).zip(LENGTHS).try_for_each(|(i, len)| {
                let signal = PeerSignal { to: peer.clone(), offset: WORD, value: 1, add: true };
                let mut batch = Batch::new();
                batch.wait_value64(&gate, i, Cond::Geq);
                // The last step ends with a copy.
                let at = usize::try_from(i).unwrap() * ROOM + 5;
                batch.put_peer(&from, 0..len, &peer, at, Some(signal).filter(|_| i < 4))?;
                stream.submit(&mut batch)
            })
        });
        let app = launch_on(&place, &stream, &steps.unwrap(), &from, &[0, 1, 2, 3, 4][..ran]);
        gate.store(4);
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!((app.results(), to.word64(WORD).unwrap().load()), (vec![OK; ran], 4));
        let mut expected = vec![0; WORD];
        for (i, len) in LENGTHS.into_iter().enumerate() {
            let part = &mut expected[i * ROOM + 5..][..len];
            part.copy_from_slice(&bytes[..len]);
            if let Some(last) = ran.checked_sub(1) {
                part[..8].copy_from_slice(&(i.min(last) as u64).to_ne_bytes());
            }
        }
        assert!(to.to_vec()[..WORD] == expected, "{ran} steps by the kernel");
    }
}

/// Each step sends a message, takes it and says that its place is free.
#[test]
fn steps_send_and_take_messages() {
    // By turns to a place with lines for all of it, and to one with lines for 8 KiB.
    const LENGTHS: [usize; 5] = [3_999, 8_000, 8, 300_000, 0];
    for (place, ran) in kernel_places().take(1).flat_map(|place| [5, 3, 0].map(|ran| (place.clone(), ran))) {
        let ends = Slots::new(&place.gpu, &place.gpu, &[4_000, 300_000]);
        let from = place.gpu.alloc(300_000).unwrap();
        let bytes = pattern(300_000, ran);
        from.write(0, &bytes).unwrap();
        from.flush().unwrap();
        let stream = place.stream(PATIENCE);
        let steps = stream.record_steps(|stream| {
            LENGTHS.into_iter().try_for_each(|len| {
                let mut batch = Batch::new();
                _ = batch.free_in_inbox(&ends.free);
                _ = batch.send_to_inbox(&ends.to, &from, 0..len)?;
                _ = batch.take_from_inbox(&ends.inbox);
                stream.submit(&mut batch)
            })
        });
        let app = launch_on(&place, &stream, &steps.unwrap(), &from, &[0, 1, 2, 3, 4][..ran]);
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(app.results(), vec![OK; ran]);
        let mut expected = vec![0; ends.places.len()];
        for (i, len) in LENGTHS.into_iter().enumerate() {
            let part = &mut expected[ends.ranges[i % 2].start..][..len];
            part.copy_from_slice(&bytes[..len]);
            if let (Some(last), [first, ..]) = (ran.checked_sub(1), part.as_chunks_mut::<8>().0) {
                *first = (i.min(last) as u64).to_ne_bytes();
            }
        }
        assert!(ends.places.to_vec() == expected, "{ran} steps by the kernel");
    }
}

/// A step whose wait fails copies and signals nothing, nor do those behind it.
#[test]
fn steps_of_a_failed_stream_copy_nothing() {
    for place in kernel_places().take(1) {
        let (from, to) = (place.gpu.alloc(4096).unwrap(), place.gpu.alloc(4096).unwrap());
        from.fill(0, 4096, 7).unwrap();
        to.fill(0, 4096, 0).unwrap();
        to.flush().unwrap();
        let peer = PeerMemory::open(&place.gpu, &to.export().unwrap()).unwrap();
        let gate = Memory::alloc(8).unwrap().word64(0).unwrap();
        gate.memory().gpu_addr(&place.gpu).unwrap();
        for aborted in [false, true] {
            let stream = place.stream(if aborted { PATIENCE } else { LIMIT });
            let steps = stream.record_steps(|stream| {
                (0..2).try_for_each(|_| {
                    let mut batch = Batch::new();
                    batch.wait_value64(&gate, 1, Cond::Geq);
                    let signal = PeerSignal { to: peer.clone(), offset: 4088, value: 1, add: false };
                    batch.put_peer(&from, 8..4000, &peer, 8, Some(signal))?;
                    stream.submit(&mut batch)
                })
            });
            let app = launch_on(&place, &stream, &steps.unwrap(), &from, &[0, 1]);
            if aborted {
                stream.abort();
            }
            stream.synchronize(PATIENCE).unwrap_err();
            drop(stream);
            assert_eq!(app.log()[0].0, FAILED);
            assert!(to.to_vec().iter().all(|byte| *byte == 0), "aborted: {aborted}");
            gate.store(0);
        }
    }
}

const PTX: &str = concat!(include_str!("kernel_steps/kernel.ptx"), "\0");
const THREADS: u32 = 64;

/// The places that run operations by kernels. The test kernel is loaded before any stream waits.
fn kernel_places() -> impl Iterator<Item = Place> {
    let by_kernel = || places().filter(|place| place.via == Via::Kernel);
    for place in by_kernel().take(1) {
        function(&place);
    }
    by_kernel()
}

/// Two connected sides, whose memory the GPU knows.
fn pair(place: &Place, bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder) -> (Side, Side) {
    let (a, b) = place.pair(bytes, build);
    for side in [&a, &b] {
        side.memory().gpu_addr(&place.gpu).unwrap();
    }
    (a, b)
}

fn function(place: &Place) -> usize {
    static FUNCTION: OnceLock<usize> = OnceLock::new();
    *FUNCTION.get_or_init(|| {
        if !is_real() {
            driver::kernel("app", &[size_of::<Call>()], simulated);
        }
        let _current = place.gpu.enter().unwrap();
        let (mut module, mut function) = (0, 0);
        // SAFETY: a place for the answer, and a text that ends in a zero.
        unsafe { place.gpu.api().module_load_data(&mut module, PTX.as_ptr().cast()) }.unwrap();
        // SAFETY: a place for the answer, a loaded module, a name.
        unsafe { place.gpu.api().module_get_function(&mut function, module, c"app".as_ptr()) }.unwrap();
        // At once: CUDA would wait for streams that wait. Drivers before CUDA 12.4 cannot be told, and need not be.
        // SAFETY: a function of a module that stays loaded.
        let _ = unsafe { place.gpu.api().func_load(function) };
        function
    })
}

/// `Call` of `kernel.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Call {
    program: u64,
    order: u64,
    count: u64,
    sent: u64,
    first: u64,
    received: u64,
    log: u64,
}

/// A kernel that runs steps in some order, made before a stream waits. It must live until the kernel has ended.
struct App {
    order: Memory,
    log: Memory,
    count: usize,
}

impl App {
    fn new(place: &Place, order: &[u32]) -> Self {
        let app = Self {
            order: Memory::alloc(4 * order.len().max(1)).unwrap(),
            log: Memory::alloc(16 * order.len().max(1)).unwrap(),
            count: order.len(),
        };
        for (at, step) in order.iter().enumerate() {
            app.order.word32(4 * at).unwrap().store(*step);
        }
        app.forget();
        // Known to the GPU before a stream waits: CUDA could not take it then.
        for memory in [&app.order, &app.log] {
            memory.gpu_addr(&place.gpu).unwrap();
        }
        app
    }

    /// Forgets what it has logged.
    fn forget(&self) {
        self.log.fill(0, self.log.len(), 0xff).unwrap();
    }

    /// Launches it: it sends `first` and what follows from the first 8 bytes of `memory`, and looks at those at 64.
    fn launch(&self, place: &Place, stream: &Stream, program: u64, memory: &Memory, first: u64) {
        let at = |memory: &Memory| memory.gpu_addr(&place.gpu).unwrap();
        let (order, log, data) = (at(&self.order), at(&self.log), at(memory));
        let count = self.count as u64;
        let mut call = Call { program, order, count, sent: data, first, received: data + 64, log };
        let mut params = [(&raw mut call).cast::<c_void>()];
        let (function, raw) = (function(place), stream.raw().unwrap());
        let (api, none) = (place.gpu.api(), std::ptr::null_mut());
        // SAFETY: the parameter is a `Call` of memory that lives until the stream is done.
        unsafe { api.launch_kernel(function, 1, 1, 1, THREADS, 1, 1, 0, raw, params.as_mut_ptr(), none) }
            .unwrap();
    }

    /// What each step returned, and what was received then.
    fn log(&self) -> Vec<(u64, u64)> {
        let word = |at| self.log.word64(at).unwrap().load();
        (0..self.count).map(|at| (word(16 * at), word(16 * at + 8))).collect()
    }

    fn results(&self) -> Vec<u64> {
        self.log().into_iter().map(|(result, _)| result).collect()
    }
}

/// The same in Rust.
fn simulated(params: &[*mut c_void]) {
    // SAFETY: the parameter is a call.
    let call = unsafe { params[0].cast::<Call>().read() };
    let mut steps = Progress::new(call.program);
    let at = |addr: u64| std::ptr::with_exposed_provenance_mut::<u64>(usize::try_from(addr).unwrap());
    for i in 0..call.count {
        // SAFETY: memory of the test.
        unsafe { at(call.sent).write_volatile(call.first + i) };
        // SAFETY: memory of the test.
        let step = unsafe { at(call.order + 4 * i).cast::<u32>().read() };
        let result = steps.run(step);
        // SAFETY: memory of the test.
        unsafe { at(call.log + 16 * i).write_volatile(result) };
        // SAFETY: memory of the test.
        let received = unsafe { at(call.received).read_volatile() };
        // SAFETY: memory of the test.
        unsafe { at(call.log + 16 * i + 8).write_volatile(received) };
        if result == FAILED {
            return;
        }
    }
}

const LIMIT: Duration = Duration::from_millis(50);

/// Launches a kernel that runs these steps.
fn launch_on(place: &Place, stream: &Stream, steps: &KernelSteps, memory: &Memory, order: &[u32]) -> App {
    let app = App::new(place, order);
    let launched = steps.launch(stream, |program| {
        app.launch(place, stream, program, memory, 0);
        Ok::<_, Error>(())
    });
    launched.unwrap();
    app
}

/// Waits for a message, then sends one, as two steps.
fn answer(stream: &Stream, side: &Side, other: &Side) -> KernelSteps {
    let post = side.qp.post_recv(&[RecvWr::new(&[side.mr.sge(64, 8).unwrap()]).id(3)]);
    post.unwrap();
    stream
        .record_steps(|stream| {
            stream.wait_recv(&side.qp)?;
            let mut batch = Batch::new();
            batch.send(&side.qp, &SendWr::write_inline(other.mr.remote(0)?, b"answer"))?;
            batch.wait_all_sends(&side.qp)?;
            stream.submit(&mut batch)
        })
        .unwrap()
}

#[test]
fn message_that_never_comes_ends_the_kernel() {
    for place in kernel_places() {
        for order in [&[0, 1][..], &[]] {
            let (a, b) = pair(&place, 256, |q| q);
            let stream = place.stream(LIMIT);
            let steps = answer(&stream, &b, &a);
            let start = Instant::now();
            // By a kernel; by what comes behind one that has left all.
            let app = launch_on(&place, &stream, &steps, b.memory(), order);
            let next = steps.launch(&stream, |_| Ok::<_, Error>(()));
            // The limit is over where this thread is late.
            let is_refused = matches!(next, Err(Error::NothingToWaitFor { .. }));
            assert!(is_refused || next.is_err() && start.elapsed() >= LIMIT, "{next:?}");
            let error = stream.synchronize(PATIENCE).unwrap_err();
            let told =
                matches!(&error, Error::StreamWait { what, .. } if what.contains("receive 0 (wr_id 3)"));
            assert!(told, "{error}");
            assert!(start.elapsed() >= LIMIT);
            assert_eq!(stream.query().pending, 0);
            if !order.is_empty() {
                assert_eq!(app.log()[0].0, FAILED);
                assert_eq!(app.log()[1].0, u64::MAX, "the kernel has left");
            }
            assert_eq!(a.memory().to_vec()[..6], [0; 6], "nothing is sent behind a wait that failed");
            assert!(b.qp.check().is_err());
            let next = steps.launch(&stream, |_| Ok::<_, Error>(())).unwrap_err();
            assert_eq!(next.to_string(), b.qp.check().unwrap_err().to_string());
        }
    }
}

/// The peer stops: the kernel hears of it in its step, the stream goes on, and everybody is told the cause.
#[test]
fn peer_that_goes_away_ends_the_step() {
    for place in kernel_places() {
        let (a, b) = pair(&place, 256, |q| q.timeout(12).retry_cnt(2));
        let stream = place.stream(PATIENCE);
        let steps = stream
            .record_steps(|stream| {
                for _ in 0..3 {
                    let mut batch = Batch::new();
                    batch.send(&a.qp, &SendWr::write_inline(b.mr.remote(0)?, b"hello").id(1))?;
                    batch.wait_all_sends(&a.qp)?;
                    stream.submit(&mut batch)?;
                }
                gdsync::Result::Ok(())
            })
            .unwrap();
        let app = launch_on(&place, &stream, &steps, a.memory(), &[0, 1, 2]);
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(app.results(), [OK; 3]);
        b.qp.abort().unwrap();
        // It leaves two steps.
        let app = launch_on(&place, &stream, &steps, a.memory(), &[0]);
        let error = stream.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(&error, Error::Completion(c) if c.wr_id == 1 && !c.is_flush()), "{error}");
        assert_eq!(app.results(), [COMPLETION_ERROR]);
        let next = steps.launch(&stream, |_| Ok::<_, Error>(())).unwrap_err();
        assert_eq!(next.to_string(), error.to_string());
        assert!(stream.query().error.is_none(), "the queue pair failed, not the stream");
        until(|| stream.query().pending == 0);
    }
}

#[test]
fn stream_that_is_aborted_releases_the_kernel() {
    for place in kernel_places() {
        let (a, b) = pair(&place, 256, |q| q);
        let stream = place.stream(PATIENCE);
        let steps = answer(&stream, &b, &a);
        let start = Instant::now();
        let _app = launch_on(&place, &stream, &steps, b.memory(), &[0, 1]);
        stream.abort();
        let error = stream.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(error, Error::StreamAborted { .. }), "{error}");
        assert!(start.elapsed() < PATIENCE);
        assert_eq!((stream.query().pending, &a.memory().to_vec()[..6]), (0, &[0; 6][..]));
    }
}

/// A kernel that cannot be launched leaves no trace; within the launch the stream is taken.
#[test]
fn launch_that_fails_leaves_no_trace() {
    for place in kernel_places() {
        let (a, b) = pair(&place, 256, |q| q.max_send_wr(4));
        let stream = place.stream(PATIENCE);
        let steps = stream
            .record_steps(|stream| {
                let mut batch = Batch::new();
                batch.send(&a.qp, &SendWr::fetch_add(b.mr.remote(0)?, 1, a.mr.sge(128, 8)?))?;
                batch.wait_all_sends(&a.qp)?;
                stream.submit(&mut batch)
            })
            .unwrap();
        for round in 1..=20 {
            let refused = steps.launch(&stream, |_| {
                let word = a.memory().word32(192).unwrap();
                for error in [
                    stream.write_value32(&word, 1).unwrap_err(),
                    stream.synchronize(PATIENCE).unwrap_err(),
                    stream.begin_capture().unwrap_err(),
                    stream.submit(&mut Batch::new()).unwrap_err(),
                    steps.launch(&stream, |_| Ok::<_, Error>(())).unwrap_err(),
                ] {
                    assert!(error.to_string().contains("launches a kernel"), "{error}");
                }
                Err(Box::<dyn std::error::Error>::from("no such kernel"))
            });
            assert_eq!(refused.unwrap_err().to_string(), "no such kernel");
            let panics = || steps.launch(&stream, |_| -> Result<(), Error> { panic!("for the test") });
            assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
            let app = launch_on(&place, &stream, &steps, a.memory(), &[0]);
            stream.synchronize(PATIENCE).unwrap();
            assert_eq!((app.results(), b.memory().word64(0).unwrap().load()), (vec![OK], round));
        }
        assert_clean(&[&a, &b]);
    }
}

/// Three launches are pending at most. One that finds no room leaves no trace, and may wait for it.
#[test]
fn launches_wait_for_room() {
    for place in kernel_places() {
        let stream = place.stream(PATIENCE);
        let [gate, word] = gates();
        let steps = stream
            .record_steps(|stream| {
                stream.wait_value32(&gate, 1, Cond::Geq)?;
                stream.write_value32(&word, 5)
            })
            .unwrap();
        let nothing = |_| Ok::<_, Error>(());
        (0..3).for_each(|_| drop(steps.launch(&stream, nothing).unwrap()));
        for _ in 0..3 {
            let full = steps.launch(&stream.with_timeout(Duration::from_millis(2)), nothing).unwrap_err();
            assert!(matches!(full, Error::StreamFull { .. }), "{full}");
        }
        assert_eq!((stream.query().pending, word.load()), (3, 0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(2));
                gate.store(1);
            });
            steps.launch(&stream, nothing).unwrap().wait(&stream, PATIENCE).unwrap();
        });
        assert_eq!((stream.query().pending, word.load()), (0, 5));
    }
}

#[test]
fn what_a_kernel_cannot_do_is_refused() {
    for place in kernel_places() {
        let record = |stream: &Stream| {
            let words = Memory::alloc(64).unwrap();
            stream.record_steps(|stream| stream.write_value32(&words.word32(0)?, 1))
        };
        let by_memops = Place { via: Via::MemOp, ..place.clone() }.stream(PATIENCE);
        for stream in [&by_memops, &crate::common::stream("host")] {
            let error = record(stream).unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains("Via"), "{error}");
        }
        let stream = place.stream(PATIENCE);
        let steps = record(&stream).unwrap();
        let error = steps.launch(&by_memops, |_| Ok::<_, Error>(())).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        let refused = stream.record_steps(|stream| {
            let mut batch = Batch::new();
            batch.repeatable_host_fn(|| {});
            stream.submit(&mut batch)
        });
        assert!(refused.unwrap_err().to_string().contains("host function"));
        // Nothing is recorded any more.
        let nothing = stream.record_steps(|stream| {
            assert!(matches!(stream.record_steps(|_| Ok(())), Err(Error::Unsupported { .. })));
            assert!(matches!(stream.begin_capture(), Err(Error::Unsupported { .. })));
            gdsync::Result::Ok(())
        });
        let nothing = nothing.unwrap();
        assert!(nothing.is_empty());
        nothing.launch(&stream, |_| Ok::<_, Error>(())).unwrap().wait(&stream, PATIENCE).unwrap();
        stream.synchronize(PATIENCE).unwrap();
    }
}
