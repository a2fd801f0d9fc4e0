//! Any legal list of work requests, through small real queues, against a model that does them one after the other.

use std::ops::Range;
use std::time::{Duration, Instant};

use gdsync::Error;
use gdsync::hca::{CmaPolicy, FaultPlan, SoftHcaConfig};
use gdsync::mlx5::{CqeOpcode, Opcode};
use gdsync::stream::{Batch, Stream};
use gdsync::verbs::{Completion, Context, QpBuilder, RecvWr, SendWr, Sge, Wc};
use proptest::prelude::*;

use crate::child::own_process;
use crate::common::{PATIENCE, Side, assert_clean, connect, hca, pattern, stream, tier};
use crate::copy_engine::{Engine, Habits};

/// What payload is left to, and the least that is.
#[derive(Clone, Copy, Debug)]
enum Left {
    Nobody,
    Engine(Habits, usize),
    /// The CPU of the receiver, which reads it in place.
    Receiver(usize),
}

fn check(list: &[Request], drive: &Drive, faults: Option<FaultPlan>, left: Left) {
    // Without faults nothing is sent again, however long a loaded machine takes.
    let timeout = if faults.is_some() { 13 } else { 17 };
    let build = |q: QpBuilder| {
        let q =
            q.max_send_wr(drive.max_send_wr).max_recv_wr(drive.max_recv_wr).max_send_sge(3).max_recv_sge(3);
        q.max_inline(INLINE).timeout(timeout).retry_cnt(7).rnr_retry(7).min_rnr_timer(1)
    };
    let pulling =
        |bytes| SoftHcaConfig { strict: true, cma: CmaPolicy::From(bytes), ..SoftHcaConfig::default() };
    let open: Box<dyn Fn() -> Context> = match left {
        Left::Nobody => Box::new(hca),
        Left::Engine(habits, bytes) => {
            let engine = Engine::start(habits);
            Box::new(move || engine.hca(bytes))
        }
        Left::Receiver(bytes) => Box::new(move || Context::soft(&pulling(bytes)).unwrap()),
    };
    let first = open();
    let second = if drive.two_hcas { open() } else { first.clone() };
    let (a, b) = connect(Side::new(&first, REGION, build), Side::new(&second, REGION, build));
    for (side, seed) in [(&a, 1), (&b, 2)] {
        side.memory().write(0, &start(seed)).unwrap();
        side.context.inject(faults.clone().unwrap_or_default()).unwrap();
    }
    let (expected, words) = model(list);
    let run = Run {
        a: &a,
        b: &b,
        list,
        words,
        stream: drive.by_stream.then(|| stream("model")),
        next: 0,
        next_recv: 0,
        waited: vec![],
        outcome: Outcome::default(),
    };
    let outcome = run.go(drive, &expected);
    assert_eq!((&outcome.sent, &outcome.received), (&expected.sent, &expected.received));
    assert!(outcome.memories == expected.memories, "the memories differ");
    assert_clean(&[&a, &b]);
}

fn config(cases: u32) -> ProptestConfig {
    let cases = tier(cases / 10, cases, 20 * cases);
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 300, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(150))]

    #[test]
    fn queues_do_what_the_model_does(list in requests(), drive in drive()) {
        check(&list, &drive, None, Left::Nobody);
    }
}

proptest! {
    #![proptest_config(config(100))]

    #[test]
    fn faults_of_the_network_change_nothing(list in requests(), drive in drive(), plan in faults()) {
        check(&list, &drive, Some(plan), Left::Nobody);
    }
}

/// Much of one fault, or some of each.
fn faults() -> impl Strategy<Value = FaultPlan> {
    let micros = Duration::from_micros;
    let rates = prop_oneof![
        2 => Just((0.02, 0.05, 0.05, (0.02, micros(100)))),
        1 => Just((0.05, 0.0, 0.0, (0.0, micros(0)))),
        1 => Just((0.0, 0.3, 0.0, (0.0, micros(0)))),
        1 => Just((0.0, 0.0, 0.2, (0.0, micros(0)))),
        1 => Just((0.0, 0.0, 0.0, (0.2, micros(300)))),
    ];
    (any::<u64>(), rates).prop_map(|(seed, (drop, duplicate, reorder, delay))| FaultPlan {
        seed,
        drop,
        duplicate,
        reorder,
        delay,
        ..FaultPlan::default()
    })
}

