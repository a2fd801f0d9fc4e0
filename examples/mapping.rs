//! The CPU writes into GPU memory through a mapping, and the GPU's copy engine reads it back.
//!
//! Runs anywhere: without a GPU the "GPU memory" is plain memory, and the program says so.

use gdasync::out;
use gdrcopy::planner::Direction;
use gdrcopy::{Gdr, Planner};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // No options; `--help` says what it shows.
    clap::Command::new("mapping")
        .about("GPU memory in the address space of the CPU: data, flush, flag")
        .get_matches();

    let gdr = Gdr::open()?;
    out!("GPU memory is mapped by {gdr}")?;

    let buffer = gdr.alloc(0, 1 << 20)?;
    let mapping = buffer.map()?;
    out!("{mapping:?}")?;

    // Data, flush, flag: in this order also for a kernel that polls the flag.
    let data = b"written by the CPU";
    mapping.write(64, data)?;
    mapping.flush()?;
    mapping.store(0, 1_u32)?;

    let mut seen = [0; 18];
    buffer.copy_out(64, &mut seen)?;
    assert_eq!(&seen, data);
    assert_eq!(mapping.load::<u32>(0)?, 1);
    out!("the GPU has: {}", String::from_utf8_lossy(&seen))?;

    // The old bytes stay for as long as the mapping does.
    drop(buffer);
    mapping.read(64, &mut seen)?;
    assert_eq!(&seen, data);

    let planner = Planner::calibrate(&gdr, 0)?;
    out!("a write of 64 bytes goes by {}", planner.way(Direction::ToGpu, 64))?;
    out!("a read of 1 MiB goes by {}", planner.way(Direction::FromGpu, 1 << 20))?;
    Ok(())
}
