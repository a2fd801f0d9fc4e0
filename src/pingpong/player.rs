//! One rank's part in the ping-pong of one size.

use std::time::{Duration, Instant};

use crate::measure::Samples;
use gdsync::stream::Batch;
use mp::{Communicator, Request};

use super::board::Board;
use super::judge::{Judge, judge};
use super::kernels::KernelJudge;
use super::launches::{Launches, captured, initiated};
use super::options::{Mode, Options, warm_up};
use super::pair::Pair;
use super::report::{Cost, Line, Played};
use super::window::Windows;
use super::work::Work;
use crate::lane::{Lane, Placed, Result};

/// One rank's part in the ping-pong of one size. Rank 0 serves, rank 1 returns.
#[derive(Debug)]
pub struct Player<'a> {
    options: &'a Options,
    comm: &'a Communicator,
    pub(super) lane: &'a Lane,
    placed: &'a Placed,
    board: Board,
    work: Work<'a>,
    peer: usize,
    timeout: Duration,
}

impl<'a> Player<'a> {
    /// Makes and registers the buffers.
    ///
    /// # Errors
    /// When the memory cannot be had or registered.
    pub fn new(
        options: &'a Options,
        comm: &'a Communicator,
        lane: &'a Lane,
        placed: &'a Placed,
        bytes: usize,
    ) -> Result<Self> {
        let board = Board::new(comm, placed, bytes, options.wrong_bytes)?;
        let work = Work::new(lane, options.work())?;
        let (peer, timeout) = (1 - comm.rank(), options.timeout());
        Ok(Self { options, comm, lane, placed, board, work, peer, timeout })
    }

    pub(super) fn serves(&self) -> bool {
        self.comm.rank() == 0
    }

    /// Plays all iterations in one mode. Both ranks must call this.
    ///
    /// # Errors
    /// Of messages and streams; wrong data is no error, but counted.
    pub fn play(&self, mode: Mode) -> Result<Line> {
        let iterations = self.options.iterations(self.board.bytes);
        let warm_up = warm_up(iterations);
        let total = warm_up + iterations;
        let played = match mode {
            Mode::Stream if self.options.no_kernels => self.play_bare(warm_up, total),
            Mode::Graph => self.play_graphs(warm_up, total),
            Mode::Initiate => self.play_initiated(warm_up, total),
            _ => self.play_judged(mode, warm_up, total),
        }?;
        played.line(self.comm, mode, self.board.bytes, self.timeout)
    }

    fn receive(&self, n: u64) -> mp::Result<Request> {
        self.comm.irecv(&self.board.incoming, self.board.receive_slot(n), self.peer)
    }

    fn play_judged(&self, mode: Mode, warm_up: u64, total: u64) -> Result<Played> {
        let judge = judge(self.options, self.lane, &self.board, total)?;
        // Receives are always posted a window before the peer can need them.
        let window = u64::from(self.options.ahead);
        let mut receives: Vec<Request> =
            (0..total.min(2 * window)).map(|n| self.receive(n)).collect::<mp::Result<_>>()?;
        self.comm.barrier(self.timeout)?;
        let mut cost = Cost::default();
        let mut n = 0;
        while n < total {
            let end = total.min(n + window);
            let batch = &receives[..usize::try_from(end - n)?];
            let checking = cost.add(|| match mode {
                Mode::Stream => self.window(&*judge, batch).map(|()| Duration::ZERO),
                _ => self.iterations(&*judge, mode, batch),
            })?;
            cost.leave_out(checking);
            receives.drain(..usize::try_from(end - n)?);
            let posted = n + 2 * window;
            receives.extend(
                (posted.min(total)..(posted + window).min(total))
                    .map(|n| self.receive(n))
                    .collect::<mp::Result<Vec<_>>>()?,
            );
            n = end;
        }
        Played::judged(&*judge, cost, warm_up)
    }

    /// Launches graphs of iterations, and sleeps until the stream has run them.
    fn play_graphs(&self, warm_up: u64, total: u64) -> Result<Played> {
        let each = self.options.graph();
        let judge = judge(self.options, self.lane, &self.board, total)?;
        let launches =
            Launches::new(self.pair(each)?, each, total, |pair, count| captured(self, &*judge, pair, count))?;
        self.launch(launches, &*judge, warm_up)
    }

    /// Launches a kernel of the program that waits and sends by itself.
    fn play_initiated(&self, warm_up: u64, total: u64) -> Result<Played> {
        let each = self.options.initiate();
        let kernels =
            self.lane.kernels.as_ref().ok_or("mode initiate has no kernel without --stream cuda")?;
        self.board.prepare()?;
        let judge = KernelJudge::new(kernels, self.lane, &self.board, total)?;
        let launches =
            Launches::new(self.pair(each)?, each, total, |pair, count| initiated(self, &judge, pair, count))?;
        self.launch(launches, &judge, warm_up)
    }

    /// A connection for launches of so many iterations.
    fn pair(&self, each: u64) -> Result<Pair> {
        Pair::new(self.options, self.comm, self.placed, &self.board, Launches::room(each)?)
    }

