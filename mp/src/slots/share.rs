//! How ranks of a host get at each other's slots: each makes a file in memory with those that it receives through, and the
//! others open it by the process's entry in `/proc`. The files are gone with the last process, however that ends.

use std::collections::hash_map::RandomState;
use std::ffi::CString;
use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process;
use std::time::Duration;

use gdsync::memory::Memory;

use super::Slots;
use super::region::{BYTES, Region};
use crate::bootstrap::Exchange;
use crate::deadline::Deadline;
use crate::error::Result;

/// Where the file of a rank is. The name is what tells it from any other process's files.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Place {
    process: u32,
    file: i32,
    token: u64,
}

impl Place {
    const BYTES: usize = 16;

    fn to_bytes(self) -> Vec<u8> {
        let Self { process, file, token } = self;
        [&process.to_be_bytes()[..], &file.to_be_bytes(), &token.to_be_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let (process, rest) = bytes.split_first_chunk()?;
        let (file, token) = rest.split_first_chunk()?;
        Some(Self {
            process: u32::from_be_bytes(*process),
            file: i32::from_be_bytes(*file),
            token: u64::from_be_bytes(*token.first_chunk()?),
        })
    }

    fn name(token: u64) -> String {
        format!("gdsync-mp-{token:016x}")
    }

    /// The file, unless another process is meant: in a container of its own, numbers of processes mean others.
    fn open(self) -> Option<OwnedFd> {
        let path = format!("/proc/{}/fd/{}", self.process, self.file);
        let target = fs::read_link(&path).ok()?;
        // Before it is opened: to open a file of any kind could have effects.
        if !target.to_str()?.starts_with(&format!("/memfd:{} ", Self::name(self.token))) {
            return None;
        }
        fs::OpenOptions::new().read(true).write(true).open(path).ok().map(OwnedFd::from)
    }
}

/// The slots of this rank.
fn create(size: usize) -> gdsync::Result<(Memory, OwnedFd, Place)> {
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(process::id());
    let token = hasher.finish();
    let name = CString::new(Place::name(token)).expect("no zeros in it");
    let (memory, file) = Memory::shared(&name, size * BYTES)?;
    let place = Place { process: process::id(), file: file.as_raw_fd(), token };
    Ok((memory, file, place))
}

/// Connects with the ranks of `wanted`, in both directions; not with those that cannot be. All ranks must call it.
///
/// # Errors
/// Of the exchange.
pub(crate) fn share(
    wanted: &[bool],
    bootstrap: &mut dyn Exchange,
    timeout: Duration,
) -> Result<Vec<Option<Slots>>> {
    let deadline = Deadline::after(timeout);
    let (rank, size) = (bootstrap.rank(), wanted.len());
    let own = wanted.contains(&true).then(|| create(size));
    let own = own.and_then(|own| own.inspect_err(|error| tracing::info!(%error, "no slots")).ok());
    let place = own.as_ref().map(|(_, _, place)| place.to_bytes()).unwrap_or_default();
    let places = bootstrap.allgather(&place, deadline.remaining())?;
    let open = |(peer, bytes): (usize, &Vec<u8>)| {
        let file = Place::from_bytes(bytes).filter(|_| own.is_some() && wanted[peer])?.open()?;
        // The whole file is mapped, and only what is used has pages.
        let memory = Memory::of_shared(&file, size * BYTES).and_then(|all| all.slice(rank * BYTES, BYTES));
        memory.inspect_err(|error| tracing::info!(%error, peer, "no slots")).ok()
    };
    let theirs: Vec<_> = places.iter().enumerate().take(size).map(open).collect();
    // Both directions, or none. Behind this nobody needs the file any more.
    let mine: Vec<u8> = theirs.iter().map(|memory| u8::from(memory.is_some())).collect();
    let reached = bootstrap.allgather(&mine, deadline.remaining())?;
    let connect = |(peer, theirs): (usize, Option<Memory>)| {
        let reaches_us = reached.get(peer).is_some_and(|reached| reached.get(rank) == Some(&1));
        let (memory, ..) = own.as_ref().filter(|_| reaches_us)?;
        let mine = memory.slice(peer * BYTES, BYTES).ok()?;
        Some(Slots::new(Region(theirs?), Region(mine)))
    };
    let mut all: Vec<_> = theirs.into_iter().enumerate().map(connect).collect();
    all.resize_with(size, || None);
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_opened_by_who_knows_its_name() {
        let (memory, _file, place) = create(2).unwrap();
        assert_eq!(Place::from_bytes(&place.to_bytes()), Some(place));
        assert_eq!(Place::from_bytes(&place.to_bytes()[1..]), None);
        let file = place.open().unwrap();
        memory.write(BYTES + 3, b"here").unwrap();
        let other = Memory::of_shared(&file, 2 * BYTES).unwrap();
        assert_eq!(other.to_vec()[BYTES + 3..BYTES + 7], *b"here");
        assert!(Place { token: place.token ^ 1, ..place }.open().is_none(), "it is another one");
        assert!(Place { file: 1 << 20, ..place }.open().is_none());
    }
}
