//! Communicators of processes that connect in pairs, and parts of a communicator.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::thread::scope;
use std::time::Duration;

use gdsync::memory::Memory;
use mp::launch::Listener;
use mp::{Communicator, CommunicatorBuilder, Error};

use crate::common::{LONG, buffer, bytes, job_test, says};

const LOOPBACK: Option<IpAddr> = Some(IpAddr::V4(Ipv4Addr::LOCALHOST));

fn builder() -> CommunicatorBuilder {
    Communicator::builder().timeout(LONG)
}

/// Two threads in place of two processes.
fn connected(listener: &Listener) -> (Communicator, Communicator) {
    let address = listener.address().unwrap();
    assert!(address.len() <= 64);
    scope(|scope| {
        let other = scope.spawn(|| builder().connect_to(&address).unwrap());
        (listener.accept(builder()).unwrap(), other.join().unwrap())
    })
}

fn message(from: &Communicator, to: &Communicator, value: u8) {
    let [source, target] = [from, to].map(|comm| comm.register(&Memory::alloc(64).unwrap()).unwrap());
    source.memory().fill(0, 64, value).unwrap();
    let receive = to.irecv(&target, 0..64, from.rank()).unwrap();
    let send = from.isend(&source, 0..64, to.rank()).unwrap();
    assert_eq!(to.wait(&receive, LONG).unwrap().bytes, 64);
    from.wait(&send, LONG).unwrap();
    assert_eq!(target.memory().to_vec(), [value; 64]);
}

#[test]
fn a_listener_accepts_several_one_after_the_other() {
    let listener = Listener::bind(LOOPBACK).unwrap();
    let pairs = [connected(&listener), connected(&listener)];
    for (value, (one, other)) in (1..).zip(&pairs) {
        assert_eq!([one.rank(), other.rank(), one.size(), other.size()], [0, 1, 2, 2]);
        message(one, other, value);
        message(other, one, 10 * value);
    }
    for (one, other) in pairs {
        scope(|scope| {
            let other = scope.spawn(|| other.finalize(LONG).unwrap());
            one.finalize(LONG).unwrap();
            other.join().unwrap();
        });
    }
}

#[test]
fn peers_that_connect_at_once_are_all_accepted() {
    let listener = Listener::bind(LOOPBACK).unwrap();
    let address = listener.address().unwrap();
    scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| builder().connect_to(&address).unwrap().finalize(LONG).unwrap());
        }
        for _ in 0..3 {
            listener.accept(builder()).unwrap().finalize(LONG).unwrap();
        }
    });
}

/// A thread is in `wait`, which has no deadline, when another one calls `close`. So is a later call refused.
fn ends(wait: impl Fn() -> mp::Result<()> + Sync, close: impl FnOnce()) {
    let is_closed = |error: &Error| assert!(matches!(error, Error::Closed { .. }), "{error}");
    scope(|scope| {
        let waits = scope.spawn(&wait);
        std::thread::sleep(Duration::from_millis(20));
        close();
        is_closed(&waits.join().unwrap().unwrap_err());
    });
    is_closed(&wait().unwrap_err());
}

#[test]
fn a_closed_listener_ends_accept() {
    let listener = Listener::bind(LOOPBACK).unwrap();
    ends(|| listener.accept(builder().timeout(Duration::MAX)).map(drop), || listener.close());
}

/// One says nothing, one greets and says nothing more.
#[test]
fn a_closed_listener_ends_accept_of_a_silent_peer() {
    for greets in [false, true] {
        let listener = Listener::bind(LOOPBACK).unwrap();
        let address = listener.address().unwrap();
        let (token, at) = address.split_at(8);
        let mut peer = TcpStream::connect(std::str::from_utf8(at).unwrap()).unwrap();
        if greets {
            let hello =
                [&b"GDSB\x00\x03\x00\x01\x00\x00\x00\x01\x00\x00\x00\x02"[..], token, &[0; 4]].concat();
            peer.write_all(&hello).unwrap();
        }
        let close = || {
            if greets {
                // The welcome: the communicator is being built.
                peer.read_exact(&mut [0; 28]).unwrap();
            }
            listener.close();
        };
        // Less than a greeting may take.
        let builder = || builder().timeout(Duration::from_secs(4));
        ends(|| listener.accept(builder()).map(drop), close);
    }
}

