use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use super::*;
use gdrcopy::cuda::raw::layout::pointer_attribute;
use gdrcopy::host_page;

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
