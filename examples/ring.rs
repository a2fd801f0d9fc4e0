//! Ranks in a ring: compute, send to the right, receive from the left, on a stream and in one buffer.
//!
//! `cargo run --example ring`, or with a launcher: `mpirun -n 4 target/debug/examples/ring`

use std::time::Duration;

use gdasync::out;
use gdsync::memory::Memory;
use gdsync::stream::{HostStreamConfig, Stream};
use mp::Communicator;

const PATIENCE: Duration = Duration::from_secs(10);
const ROUNDS: u64 = 100;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // No options; `--help` says what it shows.
    clap::Command::new("ring")
        .about("Ranks in a ring: compute, send to the right, receive from the left, on a stream and in one buffer")
        .get_matches();

    let comm = Communicator::builder().spawn(2).init()?;
    let (rank, size) = (comm.rank(), comm.size());
    let (left, right) = ((rank + size - 1) % size, (rank + 1) % size);
    let buffer = comm.register(&Memory::alloc(16)?)?;
    let (ours, theirs) = (buffer.memory().word64(0)?, buffer.memory().word64(8)?);
    let stream = Stream::host(HostStreamConfig::default())?;

    ours.store(rank as u64);
    for _ in 0..ROUNDS {
        // The receive is posted when the stream gets there: the message cannot overwrite the one before.
        comm.sendrecv_on_stream(&stream, (&buffer, 0..8), right, (&buffer, 8..16), left)?;
        let (ours, theirs) = (ours.clone(), theirs.clone());
        stream.host_fn(move || ours.store(theirs.load() + 1))?; // in place of a kernel
    }
    // The CPU could work here.
    stream.synchronize(PATIENCE)?;

    let started = (rank + size - usize::try_from(ROUNDS)? % size) % size;
    let (sum, expected) = (ours.load(), started as u64 + ROUNDS);
    if rank == 0 {
        out!("{sum} after {ROUNDS} rounds, from rank {started}")?;
    }
    comm.finalize(PATIENCE)?;
    if sum == expected { Ok(()) } else { Err(format!("wrong: {expected} was expected").into()) }
}
