//! What does nothing when it is dropped says so.
#![deny(unused_must_use)]

use gdsync::stream::Batch;
use gdsync::verbs::{Pd, Qp, SendWr};

fn builders(pd: &Pd) {
    Batch::new();
    pd.build_qp();
}

fn prepared(qp: &Qp) -> gdsync::Result<()> {
    qp.prepare_send(&[SendWr::nop()])?;
    qp.prepare_wait_send()?;
    qp.post_send(&[SendWr::nop().id(1)]);
    Ok(())
}

fn refined(wr: SendWr<'_>) {
    wr.fence();
}

fn main() {
    let _ = (builders, prepared, refined);
}
