//! Payload in every kind of memory: on GPUs where there are any, on the simulated driver otherwise.

mod kinds;
mod processes;

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use gdrcopy::cuda::raw::layout::{Handle, MemOp};
use gdsync::Error;
use gdsync::cuda::Gpu;
use gdsync::hca::{FaultPlan, SoftHcaConfig};
use gdsync::memory::Memory;
use gdsync::verbs::{Access, Context, Mr, RecvWr, SendWr, Transport};
use gdsync_testkit::driver::Control;
use kinds::{Kind, Role, alone, data, get, is_simulated, lengths, memory, new_stream, put, region, size};

use crate::child::own_process;
use crate::common::{PATIENCE, Side, assert_clean, connect, hca, received, sent, until};
use crate::place::shared as gpu;

#[test]
fn every_kind_is_told_apart() {
    let _alone = alone();
    let Some(gpu) = gpu(0) else { return };
    for kind in Kind::ALL {
        let Some(memory) = memory(&gpu, kind, 10_000) else { continue };
        let on_gpu = !matches!(kind, Kind::Plain | Kind::Pinned | Kind::Registered);
        assert_eq!(memory.gpu().is_some(), on_gpu, "{kind:?}");
        assert_eq!(memory.len(), 10_000);
        memory.gpu_addr(&gpu).unwrap();
        put(&gpu, &memory, 5, b"wrapped");
        if memory.is_mapped() {
            assert_eq!(&memory.to_vec()[5..12], b"wrapped", "{kind:?}");
            memory.write(6, b"R").unwrap();
            memory.word32(8).unwrap();
            assert_eq!(get(&gpu, &memory, 5, 7), b"wRapped");
        } else {
            let error = memory.write(6, b"R").unwrap_err();
            assert!(matches!(error, Error::NotMapped { .. }), "{error}");
            assert!(memory.word32(8).is_err() && memory.atomic64(8).is_err() && memory.to_vec().is_empty());
            assert!(memory.slice(0, 10_001).is_err());
            assert_eq!(memory.slice(100, 50).unwrap().addr(), memory.addr() + 100);
        }
        match kind {
            Kind::Pool | Kind::Vmm if is_simulated() => {}
            Kind::Unmapped | Kind::Pool => assert!(!memory.is_mapped() || kind == Kind::Pool),
            _ => assert!(memory.is_mapped(), "{kind:?}"),
        }
    }
}

#[test]
fn what_is_no_memory_of_the_gpu_is_refused() {
    let _alone = alone();
    let Some(first) = gpu(0) else { return };
    let plain = Memory::alloc(4096).unwrap();
    // SAFETY: it is refused, so nothing uses the memory.
    let unknown = unsafe { first.wrap(plain.addr(), 4096) }.unwrap_err();
    assert!(unknown.to_string().contains("from_raw"), "{unknown}");
    for kind in [Kind::Malloc, Kind::Pinned, Kind::Registered] {
        let memory = memory(&first, kind, 4096).unwrap();
        // SAFETY: it is refused, so nothing uses the memory.
        let outside = unsafe { first.wrap(memory.addr() + 1, 64 << 20) }.unwrap_err();
        assert!(outside.to_string().contains("inside one allocation"), "{outside}");
        // SAFETY: it is refused, so nothing uses the memory.
        assert!(unsafe { first.wrap(memory.addr(), 0) }.is_err());
    }
    if let Some(second) = gpu(1) {
        let memory = memory(&first, Kind::Malloc, 4096).unwrap();
        // SAFETY: it is refused, so nothing uses the memory.
        let other = unsafe { second.wrap(memory.addr(), 4096) }.unwrap_err();
        assert!(other.to_string().contains("GPU 0 for GPU 1"), "{other}");
    }
    let mut managed = 0;
    let current = first.enter().unwrap();
    // SAFETY: a place for the answer. `CU_MEM_ATTACH_GLOBAL`.
    match unsafe { first.api().mem_alloc_managed(&mut managed, 4096, 1) } {
        Ok(()) => {
            // SAFETY: it is refused, so nothing uses the memory.
            let error = unsafe { first.wrap(managed, 4096) }.unwrap_err();
            assert!(error.to_string().contains("managed memory"), "{error}");
        }
        Err(error) => eprintln!("skipped: no managed memory: {error}"),
    }
    drop(current);
}

