//! Plays NCCL: loads the plug-in as NCCL does, and makes its calls, in ranks that are processes.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::ptr;
use std::time::{Duration, Instant};

use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync_testkit::process::{built, printed};
use mp::launch::{Bootstrap, Launch, Launcher, Root};
use nccl_rma_gda::abi::*;

/// For what must happen, on the slowest machine.
pub(crate) const LONG: Duration = Duration::from_secs(300);
/// Signals of a region.
pub(crate) const SIGNALS: usize = 16;
/// What a released word has at least.
pub(crate) const RELEASED: u64 = 1 << 62;

const RANK: &str = "NCCL_TEST_RANK";
const FOLDER: &str = "NCCL_TEST_FOLDER";

/// Where the memory of a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    /// Of a simulated GPU, which this library cannot map: copy engines move it and add to its words.
    Gpu,
}

/// Runs `size` processes of the test that calls this, with these variables, and returns what they printed, by rank. In these processes
/// it runs `body` and does not return. A rank that stopped itself is killed when the others have ended.
pub(crate) fn job(
    test: &str,
    size: usize,
    variables: &[(&str, &str)],
    body: impl FnOnce(Rank),
) -> Vec<Output> {
    if let Ok(rank) = std::env::var(RANK) {
        let folder = std::env::var(FOLDER).unwrap();
        body(Rank::join(Path::new(&folder), rank.parse().unwrap(), size));
        std::process::exit(0);
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test.replace(':', "_"));
    // It is there if the test ran before.
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    std::os::unix::fs::symlink(built("libsimulated_cuda.so"), folder.join("libcuda.so.1")).unwrap();
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
        command.env(RANK, rank.to_string()).env(FOLDER, &folder).env("LD_LIBRARY_PATH", &folder);
        command.env("NCCL_SOCKET_IFNAME", "lo").envs(variables.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks: Vec<Child> = (0..size).map(start).collect();
    let pids: Vec<_> = ranks.iter().map(|rank| i32::try_from(rank.id()).unwrap()).collect();
    let waits: Vec<_> =
        ranks.into_iter().map(|rank| std::thread::spawn(|| rank.wait_with_output().unwrap())).collect();
    let start = Instant::now();
    while !waits.iter().all(std::thread::JoinHandle::is_finished) {
        let left: Vec<_> =
            pids.iter().zip(&waits).filter(|(_, wait)| !wait.is_finished()).map(|(pid, _)| *pid).collect();
        if left.iter().all(|&pid| is_stopped(pid)) || start.elapsed() > LONG {
            // SAFETY: children that nobody has waited for.
            left.into_iter().for_each(|pid| _ = unsafe { libc::kill(pid, libc::SIGKILL) });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    waits.into_iter().map(|wait| wait.join().unwrap()).collect()
}

fn is_stopped(pid: i32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}

/// Whether a process is there.
pub(crate) fn is_running(pid: u64) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// All ranks but `without` have ended well.
pub(crate) fn all_well(outputs: &[Output], without: Option<usize>) {
    let text: String = outputs.iter().map(printed).collect();
    for (rank, output) in outputs.iter().enumerate() {
        let is_well = output.status.success() && printed(output).contains("rank is well");
        assert_eq!(is_well, Some(rank) != without, "rank {rank}: {:?}\n{text}", output.status);
    }
}

/// NCCL's logger, in the one form that the plug-in uses.
unsafe extern "C" fn log(
    _: c_int,
    _: c_ulong,
    _: *const c_char,
    _: c_int,
    format: *const c_char,
    text: *const c_char,
) {
    // SAFETY: terminated texts.
    assert_eq!(unsafe { CStr::from_ptr(format) }, c"%s");
    // SAFETY: a terminated text.
    println!("log: {}", unsafe { CStr::from_ptr(text) }.to_string_lossy());
}

/// The library, loaded.
#[derive(Debug)]
pub(crate) struct Library(*mut c_void);

impl Library {
    pub(crate) fn open() -> Self {
        let path = built("libnccl_rma_gda.so");
        let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a path.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null());
        Self(library)
    }

    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: an open library and a name.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!found.is_null(), "{name:?}");
        found
    }

    /// A table of functions.
    pub(crate) fn table<T>(&self, name: &CStr) -> &'static T {
        // SAFETY: a table of this type, which stays: the library is never unloaded.
        unsafe { &*self.symbol(name).cast::<T>() }
    }

    /// The failures that the library tells.
    pub(crate) fn failures(&self) -> Vec<Failure> {
        type Status = unsafe extern "C" fn(*mut Failure, c_int) -> c_int;
        // SAFETY: a function of this type.
        let status: Status = unsafe { std::mem::transmute(self.symbol(c"gda_nccl_status")) };
        // SAFETY: no place is needed.
        let count = unsafe { status(ptr::null_mut(), 0) };
        let empty = Failure { comm: 0, time: 0, rank: 0, own_rank: 0, cause: [0; CAUSE_BYTES] };
        let mut failures = vec![empty; count.try_into().unwrap()];
        // SAFETY: the table gave so many devices.
        assert!(unsafe { status(failures.as_mut_ptr(), count) } >= count);
        failures
    }

    /// Whether the descriptor says that there is a failure, after a wait for it.
    pub(crate) fn has_event(&self, timeout: Duration) -> bool {
        // SAFETY: a function of this type.
        let event: extern "C" fn() -> c_int =
            unsafe { std::mem::transmute(self.symbol(c"gda_nccl_eventfd")) };
        let mut poll = libc::pollfd { fd: event(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid structure.
        unsafe { libc::poll(&raw mut poll, 1, timeout.as_millis().try_into().unwrap()) > 0 }
    }

    /// As NCCL does with its last communicator.
    pub(crate) fn close(self) {
        // SAFETY: open.
        assert_eq!(unsafe { libc::dlclose(self.0) }, 0);
    }
}

/// A rank, with the exchange that NCCL has.
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    exchange: Option<Bootstrap>,
}

