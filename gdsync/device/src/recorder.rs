//! The flight recorder: stages of all work requests and waits of all threads, in a memory file that can be read while the process runs or
//! hangs, and after it was killed.
//!
//! A process that uses queues or streams has a file `gdsync-PID-STARTED.rec` in `/dev/shm`, or else in `$XDG_RUNTIME_DIR` or `/tmp`,
//! readable by its user only. The file is removed when the last queue, context and stream of the process are dropped. If the process is
//! killed or exits before, the file stays, and `gdasync trace` reads it. Each new recording removes those of dead processes except for
//! the newest eight; `gdasync trace --clean` removes all of them.
//!
//! | variable | effect |
//! |---|---|
//! | `GDSYNC_RECORDER=off` | nothing is recorded |
//! | `GDSYNC_RECORDER=8192` | records per thread, 128 to 1048576, rounded up to a power of two (default 2048) |
//! | `GDSYNC_RECORDER_DIR` | the folder for the file |
//!
//! # Cost
//!
//! A record has 32 bytes. Each thread writes to its own ring by plain stores, in some nanoseconds. A ring takes 64 KiB by default, when
//! its thread first records, and each process 92 KiB. At most 256 threads record at a time; events of others are only counted.
//!
//! # Limits
//!
//! All stages are recorded where the software HCA or the proxy reads the rings. A card does not report doorbells and fetches, and its
//! completions are recorded when the library polls them. What a GPU stream has passed is recorded at its next mark, and a wait that blocks
//! it by its watchdog, a few milliseconds after the start.
//!
//! A forked child does not write to the file of its parent, but to a file of its own once it opens a device.

mod clock;
mod event;
mod file;
mod layout;
mod read;
mod ring;
mod rows;
mod words;

use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

pub use clock::Clock;
pub use event::{Awaited, By, Event, Queue, Stage, Traffic};
pub use file::Liveness;
pub use read::{Record, Recording, Thread, Wait};
use ring::Recorder;
pub use rows::{Peer, QpLog};
pub use words::{NamedWords, Purpose, Words};

use crate::Gid;
use crate::env::variable;
use crate::error::{Error, Result};
use crate::fork_guard::PerProcess;

/// The recorder of the process.
#[derive(Default)]
enum Current {
    #[default]
    Unknown,
    /// The recorder, if any handle of it is left.
    One(Weak<Recorder>),
    /// None could be created; `again` tells whether to retry.
    Refused { again: bool },
}

/// One for all devices, because users of a hung process know only its PID.
static CURRENT: PerProcess<Mutex<Current>> = PerProcess::new();

/// Waits are recorded after this time, so that recording does not slow down shorter ones.
pub const NOTED_AFTER: Duration = Duration::from_micros(20);

/// A handle of the recorder of this process, or of none. The file exists while there are handles.
#[derive(Clone, Debug, Default)]
pub struct Log {
    recorder: Option<Arc<Recorder>>,
    /// Number of the device, 0 for none.
    device: u8,
}

impl Log {
    /// Opens the recorder of this process. Returns a handle of none if the recorder is off, or cannot be created and was not requested.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an invalid `GDSYNC_RECORDER`; [`Error::Sys`] if that sets a size and the file cannot be created.
    pub fn open() -> Result<Self> {
        let (records, is_asked) = match variable("GDSYNC_RECORDER") {
            Some(text) => match records_of(&text)? {
                None => return Ok(Self::default()),
                Some(records) => (records, true),
            },
            None => (layout::RECORDS, false),
        };
        let mut current = CURRENT.get().lock();
        match &*current {
            Current::One(known) => {
                if let Some(known) = known.upgrade() {
                    return Ok(Self { recorder: Some(known), device: 0 });
                }
            }
            Current::Refused { again: false } if !is_asked => return Ok(Self::default()),
            Current::Unknown | Current::Refused { .. } => {}
        }
        file::tidy();
        match Recorder::start(records) {
            Ok(recorder) => {
                let recorder = Arc::new(recorder);
                tracing::debug!(path = %recorder.path().display(), records = recorder.records(), "flight recorder");
                *current = Current::One(Arc::downgrade(&recorder));
                Ok(Self { recorder: Some(recorder), device: 0 })
            }
            Err(error) if is_asked => Err(error),
            Err(error) => {
                let is_told = matches!(*current, Current::Refused { .. });
                match variable("GDSYNC_RECORDER_DIR") {
                    _ if is_told => {}
                    // The user expects the file in this folder.
                    Some(_) => tracing::warn!(%error, "nothing is recorded"),
                    None => tracing::info!(%error, "nothing is recorded"),
                }
                let again = matches!(&error, Error::Sys { source, .. } if file::is_short(source));
                *current = Current::Refused { again };
                Ok(Self::default())
            }
        }
    }

