//! Memory, contexts, and mappings by the library.

use super::*;

use std::ffi::CStr;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use gdrcopy::cuda::raw::layout::pointer_attribute;
use gdrcopy::host_page;
use gdsync_testkit::driver::gdr;

#[test]
fn gpu_memory_comes_and_goes() {
    let rig = Rig::new();
    let mut addr = 0;
    assert_eq!(cuda!(mem_alloc(&mut addr, 0)), INVALID_VALUE);
    assert_eq!(cuda!(mem_alloc(&mut addr, 1 << 40)), 2);
    let words = rig.words(4);
    words.set(3, 9);
    assert_eq!(rig.control.alive().device_memory, 1);
    let (mut free, mut total) = (0, 0);
    assert_eq!(cuda!(mem_get_info(&mut free, &mut total)), 0);
    assert_eq!(total - free, 32);
    assert_eq!(cuda!(mem_free(words.at(1))), INVALID_VALUE);
    let addr = words.addr;
    words.free();
    assert_eq!(cuda!(mem_free(addr)), INVALID_VALUE);
    rig.nothing_is_left();
}

#[test]
fn gpu_memory_has_dma_bufs() {
    let rig = Rig::new();
    let (page, mut addr, mut fd) = (host_page() as u64, 0, -1i32);
    assert_eq!(cuda!(mem_alloc(&mut addr, 3 * host_page())), 0);
    let mut export =
        |start, len, kind| cuda!(mem_get_handle_for_address_range((&raw mut fd).cast(), start, len, kind, 0));
    for (start, len, kind) in [
        (addr + 8, host_page(), 1),
        (addr, host_page() + 8, 1),
        (addr, 0, 1),
        (addr, host_page(), 2),
        (addr + page, 3 * host_page(), 1),
        (addr + 3 * page, host_page(), 1),
    ] {
        assert_eq!(export(start, len, kind), INVALID_VALUE, "{start:#x} {len} {kind}");
    }
    assert_eq!(export(addr + page, 2 * host_page(), 1), 0);
    // SAFETY: the driver made it for this test.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    assert_eq!(gdsync_testkit::dma_buf_offset(fd.as_fd()).unwrap(), page);
    assert_eq!(cuda!(mem_free(addr)), 0);
    rig.nothing_is_left();
}

#[test]
fn host_memory_is_pinned_and_freed() {
    let rig = Rig::new();
    let (mut host, mut addr) = (std::ptr::null_mut(), 0);
    assert_eq!(cuda!(mem_host_alloc(&mut host, 100, 8)), INVALID_VALUE);
    assert_eq!(cuda!(mem_host_alloc(&mut host, 100, 3)), 0);
    assert_eq!(cuda!(mem_host_get_device_pointer(&mut addr, host.wrapping_byte_add(8), 0)), 0);
    assert_eq!(addr, host.addr() as u64 + 8);
    assert_eq!(cuda!(mem_host_unregister(host)), 713);
    assert_eq!(rig.control.alive().host_memory, 1);
    assert_eq!(cuda!(mem_free_host(host)), 0);
    assert_eq!(cuda!(mem_free_host(host)), INVALID_VALUE);
    assert_eq!(cuda!(mem_host_get_device_pointer(&mut addr, host, 0)), INVALID_VALUE);
    rig.nothing_is_left();
}

