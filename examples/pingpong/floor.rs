//! The floor: flags that the streams of both ranks bounce in shared host memory. No message can be faster.

use std::fs::File;

use gdasync::measure::{Samples, shared_page};
use gdsync::stream::Cond;
use mp::Communicator;

use crate::common::{Lane, Result};
use crate::options::{Mode, Options, warm_up};
use crate::report::{Cost, Line, Played};
use crate::window::Windows;

/// Bytes of a flag.
const FLAG: usize = 4;
/// Flags are on lines of their own.
const LINE: usize = 64;

/// Bounces flags for the number of iterations that small messages have.
pub(crate) fn measure(options: &Options, comm: &Communicator, lane: &Lane) -> Result<Line> {
    let timeout = options.timeout();
    // Both ranks are on one host: the software HCA, and with it this wire, reaches no further.
    let page = (comm.rank() == 0).then(shared_page::create).transpose()?;
    let path = page.as_ref().map_or("", |(_, path)| path);
    let paths = comm.exchange(path.as_bytes(), timeout)?;
    let opened =
        match &page {
            Some((file, _)) => file.try_clone()?,
            None => {
                let path = std::str::from_utf8(&paths[0])?;
                File::options().read(true).write(true).open(path).map_err(|e| {
                    format!("{path}: {e}: the floor needs both ranks on one host, as one user")
                })?
            }
        };
    let memory = shared_page::map(&opened)?;
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
    let errors = crate::total(comm, errors, timeout)?;
    Ok(Played { samples, cost, iterations: total, errors }.line(Mode::Floor, FLAG, errors))
}