    /// The recorder of this process, if it exists.
    pub fn current() -> Self {
        let current = CURRENT.get().try_lock();
        let Some(Current::One(known)) = current.as_deref() else { return Self::default() };
        Self { recorder: known.upgrade(), device: 0 }
    }

    fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.recorder.as_ref()
    }

    /// The handle for events of a device.
    #[must_use]
    pub fn on(self, gid: Gid) -> Self {
        let device = self.recorder.as_ref().map_or(0, |recorder| recorder.rows.lock().device(gid));
        Self { device, ..self }
    }

    /// Number of the device in the recording.
    pub fn device(&self) -> u8 {
        self.device
    }

    /// Whether events are recorded.
    pub fn is_on(&self) -> bool {
        self.recorder.is_some()
    }

    /// Records an event.
    #[inline]
    pub fn note(&self, event: impl FnOnce() -> Event) {
        if let Some(recorder) = &self.recorder {
            recorder.put(&Event { device: self.device, ..event() });
        }
    }

    /// A stamp, for the start of a wait; 0 if nothing is recorded.
    #[inline]
    pub fn stamp(&self) -> u64 {
        self.recorder.as_ref().map_or(0, |recorder| recorder.stamp())
    }

    /// Records that the calling thread waits since the stamp `since`, until the result is dropped.
    pub fn hold(&self, since: u64, awaited: Awaited, by: By) -> Hold {
        let held = self.recorder.clone().map(|recorder| (recorder, awaited, by));
        if let Some((recorder, awaited, by)) = &held {
            recorder.put_wait(awaited, Stage::WaitBegun, *by, since);
        }
        Hold { held, end: Stage::WaitEnded, _thread: PhantomData }
    }
}

/// Parses `GDSYNC_RECORDER`: the records per thread, or `None` for "off".
fn records_of(text: &str) -> Result<Option<u64>> {
    if text == "off" {
        return Ok(None);
    }
    let bounds = layout::FEWEST_RECORDS..=layout::MOST_RECORDS;
    let records = text.parse().ok().filter(|records| bounds.contains(records));
    let expected = "off, or the number of records for each thread, 128 to 1048576";
    let records = records.ok_or_else(|| Error::invalid("GDSYNC_RECORDER", format!("'{text}'"), expected))?;
    Ok(Some(records.next_power_of_two()))
}

/// A recorded wait of the calling thread. A thread has one at a time.
#[must_use = "the wait ends when it is dropped"]
#[derive(Debug)]
pub struct Hold {
    held: Option<(Arc<Recorder>, Awaited, By)>,
    end: Stage,
    /// Not `Send`: it is recorded in the slot of the thread.
    _thread: PhantomData<*const ()>,
}

impl Hold {
    /// The wait is given up.
    pub fn give_up(mut self) {
        self.end = Stage::WaitGivenUp;
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some((recorder, awaited, by)) = &self.held {
            recorder.put_wait(awaited, self.end, *by, recorder.stamp());
        }
    }
}

/// Records marks of the application between the stages of its requests. Clones share it; any thread may use it.
#[derive(Clone, Debug)]
pub struct Marks(Log);

impl Marks {
    /// Opens the recorder of this process.
    ///
    /// # Errors
    /// As [`Log::open`].
    pub fn open() -> Result<Self> {
        Log::open().map(Self)
    }

    /// Whether anything is recorded.
    pub fn is_recording(&self) -> bool {
        self.0.recorder.is_some()
    }

    /// Path of the file, if there is one.
    pub fn path(&self) -> Option<PathBuf> {
        self.0.recorder().map(|recorder| recorder.path().to_owned())
    }

    /// Records a number and a value, whose meaning is up to the application.
    #[inline]
    pub fn mark(&self, number: u64, value: u32) {
        let mark = || Event::of(Stage::Mark, Queue::None, By::Cpu, 0, number);
        self.0.note(|| Event { len: value, ..mark() });
    }

    /// Pauses or resumes recording in this process.
    pub fn pause(&self, pauses: bool) {
        if let Some(recorder) = self.0.recorder() {
            recorder.pause(pauses);
        }
    }
}

#[cfg(test)]
mod tests {
    use gdsync_testkit::process::{End, in_child};

    use super::*;

    #[test]
    fn a_forked_child_records_while_its_parent_opens_a_recorder() {
        let _held = CURRENT.get().lock();
        assert_eq!(in_child(|| Log::open().is_ok_and(|log| log.is_on())), End::Said(true));
    }

    #[test]
    fn the_variable_says_off_or_how_many() {
        for (text, records) in
            [("off", None), ("128", Some(128)), ("129", Some(256)), ("1048576", Some(1 << 20))]
        {
            assert_eq!(records_of(text).unwrap(), records, "{text}");
        }
        for text in ["on", "0", "127", "1048577", "-1", "2k", "1 000"] {
            let error = records_of(text).unwrap_err().to_string();
            assert!(error.contains("GDSYNC_RECORDER is '") && error.contains("128 to 1048576"), "{error}");
        }
    }
}