#[test]
fn host_memory_is_registered_once() {
    let rig = Rig::new();
    let mut memory = vec![0_u64; 64];
    let at = |index: usize| memory.as_ptr().wrapping_add(index).cast_mut().cast::<c_void>();
    let mut addr = 0;
    assert_eq!(cuda!(mem_host_get_device_pointer(&mut addr, at(8), 0)), INVALID_VALUE);
    assert_eq!(cuda!(mem_host_register(at(8), 64, 3)), 0);
    for (index, len) in [(8, 64), (7, 16), (15, 8), (0, 512)] {
        assert_eq!(cuda!(mem_host_register(at(index), len, 3)), 712, "{index} {len}");
    }
    // Neighbours.
    assert_eq!(cuda!(mem_host_register(at(0), 64, 3)), 0);
    assert_eq!(cuda!(mem_host_register(at(16), 64, 3)), 0);
    assert_eq!(rig.control.alive().registrations, 3);
    assert_eq!(cuda!(mem_host_get_device_pointer(&mut addr, at(15), 0)), 0);
    assert_eq!(addr, at(15).addr() as u64);
    assert_eq!(cuda!(mem_host_unregister(at(9))), 713);
    for index in [8, 0, 16] {
        assert_eq!(cuda!(mem_host_unregister(at(index))), 0);
    }
    assert_eq!(cuda!(mem_host_unregister(at(8))), 713);
    assert_eq!(cuda!(mem_host_register(at(8), 0, 3)), INVALID_VALUE);
    assert_eq!(cuda!(mem_host_register(at(8), 8, 16)), INVALID_VALUE);
    assert_eq!(cuda!(mem_host_register(std::ptr::null_mut(), 8, 3)), INVALID_VALUE);
    // Nothing is mapped there.
    let nowhere = std::ptr::without_provenance_mut(1 << 46);
    assert_eq!(cuda!(mem_host_register(nowhere, 4096, 3)), INVALID_VALUE);
    let words = rig.words(1);
    let device = std::ptr::without_provenance_mut(usize::try_from(words.addr).unwrap());
    assert_eq!(cuda!(mem_host_register(device, 8, 3)), INVALID_VALUE);
    words.free();
    memory[0] = 1;
    rig.nothing_is_left();
}

#[test]
fn pointers_have_attributes() {
    use pointer_attribute::*;
    let rig = Rig::new();
    let words = rig.words(4);
    let one = |asked, addr| {
        let mut answer = 0_u64;
        let status = cuda!(pointer_get_attribute(std::ptr::from_mut(&mut answer).cast(), asked, addr));
        (status, answer)
    };
    assert_eq!(one(CONTEXT, words.at(1)), (0, rig.context as u64));
    assert_eq!(one(MEMORY_TYPE, words.at(1)), (0, 2));
    assert_eq!(one(RANGE_START_ADDR, words.at(1)), (0, words.addr));
    assert_eq!(one(RANGE_SIZE, words.at(1)), (0, 32));
    assert_eq!(one(IS_MANAGED, words.at(1)), (0, 0));
    assert_eq!(one(99, words.at(1)).0, INVALID_VALUE);
    assert_ne!(one(BUFFER_ID, words.addr).1, 0);
    assert_eq!(one(MEMORY_TYPE, words.at(4)).0, INVALID_VALUE);

    let host = [0_u32; 4];
    let place = std::ptr::from_ref(&host).cast_mut().cast();
    assert_eq!(cuda!(mem_host_register(place, 16, 3)), 0);
    assert_eq!(one(MEMORY_TYPE, place.addr() as u64 + 15), (0, 1));
    assert_eq!(cuda!(mem_host_unregister(place)), 0);

    // Several at once say of an unknown address that nothing is there.
    let (asked, mut answers) = ([MEMORY_TYPE, DEVICE_ORDINAL, BUFFER_ID], [7_u64; 3]);
    let places = answers.each_mut().map(|answer| std::ptr::from_mut(answer).cast::<c_void>());
    assert_eq!(cuda!(pointer_get_attributes(3, asked.as_ptr(), places.as_ptr(), place.addr() as u64)), 0);
    assert_eq!(answers, [0, u64::from((-2_i32).cast_unsigned()), 0]);
    let newer = [99];
    assert_eq!(cuda!(pointer_get_attributes(1, newer.as_ptr(), places.as_ptr(), 8)), INVALID_VALUE);

    let yes = 1_u32;
    let value = std::ptr::from_ref(&yes).cast();
    assert_eq!(cuda!(pointer_set_attribute(value, SYNC_MEMOPS, words.addr)), 0);
    assert_eq!(cuda!(pointer_set_attribute(value, SYNC_MEMOPS, 8)), INVALID_VALUE);
    words.free();
}

