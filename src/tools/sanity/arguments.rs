//! What must be refused, with the right error and without harm.

use super::basic::{PAGE, SIZE, write_and_check};
use super::case::{Env, Outcome, ensure, fail, refused, waive};
use super::memory::Raw;
use super::super::tools_shared::Pinned;
use super::super::tools_shared::Failure;
use super::super::tools_shared::{compare, pattern};

pub(super) fn null(env: &Env) -> Outcome {
    refused(env, "address 0", libc::EINVAL, env.open()?.pin(0, PAGE))
}

pub(super) fn size_zero(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(PAGE)?;
    refused(env, "a pin of 0 bytes", libc::EINVAL, gdr.pin(buffer.addr(), 0))?;
    refused(env, "an allocation of 0 bytes", libc::EINVAL, gdr.alloc(env.common.gpu, 0))?;
    let mapping = buffer.map()?;
    mapping.write(0, &[])?;
    mapping.read(mapping.len(), &mut [])?;
    Ok(())
}

pub(super) fn beyond_allocation(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(SIZE)?;
    let addr = buffer.addr();
    refused(env, "a pin that wraps around", libc::EINVAL, gdr.pin(addr, usize::MAX))?;
    refused(env, "a pin of half the address space", libc::EINVAL, gdr.pin(addr, usize::MAX / 2))?;
    // The pages of a real GPU are 2 MiB, so what lies right behind an allocation may belong to it.
    refused(env, "a pin of 4 GiB too much", libc::EINVAL, gdr.pin(addr, SIZE + (4 << 30)))?;
    write_and_check(&buffer.map()?, &buffer, 0, SIZE)
}

pub(super) fn host_pointer(env: &Env) -> Outcome {
    let gdr = env.open()?;
    let memory = vec![7_u8; 4 * PAGE];
    refused(env, "ordinary host memory", libc::EINVAL, gdr.pin(memory.as_ptr().addr() as u64, PAGE))?;
    ensure!(memory.iter().all(|&byte| byte == 7), "the refused memory was changed");
    let Ok(context) = env.cuda(&gdr) else { return Ok(()) };
    match Pinned::alloc(&context, PAGE) {
        Ok(pinned) => refused(env, "pinned host memory", libc::EINVAL, gdr.pin(pinned.addr(), PAGE)),
        Err(Failure::Usage(message) | Failure::Failed(message)) => fail(message),
    }
}

pub(super) fn managed_memory(env: &Env) -> Outcome {
    let gdr = env.open()?;
    let memory = Raw::managed(&env.cuda(&gdr)?, PAGE)?;
    refused(env, "managed memory", libc::EINVAL, gdr.pin(memory.addr, PAGE))
}

pub(super) fn freed_memory(env: &Env) -> Outcome {
    let (gdr, buffer) = env.open_with(SIZE)?;
    let addr = buffer.addr();
    drop(buffer);
    refused(env, "freed memory", libc::EINVAL, gdr.pin(addr, SIZE))
}

pub(super) fn no_such_gpu(env: &Env) -> Outcome {
    let gdr = env.open()?;
    for gpu in [-1, 1_000_000, i32::MAX] {
        refused(env, &format!("GPU {gpu}"), libc::EINVAL, gdr.alloc(gpu, PAGE))?;
    }
    Ok(())
}

/// Memory of one GPU, used by a thread whose current GPU is another.
pub(super) fn other_gpu(env: &Env) -> Outcome {
    let gdr = env.open()?;
    let gpus = gdr.gpus()?;
    let Some(other) = gpus.iter().find(|gpu| gpu.ordinal != env.common.gpu) else {
        return waive("needs two GPUs");
    };
    let context = env.cuda(&gdr)?;
    let (here, there) = (env.alloc(&gdr, SIZE)?, gdr.alloc(other.ordinal, SIZE)?);
    context.bind_to_thread()?;
    let (near, far) = (here.map()?, there.map()?);
    let (one, two) = (pattern(1, SIZE), pattern(2, SIZE));
    near.write(0, &one)?;
    far.write(0, &two)?;
    let mut found = vec![0; SIZE];
    here.copy_out(0, &mut found)?;
    compare("this GPU", &one, &found)?;
    there.copy_out(0, &mut found)?;
    Ok(compare("the other GPU", &two, &found)?)
}

pub(super) fn out_of_bounds(env: &Env) -> Outcome {
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
