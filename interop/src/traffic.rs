//! Messages between a queue pair of gdsync, triggered and awaited by a stream, and one of the `ibverbs` crate.

use gdsync::Error;
use gdsync::memory::Memory;
use gdsync::mlx5::Syndrome;
use gdsync::stream::{Batch, HostStreamConfig, Stream};
use gdsync::Device;
use gdsync::verbs::{Access, Mr, Qp, QpAddress, RecvWr, RemoteAddr, SendWr};
use ibverbs::QueuePairEndpoint;

use crate::foreign::{self, CQ_ENTRIES, Foreign};
use crate::tables::gid_bytes;
use crate::{PATIENCE, Result, check};

/// Messages of one size that are on their way together.
const BURST: usize = 8;
/// From one packet to many, whatever the path MTU.
const SIZES: [usize; 5] = [1, 63, 1024, 4096, 70_000];
const BUFFER: usize = BURST * 70_000;

/// gdsync's side.
struct Ours {
    qp: Qp,
    stream: Stream,
    region: Mr,
}

/// Runs all of it on this device, over a connection of its own.
pub(crate) fn run(device: &Device) -> Result {
    let context = device.open()?;
    println!("gdsync: {}", context.description());
    let pd = context.alloc_pd()?;
    let ours = Ours {
        qp: pd.build_qp().build()?,
        stream: Stream::host(HostStreamConfig::default())?,
        region: pd.register(&Memory::alloc(BUFFER)?, Access::all())?,
    };
    let address = ours.qp.address();

    let context = foreign::open(device.name())?;
    let pd = context.alloc_pd()?;
    let cq = context.create_cq(CQ_ENTRIES, 0)?;
    let prepared = foreign::prepare(&context, &pd, &cq, address.gid.0, address.psn)?;
    let theirs = prepared.endpoint();
    let gid = theirs.gid.ok_or("the ibverbs crate uses no GID")?;
    // It takes the same entry of the GID table, and always starts with packet 0.
    let remote = QpAddress::new(gdsync::hca::Gid(gid_bytes(&gid)), theirs.num, 0).with_lid(theirs.lid);
    let buffer = pd.allocate::<u8>(BUFFER)?;
    let endpoint = QueuePairEndpoint { num: address.qpn, lid: address.lid, gid: Some(gid) };
    let mut theirs = Foreign { qp: prepared.handshake(endpoint)?, buffer, cq: &cq };
    ours.qp.connect(remote)?;

    for size in SIZES {
        ours.receives(&mut theirs, size)?;
        ours.sends(&mut theirs, size)?;
        ours.writes_and_reads(&mut theirs, size)?;
        println!("{size} bytes: sends both ways, writes, reads");
    }
    ours.immediate(&mut theirs)?;
    ours.adds(&mut theirs)?;
    println!("immediate data, fetch and add");
    ours.breaks(&mut theirs)?;
    println!("a wrong key is told on both sides");
    Ok(())
}

/// What byte `at` of a message is.
fn byte(seed: usize, at: usize) -> u8 {
    (seed.wrapping_mul(31) ^ at.wrapping_mul(7) ^ (at >> 8)).to_le_bytes()[0]
}

fn pattern(seed: usize, length: usize) -> Vec<u8> {
    (0..length).map(|at| byte(seed, at)).collect()
}

fn id(number: usize) -> u64 {
    number as u64
}

impl Ours {
    /// Their sends, awaited by our stream.
    fn receives(&self, theirs: &mut Foreign<'_>, size: usize) -> Result {
        let mut batch = Batch::new();
        for at in 0..BURST {
            let sge = [self.region.sge(at * size, size)?];
            batch.wait(&self.qp.post_recv(&[RecvWr::new(&sge).id(id(at))])?)?;
        }
        self.stream.submit(&mut batch)?;
        for at in 0..BURST {
            theirs.buffer[at * size..(at + 1) * size].copy_from_slice(&pattern(size + at, size));
            theirs.send(at * size, size, id(at))?;
        }
        for at in 0..BURST {
            theirs.completed(id(at))?;
        }
        self.stream.synchronize(PATIENCE)?;
        self.holds(size, size)
    }

    /// Whether the messages of `receives`, or what was read back, are in our region.
    fn holds(&self, seed: usize, size: usize) -> Result {
        let bytes = self.region.memory().to_vec();
        for at in 0..BURST {
            check(bytes[at * size..(at + 1) * size] == pattern(seed + at, size), || {
                format!("message {at} of {size} bytes arrived wrong at gdsync")
            })?;
        }
        Ok(())
    }

