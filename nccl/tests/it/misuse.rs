//! Wrong use has a result, and a line that says what to do.

use std::ptr;

use gdsync::memory::Memory;
use gdsync_testkit::process::printed;
use nccl_rma_gda::abi::{Config, FORCE_SO, INVALID_ARGUMENT, SUCCESS, SYSTEM_ERROR};

use crate::nccl::{Library, Place, Plugin, Rank, all_well, job, ok};

#[test]
fn wrong_arguments_have_a_result_and_a_line() {
    let body = |mut ranks: Rank| {
        let library = Library::open();
        let plugin = Plugin::connect(&library, &mut ranks, Place::Host);
        let (table, foreign) = (plugin.table, ptr::without_provenance_mut(0x7f00_1234_5678));
        let (mut handle, mut done, mut bytes) = (ptr::null_mut(), 0, [1_u8; 128]);
        let none = ptr::null_mut();
        let config = Config { contexts: 5000, ..Config::default() };
        let handles = [bytes.as_ptr().cast()];
        let mut listener = ptr::null_mut();
        // SAFETY: places, in this and all calls below.
        ok(unsafe { (table.listen)(plugin.opened[0], 0, bytes.as_mut_ptr().cast(), &raw mut listener) });
        let mut other = [1_u8; 128];
        // SAFETY: handles of 128 bytes.
        let wrong = [
            unsafe { (table.listen)(foreign, 0, bytes.as_mut_ptr().cast(), &raw mut handle) },
            unsafe { (table.get_properties)(9, ptr::null_mut()) },
            unsafe { (table.connect)(none, handles.as_ptr(), 1, 1, listener, &raw mut handle) },
            unsafe {
                (table.connect)(
                    none,
                    [other.as_mut_ptr().cast_const().cast()].as_ptr(),
                    2,
                    1,
                    listener,
                    &raw mut handle,
                )
            },
            unsafe { (table.create_context)(plugin.collective, &raw const config, &raw mut handle) },
            unsafe { (table.create_context)(plugin.collective, ptr::null(), &raw mut handle) },
            unsafe { (table.reg_mr_sym)(plugin.collective, none, 8, 9, 0, &raw mut handle) },
            unsafe { (table.test)(plugin.collective, foreign, &raw mut done) },
            unsafe { (table.test)(plugin.contexts, none, &raw mut done) },
            unsafe { (table.rma_progress)(none) },
            unsafe { (table.iput)(none, 0, 0, none, 0, 0, none, 0, 0, &raw mut handle) },
            unsafe { (table.close_coll)(plugin.contexts) },
        ];
        assert_eq!(wrong, [INVALID_ARGUMENT; 12]);
        // SAFETY: a handle that is ended once.
        ok(unsafe { (table.close_listen)(listener) });
        // SAFETY: a handle that has ended.
        assert_eq!(unsafe { (table.close_listen)(listener) }, INVALID_ARGUMENT);
        assert!(!plugin.has_failed());
        plugin.close(Vec::new());
        ranks.well();
    };
    let outputs = job("misuse::wrong_arguments_have_a_result_and_a_line", 1, &[], body);
    all_well(&outputs, None);
    let text = printed(&outputs[0]);
    for line in [
        "listen: context of init is 0x7f0012345678: expected a handle that has not ended",
        "getProperties: the number of the device is 9",
        "connect: the rank is 1 of 1: expected below the number of ranks",
        "install the same libnccl-rma-gda.so, and set NCCL_RMA_PLUGIN=gda, at all ranks",
        "createContext: the number of contexts is 5000",
        "regMrSym: the type of the memory is 9",
        ", which is a rmaCtx: expected a handle that has not ended",
        "test: request is 0x7f0012345678",
        "closeListen: listenComm is 0x",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
}

/// A put that cannot be made would leave a stream waiting: it ends all waits, as a lost rank does.
#[test]
fn a_put_outside_its_memory_releases_all() {
    let body = |mut ranks: Rank| {
        let library = Library::open();
        let plugin = Plugin::connect(&library, &mut ranks, Place::Host);
        let signals = plugin.signals();
        if ranks.rank == 0 {
            plugin.finish(plugin.put(0, ((&signals, 0), (&signals, 0)), 4096, 1, None));
        }
        assert!(plugin.wait(&signals, 5, 1) >= crate::nccl::RELEASED);
        plugin.until("the report", || library.failures().len() == 1);
        plugin.close(vec![signals]);
        ranks.well();
    };
    let outputs = job("misuse::a_put_outside_its_memory_releases_all", 2, &[], body);
    all_well(&outputs, None);
}

/// NCCL frees memory that it has deregistered.
#[test]
fn no_release_writes_to_words_that_are_deregistered() {
    let body = |mut ranks: Rank| {
        let library = Library::open();
        let plugin = Plugin::connect(&library, &mut ranks, Place::Host);
        let (signals, many) = (plugin.signals(), plugin.register(1 << 21, FORCE_SO));
        if ranks.rank == 0 {
            plugin.finish(plugin.put(0, ((&signals, 0), (&signals, 0)), 4096, 1, None));
        }
        plugin.until("the loss", || plugin.has_failed());
        // SAFETY: a handle that is ended once.
        ok(unsafe { (plugin.table.dereg_mr_sym)(plugin.collective, many.handle) });
        let words = many.memory.to_vec();
        // All that was to be released is.
        plugin.until("the report", || library.failures().len() == 1);
        assert!(words == many.memory.to_vec(), "written after the end of its registration");
        plugin.close(vec![signals]);
        ranks.well();
    };
    let outputs = job("misuse::no_release_writes_to_words_that_are_deregistered", 2, &[], body);
    all_well(&outputs, None);
}

/// Twice 2^62 would be less than 0 to a wait by signed numbers.
fn register_twice(test: &str, place: Place) {
    let body = |mut ranks: Rank| {
        let library = Library::open();
        let plugin = Plugin::connect(&library, &mut ranks, place);
        let signals = plugin.signals();
        let (result, again) = plugin.try_register(signals.memory.clone(), FORCE_SO);
        ok(result);
        if ranks.rank == 0 {
            plugin.finish(plugin.put(0, ((&signals, 0), (&signals, 0)), 4096, 1, None));
        }
        plugin.until("the report", || library.failures().len() == 1);
        let words = signals.memory.to_vec();
        assert!(words.as_chunks().0.iter().all(|word| u64::from_ne_bytes(*word) == crate::nccl::RELEASED));
        plugin.close(vec![signals, again]);
        ranks.well();
    };
    all_well(&job(test, 2, &[], body), None);
}

#[test]
fn words_that_are_registered_twice_are_released_once() {
    register_twice("misuse::words_that_are_registered_twice_are_released_once", Place::Host);
}

/// The CPU does not reach these.
#[test]
fn words_of_gpus_that_are_registered_twice_are_released_once() {
    register_twice("misuse::words_of_gpus_that_are_registered_twice_are_released_once", Place::Gpu);
}

#[test]
fn a_registration_that_fails_at_one_rank_fails_at_all_and_may_be_repeated() {
    let body = |mut ranks: Rank| {
        let library = Library::open();
        let plugin = Plugin::connect(&library, &mut ranks, Place::Host);
        let memory = Memory::alloc(64).unwrap();
        let bytes = match ranks.rank {
            1 => ptr::null_mut(),
            _ => ptr::with_exposed_provenance_mut(memory.addr().try_into().unwrap()),
        };
        let mut handle = ptr::null_mut();
        // SAFETY: memory of this process, or an address that is refused.
        let result =
            unsafe { (plugin.table.reg_mr_sym)(plugin.collective, bytes, 64, 1, 0, &raw mut handle) };
        assert_ne!(result, SUCCESS);
        let signals = plugin.signals();
        let next = (ranks.rank + 1) % ranks.size;
        plugin.finish(plugin.put(0, ((&signals, 0), (&signals, 0)), 0, next, Some((&signals, 0, 9))));
        assert_eq!(plugin.wait(&signals, 0, 9), 9);
        ranks.barrier();
        plugin.close(vec![signals]);
        ranks.well();
    };
    let outputs =
        job("misuse::a_registration_that_fails_at_one_rank_fails_at_all_and_may_be_repeated", 3, &[], body);
    all_well(&outputs, None);
    assert!(printed(&outputs[0]).contains("rank 1: it could not register its part of the memory"));
}

#[test]
fn without_a_device_the_plug_in_is_not_used() {
    let body = |ranks: Rank| {
        let library = Library::open();
        let table: &nccl_rma_gda::abi::Rma16 = library.table(c"ncclRmaPlugin_v16");
        let (mut handle, mut listener, mut bytes) = (ptr::null_mut(), ptr::null_mut(), [0_u8; 128]);
        // SAFETY: a place.
        ok(unsafe { (table.init)(&raw mut handle, 1, None) });
        // SAFETY: places.
        let result = unsafe { (table.listen)(handle, 0, bytes.as_mut_ptr().cast(), &raw mut listener) };
        assert!([INVALID_ARGUMENT, SYSTEM_ERROR].contains(&result));
        ranks.well();
    };
    let nowhere = [("GDA_NCCL_ADDRESS", "not an address")];
    all_well(&job("misuse::without_a_device_the_plug_in_is_not_used", 1, &nowhere, body), None);
}