impl Rank {
    fn join(folder: &Path, rank: usize, size: usize) -> Self {
        let root = Root::File(folder.join("port"));
        let launch = Launch {
            rank,
            size,
            local_rank: rank,
            local_size: Some(size),
            root,
            token: 1,
            launcher: Launcher::Env,
        };
        Self { rank, size, exchange: Some(Bootstrap::connect(&launch, LONG).unwrap()) }
    }

    pub(crate) fn allgather(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        self.exchange.as_mut().unwrap().allgather(bytes, LONG).unwrap()
    }

    pub(crate) fn barrier(&mut self) {
        self.allgather(&[]);
    }

    /// NCCL closes its exchange first.
    pub(crate) fn close_exchange(&mut self) {
        self.exchange = None;
    }

    pub(crate) fn well(&self) {
        println!("rank is well");
    }

    /// Ends or stops this process as this signal does.
    pub(crate) fn raise(&self, signal: c_int) -> ! {
        let pid = std::process::id().try_into().unwrap();
        // SAFETY: a signal for this process.
        unsafe { libc::kill(pid, signal) };
        // A stopped process is killed later.
        loop {
            std::thread::park();
        }
    }
}

pub(crate) fn ok(result: NcclResult) {
    assert_eq!(result, SUCCESS);
}

/// Memory of a job, registered.
pub(crate) struct Region {
    pub(crate) memory: Memory,
    pub(crate) handle: Handle,
}

/// What a communicator of NCCL has of the plug-in.
pub(crate) struct Plugin {
    pub(crate) table: &'static Rma16,
    pub(crate) opened: [Handle; 2],
    pub(crate) collective: Handle,
    pub(crate) contexts: Handle,
    place: Place,
}

impl Plugin {
    /// Opens and connects it as NCCL does.
    pub(crate) fn connect(library: &Library, ranks: &mut Rank, place: Place) -> Self {
        let mut this = Self::listen(library, ranks, place);
        assert_eq!(this.try_connect(library, ranks), SUCCESS);
        this.create_context(2);
        this
    }

