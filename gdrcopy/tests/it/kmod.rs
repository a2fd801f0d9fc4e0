//! The module of `kmod/` in a real kernel, on the emulated GPU of its tests (`tests/vm/run kmod`). Skipped if they are not loaded.
//! Run one test at a time (`--test-threads=1`): faults and counters are the machine's.

mod dmabuf;
mod maps;
mod pins;
mod rig;
mod stress;
