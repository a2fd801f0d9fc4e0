//! Paths: which device the messages between ranks of one host go through.

use crate::common::{
    LONG, buffer, bytes, host_buffer, is_part_of, job_test, job_with, message, myself, prints, stream,
};
use gdsync::Device;
use gdsync::cuda::Gpu;
use gdsync::hca::SoftHcaConfig;
use gdsync::memory::Memory;
use gdsync::stream::Cond;
use gdsync::verbs::{Context, Transport};
use gdsync_testkit::driver;
use mp::{Communicator, CommunicatorBuilder, Error, GpuPath, IntraHostPath, Registration, Rma, Signal};

fn hca() -> Context {
    Context::soft(&SoftHcaConfig::default()).unwrap()
}

/// Every rank sends to every rank, itself included; also from streams, and from a part of a registration.
fn all_pairs(comm: &Communicator) {
    let (me, all) = (comm.rank(), comm.size());
    let stream = stream("paths");
    for len in [8, 5000, 100_000] {
        let (outbox, inbox) = (buffer(comm, all * len), buffer(comm, all * len));
        let parts: Vec<Registration> = (0..all).map(|peer| outbox.slice(peer * len, len).unwrap()).collect();
        for (peer, part) in parts.iter().enumerate() {
            part.memory().write(0, &message(me, peer, len, len)).unwrap();
        }
        let range = |peer: usize| peer * len..(peer + 1) * len;
        let received: Vec<_> = (0..all).map(|peer| comm.irecv(&inbox, range(peer), peer).unwrap()).collect();
        let sent = parts.iter().enumerate().map(|(peer, part)| match peer % 2 {
            0 => comm.isend(part, 0..len, peer).unwrap(),
            _ => comm.isend_on_stream(&stream, part, 0..len, peer).unwrap(),
        });
        let sent: Vec<_> = sent.collect();
        comm.wait_all(received.iter().chain(&sent), LONG).unwrap();
        stream.synchronize(LONG).unwrap();
        for peer in 0..all {
            assert!(bytes(&inbox, range(peer)) == message(peer, me, len, len), "{len} bytes of rank {peer}");
        }
    }
}

/// Every rank puts to, reads from and adds to every rank, itself included, and signals it.
fn all_windows(comm: &Communicator) {
    let (me, all, len) = (comm.rank(), comm.size(), 3000_usize);
    let step = len.next_multiple_of(8);
    // Space for the puts of each rank, and a word for their signals.
    let (part, own) = (buffer(comm, all * step + 8), buffer(comm, all * step));
    let window = comm.window(&part, 0..all * step + 8, LONG).unwrap();
    for peer in 0..all {
        own.memory().write(peer * step, &message(me, peer, 1, len)).unwrap();
        let put = Rma::put(&own, peer * step..peer * step + len, peer, me * step);
        let put = put.with_signal(Signal::add(all * step, 1));
        comm.wait(&window.start(&put).unwrap(), LONG).unwrap();
    }
    window.wait_signal(all * step, all as u64, Cond::Geq, LONG).unwrap();
    for peer in 0..all {
        assert!(bytes(&part, peer * step..peer * step + len) == message(peer, me, 1, len), "of rank {peer}");
    }
    comm.barrier(LONG).unwrap();
    let s = stream("windows");
    for peer in 0..all {
        drop(
            window
                .start_on_stream(&s, &Rma::get(&own, peer * step..peer * step + len, peer, me * step))
                .unwrap(),
        );
        window.flush_on_stream(&s, peer).unwrap();
    }
    s.synchronize(LONG).unwrap();
    for peer in 0..all {
        assert!(bytes(&own, peer * step..peer * step + len) == message(me, peer, 1, len), "at rank {peer}");
    }
    window.destroy(LONG).unwrap();
}

/// Ranks of a host reach each other through a software HCA of their own.
fn two_devices() -> CommunicatorBuilder {
    Communicator::builder().context(&hca()).intra_host(IntraHostPath::Through(hca()))
}

/// A device over TCP, also between ranks of this host.
fn tcp() -> CommunicatorBuilder {
    let context = Device::find(Some("tcp:lo")).unwrap().open().unwrap();
    Communicator::builder().context(&context)
}

job_test!(ranks_reach_each_other_over_tcp, 3, tcp().intra_host(IntraHostPath::Device), |comm| {
    for rank in 0..3 {
        let path = comm.path(rank).unwrap();
        assert_eq!((path.wire(), path.is_intra_host()), ("TCP", false), "{path}");
    }
    all_pairs(comm);
    all_windows(comm);
});

