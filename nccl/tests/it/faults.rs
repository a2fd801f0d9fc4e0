//! A rank that is killed or stopped: every wait of every other rank ends, and says who it was.

use std::ffi::c_int;

use gdsync_testkit::process::printed;
use nccl_rma_gda::abi::{REMOTE_ERROR, SUCCESS};

use crate::nccl::{LONG, Library, Place, Plugin, RELEASED, Rank, all_well, is_running, job};

/// When the rank is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It puts nothing.
    Idle,
    /// Puts to it and from it are under way.
    Puts,
    /// It has one half of a long put.
    Transfer,
    /// In a teardown that it has not announced.
    Teardown,
}

/// The last rank is lost; rank 0 waits for its signal, the others for a signal of rank 0, which does not come either.
fn lose(mut ranks: Rank, signal: c_int, phase: Phase, place: Place) {
    let library = Library::open();
    let plugin = Plugin::connect(&library, &mut ranks, place);
    let half = if phase == Phase::Transfer { 1 << 25 } else { 1 << 18 };
    let (signals, data) = (plugin.signals(), plugin.register(2 * half, 0));
    data.memory.fill(0, half, 1).unwrap();
    let (lost, rank) = (ranks.size - 1, ranks.rank);
    let put = |to| plugin.put(0, ((&data, 0), (&data, half)), half, to, Some((&signals, rank, 1)));
    ranks.barrier();
    if ranks.rank == lost {
        match phase {
            Phase::Idle => {}
            Phase::Puts => (0..20).for_each(|_| _ = put(0)),
            Phase::Transfer => {
                let (_started, first) = (put(0), data.memory.word64(half).unwrap());
                plugin.until("the beginning of a put", || first.load() != 0);
            }
            Phase::Teardown => ranks.close_exchange(),
        }
        ranks.raise(signal);
    }
    let mut under_way = Vec::new();
    if matches!(phase, Phase::Puts | Phase::Transfer) {
        // Until it is lost, at the latest: then all requests are complete.
        plugin.until("the loss", || {
            under_way.retain(|&request| !plugin.is_complete(request));
            if under_way.len() < 32 {
                under_way.push(put(lost));
            }
            plugin.has_failed()
        });
    }
    let awaited = if ranks.rank == 0 { lost } else { 0 };
    assert!(plugin.wait(&signals, awaited, 1000) >= RELEASED);
    // Also what nobody would signal.
    for word in 0..crate::nccl::SIGNALS {
        assert!(plugin.wait(&signals, word, 1000) >= RELEASED);
    }
    under_way.into_iter().for_each(|request| plugin.finish(request));
    plugin.finish(put(lost));
    plugin.finish(put(ranks.rank));
    assert!(plugin.has_failed() && library.has_event(LONG));
    let failure = library.failures()[0];
    assert_eq!((failure.comm, usize::try_from(failure.rank)), (0x1234, Ok(lost)));
    assert_eq!(usize::try_from(failure.own_rank), Ok(ranks.rank));
    assert!(failure.cause[0] != 0);
    let memory = gdsync::memory::Memory::alloc(8).unwrap();
    assert_ne!(plugin.try_register(memory, 0).0, SUCCESS);
    plugin.close(vec![signals, data]);
    ranks.well();
}

fn loss(test: &str, size: usize, signal: c_int, phase: Phase, place: Place) {
    let outputs = job(test, size, &[], |ranks| lose(ranks, signal, phase, place));
    all_well(&outputs, Some(size - 1));
    let text = printed(&outputs[0]);
    assert!(
        text.contains(&format!("rank {} is lost: ", size - 1)) && text.contains("call ncclCommAbort"),
        "{text}"
    );
}

#[test]
fn an_idle_rank_is_killed() {
    loss("faults::an_idle_rank_is_killed", 3, libc::SIGKILL, Phase::Idle, Place::Host);
}

#[test]
fn an_idle_rank_is_stopped() {
    loss("faults::an_idle_rank_is_stopped", 3, libc::SIGSTOP, Phase::Idle, Place::Host);
}

#[test]
fn a_rank_is_killed_in_puts() {
    loss("faults::a_rank_is_killed_in_puts", 4, libc::SIGKILL, Phase::Puts, Place::Host);
}

