//! Files of recordings: folders, names, owners, and removal.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Once;

use super::layout::{self, header};
use crate::env::variable;
use crate::error::{Error, Result};
use crate::memory;

/// Number of recordings of dead processes that are kept.
const KEPT: usize = 8;
/// Number of names tried: each copy of the library in a process has its own file.
const NAMES: u32 = 16;

/// Maximum entries of a folder checked by a starting process; `gdasync trace --clean` checks all.
const LOOKED_AT: usize = 4096;

/// Remedy if there are no file descriptors.
pub(super) const RAISE: &str = "raise the limit of open files (ulimit -n)";

/// Whether the process of a recording runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It runs or is stopped.
    Alive,
    /// It is gone.
    Dead,
    /// Not known: it belongs to another container or machine, or there are no file descriptors to check.
    Unknown,
}

/// Folders of recordings: `GDSYNC_RECORDER_DIR`, or the usual ones for memory files.
pub(super) fn folders() -> Vec<PathBuf> {
    if let Some(folder) = variable("GDSYNC_RECORDER_DIR") {
        return vec![folder.into()];
    }
    let runtime = variable("XDG_RUNTIME_DIR").map(PathBuf::from);
    [Some("/dev/shm".into()), runtime, Some("/tmp".into())].into_iter().flatten().collect()
}

/// Whether a call failed for lack of file descriptors, and may succeed later.
pub(super) fn is_short(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Files named as recordings, among the first `most` entries of each folder.
///
/// # Errors
/// Only for lack of file descriptors.
pub(super) fn list(most: usize) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for folder in folders() {
        match fs::read_dir(folder) {
            Ok(entries) => {
                let paths = entries.take(most).flatten().map(|entry| entry.path());
                files.extend(paths.filter(|path| pid_of(path).is_some()));
            }
            Err(error) if is_short(&error) => return Err(error),
            Err(_) => {}
        }
    }
    files.sort();
    Ok(files)
}

/// The PID in the name of a file.
pub(super) fn pid_of(path: &Path) -> Option<u32> {
    let name = path.file_name()?.to_str()?.strip_prefix("gdsync-")?.strip_suffix(".rec")?;
    let mut numbers = name.split('-');
    let pid = numbers.next()?.parse().ok()?;
    let rest: Vec<_> = numbers.collect();
    let is_ours = !rest.is_empty() && rest.iter().all(|number| number.parse::<u64>().is_ok());
    is_ours.then_some(pid)
}

/// Opens a regular file for which `is_wanted` is true. Others are not even opened: opening a FIFO or a leased file blocks, and opening a
/// device may have side effects.
pub(super) fn open(path: &Path, is_wanted: impl Fn(&Metadata) -> bool) -> io::Result<(File, Metadata)> {
    let check = |about: Metadata| match (about.is_file(), is_wanted(&about)) {
        (true, true) => Ok(about),
        (true, false) => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("the file belongs to user {}, not to the user of the process", about.uid()),
        )),
        (false, _) => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")),
    };
    check(fs::symlink_metadata(path)?)?;
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_NOCTTY;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    // Checked again, because another file may have got the name meanwhile.
    let about = check(file.metadata()?)?;
    Ok((file, about))
}

/// Whether a file of the user `owner` may be the recording of a process. Only root sees files of others, and for a running process only
/// files of its own user, because others could forge one.
pub(super) fn may_be_of(owner: libc::uid_t, pid: u32) -> bool {
    let own = memory::user();
    owner == own || own == 0 && users(pid).is_none_or(|users| users.contains(&owner))
}

/// Real, effective and saved user ID of a process; `None` if it is gone.
fn users(pid: u32) -> Option<Vec<libc::uid_t>> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    Some(users.split_whitespace().filter_map(|user| user.parse().ok()).collect())
}

/// Creates the file of this process with `bytes` bytes, the first `held` of them allocated. Leaves no file behind on errors.
pub(super) fn create(bytes: usize, held: usize) -> Result<(PathBuf, File)> {
    let pid = std::process::id();
    crate::memory::check_file_limit(bytes).map_err(failed)?;
    let started = started(pid).map_err(failed)?.unwrap_or(0);
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for folder in folders() {
        for n in 0..NAMES {
            let again = if n == 0 { String::new() } else { format!("-{n}") };
            let path = folder.join(format!("gdsync-{pid}-{started}{again}.rec"));
            let mut options = File::options();
            let created = options
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path);
            let sized = match created {
                Ok(file) => file
                    .set_len(bytes as u64)
                    .and_then(|()| allocate(&file, 0, held))
                    .map(|()| file)
                    .inspect_err(|_| _ = fs::remove_file(&path)),
                Err(error) => Err(error),
            };
            match sized {
                Ok(file) => return Ok((path, file)),
                Err(error) => last = error,
            }
            if last.kind() != io::ErrorKind::AlreadyExists {
                break;
            }
        }
    }
    Err(failed(last))
}

