//! TCP links between ports: greeting, strangers, frames, death of a peer.

use std::net::{Ipv4Addr, Shutdown};

use super::*;
use crate::wire::Piece;
use gdsync_device::memory::Memory;

const TIMEOUT: Duration = Duration::from_secs(20);

fn port() -> TcpPort {
    TcpPort::open(Ipv4Addr::LOCALHOST.into(), None).unwrap()
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn over_tcp() -> Offer {
    Offer { carrier: TCP.into(), ..Offer::default() }
}

fn accepted(port: &TcpPort) -> FarEnds {
    let mut found = Vec::new();
    until("a link", || {
        found.extend(port.take_accepted());
        !found.is_empty()
    });
    found.remove(0)
}

fn linked(a: &TcpPort, b: &TcpPort) -> (FarEnds, FarEnds) {
    let near = a.connect(b.own(), TIMEOUT).unwrap().expect("no other link");
    let far = accepted(b);
    assert_eq!((near.peer, far.peer), (b.own(), a.own()));
    (near, far)
}

/// The next packet and its body.
fn next(rx: &mut FarRx) -> ([u8; 28], Vec<u8>) {
    let mut found = None;
    until("a packet", || {
        rx.set_ready();
        found = rx.peek();
        found.is_some()
    });
    let frame = found.unwrap();
    let body = rx.body(&frame).to_vec();
    rx.pop(&frame);
    (frame.header, body)
}

fn pattern(n: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (n.wrapping_mul(31) + i).to_le_bytes()[0]).collect()
}

#[test]
fn packets_of_all_sizes_arrive_in_order_both_ways() {
    const SIZES: [usize; 9] = [0, 1, 8, 24, 100, 4096, 16 << 10, 40 << 10, MAX_BODY];
    let (a, b) = (port(), port());
    let (mut near, mut far) = linked(&a, &b);
    for _ in 0..2 {
        let (from, to) = (&mut near, &mut far);
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                for n in 0..2000 {
                    let bytes = pattern(n, SIZES[n % SIZES.len()]);
                    let (ext, rest) = bytes.split_at(bytes.len().min(24));
                    let memory = Memory::alloc(rest.len().max(1)).unwrap();
                    memory.write(0, rest).unwrap();
                    let pieces = [Piece { memory: &memory, offset: 0, len: rest.len() }];
                    until("room", || from.tx.try_push(&[n.to_le_bytes()[0]; 28], ext, &pieces).unwrap());
                }
                until("the last byte leaves", || from.tx.flush());
            });
            for n in 0..2000_usize {
                let (header, body) = next(&mut to.rx);
                assert_eq!(header, [n.to_le_bytes()[0]; 28]);
                assert!(body == pattern(n, SIZES[n % SIZES.len()]), "packet {n}");
            }
            sender.join().unwrap();
        });
        std::mem::swap(&mut near, &mut far);
    }
    until("all are acknowledged", || near.tx.is_drained() && far.tx.is_drained());
}

#[test]
fn two_ports_that_connect_at_once_have_one_link() {
    for _ in 0..20 {
        let (a, b) = (port(), port());
        let start = std::sync::Barrier::new(2);
        let connect = |from: &TcpPort, to: &TcpPort| {
            start.wait();
            from.connect(to.own(), TIMEOUT).unwrap()
        };
        let made = std::thread::scope(|scope| {
            let other = scope.spawn(|| connect(&b, &a));
            [connect(&a, &b), other.join().unwrap()]
        });
        let [near, far] = made;
        assert!(near.is_some() != far.is_some(), "one of them");
        let (maker, taker) = if near.is_some() { (&a, &b) } else { (&b, &a) };
        let far_end = accepted(taker);
        assert_eq!(far_end.peer, maker.own());
        assert!(!maker.has_accepted() && !taker.has_accepted());
        // Neither makes another one while it lives.
        assert!(a.connect(b.own(), TIMEOUT).unwrap().is_none());
        assert!(b.connect(a.own(), TIMEOUT).unwrap().is_none());
        drop((near, far, far_end));
        linked(&a, &b);
    }
}

