//! The exchange of messages in each mode: by the CPU, by a stream, by graphs, by a kernel.

use super::buffers::{Buffers, Checker, KernelChecker, checker};
use super::{Cost, Measured, Mode, Options};
use crate::app_stream::{AppStream, Kernel, Kernels, Placed};
use crate::measure::{PAGE, Samples, connect, share_memory};
use crate::results::Result;
use gdsync::memory::{Memory, Word32, Word64};
use gdsync::stream::{Batch, Cond, Launch, Stream};
use gdsync::verbs::{Access, Mr, Qp, RecvWr, SendWr};
use mp::{Communicator, Request};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

/// One rank's part in the ping-pong of one size. Rank 0 pings, rank 1 returns.
#[derive(Debug)]
pub struct PingPong<'a> {
    options: &'a Options,
    comm: &'a Communicator,
    app: &'a AppStream,
    placed: &'a Placed,
    buffers: Buffers,
    work: Work<'a>,
    peer: usize,
}

impl<'a> PingPong<'a> {
    /// Makes and registers the buffers.
    pub fn new(
        options: &'a Options,
        comm: &'a Communicator,
        app: &'a AppStream,
        placed: &'a Placed,
        bytes: usize,
    ) -> Result<Self> {
        let buffers = Buffers::new(comm, placed, bytes, &options.checks)?;
        let work = Work::new(app, options.work())?;
        Ok(Self { options, comm, app, placed, buffers, work, peer: 1 - comm.rank() })
    }

    fn pings(&self) -> bool {
        self.comm.rank() == 0
    }

    /// Runs all iterations in one mode. Both ranks call this.
    pub fn run(&self, mode: Mode) -> Result<Measured> {
        let (warm_up, total) = self.options.iterations(self.buffers.bytes);
        match mode {
            Mode::Stream if self.options.no_kernels => self.run_unchecked(warm_up, total),
            Mode::Graph => self.run_graphs(warm_up, total),
            Mode::Initiate => self.run_initiated(warm_up, total),
            _ => self.run_checked(mode, warm_up, total),
        }
    }

    fn receive(&self, n: u64) -> mp::Result<Request> {
        self.comm.irecv(&self.buffers.incoming, self.buffers.receive_slot(n), self.peer)
    }

    fn run_checked(&self, mode: Mode, warm_up: u64, total: u64) -> Result<Measured> {
        let checker = checker(self.options, self.app, &self.buffers, total)?;
        // Receives are always posted a window before the peer can need them.
        let window = u64::from(self.options.ahead);
        let post = |messages: Range<u64>| messages.map(|n| self.receive(n)).collect::<mp::Result<Vec<_>>>();
        let mut receives = post(0..total.min(2 * window))?;
        self.comm.barrier(None)?;
        let mut cost = Cost::default();
        let mut n = 0;
        while n < total {
            let end = total.min(n + window);
            let batch = &receives[..usize::try_from(end - n)?];
            let checking = cost.add(|| match mode {
                Mode::Stream => self.window(&*checker, batch).map(|()| Duration::ZERO),
                _ => self.iterations(&*checker, mode, batch),
            })?;
            cost.leave_out(checking);
            receives.drain(..usize::try_from(end - n)?);
            receives.extend(post(total.min(n + 2 * window)..total.min(n + 3 * window))?);
            n = end;
        }
        Measured::checked(&*checker, cost, warm_up)
    }

    /// Iterations of a launch, and all, in whole launches.
    fn launches(&self, total: u64) -> (u64, u64) {
        let each = u64::from(self.options.ahead).min(total);
        (each, total.next_multiple_of(each))
    }