    fn launch(&self, mut launches: Launches<'_>, judge: &dyn Judge, warm_up: u64) -> Result<Played> {
        self.comm.barrier(self.timeout)?;
        let mut cost = Cost::default();
        cost.add(|| {
            judge.start()?;
            launches.run(&self.lane.stream, self.timeout)?;
            self.lane.finish()
        })?;
        // Both have received all before the connection goes.
        self.comm.barrier(self.timeout)?;
        Played::judged(judge, cost, warm_up)
    }

    /// Work before each send.
    pub(super) fn work_time(&self) -> Duration {
        self.options.work()
    }

    /// Puts the work on the stream behind what is in the batch, which is submitted then.
    pub(super) fn work_after(&self, batch: &mut Batch) -> Result<()> {
        if self.work.is_none() {
            return Ok(());
        }
        self.lane.stream.submit(batch)?;
        self.work.enqueue()
    }

    /// Posts a window of iterations ahead and sleeps until the stream has run them.
    fn window(&self, judge: &dyn Judge, receives: &[Request]) -> Result<()> {
        let (comm, stream) = (self.comm, &self.lane.stream);
        judge.start()?;
        for receive in receives {
            let mut batch = Batch::new();
            if !self.serves() {
                comm.wait_in_batch(&mut batch, receive)?;
            }
            self.work_after(&mut batch)?;
            let sent =
                comm.isend_in_batch(&mut batch, &self.board.outgoing, self.board.send_slot(), self.peer)?;
            if self.serves() {
                comm.wait_in_batch(&mut batch, receive)?;
            }
            // The buffer is filled anew below.
            comm.wait_in_batch(&mut batch, &sent)?;
            stream.submit(&mut batch)?;
            judge.turn()?;
        }
        self.lane.finish()
    }

    /// Iterations that the CPU posts. Returns the CPU time of checking.
    fn iterations(&self, judge: &dyn Judge, mode: Mode, receives: &[Request]) -> Result<Duration> {
        let mut checking = Duration::ZERO;
        if judge.always_on_stream() {
            judge.start()?;
        }
        for receive in receives {
            let start = Instant::now();
            let sent = self.exchange(judge, mode, receive)?;
            let time = start.elapsed();
            self.comm.wait(&sent, self.timeout)?;
            checking += judge.turn_by_cpu(time)?;
        }
        self.lane.finish()?;
        Ok(checking)
    }

    /// One message there and one back, posted by the CPU.
    fn exchange(&self, judge: &dyn Judge, mode: Mode, receive: &Request) -> Result<Request> {
        let (comm, lane) = (self.comm, self.lane);
        let wait = || match mode {
            Mode::Sync => comm.wait_on_stream(&lane.stream, receive),
            _ => comm.wait(receive, self.timeout).map(drop),
        };
        if !self.serves() {
            wait()?;
        }
        self.work.enqueue()?;
        // What the send must not overtake.
        let on_stream = judge.always_on_stream() || !self.work.is_none();
        if on_stream || (mode == Mode::Sync && !self.serves()) {
            lane.idle()?;
        }
        let sent = comm.isend(&self.board.outgoing, self.board.send_slot(), self.peer)?;
        if self.serves() {
            wait()?;
            // A judge on the stream has its place behind the wait.
            if mode == Mode::Sync && !judge.always_on_stream() {
                lane.idle()?;
            }
        }
        Ok(sent)
    }

    /// Plays windows with nothing but sends and waits on the stream; a time is the mean of a window.
    fn play_bare(&self, warm_up: u64, total: u64) -> Result<Played> {
        let (comm, board) = (self.comm, &self.board);
        let mut windows = Windows::new(comm, self.lane, self.timeout)?;
        let (mut samples, mut cost, mut errors) = (Samples::default(), Cost::default(), 0);
        let mut n = 0;
        while n < total {
            let end = if n < warm_up { warm_up } else { total }.min(n + u64::from(self.options.ahead));
            board.prepare_window(n)?;
            let receives: Vec<Request> = (n + 1..=end)
                .map(|next| comm.irecv(&board.incoming, board.window_slot(next == end), self.peer))
                .collect::<mp::Result<_>>()?;
            let (time, sent) = windows.run(&mut cost, |batch| {
                let mut sent = Vec::with_capacity(receives.len());
                for receive in &receives {
                    if !self.serves() {
                        comm.wait_in_batch(batch, receive)?;
                    }
                    sent.push(comm.isend_in_batch(batch, &board.outgoing, board.send_slot(), self.peer)?);
                    if self.serves() {
                        comm.wait_in_batch(batch, receive)?;
                    }
                }
                Ok(sent)
            })?;
            comm.wait_all(&sent, self.timeout)?;
            errors += board.wrong_of_window(n, receives.len().min(2))?;
            if n >= warm_up {
                samples.add_mean(time, end - n);
            }
            n = end;
        }
        Ok(Played { samples, cost, iterations: total, errors })
    }
}
