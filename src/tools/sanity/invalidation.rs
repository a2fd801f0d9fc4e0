//! Who may reach the memory when, within one process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::basic::{PAGE, SIZE, joined, write_and_check};
use super::case::{Env, Outcome, ensure, persistent, waive};
use super::memory::readable;
use super::super::tools_shared::{compare, pattern};

/// The library may be closed under a mapping; after the mapping nothing is left at its address.
pub(super) fn access_after_close(env: &Env) -> Outcome {
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
pub(super) fn access_after_free(env: &Env) -> Outcome {
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
    let mut found = vec![0; SIZE];
    mapping.read(0, &mut found)?;
    compare("the mapping of freed memory", &data, &found)?;
    let new = pattern(3, SIZE);
    mapping.write(0, &new)?;
    for other in &others {
        other.copy_out(0, &mut found)?;
        compare("memory allocated after that was freed", &pattern(2, SIZE), &found)?;
    }
    ensure!(!pin.invalidated()?, "the pin says that its memory is gone");
    mapping.unmap()?;
    Ok(pin.unpin()?)
}

pub(super) fn two_mappings(env: &Env) -> Outcome {
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

/// A part of a mapping is unmapped by somebody else in the process.
pub(super) fn partial_unmap(env: &Env) -> Outcome {
    let (_, buffer) = env.open_with(4 * PAGE)?;
    let pin = buffer.pin()?;
    let mapping = pin.map()?;
    let start = mapping.as_ptr();
    let hole = start.wrapping_add(PAGE);
    // SAFETY: a part of the mapping that nothing touches any more.
    let rc = unsafe { libc::munmap(hole.cast(), PAGE) };
    ensure!(rc == 0, "munmap of a part: {}", std::io::Error::last_os_error());
    ensure!(!readable(hole.addr())?, "the part is still there");
    let data = pattern(1, PAGE);
    mapping.write(2 * PAGE, &data)?;
    let mut found = vec![0; PAGE];
    buffer.copy_out(2 * PAGE, &mut found)?;
    compare("the part behind the hole", &data, &found)?;
    mapping.unmap()?;
    ensure!(!readable(start.addr())? && !readable(start.addr() + 3 * PAGE)?, "parts of the mapping are left");
    pin.unpin()?;
    write_and_check(&buffer.map()?, &buffer, 0, 4 * PAGE)
}

/// Memory is freed while another thread copies to and from it.
pub(super) fn free_under_copy(env: &Env) -> Outcome {
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
            let mut found = vec![0; SIZE];
            mapping.write(0, &data)?;
            mapping.read(0, &mut found)?;
            compare(&format!("copy {rounds}"), &data, &found)?;
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