    /// Launches graphs of iterations, and sleeps until the stream has run them.
    fn run_graphs(&self, warm_up: u64, total: u64) -> Result<Measured> {
        let ((each, total), stream) = (self.launches(total), &self.app.stream);
        let checker = checker(self.options, self.app, &self.buffers, total)?;
        let connection = self.connection(each, total)?;
        let graph = stream.capture(|stream| {
            for _ in 0..each {
                let mut batch = Batch::new();
                if !self.pings() {
                    batch.wait_recv(&connection.qp)?;
                }
                self.work_after(&mut batch)?;
                connection.send(&mut batch)?;
                if self.pings() {
                    batch.wait_recv(&connection.qp)?;
                }
                // The buffer is filled anew below.
                batch.wait_all_sends(&connection.qp)?;
                stream.submit(&mut batch)?;
                checker.turn()?;
            }
            Result::Ok(())
        })?;
        let launch = |stream: &Stream| Ok(graph.launch(stream)?);
        self.launch(connection, (each, total), &launch, &*checker, warm_up)
    }

    /// Launches a kernel of the program that waits and sends by itself.
    fn run_initiated(&self, warm_up: u64, total: u64) -> Result<Measured> {
        let (each, total) = self.launches(total);
        let kernels = self.app.kernels.as_ref().ok_or("mode initiate has no kernel without --stream cuda")?;
        self.buffers.prepare()?;
        let checker = KernelChecker::new(kernels, self.app, &self.buffers, total)?;
        let connection = self.connection(each, total)?;
        let work = self.options.work();
        // Behind the work; without any it is one step with the send.
        let waits_first = !self.pings() && !work.is_zero();
        let steps = self.app.stream.record_steps(|stream| {
            for _ in 0..each {
                let mut batch = Batch::new();
                if !self.pings() {
                    batch.wait_recv(&connection.qp)?;
                }
                if waits_first {
                    stream.submit(&mut batch)?;
                }
                connection.send(&mut batch)?;
                // The buffer is filled anew behind this. It has left before the answer comes.
                batch.wait_all_sends(&connection.qp)?;
                if self.pings() {
                    batch.wait_recv(&connection.qp)?;
                }
                stream.submit(&mut batch)?;
            }
            gdsync::Result::Ok(())
        })?;
        let launch = |stream: &Stream| {
            steps.launch(stream, |program| checker.initiate(program, each, work, waits_first))
        };
        self.launch(connection, (each, total), &launch, &checker, warm_up)
    }

    /// A connection with the receives of the first launches.
    fn connection(&self, each: u64, total: u64) -> Result<Connection> {
        // The messages of the launches under way, of the next, and of one whose completions are not yet taken.
        let room = usize::try_from((UNDER_WAY + 2) * each)?;
        let mut connection = Connection::new(self.comm, self.placed, &self.buffers, room)?;
        connection.receive_before(total.min(UNDER_WAY * each))?;
        Ok(connection)
    }

    /// Launches until all iterations are queued. Receives are posted a launch before the peer can need them.
    fn launch(
        &self,
        mut connection: Connection,
        (each, total): (u64, u64),
        launch: &dyn Fn(&Stream) -> Result<Launch>,
        checker: &dyn Checker,
        warm_up: u64,
    ) -> Result<Measured> {
        let (stream, timeout) = (&self.app.stream, self.comm.timeout());
        self.comm.barrier(None)?;
        let mut cost = Cost::default();
        cost.add(|| {
            checker.start()?;
            let mut under_way = VecDeque::new();
            for done in (each..=total).step_by(usize::try_from(each)?) {
                if under_way.len() as u64 == UNDER_WAY {
                    under_way.pop_front().map_or(Ok(()), |first: Launch| first.wait(stream, timeout))?;
                }
                connection.receive_before(total.min(done + each))?;
                under_way.push_back(launch(&stream.with_timeout(timeout))?);
            }
            self.app.finish()
        })?;
        // Both have received all before the connection goes.
        self.comm.barrier(None)?;
        Measured::checked(checker, cost, warm_up)
    }

    /// Puts the work on the stream behind what is in the batch, which is submitted then.
    fn work_after(&self, batch: &mut Batch) -> Result<()> {
        if self.work.is_none() {
            return Ok(());
        }
        self.app.stream.submit(batch)?;
        self.work.enqueue()
    }

