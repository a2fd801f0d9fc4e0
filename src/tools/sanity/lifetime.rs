//! Cases of freed memory, forked processes, exhaustion and leaks.

use std::ffi::c_void;
use std::io::{IoSlice, IoSliceMut, PipeReader};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, io, thread};

use cudarc::driver::result;
use cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE;
use cudarc::driver::sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL;
use gdrcopy::{BackendKind, Gdr};
use gdsync::cuda::Gpu;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use super::super::cuda::{compare, compare_buffer, compare_mapping, pattern};
use super::mapping::{PAGE, SIZE, joined, write_and_check};
use super::{Env, Forked, Outcome, Row, Stop, fail, partner, persistent, receive, refused, send, waive};
use crate::nvml::{Bar1, Nvml};

/// An allocation by CUDA itself, without alignment to GPU pages.
#[derive(Debug)]
pub(super) struct Raw {
    pub(super) addr: u64,
    gpu: Gpu,
}

impl Raw {
    /// `cuMemAlloc`, at any multiple of 512 bytes.
    pub(super) fn device(gpu: &Gpu, len: usize) -> Outcome<Self> {
        let mut addr = 0;
        // SAFETY: a place for the answer.
        gpu.within(|api| unsafe { api.mem_alloc(&raw mut addr, len) })?;
        Ok(Self { addr, gpu: gpu.clone() })
    }

    pub(super) fn managed(gpu: &Gpu, len: usize) -> Outcome<Self> {
        let mut addr = 0;
        // SAFETY: a place for the answer.
        gpu.within(|api| unsafe { api.mem_alloc_managed(&raw mut addr, len, CU_MEM_ATTACH_GLOBAL as u32) })?;
        Ok(Self { addr, gpu: gpu.clone() })
    }

    pub(super) fn compare(&self, what: &str, expected: &[u8]) -> Outcome {
        let mut found = vec![0; expected.len()];
        let _current = self.gpu.enter()?;
        // SAFETY: the cases read no more than they allocated.
        unsafe { result::memcpy_dtoh_sync(&mut found, self.addr) }?;
        Ok(compare(what, expected, &found)?)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: allocated by this type and freed once. A failure would show in the leak checks.
        let _ = self.gpu.within(|api| unsafe { api.mem_free(self.addr) });
    }
}

/// Asks the kernel to read a byte at an address of this process, where a load might kill the process.
fn readable(addr: usize) -> Outcome<bool> {
    let (reader, writer) = io::pipe()?;
    // SAFETY: the kernel checks the address and says so.
    let written = unsafe { libc::write(writer.as_raw_fd(), std::ptr::without_provenance(addr), 1) };
    let error = io::Error::last_os_error();
    drop::<PipeReader>(reader);
    match written {
        1 => Ok(true),
        _ if error.raw_os_error() == Some(libc::EFAULT) => Ok(false),
        _ => Err(error.into()),
    }
}

/// The library may be closed under a mapping; after the mapping nothing is left at its address.
fn access_after_close(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(PAGE)?;
    let mapping = buffer.map()?;
    let addr = mapping.as_ptr().addr();
    mapping.store(0, 0x1234_u32)?;
    drop((gdr, buffer));
    ensure!(mapping.load::<u32>(0)? == 0x1234, "a mapping lost its memory when the library was closed");
    ensure!(readable(addr)?, "the address of a living mapping cannot be read");
    drop(mapping);
    ensure!(!readable(addr)?, "the address of a mapping that is gone can still be read");
    Ok(())
}