/// Streams of the application that wait for a word, and so occupy hardware queues. For tests in processes of their own: memory that
/// another test freed would wait for them, and hold up all copies, as in CUDA.
pub(crate) struct Blocked {
    gpu: Gpu,
    streams: Vec<Handle>,
    word: Memory,
}

impl Blocked {
    pub(crate) fn on(gpu: &Gpu, count: usize) -> Self {
        let word = Memory::alloc(4096).unwrap();
        let addr = word.gpu_addr(gpu).unwrap();
        // Frees memory that was dropped before, while no stream waits.
        gpu.reclaim(PATIENCE).unwrap();
        let streams: Vec<_> = (0..count).map(|_| new_stream(gpu)).collect();
        let _current = gpu.enter().unwrap();
        for stream in &streams {
            let mut wait = MemOp::word(MemOp::WAIT_32, addr, 1, 0);
            // SAFETY: one operation on a word that lives until the stream is released.
            unsafe { gpu.api().stream_batch_mem_op(*stream, 1, &mut wait, 0) }.unwrap();
        }
        Self { gpu: gpu.clone(), streams, word }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        self.word.word32(0).unwrap().store(1);
        let _current = self.gpu.enter().unwrap();
        for stream in &self.streams {
            // SAFETY: a live stream, which ends now.
            unsafe { self.gpu.api().stream_synchronize(*stream) }.unwrap();
        }
    }
}

struct End {
    side: Side,
    gpu: Gpu,
    mr: Mr,
    kind: Kind,
}

fn pair(from: (&Gpu, Kind), to: (&Gpu, Kind)) -> Option<(End, End)> {
    let memories = (region(from.0, from.1, Role::From)?, region(to.0, to.1, Role::To)?);
    let (a, b) = connect(Side::new(&hca(), 4096, |q| q), Side::new(&hca(), 4096, |q| q));
    let end = |side: Side, (gpu, kind): (&Gpu, Kind), memory: &Memory| {
        let mr = side.pd.register(memory, Access::all()).unwrap();
        End { side, gpu: gpu.clone(), mr, kind }
    };
    Some((end(a, from, &memories.0), end(b, to, &memories.1)))
}