#[test]
fn ranks_reach_each_other_over_libfabric() {
    let context = match Device::find(Some("fabric:tcp@lo")).unwrap().open() {
        Ok(context) => context,
        Err(gdsync::Error::Library(error)) => return println!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    };
    let builder = Communicator::builder().context(&context).intra_host(IntraHostPath::Device);
    job_with("ranks_reach_each_other_over_libfabric", 2, builder, |comm| {
        for rank in 0..2 {
            let path = comm.path(rank).unwrap();
            assert!(path.wire().starts_with("libfabric (") && !path.is_intra_host(), "{path}");
        }
        all_pairs(comm);
        all_windows(comm);
    });
}

job_test!(ranks_of_a_host_use_shared_memory_beside_tcp, 2, tcp(), |comm| {
    for rank in 0..2 {
        let path = comm.path(rank).unwrap();
        assert_eq!((path.wire(), path.is_intra_host()), ("shared memory", true), "{path}");
    }
    all_pairs(comm);
});

job_test!(ranks_of_a_host_use_the_intra_host_device, 3, two_devices(), |comm| {
    for rank in 0..3 {
        let path = comm.path(rank).unwrap();
        assert!(path.is_intra_host(), "{path}");
        assert_eq!(path.to_string(), "software HCA over shared memory: the rank is on this host");
    }
    assert!(comm.path(3).is_err());
    let (far, near) = (comm.context(), comm.device(0).unwrap());
    all_pairs(comm);
    let before = near.stats().wqes;
    all_windows(comm);
    assert!(before > 0 && near.stats().wqes > before && far.stats().wqes == 0, "{:?}", far.stats());
});

job_test!(the_software_hca_needs_no_second_one, 2, Communicator::builder().context(&hca()), |comm| {
    for rank in 0..2 {
        let path = comm.path(rank).unwrap();
        assert!(!path.is_intra_host() && path.reason() == "no RDMA device is used", "{path}");
        assert_eq!((path.device(), path.wire()), (comm.context().description(), comm.context().wire()));
    }
});

/// Rank 2 asks for the device of the communicator, and so the others reach it there.
#[test]
fn both_ranks_must_want_the_intra_host_device() {
    let is_last = std::env::var("RANK").is_ok_and(|rank| rank == "2");
    let (far, near) = (hca(), hca());
    let local = if is_last { IntraHostPath::Device } else { IntraHostPath::Through(near.clone()) };
    let builder = Communicator::builder().context(&far).intra_host(local);
    job_with("both_ranks_must_want_the_intra_host_device", 3, builder, |comm| {
        let me = comm.rank();
        for rank in 0..3 {
            let path = comm.path(rank).unwrap();
            assert_eq!(path.is_intra_host(), me < 2 && rank < 2, "from {me} to {rank}: {path}");
            assert!(path.is_intra_host() || path.reason().contains("asked for it"), "{path}");
        }
        all_pairs(comm);
        let used = |context: &Context| context.stats().wqes;
        assert_eq!((used(&near) > 0, used(&far) > 0), (me < 2, true));
        comm.barrier(LONG).unwrap();
        let before = used(&far);
        // One device must do all atomics on a word.
        let word = host_buffer(comm, 8);
        let window = comm.window(&word, 0..8, LONG).unwrap();
        for rank in 0..3 {
            let message = comm.path_of(&word, 0..8, rank).unwrap();
            let put = window.path_of(&word, 0..8, rank).unwrap();
            assert_eq!(message.path().is_intra_host(), me < 2 && rank < 2, "{message}");
            assert!(!put.path().is_intra_host(), "{put}");
            let is_told = put.path().reason().contains("of the window");
            assert_eq!(is_told, message.path().is_intra_host(), "{put}");
        }
        comm.wait(&window.start(&Rma::accumulate(1, 1, 0)).unwrap(), LONG).unwrap();
        assert!(used(&far) > before, "also between ranks that send through the other");
        comm.barrier(LONG).unwrap();
        assert_eq!(window.word64(0).unwrap().load(), if me == 1 { 3 } else { 0 });
        all_windows(comm);
    });
}

