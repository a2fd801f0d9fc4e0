//! The recorder of a process: writes events to its file in shared memory.

use std::cell::Cell;
use std::ffi::CString;
use std::fmt;
use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gdsync_shm::seqlock;
use parking_lot::Mutex;

use super::clock::{Clock, Moment, time_of_day};
use super::event::{Awaited, By, Event, Stage, WORDS};
use super::file;
use super::layout::{self, RECORD_BYTES, THREAD_BYTES, THREAD_SLOTS, THREADS, WAIT_WORDS, WAITS, header};
use super::rows::Rows;
use crate::error::{Error, Result};
use crate::memory::{Memory, Word64, host_page};

/// State of the recorder: recording, or paused. 0 in forked children.
const RECORDS: u64 = 1;
const PAUSES: u64 = 2;

/// The recorder of a process. Dropping it removes the file.
pub(super) struct Recorder {
    /// Unique among all recorders of this process.
    serial: u64,
    pub memory: Memory,
    /// [`RECORDS`] or [`PAUSES`], on a page that the kernel clears in forked children, which must not write to the file.
    state: Word64,
    file: File,
    path: PathBuf,
    pub clock: Clock,
    /// Records per thread, a power of two.
    records: u64,
    thread_slots: Box<[ThreadSlot; THREAD_SLOTS]>,
    pub rows: Mutex<Rows>,
}

/// State of a thread slot, used only by its thread.
#[derive(Default)]
#[repr(align(64))]
struct ThreadSlot {
    /// Records written.
    next: AtomicU64,
    /// Waits written.
    waits: AtomicU64,
    /// The ring could not be allocated.
    refused: AtomicBool,
    open: AtomicBool,
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recorder({})", self.path.display())
    }
}

