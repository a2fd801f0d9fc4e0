//! Between two processes, on one GPU or on two. CUDA IPC carries what it can.

use gdsync::cuda::Gpu;
use gdsync::verbs::{Access, Mr, RecvWr, RemoteAddr, SendWr};

use super::Blocked;
use super::kinds::{Kind, Role, alone, data, get, lengths, put, region, size};
use crate::child::{self, own_process};
use crate::common::{Side, assert_clean, hca, is_device_named, received, sent};
use crate::place::shared as gpu;

const KINDS: [Kind; 6] = [Kind::Plain, Kind::Pinned, Kind::Mapped, Kind::Malloc, Kind::Vmm, Kind::Pool];
/// One process: a queue pair, and memory of every kind that there is.
struct Here {
    side: Side,
    gpu: Gpu,
    mrs: Vec<Option<Mr>>,
}

impl Here {
    fn on(gpu: Gpu) -> Self {
        let side = Side::new(&hca(), 4096, |q| q.timeout(18));
        let register = |kind| {
            let memory = region(&gpu, kind, Role::From)?;
            Some(side.pd.register(&memory, Access::all()).unwrap())
        };
        let mrs = KINDS.into_iter().map(register).collect();
        Self { side, gpu, mrs }
    }

    fn mr(&self, kind: usize) -> &Mr {
        self.mrs[kind].as_ref().unwrap()
    }

    fn fill(&self, kind: usize, len: usize, seed: usize) {
        put(&self.gpu, self.mr(kind).memory(), 1, &data(len, seed));
    }

    fn holds(&self, kind: usize, len: usize, seed: usize) -> bool {
        get(&self.gpu, self.mr(kind).memory(), 1, len) == data(len, seed)
    }
}

/// Not a test of its own: the other process, whose role is its GPU. It does what it is told, a line at a time.
#[test]
fn child() {
    let Some(ordinal) = child::role() else { return };
    let here = Here::on(gpu(ordinal.parse().unwrap()).unwrap());
    let mut out = format!("peer {}", here.side.qp.address());
    for mr in &here.mrs {
        let remote = mr.as_ref().map(|mr| mr.remote(1).unwrap());
        let RemoteAddr { addr, rkey } = remote.unwrap_or(RemoteAddr { addr: 0, rkey: 0 });
        out += &format!(" {addr} {rkey}");
    }
    println!("{out}");
    let mut blocked = None;
    for line in std::io::stdin().lines().map(Result::unwrap) {
        let words: Vec<_> = line.split(' ').collect();
        let number = |i: usize| words[i].parse::<usize>().unwrap();
        match words[0] {
            "connect" => here.side.qp.connect(words[1].parse().unwrap()).unwrap(),
            "post" => {
                let sges = [here.mr(number(1)).sge(1, number(2)).unwrap()];
                here.side.qp.post_recv(&[RecvWr::new(&sges).id(1)]).unwrap();
            }
            "receive" => assert_eq!(received(&here.side).syndrome, None),
            "fill" => here.fill(number(1), number(2), number(3)),
            "check" => assert!(here.holds(number(1), number(2), number(3)), "{line}"),
            "block" => blocked = Some(Blocked::on(&here.gpu, number(1))),
            "release" => drop(blocked.take()),
            "stats" => {
                let stats = here.side.context.stats();
                println!("stats {} {}", stats.by_reference, stats.references_refused);
            }
            other => panic!("'{other}'"),
        }
        println!("done");
    }
    assert_clean(&[&here.side]);
}

struct Peer {
    process: child::Peer,
    remotes: Vec<RemoteAddr>,
}

impl Peer {
    fn start(ordinal: i32, here: &Here) -> Self {
        let mut process = child::Peer::spawn("cuda_payload::processes::child", &ordinal.to_string());
        let line = process.hear("peer ");
        let words: Vec<_> = line.split_whitespace().collect();
        here.side.qp.connect(words[1].parse().unwrap()).unwrap();
        let remote =
            |pair: &[&str]| RemoteAddr { addr: pair[0].parse().unwrap(), rkey: pair[1].parse().unwrap() };
        let mut peer = Self { process, remotes: words[2..].chunks(2).map(remote).collect() };
        peer.does(&format!("connect {}", here.side.qp.address()));
        peer
    }

