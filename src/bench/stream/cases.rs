//! The calls that are measured.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use gdasync::gdsync::cuda::Gpu;
use gdasync::gdsync::hca::SoftHcaConfig;
use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::mlx5::RemoteAddr;
use gdasync::gdsync::stream::{Batch, Stream};
use gdasync::gdsync::verbs::{Access, Context, Mr, OnGpu, Qp, RecvWr, SendWr, Sge};

use crate::bench::Result;

/// Calls that are timed in a row; then the stream runs dry.
pub(super) const GROUP: u64 = 16;
/// Sends in the long batch.
const MANY: u32 = 16;
/// Bytes of a message.
const LEN: usize = 8;
/// In it the HCA does what it was asked for.
const SETTLED: Duration = Duration::from_micros(50);

/// A call.
pub(super) struct Case<'a> {
    pub(super) name: &'static str,
    /// Operations of the library in a call.
    pub(super) parts: u32,
    /// What a group of calls needs.
    pub(super) before: Box<dyn FnMut() -> Result<()> + 'a>,
    pub(super) call: Box<dyn FnMut() -> Result<()> + 'a>,
}

/// A queue pair that streams drive, and its peer on the same HCA.
pub(super) struct Sides {
    ours: Side,
    peer: Side,
}

struct Side {
    qp: Qp,
    mr: Mr,
    /// Sends whose completions nobody took.
    sent: Cell<u64>,
}

impl Side {
    fn new(context: &Context, gpu: &Gpu, on_gpu: OnGpu) -> Result<Self> {
        let pd = context.alloc_pd()?;
        let mr = pd.register(&Memory::alloc(64)?, Access::all())?;
        let most = usize::try_from(u64::from(MANY) * GROUP)?;
        let qp = pd.build_qp().max_send_wr(most).max_recv_wr(64).on_gpu(gpu, on_gpu).build()?;
        Ok(Self { qp, mr, sent: Cell::new(0) })
    }

    fn sge(&self) -> Result<Sge> {
        Ok(self.mr.sge(0, LEN)?)
    }

    fn post(&self, send: SendWr<'_>) -> Result<()> {
        self.qp.post_send(&[send])?;
        Ok(())
    }

    fn note_sent(&self, count: u64) {
        self.sent.set(self.sent.get() + count);
    }

    /// Takes the completions of all that was sent.
    fn drain(&self, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        while self.sent.get() > 0 {
            match self.qp.poll_send() {
                Some(wc) => {
                    wc.ok()?;
                    self.sent.set(self.sent.get() - 1);
                }
                None if start.elapsed() > timeout => return Err("a send does not complete".into()),
                None => {}
            }
        }
        Ok(())
    }
}

impl Sides {
    pub(super) fn new(gpu: &Gpu, on_gpu: OnGpu) -> Result<Self> {
        let context = Context::soft(&SoftHcaConfig::default())?;
        let (ours, peer) = (Side::new(&context, gpu, on_gpu)?, Side::new(&context, gpu, OnGpu::empty())?);
        ours.qp.connect(peer.qp.address())?;
        peer.qp.connect(ours.qp.address())?;
        Ok(Self { ours, peer })
    }

    /// Adds a send and a wait for it.
    pub(super) fn hop(&self, batch: &mut Batch) -> gdasync::gdsync::Result<()> {
        let (from, to) = (self.ours.mr.sge(0, LEN)?, self.peer.mr.remote(0)?);
        batch.send(&self.ours.qp, &SendWr::write(to, &[from]))?;
        batch.wait_send(&self.ours.qp).map(drop)
    }

    /// Where writes go.
    fn target(&self) -> Result<RemoteAddr> {
        Ok(self.peer.mr.remote(0)?)
    }

    /// Takes all completions that no stream took.
    pub(super) fn drain(&self, timeout: Duration) -> Result<()> {
        self.ours.drain(timeout)?;
        self.peer.drain(timeout)
    }
}

/// Lets the HCA finish: it would share memory with what is measured.
fn settle() {
    let start = Instant::now();
    while start.elapsed() < SETTLED {
        std::hint::spin_loop();
    }
}

/// All calls.
pub(super) fn cases<'a>(sides: &'a Sides, stream: &'a Stream) -> Result<Vec<Case<'a>>> {
    let Sides { ours, peer } = sides;
    let (qp, to) = (&ours.qp, sides.target()?);
    let (sges, theirs) = ([ours.sge()?], [peer.sge()?]);
    let nothing = || -> Box<dyn FnMut() -> Result<()> + 'a> { Box::new(|| Ok(())) };
    let prepared = Rc::new(RefCell::new(Vec::new()));
    let posted = prepared.clone();
    Ok(vec![
        Case {
            name: "send",
            parts: 1,
            before: nothing(),
            call: Box::new(move || {
                stream.send(qp, &SendWr::write(to, &sges))?;
                ours.note_sent(1);
                Ok(())
            }),
        },
        Case {
            name: "wait for a send",
            parts: 1,
            before: Box::new(move || {
                (0..GROUP).try_for_each(|_| ours.post(SendWr::write(to, &sges)))?;
                settle();
                Ok(())
            }),
            call: Box::new(move || {
                stream.wait_send(qp)?;
                Ok(())
            }),
        },
        Case {
            name: "wait for a receive",
            parts: 1,
            before: Box::new(move || {
                for _ in 0..GROUP {
                    qp.post_recv(&[RecvWr { wr_id: 0, sges: &sges }])?;
                    peer.post(SendWr::send(&theirs))?;
                    peer.note_sent(1);
                }
                settle();
                Ok(())
            }),
            call: Box::new(move || {
                stream.wait_recv(qp)?;
                Ok(())
            }),
        },
        Case {
            name: "send, wait, by turns",
            parts: 2,
            before: nothing(),
            call: Box::new(move || {
                stream.send(qp, &SendWr::write(to, &sges))?;
                stream.wait_send(qp)?;
                Ok(())
            }),
        },
        Case {
            name: "send and wait, one batch",
            parts: 2,
            before: nothing(),
            call: Box::new(move || {
                let mut batch = Batch::new();
                batch.send(qp, &SendWr::write(to, &sges))?;
                batch.wait_send(qp)?;
                stream.submit(&mut batch)?;
                Ok(())
            }),
        },
        Case {
            name: "prepared send",
            parts: 1,
            before: Box::new(move || {
                for _ in 0..GROUP {
                    prepared.borrow_mut().push(qp.prepare_send(&[SendWr::write(to, &sges)])?);
                }
                // In the order in which they were prepared.
                prepared.borrow_mut().reverse();
                Ok(())
            }),
            call: Box::new(move || {
                let send = posted.borrow_mut().pop().ok_or("more calls than were prepared")?;
                let mut batch = Batch::new();
                batch.post(send);
                stream.submit(&mut batch)?;
                ours.note_sent(1);
                Ok(())
            }),
        },
        Case {
            name: "16 sends, one batch",
            parts: MANY,
            before: nothing(),
            call: Box::new(move || {
                let mut batch = Batch::new();
                for _ in 0..MANY {
                    batch.send(qp, &SendWr::write(to, &sges))?;
                }
                stream.submit(&mut batch)?;
                ours.note_sent(MANY.into());
                Ok(())
            }),
        },
    ])
}
