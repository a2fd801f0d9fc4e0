//! Functions that take paths: opening files, and asking about them.

use std::ffi::{CStr, CString, c_char, c_int, c_uint};

use libc::{AT_FDCWD, AT_SYMLINK_NOFOLLOW, FILE, mode_t};
use rustix::io::Errno;

use super::{Target, descriptor, finish, next, target};
use crate::events::into_program;
use crate::process::{Open, Process, text_file};
use crate::sysfs::{FILE_SYSTEM, Node, device_number, inode};
use crate::user::last_errno;

/// Opens what a path names.
fn open_target(target: Target, flags: c_int) -> Result<c_int, Errno> {
    let process = Process::this();
    let Target::Node(path, node) = target else { return Err(Errno::NOENT) };
    match node {
        Node::Device(device) if flags & libc::O_PATH == 0 => process.open_device(device),
        Node::Device(_) => Err(Errno::OPNOTSUPP),
        Node::Dir => process.open_dir(&path),
        Node::Link(_) => Err(Errno::LOOP),
        Node::File(_) if flags & libc::O_DIRECTORY != 0 => Err(Errno::NOTDIR),
        Node::File(_) if flags & libc::O_ACCMODE != libc::O_RDONLY => Err(Errno::ACCESS),
        Node::File(content) => Ok(into_program(text_file(&process.text(&content)?)?)),
    }
}

macro_rules! opens {
    ($($name:ident($($dir:ident)?);)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) extern "C" fn $name($($dir: c_int,)? path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
            #[allow(unused_variables, reason = "only of functions without a directory")]
            let from = AT_FDCWD;
            $(let from = $dir;)?
            match target(from, path, flags & libc::O_NOFOLLOW == 0) {
                Some(target) => finish(|| open_target(target, flags)),
                None => next!($name(
                    $($dir => c_int,)? path => *const c_char, flags => c_int, mode => mode_t
                ) -> c_int, else -1),
            }
        }
    )*};
}

opens! {
    open();
    open64();
    openat(dir);
    openat64(dir);
    __open_2();
    __open64_2();
    __openat_2(dir);
    __openat64_2(dir);
}

/// Opens a file as a stream, if it may be opened in this mode.
fn open_stream(target: Target, mode: *const c_char) -> Result<*mut FILE, Errno> {
    // SAFETY: the program gives a string.
    let text = unsafe { CStr::from_ptr(mode) }.to_bytes();
    let flags = match text {
        [b'r', rest @ ..] if !rest.contains(&b'+') => libc::O_RDONLY,
        [b'r' | b'w' | b'a', ..] => libc::O_RDWR,
        _ => return Err(Errno::INVAL),
    };
    let fd = open_target(target, flags)?;
    // SAFETY: the descriptor is new, and the mode is the program's.
    let stream = unsafe { libc::fdopen(fd, mode) };
    if stream.is_null() {
        let error = last_errno();
        super::descriptors::close(fd);
        return Err(Errno::from_raw_os_error(error));
    }
    Ok(stream)
}

macro_rules! fopens {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) extern "C" fn $name(path: *const c_char, mode: *const c_char) -> *mut FILE {
            match target(AT_FDCWD, path, true) {
                Some(target) => finish(|| open_stream(target, mode)),
                None => next!($name(path => *const c_char, mode => *const c_char) -> *mut FILE, else std::ptr::null_mut()),
            }
        }
    )*};
}

fopens! { fopen fopen64 }

/// The path of a device file.
fn device_path(device: usize) -> String {
    format!("/dev/infiniband/uverbs{device}")
}

/// What `stat` says of a node.
fn fill(out: *mut libc::stat, path: &str, node: &Node) -> Result<c_int, Errno> {
    let (mode, size, number) = match node {
        Node::Dir => (libc::S_IFDIR | 0o755, 0, 0),
        Node::File(_) => (libc::S_IFREG | 0o444, 4096, 0),
        Node::Link(_) => (libc::S_IFLNK | 0o777, 0, 0),
        Node::Device(device) => (libc::S_IFCHR | 0o666, 0, device_number(*device)),
    };
    // SAFETY: any bytes are a value of this structure.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    (stat.st_mode, stat.st_size, stat.st_rdev) = (mode, size, number);
    (stat.st_dev, stat.st_ino) = (FILE_SYSTEM, inode(path));
    stat.st_nlink = 1;
    stat.st_blksize = 4096;
    if out.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the program gives a place for this structure.
    unsafe { out.write(stat) };
    Ok(0)
}

