//! Puts, signals and gets.

use std::collections::VecDeque;

use gdsync_testkit::process::printed;
use nccl_rma_gda::abi::{Rma14, Rma15, SIGNAL_INC};

use crate::nccl::{Library, Place, Plugin, Rank, Region, SIGNALS, all_well, job, ok};

const LARGEST: usize = 1 << 20;

fn byte(at: usize, seed: usize) -> u8 {
    ((at * 31 + (at >> 8) * 7 + seed * 113 + 1) % 256).try_into().unwrap()
}

fn fill(region: &Region, at: usize, len: usize, seed: usize) {
    let bytes: Vec<_> = (0..len).map(|at| byte(at, seed)).collect();
    region.memory.write(at, &bytes).unwrap();
}

#[track_caller]
fn check(region: &Region, at: usize, len: usize, seed: usize) {
    let mut bytes = vec![0; len];
    region.memory.read(at, &mut bytes).unwrap();
    let wrong = bytes.iter().enumerate().find(|(at, found)| **found != byte(*at, seed));
    assert_eq!(wrong, None, "of {len} bytes");
}

/// Rounds of puts around the ring, with a strong signal behind each; all ranks check all data.
fn ring(ranks: &mut Rank, place: Place) {
    let library = Library::open();
    let plugin = Plugin::connect(&library, ranks, place);
    let (signals, data) = (plugin.signals(), plugin.register(2 * LARGEST, 0));
    let (next, before) = ((ranks.rank + 1) % ranks.size, (ranks.rank + ranks.size - 1) % ranks.size);
    let mut round = 0;
    for len in [8, 1000, 64 << 10, LARGEST] {
        for context in [0, 1] {
            round += 1;
            fill(&data, 0, len, round * ranks.size + ranks.rank);
            let put = plugin.put(context, ((&data, 0), (&data, LARGEST)), len, next, Some((&signals, 0, 1)));
            assert_eq!(plugin.wait(&signals, 0, round as u64), round as u64);
            check(&data, LARGEST, len, round * ranks.size + before);
            plugin.finish(put);
            // That the data were checked.
            let answer = plugin.put(context, ((&data, 0), (&data, 0)), 0, before, Some((&signals, 1, 1)));
            plugin.wait(&signals, 1, round as u64);
            plugin.finish(answer);
        }
    }
    // As a graph's wait does: a put to itself makes what has come visible.
    fill(&data, 0, 8, 3);
    plugin.finish(plugin.put(0, ((&data, 0), (&data, 64)), 8, ranks.rank, None));
    check(&data, 64, 8, 3);
    // A get, and its flush.
    fill(&data, 0, 4096, ranks.rank);
    ranks.barrier();
    plugin.finish(plugin.get(((&data, 0), (&data, LARGEST)), 4096, next));
    plugin.finish(plugin.flush(&data));
    check(&data, LARGEST, 4096, next);
    ranks.barrier();
    assert!(!plugin.has_failed() && library.failures().is_empty());
    ranks.close_exchange();
    plugin.close(vec![signals, data]);
    library.close();
}

#[test]
fn two_ranks_put_around_a_ring_in_host_memory() {
    let body = |mut ranks: Rank| {
        ring(&mut ranks, Place::Host);
        ranks.well();
    };
    let outputs = job("traffic::two_ranks_put_around_a_ring_in_host_memory", 2, &[], body);
    all_well(&outputs, None);
    assert!(printed(&outputs[0]).contains("log: RMA/GDA: rank 0 of 2 is connected, by software HCA"));
}

#[test]
fn eight_ranks_put_around_a_ring() {
    let body = |mut ranks: Rank| {
        ring(&mut ranks, Place::Host);
        ranks.well();
    };
    all_well(&job("traffic::eight_ranks_put_around_a_ring", 8, &[], body), None);
}

#[test]
fn memory_of_gpus_is_put_and_signalled() {
    let body = |mut ranks: Rank| {
        ring(&mut ranks, Place::Gpu);
        ranks.well();
    };
    all_well(&job("traffic::memory_of_gpus_is_put_and_signalled", 3, &[], body), None);
}

