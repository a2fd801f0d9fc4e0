//! `gdasync plot`: pictures of results.

mod bars;
mod canvas;
mod curves;
mod frame;
mod lanes;
mod options;
mod picture;
mod scale;

pub(crate) use options::{Options, read, title, write};
pub(crate) use picture::Picture;
pub(crate) use scale::{bytes, number};

use crate::results::{self, Message};

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Results(#[from] results::Error),
    #[error("{file} has no group `{wanted}`; it has: {there}")]
    NoGroup { file: String, wanted: String, there: String },
    #[error(
        "{file} has {what}, {first} has not: they do not go on one axis; plot them apart, or choose with --group"
    )]
    Apart { file: String, what: String, first: String },
    #[error("--kind {wanted} needs times or bandwidths by bytes, and `{group}` of {file} has {what}")]
    Kind { wanted: &'static str, group: String, file: String, what: String },
    #[error("nothing is left to draw: {0:?} of --series or --without is in no name, or in all")]
    Nothing(String),
    #[error("--log needs values above 0; the least is {0}: leave it out")]
    NotPositive(f64),
    #[error("--size {}x{} is too small for this picture, which needs {}x{}", size.0, size.1, needed.0, needed.1)]
    Small { size: (i32, i32), needed: (i32, i32) },
    #[error("{labels} times --label for {files} files: give one for each")]
    Labels { labels: usize, files: usize },
    #[error("{}: {source}", path.display())]
    Write { path: std::path::PathBuf, source: std::io::Error },
    #[error("the picture cannot be drawn: {0}")]
    Draw(String),
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

impl<E: std::error::Error + Send + Sync> From<plotters::drawing::DrawingAreaErrorKind<E>> for Error {
    fn from(error: plotters::drawing::DrawingAreaErrorKind<E>) -> Self {
        Self::Draw(error.to_string())
    }
}

/// The timeline of messages as SVG.
pub(crate) fn timeline(title: &str, messages: &[Message], foot: &[String]) -> Result<String> {
    lanes::draw(title, messages, foot, None)
}