    fn does(&mut self, what: &str) {
        self.process.tell(what);
        self.process.hear("done");
    }

    fn has(&self, kind: usize) -> bool {
        self.remotes[kind].rkey != 0
    }

    /// Messages received by reference, and references refused.
    fn stats(&mut self) -> (u64, u64) {
        self.process.tell("stats");
        let line = self.process.hear("stats ");
        self.process.hear("done");
        let mut words = line.trim().split(' ').skip(1).map(|word| word.parse().unwrap());
        (words.next().unwrap(), words.next().unwrap())
    }
}

/// A message, a write and a read of `len` bytes.
fn exchange(here: &Here, peer: &mut Peer, from: usize, to: usize, len: usize, seed: usize) {
    let what = format!("{:?} to {:?}, {len} bytes", KINDS[from], KINDS[to]);
    let sge = [here.mr(from).sge(1, len).unwrap()];
    let remote = peer.remotes[to];
    let ended = || assert_eq!(sent(&here.side).syndrome, None, "{what}");
    here.fill(from, len, seed);
    peer.does(&format!("post {to} {len}"));
    here.side.qp.post_send(&[SendWr::send(&sge)]).unwrap();
    ended();
    peer.does("receive");
    peer.does(&format!("check {to} {len} {seed}"));
    here.fill(from, len, seed + 1);
    here.side.qp.post_send(&[SendWr::write(remote, &sge)]).unwrap();
    ended();
    peer.does(&format!("check {to} {len} {}", seed + 1));
    peer.does(&format!("fill {to} {len} {}", seed + 2));
    here.side.qp.post_send(&[SendWr::read(remote, &sge)]).unwrap();
    ended();
    assert!(here.holds(from, len, seed + 2), "{what}, read");
}

fn all_pairs(here: &Here, peer: &mut Peer) {
    let mut seed = 0;
    for from in (0..KINDS.len()).filter(|&kind| here.mrs[kind].is_some()) {
        for to in (0..KINDS.len()).filter(|&kind| peer.has(kind)).collect::<Vec<_>>() {
            for len in lengths(KINDS[from], KINDS[to]) {
                exchange(here, peer, from, to, len, seed);
                seed += 3;
            }
        }
    }
    assert_clean(&[&here.side]);
}

/// All tests between two processes, which are the same in all of them: to start one and to make its memory takes longer than
/// most tests.
fn play(ordinals: [i32; 2]) {
    let _alone = alone();
    own_process!();
    let Some(first) = gpu(ordinals[0]) else { return };
    if gpu(ordinals[1]).is_none() {
        return eprintln!("skipped: fewer than two GPUs");
    }
    let here = Here::on(first);
    let mut peer = Peer::start(ordinals[1], &here);
    every_kind_to_every_kind(&here, &mut peer);
    while_six_streams_wait_on_both_sides(&here, &mut peer);
}

#[test]
fn on_one_gpu() {
    play([0, 0]);
}

#[test]
fn between_two_gpus() {
    play([0, 1]);
}

fn every_kind_to_every_kind(here: &Here, peer: &mut Peer) {
    all_pairs(here, peer);
    let (by_reference, refused) = peer.stats();
    eprintln!("{by_reference} messages by reference, {refused} references refused");
    // Other devices, such as TCP, send no references.
    assert!(by_reference > 0 || is_device_named(), "CUDA IPC was never used");
}

fn while_six_streams_wait_on_both_sides(here: &Here, peer: &mut Peer) {
    // Once without: registrations and openings may wait for streams, copies must not.
    exchange(here, peer, 3, 3, size() - 7, 0);
    peer.does("block 6");
    let blocked = Blocked::on(&here.gpu, 6);
    let sge = [here.mr(3).sge(1, size() - 7).unwrap()];
    for _ in 0..20 {
        let wr = SendWr::write(peer.remotes[3], &sge);
        here.side.qp.post_send(&[wr]).unwrap();
        assert_eq!(sent(&here.side).syndrome, None);
    }
    drop(blocked);
    peer.does("release");
}
