//! Cycles of everything, and what is left afterwards.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use gdrcopy::Gdr;

use super::basic::{PAGE, joined};
use super::case::{Env, Outcome, ensure};
use super::resources::Resources;
use super::super::tools_shared::{compare, pattern};

/// Sizes that take turns: parts of pages, a page, a large page.
const SIZES: [usize; 4] = [2 << 20, 4096, PAGE, 100_000];
/// Cycles after which caches of allocators and drivers are filled.
const WARM_UP: u32 = 20;

/// One thread opens the library anew now and then.
pub(super) fn leak_check(env: &Env) -> Outcome {
    let gdr = env.open()?;
    (0..WARM_UP).try_for_each(|number| cycle(env, &gdr, number))?;
    drop(env.open()?);
    let before = Resources::count(env, &gdr)?;
    for number in 0..env.cycles {
        cycle(env, &gdr, number)?;
        if number.is_multiple_of(10) {
            cycle(env, &env.open()?, number)?;
        }
    }
    Resources::count(env, &gdr)?.compare(env, before)
}

/// Many threads.
pub(super) fn stress(env: &Env) -> Outcome {
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
    let before = Resources::count(env, &gdr)?;
    round(env.cycles)?;
    env.note(format_args!("{} threads, {} cycles each", env.threads, env.cycles));
    Resources::count(env, &gdr)?.compare(env, before)
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
        let mut found = [0; 64];
        // The GPU's view costs more than all the rest.
        if number.is_multiple_of(16) {
            buffer.copy_out(offset, &mut found)?;
        } else {
            mapping.read(offset, &mut found)?;
        }
        compare(&format!("cycle {number}, offset {offset}"), &data, &found)?;
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
