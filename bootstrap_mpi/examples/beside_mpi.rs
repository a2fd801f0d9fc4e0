//! A sum by MPI and one by gdsync-mp, among the same ranks.
//!
//! `cargo build --example beside_mpi && mpirun -np 4 target/debug/examples/beside_mpi`

use std::time::Duration;

use gdsync::memory::Memory;
use gdsync_bootstrap_mpi::OverMpi;
use mp::collective::{Collectives, Reduction};
use mpi::collective::SystemOperation;
use mpi::traits::{Communicator, CommunicatorCollectives};

fn main() -> mp::Result<()> {
    let limit = Duration::from_secs(30);
    let universe = mpi::initialize().expect("nobody else has initialized MPI");
    let world = universe.world();
    let comm = mp::Communicator::builder().init_over(OverMpi::new(&world))?;
    let own = (comm.rank() as f64).sqrt();

    let mut by_mpi = 0.0;
    world.all_reduce_into(&own, &mut by_mpi, SystemOperation::sum());

    let buffer = comm.register(&Memory::alloc(8)?)?;
    buffer.memory().write(0, &own.to_ne_bytes())?;
    Collectives::new(&comm, limit)?.allreduce::<f64>(&buffer, 0..8, Reduction::Sum, limit)?;
    let mut bytes = [0; 8];
    buffer.memory().read(0, &mut bytes)?;
    let by_us = f64::from_ne_bytes(bytes);

    assert!((by_mpi - by_us).abs() < 1e-9, "MPI says {by_mpi}, gdsync-mp {by_us}");
    let parts = comm.exchange(&vec![1; world.rank() as usize], limit)?;
    assert!(parts.iter().map(Vec::len).eq(0..comm.size()), "each rank gave as many bytes as its number");
    println!("rank {} of {}: {by_us:.6} by both", comm.rank(), comm.size());
    comm.finalize(limit)
}
