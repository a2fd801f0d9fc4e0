//! A list driven through real queues.

use std::time::Instant;

use gdsync::Error;
use gdsync::stream::{Batch, Stream};
use gdsync::verbs::{Completion, RecvWr, SendWr, Sge, Wc};

use super::common::{PATIENCE, Side};
use super::list::{Data, Drive, Parts, Request, What};
use super::sequential::{Outcome, compare};

/// The list in real queues.
pub(crate) struct Run<'a> {
    pub(crate) a: &'a Side,
    pub(crate) b: &'a Side,
    pub(crate) list: &'a [Request],
    pub(crate) words: Vec<u64>,
    pub(crate) stream: Option<Stream>,
    pub(crate) next: usize,
    pub(crate) next_recv: usize,
    pub(crate) waited: Vec<(u64, Completion)>,
    pub(crate) outcome: Outcome,
}

pub(crate) fn sges(side: &Side, parts: &[(usize, usize)]) -> Vec<Sge> {
    parts.iter().map(|&(at, len)| side.mr.sge(at, len).unwrap()).collect()
}

impl Run<'_> {
    fn receives(&self) -> Vec<Parts> {
        let of = |r: &Request| match &r.what {
            What::Send(_, to) => Some(to.clone()),
            What::Write(..) if r.imm.is_some() => Some(vec![]),
            _ => None,
        };
        self.list.iter().filter_map(of).collect()
    }

    /// Posts up to `count` requests at once. Returns whether there was room.
    fn post(&mut self, count: usize) -> bool {
        let end = (self.next + count).min(self.list.len());
        if self.next == end {
            return false;
        }
        let now = self.next..end;
        let lists: Vec<_> = self.list[now.clone()]
            .iter()
            .map(|r| match &r.what {
                What::Send(Data::Parts(p), _) | What::Write(Data::Parts(p), _) | What::Read(p, _) => {
                    sges(self.a, p)
                }
                What::CompareSwap { result, .. } | What::FetchAdd { result, .. } => {
                    sges(self.a, &[(*result, 8)])
                }
                _ => vec![],
            })
            .collect();
        let remote = |at: usize| self.b.mr.remote(at).unwrap();
        let wrs: Vec<_> = now
            .clone()
            .zip(&lists)
            .map(|(i, sges)| {
                let request = &self.list[i];
                let wr = match &request.what {
                    What::Send(Data::Inline(bytes), _) => SendWr::send_inline(bytes),
                    What::Send(..) => SendWr::send(sges),
                    What::Write(Data::Inline(bytes), at) => SendWr::write_inline(remote(*at), bytes),
                    What::Write(_, at) => SendWr::write(remote(*at), sges),
                    What::Read(_, at) => SendWr::read(remote(*at), sges),
                    what @ What::CompareSwap { word, swap, .. } => {
                        SendWr::compare_swap(remote(*word), compare(what, self.words[i]), *swap, sges[0])
                    }
                    What::FetchAdd { word, add, .. } => SendWr::fetch_add(remote(*word), *add, sges[0]),
                    What::Nop => SendWr::nop(),
                };
                let wr = if let Some(imm) = request.imm { wr.imm(imm) } else { wr };
                if request.fence { wr.fence().id(i as u64) } else { wr.id(i as u64) }
            })
            .collect();
        let posted = match &self.stream {
            None => self.a.qp.post_send(&wrs).map(drop),
            Some(stream) => {
                let mut batch = Batch::new();
                let add = batch.sends(&self.a.qp, &wrs).and_then(|_| batch.wait_all_sends(&self.a.qp));
                add.and_then(|last| {
                    stream.submit(&mut batch)?;
                    self.waited.push((end as u64 - 1, last));
                    Ok(())
                })
            }
        };
        match posted {
            Ok(()) => self.next = end,
            Err(Error::QueueFull { .. }) => return false,
            Err(other) => panic!("{other}"),
        }
        true
    }

    fn poll(&mut self) {
        let len = |wc: &Wc| wc.byte_len as usize;
        if self.stream.is_none()
            && let Some(wc) = self.a.qp.poll_send()
        {
            let wc = wc.ok().unwrap();
            self.outcome.sent.push((wc.wr_id, wc.send_opcode, len(&wc)));
        }
        if let Some(wc) = self.b.qp.poll_recv() {
            let wc = wc.ok().unwrap();
            self.outcome.received.push((wc.wr_id, wc.opcode, len(&wc), wc.imm));
        }
        self.a.qp.check().unwrap();
    }

    pub(crate) fn go(mut self, drive: &Drive, expected: &Outcome) -> Outcome {
        let receives = self.receives();
        let end = Instant::now() + PATIENCE;
        let mut polls = drive.polls.iter().cycle();
        loop {
            while let Some(parts) = receives.get(self.next_recv) {
                let wr = RecvWr { wr_id: self.next_recv as u64, sges: &sges(self.b, parts) };
                match self.b.qp.post_recv(&[wr]) {
                    Ok(_) => self.next_recv += 1,
                    Err(Error::QueueFull { .. }) => break,
                    Err(other) => panic!("{other}"),
                }
            }
            let had_room = self.post(drive.batch);
            for _ in 0..polls.next().copied().unwrap_or(1).max(usize::from(!had_room)) {
                self.poll();
            }
            let sent = if self.stream.is_some() { self.next } else { self.outcome.sent.len() };
            if (sent, self.outcome.received.len()) == (expected.sent.len(), expected.received.len()) {
                break;
            }
            assert!(Instant::now() < end, "stuck at {:?} of {:?}", self.outcome, expected);
        }
        if let Some(stream) = &self.stream {
            stream.synchronize(PATIENCE).unwrap();
            for (id, last) in &self.waited {
                match last.status() {
                    Ok(Some(wc)) => assert_eq!(wc.wr_id, *id),
                    Err(Error::Forgotten { .. }) => {}
                    other => panic!("{other:?}"),
                }
            }
            // Each completion went to a wait; the last one says that all are there.
            self.outcome.sent = expected.sent.clone();
        }
        assert_eq!((self.a.qp.poll_send(), self.b.qp.poll_recv()), (None, None), "a completion too many");
        self.outcome.memories = [self.a, self.b].map(|side| side.memory().to_vec());
        self.outcome
    }
}
