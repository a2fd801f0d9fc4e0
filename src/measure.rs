//! Measuring: payload patterns, CPU clocks, percentiles, and the description of the machine.

use gdsync::memory::Memory;
use gdsync::verbs::{Qp, QpAddress};
use hdrhistogram::Histogram;
use mp::Communicator;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::time::{ClockId, clock_gettime};

use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// CPU time the calling thread has used.
pub fn thread_cpu() -> Duration {
    cpu(ClockId::ThreadCPUTime)
}

/// CPU time all threads of this process have used.
pub fn process_cpu() -> Duration {
    cpu(ClockId::ProcessCPUTime)
}

fn cpu(clock: ClockId) -> Duration {
    clock_gettime(clock).try_into().expect("CPU time is not negative")
}

/// Machine, build and command of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Processor model.
    pub cpu: String,
    /// Processors of the machine.
    pub cpus: usize,
    /// Kernel release.
    pub kernel: String,
    /// Version of this package.
    pub version: String,
    /// Commit it was built from.
    pub commit: String,
    /// Compiler it was built with.
    pub rustc: String,
    /// The command line of this process, quoted for a shell; empty in old results.
    #[serde(default)]
    pub command: String,
}

impl Machine {
    /// This machine.
    pub fn here() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let info = read("/proc/cpuinfo");
        let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Self {
            cpu: model.map_or(std::env::consts::ARCH, |(_, model)| model).to_owned(),
            // Not those of this process: a rank is bound to some.
            cpus: info.lines().filter(|line| line.starts_with("processor")).count().max(1),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            version: env!("CARGO_PKG_VERSION").into(),
            commit: env!("GDASYNC_COMMIT").into(),
            rustc: env!("GDASYNC_RUSTC").into(),
            command: command(std::env::args_os().map(|arg| arg.to_string_lossy().into_owned())),
        }
    }
}

/// The command line quoted for a shell, without the folder of the program.
fn command(args: impl Iterator<Item = String>) -> String {
    let name = |program: &str| program.rsplit('/').next().unwrap_or(program).to_owned();
    let quote = |arg: String| {
        let plain = |c: char| c.is_alphanumeric() || "_-+./,:=@%".contains(c);
        if !arg.is_empty() && arg.chars().all(plain) {
            arg
        } else {
            format!("'{}'", arg.replace('\'', r"'\''"))
        }
    };
    let words = args.enumerate().map(|(i, arg)| quote(if i == 0 { name(&arg) } else { arg }));
    words.collect::<Vec<_>>().join(" ")
}

/// Polls until there is an answer: `None` where none has come within the limit. The clock is read, and the core offered to
/// others, only now and then.
pub fn poll<T, E>(limit: Duration, mut ask: impl FnMut() -> Result<Option<T>, E>) -> Result<Option<T>, E> {
    let mut start = None;
    loop {
        for _ in 0..4096 {
            if let Some(answer) = ask()? {
                return Ok(Some(answer));
            }
        }
        if start.get_or_insert_with(Instant::now).elapsed() > limit {
            return Ok(None);
        }
        std::thread::yield_now();
    }
}

/// Connects queue pairs with those of the other one of two ranks, in their order.
pub fn connect<'a>(comm: &Communicator, qps: impl Iterator<Item = &'a Qp> + Clone) -> Result<()> {
    let own: Vec<u8> = qps.clone().flat_map(|qp| qp.address().to_bytes()).collect();
    let all = comm.exchange(&own, None)?;
    let (addresses, rest) = all[1 - comm.rank()].as_chunks();
    if all[1 - comm.rank()].len() != own.len() || !rest.is_empty() {
        return Err("the other rank has other queue pairs".into());
    }
    qps.zip(addresses).try_for_each(|(qp, address)| Ok(qp.connect(QpAddress::from_bytes(address)?)?))
}

/// The payload of one message, unique to it: a stale, short, torn or misplaced message does not match. Kernels write the same bytes:
/// word `i` of 8 bytes is `w ^ w >> 32`, little-endian, with `w = seed + (i + 1) * 0x9e37_79b9_7f4a_7c15`, wrapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern(u64);