#[test]
fn ipc_handles_of_this_process_are_not_opened() {
    let rig = Rig::new();
    let words = rig.words(1);
    let (mut handle, mut addr) = ([0; 64], 0);
    assert_eq!(cuda!(ipc_get_mem_handle(&mut handle, words.addr)), 0);
    assert_eq!(cuda!(ipc_open_mem_handle(&mut addr, handle, 1)), INVALID_CONTEXT);
    handle[8] ^= 1;
    assert_eq!(cuda!(ipc_open_mem_handle(&mut addr, handle, 1)), NOT_SUPPORTED);
    assert_eq!(cuda!(ipc_open_mem_handle(&mut addr, [0; 64], 1)), INVALID_VALUE);
    assert_eq!(cuda!(ipc_close_mem_handle(words.addr)), INVALID_VALUE);
    assert_eq!(cuda!(ipc_get_mem_handle(&mut handle, 8)), INVALID_VALUE);
    words.free();
}

#[test]
fn memory_is_given_back_when_the_gpu_is_idle() {
    let rig = Rig::new();
    let (gate, stream) = (rig.words(1), rig.stream());
    let (mut far, mut registered) = (0, [0_u64; 1]);
    let mut pinned = std::ptr::null_mut();
    let other = application_context(1);
    assert_eq!(cuda!(ctx_push_current(other)), 0);
    assert_eq!(cuda!(mem_alloc(&mut far, 8)), 0);
    assert_eq!(cuda!(ctx_pop_current(&mut 0)), 0);
    assert_eq!(cuda!(mem_host_alloc(&mut pinned, 8, 3)), 0);
    let place: *mut c_void = registered.as_mut_ptr().cast();
    assert_eq!(cuda!(mem_host_register(place, 8, 3)), 0);
    let near = rig.words(1);
    assert_eq!(batch(stream, &[wait(gate.at(0), 1, 0)]), 0);
    // What a destroyed stream still does counts, too.
    assert_eq!(cuda!(stream_destroy(stream)), 0);
    rig.control.patience(Duration::from_millis(10));
    // Nothing runs on the other GPU.
    assert_eq!(cuda!(mem_free(far)), 0);
    assert_eq!(rig.control.stalled(), 0);
    for status in
        [cuda!(mem_free(near.addr)), cuda!(mem_free_host(pinned)), cuda!(mem_host_unregister(place))]
    {
        assert_eq!(status, 702);
    }
    assert_eq!(rig.control.stalled(), 3);
    rig.control.patience(Duration::from_secs(60));
    std::thread::scope(|scope| {
        let (gate, control) = (&gate, &rig.control);
        scope.spawn(move || {
            eventually("stalled", || control.stalled() == 4);
            gate.set(0, 1);
        });
        near.free();
    });
    assert_eq!([cuda!(mem_free_host(pinned)), cuda!(mem_host_unregister(place))], [0, 0]);
    assert_eq!(rig.control.stalled(), 4);
    gate.free();
    destroy_context(other);
    rig.nothing_is_left();
}

#[test]
fn devices_say_what_they_are() {
    let rig = Rig::new();
    let (mut version, mut devices, mut device) = (0, 0, -1);
    assert_eq!(cuda!(driver_get_version(&mut version)), 0);
    assert_eq!(cuda!(device_get_count(&mut devices)), 0);
    assert_eq!(cuda!(device_get(&mut device, 1)), 0);
    assert_eq!((version, devices, device), (13000, 2, 1));
    assert_eq!(cuda!(device_get(&mut device, 2)), INVALID_DEVICE);
    let mut text = [1_u8; 16];
    assert_eq!(cuda!(device_get_pci_bus_id(text.as_mut_ptr().cast(), 16, 1)), 0);
    assert_eq!(CStr::from_bytes_until_nul(&text).unwrap(), c"0000:10:00.0");
    assert_eq!(cuda!(device_get_name(text.as_mut_ptr().cast(), 4, 0)), 0);
    assert_eq!(CStr::from_bytes_until_nul(&text).unwrap(), c"Sim");
    let mut value = -1;
    for (number, expected) in [(122, 1), (98, 0), (75, 9), (76, 0), (118, 100), (160, 0)] {
        assert_eq!(cuda!(device_get_attribute(&mut value, number, 0)), 0);
        assert_eq!(value, expected, "{number}");
    }
    assert_eq!(cuda!(device_get_attribute(&mut value, 161, 0)), INVALID_VALUE);
    rig.control.attribute(1, 98, 1);
    assert_eq!(cuda!(device_get_attribute(&mut value, 98, 1)), 0);
    assert_eq!(value, 1);
}

