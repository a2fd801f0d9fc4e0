//! How the objects of GPU memory are found, on small libraries that play libcuda.

use std::ffi::{CString, c_int, c_long, c_void};
use std::fs;
use std::io::Write;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use gdrcopy::Error;
use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::pointer_attribute;
use gdrcopy::cuda::{Cuda, CudaSource, CudaStatus, EntryPoints, Objects, Piece};
use gdsync_testkit::driver::{Control, api};
use gdsync_testkit::process::{End, in_child, printed, run_within};

const LIBRARY: &str = "GDRCOPY_TEST_LIBCUDA";
const PAGE: u64 = 64 << 10;

fn compile(name: &str, flags: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/objects.c");
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=gnu11", "-Wall", "-Werror", "-O1", "-shared", "-fPIC"]).args(flags).arg(source);
    let output = run_within(gcc.arg("-o").arg(&library), Duration::from_secs(60));
    assert!(output.status.success(), "{}", printed(&output));
    library
}

/// The library for a test, in a process with the preloaded `ioctl`. The first call compiles it, runs the test in such a process, and
/// returns `None`.
fn library(test: &str, flags: &[&str]) -> Option<PathBuf> {
    if let Some(library) = std::env::var_os(LIBRARY) {
        return Some(library.into());
    }
    let library = compile(&format!("libcuda-{test}.so"), flags);
    let kernel = compile(&format!("libkernel-{test}.so"), &["-DKERNEL"]);
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args([&format!("objects::{test}"), "--exact", "--nocapture"]);
    again.env(LIBRARY, library).env("LD_PRELOAD", kernel);
    let output = run_within(&mut again, Duration::from_secs(120));
    assert!(output.status.success() && printed(&output).contains("1 passed"), "{}", printed(&output));
    None
}

/// A function of a library.
///
/// # Safety
/// It must be of this type.
unsafe fn function<T: Copy>(library: *mut c_void, name: &str) -> T {
    let name = CString::new(name).unwrap();
    // SAFETY: a loaded library and a name.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}");
    // SAFETY: the caller guarantees it.
    unsafe { std::mem::transmute_copy(&found) }
}

/// The loaded library, and the simulated driver with its export.
struct Played {
    cuda: Arc<dyn Cuda>,
    addr: u64,
    another_call: extern "C" fn(c_int) -> c_int,
    preloaded_calls: extern "C" fn() -> c_long,
    _control: Control,
}

impl Played {
    fn load(path: &Path) -> Self {
        Self::load_with(path, api())
    }

    fn load_with(path: &Path, api: Api) -> Self {
        let path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a library without initialisers.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
        assert!(!library.is_null());
        // SAFETY: the function of the library, of this type.
        let export = unsafe { function(library, "cuMemGetHandleForAddressRange") };
        // SAFETY: the function of the library, of this type.
        let another_call = unsafe { function(library, "another_call") };
        // SAFETY: the function of the preloaded library, of this type.
        let preloaded_calls = unsafe { function(libc::RTLD_DEFAULT, "preloaded_calls") };
        let control = Control::take();
        // SAFETY: the simulated driver does what the manual says; the export is only asked for what it names.
        let source = unsafe { EntryPoints::new(Api { mem_get_handle_for_address_range: export, ..api }) };
        let cuda = source.initialise().unwrap();
        let addr = cuda.alloc(0, 4096, Default::default()).unwrap();
        Self { cuda, addr, another_call, preloaded_calls, _control: control }
    }

    fn objects(&self, addr: u64, pages: u64) -> Result<Objects, Error> {
        self.cuda.objects(self.addr, addr, usize::try_from(pages * PAGE).unwrap())
    }

    fn check(&self, addr: u64, pages: u64) {
        let piece = |page| Piece {
            object: u32::try_from(addr / PAGE + page).unwrap(),
            offset: page << 20,
            len: PAGE,
        };
        let expected = Objects { client: 0xc1d0_0001, pieces: (0..pages).map(piece).collect() };
        assert_eq!(self.objects(addr, pages).unwrap(), expected);
    }
}

/// How the pages of a library are protected.
fn protection(library: &Path) -> Vec<String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let own = maps.lines().filter(|line| line.ends_with(library.to_str().unwrap()));
    own.map(|line| line.split_whitespace().take(3).collect::<Vec<_>>().join(" ")).collect()
}