    fn listen(library: &Library, _: &Rank, place: Place) -> Self {
        let table: &Rma16 = library.table(c"ncclRmaPlugin_v16");
        assert_eq!(table.name, b"GDA\0");
        // SAFETY: the plug-in calls it with a text as the only argument behind the format.
        let logger: Logger = unsafe { std::mem::transmute(log as *const c_void) };
        let mut opened = [ptr::null_mut(); 2];
        for opened in &mut opened {
            // SAFETY: a place.
            ok(unsafe { (table.init)(opened, 0x1234, Some(logger)) });
        }
        let mut count = 0;
        // SAFETY: a place.
        ok(unsafe { (table.devices)(&raw mut count) });
        assert_eq!(count, 1, "the software HCA");
        Self { table, opened, collective: ptr::null_mut(), contexts: ptr::null_mut(), place }
    }

    /// Connects; returns the result.
    pub(crate) fn try_connect(&mut self, _: &Library, ranks: &mut Rank) -> NcclResult {
        let (mut handle, mut listener) = ([0_u8; HANDLE_BYTES], ptr::null_mut());
        // SAFETY: places.
        ok(unsafe { (self.table.listen)(self.opened[0], 0, handle.as_mut_ptr().cast(), &raw mut listener) });
        let handles = ranks.allgather(&handle);
        let handles: Vec<_> = handles.iter().map(|handle| handle.as_ptr().cast::<c_void>()).collect();
        let foreign = ptr::without_provenance_mut(0xdead);
        let (size, rank) = (ranks.size.try_into().unwrap(), ranks.rank.try_into().unwrap());
        let connect = self.table.connect;
        // SAFETY: the handles of all ranks, and a place.
        let result =
            unsafe { connect(foreign, handles.as_ptr(), size, rank, listener, &raw mut self.collective) };
        // SAFETY: a handle.
        ok(unsafe { (self.table.close_listen)(listener) });
        result
    }

    /// Opens it without connecting.
    pub(crate) fn open(library: &Library, ranks: &Rank) -> Self {
        Self::listen(library, ranks, Place::Host)
    }

    fn create_context(&mut self, contexts: c_int) {
        let config = Config { contexts, traffic_class: -1, rank_stride: 0 };
        // SAFETY: a configuration and a place.
        ok(unsafe {
            (self.table.create_context)(self.collective, &raw const config, &raw mut self.contexts)
        });
    }

    /// Registers memory, and returns the result, too.
    pub(crate) fn try_register(&self, memory: Memory, flags: u64) -> (NcclResult, Region) {
        let kind = if self.place == Place::Host { PTR_HOST } else { PTR_CUDA };
        let at = ptr::with_exposed_provenance_mut(memory.addr().try_into().unwrap());
        let mut handle = ptr::null_mut();
        let register = self.table.reg_mr_sym;
        // SAFETY: memory that is kept with the handle, and a place.
        let result = unsafe { register(self.collective, at, memory.len(), kind, flags, &raw mut handle) };
        (result, Region { memory, handle })
    }

    /// Registers new memory of zeros.
    pub(crate) fn register(&self, len: usize, flags: u64) -> Region {
        let memory = match self.place {
            Place::Host => Memory::alloc(len).unwrap(),
            Place::Gpu => {
                let (gpu, mut addr) = (Gpu::open(0).unwrap(), 0);
                // SAFETY: a place for the address.
                gpu.within(|api| unsafe { api.mem_alloc(&mut addr, len) }).unwrap();
                let here = ptr::with_exposed_provenance_mut(addr.try_into().unwrap());
                // SAFETY: memory of a simulated GPU, which is never freed, and is at the same address for the CPU.
                unsafe { Memory::from_raw(here, len) }.unwrap()
            }
        };
        memory.fill(0, len, 0).unwrap();
        let (result, region) = self.try_register(memory, flags);
        ok(result);
        region
    }

    pub(crate) fn signals(&self) -> Region {
        self.register(8 * SIGNALS, FORCE_SO)
    }

