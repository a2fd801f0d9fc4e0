//! The log of the card: requests of the program that are not supported, failures, and warnings of the software HCA.

use std::fmt::{self, Write as _};
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

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

/// Writes a line. System calls are made directly, so that no interposed function is called.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    let Some(target) = target() else { return };
    let line = format!("gdasync card [{}]: {text}\n", std::process::id());
    _ = match target {
        Target::Stderr => rustix::io::write(rustix::stdio::stderr(), line.as_bytes()),
        Target::File(file) => rustix::io::write(file, line.as_bytes()),
    };
}

macro_rules! log {
    ($($text:tt)*) => { $crate::log::line(format_args!($($text)*)) };
}
pub(crate) use log;

/// From now on the warnings of the software HCA are in the log, if there is one: for example violations of the ring formats.
pub(crate) fn hear_warnings() {
    if target().is_some() {
        _ = tracing::subscriber::set_global_default(Warnings);
    }
}

/// Logs warnings and errors.
struct Warnings;

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        log!("{}{}", text.message, text.fields);
    }

    // There are no spans.
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
        _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, ", {name} {value:?}"),
        };
    }
}