#[test]
fn the_primary_context_lives_while_it_is_retained() {
    let rig = Rig::new();
    let (mut first, mut second, mut flags, mut active) = (0, 0, 0, 7);
    assert_eq!(cuda!(primary_ctx_get_state(1, &mut flags, &mut active)), 0);
    assert_eq!(active, 0);
    assert_eq!(cuda!(primary_ctx_retain(&mut first, 1)), 0);
    assert_eq!(cuda!(primary_ctx_retain(&mut second, 1)), 0);
    assert_eq!(first, second);
    assert_eq!(rig.control.alive().retained, 2);
    assert_eq!(cuda!(ctx_push_current(first)), 0);
    let (mut device, mut addr, stream) = (-1, 0, rig.stream());
    assert_eq!(cuda!(ctx_get_device(&mut device)), 0);
    assert_eq!(device, 1);
    assert_eq!(cuda!(mem_alloc(&mut addr, 64)), 0);
    for _ in 0..2 {
        assert_eq!(cuda!(mem_alloc(&mut addr, 64)), 0);
        assert_eq!(cuda!(primary_ctx_release(1)), 0);
    }
    // What was in it is gone with it.
    rig.nothing_is_left();
    assert_eq!(cuda!(mem_alloc(&mut addr, 64)), 709);
    assert_eq!(cuda!(stream_query(stream)), INVALID_HANDLE);
    assert_eq!(cuda!(ctx_pop_current(&mut second)), 0);
    assert_eq!(cuda!(ctx_push_current(first)), INVALID_CONTEXT);
    assert_eq!(cuda!(primary_ctx_release(1)), INVALID_CONTEXT);
    assert_eq!(cuda!(primary_ctx_retain(&mut first, 2)), INVALID_DEVICE);
}

#[test]
fn each_thread_has_its_stack() {
    let rig = Rig::new();
    let (mut current, other) = (0, application_context(1));
    assert_eq!(cuda!(ctx_push_current(other)), 0);
    assert_eq!(cuda!(ctx_get_current(&mut current)), 0);
    assert_eq!(current, other);
    assert_eq!(cuda!(ctx_pop_current(&mut current)), 0);
    assert_eq!(cuda!(ctx_get_current(&mut current)), 0);
    assert_eq!(current, rig.context);
    let elsewhere = std::thread::spawn(|| {
        let (mut addr, mut current) = (0, 1);
        assert_eq!(cuda!(ctx_get_current(&mut current)), 0);
        assert_eq!(current, 0);
        assert_eq!(cuda!(ctx_pop_current(&mut current)), INVALID_CONTEXT);
        for status in [
            cuda!(mem_alloc(&mut addr, 64)),
            cuda!(stream_create(&mut current, 1, 0)),
            cuda!(event_create(&mut current, 2)),
            cuda!(stream_synchronize(0)),
            cuda!(stream_synchronize(2)),
            cuda!(mem_host_register(std::ptr::from_mut(&mut addr).cast(), 8, 3)),
            cuda!(module_load_data(&mut current, c"image".as_ptr().cast())),
        ] {
            assert_eq!(status, INVALID_CONTEXT);
        }
    });
    elsewhere.join().unwrap();
    destroy_context(other);
}

#[test]
fn faults_and_counters_of_calls() {
    let rig = Rig::new();
    let mut addr = 0;
    let mut alloc = || cuda!(mem_alloc(&mut addr, 64));
    rig.control.fail_once("cuMemAlloc", 1, 2);
    assert_eq!([alloc(), alloc(), alloc()], [0, 2, 0]);
    rig.control.fail("cuMemAlloc", 999);
    assert_eq!([alloc(), alloc()], [999, 999]);
    rig.control.mend("cuMemAlloc");
    assert_eq!(alloc(), 0);
    assert_eq!((rig.control.calls("cuMemAlloc"), rig.control.calls("cuMemFree")), (6, 0));
    assert_eq!(rig.control.alive().device_memory, 3);
    rig.control.break_context(rig.context, LAUNCH_FAILED);
    assert_eq!(alloc(), LAUNCH_FAILED);
    drop(rig);
    let rig = Rig::new();
    rig.nothing_is_left();
    assert_eq!(rig.control.calls("cuMemAlloc"), 0);
}