impl Recorder {
    /// Starts a recorder with this many records per thread, a power of two.
    pub(super) fn start(records: u64) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let per_thread = usize::try_from(records).expect("at most 2^20");
        let state = forgotten_in_children()?;
        let (path, file) = file::create(layout::file_bytes(per_thread), layout::RINGS)?;
        let memory = Memory::map_shared(std::os::fd::AsFd::as_fd(&file), layout::file_bytes(per_thread));
        let memory = memory.inspect_err(|_| _ = fs::remove_file(&path))?;
        let this = Self {
            serial: NEXT.fetch_add(1, Ordering::Relaxed),
            memory,
            state,
            file,
            path,
            clock: Clock::best(),
            records,
            thread_slots: Box::new([const { ThreadSlot::new() }; THREAD_SLOTS]),
            rows: Mutex::default(),
        };
        // The drop does not remove the file before the state is set.
        this.write_header().inspect_err(|_| _ = fs::remove_file(&this.path))?;
        this.state.store(RECORDS);
        Ok(this)
    }

    fn write_header(&self) -> Result<()> {
        let pid = std::process::id();
        let Moment { stamp, monotonic } = Moment::now(self.clock);
        let set = |at: usize, value| self.header(at).store(value, Ordering::Relaxed);
        set(header::PID, pid.into());
        set(header::STARTED, file::started(pid).map_err(file::failed)?.unwrap_or(0));
        set(header::PID_NAMESPACE, file::pid_namespace());
        let boot = file::boot_id().map_err(file::failed)?;
        (header::BOOT_ID..).zip(boot).for_each(|(at, word)| set(at, word));
        set(header::CLOCK, self.clock.code());
        (header::ZERO..).zip([stamp, monotonic]).for_each(|(at, word)| set(at, word));
        set(header::TIME_OF_DAY, time_of_day());
        set(header::RECORDS, self.records);
        let command = fs::read("/proc/self/comm").unwrap_or_default();
        let command = command.trim_ascii_end();
        let command = &command[..command.len().min(header::COMMAND_BYTES)];
        self.memory.write(header::COMMAND * 8, command)?;
        self.header(header::MAGIC).store(layout::MAGIC, Ordering::Release);
        Ok(())
    }

    fn header(&self, word: usize) -> &AtomicU64 {
        self.memory.atomic64(word * 8).expect("the header has it")
    }

    /// Records per thread.
    pub(super) fn records(&self) -> u64 {
        self.records
    }

    /// The path of the file.
    pub(super) fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Whether this is the process that created it.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.state.atomic().load(Ordering::Relaxed) != 0
    }

    /// Pauses or resumes recording.
    pub(super) fn pause(&self, pauses: bool) {
        if self.is_of_this_process() {
            self.state.store(if pauses { PAUSES } else { RECORDS });
        }
    }

    /// Records the rank of the process.
    pub(super) fn set_rank(&self, rank: u32) {
        if self.is_of_this_process() {
            self.header(header::RANK).store(u64::from(rank) + 1, Ordering::Relaxed);
        }
    }

    /// The time now, on the clock of the recording.
    #[inline]
    pub(super) fn stamp(&self) -> u64 {
        self.clock.now()
    }

    /// Records an event.
    #[inline]
    pub(super) fn put(&self, event: &Event) {
        let words = event.pack();
        if self.state.atomic().load(Ordering::Relaxed) == RECORDS {
            self.put_at(self.clock.now(), words);
        }
    }

    /// Out of line, because each caller would inline it.
    #[inline(never)]
    fn put_at(&self, at: u64, [number, middle, rest]: [u64; 3]) {
        match self.thread_slot() {
            Some(slot) => self.write(slot, [at, number, middle, rest]),
            None => _ = self.header(header::LOST).fetch_add(1, Ordering::Relaxed),
        }
    }

    /// The slot of the calling thread, if there is one left.
    #[inline]
    fn thread_slot(&self) -> Option<usize> {
        let (serial, slot) = KNOWN.get();
        if serial == self.serial { Some(slot) } else { self.admit() }
    }

    #[inline]
    fn write(&self, thread_slot: usize, [at, number, middle, rest]: [u64; WORDS]) {
        let next = &self.thread_slots[thread_slot].next;
        // Only this thread writes here.
        let n = next.load(Ordering::Relaxed);
        next.store(n + 1, Ordering::Relaxed);
        let Ok(records) = usize::try_from(self.records) else { return };
        let Ok(slot) = usize::try_from(n & (self.records - 1)) else { return };
        let place = layout::ring(thread_slot, records) + slot * RECORD_BYTES;
        let Some(words) = self.memory.host_words64::<WORDS>(place) else { return };
        seqlock::write(words, [at, number, middle, rest | layout::check(n)]);
    }

    /// Assigns the calling thread its slot, allocates the ring, and records the name of the thread.
    #[cold]
    fn admit(&self) -> Option<usize> {
        // `None` also while the thread ends.
        let at = OwnSlot::with(|own| own.index).flatten()?;
        let thread_slot = &self.thread_slots[at];
        let records = usize::try_from(self.records).expect("at most 2^20");
        if !thread_slot.open.load(Ordering::Relaxed) {
            let (from, bytes) = (layout::ring(at, records), records * RECORD_BYTES);
            let refused = thread_slot.refused.load(Ordering::Relaxed)
                || file::allocate(&self.file, from, bytes).is_err();
            thread_slot.refused.store(refused, Ordering::Relaxed);
            if refused {
                return None;
            }
            thread_slot.open.store(true, Ordering::Relaxed);
        }
        let mut row = [0; THREAD_BYTES];
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        row[..8].copy_from_slice(&u64::try_from(thread).unwrap_or(0).to_ne_bytes());
        // Not from /proc: entries that were looked up there make the end of a process wait for its threads.
        let name = rustix::thread::name().map(CString::into_bytes).unwrap_or_default();
        let length = name.len().min(THREAD_BYTES - 8);
        row[8..8 + length].copy_from_slice(&name[..length]);
        self.memory.write(THREADS + at * THREAD_BYTES, &row).expect("the table has a row for each slot");
        KNOWN.set((self.serial, at));
        Some(at)
    }

    /// Records that the calling thread begins or ends a wait. A wait that was given up and begins again keeps its first start time.
    pub(super) fn put_wait(&self, awaited: &Awaited, stage: Stage, by: By, at: u64) {
        if self.state.atomic().load(Ordering::Relaxed) != RECORDS {
            return;
        }
        let [number, middle, rest] = awaited.event(stage, by).pack();
        self.put_at(at, [number, middle, rest]);
        let Some(thread_slot) = self.thread_slot() else { return };
        let offset = WAITS + thread_slot * WAIT_WORDS * 8;
        let words = self.memory.words64::<WAIT_WORDS>(offset).expect("the table has a row for each slot");
        let was = words.each_ref().map(|word| word.load(Ordering::Relaxed));
        let given_up = awaited.event(Stage::WaitGivenUp, by).pack();
        let is_again = was[1..4] == given_up && stage == Stage::WaitBegun;
        let goes_on = stage != Stage::WaitBegun || is_again;
        let n = self.thread_slots[thread_slot].waits.fetch_add(1, Ordering::Relaxed);
        let Awaited { posted, completed, .. } = *awaited;
        let since = if goes_on { was[0] } else { at };
        let values = [since, number, middle, rest, posted, completed, at, layout::check(n)];
        seqlock::write(words, values);
        self.set_later(at);
    }

    /// Records a stamp and its time, for readers on other machines. The check detects concurrent writes of two threads.
    fn set_later(&self, at: u64) {
        /// Minimum interval in ticks of any clock, some milliseconds.
        const OFTEN: u64 = 1 << 24;
        let words = self.memory.words64::<3>(header::LATER * 8).expect("the header has them");
        if at.saturating_sub(words[0].load(Ordering::Relaxed)) < OFTEN {
            return;
        }
        let Moment { stamp, monotonic } = Moment::now(self.clock);
        seqlock::write(words, [stamp, monotonic, stamp ^ monotonic | 1]);
    }
}

