//! Messages between GPUs in masses, when a rank is killed in the middle of a copy, and on GPUs that are full of other work.
//!
//! `GDSYNC_TEST_MESSAGES=N`: how many messages. `GDSYNC_TEST_KILLS=N`: how many kills. `GDSYNC_TEST_SECONDS=N` ends either earlier.
//! On simulated GPUs other work does not keep kernels waiting.

use std::env;
use std::ffi::c_void;
use std::process::exit;
use std::thread;
use std::time::{Duration, Instant};

use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::stream::{Cond, CudaStreamConfig, Stream, Via};
use gdsync_testkit::driver;
use mp::{Channel, Communicator, NearPath, Registration, Result, Rma, Signal, Window};

use crate::common::{
    DONE, LONG, bytes, copying, is_part_of, job_test, kill, message, myself, of_gpu, own_gpu, succeeds, until,
};
use crate::placed::{placed, warm_up, with_gpus};
use crate::traffic::{chance, is_good};

/// A number from the environment.
fn wanted(name: &str, default: usize) -> usize {
    env::var(name).map_or(default, |n| n.parse().expect("a number"))
}

fn end() -> Instant {
    Instant::now() + Duration::from_secs(wanted("GDSYNC_TEST_SECONDS", 3600) as u64)
}

/// Copies by the copy engine, which reads GPU memory faster than the CPU.
struct Copies<'a> {
    gpu: &'a Gpu,
    stream: usize,
}

impl<'a> Copies<'a> {
    fn new(gpu: &'a Gpu) -> Self {
        Self { gpu, stream: raw_stream(gpu) }
    }

    fn write(&self, to: &Memory, from: &[u8]) {
        assert!(from.len() <= to.len());
        let (_current, api) = (self.gpu.enter().unwrap(), self.gpu.api());
        // SAFETY: the memory is as long, and both stay until the copy is done.
        unsafe { api.memcpy_to_device_async(to.addr(), from.as_ptr().cast(), from.len(), self.stream) }
            .unwrap();
        // SAFETY: a stream of this context.
        unsafe { api.stream_synchronize(self.stream) }.unwrap();
    }

    fn read(&self, from: &Memory, to: &mut [u8]) {
        assert!(to.len() <= from.len());
        let (_current, api) = (self.gpu.enter().unwrap(), self.gpu.api());
        // SAFETY: the memory is as long, and both stay until the copy is done.
        unsafe { api.memcpy_to_host_async(to.as_mut_ptr().cast(), from.addr(), to.len(), self.stream) }
            .unwrap();
        // SAFETY: a stream of this context.
        unsafe { api.stream_synchronize(self.stream) }.unwrap();
    }
}

/// A stream that does not wait for the default stream, and stays as long as the process.
fn raw_stream(gpu: &Gpu) -> usize {
    let (_current, mut stream) = (gpu.enter().unwrap(), 0);
    // SAFETY: a place for the stream.
    unsafe { gpu.api().stream_create(&mut stream, 1, 0) }.unwrap();
    stream
}

/// Bytes of a buffer, and messages of a window.
const ROOM: usize = 4 << 20;
const WINDOW: usize = 200;

/// Where the messages of a window leave and arrive, and their lengths: mostly short.
fn plan(from: usize, window: usize) -> Vec<(usize, usize, usize)> {
    let mut end = 0;
    let messages = (0..WINDOW).map_while(|n| {
        let pick = |what, of| chance(what, from, window * WINDOW + n, of);
        let most = match pick(1, 64) {
            0..24 => 64,
            24..36 => 5000,
            36..56 => 20_000,
            56..63 => 130_000,
            _ => 1_500_000,
        };
        let (len, start) = (1 + pick(2, most), end + pick(3, 33));
        end = start + len;
        (end <= ROOM).then(|| (pick(4, ROOM - len), start, len))
    });
    messages.collect()
}

