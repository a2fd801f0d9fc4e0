//! The flight recorder: when each request reached which stage, and what every thread waits for, in a file in memory that can be
//! read while the process runs, when it hangs, and after it was killed.
//!
//! A process that uses queues or streams has a recording as long as it has any of them: a file
//! `gdsync-PID-STARTED.rec` in `/dev/shm`, or where there is none in `$XDG_RUNTIME_DIR` or `/tmp`, that only its user can
//! read. When the last queue, context and stream of the process are dropped, the file goes. Of a process that ends without
//! that, killed or by `exit`, it stays for who wants to know why: `gdasync trace` reads it. Each new recording
//! removes those of dead processes but for the newest eight; `gdasync trace --clean` removes them all.
//!
//! | variable | what it does |
//! |---|---|
//! | `GDSYNC_RECORDER=off` | nothing is recorded |
//! | `GDSYNC_RECORDER=8192` | so many records for each thread, rounded up to a power of two; 128 to 1048576, else 2048 |
//! | `GDSYNC_RECORDER_DIR` | the folder for the file |
//!
//! # What it costs
//!
//! A record has 32 bytes. Each thread writes to a ring of its own, with plain stores: a stamp takes some nanoseconds
//! (`gdasync bench recorder` measures it). A thread's ring takes its memory when the thread first records, 64 KiB unless asked
//! otherwise, and for each process come 92 KiB. 256 threads at a time can record; of more, events are only counted.
//!
//! # What is seen, and what not
//!
//! Where the software HCA or the proxy reads the rings, all stages are there. A card tells nothing of doorbells and fetches; its
//! completions are recorded when the library finds them. What a stream of a GPU passes, the CPU learns late: at the next
//! mark of the stream. Of waits that hold such a stream, its watchdog tells, a few milliseconds after they began.
//!
//! A forked child does not record to the file of its parent; what it opens itself gets a file of its own.

mod clock;
mod event;
mod file;
mod layout;
mod read;
mod ring;
mod rows;

use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

pub use clock::Clock;
pub use event::{Awaited, By, Event, Queue, Stage};
pub use file::Liveness;
pub use read::{Record, Recording, Thread, Wait};
use ring::Recorder;
pub use rows::{Peer, QpLog};

use crate::Gid;
use crate::env::variable;
use crate::error::{Error, Result};

/// What the process has.
enum Current {
    /// Nobody has asked yet, or all who did are gone.
    One(Weak<Recorder>),
    /// None could be made in the process of this number; is it worth while to try again?
    Refused { pid: u32, again: bool },
}

/// One for the whole process: who wants to know why it hangs knows its number, and nothing of its contexts.
static CURRENT: Mutex<Current> = Mutex::new(Current::One(Weak::new()));

/// A wait is noted when it has lasted so long: those of a ping-pong take less, and must not take longer.
pub const NOTED_AFTER: Duration = Duration::from_micros(20);

/// How long another thread may take to make the recorder.
const PATIENCE: Duration = Duration::from_secs(5);

/// A handle of the recorder of this process, or of none. While there is one, so is the file.
#[derive(Clone, Debug, Default)]
pub struct Log {
    recorder: Option<Arc<Recorder>>,
    /// The number of the device that it is for, 0 for none.
    device: u8,
}

