//! The plug-in, loaded and called as NCCL does, by ranks that are processes: without NCCL and without a GPU.

mod faults;
mod header;
mod misuse;
mod nccl;
mod traffic;
