//! The secret of a job: software HCAs link only where both sides have the same, or neither has one.

use std::sync::OnceLock;

use super::gid::random;
use crate::env::variable;
use crate::error::{Error, Result};

/// Carries it from who starts a process.
const VARIABLE: &str = "GDSYNC_JOB_TOKEN";

/// Drawn by this process, which starts others.
static DRAWN: OnceLock<u64> = OnceLock::new();

/// The secret of the job that this process belongs to, as `GDSYNC_JOB_TOKEN` names it; a process that has none draws one and is of
/// that job from then on. Who starts processes that talk with it through the software HCA hands it on in that variable.
///
/// # Errors
/// [`Error::InvalidArgument`] for a variable that is no number, [`Error::Sys`] where the kernel has no random numbers.
pub fn job_secret() -> Result<u64> {
    match known()? {
        Some(secret) => Ok(secret),
        None => {
            let drawn = u64::from_ne_bytes(random()?);
            Ok(*DRAWN.get_or_init(|| drawn))
        }
    }
}

/// The same, where there is one.
pub(crate) fn known() -> Result<Option<u64>> {
    if let Some(drawn) = DRAWN.get() {
        return Ok(Some(*drawn));
    }
    let parse = |text: String| {
        text.parse()
            .map_err(|_| Error::invalid(VARIABLE, format!("'{text}'"), "a number of 64 bits, in decimal"))
    };
    variable(VARIABLE).map(parse).transpose()
}
