//! Pinning and mapping.

use std::sync::Barrier;
use std::thread;

use gdrcopy::{Attribute, BackendKind, Gdr, GpuBuffer, Mapping, Pin, PinFlags};

use super::case::{Env, Outcome, Stop, ensure, fail, refused, waive};
use super::memory::Raw;
use super::super::tools_shared::{compare, pattern};

/// The size of GDRCopy's tests: 256 KiB and a little, in GPU pages.
pub(super) const SIZE: usize = 320 << 10;
/// A GPU page.
pub(super) const PAGE: usize = 64 << 10;

pub(super) fn basic(env: &Env) -> Outcome {
    pin_and_unpin(env, PinFlags::empty())
}

pub(super) fn force_pcie(env: &Env) -> Outcome {
    needs_force_pcie(env)?;
    pin_and_unpin(env, PinFlags::FORCE_PCIE)
}

fn pin_and_unpin(env: &Env, flags: PinFlags) -> Outcome {
    let (gdr, buffer) = env.open_with(SIZE)?;
    let pin = gdr.pin_with(buffer.addr(), SIZE, flags)?;
    let info = pin.info();
    env.note(format_args!("{info:?}"));
    let (start, end) = (info.va, info.va + info.mapped_size as u64);
    ensure!(!info.mapped, "a new pin says that it is mapped");
    ensure!(info.page_size.is_power_of_two(), "the page size is {}", info.page_size);
    ensure!(start <= buffer.addr() && end >= buffer.addr() + SIZE as u64, "the pin does not hold its range");
    Ok(pin.unpin()?)
}

/// Waives where the flag means nothing.
pub(super) fn needs_force_pcie(env: &Env) -> Outcome {
    let gdr = env.open()?;
    match gdr.attribute(Attribute::SupportPinFlagForcePcie)? {
        0 => waive(format_args!("the {} backend has no FORCE_PCIE here", gdr.backend())),
        _ => Ok(()),
    }
}

pub(super) fn tokens(_: &Env) -> Outcome {
    waive("P2P tokens belong to mappings that vanish with their memory; this interface has none")
}

/// Unlike GDRCopy, addresses of any alignment are mapped.
pub(super) fn unaligned_mapping(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(2 * PAGE)?;
    for skip in [1, 4, 255, 4096, PAGE - 1] {
        let pin = gdr.pin(buffer.addr() + skip as u64, PAGE)?;
        write_and_check(&pin.map()?, &buffer, skip, PAGE)?;
    }
    let Ok(context) = env.cuda(&gdr) else { return Ok(()) };
    let neighbour = Raw::device(&context, 4)?;
    let unaligned = Raw::device(&context, PAGE + 4)?;
    env.note(format_args!("cuMemAlloc gave {:#x} and {:#x}", neighbour.addr, unaligned.addr));
    let mapping = gdr.map(unaligned.addr, PAGE + 4)?;
    let beside = gdr.map(neighbour.addr, 4)?;
    drop(neighbour);
    let data = pattern(1, PAGE + 4);
    mapping.write(0, &data)?;
    let mut found = vec![0; data.len()];
    unaligned.read(&mut found)?;
    compare("beside memory that was freed", &data, &found)?;
    drop(beside);
    Ok(())
}

/// Unlike GDRCopy, the second buffer of a page is mapped too.
pub(super) fn small_buffers(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(PAGE)?;
    let pins = [gdr.pin(buffer.addr(), 8)?, gdr.pin(buffer.addr() + 8, 8)?];
    let mappings = [pins[0].map()?, pins[1].map()?];
    mappings[0].store(0, 0x1111_u64)?;
    mappings[1].store(0, 0x2222_u64)?;
    let mut found = [0; 16];
    buffer.copy_out(0, &mut found)?;
    let mut expected = [0; 16];
    expected[..8].copy_from_slice(&0x1111_u64.to_ne_bytes());
    expected[8..].copy_from_slice(&0x2222_u64.to_ne_bytes());
    Ok(compare("two pins of one page", &expected, &found)?)
}

/// Two allocations of CUDA in one GPU page.
pub(super) fn two_buffers_one_page(env: &Env) -> Outcome {
    let gdr = env.open()?;
    let context = env.cuda(&gdr)?;
    let buffers = (0..16).map(|_| Raw::device(&context, 512)).collect::<Outcome<Vec<_>>>()?;
    let page = |buffer: &Raw| buffer.addr / PAGE as u64;
    let pair = buffers.windows(2).position(|pair| page(&pair[0]) == page(&pair[1]));
    let Some(at) = pair else { return waive("cuMemAlloc gave no two buffers in one page") };
    let mut buffers = buffers.into_iter().skip(at);
    let (Some(first), Some(second)) = (buffers.next(), buffers.next()) else { return fail("lost a buffer") };
    let (one, two) = (gdr.map(first.addr, 512)?, gdr.map(second.addr, 512)?);
    let (ones, twos) = (pattern(1, 512), pattern(2, 512));
    one.write(0, &ones)?;
    two.write(0, &twos)?;
    let mut found = [0; 512];
    first.read(&mut found)?;
    compare("the first", &ones, &found)?;
    second.read(&mut found)?;
    compare("the second", &twos, &found)?;
    drop((one, first));
    two.read(0, &mut found)?;
    Ok(compare("the second after the first was freed", &twos, &found)?)
}