fn left() -> impl Strategy<Value = Left> {
    let bytes = prop_oneof![Just(1usize), 1usize..3000, Just(usize::MAX)];
    let rate = |most: u64| prop_oneof![Just(0u64), 0..most];
    let habits = (any::<u64>(), any::<bool>(), rate(200), rate(20), any::<bool>());
    let engine = (habits, bytes).prop_map(|((seed, shuffles, pause, fails, stages), bytes)| {
        Left::Engine(Habits { seed, shuffles, pause, fails, stages }, bytes)
    });
    prop_oneof![2 => engine, 1 => (1usize..3000).prop_map(Left::Receiver)]
}

proptest! {
    #![proptest_config(config(150))]

    #[test]
    fn payload_left_to_others_is_the_same(list in requests(), drive in drive(), left in left()) {
        check(&list, &drive, None, left);
    }
}

proptest! {
    #![proptest_config(config(100))]

    #[test]
    fn faults_change_nothing_where_payload_is_left_to_others(
        list in requests(), drive in drive(), left in left(), plan in faults()
    ) {
        check(&list, &drive, Some(plan), left);
    }
}

/// Bytes of memory on each side.
const REGION: usize = 48 << 10;
const INLINE: usize = 100;

/// Parts of a region, in list order: offset and length.
type Parts = Vec<(usize, usize)>;

#[derive(Clone, Debug)]
enum Data {
    Parts(Parts),
    Inline(Vec<u8>),
}

#[derive(Clone, Debug)]
enum What {
    /// With the buffers of the receive it meets.
    Send(Data, Parts),
    /// To this offset.
    Write(Data, usize),
    Read(Parts, usize),
    CompareSwap {
        word: usize,
        compare: Option<u64>,
        swap: u64,
        result: usize,
    },
    FetchAdd {
        word: usize,
        add: u64,
        result: usize,
    },
    Nop,
}

#[derive(Clone, Debug)]
struct Request {
    what: What,
    imm: Option<u32>,
    fence: bool,
}

/// How the list is driven.
#[derive(Clone, Debug)]
struct Drive {
    max_send_wr: usize,
    max_recv_wr: usize,
    batch: usize,
    /// Polls between two posts, in turn.
    polls: Vec<usize>,
    by_stream: bool,
    two_hcas: bool,
}

fn total(parts: &[(usize, usize)]) -> usize {
    parts.iter().map(|p| p.1).sum()
}

fn parts(min: usize) -> impl Strategy<Value = Parts> {
    let len = prop_oneof![4 => 0usize..70, 3 => 0usize..3000, 1 => 0usize..13_600];
    let part = (0..REGION, len).prop_map(|(at, len)| (at.min(REGION - len), len));
    prop::collection::vec(part, min..=3)
}

fn data() -> impl Strategy<Value = Data> {
    prop_oneof![
        3 => parts(0).prop_map(Data::Parts),
        1 => prop::collection::vec(any::<u8>(), 0..=INLINE).prop_map(Data::Inline),
    ]
}

impl Data {
    fn len(&self) -> usize {
        match self {
            Data::Parts(parts) => total(parts),
            Data::Inline(bytes) => bytes.len(),
        }
    }
}

/// Makes `parts` hold `len` bytes: the last one grows.
fn grown(mut parts: Parts, len: usize) -> Parts {
    let missing = len.saturating_sub(total(&parts));
    if missing > 0 {
        let (at, last) = parts.pop().unwrap_or((0, 0));
        let last = last + missing;
        parts.push((at.min(REGION - last), last));
    }
    parts
}

fn what() -> impl Strategy<Value = What> {
    let word = || (0..16usize).prop_map(|i| 8 * i);
    let result = 0..REGION - 8;
    prop_oneof![
        3 => (data(), parts(0)).prop_map(|(d, to)| { let to = grown(to, d.len()); What::Send(d, to) }),
        3 => (data(), 0..REGION).prop_map(|(d, at)| { let at = at.min(REGION - d.len()); What::Write(d, at) }),
        2 => (parts(1), 0..REGION).prop_map(|(to, at)| {
            let to = grown(to.clone(), total(&to).max(1));
            let at = at.min(REGION - total(&to));
            What::Read(to, at)
        }),
        1 => (word(), prop::option::of(any::<u64>()), any::<u64>(), result.clone())
            .prop_map(|(word, compare, swap, result)| What::CompareSwap { word, compare, swap, result }),
        1 => (word(), any::<u64>(), result).prop_map(|(word, add, result)| What::FetchAdd { word, add, result }),
        1 => Just(What::Nop),
    ]
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let one = (what(), prop::option::of(any::<u32>()), prop::bool::weighted(0.1))
        .prop_map(|(what, imm, fence)| Request { what, imm, fence });
    prop::collection::vec(one, 1..60).prop_map(|mut list| {
        fence_hazards(&mut list);
        list
    })
}