impl ThreadSlot {
    const fn new() -> Self {
        Self {
            next: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            refused: AtomicBool::new(false),
            open: AtomicBool::new(false),
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if self.is_of_this_process()
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::debug!(path = %self.path.display(), %error, "the recording was not removed");
        }
    }
}

/// Allocates a word that is 0 in forked children.
fn forgotten_in_children() -> Result<Word64> {
    let page = Memory::alloc(host_page())?;
    let address = std::ptr::with_exposed_provenance_mut(usize::try_from(page.addr()).unwrap_or(0));
    // `Memory` ignores a kernel without this advice; here it is required.
    // SAFETY: the page was just mapped, and the advice only concerns forked children.
    if unsafe { libc::madvise(address, page.len(), libc::MADV_WIPEONFORK) } != 0 {
        let fix = "use Linux 4.14 or newer, or set GDSYNC_RECORDER=off";
        return Err(Error::last_os("madvise(MADV_WIPEONFORK)", fix));
    }
    page.word64(0)
}

const BITS: usize = 64;
static TAKEN: [AtomicU64; THREAD_SLOTS / BITS] = [const { AtomicU64::new(0) }; THREAD_SLOTS / BITS];

thread_local! {
    static OWN_SLOT: OwnSlot = OwnSlot::take();
    /// Serial of the recorder that has admitted the thread, and its slot.
    static KNOWN: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
}

/// The slot of a thread, freed when the thread ends.
pub(super) struct OwnSlot {
    /// `None` if all are taken.
    pub index: Option<usize>,
}

impl OwnSlot {
    /// Runs `f` with the slot of the calling thread; `None` while the thread ends.
    #[inline]
    pub(super) fn with<T>(f: impl FnOnce(&Self) -> T) -> Option<T> {
        OWN_SLOT.try_with(f).ok()
    }

    fn take() -> Self {
        let free = |(at, word): (usize, &AtomicU64)| loop {
            let taken = word.load(Ordering::Relaxed);
            let bit = taken.trailing_ones();
            if bit == u64::BITS {
                return None;
            }
            // Acquire: after all writes of the last thread with this slot.
            let before = word.fetch_or(1 << bit, Ordering::Acquire);
            if before & 1 << bit == 0 {
                return Some(at * BITS + bit as usize);
            }
        };
        Self { index: TAKEN.iter().enumerate().find_map(free) }
    }
}

impl Drop for OwnSlot {
    fn drop(&mut self) {
        KNOWN.set((0, 0));
        if let Some(thread_slot) = self.index {
            TAKEN[thread_slot / BITS].fetch_and(!(1 << (thread_slot % BITS)), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests;