fn stat_target(target: Target, out: *mut libc::stat) -> c_int {
    finish(|| match target {
        Target::Node(path, node) => fill(out, &path, &node),
        Target::Nothing => Err(Errno::NOENT),
    })
}

/// On 64-bit Linux both forms of each function take the same structure.
macro_rules! stats {
    ($($name:ident($($version:ident)?) $follow:literal;)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) extern "C" fn $name($($version: c_int,)? path: *const c_char, out: *mut libc::stat) -> c_int {
            match target(AT_FDCWD, path, $follow) {
                Some(target) => stat_target(target, out),
                None => next!($name(
                    $($version => c_int,)? path => *const c_char, out => *mut libc::stat
                ) -> c_int, else missing()),
            }
        }
    )*};
}

/// A function of old libraries that this one does not have, and so no program calls.
fn missing() -> c_int {
    finish(|| Err(Errno::NOSYS))
}

stats! {
    stat() true;
    stat64() true;
    lstat() false;
    lstat64() false;
    __xstat(version) true;
    __xstat64(version) true;
    __lxstat(version) false;
    __lxstat64(version) false;
}

macro_rules! fstats {
    ($($name:ident($($version:ident)?);)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) extern "C" fn $name($($version: c_int,)? fd: c_int, out: *mut libc::stat) -> c_int {
            match descriptor(fd) {
                Some(Open::Device { device, .. }) => {
                    finish(|| fill(out, &device_path(device), &Node::Device(device)))
                }
                Some(Open::Dir(path)) => finish(|| fill(out, &path, &Node::Dir)),
                _ => next!($name($($version => c_int,)? fd => c_int, out => *mut libc::stat) -> c_int, else missing()),
            }
        }
    )*};
}

fstats! {
    fstat();
    fstat64();
    __fxstat(version);
    __fxstat64(version);
}

macro_rules! fstatats {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) extern "C" fn $name(dir: c_int, path: *const c_char, out: *mut libc::stat, flags: c_int) -> c_int {
            match target_at(dir, path, flags) {
                Some(target) => stat_target(target, out),
                None => next!($name(
                    dir => c_int, path => *const c_char, out => *mut libc::stat, flags => c_int
                ) -> c_int, else missing()),
            }
        }
    )*};
}

fstatats! { fstatat fstatat64 }

