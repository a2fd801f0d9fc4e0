//! A prepared send starts once: its doorbell may not ring again.

use gdsync::stream::{Batch, PreparedSend, PreparedWait};

fn sends(batch: &mut Batch, send: PreparedSend) {
    batch.post(send);
    batch.post(send);
}

fn waits(batch: &mut Batch, wait: PreparedWait) {
    batch.post_wait(wait);
    batch.post_wait(wait);
}

fn main() {
    let _ = (sends, waits);
}
