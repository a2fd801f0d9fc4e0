//! `mmap` of a CUDA dma-buf.