/// A message, a write and a read of every length.
fn exchange(a: &End, b: &End) {
    let what = format!("{:?} of {:?} to {:?} of {:?}", a.kind, a.gpu, b.kind, b.gpu);
    for (n, len) in lengths(a.kind, b.kind).enumerate() {
        let (there, back) = (data(len, n), data(len, n + 100));
        let sge = [a.mr.sge(7, len).unwrap()];
        let remote = b.mr.remote(3).unwrap();
        for written in [false, true] {
            put(&b.gpu, b.mr.memory(), 0, &vec![0xee; len + 7]);
            put(&a.gpu, a.mr.memory(), 7, &there);
            let into = if written { vec![] } else { vec![b.mr.sge(3, len).unwrap()] };
            b.side.qp.post_recv(&[RecvWr::new(&into).id(1)]).unwrap();
            let wr = if written { SendWr::write(remote, &sge) } else { SendWr::send(&sge) };
            let path = a.side.qp.transfer_path(&a.mr, len).unwrap();
            let before = b.side.context.stats().by_reference;
            a.side.qp.post_send(&[wr.imm(3)]).unwrap();
            let (got, gone) = (received(&b.side), sent(&a.side));
            assert_eq!((got.syndrome, gone.syndrome), (None, None), "{what}, {len} bytes");
            let referred = b.side.context.stats().by_reference > before;
            let [on_gpu, to_gpu] =
                [a, b].map(|end| !matches!(end.kind, Kind::Plain | Kind::Pinned | Kind::Registered));
            // Of host memory it may be another, as what is quicker is tried.
            let is_refused = on_gpu && a.side.qp.transfer_path(&a.mr, len).unwrap() != path;
            assert!(!is_refused || !to_gpu, "{what}, {len} bytes: a copy engine is there");
            let is_left = path.transport() == Transport::PeerToPeer && !is_refused;
            assert_eq!(referred, is_left, "{what}, {len} bytes {path}");
            assert_eq!(
                !matches!(path.transport(), Transport::Cpu | Transport::Cma),
                on_gpu,
                "{what}, {len} bytes {path}"
            );
            let is_read = a.mr.memory().is_mapped() && len <= 4096 && on_gpu;
            assert_eq!(path.transport() == Transport::Mapping, is_read, "{what}, {len} bytes {path}");
            let seen = get(&b.gpu, b.mr.memory(), 0, len + 7);
            assert!(seen[3..3 + len] == there, "{what}, {len} bytes, written: {written}");
            assert!(seen[..3] == [0xee; 3] && seen[3 + len..] == [0xee; 4], "{what}, {len} bytes: round it");
        }
        put(&b.gpu, b.mr.memory(), 3, &back);
        a.side.qp.post_send(&[SendWr::read(remote, &sge)]).unwrap();
        assert_eq!(sent(&a.side).syndrome, None, "{what}, {len} bytes read");
        assert!(get(&a.gpu, a.mr.memory(), 7, len) == back, "{what}, {len} bytes read");
    }
    assert_clean(&[&a.side, &b.side]);
}

fn all_pairs(first: &Gpu, second: &Gpu) {
    for from in Kind::ALL {
        for to in Kind::ALL {
            if let Some((a, b)) = pair((first, from), (second, to)) {
                exchange(&a, &b);
            }
        }
    }
}

#[test]
fn on_one_gpu() {
    let _alone = alone();
    let Some(gpu) = gpu(0) else { return };
    all_pairs(&gpu, &gpu);
}

#[test]
fn between_two_gpus() {
    let _alone = alone();
    let (Some(first), Some(second)) = (gpu(0), gpu(1)) else {
        return eprintln!("skipped: fewer than two GPUs");
    };
    all_pairs(&first, &second);
}

#[test]
fn while_six_streams_wait() {
    let _alone = alone();
    own_process!();
    let Some(gpu) = gpu(0) else { return };
    let pairs: Vec<_> = [Kind::Malloc, Kind::Plain, Kind::Pinned]
        .into_iter()
        .filter_map(|kind| pair((&gpu, Kind::Malloc), (&gpu, kind)))
        .collect();
    let blocked = Blocked::on(&gpu, 6);
    for (a, b) in &pairs {
        for len in lengths(Kind::Malloc, b.kind).chain([size() - 7]) {
            let into = [b.mr.sge(0, len).unwrap()];
            b.side.qp.post_recv(&[RecvWr::new(&into).id(1)]).unwrap();
            a.side.qp.post_send(&[SendWr::send(&[a.mr.sge(0, len).unwrap()])]).unwrap();
            assert_eq!(received(&b.side).syndrome, None, "{len} bytes to {:?}", b.kind);
            assert_eq!(sent(&a.side).syndrome, None);
        }
    }
    drop(blocked);
    std::thread::sleep(Duration::from_millis(1));
}