    /// Starts a put, with a signal if there is one: (region, word, value).
    pub(crate) fn put(
        &self,
        context: c_int,
        (from, to): ((&Region, usize), (&Region, usize)),
        size: usize,
        rank: usize,
        signal: Option<(&Region, usize, u64)>,
    ) -> Handle {
        let (from, source) = (from.1 as u64, from.0.handle);
        let (to, target) = (to.1 as u64, to.0.handle);
        let (rank, mut request) = (rank.try_into().unwrap(), ptr::null_mut());
        let place = &raw mut request;
        match signal {
            // SAFETY: a place.
            None => ok(unsafe {
                (self.table.iput)(self.contexts, context, from, source, size, to, target, rank, 0, place)
            }),
            Some((region, word, value)) => {
                let (source, target) =
                    if size == 0 { (ptr::null_mut(), ptr::null_mut()) } else { (source, target) };
                let iput = self.table.iput_signal;
                let (at, signals) = (8 * word as u64, region.handle);
                // SAFETY: a place.
                ok(unsafe {
                    iput(
                        self.contexts,
                        context,
                        from,
                        source,
                        size,
                        to,
                        target,
                        rank,
                        at,
                        signals,
                        value,
                        SIGNAL_ADD,
                        true,
                        1,
                        place,
                    )
                });
            }
        }
        assert!(!request.is_null());
        request
    }

    /// Reads from a rank.
    pub(crate) fn get(
        &self,
        (from, to): ((&Region, usize), (&Region, usize)),
        size: usize,
        rank: usize,
    ) -> Handle {
        let mut request = ptr::null_mut();
        let (rank, place) = (rank.try_into().unwrap(), &raw mut request);
        let (source, target) = (from.0.handle, to.0.handle);
        // SAFETY: a place.
        ok(unsafe {
            (self.table.iget)(
                self.contexts,
                0,
                from.1 as u64,
                source,
                size,
                to.1 as u64,
                target,
                rank,
                0,
                place,
            )
        });
        request
    }

    pub(crate) fn flush(&self, region: &Region) -> Handle {
        let mut request = ptr::null_mut();
        // SAFETY: a place.
        ok(unsafe { (self.table.iflush)(self.contexts, 0, region.handle, 0, &raw mut request) });
        request
    }

    pub(crate) fn is_complete(&self, request: Handle) -> bool {
        let mut done = -1;
        // SAFETY: a place.
        ok(unsafe { (self.table.test)(self.collective, request, &raw mut done) });
        done == 1
    }

    fn progress(&self) {
        // SAFETY: a handle.
        ok(unsafe { (self.table.rma_progress)(self.contexts) });
    }

    /// Waits as NCCL's thread does.
    pub(crate) fn finish(&self, request: Handle) {
        self.until("a request", || self.is_complete(request));
    }

    /// Waits for a signal of at least this value, as a stream does, which cannot be aborted. Returns it.
    pub(crate) fn wait(&self, signals: &Region, word: usize, value: u64) -> u64 {
        let word = signals.memory.word64(8 * word).unwrap();
        self.until("a signal", || word.load() >= value);
        word.load()
    }

    pub(crate) fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < LONG, "{what} does not come");
            self.progress();
            std::thread::yield_now();
        }
    }

    pub(crate) fn has_failed(&self) -> bool {
        let mut has_failed = false;
        // SAFETY: a place.
        ok(unsafe { (self.table.query_last_error)(self.contexts, &raw mut has_failed) });
        has_failed
    }

    /// Ends all as NCCL does: contexts before registrations.
    pub(crate) fn close(self, regions: Vec<Region>) {
        // SAFETY: handles that are ended once.
        ok(unsafe { (self.table.destroy_context)(self.contexts) });
        for region in regions {
            // SAFETY: a handle that is ended once.
            ok(unsafe { (self.table.dereg_mr_sym)(self.collective, region.handle) });
        }
        // SAFETY: a handle that is ended once.
        ok(unsafe { (self.table.close_coll)(self.collective) });
        for opened in self.opened {
            // SAFETY: a handle that is ended once.
            ok(unsafe { (self.table.finalize)(opened) });
        }
    }
}
