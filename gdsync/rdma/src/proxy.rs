//! CPU proxy: a thread of this process reads the rings and posts to any RDMA device through libibverbs.
//!
//! Producers work as with a card: streams, batches and graphs write mlx5 WQEs, doorbell records and doorbells. The
//! proxy takes doorbells, checks WQEs as the software HCA does, and posts each to a queue pair of the device as the
//! same operation. Completions of the device become mlx5 CQEs in ring order, with the payload in place first.
//!
//! - **Addressing**: QPNs and keys are the device's own, so a peer may be any program that speaks RC verbs.
//! - **Threads**: as in the software HCA, steps run in the thread that rings, polls, or runs a waiting host stream, and
//!   else in the proxy's own thread. It busy-polls while a GPU waits or is about to ring; otherwise it sleeps until the
//!   device completes something or a thread wakes it.
//! - **Limits**: requests beyond the device's queue size wait in the ring. Inline data beyond the device's limit is
//!   read from the ring by the device. Unsupported operations (atomics on some virtual functions) complete with a local
//!   operation error, and the queue pair's error holds the device's.
//! - **Failures**: a status of the device becomes the syndrome of the same name, with the vendor code. Then the
//!   device's queue pair goes to ERR and returns its requests, and the rings are flushed. A device that does not return
//!   them within 2 s is reset. Asynchronous events (queue pair, port, device) break queue pairs and become their error.
//! - **GPU memory**: the device accesses payload directly; data it wrote is flushed before the CQE where the GPU needs
//!   it. GPU memory that cannot be registered is staged through pinned host memory by a copy engine. Rings and records
//!   may lie in GPU memory; the CPU reads them through the mapping.
//!
//! | file | content |
//! |---|---|
//! | `provider` | control path, shared state, events, sleeping |
//! | `core` | state, and one step |
//! | `qp` | queue pair: posting, completions, errors, transitions |
//! | `translate` | WQEs as device requests, device statuses as CQEs |
//! | `staging` | GPU memory that the device cannot register |
//! | `device` | queues of the device |

mod core;
mod device;
mod provider;
mod qp;
mod staging;
mod translate;

pub use provider::Proxy;

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::device::DeviceLimits;
    use super::provider::Proxy;
    use crate::{DeviceConfig, Open};
    use gdsync::verbs::{Context, Mr, Qp, RecvWr, SendWr};
    use gdsync_device::memory::Memory;
    use gdsync_device::{Access, QpAttr, QpState};
    use mlx5_ring::{CqeOpcode, Syndrome};

    const PATIENCE: Duration = Duration::from_secs(20);

    /// A queue pair connected to itself, with the device's use limited to `limits`; `None`, with a printed reason, without a
    /// device.
    fn itself(limits: DeviceLimits) -> Option<(Context, Qp, Mr)> {
        let Some(name) = std::env::var("GDSYNC_TEST_DEVICE").ok().filter(|name| !name.is_empty()) else {
            println!("skipped: GDSYNC_TEST_DEVICE names no RDMA device");
            return None;
        };
        let open = Open::device(&name, &DeviceConfig::default()).unwrap();
        let context = Context::over(Arc::new(Proxy::start_within(open, true, limits).unwrap()));
        let pd = context.alloc_pd().unwrap();
        let mr = pd.register(&Memory::alloc(8192).unwrap(), Access::all()).unwrap();
        let qp = pd.build_qp().max_send_wr(64).max_recv_wr(64).max_inline(200).build().unwrap();
        qp.connect(qp.address()).unwrap();
        Some((context, qp, mr))
    }

    #[test]
    fn requests_beyond_the_device_limit_wait_in_the_rings() {
        let Some((_context, qp, mr)) = itself(DeviceLimits { requests: 2, ..DeviceLimits::ALL }) else {
            return;
        };
        for lap in 0..3 {
            let sge = |n: usize| [mr.sge(8 * n, 8).unwrap()];
            for n in 0..64 {
                mr.memory().word64(8 * n).unwrap().store((lap * 64 + n) as u64);
                qp.post_recv(&[RecvWr::new(&[mr.sge(1024 + 8 * n, 8).unwrap()]).id(n as u64)]).unwrap();
            }
            for n in 0..64 {
                qp.post_send(&[SendWr::send(&sge(n)).id(n as u64)]).unwrap();
            }
            for n in 0..64 {
                assert_eq!(qp.send_cq().wait(PATIENCE).unwrap().ok().unwrap().wr_id, n);
                assert_eq!(qp.recv_cq().wait(PATIENCE).unwrap().ok().unwrap().wr_id, n);
            }
            for n in 0..64 {
                assert_eq!(mr.memory().word64(1024 + 8 * n).unwrap().load(), (lap * 64 + n) as u64);
            }
        }
        // In ERR, requests that the device never saw are flushed after the returned ones, in order.
        for n in 0..64 {
            qp.post_recv(&[RecvWr::new(&[]).id(n)]).unwrap();
        }
        qp.modify(&QpAttr::to(QpState::ERR)).unwrap();
        for n in 0..64 {
            let wc = qp.recv_cq().wait(PATIENCE).unwrap();
            assert_eq!((wc.wr_id, wc.syndrome), (n, Some(Syndrome::WR_FLUSH_ERR)));
        }
    }

    #[test]
    fn oversized_inline_data_is_read_from_the_ring() {
        let Some((_context, qp, mr)) = itself(DeviceLimits { inline: 0, ..DeviceLimits::ALL }) else {
            return;
        };
        // One to four blocks, so some wrap at the end of the ring.
        for len in (0..=200).chain(0..=200) {
            let data: Vec<u8> = (0..len).map(|i| i ^ len).collect();
            qp.post_recv(&[RecvWr::new(&[mr.sge(0, 256).unwrap()]).id(1)]).unwrap();
            qp.post_send(&[SendWr::send_inline(&data)]).unwrap();
            let wc = qp.recv_cq().wait(PATIENCE).unwrap().ok().unwrap();
            assert_eq!((wc.opcode, wc.byte_len), (CqeOpcode::RESP_SEND, u32::from(len)));
            qp.send_cq().wait(PATIENCE).unwrap().ok().unwrap();
            assert_eq!(mr.memory().to_vec()[..data.len()], data);
        }
    }

    /// A polling thread takes completions without the proxy's thread.
    #[test]
    fn polling_threads_run_the_proxy() {
        let Some((context, qp, mr)) = itself(DeviceLimits::ALL) else { return };
        let sges = [mr.sge(0, 8).unwrap()];
        let mut helped = 0;
        for _ in 0..100 {
            qp.post_send(&[SendWr::write(mr.remote(8).unwrap(), &sges)]).unwrap();
            let end = Instant::now() + PATIENCE;
            loop {
                helped += u32::from(context.progress());
                if let Some(wc) = qp.poll_send() {
                    wc.ok().unwrap();
                    break;
                }
                assert!(Instant::now() < end, "no completion");
            }
        }
        assert!(helped > 0, "only the proxy's own thread took completions");
    }
}