/// The error for a file that cannot be created.
pub(super) fn failed(why: io::Error) -> Error {
    let fix = match why.raw_os_error() {
        _ if is_short(&why) => RAISE,
        Some(libc::EFBIG) => "raise the limit of the size of files (ulimit -f), or set GDSYNC_RECORDER=off",
        _ => "make room in /dev/shm, name another folder in GDSYNC_RECORDER_DIR, or set GDSYNC_RECORDER=off",
    };
    Error::os("creating the file of the flight recorder", why, fix)
}

/// Allocates a range of the file, so that writes through a mapping cannot fault.
pub(super) fn allocate(file: &File, from: usize, bytes: usize) -> io::Result<()> {
    let (Ok(from), Ok(bytes)) = (libc::off_t::try_from(from), libc::off_t::try_from(bytes)) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    // SAFETY: a plain call on a valid descriptor.
    uninterrupted(|| unsafe { libc::posix_fallocate(file.as_raw_fd(), from, bytes) })
}

/// Repeats a call that signals interrupt, such as a profiler's: otherwise the thread would never record.
fn uninterrupted(call: impl Fn() -> libc::c_int) -> io::Result<()> {
    const TRIES: usize = 100;
    match std::iter::repeat_with(call).take(TRIES).find(|errno| *errno != libc::EINTR) {
        Some(0) => Ok(()),
        Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        None => Err(io::ErrorKind::Interrupted.into()),
    }
}

/// The header, if the file has the layout of this release.
pub(super) fn header_of(file: &File) -> Option<[u64; header::WORDS]> {
    first_words(file).filter(|words| words[header::MAGIC] == layout::MAGIC)
}

/// What is where a header would be.
pub(super) fn first_words(file: &File) -> Option<[u64; header::WORDS]> {
    let mut bytes = [0; header::WORDS * 8];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let mut words = [0; header::WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    Some(words)
}

/// Whether the process of a header runs.
///
/// # Errors
/// For lack of file descriptors or rights.
pub(super) fn liveness(words: &[u64; header::WORDS]) -> io::Result<Liveness> {
    // The process had no /proc to read its start time from.
    let is_blind = words[header::STARTED] == 0;
    if is_blind || !is_of_this_boot(words)? || words[header::PID_NAMESPACE] != pid_namespace() {
        return Ok(Liveness::Unknown);
    }
    let now = match u32::try_from(words[header::PID]) {
        Ok(pid) => started(pid)?,
        Err(_) => None,
    };
    Ok(if now == Some(words[header::STARTED]) { Liveness::Alive } else { Liveness::Dead })
}

/// Whether a recording was, or may have been, created since this machine was booted.
///
/// # Errors
/// For lack of file descriptors.
pub(super) fn is_of_this_boot(words: &[u64; header::WORDS]) -> io::Result<bool> {
    const UNKNOWN: [u64; 2] = [0; 2];
    let (then, now) = ([words[header::BOOT_ID], words[header::BOOT_ID + 1]], boot_id()?);
    Ok(then == now || then == UNKNOWN || now == UNKNOWN)
}

/// Start time of a process, in ticks; `None` if it is gone or a zombie.
///
/// # Errors
/// For lack of file descriptors or rights, which does not mean that the process is gone.
pub(super) fn started(pid: u32) -> io::Result<Option<u64>> {
    let stat = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Err(error)
            if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) =>
        {
            return Ok(None);
        }
        stat => stat?,
    };
    let parse = || {
        // The name may contain brackets.
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        fields.next().filter(|state| !matches!(*state, "Z" | "X"))?;
        fields.nth(18)?.parse().ok()
    };
    Ok(parse())
}

pub(super) fn pid_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

/// The boot ID of the machine; zeros if it is not known.
///
/// # Errors
/// For lack of file descriptors.
pub(super) fn boot_id() -> io::Result<[u64; 2]> {
    let text = match fs::read_to_string("/proc/sys/kernel/random/boot_id") {
        Err(error) if is_short(&error) => return Err(error),
        text => text.unwrap_or_default(),
    };
    let id = u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or(0);
    let [a, b] = *id.to_ne_bytes().as_chunks::<8>().0 else { return Ok([0; 2]) };
    Ok([a, b].map(u64::from_ne_bytes))
}

