//! What is told of staged memory, windows, and who decides.

use gdsync::stream::Cond;
use gdsync::verbs::Transport;
use mp::{Communicator, Error, GpuPath, Rma, Signal};

use crate::common::{LONG, buffer, bytes, gpu, host_buffer, job, job_with, message, stream};

const LEN: usize = 200_000;

#[test]
#[ignore = "`card` runs it on the card"]
fn it_is_told() {
    job("it_is_told", 2, |comm| {
        assert_eq!(comm.context().description(), "CPU proxy of mlx5_0");
        let path = comm.path_of(&buffer(comm, LEN), 0..LEN, 1).unwrap();
        assert_eq!(path.transfer_path().transport(), Transport::Staging);
        assert!(
            path.to_string().contains("dma-buf") && path.to_string().contains("nvidia_peermem"),
            "{path}"
        );
        let path = comm.path_of(&host_buffer(comm, LEN), 0..LEN, 1).unwrap();
        assert_eq!(path.transfer_path().transport(), Transport::Card);
    });
}

/// Puts from, and gets into GPU memory, by the CPU and by a stream.
#[test]
#[ignore = "`card` runs it on the card"]
fn windows_are_used_from_there() {
    job("windows_are_used_from_there", 2, |comm| {
        let (me, peer) = (comm.rank(), 1 - comm.rank());
        let part = host_buffer(comm, LEN + 8);
        let window = comm.window(&part, 0..LEN + 8, LONG).unwrap();
        let (own, back) = (buffer(comm, LEN), buffer(comm, LEN));
        let s = stream("windows");
        for round in 1..=6 {
            own.memory().write(0, &message(me, peer, round, LEN)).unwrap();
            let put = Rma::put(&own, 0..LEN, peer, 0).with_signal(Signal::add(LEN, 1));
            if round % 2 == 0 {
                comm.wait(&window.start(&put).unwrap(), LONG).unwrap();
            } else {
                drop(window.start_on_stream(&s, &put).unwrap());
            }
            window.wait_signal(LEN, round as u64, Cond::Geq, LONG).unwrap();
            assert!(bytes(&part, 0..LEN) == message(peer, me, round, LEN), "put {round}");
            if round % 2 == 0 {
                comm.wait(&window.iget(&back, 0..LEN, peer, 0).unwrap(), LONG).unwrap();
            } else {
                drop(window.start_on_stream(&s, &Rma::get(&back, 0..LEN, peer, 0)).unwrap());
                window.flush_on_stream(&s, peer).unwrap();
                s.synchronize(LONG).unwrap();
            }
            comm.barrier(LONG).unwrap();
            assert!(bytes(&back, 0..LEN) == message(me, peer, round, LEN), "get {round}");
        }
        window.destroy(LONG).unwrap();
    });
}

#[test]
#[ignore = "`card` runs it on the card"]
fn windows_are_not_over_it() {
    job("windows_are_not_over_it", 2, |comm| {
        let part = if comm.rank() == 0 { buffer(comm, LEN) } else { host_buffer(comm, LEN) };
        let error = comm.window(&part, 0..LEN, LONG).unwrap_err();
        let text = error.to_string();
        if comm.rank() == 0 {
            assert!(matches!(error, Error::Device(gdsync::Error::Unsupported { .. })), "{error:?}");
            assert!(text.contains("staged") && text.contains("dma-buf"), "{text}");
        } else {
            assert!(matches!(error, Error::Bootstrap { .. }) && text.contains("rank 0"), "{text}");
        }
        // Nobody is out of step.
        let window = comm.window(&host_buffer(comm, 8), 0..8, LONG).unwrap();
        window.destroy(LONG).unwrap();
    });
}

#[test]
#[ignore = "`card` runs it on the card"]
fn it_can_be_refused() {
    let builder = Communicator::builder().gpu_path(GpuPath::PeerToPeer);
    job_with("it_can_be_refused", 1, builder, |comm| {
        let (gpu, _) = gpu().unwrap();
        let error = comm.register(&gpu.alloc(64).unwrap()).unwrap_err();
        assert!(error.to_string().contains("nvidia-peermem"), "{error}");
    });
}