fn drive() -> impl Strategy<Value = Drive> {
    (1usize..6, 1usize..6, 1usize..5, prop::collection::vec(0usize..4, 1..6), any::<bool>(), any::<bool>())
        .prop_map(|(max_send_wr, max_recv_wr, batch, polls, by_stream, two_hcas)| Drive {
            max_send_wr,
            max_recv_wr,
            batch: batch.min(max_send_wr),
            polls,
            by_stream,
            two_hcas,
        })
}

fn ranges(parts: &[(usize, usize)]) -> Vec<Range<usize>> {
    parts.iter().map(|&(at, len)| at..at + len).collect()
}

fn meet(a: &[Range<usize>], b: &[Range<usize>]) -> bool {
    a.iter().any(|x| b.iter().any(|y| x.start < y.end && y.start < x.end))
}

/// READs and atomics are not ordered against what follows them: where that matters a legal list has a fence.
fn fence_hazards(list: &mut [Request]) {
    let (mut landing, mut read) = (vec![], vec![]);
    for request in list {
        let (from, to) = match &request.what {
            What::Send(Data::Parts(from), to) => (ranges(from), ranges(to)),
            What::Send(Data::Inline(_), to) => (vec![], ranges(to)),
            What::Write(Data::Parts(from), at) => (ranges(from), ranges(&[(*at, total(from))])),
            What::Write(Data::Inline(bytes), at) => (vec![], ranges(&[(*at, bytes.len())])),
            What::CompareSwap { word, .. } | What::FetchAdd { word, .. } => (vec![], ranges(&[(*word, 8)])),
            What::Read(..) | What::Nop => (vec![], vec![]),
        };
        request.fence |= meet(&from, &landing) || meet(&to, &read);
        if request.fence {
            (landing, read) = (vec![], vec![]);
        }
        match &request.what {
            What::Read(to, at) => {
                landing.extend(ranges(to));
                read.push(*at..at + total(to));
            }
            What::CompareSwap { result, .. } | What::FetchAdd { result, .. } => {
                landing.push(*result..result + 8)
            }
            _ => {}
        }
    }
}

/// Both memories, and the completions of both sides, after the list was done in order.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    memories: [Vec<u8>; 2],
    sent: Vec<(u64, Opcode, usize)>,
    received: Vec<(u64, CqeOpcode, usize, Option<u32>)>,
}

fn start(seed: usize) -> Vec<u8> {
    pattern(REGION, seed)
}

fn gather(memory: &[u8], data: &Data) -> Vec<u8> {
    match data {
        Data::Inline(bytes) => bytes.clone(),
        Data::Parts(parts) => parts.iter().flat_map(|&(at, len)| memory[at..at + len].to_vec()).collect(),
    }
}

fn scatter(memory: &mut [u8], parts: &[(usize, usize)], mut bytes: &[u8]) {
    for &(at, len) in parts {
        let (now, later) = bytes.split_at(len.min(bytes.len()));
        memory[at..at + now.len()].copy_from_slice(now);
        bytes = later;
    }
}

