//! Links over libfabric's own providers, where it is installed, and over those of a stand-in.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::{Duration, Instant};

use super::endpoint::{CREDITS, MESSAGE};
use super::objects::{Completions, MAX_NAME, Objects};
use super::*;
use crate::wire::Piece;
use crate::wire::tcp::{FarEnds, MAX_BODY, SILENCE, TcpPort};
use gdsync_device::memory::Memory;
use gdsync_testkit::process::built;
use rdma_core_sys::Fabric;

const TIMEOUT: Duration = Duration::from_secs(20);

/// A library, which stays loaded.
fn library(path: &Path) -> Option<&'static Fabric> {
    // SAFETY: it is libfabric, or stands in for it.
    match unsafe { Fabric::load_from(path) } {
        Ok(table) => Some(Box::leak(Box::new(table))),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

fn stand_in() -> &'static Fabric {
    library(&built("libstand_in_fabric.so")).expect("cargo has built it")
}

/// Each library and provider that there is.
fn providers() -> Vec<(&'static Fabric, &'static str)> {
    let installed = library(Path::new("libfabric.so.1"));
    let of = |table: &'static Fabric, names: &[&'static str]| {
        names.iter().map(|name| (table, *name)).collect::<Vec<_>>()
    };
    let mut all = of(stand_in(), &["efa", "cxi"]);
    all.extend(installed.map(|table| of(table, &["tcp", "tcp;ofi_rxm", "shm"])).into_iter().flatten());
    all
}

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn port((table, provider): (&'static Fabric, &str)) -> TcpPort {
    TcpPort::open(HERE, Some(Endpoint::of(table, provider, HERE).unwrap())).unwrap()
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

/// Lets the provider of a port work.
fn poll(port: &TcpPort) {
    port.sockets().endpoint().expect("of libfabric").poll();
}

fn linked(a: &TcpPort, b: &TcpPort) -> (FarEnds, FarEnds) {
    let near = a.connect(b.own(), TIMEOUT).unwrap().expect("no other link");
    let far = until("a link", || b.take_accepted().pop());
    assert_eq!((near.peer, far.peer), (b.own(), a.own()));
    (near, far)
}

fn pattern(n: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (n.wrapping_mul(31) + i).to_le_bytes()[0]).collect()
}

#[test]
fn packets_of_all_sizes_arrive_in_order_both_ways() {
    const SIZES: [usize; 8] = [0, 1, 8, 24, 100, 4096, 16 << 10, MAX_BODY];
    for provider in providers() {
        let (a, b) = (port(provider), port(provider));
        let (_, provider) = provider;
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
                // Messages of one packet and of several.
                if sent % 3 > 0 || sent == 1000 {
                    near.tx.flush();
                }
                [&a, &b].into_iter().for_each(poll);
                while let Some(frame) = far.rx.peek() {
                    assert_eq!(frame.header, [got.to_le_bytes()[0]; 28], "packet {got} over {provider}");
                    assert!(
                        far.rx.body(&frame) == pattern(got, SIZES[got % SIZES.len()]),
                        "packet {got} over {provider}"
                    );
                    far.rx.pop(&frame);
                    got += 1;
                }
                assert!(near.tx.is_alive() && far.tx.is_alive(), "{provider}");
            }
            std::mem::swap(&mut near, &mut far);
        }
    }
}

#[test]
fn what_a_provider_lacks_is_said_in_words() {
    let refused = |table, name| Endpoint::of(table, name, HERE).unwrap_err().to_string();
    for (name, parts) in [
        ("efa-direct", ["fabric:efa-direct", "max_msg_size", "8192", "name another provider"]),
        ("msg", ["fabric:msg", "FI_EP_RDM", "msg;ofi_rxm", "msg has no endpoints"]),
        ("prefix", ["fabric:prefix", "0x400000000000000", "mode", "name another provider"]),
        ("opx", ["fabric:opx", "libfabric 1.20", "has no provider opx", "fi_info -p 'opx'"]),
    ] {
        let error = refused(stand_in(), name);
        assert!(parts.iter().all(|part| error.contains(part)), "{name}: {error}");
    }
    if let Some(table) = library(Path::new("libfabric.so.1")) {
        let error = refused(table, "nothing-of-this-name");
        assert!(error.contains("but ") && error.contains("tcp"), "it names those that there are: {error}");
    }
}

#[test]
fn sides_with_different_providers_are_refused_in_words() {
    let (efa, cxi) = (port((stand_in(), "efa")), port((stand_in(), "cxi")));
    let tcp = TcpPort::open(HERE, None).unwrap();
    for (from, to, parts) in [
        (&efa, &cxi, ["libfabric (cxi, protocol 0.0)", "libfabric (efa, protocol 0.0)"]),
        (&tcp, &efa, ["by libfabric (efa", "by TCP"]),
    ] {
        let error = from.connect(to.own(), TIMEOUT).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        assert!(!to.has_accepted());
    }
}

