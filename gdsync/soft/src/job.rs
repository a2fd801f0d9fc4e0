//! The secret of a job. Software HCAs link only if both sides have the same secret, or neither has one.

use std::sync::OnceLock;

use gdsync_device::env::variable;
use gdsync_device::error::{Error, Result};

/// Passes the secret to child processes.
const VARIABLE: &str = "GDSYNC_JOB_TOKEN";

/// Secret that this process drew for the jobs it starts.
static DRAWN: OnceLock<u64> = OnceLock::new();

/// The secret of this process's job: `GDSYNC_JOB_TOKEN`, or a random number drawn by the first call, which makes this
/// process part of that job. A program that starts processes passes it to them in that variable, as decimal digits.
///
/// # Errors
/// [`Error::InvalidArgument`] if the variable is not a number of 64 bits; [`Error::Sys`] without random numbers.
pub fn job_secret() -> Result<u64> {
    if let Some(secret) = current()? {
        return Ok(secret);
    }
    let drawn = u64::from_ne_bytes(gdsync_device::random()?);
    Ok(*DRAWN.get_or_init(|| drawn))
}

/// Makes this process part of the job with this secret, unless it is part of one.
///
/// # Errors
/// [`Error::InvalidArgument`] as [`job_secret`].
pub fn join_job(secret: u64) -> Result<()> {
    if current()?.is_none() {
        DRAWN.get_or_init(|| secret);
    }
    Ok(())
}

/// The secret of this process's job, if it is part of one.
pub(crate) fn current() -> Result<Option<u64>> {
    if let Some(drawn) = DRAWN.get() {
        return Ok(Some(*drawn));
    }
    let parse = |text: String| {
        text.parse().map_err(|_| Error::invalid(VARIABLE, text, "a number of 64 bits, in decimal"))
    };
    variable(VARIABLE).map(parse).transpose()
}