/// Also the word that each compare-and-swap found.
fn model(list: &[Request]) -> (Outcome, Vec<u64>) {
    let mut words = vec![0; list.len()];
    let mut outcome = Outcome { memories: [start(1), start(2)], ..Outcome::default() };
    let [a, b] = &mut outcome.memories;
    for (i, request) in list.iter().enumerate() {
        let imm = request.imm;
        let recv_id = outcome.received.len() as u64;
        let mut receive = |opcode, len| outcome.received.push((recv_id, opcode, len, imm));
        let (opcode, len) = match &request.what {
            What::Send(data, to) => {
                let bytes = gather(a, data);
                scatter(b, to, &bytes);
                let of = |with, without| if imm.is_some() { with } else { without };
                receive(of(CqeOpcode::RESP_SEND_IMM, CqeOpcode::RESP_SEND), bytes.len());
                (if imm.is_some() { Opcode::SEND_IMM } else { Opcode::SEND }, 0)
            }
            What::Write(data, at) => {
                let bytes = gather(a, data);
                scatter(b, &[(*at, bytes.len())], &bytes);
                if imm.is_some() {
                    receive(CqeOpcode::RESP_WR_IMM, bytes.len());
                }
                (if imm.is_some() { Opcode::RDMA_WRITE_IMM } else { Opcode::RDMA_WRITE }, 0)
            }
            What::Read(to, at) => {
                scatter(a, to, &b[*at..at + total(to)]);
                (Opcode::RDMA_READ, total(to))
            }
            What::CompareSwap { word, swap, result, .. } => {
                let (old, new) = (value(b, *word), *swap);
                words[i] = old;
                if compare(&request.what, old) == old {
                    scatter(b, &[(*word, 8)], &new.to_ne_bytes());
                }
                scatter(a, &[(*result, 8)], &old.to_ne_bytes());
                (Opcode::ATOMIC_CS, 8)
            }
            What::FetchAdd { word, add, result } => {
                let old = value(b, *word);
                scatter(b, &[(*word, 8)], &old.wrapping_add(*add).to_ne_bytes());
                scatter(a, &[(*result, 8)], &old.to_ne_bytes());
                (Opcode::ATOMIC_FA, 8)
            }
            What::Nop => (Opcode::NOP, 0),
        };
        outcome.sent.push((i as u64, opcode, len));
    }
    (outcome, words)
}

fn value(memory: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(memory[at..at + 8].try_into().unwrap())
}

/// `None` compares with what is there, so that it hits.
fn compare(what: &What, there: u64) -> u64 {
    match what {
        What::CompareSwap { compare, .. } => compare.unwrap_or(there),
        _ => unreachable!("only a compare-and-swap compares"),
    }
}

/// The list in real queues.
struct Run<'a> {
    a: &'a Side,
    b: &'a Side,
    list: &'a [Request],
    words: Vec<u64>,
    stream: Option<Stream>,
    next: usize,
    next_recv: usize,
    waited: Vec<(u64, Completion)>,
    outcome: Outcome,
}

fn sges(side: &Side, parts: &[(usize, usize)]) -> Vec<Sge> {
    parts.iter().map(|&(at, len)| side.mr.sge(at, len).unwrap()).collect()
}

