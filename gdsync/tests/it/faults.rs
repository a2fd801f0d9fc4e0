//! What fails while streams wait for it: on the host and on a GPU, eagerly and in graphs, by memory operations and by kernels,
//! with rings in host and in GPU memory, each fault many times. Streams drain in time, errors tell the root cause, queue pairs
//! can be used again, and nothing is left. With `--nocapture` the times of release are told.

mod gpus;
mod matrix;
mod requests;
mod stream_ends;
mod survived;