/// Memory that is freed under a mapping stays, with its old bytes, whatever is allocated next.
fn access_after_free(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(SIZE)?;
    let pin = buffer.pin()?;
    let mapping = pin.map()?;
    let data = pattern(1, SIZE);
    mapping.write(0, &data)?;
    drop(buffer);
    if !persistent(&gdr)? {
        ensure!(!readable(mapping.as_ptr().addr())?, "the mapping of freed memory can still be read");
        ensure!(pin.invalidated()?, "the pin does not say that its memory is gone");
        return Ok(());
    }
    let others = (0..8).map(|_| env.alloc(&gdr, SIZE)).collect::<Outcome<Vec<_>>>()?;
    others.iter().try_for_each(|other| other.copy_in(0, &pattern(2, SIZE)))?;
    compare_mapping("the mapping of freed memory", &mapping, 0, &data)?;
    mapping.write(0, &pattern(3, SIZE))?;
    for other in &others {
        compare_buffer("memory allocated after that was freed", other, 0, &pattern(2, SIZE))?;
    }
    ensure!(!pin.invalidated()?, "the pin says that its memory is gone");
    mapping.unmap()?;
    Ok(pin.unpin()?)
}

fn two_mappings(env: &Env) -> Outcome {
    let (gdr, first) = env.open_with(PAGE)?;
    let second = env.alloc(&gdr, PAGE)?;
    let mappings = [first.map()?, second.map()?];
    mappings[0].store(0, 1_u32)?;
    mappings[1].store(0, 2_u32)?;
    ensure!(mappings[0].load::<u32>(0)? == 1, "the first mapping does not show its own word");
    drop(first);
    ensure!(mappings[1].load::<u32>(0)? == 2, "freeing one buffer changed the mapping of another");
    write_and_check(&mappings[1], &second, 0, PAGE)
}

/// A part of a mapping is unmapped by other code of the process.
fn partial_unmap(env: &Env) -> Outcome {
    let (_, buffer) = env.open_with(4 * PAGE)?;
    let pin = buffer.pin()?;
    let mapping = pin.map()?;
    let start = mapping.as_ptr();
    let hole = start.wrapping_add(PAGE);
    // SAFETY: a part of the mapping that nothing touches any more.
    unsafe { rustix::mm::munmap(hole.cast(), PAGE) }
        .map_err(|e| Stop::Failed(format!("munmap of a part: {e}")))?;
    ensure!(!readable(hole.addr())?, "the part is still there");
    let data = pattern(1, PAGE);
    mapping.write(2 * PAGE, &data)?;
    compare_buffer("the part behind the hole", &buffer, 2 * PAGE, &data)?;
    mapping.unmap()?;
    ensure!(!readable(start.addr())? && !readable(start.addr() + 3 * PAGE)?, "parts of the mapping are left");
    pin.unpin()?;
    write_and_check(&buffer.map()?, &buffer, 0, 4 * PAGE)
}

/// Memory is freed while another thread copies to and from it.
fn free_under_copy(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(SIZE)?;
    if !persistent(&gdr)? {
        return waive("this backend's mappings vanish with their memory, which kills who copies");
    }
    let mapping = buffer.map()?;
    let stop = AtomicBool::new(false);
    let copy = || -> Outcome<u64> {
        let mut rounds = 0;
        while !stop.load(Ordering::Relaxed) {
            rounds += 1;
            let data = pattern(u32::try_from(rounds % 1000)?, SIZE);
            mapping.write(0, &data)?;
            compare_mapping(&format!("copy {rounds}"), &mapping, 0, &data)?;
        }
        Ok(rounds)
    };
    let rounds = thread::scope(|scope| {
        let copying = scope.spawn(copy);
        thread::sleep(Duration::from_millis(20));
        drop(buffer);
        let other = env.alloc(&gdr, SIZE);
        thread::sleep(Duration::from_millis(20));
        stop.store(true, Ordering::Relaxed);
        drop(other?);
        joined(copying)
    })?;
    env.note(format_args!("{rounds} copies both ways"));
    ensure!(rounds > 0, "nothing was copied");
    Ok(())
}