#[test]
fn a_peer_that_takes_nothing_costs_bounded_memory() {
    let (a, b) = (port(), port());
    let (mut near, mut far) = linked(&a, &b);
    let mut sent = 0;
    while near.tx.try_push(&[1; 28], &[7; 1000], &[]).unwrap() {
        sent += 1;
        assert!(sent < 1_000_000, "nothing limits it");
    }
    assert!(near.tx.is_alive() && !near.tx.is_drained());
    for n in 0..sent {
        assert_eq!(next(&mut far.rx).1, [7; 1000], "packet {n}");
        near.tx.flush();
    }
    assert!(near.tx.try_push(&[1; 28], &[], &[]).unwrap(), "there is room again");
}

#[test]
fn packets_sent_before_the_end_arrive_and_then_the_end_is_seen() {
    let (a, b) = (port(), port());
    let (mut near, mut far) = linked(&a, &b);
    near.tx.begin(0);
    // Not read: the end must not discard what is on its way in the other direction.
    assert!(far.tx.try_push(&[9; 28], &[0; 5000], &[]).unwrap());
    far.tx.flush();
    for n in 0..10 {
        assert!(near.tx.try_push(&[n; 28], &[n; 10_000], &[]).unwrap());
    }
    drop(near);
    for n in 0..10 {
        assert_eq!(next(&mut far.rx), ([n; 28], vec![n; 10_000]));
    }
    until("the end", || {
        assert!(!far.rx.has_packet());
        !far.tx.is_alive()
    });
    assert!(
        far.tx.try_push(&[0; 28], &[], &[]).unwrap() && far.tx.flush(),
        "packets for the dead are dropped"
    );
}

#[test]
fn a_port_that_nobody_serves_is_refused_in_words() {
    let gone = port().own();
    let error = port().connect(gone, TIMEOUT).unwrap_err().to_string();
    assert!(error.contains(&gone.to_string()) && error.contains("start it first"), "{error}");
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let silent = Peer::at(silent.local_addr().unwrap());
    let error = port().connect(silent, Duration::from_millis(50)).unwrap_err().to_string();
    assert!(error.contains(&silent.to_string()), "{error}");
}

#[test]
fn a_peer_that_answers_by_the_byte_is_given_up() {
    let slow = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let at = Peer::at(slow.local_addr().unwrap());
    let answers = std::thread::spawn(move || {
        let mut stream = slow.accept().unwrap().0;
        while stream.write_all(&[0]).is_ok() {
            std::thread::sleep(Duration::from_millis(30));
        }
    });
    let start = Instant::now();
    port().connect(at, Duration::from_millis(100)).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(3), "the timeout is of the whole greeting");
    answers.join().unwrap();
}

/// A stranger's connection to a port.
fn stranger(port: &TcpPort) -> TcpStream {
    stranger_at(1, port)
}