    /// Posts a window of iterations ahead and sleeps until the stream has run them.
    fn window(&self, checker: &dyn Checker, receives: &[Request]) -> Result<()> {
        let (comm, stream) = (self.comm, &self.app.stream);
        checker.start()?;
        for receive in receives {
            let mut batch = Batch::new();
            if !self.pings() {
                comm.wait_in_batch(&mut batch, receive)?;
            }
            self.work_after(&mut batch)?;
            let sent =
                comm.isend_in_batch(&mut batch, &self.buffers.outgoing, self.buffers.send_slot(), self.peer)?;
            if self.pings() {
                comm.wait_in_batch(&mut batch, receive)?;
            }
            // The buffer is filled anew below.
            comm.wait_in_batch(&mut batch, &sent)?;
            stream.submit(&mut batch)?;
            checker.turn()?;
        }
        self.app.finish()
    }

    /// Iterations that the CPU posts. Returns the CPU time of checking.
    fn iterations(&self, checker: &dyn Checker, mode: Mode, receives: &[Request]) -> Result<Duration> {
        let mut checking = Duration::ZERO;
        if checker.always_on_stream() {
            checker.start()?;
        }
        for receive in receives {
            let start = Instant::now();
            let sent = self.exchange(checker, mode, receive)?;
            let time = start.elapsed();
            self.comm.wait(&sent, None)?;
            checking += checker.turn_by_cpu(time)?;
        }
        self.app.finish()?;
        Ok(checking)
    }

    /// One message there and one back, posted by the CPU.
    fn exchange(&self, checker: &dyn Checker, mode: Mode, receive: &Request) -> Result<Request> {
        let (comm, app) = (self.comm, self.app);
        let wait = || match mode {
            Mode::Sync => comm.wait_on_stream(&app.stream, receive),
            _ => comm.wait(receive, None).map(drop),
        };
        if !self.pings() {
            wait()?;
        }
        self.work.enqueue()?;
        // What the send must not overtake.
        let on_stream = checker.always_on_stream() || !self.work.is_none();
        if on_stream || (mode == Mode::Sync && !self.pings()) {
            app.idle()?;
        }
        let sent = comm.isend(&self.buffers.outgoing, self.buffers.send_slot(), self.peer)?;
        if self.pings() {
            wait()?;
            // A checker on the stream has its place behind the wait.
            if mode == Mode::Sync && !checker.always_on_stream() {
                app.idle()?;
            }
        }
        Ok(sent)
    }

    /// Runs windows with nothing but sends and waits on the stream; a time is the mean of a window.
    fn run_unchecked(&self, warm_up: u64, total: u64) -> Result<Measured> {
        let (comm, buffers) = (self.comm, &self.buffers);
        let mut windows = Windows::new(comm, self.app)?;
        let (mut samples, mut cost, mut errors) = (Samples::default(), Cost::default(), 0);
        let mut n = 0;
        while n < total {
            let end = if n < warm_up { warm_up } else { total }.min(n + u64::from(self.options.ahead));
            buffers.prepare_window(n)?;
            let receives: Vec<Request> = (n + 1..=end)
                .map(|next| comm.irecv(&buffers.incoming, buffers.window_slot(next == end), self.peer))
                .collect::<mp::Result<_>>()?;
            let (time, sent) = windows.run(&mut cost, |batch| {
                let mut sent = Vec::with_capacity(receives.len());
                for receive in &receives {
                    if !self.pings() {
                        comm.wait_in_batch(batch, receive)?;
                    }
                    sent.push(comm.isend_in_batch(
                        batch,
                        &buffers.outgoing,
                        buffers.send_slot(),
                        self.peer,
                    )?);
                    if self.pings() {
                        comm.wait_in_batch(batch, receive)?;
                    }
                }
                Ok(sent)
            })?;
            comm.wait_all(&sent, None)?;
            errors += buffers.wrong_of_window(n, receives.len().min(2))?;
            if n >= warm_up {
                samples.add_mean(time, end - n);
            }
            n = end;
        }
        Ok(Measured { samples, cost, iterations: total, errors })
    }
}

/// Launches at a time.
const UNDER_WAY: u64 = 2;

/// Messages of `mp` wait for a credit, which no two of them do for the same one: here the program has posted all receives
/// before a send can need them.
#[derive(Debug)]
struct Connection {
    qp: Qp,
    outgoing: Mr,
    incoming: Mr,
    buffers: Buffers,
    posted: u64,
}