// Every byte is checked, also those between the messages.
job_test!(messages_of_any_size_and_alignment_come_whole, 2, with_gpus(NearPath::PeerCopies), |comm| {
    let (gpu, me, peer) = (&own_gpu(), comm.rank(), 1 - comm.rank());
    let [outbox, inbox] = [(); 2].map(|()| of_gpu(comm, gpu, ROOM));
    let (s, copies) = (copying(gpu, Via::Kernel, Via::Auto), Copies::new(gpu));
    warm_up(comm, &s, &outbox, &inbox);
    let (wanted, end) = (wanted("GDSYNC_TEST_MESSAGES", 600), end());
    // What rank 0 sends in window 0 begins at 0.
    let pool = message(0, 0, 0, ROOM + (1 << 16));
    let sent_by = |rank: usize, window: usize| &pool[(window * 7919 + rank * 31) % (1 << 16)..][..ROOM];
    let (mut came, mut image, mut count) = (vec![0; ROOM], vec![0; ROOM], 0);
    let (start, before) = (Instant::now(), placed(comm));
    for window in 0.. {
        let is_over = count >= wanted || Instant::now() > end;
        if comm.exchange(&[is_over.into()], LONG).unwrap()[0] == [1] {
            break;
        }
        let (ours, theirs) = (plan(me, window), plan(peer, window));
        copies.write(outbox.memory(), sent_by(me, window));
        let receive = |&(_, at, len): &(usize, usize, usize)| comm.irecv(&inbox, at..at + len, peer).unwrap();
        let received: Vec<_> = theirs.iter().map(receive).collect();
        let send = |&(at, _, len): &(usize, usize, usize)| {
            comm.isend_on_stream(&s, &outbox, at..at + len, peer).unwrap()
        };
        let sent: Vec<_> = ours.iter().map(send).collect();
        comm.wait_all_on_stream(&s, &received).unwrap();
        s.synchronize(LONG).unwrap();
        comm.wait_all(&sent, LONG).unwrap();
        comm.wait_all(&received, LONG).unwrap();
        for (from, to, len) in theirs.iter().copied() {
            image[to..to + len].copy_from_slice(&sent_by(peer, window)[from..from + len]);
        }
        copies.read(inbox.memory(), &mut came);
        assert!(came == image, "window {window}");
        count += ours.len() + theirs.len();
    }
    let placed = placed(comm) - before;
    // Rank 1 may learn of the memory of rank 0 late.
    assert!(placed > 0 || me == 0);
    println!("{count} messages in {:?}; {placed} of those to rank {me} were placed", start.elapsed());
});

/// Message `n` in both directions.
fn copied(comm: &Communicator, s: &Stream, outbox: &Registration, inbox: &Registration, n: usize) {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    outbox.memory().write(0, &message(me, peer, n, 6000)).unwrap();
    outbox.memory().flush().unwrap();
    let received = comm.irecv(inbox, n..n + 6000, peer).unwrap();
    let sent = comm.isend_on_stream(s, outbox, 0..6000, peer).unwrap();
    comm.wait_on_stream(s, &received).unwrap();
    s.synchronize(LONG).unwrap();
    received.wait(LONG).unwrap();
    sent.wait(LONG).unwrap();
    assert!(bytes(inbox, n..n + 6000) == message(peer, me, n, 6000), "{n}");
}

/// A way to send to the other rank without end.
enum Way {
    Messages,
    Channel(Channel),
    Window(Window),
}

impl Way {
    fn new(comm: &Communicator, buffer: &Registration, kind: usize) -> Self {
        let (len, peer) = (buffer.memory().len(), 1 - comm.rank());
        match kind {
            0 => Self::Messages,
            1 => Self::Channel(comm.channel(peer, &[(buffer, len / 2..len)], LONG).unwrap()),
            _ => Self::Window(comm.window(buffer, 0..len, LONG).unwrap()),
        }
    }