/// As [`stranger`], from this address of the loopback.
fn stranger_at(host: u8, port: &TcpPort) -> TcpStream {
    let from = Ipv4Addr::new(127, 0, 0, host).into();
    let stream = dial(from, port.own().address(), Instant::now() + TIMEOUT).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// Greets as a process that listens at `own_port`. Returns the verdict.
fn greet(mut stream: &TcpStream, port: &TcpPort, own_port: u16) -> [u8; 1] {
    let from = Peer { port: own_port, ..Peer::at(stream.local_addr().unwrap()) };
    let hello = Hello { to: port.own(), from, nonce: [3; NONCE], offer: over_tcp() }.to_bytes();
    stream.write_all(&hello).unwrap();
    let mut answer = [0; ANSWER];
    stream.read_exact(&mut answer).unwrap();
    let (proof, _) = greeting::check_answer(secret().unwrap(), &hello, &answer).unwrap();
    stream.write_all(&proof).unwrap();
    let mut verdict = [0];
    stream.read_exact(&mut verdict).unwrap();
    verdict
}

/// Whether the port has neither closed the connection nor sent anything.
fn is_open(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let is_open = matches!(stream.peek(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
    stream.set_nonblocking(false).unwrap();
    is_open
}

/// Whether the port closes a connection, whatever it answered before.
fn is_closed(mut stream: TcpStream) -> bool {
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn strangers_are_closed_and_the_job_goes_on() {
    let (a, b) = (port(), port());
    let hello = Hello { to: b.own(), from: a.own(), nonce: [3; NONCE], offer: over_tcp() };
    let good = hello.to_bytes();
    let mut wrong: Vec<Vec<u8>> = vec![vec![0xa5; 300], b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".repeat(12)];
    // Each field but the nonce and the offer, which may be any.
    for at in [0, 7, 8, 23, 24, 26, 41, 44, 47, 64] {
        let mut bytes = good;
        bytes[at] ^= 1;
        wrong.push(bytes.to_vec());
    }
    // A right hello, and a wrong proof.
    wrong.push([&good[..], &[0; PROOF]].concat());
    for bytes in wrong {
        let mut stream = stranger(&b);
        stream.write_all(&bytes).unwrap();
        assert!(is_closed(stream), "{bytes:?}");
    }
    // Those that say nothing, or nothing more in the middle or behind a hello, do not hold up others.
    let silent = [0, 30, HELLO].map(|said| {
        let mut stream = stranger(&b);
        stream.write_all(&good[..said]).unwrap();
        stream
    });
    let (mut near, mut far) = linked(&a, &b);
    assert!(near.tx.try_push(&[5; 28], b"hello", &[]).unwrap());
    near.tx.flush();
    assert_eq!(next(&mut far.rx), ([5; 28], b"hello".to_vec()));
    assert!(silent.into_iter().all(is_closed), "greetings end");
    assert!(b.take_accepted().is_empty(), "no stranger became a peer");
}

#[test]
fn idle_strangers_hold_few_descriptors() {
    let (a, b) = (port(), port());
    let strangers: Vec<_> = (0..4 * MAX_PENDING_GREETINGS).map(|_| stranger(&b)).collect();
    linked(&a, &b);
    until("all but a few are closed", || {
        strangers.iter().filter(|stream| is_open(stream)).count() <= MAX_PENDING_GREETINGS
    });
}

#[test]
fn a_flood_of_one_address_pushes_out_no_connection_of_another() {
    let b = port();
    let early = stranger(&b);
    let flood: Vec<_> = (0..3 * MAX_PENDING_GREETINGS).map(|_| stranger_at(2, &b)).collect();
    until("the flood is bounded", || {
        flood.iter().filter(|stream| is_open(stream)).count() < MAX_PENDING_GREETINGS
    });
    assert!(is_open(&early));
    assert_eq!(greet(&early, &b, 9), WELCOME);
}

#[test]
fn one_turn_accepts_few_connections() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let at = listener.local_addr().unwrap();
    let _flood: Vec<_> = (0..40).map(|_| TcpStream::connect(at).unwrap()).collect();
    let mut control = Control { shared: port().shared.clone(), listener, pending: Vec::new(), paused: None };
    control.accept();
    assert!(!control.pending.is_empty());
    control.listener.accept().expect("the rest waits for the next turn");
}

#[test]
fn peers_of_one_address_and_of_all_open_bounded_links() {
    let (a, b) = (port(), port());
    b.shared.connections.lock().most = 6;
    let mut open = Vec::new();
    let mut greet_from = |host, own_port| {
        let stream = stranger_at(host, &b);
        let verdict = greet(&stream, &b, own_port);
        open.push(stream);
        verdict
    };
    for own_port in 1..=5 {
        let verdict = if own_port <= 3 { WELCOME } else { FULL };
        assert_eq!(greet_from(1, own_port), verdict, "link {own_port} of an address");
    }
    assert_eq!(greet_from(1, 1), CROSSED, "it has that one");
    let error = a.connect(b.own(), TIMEOUT).unwrap_err();
    assert!(matches!(error, Error::Peer { .. }) && error.to_string().contains("ulimit -n"), "{error}");
    assert_eq!(
        [(2, 1), (3, 1), (2, 2), (4, 1)].map(|(host, port)| greet_from(host, port)),
        [WELCOME, WELCOME, WELCOME, FULL]
    );
    assert!(b.connect(a.own(), TIMEOUT).unwrap().is_some(), "those that it makes itself have no bound");
    b.take_accepted();
    linked(&port(), &b);
}

#[test]
fn a_lack_of_descriptors_is_not_called_one_of_routes() {
    let text = Failure::Dial(io::Error::from_raw_os_error(libc::EMFILE)).to_string();
    assert!(text.contains("ulimit -n") && !text.contains("firewall"), "{text}");
}

#[test]
fn another_secret_is_refused_on_both_sides() {
    let (own, peer) = (port().own(), port().own());
    let hello = Hello { to: peer, from: own, nonce: [1; NONCE], offer: over_tcp() }.to_bytes();
    let answer = greeting::answer(7, &hello, &[2; NONCE], &over_tcp());
    let error = greeting::check_answer(8, &hello, &answer).unwrap_err();
    assert!(error.contains("GDSYNC_JOB_TOKEN"), "{error}");
    let (proof, offer) = greeting::check_answer(7, &hello, &answer).unwrap();
    assert_eq!(offer, over_tcp());
    assert!(greeting::is_proof(7, &hello, &[2; NONCE], &proof));
    assert!(!greeting::is_proof(8, &hello, &[2; NONCE], &proof), "another secret");
    assert!(!greeting::is_proof(7, &hello, &[3; NONCE], &proof), "another connection");
    assert_ne!(answer[ANSWER - PROOF..], proof, "an answer is no proof");
}

#[test]
fn any_bytes_are_survived_as_a_hello_or_an_answer() {
    let (own, from) = (port().own(), Peer { gid: Peer::at(([127, 0, 0, 1], 1).into()).gid, port: 9 });
    let good = Hello { to: own, from, nonce: [4; NONCE], offer: over_tcp() }.to_bytes();
    bolero::check!().with_type::<(bool, Vec<u8>)>().for_each(|(changes, bytes)| {
        let mut hello = if *changes { good } else { [0; HELLO] };
        hello.iter_mut().zip(bytes).for_each(|(byte, change)| *byte ^= change);
        match Hello::read(&hello, own, from.gid) {
            Ok(read) => assert_eq!(read.to_bytes(), hello, "what is accepted is what was said"),
            Err(why) => assert!(!why.is_empty()),
        }
        let mut answer = greeting::answer(7, &good, &[1; NONCE], &over_tcp());
        answer.iter_mut().zip(bytes).for_each(|(byte, change)| *byte ^= change);
        let is_same = bytes.iter().take(ANSWER).all(|change| *change == 0);
        assert_eq!(greeting::check_answer(7, &good, &answer).is_ok(), is_same);
    });
}

#[test]
fn any_bytes_are_survived_as_frames() {
    bolero::check!().with_iterations(300).with_type::<Vec<(u16, u8)>>().for_each(|frames| {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let connection = Connection::new(listener.accept().unwrap().0, Arc::new(Sockets::new(None).unwrap()));
        let FarEnds { tx, mut rx, .. } = FarEnds::new(port().own(), &connection, None);
        let (mut bytes, mut good, mut is_good) = (Vec::new(), 0, true);
        for (len, kind) in frames.iter().take(6) {
            // Of each 8 frames one is too long, and one is cut off.
            let (is_long, is_cut) = (kind % 8 == 0, kind % 8 == 1);
            let len = u32::from(*len);
            is_good &= !is_long && !is_cut;
            good += usize::from(is_good);
            bytes.extend((if is_long { len | 1 << 20 } else { len }).to_le_bytes());
            bytes.extend(pattern(1, 28 + if is_cut { 0 } else { len as usize }));
        }
        near.write_all(&bytes).unwrap();
        near.shutdown(Shutdown::Write).unwrap();
        let mut got = 0;
        until("the end", || {
            while let Some(frame) = rx.peek() {
                assert!(rx.body(&frame).len() <= MAX_BODY);
                rx.pop(&frame);
                got += 1;
            }
            rx.set_ready();
            !tx.is_alive()
        });
        assert!(got >= good, "all before the first wrong one arrive");
    });
}
