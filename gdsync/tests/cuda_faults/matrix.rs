//! Every fault in every place, and how long the release took.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use gdsync::error::{Error, Result};
use gdsync::mlx5::Syndrome;
use gdsync::stream::{Batch, Graph, Stream};
use gdsync::verbs::{Completion, Context, Qp, QpAttr, QpBuilder, QpState, RecvWr, SendWr};

use super::bed::{Bed, Pass, on_gpu};
use super::common::{PATIENCE, Side, assert_clean, bytes, connect, hca, pattern};
use super::place::{self, Place, places_on};
use super::repeat::refuses;

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
    pub(crate) place: &'p Place,
    pub(crate) way: Way,
    pub(crate) bed: &'p Bed,
    pub(crate) a: Context,
    pub(crate) b: Context,
    /// Times from the deadline to the release.
    late: Mutex<Vec<Duration>>,
}

/// How often: `GDSYNC_TEST_REPEATS`, or a hundred times on a real GPU.
pub(crate) fn times() -> u32 {
    let told = std::env::var("GDSYNC_TEST_REPEATS").ok().map(|n| n.parse().expect("a number"));
    told.unwrap_or(if place::is_real() { 100 } else { 1 })
}

/// Meets a fault in each place, each way, so many times; nothing is left.
pub(crate) fn matrix(name: &str, once: impl Fn(&Rig<'_>)) {
    on_gpu(|bed, pass| {
        for place in places_on(&bed.gpu) {
            for way in [Way::Eager, Way::Graph] {
                let rig = Rig::new(&place, way, bed);
                let times = if pass == Pass::First { 1 } else { times() };
                (0..times).for_each(|_| once(&rig));
                if pass == Pass::Counted {
                    rig.tell(name, times);
                }
            }
        }
    });
}

impl<'p> Rig<'p> {
    pub(crate) fn new(place: &'p Place, way: Way, bed: &'p Bed) -> Self {
        Self { place, way, bed, a: hca(), b: hca(), late: Mutex::default() }
    }

    pub(crate) fn stream(&self) -> Stream {
        self.place.stream(PATIENCE)
    }

    /// A side on one of the devices.
    pub(crate) fn side(&self, context: &Context, build: impl Fn(QpBuilder) -> QpBuilder) -> Side {
        self.place.side_with(context, SIZE, build)
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
        self.late.lock().unwrap().push(took.saturating_sub(deadline));
        result
    }

    fn tell(&self, name: &str, times: u32) {
        let mut late = std::mem::take(&mut *self.late.lock().unwrap());
        late.sort_unstable();
        let Some(last) = late.len().checked_sub(1) else { return };
        let [p50, p99, max] = [50, 99, 100].map(|percent| late[last * percent / 100]);
        let Place { via, on_gpu, .. } = self.place;
        eprintln!(
            "{name}, {via} {on_gpu:?} {:?}, {times} times: released {p50:?} (p50), {p99:?} (p99), {max:?} (max) after the \
             deadline",
            self.way
        );
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
        to.qp.post_recv(&[RecvWr { wr_id: 8, sges: &[to.mr.sge(SIZE / 2, LEN).unwrap()] }]).unwrap();
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

/// What is on a stream.
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
