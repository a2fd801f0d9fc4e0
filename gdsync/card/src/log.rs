//! The log of the card: requests of the program that are not supported, and failures, also of the HCA.

use std::fmt::{self, Write as _};
use std::os::fd::OwnedFd;
use std::sync::{Once, OnceLock};

use rustix::fs::{Mode, OFlags};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Names the file; `-` is standard error.
const VARIABLE: &str = "GDASYNC_CARD_LOG";

/// Where lines go. Inherited by forked children, which append to the same file.
static FILE: OnceLock<Option<Target>> = OnceLock::new();

#[derive(Debug)]
enum Target {
    Stderr,
    File(OwnedFd),
}

fn target() -> Option<&'static Target> {
    let target = FILE.get_or_init(|| {
        let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty())?;
        if path == "-" {
            return Some(Target::Stderr);
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC;
        rustix::fs::open(path.as_os_str(), flags, Mode::from_raw_mode(0o644)).ok().map(Target::File)
    });
    target.as_ref()
}

/// Writes a line, if there is a log.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    if let Some(target) = target() {
        write(target, text);
    }
}

/// Writes why there is no card, or no peer: to standard error, and once, unless there is a log.
pub(crate) fn failure(text: fmt::Arguments<'_>) {
    static SAID: Once = Once::new();
    match target() {
        Some(target) => write(target, text),
        None => SAID.call_once(|| write(&Target::Stderr, text)),
    }
}

/// System calls are made directly, so that no interposed function is called.
fn write(target: &Target, text: fmt::Arguments<'_>) {
    let line = format!("gdasync card [{}]: {text}\n", std::process::id());
    _ = match target {
        Target::Stderr => rustix::io::write(rustix::stdio::stderr(), line.as_bytes()),
        Target::File(file) => rustix::io::write(file, line.as_bytes()),
    };
}

/// From now on warnings and errors of the HCA are in the log.
pub(crate) fn follow_hca() {
    if target().is_some() {
        // Fails if it was done before.
        _ = tracing::subscriber::set_global_default(HcaLog);
    }
}

/// Receives what the HCA reports. It has no spans.
struct HcaLog;

impl Subscriber for HcaLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= LevelFilter::WARN
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::WARN)
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        line(format_args!("{}{}", text.message, text.fields));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, ", {name}={value:?}"),
        };
    }
}

macro_rules! log {
    ($($text:tt)*) => { $crate::log::line(format_args!($($text)*)) };
}
pub(crate) use log;
