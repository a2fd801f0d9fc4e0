//! A queue pair of ours against `ibv_rc_pingpong` of rdma-core (package ibverbs-utils), over an RDMA device of the machine.
//!
//! Skips, and says so, without a device or without the program. Its side of the exchange: a TCP connection, on which both send
//! `lid:qpn:psn:gid` in hexadecimal with a zero byte behind, the client first, and the client then sends `done`.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, Side, bytes, named_device, pattern, receive, received, send, sent};
use gdsync::Device;
use gdsync::hca::Gid;
use gdsync::verbs::{QpAddress, QpBuilder};
use gdsync_testkit::process::free_port;

const PROGRAM: &str = "ibv_rc_pingpong";
/// Messages each way.
const ROUNDS: usize = 200;
/// Bytes of a message: more than a packet holds.
const LEN: usize = 3000;
/// Bytes of an introduction, with its zero.
const WORDS: usize = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1;

/// Our side, the device's name and the index of its GID.
fn side() -> Option<(Side, String, u32)> {
    let Some(context) = named_device() else {
        println!("skipped: GDSYNC_TEST_DEVICE names no RDMA device");
        return None;
    };
    if Command::new(PROGRAM).arg("--help").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        println!("skipped: {PROGRAM} is not installed (ibverbs-utils)");
        return None;
    }
    let name = std::env::var("GDSYNC_TEST_DEVICE").unwrap();
    let gid = context.gid();
    let device = Device::find(Some(&name)).unwrap();
    let gids = device.ports().iter().flat_map(|port| &port.gids);
    let index = gids.filter(|entry| entry.gid == gid).map(|entry| entry.index).next_back().unwrap();
    // As the program builds its own.
    let build = |q: QpBuilder| q.path_mtu(1024).rd_atomic(1).rnr_retry(7).max_recv_wr(64);
    Some((Side::new(&context, 4 * LEN, build), name, index))
}

/// The program, ended when this goes.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Program {
    fn start(device: &str, gid_index: u32, port: u16, server: Option<&str>) -> Self {
        let mut command = Command::new(PROGRAM);
        command.args(["-d", device, "-g", &gid_index.to_string(), "-p", &port.to_string()]);
        command.args(["-n", &ROUNDS.to_string(), "-s", &LEN.to_string(), "-r", "16"]).args(server);
        Self(command.stdout(Stdio::null()).spawn().unwrap())
    }

    /// It ends by itself, satisfied.
    fn finish(&mut self) {
        let end = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < end, "the program does not end");
            thread::sleep(Duration::from_millis(5));
        };
        assert!(status.success(), "{status}");
    }
}

fn introduction(address: &QpAddress) -> Vec<u8> {
    let gid: String = address.gid.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut text = format!("{:04x}:{:06x}:{:06x}:{gid}", address.lid, address.qpn, address.psn).into_bytes();
    text.push(0);
    assert_eq!(text.len(), WORDS);
    text
}

fn read_introduction(stream: &mut TcpStream) -> QpAddress {
    let mut bytes = [0; WORDS];
    stream.read_exact(&mut bytes).unwrap();
    let text = std::str::from_utf8(&bytes[..WORDS - 1]).unwrap();
    let words: Vec<_> = text.split(':').collect();
    let number = |word: &str| u32::from_str_radix(word, 16).unwrap();
    let mut gid = Gid([0; 16]);
    for (byte, pair) in gid.0.iter_mut().zip(words[3].as_bytes().as_chunks::<2>().0) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    }
    let lid = u16::try_from(number(words[0])).unwrap();
    QpAddress::new(gid, number(words[1]), number(words[2])).with_lid(lid)
}

fn post(side: &Side, n: usize) {
    receive(side, n as u64, LEN, LEN);
}

fn ask(side: &Side, n: usize) {
    side.memory().write(0, &pattern(LEN, n)).unwrap();
    send(side, n as u64, 0, LEN);
}

/// The next message, which is to hold these bytes.
fn assert_received(side: &Side, n: usize, data: &[u8]) {
    let wc = received(side).ok().unwrap();
    assert_eq!((wc.wr_id, wc.byte_len as usize), (n as u64, LEN));
    assert!(bytes(side, LEN, LEN) == data, "message {n} arrived wrong");
}

#[test]
fn we_ask_and_the_program_answers() {
    let Some((side, device, index)) = side() else { return };
    let port = free_port();
    let mut program = Program::start(&device, index, port, None);
    let end = Instant::now() + PATIENCE;
    let mut stream = loop {
        match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    };
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&introduction(&side.qp.address())).unwrap();
    let remote = read_introduction(&mut stream);
    side.qp.init().unwrap();
    post(&side, 0);
    side.qp.connect(remote).unwrap();
    stream.write_all(b"done\0").unwrap();
    for n in 0..ROUNDS {
        ask(&side, n);
        // It answers from the buffer that it received into.
        assert_received(&side, n, &pattern(LEN, n));
        sent(&side).ok().unwrap();
        if n + 1 < ROUNDS {
            post(&side, n + 1);
        }
    }
    program.finish();
}

#[test]
fn program_asks_and_we_answer() {
    let Some((side, device, index)) = side() else { return };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut program = Program::start(&device, index, port, Some("127.0.0.1"));
    listener.set_nonblocking(true).unwrap();
    let start = Instant::now();
    let mut stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        if let Some(status) = program.0.try_wait().unwrap() {
            panic!("{PROGRAM} ended before it came, {status}");
        }
        assert!(start.elapsed() < PATIENCE, "{PROGRAM} did not come");
        thread::sleep(Duration::from_millis(10));
    };
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let remote = read_introduction(&mut stream);
    side.qp.init().unwrap();
    post(&side, 0);
    side.qp.connect(remote).unwrap();
    stream.write_all(&introduction(&side.qp.address())).unwrap();
    let mut done = [0; 5];
    stream.read_exact(&mut done).unwrap();
    for n in 0..ROUNDS {
        // First what it fills its buffer with, then what we sent.
        let expected = if n == 0 { vec![0x7b; LEN] } else { pattern(LEN, n - 1) };
        assert_received(&side, n, &expected);
        if n + 1 < ROUNDS {
            post(&side, n + 1);
        }
        ask(&side, n);
        sent(&side).ok().unwrap();
    }
    program.finish();
}
