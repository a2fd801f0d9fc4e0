//! Every byte, both ways, in any alignment.

use gdrcopy::{Mapping, MappingType, PinFlags, Word};

use super::basic::{PAGE, SIZE, needs_force_pcie, write_and_check};
use super::case::{Env, Outcome, ensure, waive};
use super::super::tools_shared::{compare, pattern};

/// Offsets of GDRCopy's tests.
const OFFSETS: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 11, 129, 1023];

pub(super) fn validation(env: &Env) -> Outcome {
    validate(env, PinFlags::empty())
}

pub(super) fn validation_force_pcie(env: &Env) -> Outcome {
    needs_force_pcie(env)?;
    validate(env, PinFlags::FORCE_PCIE)
}

fn validate(env: &Env, flags: PinFlags) -> Outcome {
    let (gdr, buffer) = env.open_with(SIZE)?;
    let pin = gdr.pin_with(buffer.addr(), SIZE, flags)?;
    let mapping = pin.map()?;
    env.note(format_args!("{mapping:?}"));
    let mut found = vec![0; SIZE];

    env.note("check 1: CPU stores, read back by CUDA");
    for pass in 0..env.cycles.min(1000) {
        let data = pattern(pass, SIZE);
        store_words(&mapping, &data);
        buffer.copy_out(0, &mut found)?;
        compare(&format!("CPU stores, pass {pass}"), &data, &found)?;
    }
    env.note("check 2: write, read back by CUDA and by read; CUDA's write, read back by read");
    write_and_check(&mapping, &buffer, 0, SIZE)?;
    let data = pattern(3, SIZE);
    buffer.copy_in(0, &data)?;
    mapping.read(0, &mut found)?;
    compare("written by CUDA, read through the mapping", &data, &found)?;

    env.note("check 3: offsets of words and bytes, on the mapping, on the host and on both");
    let data = pattern(4, SIZE);
    for offset in OFFSETS.into_iter().flat_map(|offset| [4 * offset, offset]) {
        for (there, here) in [(offset, 0), (0, offset), (offset, offset)] {
            let around = pattern(5, SIZE);
            buffer.copy_in(0, &around)?;
            mapping.write(there, &data[here..SIZE - offset + here])?;
            let mut expected = around;
            expected[there..SIZE - offset + there].copy_from_slice(&data[here..SIZE - offset + here]);
            buffer.copy_out(0, &mut found)?;
            compare(&format!("offset {offset} written, {there} there and {here} here"), &expected, &found)?;
            found.fill(0);
            mapping.read(there, &mut found[here..SIZE - offset + here])?;
            let (good, back) = (&data[here..SIZE - offset + here], &found[here..SIZE - offset + here]);
            compare(&format!("offset {offset} read, {there} there and {here} here"), good, back)?;
        }
    }
    mapping.unmap()?;
    Ok(pin.unpin()?)
}

/// Stores every word with an ordinary store, in the manner of a program that has the address.
fn store_words(mapping: &Mapping, data: &[u8]) {
    for (i, word) in data.as_chunks::<4>().0.iter().enumerate() {
        let at = mapping.as_ptr().cast::<u32>().wrapping_add(i);
        // SAFETY: the mapping is as long as the data and its start is aligned to pages.
        unsafe { at.write_volatile(u32::from_ne_bytes(*word)) };
    }
    mapping.fence();
}

/// Pins that begin and end anywhere: exact to the byte, also beside them.
pub(super) fn unaligned_pins(env: &Env) -> Outcome {
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
pub(super) fn words(env: &Env) -> Outcome {
    let (_, buffer) = env.open_with(PAGE)?;
    let mapping = buffer.map()?;
    let check = |what: &str, offset: usize, bytes: &[u8]| -> Outcome {
        let mut found = [0; 24];
        buffer.copy_out(offset - 8, &mut found)?;
        let mut expected = [0; 24];
        expected[8..8 + bytes.len()].copy_from_slice(bytes);
        Ok(compare(what, &expected, &found)?)
    };
    for offset in [8, 64, 4096, PAGE - 64] {
        let clear = || buffer.copy_in(offset - 8, &[0; 24]);
        clear()?;
        word(&mapping, offset, 0x81_u8)?;
        check("a byte", offset, &0x81_u8.to_ne_bytes())?;
        clear()?;
        word(&mapping, offset + 2, 0x8182_u16)?;
        check("2 bytes", offset, &[&[0, 0][..], &0x8182_u16.to_ne_bytes()].concat())?;
        clear()?;
        word(&mapping, offset + 4, 0x8182_8384_u32)?;
        check("4 bytes", offset, &[&[0; 4][..], &0x8182_8384_u32.to_ne_bytes()].concat())?;
        clear()?;
        word(&mapping, offset, 0x8182_8384_8586_8788_u64)?;
        check("8 bytes", offset, &0x8182_8384_8586_8788_u64.to_ne_bytes())?;
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
pub(super) fn mix_mappings(env: &Env) -> Outcome {
    let (_, buffer) = env.open_with(SIZE)?;
    let map = |kind| match buffer.pin()?.map_as(kind) {
        Err(error @ gdrcopy::Error::Unsupported { .. }) => waive(error),
        result => Ok(result?),
    };
    let mappings = [map(MappingType::WriteCombining)?, map(MappingType::Cached)?];
    let mut found = vec![0; SIZE];
    for (seed, (writer, reader)) in [(1, (0, 1)), (2, (1, 0))] {
        let data = pattern(seed, SIZE);
        mappings[writer].write(0, &data)?;
        mappings[reader].read(0, &mut found)?;
        compare(&format!("mapping {reader} after mapping {writer}"), &data, &found)?;
    }
    Ok(())
}