#[test]
fn through_faults_of_the_network() {
    let _alone = alone();
    let Some(gpu) = gpu(0) else { return };
    for (from, to) in [
        (Kind::Malloc, Kind::Malloc),
        (Kind::Plain, Kind::Unmapped),
        (Kind::Unmapped, Kind::Plain),
        (Kind::Pool, Kind::Pool),
    ] {
        let Some((a, b)) = pair((&gpu, from), (&gpu, to)) else { continue };
        for (end, seed) in [(&a, 1), (&b, 2)] {
            let delay = (0.02, Duration::from_micros(100));
            let plan =
                FaultPlan { seed, drop: 0.01, duplicate: 0.05, reorder: 0.05, delay, ..FaultPlan::default() };
            end.side.context.inject(plan).unwrap();
        }
        exchange(&a, &b);
    }
}

/// A word is written and added to behind bytes that a copy engine still copies.
#[test]
fn signals_come_behind_the_bytes_before_them() {
    if !is_simulated() {
        println!("skipped: copies of a real GPU are not held on request");
        return;
    }
    own_process!();
    let (gpu, control) = (gpu(0).unwrap(), Control::take());
    let (a, b) = pair((&gpu, Kind::Plain), (&gpu, Kind::Unmapped)).unwrap();
    let words = b.side.pd.register(&Memory::alloc(64).unwrap(), Access::all()).unwrap();
    let (old, word) = (a.mr.sge(64, 8).unwrap(), words.memory().word64(0).unwrap());
    for round in 1..=6u64 {
        let bytes = round.to_ne_bytes();
        let signal = match round % 2 {
            0 => SendWr::fetch_add(words.remote(0).unwrap(), 1, old),
            _ => SendWr::write_inline(words.remote(0).unwrap(), &bytes),
        };
        control.hold_copies(0, true);
        a.side.qp.post_send(&[SendWr::write_inline(b.mr.remote(0).unwrap(), &bytes)]).unwrap();
        until(|| control.held_copies() == 1);
        let dropped = b.side.context.stats().packets_discarded;
        a.side.qp.post_send(&[signal]).unwrap();
        // The HCA drops the signal until the bytes are there.
        until(|| b.side.context.stats().packets_discarded > dropped);
        assert_eq!(word.load(), round - 1, "the signal came before the bytes");
        control.hold_copies(0, false);
        until(|| word.load() == round);
        assert_eq!(get(&gpu, b.mr.memory(), 0, 8), bytes);
        assert_eq!([(); 2].map(|()| sent(&a.side).syndrome), [None; 2]);
    }
    assert_clean(&[&a.side, &b.side]);
}

const HELD: usize = 100_000;

/// Also for copies that begin when the GPU is known to hang.
#[test]
fn gpu_that_hangs_is_waited_for_once() {
    if !is_simulated() {
        println!("skipped: a real GPU does not hang on request");
        return;
    }
    own_process!();
    let (gpu, control) = (gpu(0).unwrap(), Control::take());
    let copy_limit = Duration::from_secs(4);
    let config = SoftHcaConfig { by_reference: 1024, copy_limit, ..SoftHcaConfig::default() };
    let hca = || Context::soft(&config).unwrap();
    let (one, two) = (hca(), hca());
    let pairs = [0; 3].map(|_| {
        let (a, b) = connect(Side::new(&one, 64, |q| q), Side::new(&two, 64, |q| q));
        let on_gpu = |side: &Side| side.pd.register(&gpu.alloc(HELD).unwrap(), Access::all()).unwrap();
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
                b.qp.post_recv(&[RecvWr::new(&[regions.1.sge(0, HELD).unwrap()])]).unwrap();
                a.qp.post_send(&[SendWr::send(&[regions.0.sge(0, HELD).unwrap()])]).unwrap();
                // The first copy is held; those behind it are queued.
                until(|| copies() > before);
                drop((regions, a, b));
            }
            told.send(()).unwrap();
        });
        until(|| control.held_copies() == 1);
        // Once is 4.8 s, three times 14.4.
        let ended = tells.recv_timeout(copy_limit * 5 / 2);
        control.hold_copies(0, false);
        ended
    });
    ended.expect("each waits for itself");
}
