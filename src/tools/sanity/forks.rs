//! Who may reach the memory when, between a parent and its forked child.

use super::basic::{PAGE, write_and_check};
use super::case::{Env, Outcome, ensure, persistent, refused, waive};
use super::fork::{fork, receive, send};
use super::memory::readable;
use cudarc::driver::sys::CUdevice_attribute;

/// Waives where only one process at a time may use the GPU.
fn shared_gpu(env: &Env, gdr: &gdrcopy::Gdr) -> Outcome {
    let Ok(context) = env.cuda(gdr) else { return Ok(()) };
    match context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)? {
        0 => Ok(()),
        _ => waive("the GPU is not in the default compute mode, and two processes are to use it"),
    }
}

/// A stale mapping of the parent never shows what the child writes to memory of its own.
pub(super) fn access_after_free(env: &Env) -> Outcome {
    // Forked first: each side opens for itself.
    let child = fork(|parent| {
        receive(&parent)?;
        let (_gdr, buffer) = env.open_with(PAGE)?;
        let mapping = buffer.map()?;
        mapping.store(0, 0xc41d_u64)?;
        mapping.flush()?;
        send(&parent, 1)?;
        // The memory stays until the parent has looked.
        receive(&parent).map(drop)
    })?;
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
pub(super) fn after_map(env: &Env) -> Outcome {
    let (_, buffer) = env.open_with(PAGE)?;
    let mapping = buffer.map()?;
    mapping.store(0, 0x9a7e_u64)?;
    let addr = mapping.as_ptr().addr();
    let child = fork(|_| {
        ensure!(!readable(addr)?, "the child can read the parent's mapping");
        Ok(())
    })?;
    child.join()?;
    ensure!(mapping.load::<u64>(0)? == 0x9a7e, "the parent's mapping changed");
    write_and_check(&mapping, &buffer, 0, PAGE)
}

/// A forked child can neither map the parent's pin nor pin, allocate or ask through the parent's library.
pub(super) fn child_maps_parents_pin(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(PAGE)?;
    let pin = buffer.pin()?;
    let child = fork(|_| {
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
pub(super) fn map_and_free(env: &Env) -> Outcome {
    let child = fork(|parent| {
        receive(&parent)?;
        let (_gdr, buffer) = env.open_with(PAGE)?;
        let mapping = buffer.map()?;
        mapping.store(0, 0xc41d_u64)?;
        drop(buffer);
        drop(mapping);
        send(&parent, 1)
    })?;
    let (gdr, buffer) = env.open_with(PAGE)?;
    shared_gpu(env, &gdr)?;
    let mapping = buffer.map()?;
    mapping.store(0, 0x9a7e_u64)?;
    send(&child.stream, 1)?;
    receive(&child.stream)?;
    ensure!(mapping.load::<u64>(0)? == 0x9a7e, "the child's freeing changed the parent's mapping");
    child.join()?;
    write_and_check(&mapping, &buffer, 0, PAGE)
}

/// A child that drops what it inherited does the parent no harm.
pub(super) fn child_drops(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(PAGE)?;
    let pin = buffer.pin()?;
    let mapping = pin.map()?;
    mapping.store(0, 0x9a7e_u64)?;
    // The child runs the drops on its copies of these; the parent's values are left as they are.
    let inherited = std::mem::ManuallyDrop::new((mapping, pin, buffer, gdr));
    let child = fork(|_| {
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
pub(super) fn child_pins_parents_address(env: &Env) -> Outcome {
    let child = fork(|parent| {
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

pub(super) fn tokens(_: &Env) -> Outcome {
    waive("P2P tokens are not in this interface; fork_child_pins_parents_address tests addresses")
}
