//! A GPU that hangs, on the simulated driver: whoever ends what its copies use does not wait for each of them.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use gdsync::hca::SoftHcaConfig;
use gdsync::verbs::{Access, Context, RecvWr, SendWr};
use gdsync_testkit::driver::Control;

use crate::common::{Side, connect, until};
use crate::kinds::{alone, gpu, is_simulated};

const LEN: usize = 100_000;

/// Also for copies that begin when the GPU is known to hang.
#[test]
fn a_gpu_that_hangs_is_waited_for_once() {
    if !is_simulated() {
        println!("skipped: a real GPU does not hang on request");
        return;
    }
    let (_alone, gpu, control) = (alone(), gpu(0).unwrap(), Control::take());
    let hca = || Context::soft(&SoftHcaConfig { by_reference: 1024, ..SoftHcaConfig::default() }).unwrap();
    let (one, two) = (hca(), hca());
    let pairs = [0; 3].map(|_| {
        let (a, b) = connect(Side::new(&one, 64, |q| q), Side::new(&two, 64, |q| q));
        let on_gpu = |side: &Side| side.pd.register(&gpu.alloc(LEN).unwrap(), Access::all()).unwrap();
        let regions = (on_gpu(&a), on_gpu(&b));
        (a, b, regions)
    });
    control.hold_copies(0, true);
    let copies = || control.calls("cuMemcpyAsync");
    let (told, tells) = channel();
    let ended = thread::scope(|scope| {
        scope.spawn(|| {
            for (a, b, regions) in pairs {
                let before = copies();
                b.qp.post_recv(&[RecvWr { wr_id: 0, sges: &[regions.1.sge(0, LEN).unwrap()] }]).unwrap();
                a.qp.post_send(&[SendWr::send(&[regions.0.sge(0, LEN).unwrap()])]).unwrap();
                // The first copy is held; those behind it are queued.
                until(|| copies() > before);
                drop((regions, a, b));
            }
            told.send(()).unwrap();
        });
        until(|| control.held_copies() == 1);
        // Once is 12 s, three times 36.
        let ended = tells.recv_timeout(Duration::from_secs(24));
        control.hold_copies(0, false);
        ended
    });
    ended.expect("each waits for itself");
}