    /// Message number `n`, from the first half of a buffer to the second; the first 64 bytes are the window's signals.
    fn go(
        &self,
        comm: &Communicator,
        s: &Stream,
        buffer: &Registration,
        n: u64,
        is_sender: bool,
    ) -> Result<()> {
        let (len, peer) = (buffer.memory().len(), 1 - comm.rank());
        match (self, is_sender) {
            (Self::Messages, true) => comm.isend_on_stream(s, buffer, 64..len / 2, peer).map(drop),
            (Self::Messages, false) => {
                comm.wait_on_stream(s, &comm.irecv(buffer, len / 2..len, peer)?).map(drop)
            }
            (Self::Channel(channel), true) => channel.isend_on_stream(s, buffer, 64..len / 2).map(drop),
            (Self::Channel(channel), false) => {
                channel.post_recv_on_stream(s)?;
                channel.wait_recv_on_stream(s).map(drop)
            }
            (Self::Window(window), true) => {
                let put = Rma::put(buffer, 64..len / 2, peer, len / 2).with_signal(Signal::set(0, n));
                window.start_on_stream(s, &put).map(drop)
            }
            (Self::Window(window), false) => window.wait_signal_on_stream(s, 0, n, Cond::Geq),
        }?;
        Ok(s.synchronize(LONG)?)
    }
}

/// The other rank is killed while it sends by messages or a channel, or while this one does, also to a window. The stream ends with an
/// error that says so, and the GPU works on, also with the next rank.
#[test]
fn killed_in_the_middle_of_copies() {
    const NAME: &str = "killed_in_the_middle_of_copies";
    if !is_part_of(NAME) {
        // It exits with 1, as ranks were killed.
        let output = myself(NAME).output().unwrap();
        let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        return assert!(out.contains(" kills: errors came after "), "{out}{err}");
    }
    let (gpu, end, mut took) = (own_gpu(), end(), Vec::new());
    let len = if Gpu::count().is_ok_and(|count| count > 0) { 128 << 20 } else { 1 << 20 };
    for n in 0..wanted("GDSYNC_TEST_KILLS", 6) {
        if Instant::now() > end {
            break;
        }
        let builder = Communicator::builder().gpu(&gpu).near(NearPath::PeerCopies);
        let comm = builder.spawn(2).timeout(LONG).init().unwrap();
        let told = comm.exchange(&n.to_le_bytes(), LONG).unwrap();
        let n = usize::from_le_bytes(*told[0].first_chunk().unwrap());
        let (buffer, s) = (of_gpu(&comm, &gpu, len), copying(&gpu, Via::Kernel, Via::Auto));
        let way = Way::new(&comm, &buffer, n % 3);
        // Any rank may signal a window, so that a wait for it only ends at its limit.
        let sender = if n % 3 == 2 { 0 } else { n / 3 % 2 };
        let is_sender = comm.rank() == sender;
        let go = |number| way.go(&comm, &s, &buffer, number, is_sender);
        (1..4).for_each(|number| go(number).unwrap());
        let killer = comm.child(1).map(|child| {
            let moment = Duration::from_micros(chance(7, n, 0, 20_000) as u64);
            thread::spawn(move || {
                thread::sleep(moment);
                kill(child);
                Instant::now()
            })
        });
        let error = (4..).find_map(|number| go(number).err()).unwrap();
        let at = killer.expect("rank 1 is killed first").join().unwrap();
        took.push((at.elapsed(), n));
        assert!(is_good(&error), "{n}: {error:?}");
        println!("{n}: after {:?}: {error}", at.elapsed());
        let (own, word) = (copying(&gpu, Via::Kernel, Via::Auto), gpu.alloc(8).unwrap().word64(0).unwrap());
        own.write_value64(&word, n as u64 + 1).unwrap();
        own.synchronize(LONG).unwrap();
        assert_eq!(word.load(), n as u64 + 1);
    }
    took.sort_unstable();
    let (median, (longest, of)) = (took[took.len() / 2].0, took[took.len() - 1]);
    println!(
        "{} kills: errors came after {median:?} (median), {longest:?} at most (number {of})",
        took.len()
    );
}

