//! The kernels of `kernel_exec.cu` and the code of `gdsync.cuh` in Rust, for the simulated driver.
//!
//! Bytes that a copy writes arrive in no order, some of them only when a fence follows. A grid of several blocks runs as one.

use std::ffi::c_void;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use crate::driver;

/// Makes the kernels known to the driver, before a GPU is opened.
pub fn register() {
    driver::kernel("gds_run_12", &[32 + 24 * 12], |params| run(params, false));
    driver::kernel("gds_run_160", &[32 + 24 * 160], |params| run(params, false));
    driver::kernel("gds_run_at", &[8], |params| run_at(params, false));
    driver::kernel("gds_copy_12", &[32 + 24 * 12], |params| run(params, true));
    driver::kernel("gds_copy_160", &[32 + 24 * 160], |params| run(params, true));
    driver::kernel("gds_copy_at", &[8], |params| run_at(params, true));
    driver::kernel("gds_message_12", &[32 + 24 * 12, 8], |params| run(params, true));
    driver::kernel("gds_message_160", &[32 + 24 * 160, 8], |params| run(params, true));
    driver::kernel("gds_message_at", &[8, 8], |params| run_at(params, true));
    driver::kernel("gds_finish", &[8], |params| {
        // SAFETY: an address of steps.
        Progress::new(unsafe { params[0].cast::<u64>().read() }).finish();
    });
}

/// `Head` of `gdsync.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Head {
    status: u64,
    limit_ns: u64,
    submission: u64,
    count: u64,
}

/// `Op` of `gdsync.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Op {
    kind: u32,
    cond: u16,
    flags: u16,
    addr: u64,
    value: u64,
}

fn word32(addr: u64) -> &'static AtomicU32 {
    let ptr = with_exposed_provenance_mut(usize::try_from(addr).unwrap());
    // SAFETY: words that the submission keeps alive.
    unsafe { AtomicU32::from_ptr(ptr) }
}

fn word64(addr: u64) -> &'static AtomicU64 {
    let ptr = with_exposed_provenance_mut(usize::try_from(addr).unwrap());
    // SAFETY: words that the submission keeps alive.
    unsafe { AtomicU64::from_ptr(ptr) }
}

fn low(value: u64) -> u32 {
    u32::try_from(value & 0xffff_ffff).unwrap()
}

/// The parameter is the program's address.
fn run_at(params: &[*mut c_void], copies: bool) {
    // SAFETY: an address.
    let at = unsafe { params[0].cast::<u64>().read() };
    let program = with_exposed_provenance_mut(usize::try_from(at).unwrap());
    run(&[&[program], &params[1..]].concat(), copies);
}

/// With `copies` it looks again behind each wait whether the stream has failed. A second parameter is the address of what is added to
/// numbers, or 0.
fn run(params: &[*mut c_void], copies: bool) {
    // SAFETY: the parameter is a head and operations.
    let head = unsafe { params[0].cast::<Head>().read() };
    // SAFETY: behind the head.
    let first = unsafe { params[0].cast::<Head>().add(1) }.cast::<Op>();
    // SAFETY: so many are there.
    let ops = unsafe { std::slice::from_raw_parts(first, usize::try_from(low(head.count)).unwrap()) };
    // SAFETY: an address.
    let ahead = params.get(1).map_or(0, |at| unsafe { at.cast::<u64>().read() });
    let ahead = if ahead == 0 { 0 } else { word64(ahead).load(Ordering::SeqCst) };
    let numbered = |op: Op| match op.flags & NUMBERED {
        0 => op,
        _ => Op { value: op.value.wrapping_add(ahead), ..op },
    };
    let ops: Vec<_> = ops.iter().copied().map(numbered).collect();
    let mut failed = has_failed(&head);
    let mut errors = 0;
    let mut late = Late::default();
    for (i, op) in ops.iter().enumerate() {
        if op.kind == FIND {
            // The copy follows.
            late.found = find(op, ops[i + 1].addr, late.len as u64);
            continue;
        }
        if i > 0 && ops[i - 1].flags & EITHER != 0 {
            continue;
        }
        if op.flags & EITHER != 0 {
            await_any(&head, &ops[i..i + 2], &mut failed, &mut errors);
            failed |= has_failed(&head);
            continue;
        }
        let next = ops.get(i + 1).map_or(0, |next| next.value);
        late.execute(&head, op, next, &mut failed, &mut errors);
        failed |= copies && is_wait(op.kind) && has_failed(&head);
    }
    late.arrive();
    tell(&head, errors);
}

