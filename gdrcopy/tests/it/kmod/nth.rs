//! Every allocation and every copy from or to user space of each request fails once (`fail-nth` of kernels with fault
//! injection): the request fails or does its work, and nothing is left behind.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use super::rig::{Machine, Map, Memory, Raw, counter};
use crate::gdrdrv_abi::{self as abi, GetInfo, PinDmaBuf};
use gdsync_testkit::kmod::{self, Backing, CHUNK};

const SIZE: u64 = 40 * CHUNK;
/// More places than any request has.
const MOST: usize = 500;

/// The file of the calling thread, where the kernel has it.
fn fail_nth() -> Option<File> {
    let file = File::options().read(true).write(true).open("/proc/thread-self/fail-nth");
    if file.is_err() {
        println!("skipped: no fault injection in this kernel (VMKERNEL=debug tests/vm/run kmod_debug)");
    }
    file.ok()
}

/// From now on the calling thread's place of this number fails; 0 for none. To write that is a place too.
fn arm(nth: &File, place: usize) {
    let text = place.to_string();
    (0..MOST).find(|_| nth.write_all_at(text.as_bytes(), 0).is_ok()).expect("fault injection");
}

/// Lets each place of a request fail, one after the other, each time with a file of its own.
fn each_place(name: &str, mut request: impl FnMut(&Raw, &mut Vec<Map>) -> Result<(), i32>) {
    let Some(nth) = fail_nth() else { return };
    let before = kmod::state().unwrap();
    for place in 1..MOST {
        let raw = Raw::open();
        let mut maps = Vec::with_capacity(2);
        arm(&nth, place);
        let result = request(&raw, &mut maps);
        let mut left = [0; 16];
        // The reading itself has places; then the request has had its own.
        let over = nth.read_at(&mut left, 0).map_or(true, |_| left[0] != b'0');
        arm(&nth, 0);
        let failed = matches!(result, Err(libc::ENOMEM | libc::EFAULT));
        assert!(result.is_ok() || failed, "{name}, place {place}: {result:?}");
        drop((maps, raw));
        assert_eq!(counter("pins"), 0, "{name}, place {place}");
        assert_eq!(kmod::state().unwrap(), before, "{name}, place {place}");
        if over {
            assert!(result.is_ok(), "{name}, place {place}: {result:?}");
            println!("{name}: {} places", place - 1);
            assert!(place > 1, "{name}: nothing can fail");
            return;
        }
    }
    panic!("{name}: more than {MOST} places");
}

#[test]
fn no_failure_inside_a_request_leaves_anything() {
    let Some(_machine) = Machine::new() else { return };
    let memory = Memory::new(SIZE);
    let fd = memory.object.export(0, SIZE, false).unwrap();
    let dma_bufs = Raw::open().attribute(abi::ATTR_EXTENSIONS) == Ok(abi::EXTENSION_DMABUF);
    let dma_buf = PinDmaBuf { fd: fd.as_raw_fd(), size: SIZE, ..Default::default() };
    each_place("open", |_, _| {
        // SAFETY: a terminated path.
        let fd = unsafe { libc::open(c"/dev/gdrdrv".as_ptr(), libc::O_RDWR) };
        let error = std::io::Error::last_os_error().raw_os_error();
        // SAFETY: the descriptor just opened, once; of -1 it makes nothing.
        unsafe { libc::close(fd) };
        if fd < 0 { Err(error.unwrap_or_default()) } else { Ok(()) }
    });
    each_place("pin", |raw, _| raw.pin(memory.va, SIZE).map(drop));
    each_place("pin and unpin", |raw, _| raw.pin_v1(memory.va, SIZE).and_then(|handle| raw.unpin(handle)));
    each_place("info", |raw, _| {
        let handle = raw.pin(memory.va, SIZE)?;
        raw.call(&mut GetInfo { handle, ..Default::default() })
    });
    each_place("map", |raw, maps| {
        let handle = raw.pin(memory.va, SIZE)?;
        maps.push(raw.map(handle, SIZE)?);
        Ok(())
    });
    if dma_bufs {
        each_place("pin of a dma-buf", |raw, _| raw.call(&mut dma_buf.clone()));
        each_place("map of a dma-buf", |raw, maps| {
            let mut pin = dma_buf;
            raw.call(&mut pin)?;
            maps.push(raw.map(pin.handle, SIZE)?);
            Ok(())
        });
    }
}

/// Pages of a dma-buf that moved cannot be had: the access waits for no page and gets none, which the kernel's own copy
/// tells without a signal.
#[test]
fn no_failure_in_a_fault_harms() {
    let Some(_machine) = Machine::new() else { return };
    let Some(nth) = fail_nth() else { return };
    let raw = Raw::open();
    let memory = Memory::new(CHUNK);
    let fd = memory.object.export(0, CHUNK, false).unwrap();
    let mut pin = PinDmaBuf { fd: fd.as_raw_fd(), size: CHUNK, ..Default::default() };
    if raw.call(&mut pin).is_err() {
        println!("skipped: no pins of dma-bufs here");
        return;
    }
    let map = raw.map(pin.handle, CHUNK).unwrap();
    let sink = File::options().write(true).open("/dev/shm/nth");
    let sink = sink.or_else(|_| File::create("/dev/shm/nth")).unwrap();
    let mut failed = 0;
    for place in 1..30 {
        memory.object.move_to(Backing::Ram).unwrap();
        arm(&nth, place);
        // SAFETY: the kernel reads the byte, or says that it cannot.
        let written = unsafe { libc::pwrite(sink.as_raw_fd(), map.at(0).cast(), 1, 0) };
        arm(&nth, 0);
        failed += u32::from(written != 1);
        // Afterwards all is well.
        assert_eq!(map.load(0), 0);
    }
    println!("{failed} of 29 accesses failed");
}
