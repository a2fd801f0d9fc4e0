//! Self-tests of cards. The card must complete a request that the CPU rings for, and one that a GPU rings for. It must
//! accept GPU memory.
//!
//! The driver may refuse to map the registers for the GPU. Or it maps them and the GPU's writes get lost on the bus: an
//! IOMMU or the access control of PCIe switches may misroute them silently.
//!
//! Run for each GPU that is open when the device is opened, and for each further GPU that a queue pair is built for.

use std::time::Duration;

use crate::stream::{CudaStreamConfig, Stream, Via};
use crate::verbs::{Pd, Qp, SendWr};
use gdsync_device::Access;
use gdsync_device::cuda::Gpu;
use gdsync_device::error::{Error, Result};

/// Time limit for the card to execute a NOP and for the GPU to ring.
const LIMIT: Duration = Duration::from_secs(2);

/// The result of the CPU's doorbell.
enum SelfTest {
    /// The request completed.
    Passed,
    /// The queue pair could not be connected to itself, for example because there is no link.
    Unknown,
}

/// Executes a NOP on a queue pair connected to itself, rung by the CPU. Takes a millisecond. Also `Ok` if the queue
/// pair cannot be connected, which shows nothing about the rings.
///
/// # Errors
/// Errors of creating the queues; [`Error::Device`] when the request does not complete: rings, records, doorbells or
/// completions of this card differ from what the library expects.
pub(crate) fn self_test(pd: &Pd) -> Result<()> {
    let qp = pd.build_qp().max_send_wr(2).max_recv_wr(1).build()?;
    ring_from_cpu(&qp, pd).map(drop)
}

/// Executes two NOPs on its own queue pair: rung by the CPU, then by the GPU.
///
/// # Errors
/// Those of [`self_test`]; [`Error::Cuda`] when the GPU may not write the registers; [`Error::Device`] when its writes
/// do not arrive.
pub(crate) fn probe(pd: &Pd, gpu: &Gpu) -> Result<()> {
    let qp = pd.build_qp().max_send_wr(2).max_recv_wr(1).build()?;
    let (_, _, doorbell) = qp.send.places();
    doorbell.gpu_addr(gpu)?;
    if let SelfTest::Unknown = ring_from_cpu(&qp, pd)? {
        // The registers are mapped; more cannot be tested now.
        return Ok(());
    }
    let config =
        CudaStreamConfig { name: "doorbell probe".into(), via: Via::MemOp, ..CudaStreamConfig::default() };
    let stream = Stream::cuda(gpu, config)?;
    stream.send(&qp, &SendWr::nop())?;
    stream.synchronize(LIMIT)?;
    match qp.send_cq().wait(LIMIT) {
        Ok(done) => done.ok().map(drop).map_err(Error::from),
        Err(_) => Err(Error::Device {
            device: pd.provider().description().to_owned(),
            why: format!(
                "GPU {} rang a doorbell of the card, and no completion came: the machine loses writes between them; \
                 put both below one PCIe switch, and disable its access control (ACS) and the IOMMU; \
                 GDSYNC_PATH=proxy works without",
                gpu.ordinal()
            ),
        }),
    }
}

/// Registers a page of the GPU with the card.
///
/// # Errors
/// The card's reason for refusing the memory.
pub(crate) fn test_gpu_memory(pd: &Pd, gpu: &Gpu) -> Result<()> {
    let page = match gpu.alloc(4096) {
        Ok(page) => page,
        Err(error) => {
            tracing::debug!(%error, "cannot test whether the card reaches GPU memory");
            return Ok(());
        }
    };
    pd.register(&page, Access::LOCAL_WRITE).map(drop).or_else(|error| match error.is_exhausted() {
        true => Ok(()),
        false => Err(error),
    })
}

/// A connected queue pair executes a NOP even without a link.
fn ring_from_cpu(qp: &Qp, pd: &Pd) -> Result<SelfTest> {
    if let Err(error) = qp.connect(qp.address()) {
        tracing::debug!(%error, "cannot test the card: a queue pair cannot be connected to itself");
        return Ok(SelfTest::Unknown);
    }
    qp.post_send(&[SendWr::nop()])?;
    match qp.send_cq().wait(LIMIT) {
        Ok(done) => done.ok().map(|_| SelfTest::Passed).map_err(Error::from),
        Err(_) => Err(Error::Device {
            device: pd.provider().description().to_owned(),
            why: format!(
                "the CPU rang its doorbell for a NOP, and no completion came within {LIMIT:?}: the card does not read its rings as \
                 gdsync expects of an mlx5 card; update firmware and rdma-core, and please report the card; \
                 GDSYNC_PATH=proxy works without"
            ),
        }),
    }
}