fn is_wait(kind: u32) -> bool {
    matches!(kind, 2..=4)
}

/// Whether a kernel executes a fence before, or as, an operation of this kind.
fn is_fenced(kind: u32) -> bool {
    matches!(kind, 0 | 1 | 5 | 7 | 8)
}

const FIND: u32 = 12;
const PACK: u32 = 13;
const TAKE: u32 = 14;
/// Of a slot's word: the message is in the lines, which begin at [`LINES`].
const IN_LINES: u64 = 1;
const LINES: u64 = 16;
/// The operation is only for a receive that was found.
const FOUND: u16 = 8;
/// The operation is only for a message that went into its place.
const DIRECT: u16 = 16;
/// The wait is over, too, when the one behind it is.
const EITHER: u16 = 64;
/// The value has the number of a message from bit 33 on.
const NUMBERED: u16 = 256;

/// Where a receive is, by its line and the table of what is open; 0 if it is not reached.
fn find(line: &Op, table: u64, len: u64) -> u64 {
    let [told, place] = [0, 8].map(|at| word64(line.addr + at).load(Ordering::SeqCst));
    let (entry, offset) = (table + 16 * (place >> 40 & 255), place & ((1 << 40) - 1));
    if told >> 32 != line.value || told & 0xffff_ffff < len || place >> 48 == 0 {
        return 0;
    }
    let open = word64(entry + 8).load(Ordering::SeqCst);
    let is_open = open >> 48 == place >> 48 && offset + len <= open & ((1 << 48) - 1);
    if is_open { word64(entry).load(Ordering::SeqCst) + offset } else { 0 }
}

/// What a program has done so far.
#[derive(Default)]
struct Late {
    /// Bytes that copies have written and that nobody sees yet, by address.
    bytes: Vec<(u64, u8)>,
    /// The receive that was found last.
    found: u64,
    /// Length of the next copy or message, and the place of that.
    len: usize,
    place: u64,
    /// What the last 64-bit wait has seen.
    seen: u64,
    /// The last message went into its place.
    is_direct: bool,
}

impl Late {
    /// Any operation; `next` is the value of the one behind it.
    fn execute(&mut self, head: &Head, op: &Op, next: u64, failed: &mut bool, errors: &mut u32) {
        match op.kind {
            9 => (self.len, self.place) = (usize::try_from(op.value).unwrap(), op.addr),
            _ if op.flags & FOUND != 0 && is_wait(op.kind) == (self.found != 0) => {}
            _ if op.flags & DIRECT != 0 && !self.is_direct => {}
            10 | PACK | TAKE if *failed => {}
            10 if op.flags & FOUND != 0 => self.copy(self.found, op.value, self.len),
            10 => self.copy(op.addr, op.value, self.len),
            PACK => {
                self.is_direct = self.seen & IN_LINES == 0;
                match self.is_direct {
                    true if self.len == 0 => {}
                    true => self.copy(self.place, op.value, self.len),
                    false => self.pack(op.addr, op.value, next),
                }
            }
            TAKE => {
                self.arrive();
                *failed = !take(head, op, self.len);
                if *failed {
                    fail(head, op.value);
                }
            }
            kind => {
                if is_fenced(kind) {
                    self.arrive();
                }
                execute(head, op, failed, errors);
                if kind == 3 {
                    self.seen = word64(op.addr).load(Ordering::SeqCst);
                }
            }
        }
    }

    /// The word comes first, and the lines in any order.
    fn pack(&mut self, slot: u64, from: u64, word: u64) {
        self.arrive();
        // SAFETY: as for a copy.
        let bytes = unsafe {
            std::slice::from_raw_parts(
                with_exposed_provenance::<u8>(usize::try_from(from).unwrap()),
                self.len,
            )
        };
        let mut lines: Vec<_> = bytes.chunks(8).zip((slot + LINES..).step_by(16)).collect();
        let at = usize::try_from(word >> 33).unwrap() % lines.len().max(1);
        lines.rotate_left(at);
        word64(slot).store(word | IN_LINES, Ordering::Relaxed);
        for (data, line) in lines.into_iter().rev() {
            for (half, at) in [line, line + 8].into_iter().enumerate() {
                let part = data.get(4 * half..).unwrap_or(&[]);
                let data =
                    (0..).zip(part.iter().take(4)).map(|(i, byte)| u64::from(*byte) << (8 * i)).sum::<u64>();
                word64(at).store(data | flag_of(word), Ordering::Relaxed);
            }
        }
    }

