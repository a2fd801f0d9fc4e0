//! Registering memory while a stream is blocked: does it wait for the stream?

use std::time::{Duration, Instant};

use super::gpu::{Batch, Op};
use super::lab::Lab;
use super::report::Figure;
use super::scene::until;
use super::watch::Watch;
use super::words::Word;
use crate::bench::Result;

/// Bytes of the small registration.
const SMALL: usize = 4096;

/// A stream that a wait blocks, or not.
struct Blocker<'a> {
    lab: &'a Lab,
    watch: &'a Watch,
    words: [Word; 2],
    blocks: bool,
}

/// Times so many calls of each kind, first with no stream blocked.
pub(super) fn measure(lab: &Lab, calls: u64, watch: &Watch) -> Result<Vec<Figure>> {
    let words = [lab.arena.host()?, lab.arena.host()?];
    let mut figures = Vec::new();
    for (blocks, names) in [
        (
            false,
            [
                ["cuMemHostRegister, 4 KiB, idle", "cuMemHostUnregister, 4 KiB, idle"],
                ["cuMemHostRegister, 1 MiB, idle", "cuMemHostUnregister, 1 MiB, idle"],
            ],
        ),
        (
            true,
            [
                [
                    "cuMemHostRegister, 4 KiB, a stream blocked",
                    "cuMemHostUnregister, 4 KiB, a stream blocked",
                ],
                [
                    "cuMemHostRegister, 1 MiB, a stream blocked",
                    "cuMemHostUnregister, 1 MiB, a stream blocked",
                ],
            ],
        ),
    ] {
        let blocker = Blocker { lab, watch, words, blocks };
        for (names, len) in names.into_iter().zip([SMALL, 1 << 20]) {
            figures.extend(blocker.pair(names, len, calls)?);
        }
    }
    Ok(figures)
}

impl Blocker<'_> {
    /// Registers and unregisters memory of so many bytes. A call that waited for the stream is not made again.
    fn pair(&self, names: [&'static str; 2], len: usize, calls: u64) -> Result<[Figure; 2]> {
        // Memory with its pages in place.
        let page = gdrcopy::host_page();
        let mut room = vec![1_u8; len + page];
        let skip = room.as_ptr().align_offset(page);
        let memory = &mut room[skip..skip + len];
        let mut figures = names.map(Figure::new);
        for _ in 0..calls {
            let registered = self.time(names[0], || self.lab.gpu.register(memory))?;
            let unregistered = self.time(names[1], || self.lab.gpu.unregister(memory))?;
            let mut good = true;
            for (figure, time) in figures.iter_mut().zip([registered, unregistered]) {
                match time {
                    Ok(time) => figure.samples.add(time),
                    Err(error) => {
                        good = false;
                        figure.end(Err(error));
                    }
                }
            }
            if !good {
                break;
            }
        }
        Ok(figures)
    }

    /// The time of the call, or why there is none. The outer error is that of a stream which stays blocked.
    fn time(&self, name: &str, call: impl FnOnce() -> Result<()>) -> Result<Result<Duration>> {
        let (gpu, stream, limit) = (self.lab.gpu, self.lab.work, self.watch.limit());
        let [ready, gate] = self.words;
        self.watch.begin(name, &[gate]);
        if self.blocks {
            ready.clear()?;
            gate.clear()?;
            gpu.batch(stream, &mut Batch::new([Op::Write(ready, 1), Op::Wait(gate)]))?;
            until(limit, "the stream did not come to its wait", || Ok(ready.load() != 0))?;
            self.watch.moved();
        }
        let start = Instant::now();
        let called = call();
        let time = start.elapsed();
        let waited = self.watch.released();
        gate.store(1);
        self.watch.moved();
        until(limit, "the stream did not end", || gpu.idle(stream))?;
        Ok(match called {
            Ok(()) if waited => {
                let why = if self.blocks { ", when the blocked stream had been released" } else { "" };
                Err(format!("returned only {time:.1?} after the call{why}").into())
            }
            Ok(()) => Ok(time),
            Err(error) => Err(error),
        })
    }
}
