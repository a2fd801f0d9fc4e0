use std::ffi::CStr;

use super::*;

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
fn calls_fail_as_told_and_are_counted() {
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