    /// Our sends, triggered by our stream.
    fn sends(&self, theirs: &mut Foreign<'_>, size: usize) -> Result {
        for at in 0..BURST {
            theirs.receive(at * size, size, id(at))?;
        }
        let mut batch = Batch::new();
        for at in 0..BURST {
            self.region.memory().write(at * size, &pattern(size + 100 + at, size))?;
            batch.send(&self.qp, &SendWr::send(&[self.region.sge(at * size, size)?]))?;
        }
        batch.wait_all_sends(&self.qp)?;
        self.stream.submit(&mut batch)?;
        for at in 0..BURST {
            let wc = theirs.completed(id(at))?;
            check(wc.len() == size, || format!("{} bytes of {size} arrived at ibverbs", wc.len()))?;
        }
        self.stream.synchronize(PATIENCE)?;
        for at in 0..BURST {
            check(theirs.buffer[at * size..(at + 1) * size] == pattern(size + 100 + at, size), || {
                format!("message {at} of {size} bytes arrived wrong at ibverbs")
            })?;
        }
        Ok(())
    }

    /// Our writes to their buffer, and the same bytes read back.
    fn writes_and_reads(&self, theirs: &mut Foreign<'_>, size: usize) -> Result {
        let remote = |at: usize| RemoteAddr { addr: theirs.addr(at * size), rkey: theirs.buffer.rkey().key };
        let mut batch = Batch::new();
        for at in 0..BURST {
            self.region.memory().write(at * size, &pattern(size + 200 + at, size))?;
            batch.send(&self.qp, &SendWr::write(remote(at), &[self.region.sge(at * size, size)?]))?;
        }
        batch.wait_all_sends(&self.qp)?;
        self.stream.submit(&mut batch)?;
        self.stream.synchronize(PATIENCE)?;
        self.region.memory().fill(0, BUFFER, 0)?;
        for at in 0..BURST {
            batch.send(&self.qp, &SendWr::read(remote(at), &[self.region.sge(at * size, size)?]))?;
        }
        batch.wait_all_sends(&self.qp)?;
        self.stream.submit(&mut batch)?;
        self.stream.synchronize(PATIENCE)?;
        self.holds(size + 200, size)
    }

    fn immediate(&self, theirs: &mut Foreign<'_>) -> Result {
        theirs.receive(0, 1, 1)?;
        let remote = RemoteAddr { addr: theirs.addr(0), rkey: theirs.buffer.rkey().key };
        let sge = [self.region.sge(0, 16)?];
        self.qp.post_send(&[SendWr::write(remote, &sge).imm(0x1234_5678)])?.wait(PATIENCE)?;
        let imm = theirs.completed(1)?.imm_data().map(u32::from_be);
        check(imm == Some(0x1234_5678), || format!("immediate data arrived as {imm:x?}"))
    }

    fn adds(&self, theirs: &mut Foreign<'_>) -> Result {
        // An aligned word of their buffer.
        let at = 8 - usize::try_from(theirs.addr(0) % 8)?;
        theirs.buffer[at..at + 8].copy_from_slice(&40u64.to_le_bytes());
        let remote = RemoteAddr { addr: theirs.addr(at), rkey: theirs.buffer.rkey().key };
        self.qp.post_send(&[SendWr::fetch_add(remote, 2, self.region.sge(0, 8)?)])?.wait(PATIENCE)?;
        let (old, new) = (self.region.memory().word64(0)?.load(), &theirs.buffer[at..at + 8]);
        check(old == 40 && new == 42u64.to_le_bytes(), || format!("40 + 2: returned {old}, left {new:?}"))
    }

    /// The last thing: nothing passes afterwards.
    fn breaks(&self, theirs: &mut Foreign<'_>) -> Result {
        theirs.receive(0, 1, 7)?;
        let remote = RemoteAddr { addr: theirs.addr(0), rkey: !theirs.buffer.rkey().key };
        let mut batch = Batch::new();
        batch.send(&self.qp, &SendWr::write(remote, &[self.region.sge(0, 16)?]))?;
        let done = batch.wait_all_sends(&self.qp)?;
        self.stream.submit(&mut batch)?;
        // The stream ends, with or without the reason.
        let ended = self.stream.synchronize(PATIENCE);
        check(!matches!(ended, Err(Error::Deadline { .. })), || "the stream hung on a failed send".into())?;
        match done.status() {
            Err(Error::Completion(error)) if error.syndrome == Syndrome::REM_ACCESS_ERR => {}
            other => return Err(format!("a write with a wrong key: {other:?}").into()),
        }
        let wc = theirs.completion()?;
        check(wc.wr_id() == 7 && wc.error().is_some(), || {
            format!("ibverbs was told of {}: {:?}", wc.wr_id(), wc.error())
        })
    }
}
