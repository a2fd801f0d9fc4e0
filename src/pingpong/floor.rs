//! The floor: flags that the streams of both ranks bounce in shared host memory. No message can be faster.

use crate::measure::{Samples, shared_page};
use gdsync::stream::Cond;
use mp::Communicator;

use super::options::{Mode, Options, warm_up};
use super::report::{Cost, Line, Played};
use super::window::Windows;
use crate::lane::{Lane, Result};

/// Bytes of a flag.
const FLAG: usize = 4;
/// Flags are on lines of their own.
const LINE: usize = 64;

/// Bounces flags between the streams of both ranks, as often as small messages are.
///
/// # Errors
/// Of the streams, and of sharing memory between the ranks.
pub fn floor(options: &Options, comm: &Communicator, lane: &Lane) -> Result<Line> {
    let timeout = options.timeout();
    let memory = shared_page::share(comm, shared_page::SIZE, timeout)?;
    let (mine, theirs) = (memory.word32(comm.rank() * LINE)?, memory.word32((1 - comm.rank()) * LINE)?);

    let serves = comm.rank() == 0;
    let iterations = options.iterations(FLAG);
    let warm_up = warm_up(iterations);
    let total = warm_up + iterations;
    let mut windows = Windows::new(comm, lane, timeout)?;
    let (mut samples, mut cost) = (Samples::default(), Cost::default());
    let mut n = 0;
    while n < total {
        let end = if n < warm_up { warm_up } else { total }.min(n + u64::from(options.ahead));
        let values = u32::try_from(n + 1)?..=u32::try_from(end)?;
        let (time, ()) = windows.run(&mut cost, |batch| {
            for value in values {
                if !serves {
                    batch.wait_value32(&theirs, value, Cond::Geq);
                }
                batch.write_value32(&mine, value);
                if serves {
                    batch.wait_value32(&theirs, value, Cond::Geq);
                }
            }
            Ok(())
        })?;
        if n >= warm_up {
            samples.add_mean(time, end - n);
        }
        n = end;
    }
    // The barrier of an exchange: both have written their last.
    comm.barrier(timeout)?;
    let errors = u64::from(u64::from(theirs.load()) != total);
    Played { samples, cost, iterations: total, errors }.line(comm, Mode::Floor, FLAG, timeout)
}