#[test]
fn a_closed_communicator_ends_calls_of_all_ranks() {
    let listener = Listener::bind(LOOPBACK).unwrap();
    for is_root in [true, false] {
        let (root, other) = connected(&listener);
        let (closed, other) = if is_root { (root, other) } else { (other, root) };
        ends(|| closed.barrier(Duration::MAX), || closed.close());
        says(&other.barrier(LONG).unwrap_err(), &["closed the communicator"]);
    }
}

#[test]
fn strangers_take_no_place() {
    let listener = Listener::bind(LOOPBACK).unwrap();
    let address = listener.address().unwrap();
    let at = std::str::from_utf8(&address[8..]).unwrap();
    // More say nothing than are kept, one leaves, one says nonsense, one has another number.
    let mut silent: Vec<_> = (0..70).map(|_| TcpStream::connect(at).unwrap()).collect();
    drop(TcpStream::connect(at).unwrap());
    let mut nonsense = TcpStream::connect(at).unwrap();
    nonsense.write_all(&[7; 64]).unwrap();
    let mut guessed = address.clone();
    guessed[0] ^= 1;
    scope(|scope| {
        let accepted = scope.spawn(|| listener.accept(builder()).unwrap());
        // It comes first: the listener looks at no connection after that of the right peer.
        says(&builder().connect_to(&guessed).unwrap_err(), &["its job token is not the one of this job"]);
        assert_eq!(silent[0].read(&mut [0]).unwrap(), 0);
        let right = builder().connect_to(&address).unwrap();
        message(&accepted.join().unwrap(), &right, 5);
    });
}

#[test]
fn addresses_that_lead_nowhere_are_errors() {
    let listener = Listener::bind(LOOPBACK).unwrap();
    let short = || Communicator::builder().timeout(Duration::from_millis(50));
    says(&listener.accept(short()).unwrap_err(), &["waiting for a connection", "50 ms"]);
    for wrong in [&[][..], &[1; 7], &[1; 8], b"12345678127.0.0.1", b"12345678\xff\xff"] {
        says(&short().connect_to(wrong).unwrap_err(), &["no address of a listener"]);
    }
    let address = listener.address().unwrap();
    drop(listener);
    assert!(matches!(short().connect_to(&address).unwrap_err(), Error::Bootstrap { .. }));
}

job_test!(parts_have_their_own_ranks_and_outlive_the_whole, [1, 4, 5], |comm| {
    let (me, size) = (comm.rank(), comm.size());
    // Three parts by remainder, the last rank first; rank 3 takes no part.
    let color = (me != 3).then_some(me as u64 % 3);
    let part = comm.split(color, (size - me) as u64, LONG).unwrap();
    let part = match (part, color) {
        (None, None) => return,
        (part, color) => {
            assert_eq!(part.is_some(), color.is_some());
            part.unwrap()
        }
    };
    let mut members: Vec<_> = (0..size).filter(|rank| *rank != 3 && rank % 3 == me % 3).collect();
    members.reverse();
    assert_eq!((part.size(), members[part.rank()]), (members.len(), me));
    let names = part.exchange(&[u8::try_from(me).unwrap()], LONG).unwrap();
    assert_eq!(names.concat(), members.iter().map(|rank| u8::try_from(*rank).unwrap()).collect::<Vec<_>>());
    // Messages of the part and of the whole do not mix, and memory is of one of them.
    let (of_part, of_whole) = (buffer(&part, 16), buffer(comm, 16));
    let (next, last) = ((part.rank() + 1) % part.size(), (part.rank() + part.size() - 1) % part.size());
    of_part.memory().write(0, &[u8::try_from(me).unwrap()]).unwrap();
    let receive = part.irecv(&of_part, 8..9, last).unwrap();
    let send = part.isend(&of_part, 0..1, next).unwrap();
    part.wait_all([&receive, &send], LONG).unwrap();
    assert_eq!(usize::from(bytes(&of_part, 8..9)[0]), members[last]);
    assert!(part.isend(&of_whole, 0..1, next).is_err());
    part.finalize(LONG).unwrap();
});