// CUDA may open memory only when the streams that wait are done. Messages go on meanwhile.
job_test!(memory_is_opened_beside_streams_that_wait, 2, with_gpus(NearPath::PeerCopies), |comm| {
    let gpu = &own_gpu();
    let [s, waiting] = [(); 2].map(|()| copying(gpu, Via::Kernel, Via::Auto));
    let buffers: Vec<_> = (0..20).map(|_| [(); 2].map(|()| of_gpu(comm, gpu, 10_000))).collect();
    let gate = Memory::alloc(8).unwrap().word64(0).unwrap();
    waiting.wait_value64(&gate, 1, Cond::Eq).unwrap();
    for (n, [outbox, inbox]) in buffers.iter().enumerate() {
        copied(comm, &s, outbox, inbox, n);
    }
    comm.barrier(LONG).unwrap();
    gate.store(1);
    waiting.synchronize(LONG).unwrap();
});

/// A kernel that holds the multiprocessors until a word is set.
struct Hold<'a> {
    gpu: &'a Gpu,
    function: usize,
    stream: usize,
    word: Memory,
}

const HOLD: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry hold(.param .u64 word)
{
    .reg .pred %p<3>;
    .reg .b32 %r<3>;
    .reg .b64 %a;
    ld.param.u64 %a, [word];
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra meet;
look:
    ld.relaxed.sys.global.u32 %r2, [%a];
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra meet;
    nanosleep.u32 1000;
    bra look;
meet:
    bar.sync 0;
    ret;
}
\0";

impl<'a> Hold<'a> {
    fn new(gpu: &'a Gpu) -> Self {
        driver::kernel("hold", &[8], |params| {
            // SAFETY: the parameter is the address of a word of the test.
            let word = std::ptr::with_exposed_provenance::<u32>(unsafe { params[0].cast::<usize>().read() });
            // SAFETY: as above, until the kernel has ended.
            while unsafe { word.read_volatile() } == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        });
        let (_current, mut module, mut function) = (gpu.enter().unwrap(), 0, 0);
        // SAFETY: a place for the answer, and a text that ends in a zero.
        unsafe { gpu.api().module_load_data(&mut module, HOLD.as_ptr().cast()) }.unwrap();
        // SAFETY: a place for the answer, a loaded module, a name.
        unsafe { gpu.api().module_get_function(&mut function, module, c"hold".as_ptr()) }.unwrap();
        // SAFETY: a function of a module that stays loaded. Drivers before CUDA 12.4 have loaded it.
        let _ = unsafe { gpu.api().func_load(function) };
        let word = Memory::alloc(64).unwrap();
        word.gpu_addr(gpu).unwrap();
        Self { gpu, function, stream: raw_stream(gpu), word }
    }

    /// Fills the multiprocessors: more blocks than fit, of half the threads of one each.
    fn begin(&self) {
        self.word.word32(0).unwrap().store(0);
        let mut word = self.word.gpu_addr(self.gpu).unwrap();
        let (mut params, none) = ([(&raw mut word).cast::<c_void>()], std::ptr::null_mut());
        let (_current, api) = (self.gpu.enter().unwrap(), self.gpu.api());
        let (function, stream, params) = (self.function, self.stream, params.as_mut_ptr());
        // SAFETY: the parameter is the address of a word, which stays until the kernel has ended.
        unsafe { api.launch_kernel(function, 1000, 1, 1, 1024, 1, 1, 0, stream, params, none) }.unwrap();
        // The kernel is there before what is submitted next.
        thread::sleep(Duration::from_millis(20));
    }

    fn end(&self) {
        self.word.word32(0).unwrap().store(1);
        let _current = self.gpu.enter().unwrap();
        // SAFETY: a stream of this context.
        unsafe { self.gpu.api().stream_synchronize(self.stream) }.unwrap();
    }
}