/// 2^64 divided by the golden ratio: its multiples differ in all bytes.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Pattern {
    /// The bytes of message `number` of `sender`.
    pub fn new(sender: u64, number: u64) -> Self {
        let mut seed = (sender << 56 ^ number).wrapping_add(1).wrapping_mul(STEP);
        seed ^= seed >> 29;
        Self(seed.wrapping_mul(0xbf58_476d_1ce4_e5b9))
    }

    /// The message.
    pub fn bytes(self, len: usize) -> Vec<u8> {
        self.flipped(len, 0)
    }

    /// The message, each word xor `flip`.
    fn flipped(self, len: usize, flip: u64) -> Vec<u8> {
        let mut word = self.0;
        let mut out = Vec::with_capacity(len.next_multiple_of(8));
        while out.len() < len {
            word = word.wrapping_add(STEP);
            out.extend_from_slice(&(word ^ word >> 32 ^ flip).to_le_bytes());
        }
        out.truncate(len);
        out
    }

    /// Writes the message.
    pub fn fill(self, memory: &Memory, offset: usize, len: usize) -> gdsync::Result<()> {
        memory.write(offset, &self.bytes(len))
    }

    /// Overwrites the range so that every byte differs from the message.
    pub fn spoil(self, memory: &Memory, offset: usize, len: usize) -> gdsync::Result<()> {
        memory.write(offset, &self.flipped(len, u64::MAX))
    }

    /// Whether the range holds the message.
    pub fn check(self, memory: &Memory, offset: usize, len: usize) -> gdsync::Result<bool> {
        let mut found = vec![0; len];
        memory.read(offset, &mut found)?;
        Ok(found == self.bytes(len))
    }
}

/// A histogram of times.
#[derive(Clone, Debug)]
pub struct Samples(Histogram<u64>);

impl Default for Samples {
    fn default() -> Self {
        // Three digits, from a nanosecond to a minute.
        Self(Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("constant bounds are legal"))
    }
}

impl Samples {
    /// Of these times.
    pub fn of(times: impl IntoIterator<Item = Duration>) -> Self {
        let mut samples = Self::default();
        times.into_iter().for_each(|time| samples.add(time));
        samples
    }

    /// Adds a time, at most a minute.
    pub fn add(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds the mean of `count` times, `count` times.
    pub fn add_mean(&mut self, together: Duration, count: u64) {
        let mean =
            u32::try_from(count).ok().and_then(|count| together.checked_div(count)).unwrap_or_default();
        (0..count).for_each(|_| self.add(mean));
    }

    /// Adds all times of another collection.
    pub fn append(&mut self, other: &Samples) {
        self.0 += &other.0;
    }

    /// The number of times collected.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The microseconds that this part of the times does not exceed: 0.0 for the shortest, 1.0 for the longest.
    pub fn micros(&self, quantile: f64) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "times below a minute are exact")]
        let nanos = self.0.value_at_quantile(quantile) as f64;
        nanos / 1e3
    }
}

/// Marsaglia's xorshift: random enough for pauses and orders.
#[derive(Debug)]
pub struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self(STEP)
    }
}

impl Random {
    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// A short number of bytes: `64`, `4 Ki`, `1 Mi`.
pub fn size(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{} Mi", b >> 20),
        b if b >= 1 << 10 && b.is_multiple_of(1 << 10) => format!("{} Ki", b >> 10),
        b => b.to_string(),
    }
}

const PAGE_NAME: &str = "gdasync-page";

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// Zeroed memory of `len` bytes that all ranks share. Every rank must call this.
pub fn share_memory(comm: &Communicator, len: usize) -> Result<Memory> {
    // Stays open until the other ranks have opened it.
    let own = (comm.rank() == 0).then(|| create_shared(len)).transpose();
    let path = own.as_ref().ok().and_then(|own| Some(&own.as_ref()?.1));
    let offer = path.map_or(Ok(String::new()), |path| host().map(|host| format!("{host}\n{path}")))?;
    let offers = comm.exchange(offer.as_bytes(), None)?;
    let memory = match &own {
        Ok(Some((file, _))) => Ok(Memory::map_shared(file.as_fd(), len)?),
        Ok(None) => open_shared(&String::from_utf8_lossy(&offers[0]), len),
        Err(error) => Err(error.to_string().into()),
    };
    let failed = memory.as_ref().err().map(|error| format!("rank {}: {error}", comm.rank()));
    match objection(comm, failed)? {
        Some(failed) => Err(format!("sharing memory: {failed}").into()),
        None => memory,
    }
}

/// The first reason of any rank against something.
pub fn objection(comm: &Communicator, own: Option<String>) -> Result<Option<String>> {
    let all = comm.exchange(own.unwrap_or_default().as_bytes(), None)?;
    Ok(all.iter().find(|reason| !reason.is_empty()).map(|reason| String::from_utf8_lossy(reason).into()))
}

/// This host since it was started.
pub(crate) fn host() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Maps what another rank offers: its host, and the path of its file.
fn open_shared(offer: &str, len: usize) -> Result<Memory> {
    let (theirs, path) = offer.split_once('\n').ok_or("rank 0 has none")?;
    if theirs != host()? {
        return Err("rank 0 is on another host".into());
    }
    let explain =
        |error: io::Error| format!("{path}: {error}: it needs the ranks in one PID namespace, as one user");
    // In another namespace the path may name anything.
    let target = std::fs::read_link(path).map_err(explain)?;
    if !target.to_string_lossy().contains(PAGE_NAME) {
        return Err(explain(io::Error::other(format!("is {}", target.display()))).into());
    }
    let file = File::options().read(true).write(true).open(path).map_err(explain)?;
    Ok(Memory::map_shared(file.as_fd(), len)?)
}