#[test]
fn a_rank_is_stopped_in_puts() {
    loss("faults::a_rank_is_stopped_in_puts", 3, libc::SIGSTOP, Phase::Puts, Place::Host);
}

#[test]
fn a_rank_is_killed_in_puts_of_gpus() {
    loss("faults::a_rank_is_killed_in_puts_of_gpus", 3, libc::SIGKILL, Phase::Puts, Place::Gpu);
}

#[test]
fn a_rank_is_stopped_in_puts_of_gpus() {
    loss("faults::a_rank_is_stopped_in_puts_of_gpus", 2, libc::SIGSTOP, Phase::Puts, Place::Gpu);
}

/// The ring to it is full then: nothing can be sent again.
#[test]
fn a_rank_is_stopped_in_a_long_put() {
    loss("faults::a_rank_is_stopped_in_a_long_put", 2, libc::SIGSTOP, Phase::Transfer, Place::Gpu);
}

#[test]
fn a_rank_is_killed_in_its_teardown() {
    loss("faults::a_rank_is_killed_in_its_teardown", 2, libc::SIGKILL, Phase::Teardown, Place::Host);
}

#[test]
fn a_rank_that_is_lost_before_it_connects_ends_the_connect_of_the_others() {
    let body = |mut ranks: Rank| {
        let library = Library::open();
        let mut plugin = Plugin::open(&library, &ranks);
        if ranks.rank == 1 {
            ranks.allgather(&[0; 128]);
            ranks.raise(libc::SIGKILL);
        }
        assert_eq!(plugin.try_connect(&library, &mut ranks), REMOTE_ERROR);
        ranks.well();
    };
    let limit = [("GDA_NCCL_CONNECT_S", "2")];
    let test = "faults::a_rank_that_is_lost_before_it_connects_ends_the_connect_of_the_others";
    let outputs = job(test, 3, &limit, body);
    all_well(&outputs, Some(1));
    let text = printed(&outputs[0]);
    assert!(text.contains("log: RMA/GDA: connect: "), "{text}");
}

#[test]
fn a_rank_that_is_lost_before_a_registration_ends_that_of_the_others() {
    let body = |mut ranks: Rank| {
        let library = Library::open();
        let plugin = Plugin::connect(&library, &mut ranks, Place::Host);
        ranks.barrier();
        if ranks.rank == 1 {
            ranks.raise(libc::SIGKILL);
        }
        let memory = gdsync::memory::Memory::alloc(4096).unwrap();
        assert_ne!(plugin.try_register(memory, 0).0, SUCCESS);
        plugin.close(Vec::new());
        ranks.well();
    };
    let outputs =
        job("faults::a_rank_that_is_lost_before_a_registration_ends_that_of_the_others", 3, &[], body);
    all_well(&outputs, Some(1));
}

#[test]
fn a_rank_that_leaves_in_order_is_not_lost() {
    let body = |mut ranks: Rank| {
        let library = Library::open();
        let plugin = Plugin::connect(&library, &mut ranks, Place::Host);
        let signals = plugin.signals();
        let pids = ranks.allgather(&u64::from(std::process::id()).to_le_bytes());
        let leaver = u64::from_le_bytes(pids[1][..].try_into().unwrap());
        ranks.close_exchange();
        if ranks.rank == 0 {
            // The process is gone, and whatever tells of that has had its time.
            plugin.until("the end of rank 1", || !is_running(leaver));
            std::thread::sleep(std::time::Duration::from_secs(1));
            assert!(
                !plugin.has_failed()
                    && library.failures().is_empty()
                    && !library.has_event(std::time::Duration::ZERO)
            );
            // What is put to it counts as complete.
            plugin.finish(plugin.put(0, ((&signals, 0), (&signals, 0)), 8, 1, None));
            assert!(!plugin.has_failed());
        }
        plugin.close(vec![signals]);
        ranks.well();
    };
    let outputs = job("faults::a_rank_that_leaves_in_order_is_not_lost", 2, &[], body);
    all_well(&outputs, None);
    let text: String = outputs.iter().map(printed).collect();
    assert!(!text.contains("leaves without"), "{text}");
}