impl Connection {
    /// Connects both ranks through the device of their other messages, with room for `messages` in each direction.
    fn new(comm: &Communicator, placed: &Placed, buffers: &Buffers, messages: usize) -> Result<Self> {
        let pd = comm.device(1 - comm.rank())?.alloc_pd()?;
        let [outgoing, incoming] =
            [&buffers.outgoing, &buffers.incoming].map(|buffer| pd.register(buffer.memory(), Access::all()));
        let qp = placed.queues(pd.build_qp().max_send_wr(messages).max_recv_wr(messages)).build()?;
        connect(comm, [&qp].into_iter())?;
        Ok(Self { qp, outgoing: outgoing?, incoming: incoming?, buffers: buffers.clone(), posted: 0 })
    }

    /// Posts receives for messages up to this one, in one call.
    fn receive_before(&mut self, end: u64) -> Result<()> {
        let places = [0, 1].map(|n| self.buffers.receive_slot(n));
        let places = places.map(|place| self.incoming.sge(place.start, place.len()));
        let [even, odd] = places.map(|place| place.map(|sge| [sge]));
        let (even, odd) = (even?, odd?);
        let sges = |n: u64| if n.is_multiple_of(2) { &even } else { &odd };
        let receives: Vec<_> = (self.posted..end).map(|n| RecvWr::new(sges(n).as_slice()).id(n)).collect();
        if !receives.is_empty() {
            self.qp.post_recv(&receives)?;
            self.posted = end;
        }
        Ok(())
    }

    fn send(&self, batch: &mut Batch) -> gdsync::Result<()> {
        let place = self.buffers.send_slot();
        batch.send(&self.qp, &SendWr::send(&[self.outgoing.sge(place.start, place.len())?]))?;
        Ok(())
    }
}

/// Runs windows on the streams of both ranks; rank 0 begins.
struct Windows<'a> {
    comm: &'a Communicator,
    app: &'a AppStream,
    clock: Clock<'a>,
    gate: Word32,
    opened: u32,
}

impl<'a> Windows<'a> {
    fn new(comm: &'a Communicator, app: &'a AppStream) -> Result<Self> {
        let clock = Clock::new(app)?;
        let gate = Memory::alloc(4)?.word32(0)?;
        Ok(Self { comm, app, clock, gate, opened: 0 })
    }

    /// Runs what `fill` adds to a batch. Returns how long the stream took, and what `fill` did; `cost` gets what posting and
    /// waiting cost, but for waiting until the other rank has posted.
    fn run<T>(
        &mut self,
        cost: &mut Cost,
        fill: impl FnOnce(&mut Batch) -> Result<T>,
    ) -> Result<(Duration, T)> {
        let pings = self.comm.rank() == 0;
        let stream = &self.app.stream;
        self.opened += 1;
        let opened = self.opened;
        let kept = cost.add(|| -> Result<_> {
            if pings {
                stream.wait_value32(&self.gate, opened, Cond::Geq)?;
            }
            self.clock.take(&self.clock.begin)?;
            let mut batch = Batch::new();
            let kept = fill(&mut batch)?;
            stream.submit(&mut batch)?;
            self.clock.take(&self.clock.end)?;
            Ok(kept)
        })?;
        // Now everything is posted at both ends.
        self.comm.barrier(None)?;
        cost.add(|| {
            self.gate.store(opened);
            self.app.finish()
        })?;
        Ok((self.clock.between()?, kept))
    }
}

/// Reads the clock of what runs the stream, on the stream.
struct Clock<'a> {
    app: &'a AppStream,
    stamp: Option<(&'a Kernels, Kernel<u64>)>,
    origin: Instant,
    /// Nanoseconds.
    begin: Word64,
    end: Word64,
}

impl<'a> Clock<'a> {
    fn new(app: &'a AppStream) -> Result<Self> {
        // SAFETY: the parameter is one address.
        let stamp = unsafe { app.find(c"stamp") }?;
        let memory = Memory::alloc(16)?;
        let (begin, end) = (memory.word64(0)?, memory.word64(8)?);
        let clock = Self { app, stamp, origin: Instant::now(), begin, end };
        // First use: CUDA loads and registers now, not while a stream is blocked.
        clock.take(&clock.begin)?;
        app.idle()?;
        Ok(clock)
    }

