//! The kernel module `gdrdrv`.