    fn copy(&mut self, to: u64, from: u64, len: usize) {
        self.found = to;
        // Behind a barrier of the block it sees what it has written.
        self.arrive();
        // SAFETY: memory that the submission keeps alive; who writes to it meanwhile is in error.
        let bytes = unsafe {
            std::slice::from_raw_parts(with_exposed_provenance::<u8>(usize::try_from(from).unwrap()), len)
        };
        let mut stride = usize::try_from((to ^ from) % 65_536).unwrap() | 1;
        while gcd(stride, len) > 1 {
            stride += 2;
        }
        let order = (0..len).map(|i| (i * stride + stride) % len);
        self.bytes.extend(order.map(|i| (to + i as u64, bytes[i])));
        let late = self.bytes.split_off(len / 2);
        self.arrive();
        self.bytes = late;
    }

    fn arrive(&mut self) {
        for (to, byte) in self.bytes.drain(..) {
            let at = with_exposed_provenance_mut::<u8>(usize::try_from(to).unwrap());
            // SAFETY: memory that the submission keeps alive.
            unsafe { at.write_volatile(byte) };
        }
        fence(Ordering::SeqCst);
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The flag of a message in its place in a line.
fn flag_of(word: u64) -> u64 {
    (word >> 32 | 1) << 32
}

/// Takes a message of at most `room` bytes from its lines, if it is there; false if it does not come.
fn take(head: &Head, op: &Op, room: usize) -> bool {
    let word = word64(op.value).load(Ordering::SeqCst);
    let len = room.min(usize::try_from(word >> 1 & 0xffff_ffff).unwrap());
    if word & IN_LINES == 0 {
        return true;
    }
    let start = Instant::now();
    for at in 0..len.div_ceil(4) {
        let half = word64(op.value + LINES + 8 * at as u64);
        let data = loop {
            let data = half.load(Ordering::Relaxed);
            if data & !0xffff_ffff == flag_of(word) {
                break data;
            }
            if has_failed(head) || start.elapsed() > Duration::from_nanos(head.limit_ns) {
                return false;
            }
            std::thread::yield_now();
        };
        for (i, byte) in data.to_le_bytes().into_iter().enumerate().take((len - 4 * at).min(4)) {
            let to = op.addr + (4 * at + i) as u64;
            // SAFETY: the place of the message, which the submission keeps alive.
            unsafe { with_exposed_provenance_mut::<u8>(usize::try_from(to).unwrap()).write_volatile(byte) };
        }
    }
    // Whole lines.
    for at in 0..2 * len.div_ceil(8) {
        word64(op.value + LINES + 8 * at as u64).store(0, Ordering::Relaxed);
    }
    true
}

/// Marks the stream as failed by a wait for this word, unless it has failed.
fn fail(head: &Head, word: u64) {
    if has_failed(head) {
        return;
    }
    word64(head.status + 8).store(head.submission, Ordering::Relaxed);
    word64(head.status + 16).store(word, Ordering::Relaxed);
    word32(head.status).store(1, Ordering::SeqCst);
}

fn has_failed(head: &Head) -> bool {
    word32(head.status).load(Ordering::Relaxed) != 0
}

fn tell(head: &Head, errors: u32) {
    if errors > 0 {
        word32(head.status + 4).fetch_add(errors, Ordering::SeqCst);
    }
}

fn execute(head: &Head, op: &Op, failed: &mut bool, errors: &mut u32) {
    match op.kind {
        2..=4 => await_any(head, std::slice::from_ref(op), failed, errors),
        0 | 6 if !*failed => word32(op.addr).store(low(op.value), Ordering::SeqCst),
        1 if !*failed => word64(op.addr).store(op.value, Ordering::SeqCst),
        8 if !*failed => _ = word64(op.addr).fetch_add(op.value, Ordering::SeqCst),
        7 => word64(if *failed { op.addr + 8 } else { op.addr }).store(op.value, Ordering::SeqCst),
        _ => fence(Ordering::SeqCst),
    }
}

/// `Result` of `gdsync.cuh`: it was run.
pub const OK: u64 = 0;
/// The stream has failed.
pub const FAILED: u64 = 1;
/// A completion with an error.
pub const COMPLETION_ERROR: u64 = 2;
/// It is not the next one.
pub const OUT_OF_ORDER: u64 = 3;

/// `Steps` of `gdsync.cuh`.
#[derive(Debug)]
pub struct Progress {
    head: Head,
    cursor: u64,
    ops: u64,
    next: u32,
    place: u32,
    dead: bool,
}

impl Progress {
    /// A view of the steps at an address.
    pub fn new(program: u64) -> Self {
        let word = |at: u64| word64(program + at).load(Ordering::SeqCst);
        let head = Head { status: word(0), limit_ns: word(8), submission: word(16), count: word(24) };
        let where_ = word(32);
        let (cursor, ops) = (program + 32, program + 48);
        Self { head, cursor, ops, next: low(where_), place: low(where_ >> 32), dead: false }
    }

    /// Runs step `i`.
    pub fn run(&mut self, i: u32) -> u64 {
        match () {
            () if self.dead => FAILED,
            () if i == self.next && u64::from(i) < self.head.count => self.step(),
            () if has_failed(&self.head) => FAILED,
            () => OUT_OF_ORDER,
        }
    }

    fn finish(&mut self) {
        while u64::from(self.next) < self.head.count && self.step() != FAILED {}
        while self.op().kind != 7 {
            self.place += 1;
        }
        // Behind the mark the memory may be another launch's.
        execute(&self.head, &self.op(), &mut has_failed(&self.head), &mut 0);
    }

    fn op(&self) -> Op {
        let at = usize::try_from(self.ops + 24 * u64::from(self.place)).unwrap();
        // SAFETY: the place of an operation in memory that the submission keeps alive.
        unsafe { with_exposed_provenance::<Op>(at).read() }
    }

    fn step(&mut self) -> u64 {
        let (mut failed, mut errors) = (has_failed(&self.head), 0);
        let (mut late, mut waited) = (Late::default(), false);
        loop {
            let op = self.op();
            self.place += 1;
            // A copy between GPUs, or its signal.
            failed |= op.flags & 4 != 0 && waited && has_failed(&self.head);
            let is_last = op.flags & 2 != 0;
            let next = if is_last { 0 } else { self.op().value };
            late.execute(&self.head, &op, next, &mut failed, &mut errors);
            waited |= is_wait(op.kind);
            // The last of the step.
            if is_last {
                break;
            }
        }
        late.arrive();
        failed |= errors > 0 && has_failed(&self.head);
        tell(&self.head, errors);
        self.dead = failed;
        self.next += 1;
        if failed {
            return FAILED;
        }
        word64(self.cursor).store(u64::from(self.place) << 32 | u64::from(self.next), Ordering::SeqCst);
        if errors > 0 { COMPLETION_ERROR } else { OK }
    }
}

/// Waits until the first wait is over, which names what has not come, or the word of the second has the upper half of its value.
fn await_any(head: &Head, waits: &[Op], failed: &mut bool, errors: &mut u32) {
    let start = Instant::now();
    loop {
        let has_come = |op: &Op| (word64(op.addr).load(Ordering::SeqCst) ^ op.value) >> 32 == 0;
        if is_over(&waits[0], errors) || waits.get(1).is_some_and(has_come) || *failed {
            return;
        }
        if start.elapsed() > Duration::from_nanos(head.limit_ns) {
            *failed = true;
            return fail(head, waits[0].addr);
        }
        std::thread::sleep(Duration::from_micros(20));
    }
}

fn is_over(op: &Op, errors: &mut u32) -> bool {
    if op.kind == 3 {
        let (word, value) = (word64(op.addr).load(Ordering::SeqCst), op.value);
        return match op.cond {
            0 => word.wrapping_sub(value).cast_signed() >= 0,
            1 => word == value,
            2 => word & value != 0,
            _ => !(word | value) != 0,
        };
    }
    let (word, value) = (word32(op.addr).load(Ordering::SeqCst), low(op.value));
    let is_over = match op.cond {
        0 => word.wrapping_sub(value).cast_signed() >= 0,
        1 => word == value,
        2 => word & value != 0,
        _ => !(word | value) != 0,
    };
    *errors += u32::from(is_over && op.kind == 4 && word >> 28 >= 13);
    is_over
}
