//! `gdasync bench pingpong`: latency over sizes and modes, above a cache line that two processes bounce.

use clap::Args;
use gdasync::lane::Lane;
use gdasync::measure::series::{Point, Series, Unit};
use gdasync::pingpong::{self, Line, Mode, PTX, Player};
use serde_json::json;

use super::Result;
use super::floor::Floor;
use super::sheet::{Output, Sheet};

/// Options of `gdasync bench pingpong`.
#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: the time from the start of a send to the end of the wait for the answer, halved; every message is \
checked. `cache line` is the same with a line of shared memory that the CPUs of both processes store and load: no message can \
be faster, and the ratios are to its median, taken before each size. `stream flags` bounces a word between the streams of \
both ranks, which stream-triggered messages cannot undercut.")]
pub(crate) struct Options {
    #[command(flatten)]
    play: pingpong::Options,
    #[command(flatten)]
    output: Output,
}

const FLOOR: &str = "cache line";
const FLAGS: &str = "stream flags";

pub(super) fn name(mode: Mode) -> &'static str {
    match mode {
        Mode::Stream => "stream",
        Mode::Graph => "graph",
        Mode::Initiate => "initiate",
        Mode::Sync => "sync",
        Mode::Cpu => "cpu",
        Mode::Floor => FLAGS,
    }
}

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let Self { play, output } = self;
        play.check()?;
        let timeout = play.timeout();
        let placed = play.placement.open()?;
        let comm = super::pair(placed.builder(), timeout)?;
        let lane = Lane::new(&placed, timeout, PTX)?;
        let mut sheet = Sheet::new(output, comm.rank() == 0, play.sizes.len())?;
        // Without shared memory there is no floor: ranks on two hosts have none.
        let floor = Floor::new(&comm, timeout);
        if let Err(error) = &floor {
            [FLOOR, FLAGS].into_iter().for_each(|name| sheet.skip(name, error.to_string()));
        }
        let curve = |name| Series::new(name, "bytes", Unit::Micros);
        let (mut line, mut flags) = (curve(FLOOR), curve(FLAGS));
        let mut modes: Vec<_> = play.modes().iter().map(|&mode| curve(name(mode))).collect();
        for (i, &size) in play.sizes.iter().enumerate() {
            let bytes = usize::try_from(size)?;
            if i > 0 && !sheet.goes_on(&comm, timeout)? {
                sheet.out_of_time(format!("{size} bytes"));
                continue;
            }
            sheet.step(format!("{size} bytes"));
            let rounds = play.iterations(bytes);
            let mut keep = |curve: &mut Series, Line { half_rtt_us, errors, .. }: Line| {
                curve.points.push(half_rtt_us.at(size.into()));
                // Both ranks know the errors of both.
                sheet.wrong(if comm.rank() == 0 { errors } else { 0 });
            };
            if let Ok(floor) = &floor {
                // Its first rounds warm up.
                floor.bounce(rounds.div_ceil(10))?;
                line.points.push(Point::time(size.into(), &floor.bounce(rounds)?, 2));
                keep(&mut flags, pingpong::floor(play, &comm, &lane)?);
            }
            for (&mode, curve) in play.modes().iter().zip(&mut modes) {
                keep(curve, Player::new(play, &comm, &lane, &placed, bytes)?.play(mode)?);
            }
        }
        flags.compare(&line);
        modes.iter_mut().for_each(|curve| curve.compare(&line));
        sheet.add([line, flags].into_iter().chain(modes));
        let options = json!({
            "sizes": play.sizes,
            "ahead": play.ahead,
            "graph": play.graph(),
            "initiate": play.initiate(),
            "work_us": play.work().as_micros(),
        });
        sheet.finish_lane(comm, lane, &placed, "pingpong", options, timeout)
    }
}