/// Waives where only one process at a time may use the GPU.
fn shared_gpu(env: &Env, gdr: &gdrcopy::Gdr) -> Outcome {
    let Ok(gpu) = env.cuda(gdr) else { return Ok(()) };
    let (asked, mut mode) = (CU_DEVICE_ATTRIBUTE_COMPUTE_MODE as u32, 0);
    // SAFETY: a place for the answer, and the device of this ordinal.
    gpu.within(|api| unsafe { api.device_get_attribute(&raw mut mode, asked, gpu.ordinal()) })?;
    match mode {
        0 => Ok(()),
        _ => waive("the GPU is not in the default compute mode, and two processes are to use it"),
    }
}

/// A child that writes to memory of its own when it is told to. It frees the memory then, or when the parent has looked.
fn writing_child(env: &Env, frees: bool) -> Outcome<Forked> {
    partner(|parent| {
        receive(&parent)?;
        let (_gdr, buffer) = env.open_with(PAGE)?;
        let mapping = buffer.map()?;
        mapping.store(0, 0xc41d_u64)?;
        mapping.flush()?;
        let _kept = (!frees).then_some((buffer, mapping));
        send(&parent, 1)?;
        receive(&parent).map(drop)
    })
}

/// A stale mapping of the parent never shows what the child writes to memory of its own.
fn fork_access_after_free(env: &Env) -> Outcome {
    // Forked first: each side opens for itself.
    let child = writing_child(env, false)?;
    let (gdr, buffer) = env.open_with(PAGE)?;
    shared_gpu(env, &gdr)?;
    let mapping = buffer.map()?;
    mapping.store(0, 0x9a7e_u64)?;
    drop(buffer);
    send(&child.stream, 1)?;
    receive(&child.stream)?;
    if persistent(&gdr)? {
        let seen: u64 = mapping.load(0)?;
        ensure!(seen == 0x9a7e, "the stale mapping shows {seen:#x}");
    } else {
        ensure!(!readable(mapping.as_ptr().addr())?, "the mapping of freed memory can still be read");
    }
    send(&child.stream, 1)?;
    child.join()
}

/// A forked child has a hole where the parent has its mapping.
fn after_map(env: &Env) -> Outcome {
    let (_, buffer) = env.open_with(PAGE)?;
    let mapping = buffer.map()?;
    mapping.store(0, 0x9a7e_u64)?;
    let addr = mapping.as_ptr().addr();
    let child = partner(|_| {
        ensure!(!readable(addr)?, "the child can read the parent's mapping");
        Ok(())
    })?;
    child.join()?;
    ensure!(mapping.load::<u64>(0)? == 0x9a7e, "the parent's mapping changed");
    write_and_check(&mapping, &buffer, 0, PAGE)
}

/// A forked child can neither map the parent's pin nor pin, allocate or ask through the parent's library.
fn child_maps_parents_pin(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(PAGE)?;
    let pin = buffer.pin()?;
    let child = partner(|_| {
        refused(env, "the parent's pin mapped by the child", libc::EACCES, pin.map())?;
        refused(
            env,
            "the parent's library pinning for the child",
            libc::EACCES,
            gdr.pin(buffer.addr(), PAGE),
        )?;
        refused(
            env,
            "the parent's library allocating for the child",
            libc::EACCES,
            gdr.alloc(env.common.gpu, PAGE),
        )?;
        refused(env, "the parent's buffer read by the child", libc::EACCES, buffer.copy_out(0, &mut [0; 8]))
    })?;
    child.join()?;
    write_and_check(&pin.map()?, &buffer, 0, PAGE)
}

/// What the child frees and unmaps is its own.
fn map_and_free(env: &Env) -> Outcome {
    let child = writing_child(env, true)?;
    let (gdr, buffer) = env.open_with(PAGE)?;
    shared_gpu(env, &gdr)?;
    let mapping = buffer.map()?;
    mapping.store(0, 0x9a7e_u64)?;
    send(&child.stream, 1)?;
    receive(&child.stream)?;
    ensure!(mapping.load::<u64>(0)? == 0x9a7e, "the child's freeing changed the parent's mapping");
    send(&child.stream, 1)?;
    child.join()?;
    write_and_check(&mapping, &buffer, 0, PAGE)
}

