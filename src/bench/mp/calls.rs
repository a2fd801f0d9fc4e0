//! What a call costs the CPU on top of gdsync: 8 bytes to the other process, by queue pairs of both kinds in turns, as messages and
//! as puts and gets.

use std::time::{Duration, Instant};

use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::mlx5::RemoteAddr;
use gdasync::gdsync::verbs::{Access, Mr, Qp, QpAddress, RecvWr, SendWr, Sge, Wc};
use gdasync::measure::{Micros, Samples};
use gdasync::mp::{self, Communicator, Registration, Request, Window};
use serde::Serialize;

use super::Result;

/// Calls in a row whose time is taken together.
const BURST: usize = 64;

/// One kind of call.
#[derive(Serialize)]
pub(super) struct Call {
    pub(super) name: &'static str,
    pub(super) mp_us: Micros,
    pub(super) gdsync_us: Micros,
    /// The difference of the medians.
    pub(super) overhead_ns: f64,
}

/// Times of the calls.
#[derive(Default)]
struct Times([Samples; 5]);

const NAMES: [&str; 5] =
    ["post a receive", "post a send", "take a message that is there", "start a put", "start a get"];

impl Times {
    fn add(&mut self, call: usize, start: Instant) {
        self.0[call].add_mean(start.elapsed(), BURST as u64);
    }
}

/// A queue pair without mp.
struct Bare {
    qp: Qp,
    mr: Mr,
    /// The other one's memory.
    remote: RemoteAddr,
}

impl Bare {
    fn new(comm: &Communicator, timeout: Duration) -> Result<Self> {
        let pd = comm.context().alloc_pd()?;
        let mr = pd.register(&Memory::alloc(64)?, Access::all())?;
        let queues = pd.build_qp().max_send_wr(512).max_recv_wr(512).max_send_sge(2).max_recv_sge(2);
        let qp = queues.rnr_retry(7).timeout(17).build()?;
        let RemoteAddr { addr, rkey } = mr.remote(0)?;
        let ours = [&qp.address().to_bytes()[..], &addr.to_be_bytes(), &rkey.to_be_bytes()].concat();
        let records = comm.exchange(&ours, timeout)?;
        let short = || "a short address";
        let (theirs, rest) = records[1 - comm.rank()].split_first_chunk().ok_or_else(short)?;
        let (addr, rkey) = rest.split_first_chunk().ok_or_else(short)?;
        let rkey = rkey.first_chunk().ok_or_else(short)?;
        let remote = RemoteAddr { addr: u64::from_be_bytes(*addr), rkey: u32::from_be_bytes(*rkey) };
        qp.connect(QpAddress::from_bytes(theirs)?)?;
        Ok(Self { qp, mr, remote })
    }

    fn round(&self, comm: &Communicator, times: &mut Times, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        for _ in 0..BURST {
            self.qp.post_recv(&[RecvWr { wr_id: 0, sges: &[self.mr.sge(0, 8)?] }])?;
        }
        times.add(0, start);
        self.posts(comm, (1, times), timeout, |sges| SendWr::send(sges))?;
        // Now all messages are there.
        let start = Instant::now();
        take(timeout, || self.qp.poll_recv())?;
        times.add(2, start);
        self.posts(comm, (3, times), timeout, |sges| SendWr::write(self.remote, sges))?;
        self.posts(comm, (4, times), timeout, |sges| SendWr::read(self.remote, sges))
    }

    /// Posts a burst of one kind.
    fn posts(
        &self,
        comm: &Communicator,
        (call, times): (usize, &mut Times),
        timeout: Duration,
        request: impl for<'a> Fn(&'a [Sge]) -> SendWr<'a>,
    ) -> Result<()> {
        by_turns(comm, timeout, || {
            let start = Instant::now();
            for _ in 0..BURST {
                self.qp.post_send(&[request(&[self.mr.sge(8, 8)?])])?;
            }
            times.add(call, start);
            // As mp waits, not by polling: a wait leaves the device to its thread in the end, and a burst behind one takes longer,
            // whichever it is.
            self.qp.wait_all_sends(timeout)?;
            take(timeout, || self.qp.poll_send())
        })
    }
}

/// Has one rank send after the other, when both have receives. While both send, each finds messages of the other in its own calls
/// and takes them in there, the more the longer its calls are: that is no cost of the call.
fn by_turns(comm: &Communicator, timeout: Duration, mut send: impl FnMut() -> Result<()>) -> Result<()> {
    comm.barrier(timeout)?;
    for rank in 0..comm.size() {
        if rank == comm.rank() {
            send()?;
        }
        comm.barrier(timeout)?;
    }
    Ok(())
}

/// Takes as many completions as there are calls in a burst.
fn take(timeout: Duration, poll: impl Fn() -> Option<Wc>) -> Result<()> {
    let deadline = Instant::now() + timeout;
    for _ in 0..BURST {
        let wc = loop {
            match poll() {
                Some(wc) => break wc,
                None if Instant::now() > deadline => return Err("no completion came".into()),
                None => {}
            }
        };
        wc.ok()?;
    }
    Ok(())
}

fn round(
    comm: &Communicator,
    (buffer, window): (&Registration, &Window),
    times: &mut Times,
    timeout: Duration,
) -> Result<()> {
    let peer = 1 - comm.rank();
    let mut received = Vec::with_capacity(BURST);
    let start = Instant::now();
    for _ in 0..BURST {
        received.push(comm.irecv(buffer, 0..8, peer)?);
    }
    times.add(0, start);
    starts(comm, (1, times), timeout, || comm.isend(buffer, 8..16, peer))?;
    let start = Instant::now();
    for receive in &received {
        comm.wait(receive, timeout)?;
    }
    times.add(2, start);
    starts(comm, (3, times), timeout, || window.iput(buffer, 8..16, peer, 0))?;
    starts(comm, (4, times), timeout, || window.iget(buffer, 8..16, peer, 0))
}

/// Starts a burst of one kind.
fn starts(
    comm: &Communicator,
    (call, times): (usize, &mut Times),
    timeout: Duration,
    start_one: impl Fn() -> mp::Result<Request>,
) -> Result<()> {
    by_turns(comm, timeout, || {
        let mut started = Vec::with_capacity(BURST);
        let start = Instant::now();
        for _ in 0..BURST {
            started.push(start_one()?);
        }
        times.add(call, start);
        comm.wait_all(&started, timeout)?;
        Ok(())
    })
}

pub(super) fn measure(comm: &Communicator, rounds: u32, timeout: Duration) -> Result<Vec<Call>> {
    if rounds == 0 {
        return Ok(Vec::new());
    }
    let bare = Bare::new(comm, timeout)?;
    let buffer = comm.register(&Memory::alloc(64)?)?;
    let window = comm.window(&buffer, 0..8, timeout)?;
    let (mut theirs, mut ours) = (Times::default(), Times::default());
    for _ in 0..rounds {
        bare.round(comm, &mut theirs, timeout)?;
        round(comm, (&buffer, &window), &mut ours, timeout)?;
    }
    window.destroy(timeout)?;
    let call = |(name, (mp, gdsync)): (_, (&Samples, &Samples))| {
        let (mp_us, gdsync_us) = (mp.micros(1), gdsync.micros(1));
        Call { name, mp_us, gdsync_us, overhead_ns: (mp_us.p50 - gdsync_us.p50) * 1e3 }
    };
    Ok(NAMES.into_iter().zip(ours.0.iter().zip(&theirs.0)).map(call).collect())
}
