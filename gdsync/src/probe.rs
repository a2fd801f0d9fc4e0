//! Whether a card works as gdsync expects: the CPU writes a request, its record and its doorbell, and the card has to complete it.
//! Whether a GPU can ring the doorbells of the card: it rings one, likewise. And whether the card can be given memory of the GPU.
//!
//! The driver may refuse the GPU the registers. Or it lets it have them, and its writes get lost on the bus: where an IOMMU
//! or the access control of PCIe switches sends them elsewhere, nobody says so.
//!
//! Asked of each GPU that is open when the device is opened, and of each other that a queue pair is built for.

use std::time::Duration;

use crate::stream::{CudaStreamConfig, Stream, Via};
use crate::verbs::{Pd, Qp, SendWr};
use gdsync_device::Access;
use gdsync_device::cuda::Gpu;
use gdsync_device::error::{Error, Result};

/// How long a card may take for a request that does nothing, and the GPU to ring for it.
const LIMIT: Duration = Duration::from_secs(5);

/// What the CPU's own doorbell told of a card.
enum Heard {
    /// The request completed.
    Yes,
    /// The queue pair could not be connected to itself, for example because there is no link.
    Unknown,
}

/// Has a queue pair that is connected to itself do nothing, at the request of the CPU. Takes a millisecond. `Ok` also where the queue
/// pair cannot be connected: that tells nothing about the rings.
///
/// # Errors
/// From making the queues; [`Error::Device`] when the request was rung for and never completed: rings, records, doorbells or completions
/// of this card are not where, or not what, they were taken for.
pub(crate) fn self_test(pd: &Pd) -> Result<()> {
    let qp = pd.build_qp().max_send_wr(2).max_recv_wr(1).build()?;
    ring_by_cpu(&qp, pd).map(drop)
}

/// Has a queue pair made for it do nothing: first at the request of the CPU, then of the GPU.
///
/// # Errors
/// As [`self_test`]; [`Error::Cuda`] when the GPU may not write to the registers; [`Error::Device`] when what it writes does not arrive.
pub(crate) fn probe(pd: &Pd, gpu: &Gpu) -> Result<()> {
    let qp = pd.build_qp().max_send_wr(2).max_recv_wr(1).build()?;
    let (_, _, doorbell) = qp.send.places();
    doorbell.gpu_addr(gpu)?;
    if let Heard::Unknown = ring_by_cpu(&qp, pd)? {
        // The GPU may have the registers, and more cannot be known now.
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
                "GPU {} rang a doorbell of the card and nothing came of it, so the machine loses what they write to each \
                 other: put them below one PCIe switch, and switch off its access control (ACS) and the IOMMU; \
                 GDSYNC_PATH=proxy works without",
                gpu.ordinal()
            ),
        }),
    }
}

/// Registers a page of the GPU with the card.
///
/// # Errors
/// Why the card does not take it.
pub(crate) fn reach(pd: &Pd, gpu: &Gpu) -> Result<()> {
    let page = match gpu.alloc(4096) {
        Ok(page) => page,
        Err(error) => {
            tracing::debug!(%error, "it is not known whether the card reaches memory of the GPU");
            return Ok(());
        }
    };
    pd.register(&page, Access::LOCAL_WRITE).map(drop).or_else(|error| match error.is_exhausted() {
        true => Ok(()),
        false => Err(error),
    })
}

/// The card executes a request without a link too, once the queue pair is connected.
fn ring_by_cpu(qp: &Qp, pd: &Pd) -> Result<Heard> {
    if let Err(error) = qp.connect(qp.address()) {
        tracing::debug!(%error, "it is not known whether the card works: a queue pair cannot be connected to itself");
        return Ok(Heard::Unknown);
    }
    qp.post_send(&[SendWr::nop()])?;
    match qp.send_cq().wait(LIMIT) {
        Ok(done) => done.ok().map(|_| Heard::Yes).map_err(Error::from),
        Err(_) => Err(Error::Device {
            device: pd.provider().description().to_owned(),
            why: format!(
                "the CPU rang its doorbell for a request that does nothing, and no completion came within {LIMIT:?}: its rings are \
                 not read as gdsync expects of an mlx5 card; update firmware and rdma-core, and please report the card; \
                 GDSYNC_PATH=proxy works without"
            ),
        }),
    }
}
