//! What the C interface adds to a ping-pong: the same messages through `mp` and through the functions of `gdasync.h`, in turns, between
//! two processes. By the CPU, and on host streams.

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};
use std::{iter, slice};

use gdasync_c::{
    Raw, gda_buf, gda_comm_create, gda_config, gda_exchange, gda_mem_reg, gda_open, gda_recv,
    gda_req_on_stream, gda_req_wait, gda_send, gda_stream_open, gda_stream_sync,
};
use gdsync::memory::Memory;
use gdsync::stream::{HostStreamConfig, Stream};
use mp::{Communicator, Registration};

const PATIENCE: Duration = Duration::from_secs(60);
const PATIENCE_NS: i64 = 60_000_000_000;
const BYTES: usize = 8;

/// Prints what C adds to the same messages in Rust: medians of 41 rounds by turns of `count` messages each, in nanoseconds for one, and of
/// the differences of neighbouring rounds.
fn compare(what: &str, count: usize, mut rust_and_c: [&mut dyn FnMut(usize); 2]) {
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..41 {
        let [rust, c] = rust_and_c.each_mut().map(|run| {
            run(count / 10);
            let start = Instant::now();
            run(count);
            start.elapsed().as_secs_f64() * 1e9 / count as f64
        });
        iter::zip(&mut times, [rust, c, c - rust]).for_each(|(all, time)| all.push(time));
    }
    let [rust, c, more] = times.map(|mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    });
    println!("{what}: Rust {rust:.0} ns, C {c:.0} ns, difference {more:+.0} ns");
}

/// One end, in Rust.
struct InRust {
    comm: Communicator,
    stream: Stream,
    buffer: Registration,
}

/// The same in C.
struct InC {
    comm: Raw,
    stream: Raw,
    mem: Raw,
}

fn ok(status: i32) {
    assert_eq!(status, 0, "{status}");
}

impl InRust {
    fn new() -> mp::Result<Self> {
        let comm = Communicator::builder().spawn(2).init()?;
        let buffer = comm.register(&Memory::alloc(4096)?)?;
        Ok(Self { comm, stream: Stream::host(HostStreamConfig::default())?, buffer })
    }

    fn by_cpu(&self, count: usize) -> mp::Result<()> {
        let (comm, peer) = (&self.comm, 1 - self.comm.rank());
        for _ in 0..count {
            let received = comm.irecv(&self.buffer, 64..64 + BYTES, peer)?;
            if comm.rank() == 0 {
                drop(comm.isend(&self.buffer, 0..BYTES, peer)?);
            }
            comm.wait(&received, PATIENCE)?;
            // `gda_req_wait` ends it, too.
            drop(received);
            if comm.rank() == 1 {
                drop(comm.isend(&self.buffer, 0..BYTES, peer)?);
            }
        }
        Ok(())
    }

    fn by_stream(&self, count: usize) -> mp::Result<()> {
        let (comm, peer) = (&self.comm, 1 - self.comm.rank());
        for _ in 0..count {
            let received = comm.irecv(&self.buffer, 64..64 + BYTES, peer)?;
            if comm.rank() == 0 {
                drop(comm.isend_on_stream(&self.stream, &self.buffer, 0..BYTES, peer)?);
            }
            comm.wait_on_stream(&self.stream, &received)?;
            if comm.rank() == 1 {
                drop(comm.isend_on_stream(&self.stream, &self.buffer, 0..BYTES, peer)?);
            }
            self.stream.synchronize(PATIENCE)?;
        }
        Ok(())
    }
}

/// The ranks of the communicator in Rust make that in C.
///
/// # Safety
/// As `gda_exchange::allgather` is called, with a communicator.
unsafe extern "C" fn allgather(
    this: *mut c_void,
    mine: *const c_void,
    len: usize,
    all: *mut c_void,
    _: i64,
) -> c_int {
    // SAFETY: what `InC::new` has passed.
    let comm = unsafe { &*this.cast::<Communicator>() };
    // SAFETY: the library passes so many bytes.
    let mine = unsafe { slice::from_raw_parts(mine.cast::<u8>(), len) };
    let Ok(parts) = comm.exchange(mine, PATIENCE) else { return -1 };
    // SAFETY: the library has room for the part of each rank.
    let all = unsafe { slice::from_raw_parts_mut(all.cast::<u8>(), len * parts.len()) };
    all.copy_from_slice(&parts.concat());
    0
}

