//! `libgdrapi.so.2`: the C interface of NVIDIA's GDRCopy 2.6 on stock drivers.
//!
//! A program that was built against GDRCopy runs with this library without being built again; `include/gdrapi.h`
//! compiles source code written for theirs. GPU memory is mapped by the first backend of the crate `gdrcopy` that works: the kernel
//! module `gdrdrv` is used if it is loaded, but not required.
//!
//! Functions return 0 or an error number of `errno.h`. With `GDRCOPY_ENABLE_LOGGING` set, the reason of each failure is
//! printed on standard error; `GDRCOPY_LOG_LEVEL` 1 to 4 says how much else (debug, information, warnings, errors).
//! `GDRCOPY_USE_DMABUF_MMAP=1` asks for dma-buf, `GDRCOPY_BACKEND` for any backend by name.
//!
//! # What differs from NVIDIA's library
//!
//! Known defects of their library are not reproduced.
//!
//! - **Handles are numbers**, never pointers, and never reused. A stale, doubled or foreign `gdr_t` or `gdr_mh_t` gives `EINVAL`; in
//!   theirs it is a use after free.
//! - **Any thread may call any function.** If several threads unmap or unpin one handle, one succeeds and the others get `EINVAL`.
//!   Unmapping while another thread copies is an error of the program here too: the copy may fault. A copy with a stale handle is
//!   refused and never writes to another mapping.
//! - **A forked child** gets `EACCES` with its parent's handles, copies included, and frees nothing of the parent's. It
//!   may open for itself.
//! - **`gdr_open`** tries `gdrdrv`, dma-buf and the driver's resource manager. If it returns `NULL`, `errno` is set:
//!   `ENODEV` when no backend can serve. Plain host memory (`GDRCOPY_BACKEND=host`) must be asked for. As with theirs, it
//!   does not touch CUDA: a program may fork afterwards, and one that never pins pays for no CUDA context. Where there is
//!   no `gdrdrv`, it only looks at versions and device files; the first call that pins or allocates initialises CUDA,
//!   makes a primary context and proves that mapping works. That call may return `ENODEV`, and the next one tries again.
//!   Backend and attributes that were asked for before may then turn out to be others.
//! - **`gdr_close`** releases everything even if a part fails, and returns the first error.
//! - **`gdr_pin_buffer`** ignores its tokens, as theirs on drivers since 2.5, and says so in the log (information).
//! - **A range beyond its allocation**, which callers get that round to GPU pages themselves, can be pinned as with
//!   theirs: on the kernel module as far as the driver lets it, without as far as the driver's block of memory or the
//!   pages that CUDA exports reach.
//! - **`dlclose`** does not unload the library.
//! - **`gdr_pin_buffer_v2`** refuses unknown flags with `EINVAL`; theirs ignores them.
//! - **`gdr_map`** maps also what was pinned at an address that is not aligned: it returns the address of `info.va`, the
//!   caller adds `d_addr - info.va`, and the size counts from `d_addr`. A mapping type that the platform lacks is
//!   `EOPNOTSUPP` on every backend.
//! - **`gdr_unmap`** compares address and size with the mapping (the size up to GPU pages) and gives `EINVAL`.
//! - **`gdr_unpin_buffer` and `gdr_close`** with a mapping that is left do as theirs: touching it raises `SIGBUS`, and
//!   its addresses stay taken until the process ends, which costs address space. Such places that are neighbours are one
//!   mapping of the kernel, so that many of them stay below its limit (`vm.max_map_count`). `gdr_unmap` with such a
//!   handle is `EINVAL`. The first one opens a file that stays open; if the process cannot have it, the addresses are
//!   unmapped instead, with a warning.
//! - **The copies** check their range against the mapping, and null pointers: `EINVAL`.
//! - **`gdr_driver_get_version`** gives 2.6 on backends without a module, where theirs aborts.
//! - **`gdr_get_attribute`** gives 0 for what an old driver does not know, where theirs gives `EINVAL`.
//! - **`tm_cycles` and `cycles_per_ms`**, deprecated in GDRCopy, are always 0.
//! - **Null pointers** for results are `EINVAL`, where theirs crashes.
//! - **Symbols**: only the functions of the header are exported, and `gdr_get_info` for programs of before 2.4.
//! - **Additions** have names in `gdrx_`.

mod abi;
mod atomic {
    pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
}
mod calls;
mod guard;
mod slot;
mod table;
mod window;

pub use abi::*;
pub use calls::*;
