//! REMOVE

use std::time::Instant;

use smallvec::SmallVec;

use super::{Current, Refusal};
use crate::links::Body;
use crate::packet::{self, Header, PacketOp};
use crate::qp::receive_staging;
use crate::qp::{Env, SoftQp};
use gdsync_device::Access;
use gdsync_device::copy_engine::Ticket;
use mlx5_ring::{Cqe, CqeOpcode, DataSeg, Syndrome};

/// A received packet, or message by reference.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) header: Header,
    /// Number of its PSNs.
    pub(super) packets: u32,
    /// Counter of the receive it completes.
    pub(super) counter: Option<u16>,
    /// Bytes of the message so far.
    pub(super) bytes: usize,
}

impl Arrival {
    pub(super) fn of(header: &Header) -> Self {
        Self { header: *header, packets: 1, counter: None, bytes: 0 }
    }
}

/// Keeps threads polling if this packet begins a message of several.
fn note_begin(header: &Header, env: &mut Env<'_>) {
    if header.flags & (packet::FIRST | packet::LAST) == packet::FIRST {
        *env.copied = Some(Instant::now());
    }
}

impl SoftQp {
    pub(super) fn has_receive(&mut self) -> bool {
        if self.resp.posted == self.resp.tail {
            self.resp.posted = self.rings.recv_record(self.resp.tail);
        }
        self.resp.posted > self.resp.tail
    }

    /// Scatter list of the next receive.
    pub(super) fn next_receive(&self) -> SmallVec<[DataSeg; 4]> {
        self.rings.receive(self.resp.tail)
    }

    pub(super) fn receive(
        &mut self,
        header: &Header,
        body: &Body<'_>,
        env: &mut Env<'_>,
    ) -> Result<(), Refusal> {
        if header.flags & packet::FIRST != 0 {
            if !self.has_receive() {
                return Err(Refusal::NotReady);
            }
            let sges = self.next_receive();
            let counter = self.resp.consume();
            if let Some(local) = env.faults.next_recv() {
                return Err(Refusal::Receive { counter, local, remote: Syndrome::REM_OP_ERR });
            }
            note_begin(header, env);
            self.resp.current = Some(Current { counter: Some(counter), sges, received: 0 });
        }
        let taken = self.resp.current.take();
        // Checked: a packet that is not the first belongs to a SEND.
        let Some((mut current, counter)) = taken.and_then(|c| c.counter.map(|counter| (c, counter))) else {
            return Err(Refusal::Remote(Syndrome::REM_INV_REQ_ERR));
        };
        let capacity: usize = current.sges.iter().map(|s| s.len as usize).sum();
        let failed = |local, remote| Refusal::Receive { counter, local, remote };
        if current.received + body.len() > capacity {
            return Err(failed(Syndrome::LOC_LEN_ERR, Syndrome::REM_INV_REQ_ERR));
        }
        let receive_staging = self
            .scatter(current.sges.iter().copied(), current.received, body, 0, env)
            .map_err(|local| failed(local, Syndrome::REM_OP_ERR))?;
        current.received += body.len();
        let bytes = current.received;
        let is_last = header.flags & packet::LAST != 0;
        let complete = is_last.then_some(counter);
        if !is_last {
            self.resp.current = Some(current);
        }
        self.arrive(Arrival { counter: complete, bytes, ..Arrival::of(header) }, receive_staging, env);
        Ok(())
    }

    /// Handles a packet whose bytes are in place or being copied.
    fn arrive(&mut self, arrival: Arrival, receive_staging: Option<Ticket>, env: &mut Env<'_>) {
        if receive_staging.is_none() && !self.resp.is_copying() {
            return self.complete_arrival(&arrival, env);
        }
        let in_place = || {
            let ticket = Ticket::default();
            ticket.done();
            ticket
        };
        self.resp.complete_later(arrival, receive_staging.unwrap_or_else(in_place));
    }

    /// Completes the receive of a packet and acknowledges it.
    pub(super) fn complete_arrival(&mut self, arrival: &Arrival, env: &mut Env<'_>) {
        let header = &arrival.header;
        if let Some(counter) = arrival.counter {
            let imm = header.flags & packet::IMM != 0;
            let opcode = match (header.op, imm) {
                (PacketOp::WRITE, _) => CqeOpcode::RESP_WR_IMM,
                (_, true) => CqeOpcode::RESP_SEND_IMM,
                _ => CqeOpcode::RESP_SEND,
            };
            let cqe = Cqe {
                opcode,
                byte_cnt: u32::try_from(arrival.bytes).expect("messages are at most 1 GiB"),
                imm: header.imm,
                solicited: header.flags & packet::SOLICITED != 0,
                ..Cqe::default()
            };
            self.complete_recv(cqe, counter, env);
        }
        // Acknowledges long messages on the way, so that the requester's window moves.
        if header.flags & packet::LAST != 0 || header.psn.is_multiple_of(8) {
            self.resp.ack(header.psn.wrapping_add(arrival.packets).wrapping_sub(1));
        }
    }

    pub(super) fn allow(&self, access: Access) -> Result<(), Refusal> {
        if self.access.contains(access) { Ok(()) } else { Err(Refusal::Remote(Syndrome::REM_INV_REQ_ERR)) }
    }

    pub(super) fn written(
        &mut self,
        header: &Header,
        body: &Body<'_>,
        env: &mut Env<'_>,
    ) -> Result<(), Refusal> {
        self.allow(Access::REMOTE_WRITE)?;
        note_begin(header, env);
        let notify = header.flags & (packet::LAST | packet::IMM) == packet::LAST | packet::IMM;
        if notify && !self.has_receive() {
            return Err(Refusal::NotReady);
        }
        let addr = body.word(0).ok_or(Refusal::Remote(Syndrome::REM_INV_REQ_ERR))?;
        // Checked: the body holds the address.
        let len = body.len() - 8;
        let mut receive_staging = None;
        // A WRITE of no bytes needs no key (InfiniBand architecture 9.7.5.2.4).
        if len > 0 {
            let (memory, at) = env
                .keys
                .remote(header.rkey, self.rings.request.pdn, addr, len, Access::REMOTE_WRITE)
                .map_err(Refusal::Remote)?;
            if memory.is_mapped() {
                body.copy_to(8, memory, at, len);
                env.pending_flush.written(header.rkey, memory);
            } else {
                let piece =
                    receive_staging::Piece { from: 8, key: header.rkey, memory: memory.clone(), at, len };
                let refused = |_| Refusal::Remote(Syndrome::REM_OP_ERR);
                receive_staging =
                    Some(self.receive_staging.put(body, vec![piece], env.copy_engine).map_err(refused)?);
            }
        }
        let none = Current { counter: None, sges: SmallVec::new(), received: 0 };
        let mut current = self.resp.current.take().unwrap_or(none);
        // The CQE reports the length of the whole message.
        current.received += len;
        let bytes = current.received;
        let is_last = header.flags & packet::LAST != 0;
        let mut counter = None;
        if notify {
            let taken = self.resp.consume();
            if let Some(local) = env.faults.next_recv() {
                return Err(Refusal::Receive { counter: taken, local, remote: Syndrome::REM_OP_ERR });
            }
            counter = Some(taken);
        } else if !is_last {
            self.resp.current = Some(current);
        }
        self.arrive(Arrival { counter, bytes, ..Arrival::of(header) }, receive_staging, env);
        Ok(())
    }
}