#[test]
#[should_panic(expected = "a name in the table")]
fn a_wrong_name_is_no_silent_fault() {
    Control::take().fail("cuMemAlloc_v2", 2);
}

#[test]
fn peers_reach_each_other_once_allowed() {
    let rig = Rig::new();
    let other = application_context(1);
    let mut can = -1;
    assert_eq!(cuda!(device_can_access_peer(&mut can, 0, 1)), 0);
    assert_eq!(can, 1);
    assert_eq!(cuda!(device_can_access_peer(&mut can, 1, 1)), 0);
    assert_eq!(can, 0);
    assert_eq!(cuda!(ctx_push_current(other)), 0);
    let far = rig.words(1);
    let mut popped = 0;
    assert_eq!(cuda!(ctx_pop_current(&mut popped)), 0);
    let stream = rig.stream();
    assert_eq!(batch(stream, &[write(far.at(0), 5)]), INVALID_VALUE);
    assert_eq!(cuda!(ctx_enable_peer_access(other, 0)), 0);
    assert_eq!(cuda!(ctx_enable_peer_access(other, 0)), 704);
    assert_eq!(cuda!(ctx_enable_peer_access(12345, 0)), INVALID_CONTEXT);
    assert_eq!(batch(stream, &[write(far.at(0), 5)]), 0);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!(far.get(0), 5);
    destroy_context(other);
}

#[test]
fn priorities_and_flushes() {
    let _rig = Rig::new();
    let (mut least, mut greatest) = (1, 1);
    assert_eq!(cuda!(ctx_get_stream_priority_range(&mut least, &mut greatest)), 0);
    assert_eq!((least, greatest), (0, -5));
    assert_eq!(cuda!(flush_gpu_direct_rdma_writes(0, 100)), 0);
    assert_eq!(cuda!(flush_gpu_direct_rdma_writes(0, 7)), INVALID_VALUE);
}

#[test]
fn mappings_show_what_streams_write() {
    let rig = Rig::new();
    let stream = rig.stream();
    let gdr = gdr().unwrap();
    for device in 0..2 {
        let other = application_context(device);
        assert_eq!(cuda!(ctx_push_current(other)), 0);
        let buffer = gdr.alloc(device, 4096).unwrap();
        let mapping = buffer.map().unwrap();
        let stream = rig.stream();
        mapping.store(8, 5_u64).unwrap();
        assert_eq!(batch(stream, &[wait(buffer.addr() + 8, 5, EQUAL), write(buffer.addr(), 6)]), 0);
        assert_eq!(cuda!(stream_synchronize(stream)), 0);
        assert_eq!(mapping.load::<u64>(0).unwrap(), 6);
        assert_ne!(mapping.as_ptr() as u64, buffer.addr());
        // Memory of CUDA's is mapped by its address, and the library's copies run on the driver.
        let mut bytes = [0; 8];
        buffer.copy_out(0, &mut bytes).unwrap();
        assert_eq!(bytes, 6_u64.to_ne_bytes());
        drop(buffer);
        assert_eq!(mapping.load::<u64>(0).unwrap(), 6);
        assert_eq!(cuda!(ctx_pop_current(&mut 0)), 0);
        destroy_context(other);
    }
    let words = rig.words(3);
    let mapping = gdr.map(words.at(1), 16).unwrap();
    assert_eq!(batch(stream, &[write(words.at(2), 7)]), 0);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!(mapping.load::<u64>(8).unwrap(), 7);
    assert!(matches!(gdr.map(words.at(1), 17), Err(Error::BeyondAllocation { size: 24, .. })));
    assert!(matches!(gdr.map(8, 8), Err(Error::NotMappable { .. })));
    drop(mapping);
    words.free();
    assert_eq!(cuda!(stream_destroy(stream)), 0);
    drop(gdr);
    rig.nothing_is_left();
}
