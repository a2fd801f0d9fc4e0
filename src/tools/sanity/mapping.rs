//! Cases of pinning, mapping, arguments and data.

use std::sync::Barrier;
use std::thread;

use gdrcopy::{Attribute, BackendKind, Gdr, GpuBuffer, Mapping, MappingType, Pin, PinFlags, Word};

use super::super::cuda::{compare, compare_buffer, compare_mapping, pattern, pinned};
use super::lifetime::Raw;
use super::{Env, Outcome, Row, Stop, fail, refused, waive};

/// The size of GDRCopy's tests: 256 KiB and a little, in GPU pages.
pub(super) const SIZE: usize = 320 << 10;
/// A GPU page.
pub(super) const PAGE: usize = 64 << 10;

fn pin_and_unpin(env: &Env, flags: PinFlags) -> Outcome {
    needs(env, flags)?;
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

/// Waives the case where the backend ignores the flags.
fn needs(env: &Env, flags: PinFlags) -> Outcome {
    let gdr = env.open()?;
    match gdr.attribute(Attribute::SupportPinFlagForcePcie)? {
        0 if !flags.is_empty() => waive(format_args!("the {} backend has no {flags:?} here", gdr.backend())),
        _ => Ok(()),
    }
}

/// Unlike GDRCopy, addresses of any alignment are mapped.
fn unaligned_mapping(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(2 * PAGE)?;
    for skip in [1, 4, 255, 4096, PAGE - 1] {
        let pin = gdr.pin(buffer.addr() + skip as u64, PAGE)?;
        write_and_check(&pin.map()?, &buffer, skip, PAGE)?;
    }
    let Ok(gpu) = env.cuda(&gdr) else { return Ok(()) };
    let neighbour = Raw::device(&gpu, 4)?;
    let unaligned = Raw::device(&gpu, PAGE + 4)?;
    env.note(format_args!("cuMemAlloc gave {:#x} and {:#x}", neighbour.addr, unaligned.addr));
    let mapping = gdr.map(unaligned.addr, PAGE + 4)?;
    let beside = gdr.map(neighbour.addr, 4)?;
    drop(neighbour);
    let data = pattern(1, PAGE + 4);
    mapping.write(0, &data)?;
    unaligned.compare("beside memory that was freed", &data)?;
    drop(beside);
    Ok(())
}

/// Unlike GDRCopy, the second buffer of a page is mapped too.
fn small_buffers(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(PAGE)?;
    let pins = [gdr.pin(buffer.addr(), 8)?, gdr.pin(buffer.addr() + 8, 8)?];
    let mappings = [pins[0].map()?, pins[1].map()?];
    mappings[0].store(0, 0x1111_u64)?;
    mappings[1].store(0, 0x2222_u64)?;
    let expected = [0x1111, 0x2222].map(u64::to_ne_bytes).concat();
    Ok(compare_buffer("two pins of one page", &buffer, 0, &expected)?)
}

/// Two allocations of CUDA in one GPU page.
fn two_buffers_one_page(env: &Env) -> Outcome {
    let gdr = env.open()?;
    let gpu = env.cuda(&gdr)?;
    let buffers = (0..16).map(|_| Raw::device(&gpu, 512)).collect::<Outcome<Vec<_>>>()?;
    let page = |buffer: &Raw| buffer.addr / PAGE as u64;
    let pair = buffers.windows(2).position(|pair| page(&pair[0]) == page(&pair[1]));
    let Some(at) = pair else { return waive("cuMemAlloc gave no two buffers in one page") };
    let mut buffers = buffers.into_iter().skip(at);
    let (Some(first), Some(second)) = (buffers.next(), buffers.next()) else { return fail("lost a buffer") };
    let (one, two) = (gdr.map(first.addr, 512)?, gdr.map(second.addr, 512)?);
    let (ones, twos) = (pattern(1, 512), pattern(2, 512));
    one.write(0, &ones)?;
    two.write(0, &twos)?;
    first.compare("the first", &ones)?;
    second.compare("the second", &twos)?;
    drop((one, first));
    Ok(compare_mapping("the second after the first was freed", &two, 0, &twos)?)
}

fn second_mapping(env: &Env) -> Outcome {
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
fn unpin_while_mapped(env: &Env) -> Outcome {
    let (_, buffer) = env.open_with(SIZE)?;
    let pin = buffer.pin()?;
    let mapping = pin.map()?;
    pin.unpin()?;
    write_and_check(&mapping, &buffer, 0, SIZE)?;
    mapping.unmap()?;
    write_and_check(&buffer.map()?, &buffer, 0, SIZE)
}

fn child_thread(env: &Env) -> Outcome {
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
fn concurrent(env: &Env) -> Outcome {
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

fn attributes(env: &Env) -> Outcome {
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
    compare_buffer(&format!("{len} bytes at {skip} written"), buffer, 0, &expected)?;
    Ok(compare_mapping(&format!("{len} bytes at {skip} read back"), mapping, offset, &data)?)
}

fn null(env: &Env) -> Outcome {
    refused(env, "address 0", libc::EINVAL, env.open()?.pin(0, PAGE))
}

fn size_zero(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(PAGE)?;
    refused(env, "a pin of 0 bytes", libc::EINVAL, gdr.pin(buffer.addr(), 0))?;
    refused(env, "an allocation of 0 bytes", libc::EINVAL, gdr.alloc(env.common.gpu, 0))?;
    let mapping = buffer.map()?;
    mapping.write(0, &[])?;
    mapping.read(mapping.len(), &mut [])?;
    Ok(())
}

fn beyond_allocation(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(SIZE)?;
    let addr = buffer.addr();
    refused(env, "a pin that wraps around", libc::EINVAL, gdr.pin(addr, usize::MAX))?;
    refused(env, "a pin of half the address space", libc::EINVAL, gdr.pin(addr, usize::MAX / 2))?;
    // The pages of a real GPU are 2 MiB, so what lies right behind an allocation may belong to it.
    refused(env, "a pin of 4 GiB too much", libc::EINVAL, gdr.pin(addr, SIZE + (4 << 30)))?;
    write_and_check(&buffer.map()?, &buffer, 0, SIZE)
}

fn host_pointer(env: &Env) -> Outcome {
    let gdr = env.open()?;
    let memory = vec![7_u8; 4 * PAGE];
    refused(env, "ordinary host memory", libc::EINVAL, gdr.pin(memory.as_ptr().addr() as u64, PAGE))?;
    ensure!(memory.iter().all(|&byte| byte == 7), "the refused memory was changed");
    let Ok(gpu) = env.cuda(&gdr) else { return Ok(()) };
    refused(env, "pinned host memory", libc::EINVAL, gdr.pin(pinned(&gpu, PAGE)?.addr(), PAGE))
}

fn managed_memory(env: &Env) -> Outcome {
    let gdr = env.open()?;
    let memory = Raw::managed(&env.cuda(&gdr)?, PAGE)?;
    refused(env, "managed memory", libc::EINVAL, gdr.pin(memory.addr, PAGE))
}

fn freed_memory(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(SIZE)?;
    let addr = buffer.addr();
    drop(buffer);
    refused(env, "freed memory", libc::EINVAL, gdr.pin(addr, SIZE))
}

fn no_such_gpu(env: &Env) -> Outcome {
    let gdr = env.open()?;
    for gpu in [-1, 1_000_000, i32::MAX] {
        refused(env, &format!("GPU {gpu}"), libc::EINVAL, gdr.alloc(gpu, PAGE))?;
    }
    Ok(())
}

/// Memory of one GPU, used by a thread whose current GPU is another.
fn other_gpu(env: &Env) -> Outcome {
    let gdr = env.open()?;
    let gpus = gdr.gpus()?;
    let Some(other) = gpus.iter().find(|gpu| gpu.ordinal != env.common.gpu) else {
        return waive("needs two GPUs");
    };
    let gpu = env.cuda(&gdr)?;
    let (here, there) = (env.alloc(&gdr, SIZE)?, gdr.alloc(other.ordinal, SIZE)?);
    let _current = gpu.enter()?;
    let (near, far) = (here.map()?, there.map()?);
    let (one, two) = (pattern(1, SIZE), pattern(2, SIZE));
    near.write(0, &one)?;
    far.write(0, &two)?;
    compare_buffer("this GPU", &here, 0, &one)?;
    Ok(compare_buffer("the other GPU", &there, 0, &two)?)
}

fn out_of_bounds(env: &Env) -> Outcome {
    let (_, buffer) = env.open_with(SIZE)?;
    let mapping = buffer.map()?;
    let mut byte = [0];
    refused(env, "a write behind the end", libc::EINVAL, mapping.write(SIZE, &[1]))?;
    refused(env, "a write over the end", libc::EINVAL, mapping.write(SIZE - 1, &[1, 2]))?;
    refused(env, "a read at the largest offset", libc::EINVAL, mapping.read(usize::MAX, &mut byte))?;
    refused(env, "a word behind the end", libc::EINVAL, mapping.load::<u64>(SIZE))?;
    refused(env, "an unaligned word", libc::EINVAL, mapping.store(2, 1_u32))?;
    refused(env, "a copy behind the end by CUDA", libc::EINVAL, buffer.copy_in(SIZE, &[1]))?;
    write_and_check(&mapping, &buffer, 0, SIZE)
}

const OFFSETS: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 11, 129, 1023];

fn validation(env: &Env, flags: PinFlags) -> Outcome {
    needs(env, flags)?;
    let (gdr, buffer) = env.open_with(SIZE)?;
    let pin = gdr.pin_with(buffer.addr(), SIZE, flags)?;
    let mapping = pin.map()?;
    env.note(format_args!("{mapping:?}"));
    let mut found = vec![0; SIZE];

    env.note("check 1: CPU stores, read back by CUDA");
    for pass in 0..env.cycles.min(1000) {
        let data = pattern(pass, SIZE);
        store_words(&mapping, &data);
        compare_buffer(&format!("CPU stores, pass {pass}"), &buffer, 0, &data)?;
    }
    env.note("check 2: write, read back by CUDA and by read; CUDA's write, read back by read");
    write_and_check(&mapping, &buffer, 0, SIZE)?;
    let data = pattern(3, SIZE);
    buffer.copy_in(0, &data)?;
    compare_mapping("written by CUDA, read through the mapping", &mapping, 0, &data)?;

    env.note("check 3: offsets of words and bytes, on the mapping, on the host and on both");
    let data = pattern(4, SIZE);
    for offset in OFFSETS.into_iter().flat_map(|offset| [4 * offset, offset]) {
        for (there, here) in [(offset, 0), (0, offset), (offset, offset)] {
            let (mut expected, part) = (pattern(5, SIZE), &data[here..][..SIZE - offset]);
            let places = format!("{there} there and {here} here");
            buffer.copy_in(0, &expected)?;
            mapping.write(there, part)?;
            expected[there..][..part.len()].copy_from_slice(part);
            compare_buffer(&format!("offset {offset} written, {places}"), &buffer, 0, &expected)?;
            found.fill(0);
            mapping.read(there, &mut found[here..][..part.len()])?;
            compare(&format!("offset {offset} read, {places}"), part, &found[here..][..part.len()])?;
        }
    }
    mapping.unmap()?;
    Ok(pin.unpin()?)
}

/// Stores every word with an ordinary store, as a program does that has the address.
fn store_words(mapping: &Mapping, data: &[u8]) {
    for (i, word) in data.as_chunks::<4>().0.iter().enumerate() {
        let at = mapping.as_ptr().cast::<u32>().wrapping_add(i);
        // SAFETY: the mapping is as long as the data and its start is aligned to pages.
        unsafe { at.write_volatile(u32::from_ne_bytes(*word)) };
    }
    mapping.fence();
}

/// Pins that begin and end anywhere: exact to the byte, also beside them.
fn unaligned_pins(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(3 * PAGE)?;
    for skip in [0, 1, 2, 3, 5, 7, 8, 63, 65, 4095, 4096, 4097, PAGE - 1, PAGE, PAGE + 1] {
        for len in [1, 2, 3, 4, 7, 8, 15, 16, 17, 63, 64, 65, 255, 4095, 4097, PAGE - 1, PAGE, PAGE + 1] {
            let mapping = gdr.map(buffer.addr() + skip as u64, len)?;
            ensure!(mapping.len() == len, "{len} bytes were asked for, {} mapped", mapping.len());
            write_and_check(&mapping, &buffer, skip, len)?;
        }
    }
    Ok(())
}

/// Words of every size arrive whole, at their place and nowhere else.
fn words(env: &Env) -> Outcome {
    let (_, buffer) = env.open_with(PAGE)?;
    let mapping = buffer.map()?;
    // Then clears the bytes for the next word.
    let check = |offset: usize, bytes: &[u8]| -> Outcome {
        let mut expected = [0; 24];
        expected[8..8 + bytes.len()].copy_from_slice(bytes);
        compare_buffer(&format!("{} bytes at {offset}", bytes.len()), &buffer, offset - 8, &expected)?;
        Ok(buffer.copy_in(offset - 8, &[0; 24])?)
    };
    for offset in [8, 64, 4096, PAGE - 64] {
        buffer.copy_in(offset - 8, &[0; 24])?;
        word(&mapping, offset, 0x81_u8)?;
        check(offset, &[0x81])?;
        word(&mapping, offset + 2, 0x8182_u16)?;
        check(offset, &[[0; 2], 0x8182_u16.to_ne_bytes()].concat())?;
        word(&mapping, offset + 4, 0x8182_8384_u32)?;
        check(offset, &[[0; 4], 0x8182_8384_u32.to_ne_bytes()].concat())?;
        word(&mapping, offset, 0x8182_8384_8586_8788_u64)?;
        check(offset, &0x8182_8384_8586_8788_u64.to_ne_bytes())?;
    }
    Ok(())
}

fn word<T: Word + PartialEq + std::fmt::Debug>(mapping: &Mapping, offset: usize, value: T) -> Outcome {
    mapping.store(offset, value)?;
    let back: T = mapping.load(offset)?;
    ensure!(back == value, "stored {value:?} at {offset}, loaded {back:?}");
    Ok(())
}

/// A write-combining and a cached mapping of the same memory see each other's writes.
fn mix_mappings(env: &Env) -> Outcome {
    let (_, buffer) = env.open_with(SIZE)?;
    let map = |kind| match buffer.pin()?.map_as(kind) {
        Err(error @ gdrcopy::Error::Unsupported { .. }) => waive(error),
        result => Ok(result?),
    };
    let mappings = [map(MappingType::WriteCombining)?, map(MappingType::Cached)?];
    for (seed, (writer, reader)) in [(1, (0, 1)), (2, (1, 0))] {
        let data = pattern(seed, SIZE);
        mappings[writer].write(0, &data)?;
        compare_mapping(&format!("mapping {reader} after mapping {writer}"), &mappings[reader], 0, &data)?;
    }
    Ok(())
}

pub(super) const CASES: &[Row] = &[
    ("basic_{alloc}", |env| pin_and_unpin(env, PinFlags::empty()), "pin and unpin"),
    ("basic_v2_forcepci_{alloc}", |env| pin_and_unpin(env, PinFlags::FORCE_PCIE), "pin through PCIe"),
    ("basic_unaligned_mapping", unaligned_mapping, "unaligned addresses work; a freed neighbour is harmless"),
    ("basic_small_buffers_mapping", small_buffers, "two pins of 8 bytes in one page"),
    ("basic_two_buffers_one_page", two_buffers_one_page, "two allocations in one page, one freed"),
    ("basic_child_thread_pins_buffer_{alloc}", child_thread, "pin, unpin, close in several threads"),
    ("basic_second_mapping", second_mapping, "one mapping of a pin, several pins of a buffer"),
    ("basic_unpin_while_mapped", unpin_while_mapped, "a mapping keeps its pin"),
    ("basic_concurrent_mappings", concurrent, "threads map own and shared buffers"),
    ("attributes_sanity", attributes, "the properties of the backend"),
    ("arguments_null", null, "address 0 is refused"),
    ("arguments_size_zero", size_zero, "0 bytes are refused"),
    ("arguments_beyond_allocation", beyond_allocation, "more than was allocated is refused"),
    ("arguments_host_pointer", host_pointer, "host memory is refused"),
    ("arguments_managed_memory", managed_memory, "managed memory is refused"),
    ("arguments_freed_memory", freed_memory, "freed memory is refused"),
    ("arguments_no_such_gpu", no_such_gpu, "GPUs that do not exist are refused"),
    ("arguments_other_gpu", other_gpu, "memory of another GPU than the current one"),
    ("arguments_out_of_bounds", out_of_bounds, "accesses outside a mapping are refused"),
    (
        "data_validation_{alloc}",
        |env| validation(env, PinFlags::empty()),
        "all bytes, both ways, all offsets",
    ),
    (
        "data_validation_v2_forcepci_cumemalloc",
        |env| validation(env, PinFlags::FORCE_PCIE),
        "the same through PCIe",
    ),
    ("data_validation_mix_mappings_cumemalloc", mix_mappings, "write-combining beside cached"),
    ("data_unaligned_pins", unaligned_pins, "pins of any start and length, exact to the byte"),
    ("data_words", words, "words of 1 to 8 bytes arrive whole"),
];