/// Asks from two threads while others call through the library, from its first call on.
fn ask_amid_other_calls(path: &Path) {
    let played = Played::load(path);
    let before = protection(path);
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(b"bytes").unwrap();
    let (stop, others) = (AtomicBool::new(false), AtomicI64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!((played.another_call)(reader.as_raw_fd()), 5);
                    others.fetch_add(2, Ordering::Relaxed);
                }
            });
        }
        let askers = [1, 2].map(|asker| {
            let played = &played;
            scope.spawn(move || {
                for round in 0..500 {
                    let pages = if round % 50 == 0 { 300 } else { 1 + round % 5 };
                    played.check((asker << 32) + round * PAGE, pages);
                }
            })
        });
        let ended = askers.map(|asker| asker.join());
        stop.store(true, Ordering::Relaxed);
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    // All calls of others reach the kernel; those that ask only while a thread binds the function.
    let asked = (played.preloaded_calls)() - others.into_inner();
    assert!((0..16).contains(&asked), "{asked} calls of those that ask");
    assert_eq!(protection(path), before);

    let end = in_child(|| {
        let refused = matches!(played.objects(0, 1), Err(Error::OtherProcess { .. }));
        refused && (played.another_call)(reader.as_raw_fd()) == 5
    });
    assert_eq!(end, End::Said(true));
    played.check(5 * PAGE, 2);
}

#[test]
fn entries_that_are_bound_at_the_first_call() {
    let flags = ["-Wl,-z,lazy", "-Wl,-z,norelro"];
    let Some(path) = library("entries_that_are_bound_at_the_first_call", &flags) else { return };
    ask_amid_other_calls(&path);
}

#[test]
fn entries_in_read_only_memory() {
    let flags = ["-Wl,-z,now", "-Wl,-z,relro"];
    let Some(path) = library("entries_in_read_only_memory", &flags) else { return };
    ask_amid_other_calls(&path);
}

#[test]
fn calls_without_a_procedure_linkage_table() {
    let flags = ["-fno-plt", "-Wl,-z,relro", "-DBEFORE_570"];
    let Some(path) = library("calls_without_a_procedure_linkage_table", &flags) else { return };
    ask_amid_other_calls(&path);
}

/// Two chunks of a pool, and what lives in them.
const CHUNKS: Range<u64> = 0x70_0000..0x90_0000;
const CHUNK_SIZE: u64 = 1 << 20;
const LIVE: Range<u64> = 0x74_1000..0x88_0000;

/// What the simulated driver says of the chunks; all memory of this process counts as of a pool.
extern "C" fn in_pool(data: *mut c_void, attribute: u32, addr: u64) -> u32 {
    let value = match attribute {
        pointer_attribute::MEMPOOL_HANDLE => 1,
        // Of an address elsewhere: the first one's.
        pointer_attribute::MAPPING_BASE_ADDR if !CHUNKS.contains(&addr) => CHUNKS.start,
        pointer_attribute::MAPPING_BASE_ADDR => addr & !(CHUNK_SIZE - 1),
        pointer_attribute::MAPPING_SIZE => CHUNK_SIZE,
        pointer_attribute::BUFFER_ID => u64::from(LIVE.contains(&addr)),
        _ => return 1,
    };
    // SAFETY: the library passes a place for the answer.
    unsafe { data.cast::<u64>().write(value) };
    0
}

/// Of chunks in which only other memory begins a page.
#[test]
fn memory_of_a_pool() {
    let Some(path) = library("memory_of_a_pool", &["-DPOOL"]) else { return };
    let played = Played::load_with(&path, Api { pointer_get_attribute: Some(in_pool), ..api() });
    let piece = |object, offset, len| Piece { object, offset, len };
    for (offset, pages, pieces) in [
        (0, 16, vec![piece(7, 0, 16 * PAGE)]),
        (0, 1, vec![piece(7, 0, PAGE)]),
        (4 * PAGE, 2, vec![piece(7, 4 * PAGE, 2 * PAGE)]),
        (15 * PAGE, 3, vec![piece(7, 15 * PAGE, PAGE), piece(8, 0, 2 * PAGE)]),
        (PAGE, 31, vec![piece(7, PAGE, 15 * PAGE), piece(8, 0, 16 * PAGE)]),
    ] {
        let expected = Objects { client: 0xc1d0_0001, pieces };
        assert_eq!(played.objects(CHUNKS.start + offset, pages).unwrap(), expected);
    }
    // Before the chunks.
    let error = played.objects(CHUNKS.start - PAGE, 1).unwrap_err();
    assert!(matches!(error, Error::Cuda { status: CudaStatus::INVALID_VALUE, .. }), "{error}");
}

fn refusal(path: &Path) -> String {
    match Played::load(path).objects(PAGE, 1) {
        Err(error @ Error::Unsupported { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_structure_of_another_size_is_refused() {
    let Some(path) = library("a_structure_of_another_size_is_refused", &["-DLONGER"]) else { return };
    let error = refusal(&path);
    assert!(error.contains("takes 2616 bytes") && error.contains("GDRCOPY_BACKEND"), "{error}");
}

#[test]
fn a_library_with_system_calls_of_its_own_is_refused() {
    let Some(path) = library("a_library_with_system_calls_of_its_own_is_refused", &["-DNO_IMPORT"]) else {
        return;
    };
    let error = refusal(&path);
    assert!(error.contains("does not import \"ioctl\""), "{error}");
}