/// A file of `len` zeroed bytes, and a path under which other processes of this user can open it while this one has it open.
fn create_shared(len: usize) -> io::Result<(File, String)> {
    let file = File::from(memfd_create(PAGE_NAME, MemfdFlags::CLOEXEC)?);
    file.set_len(len as u64)?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    Ok((file, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_is_quoted_for_a_shell() {
        let words = ["/usr/bin/gdasync", "bench", "--json", "my file", "", "it's", "a=b,c"];
        let typed = command(words.into_iter().map(str::to_owned));
        assert_eq!(typed, r"gdasync bench --json 'my file' '' 'it'\''s' a=b,c");
    }

    #[test]
    fn polls_end_with_an_answer_a_failure_or_the_limit() {
        assert_eq!(poll(Duration::ZERO, || Ok::<_, ()>(None::<()>)), Ok(None));
        let mut polls = 0;
        assert_eq!(
            poll(Duration::ZERO, || Ok::<_, ()>((polls += 1, (polls == 3).then_some(7)).1)),
            Ok(Some(7))
        );
        assert_eq!(poll(Duration::MAX, || Err::<Option<()>, _>("broken")), Err("broken"));
    }

    #[test]
    fn pattern_matches_only_its_own_message() {
        let memory = Memory::alloc(1000).unwrap();
        let pattern = Pattern::new(1, 7);
        pattern.fill(&memory, 10, 900).unwrap();
        assert!(pattern.check(&memory, 10, 900).unwrap());
        assert!(!pattern.check(&memory, 11, 899).unwrap(), "moved by a byte");
        assert!(!Pattern::new(1, 8).check(&memory, 10, 900).unwrap(), "another message");
        assert!(!Pattern::new(0, 7).check(&memory, 10, 900).unwrap(), "another sender");
        for at in [10, 500, 909] {
            let mut byte = [0];
            memory.read(at, &mut byte).unwrap();
            memory.write(at, &[byte[0] ^ 1]).unwrap();
            assert!(!pattern.check(&memory, 10, 900).unwrap(), "one bit of byte {at}");
            memory.write(at, &byte).unwrap();
        }
        for len in 1..20 {
            pattern.spoil(&memory, 10, len).unwrap();
            assert!(!pattern.check(&memory, 10, len).unwrap(), "spoilt, {len} bytes");
        }
    }

    #[test]
    fn words_follow_from_the_seed() {
        let pattern = Pattern::new(1, 7);
        let word = |i: u64| pattern.0.wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let words = (0..100).flat_map(|i| (word(i) ^ word(i) >> 32).to_le_bytes());
        assert!(pattern.bytes(800).into_iter().eq(words));
    }

    #[test]
    fn first_bytes_of_consecutive_messages_differ() {
        let first = |n| Pattern::new(0, n).bytes(1);
        let same = (0..1000).filter(|&n| first(n) == first(n + 1)).count();
        assert!(same < 20, "a message of one byte can be told from the one before: {same} of 1000 cannot");
    }

    #[test]
    fn random_numbers_spread_below_their_limit() {
        let mut random = Random::default();
        let mut all: Vec<_> = (0..1000).map(|_| random.below(400)).collect();
        all.sort_unstable();
        assert!(all[100] < 100 && all[900] > 300 && all[999] < 400, "{} {}", all[100], all[900]);
    }

    #[test]
    fn percentiles_and_count_of_samples() {
        let samples = Samples::of((1..=1000).map(Duration::from_micros));
        for (quantile, us) in [(0.0, 1.0), (0.5, 500.0), (0.99, 990.0), (1.0, 1000.0)] {
            assert!((samples.micros(quantile) / us - 1.0).abs() < 0.01, "{quantile}");
        }
        assert_eq!(samples.count(), 1000);
        let mut samples = Samples::default();
        samples.add_mean(Duration::from_micros(300), 100);
        assert_eq!(samples.count(), 100);
        assert!([0.0, 1.0].iter().all(|quantile| (samples.micros(*quantile) - 3.0).abs() < 0.01));
        assert_eq!([1, 1024, 1000, 3 << 20].map(size), ["1", "1 Ki", "1000", "3 Mi"]);
    }

    /// The number of a process and a file may belong to something else elsewhere.
    #[test]
    fn nothing_else_is_mapped() {
        let (_file, path) = create_shared(PAGE).unwrap();
        let other = File::open("/dev/null").unwrap();
        let null = format!("/proc/self/fd/{}", other.as_raw_fd());
        let here = host().unwrap();
        for (offer, expected) in [
            (format!("another host\n{path}"), "another host"),
            (format!("{here}\n{null}"), "/dev/null"),
            (format!("{here}\n/proc/self/fd/no"), "/proc/self/fd/no"),
            (String::new(), "rank 0 has none"),
        ] {
            let error = open_shared(&offer, PAGE).unwrap_err().to_string();
            assert!(error.contains(expected), "{offer}: {error}");
        }
    }
}