impl InC {
    fn new(comm_in_rust: &Communicator, memory: &Memory) -> Self {
        let exchange = gda_exchange {
            struct_size: u32::try_from(size_of::<gda_exchange>()).expect("a small structure"),
            rank: i32::from(comm_in_rust.rank() == 1),
            size: 2,
            reserved: 0,
            this: (&raw const *comm_in_rust).cast_mut().cast(),
            allgather: Some(allgather),
            release: None,
        };
        let struct_size = u32::try_from(size_of::<gda_config>()).expect("a small structure");
        let config = gda_config { struct_size, gpu: -1, device: null(), depth: 0, max_pieces: 0 };
        let (mut ctx, mut comm, mut stream, mut mem) = (0, 0, 0, 0);
        let at = std::ptr::with_exposed_provenance_mut(usize::try_from(memory.addr()).expect("64 bits"));
        // SAFETY: a configuration, and a place for the answer.
        ok(unsafe { gda_open(&raw const config, &raw mut ctx) });
        // SAFETY: an exchange that lives as long as the communicator, and a place for the answer.
        ok(unsafe { gda_comm_create(ctx, &raw const exchange, 0, PATIENCE_NS, &raw mut comm, null_mut()) });
        // SAFETY: no stream of CUDA, and a place for the answer.
        ok(unsafe { gda_stream_open(ctx, null_mut(), 1, 0, &raw mut stream) });
        // SAFETY: memory that outlives the program's work, and a place for the answer.
        ok(unsafe { gda_mem_reg(comm, at, memory.len(), 0, &raw mut mem) });
        Self { comm, stream, mem }
    }

    fn run(&self, rank: usize, stream: Raw, count: usize) {
        let peer = i32::from(rank == 0);
        let out = gda_buf { mem: self.mem, offset: 0, len: BYTES as u64 };
        let into = gda_buf { mem: self.mem, offset: 64, len: BYTES as u64 };
        // SAFETY: one buffer each, and requests that are waited for.
        let send = || ok(unsafe { gda_send(self.comm, peer, &raw const out, 1, stream, null_mut()) });
        for _ in 0..count {
            let mut received = 0;
            // SAFETY: as for `send`.
            ok(unsafe { gda_recv(self.comm, peer, &raw const into, 1, 0, &raw mut received) });
            if rank == 0 {
                send();
            }
            if stream != 0 {
                ok(gda_req_on_stream(received, stream));
            } else {
                // SAFETY: no status.
                ok(unsafe { gda_req_wait(received, PATIENCE_NS, null_mut()) });
            }
            if rank == 1 {
                send();
            }
            if stream != 0 {
                ok(gda_stream_sync(stream, PATIENCE_NS));
                // SAFETY: no status. The stream has waited for it.
                ok(unsafe { gda_req_wait(received, PATIENCE_NS, null_mut()) });
            }
        }
    }
}

fn main() -> mp::Result<()> {
    let rust = InRust::new()?;
    let memory = Memory::alloc(4096)?;
    let c = InC::new(&rust.comm, &memory);
    let rank = rust.comm.rank();
    let fails = |error: mp::Error| panic!("{error}");
    // Two messages a round.
    let by_cpu: [&mut dyn FnMut(usize); 2] =
        [&mut |n| rust.by_cpu(n / 2).unwrap_or_else(fails), &mut |n| c.run(rank, 0, n / 2)];
    compare(&format!("rank {rank} by the CPU"), 40_000, by_cpu);
    let by_stream: [&mut dyn FnMut(usize); 2] =
        [&mut |n| rust.by_stream(n / 2).unwrap_or_else(fails), &mut |n| c.run(rank, c.stream, n / 2)];
    compare(&format!("rank {rank} on host streams"), 4_000, by_stream);
    rust.comm.finalize(PATIENCE)
}