    fn take(&self, word: &Word64) -> Result<()> {
        match &self.stamp {
            Some((kernels, stamp)) => {
                let addr = word.memory().gpu_addr(self.app.gpu()?)?;
                // SAFETY: a word, which this value keeps until the stream is idle.
                unsafe { kernels.launch(stamp, 1, 1, addr) }
            }
            None => {
                let (origin, word) = (self.origin, word.clone());
                let now = move || u64::try_from(origin.elapsed().as_nanos()).unwrap_or(u64::MAX);
                Ok(self.app.stream.host_fn(move || word.store(now()))?)
            }
        }
    }

    fn between(&self) -> Result<Duration> {
        let time = self.end.load().checked_sub(self.begin.load());
        Ok(Duration::from_nanos(time.ok_or("the clock of the stream went backwards")?))
    }
}

impl Drop for Clock<'_> {
    fn drop(&mut self) {
        self.app.settle();
    }
}

/// Work of a certain time: a host function that spins, or a kernel that does on a GPU.
#[derive(Debug)]
pub struct Work<'a> {
    app: &'a AppStream,
    time: Duration,
    kernel: Option<(&'a Kernels, Kernel<u64>)>,
}

impl<'a> Work<'a> {
    /// For a app with the kernels of [`PTX`](super::PTX).
    pub fn new(app: &'a AppStream, time: Duration) -> Result<Self> {
        // SAFETY: the parameter is one u64.
        let kernel = unsafe { app.find(c"work") }?;
        Ok(Self { app, time, kernel })
    }

    /// Whether it takes no time, and nothing is put on the stream.
    pub fn is_none(&self) -> bool {
        self.time.is_zero()
    }

    /// Puts it on the stream.
    pub fn enqueue(&self) -> Result<()> {
        if self.is_none() {
            return Ok(());
        }
        let time = self.time;
        match &self.kernel {
            // SAFETY: the argument names no memory.
            Some((kernels, work)) => unsafe { kernels.launch(work, 1, 1, u64::try_from(time.as_nanos())?) },
            None => {
                let mut batch = Batch::new();
                batch.repeatable_host_fn(move || {
                    let start = Instant::now();
                    while start.elapsed() < time {
                        std::hint::spin_loop();
                    }
                });
                Ok(self.app.stream.submit(&mut batch)?)
            }
        }
    }
}

const FLAG: usize = 4;
/// Flags are on lines of their own.
const LINE: usize = 64;

/// Bounces flags between the streams of both ranks, as often as small messages are.
pub(super) fn flags(options: &Options, comm: &Communicator, app: &AppStream) -> Result<Measured> {
    let memory = share_memory(comm, PAGE)?;
    let (mine, theirs) = (memory.word32(comm.rank() * LINE)?, memory.word32((1 - comm.rank()) * LINE)?);

    let pings = comm.rank() == 0;
    let (warm_up, total) = options.iterations(FLAG);
    let mut windows = Windows::new(comm, app)?;
    let (mut samples, mut cost) = (Samples::default(), Cost::default());
    let mut n = 0;
    while n < total {
        let end = if n < warm_up { warm_up } else { total }.min(n + u64::from(options.ahead));
        let values = u32::try_from(n + 1)?..=u32::try_from(end)?;
        let (time, ()) = windows.run(&mut cost, |batch| {
            for value in values {
                if !pings {
                    batch.wait_value32(&theirs, value, Cond::Geq);
                }
                batch.write_value32(&mine, value);
                if pings {
                    batch.wait_value32(&theirs, value, Cond::Geq);
                }
            }
            Ok(())
        })?;
        if n >= warm_up {
            samples.add_mean(time, end - n);
        }
        n = end;
    }
    // The barrier of an exchange: both have written their last.
    comm.barrier(None)?;
    let errors = u64::from(u64::from(theirs.load()) != total);
    Ok(Measured { samples, cost, iterations: total, errors })
}
