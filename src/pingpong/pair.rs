//! A connection of its own between both ranks: messages that a graph can repeat.

use gdsync::stream::Batch;
use gdsync::verbs::{Access, Mr, Qp, QpAddress, RecvWr, SendWr};
use mp::Communicator;

use super::board::Board;
use super::options::Options;
use crate::lane::{Placed, Result};

/// Messages of `mp` wait for a credit, which no two of them do for the same one: here the program has posted all receives
/// before a send can need them.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) qp: Qp,
    outgoing: Mr,
    incoming: Mr,
    board: Board,
    /// Receives posted so far.
    posted: u64,
}

impl Pair {
    /// Connects both ranks through the device that their other messages take. So many messages fit in each direction.
    pub(super) fn new(
        options: &Options,
        comm: &Communicator,
        placed: &Placed,
        board: &Board,
        messages: usize,
    ) -> Result<Self> {
        let (peer, timeout) = (1 - comm.rank(), options.timeout());
        let pd = comm.device(peer)?.alloc_pd()?;
        let [outgoing, incoming] =
            [&board.outgoing, &board.incoming].map(|buffer| pd.register(buffer.memory(), Access::all()));
        let builder = pd.build_qp().max_send_wr(messages).max_recv_wr(messages);
        let builder = match &placed.gpu {
            Some(gpu) => builder.on_gpu(gpu, placed.on_gpu()),
            None => builder,
        };
        let qp = builder.build()?;
        let addresses = comm.exchange(&qp.address().to_bytes(), timeout)?;
        let theirs = addresses.get(peer).and_then(|address| address.as_slice().try_into().ok());
        qp.connect(QpAddress::from_bytes(theirs.ok_or("the peer told no address")?)?)?;
        Ok(Self { qp, outgoing: outgoing?, incoming: incoming?, board: board.clone(), posted: 0 })
    }

    /// Posts receives for messages up to this one, in one call.
    pub(super) fn receive_before(&mut self, end: u64) -> Result<()> {
        let places = [0, 1].map(|n| self.board.receive_slot(n));
        let places = places.map(|place| self.incoming.sge(place.start, place.len()));
        let [even, odd] = places.map(|place| place.map(|sge| [sge]));
        let (even, odd) = (even?, odd?);
        let sges = |n: u64| if n.is_multiple_of(2) { &even } else { &odd };
        let receives: Vec<_> =
            (self.posted..end).map(|n| RecvWr { wr_id: n, sges: sges(n).as_slice() }).collect();
        if !receives.is_empty() {
            self.qp.post_recv(&receives)?;
            self.posted = end;
        }
        Ok(())
    }

    /// Adds the send of what is to leave.
    pub(super) fn send(&self, batch: &mut Batch) -> gdsync::Result<()> {
        let place = self.board.send_slot();
        batch.send(&self.qp, &SendWr::send(&[self.outgoing.sge(place.start, place.len())?]))?;
        Ok(())
    }
}
