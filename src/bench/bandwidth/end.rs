//! One rank's end of a row of the table: where its payload is, and how it gets to the wire.

use std::time::Instant;

use gdasync::gdsync::cuda::Gpu;
use gdasync::gdsync::memory::Memory;
use gdasync::lane::own_gpu;
use gdasync::measure::Samples;
use gdasync::mp::{self, Communicator, Registration, Request};

use super::Result;
use super::cuda::{Part, to_gpu, to_host};
use crate::bench::sheet::{Checks, expected};
use crate::bench::slots::Slots;

/// Where payload is, and what lies between it and the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// In the host memory that is sent.
    Host,
    /// On a GPU; CUDA copies it to and from the host memory that is sent, pinned or not.
    Copied { pinned: bool },
    /// On a GPU; CUDA copies it to and from memory that it has pinned, the CPU between that and what is sent.
    CopiedTwice,
    /// On a GPU, and sent from there.
    Direct,
}

/// The buffers of a rank: a slot that is sent, and two to receive into by turns.
pub(super) struct End<'a> {
    comm: &'a Communicator,
    checks: &'a Checks,
    wire: Registration,
    /// On the GPU, when it is not sent from there.
    payload: Option<(Gpu, Memory)>,
    /// Pinned by CUDA, between payload and wire.
    staging: Option<Memory>,
    peer: usize,
    slots: Slots,
    game: u64,
}

impl<'a> End<'a> {
    /// For messages of at most `max` bytes.
    pub(super) fn new(kind: Kind, comm: &'a Communicator, checks: &'a Checks, max: usize) -> Result<Self> {
        let slots = Slots::new(max);
        let (mut payload, mut staging) = (None, None);
        let wire = match kind {
            Kind::Host => Memory::alloc(slots.len())?,
            Kind::Direct => own_gpu(&[])?.alloc(slots.len())?,
            Kind::Copied { .. } | Kind::CopiedTwice => {
                let gpu = own_gpu(&[])?;
                let (wire, pin) = (Memory::alloc(slots.len())?, kind != Kind::Copied { pinned: false });
                let pinned =
                    if kind == Kind::CopiedTwice { Memory::alloc(slots.len())? } else { wire.clone() };
                if pin {
                    // Registers it with CUDA.
                    pinned.gpu_addr(&gpu)?;
                }
                staging = (kind == Kind::CopiedTwice).then_some(pinned);
                payload = Some((gpu.clone(), gpu.alloc(slots.len())?));
                wire
            }
        };
        let wire = comm.register(&wire)?;
        Ok(Self { comm, checks, wire, payload, staging, peer: 1 - comm.rank(), slots, game: 0 })
    }

    /// Brings a slot of the payload to the wire.
    fn send_side(&self, bytes: usize) -> Result<()> {
        let Some((gpu, payload)) = &self.payload else { return Ok(()) };
        let wire = self.wire.memory();
        to_host(gpu, Part(self.staging.as_ref().unwrap_or(wire), 0), Part(payload, 0), bytes)?;
        match &self.staging {
            Some(staging) => Ok(wire.copy_from(0, staging, 0, bytes)?),
            None => Ok(()),
        }
    }

    /// Brings what arrived in a slot to the payload.
    fn receive_side(&self, n: u64, bytes: usize) -> Result<()> {
        let Some((gpu, payload)) = &self.payload else { return Ok(()) };
        let (wire, at) = (self.wire.memory(), self.slots.received(n).start);
        if let Some(staging) = &self.staging {
            staging.copy_from(at, wire, at, bytes)?;
        }
        to_gpu(gpu, Part(payload, at), Part(self.staging.as_ref().unwrap_or(wire), at), bytes)
    }

    fn receive(&self, n: u64, bytes: usize) -> mp::Result<Request> {
        self.comm.irecv(&self.wire, self.slots.of(bytes).received(n), self.peer)
    }

    fn send(&self, bytes: usize) -> mp::Result<Request> {
        self.comm.isend(&self.wire, self.slots.of(bytes).sent(), self.peer)
    }

    /// Plays ping-pong: the round trips as rank 0 sees them, from payload to payload, and how many slots had wrong data.
    pub(super) fn play(&mut self, bytes: usize, count: u64) -> Result<(Samples, u64)> {
        self.game += 1;
        let (timeout, rank) = (self.checks.timeout(), self.comm.rank());
        let (slots, theirs) = (self.slots.of(bytes), expected(self.peer, self.game));
        let payload = self.payload.as_ref().map_or(self.wire.memory(), |(_, payload)| payload);
        // The right bytes are nowhere but in the payload that is sent.
        for memory in [Some(self.wire.memory()), Some(payload), self.staging.as_ref()].into_iter().flatten() {
            expected(rank, self.game).spoil(memory, slots.sent().start, bytes)?;
            slots.spoil(memory, theirs, 2)?;
        }
        slots.fill(payload, self.checks.sent(rank, self.game))?;
        payload.flush()?;
        let mut samples = Samples::default();
        let mut receive = self.receive(0, bytes)?;
        self.comm.barrier(timeout)?;
        for n in 0..count {
            let start = Instant::now();
            let sent = if rank == 0 {
                self.send_side(bytes)?;
                let sent = self.send(bytes)?;
                self.comm.wait(&receive, timeout)?;
                self.receive_side(n, bytes)?;
                samples.add(start.elapsed());
                sent
            } else {
                self.comm.wait(&receive, timeout)?;
                self.receive_side(n, bytes)?;
                self.send_side(bytes)?;
                // Before the answer is there, the next message cannot come.
                if n + 1 < count {
                    receive = self.receive(n + 1, bytes)?;
                }
                self.send(bytes)?
            };
            self.comm.wait(&sent, timeout)?;
            if rank == 0 && n + 1 < count {
                receive = self.receive(n + 1, bytes)?;
            }
        }
        Ok((samples, slots.wrong(payload, theirs, count)?))
    }
}
