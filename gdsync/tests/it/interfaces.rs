//! What interfaces in other languages need: completions taken in order, waits by request, ends that wait for streams, and streams
//! that the application destroys.

use std::time::Duration;

use gdsync::Error;
use gdsync::stream::{Batch, Cond, CudaStreamConfig, Stream};
use gdsync::verbs::SendWr;
use gdsync_testkit::driver::Control;

use crate::child::is_own_process;
use crate::common::{PATIENCE, Side, gate, gates, loopback, receive, stream, until};

/// Time for what must not happen.
const MOMENT: Duration = Duration::from_millis(20);

#[test]
fn a_completion_is_taken_once_no_wait_holds_it() {
    let (a, _b) = loopback(64, |q| q);
    let first = a.qp.prepare_send(&[SendWr::nop().id(7)]).unwrap();
    let completion = first.completion();
    assert_eq!(completion.take().unwrap(), None, "it is not posted");
    let wait = a.qp.prepare_wait(&completion).unwrap();
    assert!(matches!(a.qp.prepare_wait(&completion), Err(Error::NothingToWaitFor { .. })));
    let stream = stream("taker");
    let gate = gate();
    let mut batch = Batch::new();
    batch.post(first);
    batch.wait_value32(&gate, 1, Cond::Geq);
    batch.post_wait(wait);
    stream.submit(&mut batch).unwrap();
    completion.wait(PATIENCE).unwrap();
    assert_eq!(completion.take().unwrap(), None, "the stream has not passed its wait");
    assert_eq!(a.qp.poll_send(), None);
    gate.store(1);
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(completion.take().unwrap().unwrap().wr_id, 7);

    // One that the CPU takes, successful or not.
    let sent = a.qp.post_send(&[SendWr::nop().id(8)]).unwrap();
    sent.wait(PATIENCE).unwrap();
    assert_eq!(sent.take().unwrap().unwrap().wr_id, 8);
    assert_eq!(a.qp.poll_send(), None, "it is taken");
    assert!(matches!(a.qp.prepare_wait(&sent), Err(Error::NothingToWaitFor { .. })));
    let mut wrong = a.mr.sge(0, 8).unwrap();
    wrong.lkey ^= 1 << 8;
    let failed = a.qp.post_send(&[SendWr::send(&[wrong]).id(9)]).unwrap();
    failed.wait(PATIENCE).unwrap_err();
    let taken = failed.take().unwrap().unwrap();
    assert!(taken.wr_id == 9 && taken.syndrome.is_some(), "{taken:?}");
}

#[test]
fn the_end_of_a_queue_pair_and_of_its_domain_waits_for_streams() {
    let (a, b) = loopback(64, |q| q);
    receive(&b, 1, 32, 8);
    let stream = stream("holder");
    let gate = gate();
    stream.wait_value32(&gate, 1, Cond::Geq).unwrap();
    stream.send(&a.qp, &SendWr::nop()).unwrap();
    let qp = a.qp.clone();
    stream.forget(&qp);
    let Side { context, pd, qp: first, mr } = a;
    drop((first, mr));
    let late = qp.destroy(MOMENT).unwrap_err();
    assert!(matches!(late, Error::Deadline { .. }), "{late}");
    let again = context.alloc_pd().unwrap();
    let qp = pd.build_qp().build().unwrap();
    assert!(matches!(pd.clone().close(MOMENT), Err(Error::Deadline { .. })), "the queue pair is in it");
    drop((again, b, context));
    gate.store(1);
    qp.destroy(PATIENCE).unwrap();
    pd.close(PATIENCE).unwrap();
}

#[test]
fn a_stream_of_the_application_may_be_destroyed() {
    if !is_own_process() {
        return;
    }
    let control = Control::take();
    let gpu = crate::simulated::gpu(0).unwrap();
    for is_busy in [false, true] {
        let mut raw = 0;
        let current = gpu.enter().unwrap();
        // SAFETY: a place for the answer; a context is current.
        unsafe { gpu.api().stream_create(&mut raw, 1, 0) }.unwrap();
        drop(current);
        let config = CudaStreamConfig { may_be_destroyed: true, ..CudaStreamConfig::default() };
        // SAFETY: a stream of this context, which the configuration allows to destroy.
        let stream = unsafe { Stream::cuda_from_raw(&gpu, raw, config) }.unwrap();
        let [gate, last] = gates();
        let mut batch = Batch::new();
        batch.wait_value32(&gate, 1, Cond::Geq);
        batch.write_value32(&last, 2);
        stream.submit(&mut batch).unwrap();
        if !is_busy {
            gate.store(1);
            // SAFETY: the stream lives.
            unsafe { gpu.api().stream_synchronize(raw) }.unwrap();
        }
        // SAFETY: the stream lives.
        unsafe { gpu.api().stream_destroy(raw) }.unwrap();
        gate.store(1);
        until(|| last.load() == 2);
        until(|| stream.query().pending == 0);
        drop(stream);
    }
    assert_eq!(control.stray(), 0, "calls with a stream that was destroyed");
}

#[test]
fn errors_have_numbers() {
    let (a, _b) = loopback(64, |q| q.max_send_wr(1));
    let number = |error: Error| error.errno();
    assert_eq!(number(a.qp.post_send(&[]).unwrap_err()), libc::EINVAL);
    let unconnected = a.pd.build_qp().build().unwrap();
    assert_eq!(number(unconnected.post_send(&[SendWr::nop()]).unwrap_err()), libc::EINVAL);
    let full = (0..10_000).find_map(|_| a.qp.prepare_send(&[SendWr::nop()]).map(std::mem::forget).err());
    assert_eq!(number(full.unwrap()), libc::ENOMEM);
    let refused = Error::os("x", std::io::Error::from_raw_os_error(libc::EPERM), "y");
    assert_eq!(number(refused), libc::EPERM);
    let unknown = Error::os("x", std::io::Error::from_raw_os_error(0), "y");
    assert_eq!(number(unknown), libc::EIO, "a failure is never 0");
    assert_eq!(number(Error::late("a", MOMENT, "b")), libc::ETIMEDOUT);
}