/// What a path names, or the descriptor if the call asks about that.
fn target_at(dir: c_int, path: *const c_char, flags: c_int) -> Option<Target> {
    // SAFETY: the program gives a string or nothing.
    let is_empty = flags & libc::AT_EMPTY_PATH != 0 && (path.is_null() || unsafe { *path } == 0);
    if !is_empty {
        return target(dir, path, flags & AT_SYMLINK_NOFOLLOW == 0);
    }
    match descriptor(dir)? {
        Open::Dir(path) => Some(Target::Node(path, Node::Dir)),
        Open::Device { device, .. } => Some(Target::Node(device_path(device), Node::Device(device))),
        _ => None,
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn statx(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    out: *mut libc::statx,
) -> c_int {
    let Some(node) = target_at(dir, path, flags) else {
        return next!(statx(
            dir => c_int, path => *const c_char, flags => c_int, mask => c_uint, out => *mut libc::statx
        ) -> c_int, else missing());
    };
    // SAFETY: any bytes are a value of this structure.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    if stat_target(node, &raw mut stat) != 0 {
        return -1;
    }
    finish(|| {
        if out.is_null() {
            return Err(Errno::FAULT);
        }
        // SAFETY: any bytes are a value of this structure.
        let mut extended: libc::statx = unsafe { std::mem::zeroed() };
        extended.stx_mask = libc::STATX_TYPE | libc::STATX_MODE | libc::STATX_NLINK | libc::STATX_SIZE;
        extended.stx_mask |= libc::STATX_INO;
        extended.stx_ino = stat.st_ino;
        (extended.stx_dev_major, extended.stx_dev_minor) =
            (libc::major(stat.st_dev), libc::minor(stat.st_dev));
        extended.stx_mode = u16::try_from(stat.st_mode).unwrap_or_default();
        extended.stx_nlink = 1;
        extended.stx_size = stat.st_size.unsigned_abs();
        extended.stx_blksize = 4096;
        extended.stx_rdev_major = libc::major(stat.st_rdev);
        extended.stx_rdev_minor = libc::minor(stat.st_rdev);
        // SAFETY: the program gives a place for this structure.
        unsafe { out.write(extended) };
        Ok(0)
    })
}

fn check_access(target: &Target, mode: c_int) -> Result<c_int, Errno> {
    match target {
        Target::Nothing => Err(Errno::NOENT),
        Target::Node(_, Node::File(_)) if mode & (libc::W_OK | libc::X_OK) != 0 => Err(Errno::ACCESS),
        Target::Node(..) => Ok(0),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn access(path: *const c_char, mode: c_int) -> c_int {
    match target(AT_FDCWD, path, true) {
        Some(target) => finish(|| check_access(&target, mode)),
        None => next!(access(path => *const c_char, mode => c_int) -> c_int, else missing()),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn faccessat(dir: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int {
    match target(dir, path, flags & AT_SYMLINK_NOFOLLOW == 0) {
        Some(target) => finish(|| check_access(&target, mode)),
        None => next!(faccessat(
            dir => c_int, path => *const c_char, mode => c_int, flags => c_int
        ) -> c_int, else missing()),
    }
}

fn link_text(target: Target, out: *mut c_char, size: usize) -> Result<isize, Errno> {
    let Target::Node(_, node) = target else { return Err(Errno::NOENT) };
    let Node::Link(text) = node else { return Err(Errno::INVAL) };
    let len = text.len().min(size);
    // SAFETY: the program gives `size` bytes.
    unsafe { out.copy_from_nonoverlapping(text.as_ptr().cast(), len) };
    isize::try_from(len).map_err(|_| Errno::INVAL)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn readlink(path: *const c_char, out: *mut c_char, size: usize) -> isize {
    match target(AT_FDCWD, path, false) {
        Some(target) => finish(|| link_text(target, out, size)),
        None => next!(readlink(path => *const c_char, out => *mut c_char, size => usize) -> isize, else -1),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn readlinkat(dir: c_int, path: *const c_char, out: *mut c_char, size: usize) -> isize {
    match target(dir, path, false) {
        Some(target) => finish(|| link_text(target, out, size)),
        None => next!(readlinkat(
            dir => c_int, path => *const c_char, out => *mut c_char, size => usize
        ) -> isize, else -1),
    }
}

/// A path without links, in the program's buffer of `PATH_MAX` bytes or one of `malloc`.
fn resolved(target: Target, out: *mut c_char) -> Result<*mut c_char, Errno> {
    let Target::Node(path, _) = target else { return Err(Errno::NOENT) };
    let path = CString::new(path).map_err(|_| Errno::NOENT)?;
    if out.is_null() {
        // SAFETY: it is a string.
        return Ok(unsafe { libc::strdup(path.as_ptr()) });
    }
    let bytes = path.as_bytes_with_nul();
    // SAFETY: the paths of the card are shorter than `PATH_MAX`.
    unsafe { out.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len()) };
    Ok(out)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn realpath(path: *const c_char, out: *mut c_char) -> *mut c_char {
    match target(AT_FDCWD, path, true) {
        Some(target) => finish(|| resolved(target, out)),
        None => next!(realpath(
            path => *const c_char, out => *mut c_char
        ) -> *mut c_char, else std::ptr::null_mut()),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn __realpath_chk(path: *const c_char, out: *mut c_char, size: usize) -> *mut c_char {
    match target(AT_FDCWD, path, true) {
        Some(target) => finish(|| resolved(target, out)),
        None => next!(__realpath_chk(
            path => *const c_char, out => *mut c_char, size => usize
        ) -> *mut c_char, else std::ptr::null_mut()),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
    realpath(path, std::ptr::null_mut())
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;

    use super::*;

    #[test]
    fn files_are_opened_by_path_and_by_directory() {
        let read = |fd: c_int| {
            let mut bytes = [0; 64];
            // SAFETY: the buffer has this size.
            let count = unsafe { libc::read(fd, bytes.as_mut_ptr().cast::<c_void>(), bytes.len()) };
            // SAFETY: the descriptor is the test's own.
            unsafe { libc::close(fd) };
            String::from_utf8_lossy(&bytes[..usize::try_from(count).unwrap()]).into_owned()
        };
        let path = c"/sys/class/infiniband/mlx5_0/node_type";
        assert_eq!(read(open(path.as_ptr(), libc::O_RDONLY, 0)), "1: CA\n");
        let class = open64(c"/sys/class/infiniband_verbs".as_ptr(), libc::O_DIRECTORY, 0);
        let verbs = openat(class, c"uverbs0".as_ptr(), libc::O_DIRECTORY | libc::O_CLOEXEC, 0);
        assert!(class >= 0 && verbs >= 0);
        assert_eq!(read(openat(verbs, c"ibdev".as_ptr(), libc::O_RDONLY, 0)), "mlx5_0\n");
        assert_eq!(openat(verbs, c"nothing".as_ptr(), libc::O_RDONLY, 0), -1);
        assert_eq!(last_errno(), libc::ENOENT);
        for fd in [class, verbs] {
            assert_eq!(super::super::descriptors::close(fd), 0);
        }
    }

    #[test]
    fn paths_lose_their_links() {
        let found = realpath(c"/sys/class/infiniband/mlx5_0".as_ptr(), std::ptr::null_mut());
        // SAFETY: it is a string of `malloc`.
        let text = unsafe { CStr::from_ptr(found) }.to_str().unwrap().to_owned();
        // SAFETY: it comes from `malloc`, and nothing uses it any more.
        unsafe { libc::free(found.cast()) };
        assert_eq!(text, "/sys/devices/pcicafe:00/cafe:00:01.0/cafe:01:00.0/infiniband/mlx5_0");
    }

    #[test]
    fn devices_are_character_devices() {
        // SAFETY: any bytes are a value of this structure.
        let mut out: libc::stat = unsafe { std::mem::zeroed() };
        assert_eq!(stat(c"/dev/infiniband/uverbs0".as_ptr(), &raw mut out), 0);
        assert_eq!((out.st_mode & libc::S_IFMT, out.st_rdev), (libc::S_IFCHR, device_number(0)));
        let fd = open(c"/dev/infiniband/uverbs0".as_ptr(), libc::O_RDWR, 0);
        // SAFETY: any bytes are a value of this structure.
        let mut of_fd: libc::stat = unsafe { std::mem::zeroed() };
        assert_eq!(fstatat(fd, c"".as_ptr(), &raw mut of_fd, libc::AT_EMPTY_PATH), 0);
        assert_eq!((of_fd.st_mode, of_fd.st_rdev), (out.st_mode, out.st_rdev), "by its descriptor");
        assert_eq!(super::super::descriptors::close(fd), 0);
        assert_eq!(stat(c"/dev/infiniband/uverbs9".as_ptr(), &raw mut out), -1);
        assert_eq!(access(c"/dev/infiniband/uverbs0".as_ptr(), libc::R_OK | libc::W_OK), 0);
        for path in [c"/sys/module/nvidia_peermem/version", c"/sys/kernel/mm/memory_peers/nv_mem/version"] {
            assert_eq!(access(path.as_ptr(), libc::F_OK), 0, "{path:?}");
        }
    }

    #[test]
    fn files_have_numbers() {
        // SAFETY: any bytes are a value of this structure.
        let mut out: [libc::stat; 3] = unsafe { std::mem::zeroed() };
        let paths = [c"/sys/class/infiniband/mlx5_0/node_type", c"/sys/class/infiniband/mlx5_0/fw_ver"];
        assert_eq!(paths.map(|path| stat(path.as_ptr(), &raw mut out[0])), [0; 2]);
        assert_eq!(stat(paths[1].as_ptr(), &raw mut out[1]), 0);
        assert_eq!((out[0].st_dev, out[0].st_ino), (out[1].st_dev, out[1].st_ino), "the same file");
        assert_eq!(stat(paths[0].as_ptr(), &raw mut out[2]), 0);
        assert!(out[2].st_dev == out[1].st_dev && out[2].st_ino != out[1].st_ino, "another one");
        // SAFETY: any bytes are a value of this structure.
        let mut extended: libc::statx = unsafe { std::mem::zeroed() };
        assert_eq!(statx(AT_FDCWD, paths[0].as_ptr(), 0, libc::STATX_INO, &raw mut extended), 0);
        assert_eq!(extended.stx_ino, out[2].st_ino);
    }

    #[test]
    fn streams_are_only_read() {
        let path = c"/sys/class/infiniband/mlx5_0/node_type";
        for (mode, error) in
            [(c"w", libc::EACCES), (c"a", libc::EACCES), (c"r+", libc::EACCES), (c"x", libc::EINVAL)]
        {
            assert!(fopen(path.as_ptr(), mode.as_ptr()).is_null(), "{mode:?}");
            assert_eq!(last_errno(), error, "{mode:?}");
        }
        let stream = fopen(path.as_ptr(), c"re".as_ptr());
        let mut line = [0; 16];
        // SAFETY: the stream is open, and the buffer has this size.
        assert!(!unsafe { libc::fgets(line.as_mut_ptr(), 16, stream) }.is_null());
        // SAFETY: `fgets` ended it with 0.
        assert_eq!(unsafe { CStr::from_ptr(line.as_ptr()) }, c"1: CA\n");
        // SAFETY: it is open, and the test's own.
        unsafe { libc::fclose(stream) };
    }
}