#[test]
fn a_send_that_completes_with_an_error_ends_the_link_at_both_sides() {
    let (a, b) = (port((stand_in(), "cxi;late")), port((stand_in(), "cxi;late")));
    let (mut near, mut far) = linked(&a, &b);
    until("the error", || {
        let _ = near.tx.try_push(&[1; 28], &[], &[]).unwrap() && near.tx.flush();
        [&a, &b].into_iter().for_each(poll);
        while let Some(frame) = far.rx.peek() {
            far.rx.pop(&frame);
        }
        (!near.tx.is_alive()).then_some(())
    });
    until("its end", || {
        while let Some(frame) = far.rx.peek() {
            far.rx.pop(&frame);
        }
        far.rx.set_ready();
        (!far.tx.is_alive()).then_some(())
    });
}

#[test]
fn a_peer_that_takes_nothing_costs_bounded_memory_and_is_gone_after_a_while() {
    let provider = (stand_in(), "cxi");
    let (a, b) = (port(provider), port(provider));
    let (mut near, mut far) = linked(&a, &b);
    let (mut packets, mut messages) = (0, 0);
    let start = Instant::now();
    until("the end", || {
        let is_taken = near.tx.try_push(&[1; 28], &[7; 1000], &[]).unwrap();
        packets += usize::from(is_taken);
        messages += usize::from(near.tx.flush() && is_taken);
        [&a, &b].into_iter().for_each(poll);
        (!near.tx.is_alive()).then_some(())
    });
    assert!(messages == CREDITS[0].1 as usize && start.elapsed() >= SILENCE, "{messages} messages");
    while let Some(frame) = far.rx.peek() {
        far.rx.pop(&frame);
        packets -= 1;
    }
    assert_eq!(packets, 0, "they wait to be taken");
}

#[test]
fn a_provider_that_completes_nothing_ends_the_link_after_a_while() {
    let provider = (stand_in(), "cxi;stuck");
    let (a, b) = (port(provider), port(provider));
    let (mut near, _far) = linked(&a, &b);
    let start = Instant::now();
    until("room", || (near.tx.try_push(&[1; 28], &[], &[]).unwrap() && near.tx.flush()).then_some(()));
    until("the end", || {
        poll(&a);
        assert!(!near.tx.is_drained());
        (!near.tx.is_alive()).then_some(())
    });
    assert!(start.elapsed() >= SILENCE);
}

#[test]
fn addresses_of_links_that_end_with_sends_under_way_are_used_again() {
    let provider = (stand_in(), "cxi");
    let (a, b) = (port(provider), port(provider));
    // The provider takes 32.
    for _ in 0..40 {
        let (mut near, _far) = linked(&a, &b);
        until("room", || (near.tx.try_push(&[1; 28], &[], &[]).unwrap() && near.tx.flush()).then_some(()));
        assert!(!near.tx.is_drained());
        near.tx.take_down();
        (0..64).for_each(|_| poll(&a));
    }
}

/// The fabric asks nobody for the secret of a job.
#[test]
fn messages_of_strangers_end_no_link() {
    // Only processes of the same user reach an endpoint of `shm`, which reads their memory and may wait for it for ever.
    for provider in providers().into_iter().filter(|(_, name)| *name != "shm") {
        let (a, b) = (port(provider), port(provider));
        let (mut near, mut far) = linked(&a, &b);
        let (table, provider) = provider;
        let name = b.sockets().endpoint().unwrap().offer().unwrap().name;
        let mut padded = [0; MAX_NAME];
        padded[..name.len()].copy_from_slice(&name);
        // One that is longer than the buffers; and some of which the last does not arrive as a whole, as the stranger ends.
        for (count, len) in [(1, MESSAGE + 1000), (40, MESSAGE)] {
            let info = survey::choose(table, provider, HERE).unwrap();
            let mut bytes = vec![7_u8; len].into_boxed_slice();
            let mut contexts = vec![rdma_core_sys::fabric::fi_context2::zeroed(); count];
            let mut stranger = Objects::open(info, provider, 256).unwrap();
            let desc = stranger.register(bytes.as_mut_ptr(), len).unwrap();
            let to = stranger.insert(&padded).unwrap();
            for context in &mut contexts {
                let context = std::ptr::from_mut(context).cast();
                let mut tries = 0;
                until("room for a message", || {
                    // SAFETY: bytes and context are freed after the objects.
                    let code = unsafe { stranger.send((bytes.as_ptr(), len), desc, to, context) };
                    stranger.poll(&mut Completions::new(), false).unwrap();
                    if count == 1 {
                        poll(&b);
                    }
                    tries += 1;
                    // Some of its messages will do.
                    (code == 0 || count > 1 && tries > 1000).then_some(())
                });
            }
            for _ in 0..1000 {
                stranger.poll(&mut Completions::new(), false).unwrap();
                if count == 1 {
                    poll(&b);
                }
            }
            drop(stranger);
            (0..1000).for_each(|_| poll(&b));
            assert!(far.tx.is_alive(), "{provider}: a stranger has ended a link");
        }
        until("a packet", || {
            let _ = near.tx.try_push(&[1; 28], &[], &[]).unwrap() && near.tx.flush();
            [&a, &b].into_iter().for_each(poll);
            assert!(near.tx.is_alive() && far.tx.is_alive(), "{provider}");
            far.rx.peek()
        });
    }
}
