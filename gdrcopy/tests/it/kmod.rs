//! The module of `kmod/` in a real kernel, over the emulated GPU of its tests (`tests/vm/run kmod`). Skipped where they are
//! not loaded. One test at a time (`--test-threads=1`): faults and counters are the machine's.

mod abi;
mod both_ways;
mod dmabuf;
mod driverless;
mod fuzz;
mod maps;
mod nth;
mod owners;
mod pins;
mod rig;
mod stress;
mod volatile;