job_test!(buffers_have_paths, 2, Communicator::builder().context(&hca()), |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let buffer = host_buffer(comm, 100_000);
    for (range, has_fifo) in [(0..8, true), (0..4096, true), (8..100_000, false), (7..7, true)] {
        let path = comm.path_of(&buffer, range, peer).unwrap();
        // Long messages may have one copy or two.
        let carrier = path.transfer_path().transport();
        assert!(carrier == Transport::Cpu || carrier == Transport::Cma && !has_fifo, "{path}");
        assert_eq!(path.path().has_fifo(), has_fifo, "{path}");
        assert!(path.to_string().contains("shared memory") && path.to_string().contains("host memory"));
    }
    assert!(!comm.path_of(&buffer, 0..8, me).unwrap().path().has_fifo(), "none to itself");
    let part = buffer.slice(100, 50).unwrap();
    assert!(comm.path_of(&part, 0..50, peer).is_ok() && comm.path_of(&part, 0..51, peer).is_err());
    assert!(matches!(comm.path_of(&buffer, 0..8, 2), Err(Error::NoSuchRank { rank: 2, size: 2 })));
    let window = comm.window(&buffer, 0..64, LONG).unwrap();
    let path = window.path_of(&buffer, 0..8, peer).unwrap();
    assert_eq!((path.path().has_fifo(), path.transfer_path().transport()), (false, Transport::Cpu), "{path}");
    assert!(window.path_of(&buffer, 0..8, 2).is_err());
    comm.barrier(LONG).unwrap();
});

/// The GPU of this machine, or a simulated one.
fn any_gpu() -> Gpu {
    match Gpu::count() {
        Ok(count) if count > 0 => Gpu::open(0).unwrap(),
        _ => Gpu::open_with(driver::api(), 0, Some(driver::gdr().unwrap())).unwrap(),
    }
}

/// Sends GPU memory of rank 0 to rank 1. Returns the path of each length before, and of the longest afterwards.
fn from_gpu(comm: &Communicator, gpu: &Gpu) -> ([Transport; 3], Transport) {
    const LEN: usize = 300_000;
    let source = comm.register(&gpu.alloc(LEN).unwrap()).unwrap();
    let inbox = host_buffer(comm, LEN);
    let peer = 1 - comm.rank();
    let carrier = |len| comm.path_of(&source, 0..len, peer).unwrap().transfer_path().transport();
    let before = [100, 10_000, LEN].map(carrier);
    if comm.rank() == 0 {
        source.memory().write(0, &message(0, 1, 7, LEN)).unwrap();
        comm.wait(&comm.isend(&source, 0..LEN, 1).unwrap(), LONG).unwrap();
    } else {
        comm.wait(&comm.irecv(&inbox, 0..LEN, 0).unwrap(), LONG).unwrap();
        assert!(bytes(&inbox, 0..LEN) == message(0, 1, 7, LEN));
    }
    comm.barrier(LONG).unwrap();
    (before, carrier(LEN))
}

job_test!(gpu_buffers_have_paths, 2, Communicator::builder().context(&hca()), |comm| {
    let (before, after) = from_gpu(comm, &any_gpu());
    assert_eq!(before, [Transport::Mapping, Transport::Staging, Transport::PeerToPeer]);
    assert_eq!(after, Transport::PeerToPeer);
});

job_test!(
    the_builder_sets_the_gpu_path,
    2,
    Communicator::builder().context(&hca()).gpu_path(GpuPath::Staged),
    |comm| {
        let (before, after) = from_gpu(comm, &any_gpu());
        assert_eq!(before, [Transport::Mapping, Transport::Staging, Transport::Staging]);
        assert_eq!(after, Transport::Staging);
    }
);

job_test!(single_ranks_have_one_device, 1, two_devices(), |comm| {
    assert_eq!(comm.path(0).unwrap().reason(), "no other rank is on this host");
    all_pairs(comm);
});

#[test]
fn the_environment_overrides_the_path() {
    const NAME: &str = "the_environment_overrides_the_path";
    if !is_part_of(NAME) {
        let words = "MP_LOCAL, or the builder";
        for (value, words) in
            [("device", words), ("", "is on this host"), ("nvlink", "soft, queues or device")]
        {
            prints(myself(NAME).env("MP_LOCAL", value), words);
        }
        return;
    }
    match two_devices().spawn(2).timeout(LONG).init() {
        Ok(comm) => {
            println!("{}", comm.path(1 - comm.rank()).unwrap());
            comm.register(&Memory::alloc(64).unwrap()).unwrap();
            comm.finalize(LONG).unwrap();
        }
        Err(error) => println!("{error}"),
    }
}