/// As many requests as NCCL allows are under way to each rank. Each signal carries the number of its put: seen in order they tell that no
/// put was overtaken.
#[test]
fn strong_signals_come_in_order_behind_their_puts() {
    const CREDITS: usize = 256;
    const PUTS: u64 = 2000;
    let body = |mut ranks: Rank| {
        let library = Library::open();
        let plugin = Plugin::connect(&library, &mut ranks, Place::Host);
        let (signals, data) = (plugin.signals(), plugin.register(2 * SIGNALS * 8, 0));
        let mut under_way: VecDeque<_> = VecDeque::new();
        let others: Vec<_> = (0..ranks.size).filter(|&other| other != ranks.rank).collect();
        let seen = |plugin: &Plugin| {
            for &other in &others {
                // The signal first: behind it is at least that put.
                let signal = signals.memory.word64(8 * other).unwrap().load();
                let put = data.memory.word64(8 * (SIGNALS + other)).unwrap().load();
                assert!(put >= signal, "signal {signal} of rank {other} before its put: {put}");
            }
            plugin.until("nothing", || true);
        };
        for number in 1..=PUTS {
            let at = usize::try_from(number).unwrap() % SIGNALS;
            while under_way.len() + others.len() > CREDITS {
                let first = under_way.pop_front().unwrap();
                plugin.finish(first);
            }
            // The source may be overwritten only when its put is complete.
            if at == 0 {
                under_way.drain(..).for_each(|request| plugin.finish(request));
            }
            data.memory.word64(8 * at).unwrap().store(number);
            for &other in &others {
                let to = (&data, 8 * (SIGNALS + ranks.rank));
                under_way.push_back(plugin.put(
                    0,
                    ((&data, 8 * at), to),
                    8,
                    other,
                    Some((&signals, ranks.rank, 1)),
                ));
            }
            seen(&plugin);
        }
        others.iter().for_each(|&other| assert_eq!(plugin.wait(&signals, other, PUTS), PUTS));
        under_way.drain(..).for_each(|request| plugin.finish(request));
        ranks.close_exchange();
        plugin.close(vec![signals, data]);
        ranks.well();
    };
    all_well(&job("traffic::strong_signals_come_in_order_behind_their_puts", 3, &[], body), None);
}

#[test]
fn the_library_is_closed_and_opened_again() {
    let body = |mut ranks: Rank| {
        for _ in 0..2 {
            let library = Library::open();
            let plugin = Plugin::connect(&library, &mut ranks, Place::Host);
            let signals = plugin.signals();
            let other = 1 - ranks.rank;
            plugin.finish(plugin.put(0, ((&signals, 0), (&signals, 0)), 0, other, Some((&signals, 3, 5))));
            assert_eq!(plugin.wait(&signals, 3, 5), 5);
            ranks.barrier();
            plugin.close(vec![signals]);
            library.close();
        }
        ranks.well();
    };
    all_well(&job("traffic::the_library_is_closed_and_opened_again", 2, &[], body), None);
}

#[test]
fn older_versions_have_the_same_functions() {
    let body = |mut ranks: Rank| {
        let library = Library::open();
        let plugin = Plugin::connect(&library, &mut ranks, Place::Host);
        let (signals, other) = (plugin.signals(), 1 - ranks.rank);
        let (v14, v15): (&Rma14, &Rma15) =
            (library.table(c"ncclRmaPlugin_v14"), library.table(c"ncclRmaPlugin_v15"));
        assert_eq!((v14.name, v15.name), (plugin.table.name, plugin.table.name));
        let (rank, none, all) = (other.try_into().unwrap(), std::ptr::null_mut(), plugin.contexts);
        let mut request = none;
        let (put14, put15, place) = (v14.iput_signal, v15.iput_signal, &raw mut request);
        // SAFETY: a place.
        ok(unsafe {
            put14(all, 0, 0, none, 0, 0, none, rank, 8, signals.handle, 7, SIGNAL_INC, true, place)
        });
        plugin.finish(request);
        let place = &raw mut request;
        // SAFETY: a place.
        ok(unsafe {
            put15(all, 1, 0, none, 0, 0, none, rank, 8, signals.handle, 7, SIGNAL_INC, false, 1, place)
        });
        plugin.finish(request);
        assert_eq!(plugin.wait(&signals, 1, 2), 2);
        let place = &raw mut request;
        // SAFETY: a place.
        ok(unsafe {
            (v14.iput)(
                all,
                0,
                8,
                signals.handle,
                8,
                16,
                signals.handle,
                ranks.rank.try_into().unwrap(),
                place,
            )
        });
        plugin.finish(request);
        assert_eq!(plugin.wait(&signals, 2, 2), 2);
        ranks.barrier();
        plugin.close(vec![signals]);
        ranks.well();
    };
    all_well(&job("traffic::older_versions_have_the_same_functions", 2, &[], body), None);
}