pub(super) fn second_mapping(env: &Env) -> Outcome {
    let (_, buffer) = env.open_with(SIZE)?;
    let pin = buffer.pin()?;
    let mapping = pin.map()?;
    ensure!(pin.info().mapped, "a mapped pin says that it is not");
    refused(env, "a second mapping of a pin", libc::EAGAIN, pin.map())?;
    let other = buffer.pin()?.map()?;
    mapping.store(0, 7_u32)?;
    ensure!(other.load::<u32>(0)? == 7, "a second pin does not show what the first mapping wrote");
    drop(mapping);
    ensure!(!pin.info().mapped, "an unmapped pin says that it is mapped");
    pin.map()?;
    Ok(())
}

/// A second unpin cannot be written in Rust; what can be is an unpin under a mapping.
pub(super) fn unpin_while_mapped(env: &Env) -> Outcome {
    let (_, buffer) = env.open_with(SIZE)?;
    let pin = buffer.pin()?;
    let mapping = pin.map()?;
    pin.unpin()?;
    write_and_check(&mapping, &buffer, 0, SIZE)?;
    mapping.unmap()?;
    write_and_check(&buffer.map()?, &buffer, 0, SIZE)
}

pub(super) fn child_thread(env: &Env) -> Outcome {
    const LEN: usize = 16 * PAGE;
    let (gdr, buffer) = env.open_with(LEN)?;
    let setup = |gdr: &Gdr| -> gdrcopy::Result<(Pin, Mapping)> {
        let pin = gdr.pin(buffer.addr(), LEN)?;
        let mapping = pin.map()?;
        Ok((pin, mapping))
    };
    let teardown = |(pin, mapping): (Pin, Mapping)| -> gdrcopy::Result<()> {
        mapping.unmap()?;
        pin.unpin()
    };
    let both = Barrier::new(2);
    let at_once = || {
        both.wait();
        teardown(setup(&gdr)?)
    };
    thread::scope(|scope| {
        env.note("one thread pins and unpins");
        joined(scope.spawn(|| teardown(setup(&gdr)?)))?;
        env.note("one thread pins, another unpins");
        let made = joined(scope.spawn(|| setup(&gdr)))?;
        joined(scope.spawn(|| teardown(made)))?;
        env.note("two threads pin the same memory at the same time");
        let threads = [scope.spawn(at_once), scope.spawn(at_once)];
        threads.into_iter().try_for_each(joined)
    })?;
    env.note("another thread closes and frees");
    thread::spawn(move || drop((gdr, buffer))).join().map_err(|_| Stop::Failed("the thread panicked".into()))
}

/// Threads that map, use and unmap buffers of their own and one that all share.
pub(super) fn concurrent(env: &Env) -> Outcome {
    let (gdr, shared) = env.open_with(SIZE)?;
    let own: Vec<_> = (0..env.threads).map(|_| env.alloc(&gdr, SIZE)).collect::<Outcome<_>>()?;
    let start = Barrier::new(own.len());
    let work = |number: usize| -> Outcome {
        let buffer = &own[number];
        start.wait();
        for cycle in 0..env.cycles as usize {
            let len = 1 + (cycle * 7919) % SIZE;
            write_and_check(&buffer.map()?, buffer, (cycle * 31) % (SIZE - len + 1), len)?;
            let mapping = shared.map()?;
            mapping.store(number * 8, cycle as u64)?;
            ensure!(
                mapping.load::<u64>(number * 8)? == cycle as u64,
                "thread {number}: a word of its own changed"
            );
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..own.len()).map(|number| scope.spawn(move || work(number))).collect();
        threads.into_iter().try_for_each(joined)
    })
}

pub(super) fn attributes(env: &Env) -> Outcome {
    let gdr = env.open()?;
    for attribute in
        [Attribute::UsePersistentMapping, Attribute::SupportPinFlagForcePcie, Attribute::UsingDmaBufMmap]
    {
        let value = gdr.attribute(attribute)?;
        env.note(format_args!("{attribute:?}: {value}"));
        ensure!(value <= 1, "{attribute:?} is {value}");
        let dmabuf = gdr.backend() == BackendKind::DmaBuf;
        let contradicts = attribute == Attribute::UsingDmaBufMmap && (value == 1) != dmabuf;
        ensure!(!contradicts, "{attribute:?} is {value} on the {} backend", gdr.backend());
    }
    Ok(())
}

/// The result of a thread, or that it panicked.
pub(super) fn joined<T, E: Into<Stop>>(thread: thread::ScopedJoinHandle<'_, Result<T, E>>) -> Outcome<T> {
    thread.join().map_err(|_| Stop::Failed("a thread panicked".into()))?.map_err(Into::into)
}

/// Writes a part through a mapping that begins at `skip` in the buffer, and checks it and its neighbourhood.
pub(super) fn write_and_check(mapping: &Mapping, buffer: &GpuBuffer, skip: usize, len: usize) -> Outcome {
    // A whole-buffer mapping is written in the middle, one of the part at its start.
    let offset = if mapping.len() == buffer.len() { skip } else { 0 };
    let (data, around) = (pattern(1, len), pattern(2, buffer.len()));
    buffer.copy_in(0, &around)?;
    mapping.write(offset, &data)?;
    let mut expected = around;
    expected[skip..skip + len].copy_from_slice(&data);
    let mut found = vec![0; buffer.len()];
    buffer.copy_out(0, &mut found)?;
    compare(&format!("{len} bytes at {skip} written"), &expected, &found)?;
    let mut back = vec![0; len];
    mapping.read(offset, &mut back)?;
    Ok(compare(&format!("{len} bytes at {skip} read back"), &data, &back)?)
}
