//! Links over libfabric's own providers, where the library is installed.

use std::net::Ipv4Addr;

use super::*;
use crate::wire::tcp::TcpPort;
use crate::wire::{Ends, Piece};
use gdsync_device::Error;
use gdsync_device::memory::Memory;

const TIMEOUT: Duration = Duration::from_secs(20);

/// A port over a provider; `None` without libfabric.
fn port(provider: &str) -> Option<TcpPort> {
    match TcpPort::open(Ipv4Addr::LOCALHOST.into(), Some(provider)) {
        Ok(port) => Some(port),
        Err(Error::Library(error)) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{provider}: {error}"),
    }
}

fn until<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = done() {
            return found;
        }
        assert!(start.elapsed() < TIMEOUT, "{what} did not happen");
        std::thread::yield_now();
    }
}

fn ends(made: Ends) -> FabricEnds {
    match made {
        Ends::Fabric(ends) => ends,
        other => panic!("not over libfabric: {other:?}"),
    }
}

fn linked(a: &TcpPort, b: &TcpPort) -> (FabricEnds, FabricEnds) {
    let near = ends(a.connect(b.own(), TIMEOUT).unwrap().expect("no other link"));
    let far = ends(until("a link", || b.take_accepted().pop()));
    assert_eq!((near.peer, far.peer), (b.own(), a.own()));
    (near, far)
}

fn pattern(n: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (n.wrapping_mul(31) + i).to_le_bytes()[0]).collect()
}

/// Each test over each of these.
const PROVIDERS: [&str; 3] = ["tcp", "tcp;ofi_rxm", "shm"];

#[test]
fn packets_of_all_sizes_arrive_in_order_both_ways() {
    const SIZES: [usize; 8] = [0, 1, 8, 24, 100, 4096, 16 << 10, (16 << 10) + 64];
    for provider in PROVIDERS {
        let (Some(a), Some(b)) = (port(provider), port(provider)) else { return };
        let (mut near, mut far) = linked(&a, &b);
        for _ in 0..2 {
            let (mut sent, mut got) = (0_usize, 0_usize);
            while got < 1000 {
                if sent < 1000 {
                    let bytes = pattern(sent, SIZES[sent % SIZES.len()]);
                    let (ext, rest) = bytes.split_at(bytes.len().min(24));
                    let memory = Memory::alloc(rest.len().max(1)).unwrap();
                    memory.write(0, rest).unwrap();
                    let pieces = [Piece { memory: &memory, offset: 0, len: rest.len() }];
                    sent +=
                        usize::from(near.tx.try_push(&[sent.to_le_bytes()[0]; 28], ext, &pieces).unwrap());
                }
                far.rx.link.endpoint.poll();
                near.rx.link.endpoint.poll();
                while let Some(frame) = far.rx.peek() {
                    assert_eq!(frame.header, [got.to_le_bytes()[0]; 28], "packet {got} over {provider}");
                    assert!(
                        far.rx.body() == pattern(got, SIZES[got % SIZES.len()]),
                        "packet {got} over {provider}"
                    );
                    far.rx.pop();
                    got += 1;
                }
                assert!(near.tx.is_alive() && far.tx.is_alive(), "{provider}");
            }
            std::mem::swap(&mut near, &mut far);
        }
    }
}