/// Messages behind and beside work that fills both GPUs come when there is room, also into memory that is still to be opened. Streams
/// that wait in vain fail at their limit, whether the work began before them or after, and although it goes on.
#[test]
fn full_gpus_stop_neither_messages_nor_deadlines() {
    const NAME: &str = "full_gpus_stop_neither_messages_nor_deadlines";
    const LENGTHS: [usize; 4] = [8, 5000, 60_001, 1_500_000];
    const LIMIT: Duration = Duration::from_millis(500);
    if !is_part_of(NAME) {
        return succeeds(&mut myself(NAME));
    }
    let comm = with_gpus(NearPath::PeerCopies).spawn(2).timeout(LONG).init().unwrap();
    let (gpu, me, peer) = (&own_gpu(), comm.rank(), 1 - comm.rank());
    let [outbox, inbox, unknown] = [(); 3].map(|()| of_gpu(&comm, gpu, 2 << 20));
    let (s, hold) = (copying(gpu, Via::Kernel, Via::Auto), Hold::new(gpu));
    let config =
        |n| CudaStreamConfig { name: format!("in vain {n}"), wait_limit: LIMIT, ..Default::default() };
    let in_vain =
        [0, 1].map(|n| Stream::cuda(gpu, CudaStreamConfig { via: Via::Kernel, ..config(n) }).unwrap());
    let window = comm.window(&of_gpu(&comm, gpu, 4096), 0..4096, LONG).unwrap();
    warm_up(&comm, &s, &outbox, &inbox);
    // The other direction: CUDA may open that memory, and launch kernels meanwhile, only when the work ends, which this thread ends.
    until("messages to be placed", || {
        copied(&comm, &s, &outbox, &inbox, 1);
        let is_placed = comm.exchange(&[u8::from(placed(&comm) > 0)], LONG).unwrap();
        is_placed.iter().all(|placed| *placed == [1])
    });
    for round in 0..4 {
        let waits_first = round % 2 == 1;
        for (n, len) in LENGTHS.iter().copied().enumerate() {
            outbox.memory().write(n, &message(me, peer, 10 * round + n, len)).unwrap();
            outbox.memory().flush().unwrap();
            let received = comm.irecv(&inbox, 3 * n..3 * n + len, peer).unwrap();
            if waits_first {
                comm.wait_on_stream(&s, &received).unwrap();
                thread::sleep(Duration::from_millis(20));
            }
            hold.begin();
            if !waits_first {
                // Behind the other work, and so is the message of the other rank.
                _ = comm.isend_on_stream(&s, &outbox, n..n + len, peer).unwrap();
                comm.wait_on_stream(&s, &received).unwrap();
            }
            _ = s.synchronize(Duration::from_millis(30));
            comm.barrier(LONG).unwrap();
            hold.end();
            if waits_first {
                // The CPU's, as the stream waits.
                comm.isend(&outbox, n..n + len, peer).unwrap().wait(LONG).unwrap();
            }
            s.synchronize(LONG).unwrap();
            assert_eq!(received.wait(LONG).unwrap().bytes, len);
            assert!(
                bytes(&inbox, 3 * n..3 * n + len) == message(peer, me, 10 * round + n, len),
                "{round} {n}"
            );
            comm.barrier(LONG).unwrap();
        }
    }
    hold.begin();
    let start = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(LIMIT);
            hold.end();
        });
        copied(&comm, &s, &outbox, &unknown, 0);
    });
    println!("memory unknown so far: {:?}", start.elapsed());
    for (n, (waits_first, s)) in [true, false].into_iter().zip(&in_vain).enumerate() {
        if !waits_first {
            hold.begin();
        }
        let start = Instant::now();
        window.wait_signal_on_stream(s, 8 * n, 1, Cond::Geq).unwrap();
        if waits_first {
            thread::sleep(Duration::from_millis(20));
            hold.begin();
        }
        until("the stream to fail", || s.query().error.is_some());
        println!("waits first: {waits_first}, limit {LIMIT:?}, failed after {:?}", start.elapsed());
        // It is done when there is room.
        hold.end();
        let error = s.synchronize(LONG).unwrap_err();
        assert!(matches!(error, gdsync::Error::StreamWait { .. }), "{error}");
    }
    comm.barrier(LONG).unwrap();
    if me == 0 {
        exit(DONE);
    }
}
