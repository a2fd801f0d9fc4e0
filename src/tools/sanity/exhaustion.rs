//! What happens when BAR1 is full.

use super::basic::{PAGE, write_and_check};
use super::case::{Env, Outcome, ensure, fail, waive};
use super::nvml;

/// Mapping attempts beyond what fits.
const EXTRA: u64 = 8;

/// Maps until BAR1 is full: a typed error, no harm to what is mapped, and room again when all is released.
pub(super) fn bar1(env: &Env) -> Outcome {
    let gdr = env.open()?;
    let context = env.cuda(&gdr)?;
    let pci = gdr.gpus()?.into_iter().find(|gpu| gpu.ordinal == env.common.gpu).map(|gpu| gpu.pci);
    let bar1 = match pci.map(|pci| nvml::bar1(&pci)) {
        Some(Ok(bar1)) => bar1,
        Some(Err(why)) => return waive(format_args!("the size of BAR1 is not known: {why}")),
        None => return fail("the GPU is not in the list of GPUs"),
    };
    let memory = context.total_mem()? as u64;
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
