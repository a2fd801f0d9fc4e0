//! Waits of GPU streams for payload in GPU memory that the card writes by itself: refused where the GPU may not see it.

use gdsync::cuda::{Flush, Gpu};
use gdsync::memory::Memory;
use gdsync::rdma::Route;
use gdsync::stream::{CudaStreamConfig, Stream};
use gdsync::verbs::{Access, Mr, OnGpu, RecvWr, SendWr};
use gdsync::{Error, Result};
use gdsync_testkit::driver;

use crate::common::{PATIENCE, Side, connect};
use crate::gpu::{Bench, bench_with, open_by};

/// `CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES`
const CAN_FLUSH: u32 = 98;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`
const FLUSH_OPTIONS: u32 = 117;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`
const ORDERING: u32 = 118;

/// Two GPUs that say this of inbound writes: flush on streams, flush options, ordering.
fn bench(attributes: [[i32; 3]; 2]) -> (Bench, Gpu) {
    let bench = bench_with(|control| {
        for (device, values) in (0..).zip(attributes) {
            for (number, value) in [CAN_FLUSH, FLUSH_OPTIONS, ORDERING].into_iter().zip(values) {
                control.attribute(device, number, value);
            }
        }
    });
    (bench, Gpu::open_with(driver::api(), 1, driver::gdr().ok()).unwrap())
}

/// A connected pair on the card, and a stream of this GPU.
struct Rig {
    a: Side,
    b: Side,
    stream: Stream,
}

impl Rig {
    fn new(gpu: &Gpu, route: Route) -> Self {
        let context = open_by(Some(route), Some(gpu)).unwrap();
        let side = || Side::new(&context, 4096, |q| q.on_gpu(gpu, OnGpu::empty()));
        let (a, b) = connect(side(), side());
        Self { a, b, stream: Stream::cuda(gpu, CudaStreamConfig::default()).unwrap() }
    }

    /// Registers memory of a GPU where `b` receives.
    fn register(&self, memory: &Memory, access: Access) -> Mr {
        self.b.pd.register(memory, access).unwrap()
    }

    /// A message from `a` that the stream waits for in `b`'s host memory: what matters is where it might have gone.
    fn receive(&self) -> Result<()> {
        self.b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[self.b.mr.sge(0, 8)?] }])?;
        self.a.qp.post_send(&[SendWr::send(&[self.a.mr.sge(0, 8)?])])?;
        let waited = self.stream.wait_recv(&self.b.qp).map(drop);
        if waited.is_err() {
            // The completion is left for the CPU.
            self.b.qp.recv_cq().wait(PATIENCE)?.ok()?;
        }
        self.a.qp.send_cq().wait(PATIENCE)?.ok()?;
        self.stream.synchronize(PATIENCE)?;
        waited
    }
}

fn refused(done: Result<()>, words: &[&str]) {
    let error = done.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    for word in words {
        assert!(text.contains(word), "'{text}' lacks '{word}'");
    }
}

#[test]
fn a_gpu_whose_streams_cannot_flush_waits_for_no_payload_in_its_memory() {
    for (options, flush) in [(1, Flush::OnCpu), (0, Flush::Impossible)] {
        let (bench, _) = bench([[0, options, 0]; 2]);
        let gpu = &bench.gpu;
        assert_eq!(gpu.capabilities().flush, flush);
        let rig = Rig::new(gpu, Route::Direct);
        rig.receive().unwrap();
        let memory = gpu.alloc(4096).unwrap();
        // The card writes nothing there.
        let sent_from = rig.register(&memory, Access::empty());
        rig.receive().unwrap();
        let target = rig.register(&memory, Access::LOCAL_WRITE);
        refused(rig.receive(), &["flush", "98", "GDSYNC_PATH=proxy", "Memory::flush", "host memory"]);
        let mut batch = gdsync::stream::Batch::new();
        rig.b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
        batch.wait_recv(&rig.b.qp).unwrap();
        batch.barrier();
        refused(rig.stream.submit(&mut batch), &["flush"]);
        drop(batch);
        // Sends bring nothing, until one reads.
        rig.stream.send(&rig.b.qp, &SendWr::nop()).unwrap();
        rig.stream.wait_send(&rig.b.qp).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let from = rig.a.mr.remote(0).unwrap();
        rig.stream.send(&rig.b.qp, &SendWr::read(from, &[target.sge(0, 8).unwrap()])).unwrap();
        refused(rig.stream.wait_send(&rig.b.qp).map(drop), &["flush"]);
        rig.b.qp.send_cq().wait(PATIENCE).unwrap().ok().unwrap();
        drop((sent_from, target));
        rig.stream.send(&rig.b.qp, &SendWr::nop()).unwrap();
        rig.stream.wait_send(&rig.b.qp).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
    }
}

/// The proxy sees the completion first, and flushes.
#[test]
fn the_proxy_flushes_for_a_gpu_whose_streams_cannot() {
    let (bench, _) = bench([[0, 1, 0]; 2]);
    let rig = Rig::new(&bench.gpu, Route::Proxy);
    let _target = rig.register(&bench.gpu.alloc(4096).unwrap(), Access::LOCAL_WRITE);
    rig.receive().unwrap();
}

#[test]
fn payload_in_memory_of_another_gpu_must_be_ordered_for_all() {
    const OWNER: [i32; 3] = [0, 1, 100];
    const ALL: [i32; 3] = [0, 1, 200];
    const BY_STREAM: [i32; 3] = [1, 3, 0];
    for (of_other, is_seen) in [(OWNER, false), (ALL, true), (BY_STREAM, false)] {
        let (bench, other) = bench([OWNER, of_other]);
        let rig = Rig::new(&bench.gpu, Route::Direct);
        let _own = rig.register(&bench.gpu.alloc(4096).unwrap(), Access::all());
        rig.receive().unwrap();
        let foreign = rig.register(&other.alloc(4096).unwrap(), Access::all());
        match is_seen {
            true => rig.receive().unwrap(),
            false => refused(rig.receive(), &["another GPU", "118", "protection domain of its own"]),
        }
        drop(foreign);
        rig.receive().unwrap();
    }
}
