//! Rings that go round, and everything that ends a queue pair: with queues in host memory, and in GPU memory by DevX.

use std::time::Duration;

use gdsync::Error;
use gdsync::mlx5::Syndrome;
use gdsync::stream::{Batch, CudaStreamConfig, Stream};
use gdsync::verbs::{Access, OnGpu, QpAttr, QpBuilder, QpState, RecvWr, SendWr};

use super::setup::{Bench, open};
use crate::child::own_process;
use crate::common::{
    PATIENCE, Side, bytes, connect, hca, message, pattern, received, reconnect, sent, stream, stream_with,
    until,
};

/// Where the queues of a test are, and its GPU if they are there.
struct Rig {
    on_gpu: Option<(Bench, OnGpu)>,
}

impl Rig {
    /// Queues in host memory, then those in GPU memory.
    fn all() -> impl Iterator<Item = Self> {
        [false, true].into_iter().map(|on_gpu| if on_gpu { Self::on_gpu(OnGpu::all()) } else { Self::host() })
    }

    fn host() -> Self {
        Self { on_gpu: None }
    }

    fn on_gpu(what: OnGpu) -> Self {
        Self { on_gpu: Some((Bench::take(), what)) }
    }

    /// A side on the card, opened anew.
    fn side(&self, bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder) -> Side {
        match &self.on_gpu {
            None => Side::new(&hca(), bytes, build),
            Some((bench, what)) => {
                Side::new(&open(&bench.gpu), bytes, |q| build(q.on_gpu(&bench.gpu, *what)))
            }
        }
    }

    fn pair(&self, bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder) -> (Side, Side) {
        connect(self.side(bytes, &build), self.side(bytes, &build))
    }
}

fn small(q: QpBuilder) -> QpBuilder {
    q.max_send_wr(4).max_recv_wr(4)
}

/// Streams ring the doorbells, and wait by the owner bit, over more than two laps: a completion queue that begins with owner 0
/// would let them through before the first message.
#[test]
#[ignore = "`card` runs it on the card"]
fn streams_send_and_wait_over_laps() {
    for rig in Rig::all() {
        let (a, b) = rig.pair(4096, small);
        let gpu = rig.on_gpu.as_ref().map(|(bench, _)| &bench.gpu);
        let on_gpu = gpu.map(|gpu| Stream::cuda(gpu, CudaStreamConfig::default()).unwrap());
        // Each has half of the rounds: a queue has one owner at a time.
        for s in [Some(stream("of the CPU")), on_gpu].into_iter().flatten() {
            for round in 0..20usize {
                let data = pattern(1000, round);
                a.memory().write(0, &data).unwrap();
                b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(2000, 1000).unwrap()]).id(1)]).unwrap();
                let mut batch = Batch::new();
                batch.send(&a.qp, &SendWr::send(&[a.mr.sge(0, 1000).unwrap()])).unwrap();
                batch.wait_send(&a.qp).unwrap();
                batch.wait_recv(&b.qp).unwrap();
                s.submit(&mut batch).unwrap();
                s.synchronize(PATIENCE).unwrap();
                assert!(bytes(&b, 2000, 1000) == data, "round {round}");
            }
        }
    }
}

#[test]
#[ignore = "`card` runs it on the card"]
fn wrong_key_is_the_root_cause_and_the_rest_is_flushed() {
    for rig in Rig::all() {
        let (a, b) = rig.pair(64, |q| q);
        let mut wrong = b.mr.remote(0).unwrap();
        wrong.rkey ^= 1;
        b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(0, 8).unwrap()]).id(5)]).unwrap();
        a.qp.post_send(&[SendWr::write_inline(wrong, &[1; 4]).id(7), SendWr::nop().id(8)]).unwrap();
        let error = sent(&a).ok().unwrap_err();
        assert_eq!((error.wr_id, error.syndrome), (7, Syndrome::REM_ACCESS_ERR));
        let error = sent(&a).ok().unwrap_err();
        assert!(error.is_flush() && error.wr_id == 8, "{error}");
        assert_eq!(a.qp.state(), QpState::ERR);
        assert!(a.qp.check().unwrap_err().to_string().contains("wr_id 7 "));
        assert!(matches!(a.qp.post_send(&[SendWr::nop()]), Err(Error::Completion(_))));
        // The other side has no completion of its own: what is posted there is flushed.
        let error = received(&b).ok().unwrap_err();
        assert!(error.is_flush() && error.wr_id == 5, "{error}");
        reconnect(&a.qp, &b.qp);
        message(&a, &b, 1);
    }
}

