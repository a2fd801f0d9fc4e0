//! Two processes, each with the stand-in.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use gdsync::mlx5::{CqeOpcode, Payload, SendOp, Syndrome};
use rdma_core_sys::verbs::ibv_gid;

use crate::client::{Bed, Buffer, Queue};

const ROLE: &str = "GDSYNC_STANDIN_TEST_ROLE";
const ROUNDS: u64 = 200;

/// What a peer must know: GID, queue pair.
fn address(bed: &Bed, queue: &Queue) -> String {
    // SAFETY: all fields of the union are plain bytes.
    let gid = u128::from_be_bytes(unsafe { bed.gid(1).gid.raw });
    format!("{gid:x} {:x}", queue.qpn)
}

fn parse(line: &str) -> (ibv_gid, u32) {
    let (gid, qpn) = line.trim().split_once(' ').expect("two words");
    let raw = u128::from_str_radix(gid, 16).unwrap().to_be_bytes();
    (ibv_gid { raw }, u32::from_str_radix(qpn, 16).unwrap())
}

/// Not a test of its own: the other process.
#[test]
fn child() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let bed = Bed::new();
    let mut queue = Queue::new(&bed);
    let buffer = Buffer::new(&bed, 64);
    println!("\naddress {}", address(&bed, &queue));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let (gid, qpn) = parse(&line);
    queue.connect(&bed, gid, qpn);
    queue.post_recv(&[buffer.sge(0, 8)]);
    println!("ready");
    for _ in 0..ROUNDS {
        assert_eq!(queue.recv_cq.wait().opcode, CqeOpcode::RESP_SEND);
        queue.post_recv(&[buffer.sge(0, 8)]);
        let word = buffer.memory.word64(0).unwrap();
        buffer.memory.word64(8).unwrap().store(word.load() + 1);
        queue.post(&SendOp::Send { payload: Payload::Sges(&[buffer.sge(8, 8)]), imm: None });
        assert_eq!(queue.send_cq.wait().opcode, CqeOpcode::REQ);
    }
    println!("done");
}

struct Peer {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It has ended already, unless the test fails.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Peer {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::child", "--nocapture", "--test-threads=1"])
            .env(ROLE, "pong")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// The next line that begins so, without its beginning.
    fn line(&mut self, begin: &str) -> String {
        self.lines
            .by_ref()
            .map(Result::unwrap)
            .find_map(|line| line.strip_prefix(begin).map(str::to_owned))
            .unwrap()
    }
}

#[test]
fn two_processes_play_ping_pong() {
    let bed = Bed::new();
    let mut queue = Queue::new(&bed);
    let buffer = Buffer::new(&bed, 64);
    let mut peer = Peer::start();
    let (gid, qpn) = parse(&peer.line("address "));
    writeln!(peer.child.stdin.as_mut().unwrap(), "{}", address(&bed, &queue)).unwrap();
    queue.connect(&bed, gid, qpn);
    peer.line("ready");
    let (word, answer) = (buffer.memory.word64(0).unwrap(), buffer.memory.word64(8).unwrap());
    for round in 0..ROUNDS {
        queue.post_recv(&[buffer.sge(8, 8)]);
        word.store(round * 10);
        queue.post(&SendOp::Send { payload: Payload::Sges(&[buffer.sge(0, 8)]), imm: None });
        assert_eq!(queue.recv_cq.wait().byte_cnt, 8);
        assert_eq!(answer.load(), round * 10 + 1);
        queue.send_cq.wait();
    }
    peer.line("done");
    queue.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}

#[test]
fn sends_to_a_peer_that_is_gone_end_with_a_retry_error() {
    let bed = Bed::new();
    let mut queue = Queue::new(&bed);
    let buffer = Buffer::new(&bed, 64);
    let mut peer = Peer::start();
    let (gid, qpn) = parse(&peer.line("address "));
    writeln!(peer.child.stdin.as_mut().unwrap(), "{}", address(&bed, &queue)).unwrap();
    queue.connect(&bed, gid, qpn);
    peer.line("ready");
    drop(peer);
    queue.post(&SendOp::Send { payload: Payload::Sges(&[buffer.sge(0, 8)]), imm: None });
    let failed = queue.send_cq.wait();
    assert_eq!((failed.opcode, failed.syndrome), (CqeOpcode::REQ_ERR, Syndrome::RETRY_EXC_ERR));
    queue.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}
