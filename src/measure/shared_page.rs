//! Memory that processes share without any message.

use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::AsRawFd;
use std::time::Duration;

use gdsync::memory::Memory;
use mp::Communicator;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};

const NAME: &str = "gdasync-page";

/// Bytes of a page.
pub const SIZE: usize = 4096;

/// Zeroed memory of `len` bytes that all ranks share. Every rank must call this.
pub fn share(
    comm: &Communicator,
    len: usize,
    timeout: Duration,
) -> std::result::Result<Memory, Box<dyn std::error::Error>> {
    // It has to stay open until the others have opened it.
    let own = (comm.rank() == 0).then(|| create(len)).transpose();
    let offer = match &own {
        Ok(own) => format!("{}\n{}", host()?, own.as_ref().map_or("", |(_, path)| path)),
        Err(_) => String::new(),
    };
    let offers = comm.exchange(offer.as_bytes(), timeout)?;
    let memory = match &own {
        Ok(Some((file, _))) => map(file, len),
        Ok(None) => std::str::from_utf8(&offers[0]).map_err(Error::other).and_then(|offer| open(offer, len)),
        Err(error) => Err(Error::new(error.kind(), error.to_string())),
    };
    let failed =
        memory.as_ref().err().map_or(String::new(), |error| format!("rank {}: {error}", comm.rank()));
    let failed = comm.exchange(failed.as_bytes(), timeout)?;
    match failed.iter().find(|failed| !failed.is_empty()) {
        Some(failed) => Err(format!("sharing memory: {}", String::from_utf8_lossy(failed)).into()),
        None => Ok(memory?),
    }
}

/// This host since it was started.
fn host() -> Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Maps what another rank offers: its host, and the path of its file.
fn open(offer: &str, len: usize) -> Result<Memory> {
    let (theirs, path) = offer.split_once('\n').ok_or_else(|| Error::other("rank 0 has none"))?;
    if theirs != host()? {
        return Err(Error::other("rank 0 is on another host"));
    }
    let explain = |error: Error| {
        Error::new(
            error.kind(),
            format!("{path}: {error}: it needs the ranks in one PID namespace, as one user"),
        )
    };
    // In another namespace the path may name anything.
    let target = std::fs::read_link(path).map_err(explain)?;
    if !target.to_string_lossy().contains(NAME) {
        return Err(explain(Error::other(format!("is {}", target.display()))));
    }
    map(&File::options().read(true).write(true).open(path).map_err(explain)?, len)
}

/// A file of so many zeroed bytes, and a path by which other processes of the user can open it while this one has it open.
fn create(len: usize) -> Result<(File, String)> {
    let file = File::from(memfd_create(NAME, MemfdFlags::CLOEXEC)?);
    file.set_len(len as u64)?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    Ok((file, path))
}

/// Maps the file. The mapping is never undone: it is small, and the program short-lived.
fn map(file: &File, len: usize) -> Result<Memory> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address the kernel chooses touches no existing memory.
    let raw = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }?;
    // SAFETY: the mapping is valid for its size and stays until the process ends.
    unsafe { Memory::from_raw(raw.cast(), len) }.map_err(Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_a_page_share_it() {
        let (file, path) = create(SIZE).unwrap();
        let offer = format!("{}\n{path}", host().unwrap());
        let (here, there) = (map(&file, SIZE).unwrap(), open(&offer, SIZE).unwrap());
        assert_eq!(there.to_vec(), [0; SIZE]);
        here.write(SIZE - 6, b"shared").unwrap();
        let mut found = [0; 6];
        there.read(SIZE - 6, &mut found).unwrap();
        assert_eq!(&found, b"shared");
    }

    /// The number of a process and a file may belong to something else elsewhere.
    #[test]
    fn nothing_else_is_mapped() {
        let (_file, path) = create(SIZE).unwrap();
        let other = File::open("/dev/null").unwrap();
        let null = format!("/proc/self/fd/{}", other.as_raw_fd());
        let here = host().unwrap();
        for (offer, expected) in [
            (format!("another host\n{path}"), "another host"),
            (format!("{here}\n{null}"), "/dev/null"),
            (format!("{here}\n/proc/self/fd/no"), "/proc/self/fd/no"),
            (String::new(), "rank 0 has none"),
        ] {
            let error = open(&offer, SIZE).unwrap_err().to_string();
            assert!(error.contains(expected), "{offer}: {error}");
        }
    }
}