/// The side whose memory was asked for wrongly posted nothing, so an asynchronous event tells it.
#[test]
#[ignore = "`card` runs it on the card"]
fn target_learns_that_a_peer_was_refused() {
    for what in [None, Some(OnGpu::empty()), Some(OnGpu::all()), Some(OnGpu::SEND_QUEUE)] {
        let rig = what.map_or_else(Rig::host, Rig::on_gpu);
        let (a, b) = rig.pair(64, |q| q);
        let mut wrong = b.mr.remote(0).unwrap();
        wrong.rkey ^= 1;
        a.qp.post_send(&[SendWr::write_inline(wrong, &[1; 4])]).unwrap();
        sent(&a).ok().unwrap_err();
        until(|| b.qp.state() == QpState::ERR);
        let error = b.qp.check().unwrap_err();
        assert!(matches!(error, Error::Device { .. }), "{error:?}");
        let (text, qpn) = (error.to_string(), format!("{:#x}", b.qp.qpn()));
        assert!(text.contains("IBV_EVENT_QP_ACCESS_ERR") && text.contains(&qpn), "{what:?}: {text}");
        // Other queue pairs are not concerned, and a reset forgets it.
        let (c, d) = rig.pair(64, |q| q);
        message(&c, &d, 1);
        reconnect(&a.qp, &b.qp);
        message(&a, &b, 2);
    }
}

#[test]
#[ignore = "`card` runs it on the card"]
fn receives_are_flushed_by_err() {
    for rig in Rig::all() {
        let (a, b) = rig.pair(64, |q| q.max_recv_wr(8));
        for wr_id in 0..5 {
            b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(0, 8).unwrap()]).id(wr_id)]).unwrap();
        }
        b.qp.abort().unwrap();
        for wr_id in 0..5 {
            let error = received(&b).ok().unwrap_err();
            assert!(error.is_flush() && error.wr_id == wr_id, "{error}");
        }
        // The other side notices when it sends.
        a.qp.post_send(&[SendWr::nop(), SendWr::send_inline(&[1; 8])]).unwrap();
        sent(&a).ok().unwrap();
        assert!(sent(&a).ok().is_err());
    }
}

#[test]
#[ignore = "`card` runs it on the card"]
fn peer_without_receives_ends_the_retries() {
    for rig in Rig::all() {
        let (a, _b) = rig.pair(64, |q| q.min_rnr_timer(1).rnr_retry(1).timeout(8).retry_cnt(1));
        a.qp.post_send(&[SendWr::send_inline(&[1; 8])]).unwrap();
        assert_eq!(sent(&a).ok().unwrap_err().syndrome, Syndrome::RNR_RETRY_EXC_ERR);
    }
}

#[test]
#[ignore = "`card` runs it on the card"]
fn queue_pair_is_reset_and_used_again() {
    own_process!();
    for rig in Rig::all() {
        let (a, b) = rig.pair(64, small);
        for round in 0..10 {
            for i in 0..round % 6 {
                message(&a, &b, i);
            }
            if round % 2 == 0 {
                // With some outstanding.
                b.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
                b.qp.abort().unwrap();
            }
            reconnect(&a.qp, &b.qp);
        }
        message(&a, &b, 99);
    }
}

/// A stream gives up waiting, the library completes in place of the card, and the queue pair is reset: what comes then must be
/// where both expect it.
#[test]
#[ignore = "`card` runs it on the card"]
fn completions_stay_in_step_after_a_stream_gave_up() {
    for rig in Rig::all() {
        let (a, b) = rig.pair(64, small);
        for round in 0..6 {
            let s = stream_with("impatient", Duration::from_millis(20));
            b.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
            let mut batch = Batch::new();
            batch.wait_recv(&b.qp).unwrap();
            s.submit(&mut batch).unwrap();
            assert!(matches!(s.synchronize(PATIENCE), Err(Error::StreamWait { .. })), "round {round}");
            drop(s);
            reconnect(&a.qp, &b.qp);
            message(&a, &b, round);
        }
    }
}

/// Transitions that repeat a state, with their optional attributes; those out of turn never reach the card.
#[test]
#[ignore = "`card` runs it on the card"]
fn rights_and_timers_change_between_transitions() {
    for rig in Rig::all() {
        let a = rig.side(64, |q| q);
        let rts = QpAttr::to(QpState::RTS).timeout(1).retry_cnt(1).rnr_retry(1).max_rd_atomic(1);
        assert!(matches!(a.qp.modify(&rts), Err(Error::Transition { .. })));
        a.qp.init().unwrap();
        a.qp.modify(&QpAttr::to(QpState::INIT).access(Access::REMOTE_READ)).unwrap();
        a.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
        let (a, b) = connect(a, rig.side(64, |q| q));
        a.qp.modify(&QpAttr::to(QpState::RTS).min_rnr_timer(3).access(Access::all())).unwrap();
        message(&a, &b, 1);
        // No more writes to b.
        b.qp.modify(&QpAttr::to(QpState::RTS).min_rnr_timer(3).access(Access::REMOTE_READ)).unwrap();
        a.qp.post_send(&[SendWr::read(b.mr.remote(0).unwrap(), &[a.mr.sge(0, 8).unwrap()])]).unwrap();
        sent(&a).ok().unwrap();
        a.qp.post_send(&[SendWr::write_inline(b.mr.remote(0).unwrap(), &[1; 8])]).unwrap();
        assert_eq!(sent(&a).ok().unwrap_err().syndrome, Syndrome::REM_INV_REQ_ERR);
        assert!(matches!(a.qp.modify(&rts), Err(Error::Transition { .. })));
    }
}
