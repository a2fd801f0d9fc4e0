//! `gdasync bench cpu`: CPU time that a message costs, by mode and by thread.

use std::time::Duration;

use clap::Args;
use gdasync::lane::{Lane, Placed};
use gdasync::measure::series::{Point, Series, Unit};
use gdasync::measure::{SERVICES, Samples, threads_cpu};
use gdasync::mp::Communicator;
use gdasync::pingpong::{self, Mode, PTX, Player};
use serde_json::json;

use super::Result;
use super::pingpong::name;
use super::sheet::{Output, Sheet};

/// Options of `gdasync bench cpu`.
#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: CPU time of a process divided by the messages that it sends in a ping-pong. `application` is the thread \
that posts, without filling and checking the buffers; `service` are the threads of the software HCA or of the proxy; `process` \
are all threads, with that of a host stream, which fills and checks. The ratios are to mode cpu, whose thread polls as long as \
a message takes. The clocks are those of getrusage, in nanoseconds. With --no-kernels streams neither fill nor check, but for \
the last messages of a window.")]
pub(crate) struct Options {
    #[command(flatten)]
    play: pingpong::Options,
    /// Runs of each size and mode.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    #[command(flatten)]
    output: Output,
}

/// Whose time it is.
const PARTS: [&str; 3] = ["application", "process", "service"];

/// The times of one mode, in the order of [`PARTS`].
#[derive(Default)]
struct Times([Samples; 3]);

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let Self { play, output, .. } = self;
        play.check()?;
        let timeout = play.timeout();
        let placed = play.placement.open()?;
        let comm = super::pair(placed.builder(), timeout)?;
        let lane = Lane::new(&placed, timeout, PTX)?;
        let mut sheet = Sheet::new(output, comm.rank() == 0, play.sizes.len())?;
        let curve =
            |mode: Mode, part: &str| Series::new(format!("{}: {part}", name(mode)), "bytes", Unit::Micros);
        let mut curves: Vec<_> =
            play.modes().iter().map(|&mode| PARTS.map(|part| curve(mode, part))).collect();
        for (i, &size) in play.sizes.iter().enumerate() {
            if i > 0 && !sheet.goes_on(&comm, timeout)? {
                sheet.out_of_time(format!("{size} bytes"));
                continue;
            }
            sheet.step(format!("{size} bytes"));
            let times = self.of_size(&comm, &lane, &placed, usize::try_from(size)?, &mut sheet)?;
            for (curves, times) in curves.iter_mut().zip(&times) {
                for (curve, samples) in curves.iter_mut().zip(&times.0) {
                    curve.points.push(Point::time(size.into(), samples, 1));
                }
            }
        }
        if let Some(by_cpu) = play.modes().iter().position(|&mode| mode == Mode::Cpu) {
            let baseline = curves[by_cpu].clone();
            curves
                .iter_mut()
                .flat_map(|of_mode| of_mode.iter_mut().zip(&baseline))
                .for_each(|(a, b)| a.compare(b));
        }
        sheet.add(curves.into_iter().flatten());
        let options = json!({
            "sizes": play.sizes,
            "graph": play.graph(),
            "initiate": play.initiate(),
            "runs": self.runs,
            "work_us": play.work().as_micros(),
        });
        sheet.finish_lane(comm, lane, &placed, "cpu", options, timeout)
    }

    /// Runs all modes by turns; the first turn warms up.
    fn of_size(
        &self,
        comm: &Communicator,
        lane: &Lane,
        placed: &Placed,
        bytes: usize,
        sheet: &mut Sheet,
    ) -> Result<Vec<Times>> {
        let play = &self.play;
        let messages = u32::try_from(play.all_iterations(bytes))?;
        let mut all: Vec<_> = play.modes().iter().map(|_| Times::default()).collect();
        for turn in 0..=self.runs {
            for (&mode, Times(times)) in play.modes().iter().zip(&mut all) {
                let player = Player::new(play, comm, lane, placed, bytes)?;
                let before = threads_cpu(&SERVICES)?;
                let line = player.play(mode)?;
                let service = threads_cpu(&SERVICES)?.saturating_sub(before) / messages;
                sheet.wrong(if comm.rank() == 0 { line.errors } else { 0 });
                if turn > 0 {
                    let micros = |us: f64| Duration::from_secs_f64(us.max(0.0) / 1e6);
                    let found = [micros(line.cpu_us_per_msg), micros(line.process_cpu_us_per_msg), service];
                    times.iter_mut().zip(found).for_each(|(samples, time)| samples.add(time));
                }
            }
        }
        Ok(all)
    }
}