impl Log {
    /// The recorder of this process; none where it is switched off, or where nobody asked for it and it cannot be had.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a `GDSYNC_RECORDER` that cannot be read; [`Error::Sys`] where a size was asked for and the
    /// file cannot be made.
    pub fn open() -> Result<Self> {
        let (records, is_asked) = match variable("GDSYNC_RECORDER") {
            Some(text) => match records_of(&text)? {
                None => return Ok(Self::default()),
                Some(records) => (records, true),
            },
            None => (layout::RECORDS, false),
        };
        // In a forked child it may be locked for ever by a thread that is not there.
        let Some(mut current) = CURRENT.try_lock_for(PATIENCE) else { return Ok(Self::default()) };
        match &*current {
            Current::One(known) => {
                let known = known.upgrade().filter(|known| known.is_of_this_process());
                if known.is_some() {
                    return Ok(Self { recorder: known, device: 0 });
                }
            }
            Current::Refused { pid, again: false } if *pid == std::process::id() && !is_asked => {
                return Ok(Self::default());
            }
            Current::Refused { .. } => {}
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
                let own = std::process::id();
                let is_told = matches!(*current, Current::Refused { pid, .. } if pid == own);
                match variable("GDSYNC_RECORDER_DIR") {
                    _ if is_told => {}
                    // Who names a folder may look for the file there.
                    Some(_) => tracing::warn!(%error, "nothing is recorded"),
                    None => tracing::info!(%error, "nothing is recorded"),
                }
                let again = matches!(&error, Error::Sys { source, .. } if file::is_short(source));
                *current = Current::Refused { pid: own, again };
                Ok(Self::default())
            }
        }
    }

    /// The recorder that is there, if there is one.
    pub fn current() -> Self {
        let Some(current) = CURRENT.try_lock() else { return Self::default() };
        let Current::One(known) = &*current else { return Self::default() };
        Self { recorder: known.upgrade().filter(|known| known.is_of_this_process()), device: 0 }
    }

    fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.recorder.as_ref()
    }

    /// The same for what happens on a device.
    pub fn on(self, gid: Gid) -> Self {
        let device = self.recorder.as_ref().map_or(0, |recorder| recorder.rows.lock().device(gid));
        Self { device, ..self }
    }

    /// The number of the device in this process's recording.
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

    /// A stamp, for a wait that may become one to note.
    #[inline]
    pub fn stamp(&self) -> u64 {
        self.recorder.as_ref().map_or(0, |recorder| recorder.stamp())
    }

    /// Notes that the calling thread has been in a wait since that stamp. It ends when the result is dropped.
    pub fn hold(&self, since: u64, awaited: Awaited, by: By) -> Hold {
        let held = self.recorder.clone().map(|recorder| (recorder, awaited, by));
        if let Some((recorder, awaited, by)) = &held {
            recorder.put_wait(awaited, Stage::WaitBegun, *by, since);
        }
        Hold { held, end: Stage::WaitEnded, _thread: PhantomData }
    }
}

/// What `GDSYNC_RECORDER` asks for: so many records for each thread, or none at all.
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

/// A thread waits; a thread is in one recorded wait at a time.
#[must_use = "the wait ends when it is dropped"]
#[derive(Debug)]
pub struct Hold {
    held: Option<(Arc<Recorder>, Awaited, By)>,
    end: Stage,
    /// It is noted where the thread notes its things.
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

/// Marks of the application in the recording, beside the stages of its requests. Clones share it; any thread may use it.
#[derive(Clone, Debug)]
pub struct Marks(Log);

impl Marks {
    /// For this process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a `GDSYNC_RECORDER` that cannot be read; [`Error::Sys`] where a size was asked for there
    /// and the file cannot be made.
    pub fn open() -> Result<Self> {
        Log::open().map(Self)
    }

    /// Whether anything is recorded.
    pub fn is_recording(&self) -> bool {
        self.0.recorder.is_some()
    }

    /// The file, if there is one.
    pub fn path(&self) -> Option<PathBuf> {
        self.0.recorder().map(|recorder| recorder.path().to_owned())
    }

    /// Records a number, with a value beside it: what they mean is up to the application.
    #[inline]
    pub fn mark(&self, number: u64, value: u32) {
        let mark = || Event::of(Stage::Mark, Queue::None, By::Cpu, 0, number);
        self.0.note(|| Event { len: value, ..mark() });
    }

    /// Records nothing more in this process, or goes on.
    pub fn pause(&self, pauses: bool) {
        if let Some(recorder) = self.0.recorder() {
            recorder.pause(pauses);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