impl Run<'_> {
    fn receives(&self) -> Vec<Parts> {
        let of = |r: &Request| match &r.what {
            What::Send(_, to) => Some(to.clone()),
            What::Write(..) if r.imm.is_some() => Some(vec![]),
            _ => None,
        };
        self.list.iter().filter_map(of).collect()
    }

    /// Posts up to `count` requests at once. Returns whether there was room.
    fn post(&mut self, count: usize) -> bool {
        let end = (self.next + count).min(self.list.len());
        if self.next == end {
            return false;
        }
        let now = self.next..end;
        let lists: Vec<_> = self.list[now.clone()]
            .iter()
            .map(|r| match &r.what {
                What::Send(Data::Parts(p), _) | What::Write(Data::Parts(p), _) | What::Read(p, _) => {
                    sges(self.a, p)
                }
                What::CompareSwap { result, .. } | What::FetchAdd { result, .. } => {
                    sges(self.a, &[(*result, 8)])
                }
                _ => vec![],
            })
            .collect();
        let remote = |at: usize| self.b.mr.remote(at).unwrap();
        let wrs: Vec<_> = now
            .clone()
            .zip(&lists)
            .map(|(i, sges)| {
                let request = &self.list[i];
                let wr = match &request.what {
                    What::Send(Data::Inline(bytes), _) => SendWr::send_inline(bytes),
                    What::Send(..) => SendWr::send(sges),
                    What::Write(Data::Inline(bytes), at) => SendWr::write_inline(remote(*at), bytes),
                    What::Write(_, at) => SendWr::write(remote(*at), sges),
                    What::Read(_, at) => SendWr::read(remote(*at), sges),
                    what @ What::CompareSwap { word, swap, .. } => {
                        SendWr::compare_swap(remote(*word), compare(what, self.words[i]), *swap, sges[0])
                    }
                    What::FetchAdd { word, add, .. } => SendWr::fetch_add(remote(*word), *add, sges[0]),
                    What::Nop => SendWr::nop(),
                };
                let wr = if let Some(imm) = request.imm { wr.imm(imm) } else { wr };
                if request.fence { wr.fence().id(i as u64) } else { wr.id(i as u64) }
            })
            .collect();
        let posted = match &self.stream {
            None => self.a.qp.post_send(&wrs).map(drop),
            Some(stream) => {
                let mut batch = Batch::new();
                let add = batch.sends(&self.a.qp, &wrs).and_then(|_| batch.wait_all_sends(&self.a.qp));
                add.and_then(|last| {
                    stream.submit(&mut batch)?;
                    self.waited.push((end as u64 - 1, last));
                    Ok(())
                })
            }
        };
        match posted {
            Ok(()) => self.next = end,
            Err(Error::QueueFull { .. }) => return false,
            Err(other) => panic!("{other}"),
        }
        true
    }

    fn poll(&mut self) {
        let len = |wc: &Wc| wc.byte_len as usize;
        if self.stream.is_none()
            && let Some(wc) = self.a.qp.poll_send()
        {
            let wc = wc.ok().unwrap();
            self.outcome.sent.push((wc.wr_id, wc.send_opcode, len(&wc)));
        }
        if let Some(wc) = self.b.qp.poll_recv() {
            let wc = wc.ok().unwrap();
            self.outcome.received.push((wc.wr_id, wc.opcode, len(&wc), wc.imm));
        }
        self.a.qp.check().unwrap();
    }

    fn go(mut self, drive: &Drive, expected: &Outcome) -> Outcome {
        let receives = self.receives();
        let end = Instant::now() + PATIENCE;
        let mut polls = drive.polls.iter().cycle();
        loop {
            while let Some(parts) = receives.get(self.next_recv) {
                let sges = sges(self.b, parts);
                let wr = RecvWr::new(&sges).id(self.next_recv as u64);
                match self.b.qp.post_recv(&[wr]) {
                    Ok(_) => self.next_recv += 1,
                    Err(Error::QueueFull { .. }) => break,
                    Err(other) => panic!("{other}"),
                }
            }
            let had_room = self.post(drive.batch);
            for _ in 0..polls.next().copied().unwrap_or(1).max(usize::from(!had_room)) {
                self.poll();
            }
            let sent = if self.stream.is_some() { self.next } else { self.outcome.sent.len() };
            if (sent, self.outcome.received.len()) == (expected.sent.len(), expected.received.len()) {
                break;
            }
            assert!(Instant::now() < end, "stuck at {:?} of {:?}", self.outcome, expected);
        }
        if let Some(stream) = &self.stream {
            stream.synchronize(PATIENCE).unwrap();
            for (id, last) in &self.waited {
                match last.status() {
                    Ok(Some(wc)) => assert_eq!(wc.wr_id, *id),
                    Err(Error::Forgotten { .. }) => {}
                    other => panic!("{other:?}"),
                }
            }
            // Each completion went to a wait; the last one says that all are there.
            self.outcome.sent = expected.sent.clone();
        }
        assert_eq!((self.a.qp.poll_send(), self.b.qp.poll_recv()), (None, None), "a completion too many");
        self.outcome.memories = [self.a, self.b].map(|side| side.memory().to_vec());
        self.outcome
    }
}

/// Writes, one at a time, on a fresh HCA that meets the faults of `seed`: what was counted.
fn counted(seed: u64) -> gdsync::hca::HcaStats {
    let faults = FaultPlan { seed, drop: 0.1, duplicate: 0.1, ..FaultPlan::default() };
    let context = Context::soft(&SoftHcaConfig { strict: true, faults, ..SoftHcaConfig::default() }).unwrap();
    // Far longer than one write takes: only a lost packet lets the time run out.
    let side = || Side::new(&context, 256, |q| q.timeout(11).retry_cnt(7));
    let (a, b) = connect(side(), side());
    for i in 0..100u8 {
        a.qp.post_send(&[SendWr::write_inline(b.mr.remote(usize::from(i)).unwrap(), &[i])]).unwrap();
        a.qp.send_cq().wait(PATIENCE).unwrap().ok().unwrap();
    }
    assert!((0..100).eq(b.memory().to_vec()[..100].iter().copied()));
    // A doubled packet may still be on its way.
    while context.progress() {}
    context.stats()
}

#[test]
fn same_seed_meets_the_same_faults() {
    own_process!();
    let known = |s: gdsync::hca::HcaStats| (s.packets_faulted, s.retransmissions);
    for seed in 1..4 {
        let first = known(counted(seed));
        assert!(first.0 > 0 && first.1 > 0, "seed {seed}: {first:?}");
        assert_eq!(first, known(counted(seed)), "seed {seed}");
    }
}