/// A child that drops what it inherited does the parent no harm.
fn child_drops(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(PAGE)?;
    let pin = buffer.pin()?;
    let mapping = pin.map()?;
    mapping.store(0, 0x9a7e_u64)?;
    // The child runs the drops on its copies of these; the parent's values are left as they are.
    let inherited = std::mem::ManuallyDrop::new((mapping, pin, buffer, gdr));
    let child = partner(|_| {
        // SAFETY: in the child this is the only use of its copy of the values.
        drop(unsafe { std::ptr::read(&*inherited) });
        Ok(())
    })?;
    child.join()?;
    let (mapping, pin, buffer, gdr) = std::mem::ManuallyDrop::into_inner(inherited);
    ensure!(mapping.load::<u64>(0)? == 0x9a7e, "the parent's mapping changed");
    write_and_check(&mapping, &buffer, 0, PAGE)?;
    drop((mapping, pin));
    write_and_check(&gdr.map(buffer.addr(), PAGE)?, &buffer, 0, PAGE)
}

/// Another process cannot pin an address of this one.
fn child_pins_parents_address(env: &Env) -> Outcome {
    let child = partner(|parent| {
        let addr = receive(&parent)?;
        let gdr = env.open()?;
        shared_gpu(env, &gdr)?;
        refused(env, "an address of another process", libc::EINVAL, gdr.pin(addr, PAGE))
    })?;
    let (_, buffer) = env.open_with(PAGE)?;
    send(&child.stream, buffer.addr())?;
    child.join()?;
    write_and_check(&buffer.map()?, &buffer, 0, PAGE)
}

/// `GDRDRV_IOC_PIN_BUFFER` of gdrcopy's `gdrdrv.h` (v2.6): type 0xDA, number 1, 40 bytes both ways.
const PIN_BUFFER: u32 = 0xC028_DA01;
/// The module's count of pins, there only if it was loaded with `dbg_enabled=1`.
const PINS: &str = "/proc/driver/gdrdrv/nv_get_pages_refcount";

/// The descriptor of the kernel module's file; waives the case where the backend has none.
fn descriptor(gdr: &Gdr) -> Outcome<RawFd> {
    if gdr.backend() != BackendKind::Gdrdrv {
        return waive(format_args!("the {} backend has no file of the gdrdrv module", gdr.backend()));
    }
    for entry in fs::read_dir("/proc/self/fd")? {
        let path = entry?.path();
        if fs::read_link(&path).is_ok_and(|target| target.as_os_str() == "/dev/gdrdrv") {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            return Ok(name.parse()?);
        }
    }
    fail("no descriptor of /dev/gdrdrv is open")
}

/// A descriptor that came by a socket cannot pin.
fn pin_by_shared(env: &Env) -> Outcome {
    shared(env, |fd| {
        // Address, size, token, address space, handle: see section 2 of the module's header.
        let mut request = [0x7f00_0000_0000_u64, PAGE as u64, 0, 0, 0];
        let arg = request.as_mut_ptr().cast::<c_void>();
        // SAFETY: the request is as long as its code says.
        let rc = unsafe { libc::ioctl(fd.as_raw_fd(), PIN_BUFFER.into(), arg) };
        denied("a pin", rc == 0)
    })
}

