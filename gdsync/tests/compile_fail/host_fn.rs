//! A host function runs on the stream's thread, later: it must be able to go there, and own what it uses.

use std::rc::Rc;

use gdsync::stream::{Batch, Stream};

fn of_this_thread(batch: &mut Batch) {
    let count = Rc::new(0);
    batch.host_fn(move || drop(count));
}

fn of_this_frame(stream: &Stream) {
    let mut count = 0;
    let _ = stream.host_fn(|| count += 1);
}

fn main() {
    let _ = (of_this_thread, of_this_frame);
}