/// When the recording of a dead process of this user was last written; `None` if the process runs.
fn death(path: &Path) -> io::Result<Option<(i64, i64)>> {
    let (file, about) = open(path, |about| about.uid() == memory::user())?;
    let is_dead = match (header_of(&file), pid_of(path)) {
        (Some(words), _) => liveness(&words)? == Liveness::Dead || !is_of_this_boot(&words)?,
        // Written by another release, or incomplete.
        (None, Some(pid)) => started(pid)?.is_none(),
        (None, None) => false,
    };
    Ok(is_dead.then(|| (about.mtime(), about.mtime_nsec())))
}

/// Removes recordings of this user's dead processes except for the newest `keep`, among the first `most` entries of each folder. Returns
/// the files removed.
pub(super) fn clean(keep: usize, most: usize) -> Vec<PathBuf> {
    static TOLD: Once = Once::new();
    let tell = |error: &io::Error| {
        TOLD.call_once(|| tracing::info!(%error, "recordings of dead processes may be left for now"));
    };
    let mut dead = Vec::new();
    for path in list(most).inspect_err(tell).unwrap_or_default() {
        match death(&path) {
            Ok(at) => dead.extend(at.map(|at| (at, path))),
            Err(error) if is_short(&error) => {
                tell(&error);
                break;
            }
            // It was removed, or belongs to another user.
            Err(_) => {}
        }
    }
    dead.sort();
    dead.truncate(dead.len().saturating_sub(keep));
    dead.into_iter().map(|(_, path)| path).filter(|path| fs::remove_file(path).is_ok()).collect()
}

/// Removes old recordings of dead processes.
pub(super) fn tidy() {
    for path in clean(KEPT, LOOKED_AT) {
        tracing::debug!(path = %path.display(), "the recording of a dead process was removed: there are newer ones");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_known_by_their_names() {
        for (name, pid) in [
            ("/dev/shm/gdsync-12-345.rec", Some(12)),
            ("/dev/shm/gdsync-12-345-1.rec", Some(12)),
            ("/dev/shm/gdsync-12.rec", None),
            ("/dev/shm/gdsync-12-345-x.rec", None),
            ("/dev/shm/gdsync-12-345-\x1b[31m.rec", None),
            ("/dev/shm/gdsync-12-x.rec", None),
            ("/dev/shm/gdsync-99999999999-1.rec", None),
            ("/dev/shm/other-12-345.rec", None),
            ("/dev/shm/gdsync-12-345.recx", None),
        ] {
            assert_eq!(pid_of(Path::new(name)), pid, "{name}");
        }
    }

    #[test]
    fn room_is_made_in_spite_of_signals() {
        let answers = |answers: &[libc::c_int]| {
            let left = std::cell::RefCell::new(answers.iter().copied());
            uninterrupted(|| left.borrow_mut().next().unwrap_or(libc::EINTR)).map_err(|error| error.kind())
        };
        assert_eq!(answers(&[libc::EINTR, libc::EINTR, 0]), Ok(()));
        assert_eq!(answers(&[libc::EINTR, libc::ENOSPC, 0]), Err(io::ErrorKind::StorageFull));
        assert_eq!(answers(&[]), Err(io::ErrorKind::Interrupted), "it does not hang");
    }

    #[test]
    fn this_process_lives_and_another_one_is_known_to_be_dead() {
        let here = std::process::id();
        let mut words = [0; header::WORDS];
        words[header::PID] = here.into();
        words[header::STARTED] = started(here).unwrap().unwrap();
        words[header::PID_NAMESPACE] = pid_namespace();
        [words[header::BOOT_ID], words[header::BOOT_ID + 1]] = boot_id().unwrap();
        assert_eq!(liveness(&words).unwrap(), Liveness::Alive);
        for (word, liveness_then) in [
            (header::STARTED, Liveness::Dead),
            (header::BOOT_ID, Liveness::Unknown),
            (header::PID_NAMESPACE, Liveness::Unknown),
        ] {
            let mut words = words;
            words[word] ^= 1;
            assert_eq!(liveness(&words).unwrap(), liveness_then, "word {word}");
        }
        // Unknown values do not mean that the process is dead.
        let (mut unstarted, mut nowhen) = (words, words);
        unstarted[header::STARTED] = 0;
        assert_eq!(liveness(&unstarted).unwrap(), Liveness::Unknown);
        nowhen[header::BOOT_ID..header::BOOT_ID + 2].fill(0);
        assert!(is_of_this_boot(&nowhen).unwrap() && liveness(&nowhen).unwrap() == Liveness::Alive);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert_eq!(started(pid).unwrap(), None);
    }
}