/// Nor can it map what its owner has pinned.
fn map_by_shared(env: &Env) -> Outcome {
    shared(env, |fd| {
        let (prot, null) = (libc::PROT_READ | libc::PROT_WRITE, std::ptr::null_mut());
        // The handle of a file's first pin is 0, and so is its offset.
        // SAFETY: an address that the kernel chooses touches no existing memory.
        let raw = unsafe { libc::mmap(null, PAGE, prot, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        denied("a mapping", raw != libc::MAP_FAILED)
    })
}

fn denied(what: &str, done: bool) -> Outcome {
    let error = io::Error::last_os_error();
    ensure!(!done, "{what} by another process's descriptor succeeded");
    ensure!(error.raw_os_error() == Some(libc::EACCES), "{what} was refused with {error}, expected EACCES");
    Ok(())
}

fn shared(env: &Env, attempt: impl FnOnce(OwnedFd) -> Outcome) -> Outcome {
    let child = partner(|parent| {
        let fd = receive_descriptor(&parent)?;
        attempt(fd)
    })?;
    let (gdr, buffer) = env.open_with(PAGE)?;
    let fd = descriptor(&gdr)?;
    let pin = buffer.pin()?;
    send_descriptor(&child.stream, fd)?;
    child.join()?;
    pin.map()?;
    Ok(())
}

/// A module must release pins when the last process that has its file open ends.
fn leak_over_fork(env: &Env) -> Outcome {
    let pins = || -> Outcome<i64> { Ok(fs::read_to_string(PINS)?.trim().parse()?) };
    if let Err(error) = fs::metadata(PINS) {
        return waive(format_args!(
            "{PINS}: {error}; load gdrdrv 2.5 or newer with dbg_enabled=1, and be root"
        ));
    }
    if pins()? != 0 {
        return waive("other programs have pinned memory");
    }
    let gdr = env.open()?;
    let fd = descriptor(&gdr)?;
    let child = partner(|parent| receive(&parent).map(drop))?;
    let buffer = env.alloc(&gdr, PAGE)?;
    let pin = buffer.pin()?;
    ensure!(pins()? > 0, "a pin is not counted");
    // As if the process had been careless: the file is closed under its owner.
    std::mem::forget((pin, gdr));
    // SAFETY: nothing uses the descriptor any more; its owner was forgotten.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    send(&child.stream, 1)?;
    child.join()?;
    let left = pins()?;
    ensure!(left == 0, "{left} pins are left after all processes closed the file");
    Ok(())
}

fn send_descriptor(stream: &UnixStream, fd: RawFd) -> Outcome {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    // SAFETY: the library under test keeps its file open.
    let fds = [unsafe { BorrowedFd::borrow_raw(fd) }];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(stream, &[IoSlice::new(&[1])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive_descriptor(stream: &UnixStream) -> Outcome<OwnedFd> {
    let (mut space, mut byte) = ([MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))], [0]);
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let Some(fd) = fds.flatten().next() else {
        return waive("the backend has no file of the gdrdrv module to send");
    };
    Ok(fd)
}

const EXTRA: u64 = 8;

/// The bytes of memory of a GPU that are free, and all.
fn memory_of(gpu: &Gpu) -> Outcome<(u64, u64)> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: places for the answers.
    gpu.within(|api| unsafe { api.mem_get_info(&raw mut free, &raw mut total) })?;
    Ok((free as u64, total as u64))
}

/// BAR1 of the GPU, or why NVML does not tell.
fn bar1_of(env: &Env, gdr: &Gdr) -> Outcome<Result<Bar1, String>> {
    let gpu = gdr.gpus()?.into_iter().find(|gpu| gpu.ordinal == env.common.gpu);
    let Some(gpu) = gpu else { return fail("the GPU is not in the list of GPUs") };
    Ok(Nvml::load().and_then(|nvml| nvml.bar1(&gpu.pci)))
}

/// Maps until BAR1 is full: a typed error, no harm to what is mapped, and room again when all is released.
fn bar1(env: &Env) -> Outcome {
    let gdr = env.open()?;
    let (_, memory) = memory_of(&env.cuda(&gdr)?)?;
    let bar1 = match bar1_of(env, &gdr)? {
        Ok(bar1) => bar1,
        Err(why) => return waive(format_args!("the size of BAR1 is not known: {why}")),
    };
    env.note(format_args!("{bar1:?}, {memory} bytes of GPU memory"));
    let chunk = (bar1.total / 64).clamp(2 << 20, 1 << 30);
    let len = usize::try_from(chunk)?;
    let covers = bar1.total >= memory;
    // Where BAR1 is larger than memory, the same memory is mapped again and again.
    let first = env.alloc(&gdr, len)?;
    let mut held = vec![(first.map()?, None)];
    let mut refusal = None;
    for _ in 0..bar1.total / chunk + EXTRA {
        let other = if covers { None } else { Some(env.alloc(&gdr, len)?) };
        match other.as_ref().unwrap_or(&first).map() {
            Ok(mapping) => held.push((mapping, other)),
            Err(error) => {
                refusal = Some(error);
                break;
            }
        }
    }
    let count = held.len();
    let Some(error) = refusal else {
        let (total, held) = (bar1.total, count as u64 * chunk);
        return waive(format_args!(
            "BAR1 of {total} bytes covers all memory, and even mappings of {held} bytes fit"
        ));
    };
    env.note(format_args!("mapping {count} was refused: {error}"));
    ensure!(matches!(error, gdrcopy::Error::Exhausted { .. }), "mapping {count}: not Exhausted but: {error}");
    let word = len - 8;
    held[0].0.store(word, 0x9a7e_u64)?;
    ensure!(held[0].0.load::<u64>(word)? == 0x9a7e, "an earlier mapping no longer works");
    held.clear();
    let again = env.alloc(&gdr, PAGE)?;
    write_and_check(&again.map()?, &again, 0, PAGE)?;
    first.map()?;
    Ok(())
}

/// Sizes that take turns: parts of pages, a page, a large page.
const SIZES: [usize; 4] = [2 << 20, 4096, PAGE, 100_000];
/// Cycles after which caches of allocators and drivers are filled.
const WARM_UP: u32 = 20;

/// One thread opens the library anew now and then.
fn leak_check(env: &Env) -> Outcome {
    let gdr = env.open()?;
    (0..WARM_UP).try_for_each(|number| cycle(env, &gdr, number))?;
    drop(env.open()?);
    let before = held(env, &gdr)?;
    for number in 0..env.cycles {
        cycle(env, &gdr, number)?;
        if number.is_multiple_of(10) {
            cycle(env, &env.open()?, number)?;
        }
    }
    no_leaks(env, &gdr, &before)
}

fn stress(env: &Env) -> Outcome {
    let gdr = env.open()?;
    let round = |cycles: u32| {
        let (start, failed) = (Barrier::new(env.threads.into()), AtomicBool::new(false));
        let work = || -> Outcome {
            start.wait();
            for number in 0..cycles {
                if failed.load(Ordering::Relaxed) {
                    break;
                }
                cycle(env, &gdr, number).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..env.threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(joined)
        })
    };
    round(WARM_UP)?;
    let before = held(env, &gdr)?;
    round(env.cycles)?;
    env.note(format_args!("{} threads, {} cycles each", env.threads, env.cycles));
    no_leaks(env, &gdr, &before)
}

/// Allocate, pin, map, touch both ends, and give all back in changing order.
fn cycle(env: &Env, gdr: &Gdr, number: u32) -> Outcome {
    let len = SIZES[number as usize % SIZES.len()];
    let buffer = env.alloc(gdr, len)?;
    let pin = buffer.pin()?;
    let mapping = pin.map()?;
    for offset in [0, len - 64] {
        let data = pattern(number, 64);
        mapping.write(offset, &data)?;
        let what = format!("cycle {number}, offset {offset}");
        // The GPU's view costs more than all the rest.
        match number.is_multiple_of(16) {
            true => compare_buffer(&what, &buffer, offset, &data)?,
            false => compare_mapping(&what, &mapping, offset, &data)?,
        }
    }
    match number % 3 {
        0 => {
            mapping.unmap()?;
            pin.unpin()?;
        }
        1 => drop((buffer, pin, mapping)),
        _ => {
            pin.unpin()?;
            drop(buffer);
            ensure!(mapping.load::<u8>(0)? == pattern(number, 1)[0], "cycle {number}: freed memory changed");
        }
    }
    Ok(())
}

/// Resources in use: name, amount, and the growth that is no leak. Allocators keep a little; a leak in every cycle grows by more.
type Held = Vec<(&'static str, u64, u64)>;

fn held(env: &Env, gdr: &Gdr) -> Outcome<Held> {
    const SLACK: u64 = 48 << 20;
    let mut held = Held::new();
    if let Some((free, total)) = env.cuda(gdr).ok().and_then(|gpu| memory_of(&gpu).ok()) {
        held.push(("bytes of GPU memory, unless another program took them", total - free, SLACK));
        match bar1_of(env, gdr)? {
            Ok(bar1) => held.push(("bytes of BAR1, unless another program took them", bar1.used, SLACK)),
            Err(why) => env.note(format_args!("BAR1 is not looked at: {why}")),
        }
    }
    // Last: CUDA and NVML open files of their own when they are first asked.
    held.push(("file descriptors", fs::read_dir("/proc/self/fd")?.count() as u64, 2));
    held.push(("memory mappings", fs::read_to_string("/proc/self/maps")?.lines().count() as u64, 16));
    env.note(format_args!("held: {held:?}"));
    Ok(held)
}

fn no_leaks(env: &Env, gdr: &Gdr, before: &Held) -> Outcome {
    for (what, after, slack) in held(env, gdr)? {
        let before = before.iter().find(|(name, ..)| *name == what).map_or(after, |(_, before, _)| *before);
        let leaked = after.saturating_sub(before);
        ensure!(leaked <= slack, "leaked: {leaked} {what}");
    }
    Ok(())
}

pub(super) const CASES: &[Row] = &[
    ("invalidation_access_after_gdr_close_{alloc}", access_after_close, "unmapped is unmapped"),
    ("invalidation_access_after_free_{alloc}", access_after_free, "freed memory stays while mapped"),
    ("invalidation_two_mappings_{alloc}", two_mappings, "freeing one buffer spares another"),
    ("invalidation_partial_unmap", partial_unmap, "a part is unmapped from outside"),
    ("invalidation_free_under_copy", free_under_copy, "freed while another thread copies"),
    (
        "invalidation_fork_access_after_free_{alloc}",
        fork_access_after_free,
        "a stale mapping shows nothing new",
    ),
    ("invalidation_fork_after_gdr_map_{alloc}", after_map, "a forked child has a hole"),
    (
        "invalidation_fork_child_gdr_map_parent_{alloc}",
        child_maps_parents_pin,
        "a child uses nothing of its parent",
    ),
    ("invalidation_fork_map_and_free_{alloc}", map_and_free, "a child's freeing spares its parent"),
    (
        "fork_child_pins_parents_address",
        child_pins_parents_address,
        "an address of another process is refused",
    ),
    ("fork_child_drops", child_drops, "a child's drops spare its parent"),
    (
        "invalidation_unix_sock_shared_fd_gdr_pin_buffer_{alloc}",
        pin_by_shared,
        "a passed descriptor cannot pin",
    ),
    ("invalidation_unix_sock_shared_fd_gdr_map_{alloc}", map_by_shared, "a passed descriptor cannot map"),
    ("bar1_exhaustion", bar1, "BAR1 full: a typed error, and room again afterwards"),
    ("leak_check", leak_check, "cycles of all calls leave nothing behind"),
    ("stress", stress, "the same in many threads at a time"),
    ("leakage_pin_pages_fork_cumemalloc", leak_over_fork, "an old module leaks or panics here"),
];
