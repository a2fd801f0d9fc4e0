//! Operations for streams: lists that are posted in order, all or none.

use std::collections::VecDeque;
use std::sync::Arc;

use gdsync::cuda::{Flush, RawStream};
use gdsync::memory::Word32;
use gdsync::stream::{Batch, Cond, PreparedSend};
use gdsync_capi_support::guard::wait_limit;
use gdsync_capi_support::handles::Table;
use gdsync_capi_support::streams::lent;
use parking_lot::Mutex;

use crate::abi::KINDS;
use crate::failure::{Failure, Result};
use crate::request::{Peer, Request};

pub(crate) static LISTS: Table<Arc<List>> = Table::new(4, &KINDS);

/// An operation.
#[derive(Debug)]
pub(crate) enum Item {
    Send(Arc<Request>, PreparedSend),
    Wait(Arc<Request>),
    WaitWord(Word32, u32, Cond),
    Write(Word32, u32),
    /// Makes earlier completions visible to the stream's kernels.
    Flush,
}

impl Item {
    fn request(&self) -> Option<&Arc<Request>> {
        match self {
            Self::Send(request, _) | Self::Wait(request) => Some(request),
            _ => None,
        }
    }
}

/// Operations in order. Sends that are not posted are taken back on drop.
#[derive(Debug, Default)]
pub(crate) struct Items(VecDeque<Item>);

impl Items {
    pub(crate) fn add(&mut self, item: Item) {
        self.0.push_back(item);
    }

    fn take_back(&mut self, failure: &Failure) {
        for item in &self.0 {
            if let Item::Send(request, _) = item {
                request.take_back(failure);
            }
        }
        // From the back: each is taken back whole.
        while self.0.pop_back().is_some() {}
    }

    /// Posts to a stream.
    pub(crate) fn post(self, stream: RawStream) -> Result<()> {
        let mut peers: Vec<Arc<Peer>> =
            self.0.iter().filter_map(Item::request).map(|request| request.peer.clone()).collect();
        // In one order by all threads.
        peers.sort_by_key(|peer| peer.rank);
        peers.dedup_by_key(|peer| peer.rank);
        let _submit: Vec<_> =
            peers.iter().map(|peer| peer.lock_submit(wait_limit())).collect::<Result<_>>()?;
        self.post_locked(stream)
    }

    /// Posts to a stream, under the submit locks of its peers.
    pub(crate) fn post_locked(mut self, stream: RawStream) -> Result<()> {
        let lent = lent(stream)?;
        let mut batch = Batch::new();
        let (mut sends, mut peer) = (Vec::new(), None);
        while let Some(item) = self.0.pop_front() {
            peer = peer.or_else(|| item.request().map(|request| request.peer.clone()));
            let added = match item {
                Item::Send(request, send) => {
                    sends.push(request);
                    batch.post(send);
                    Ok(())
                }
                Item::Wait(request) => match request.outcome() {
                    Some(outcome) => outcome,
                    None => batch.wait(&request.completion).map_err(Failure::from),
                },
                Item::WaitWord(word, value, cond) => {
                    batch.wait_value32(&word, value, cond);
                    Ok(())
                }
                Item::Write(word, value) => {
                    batch.write_value32(&word, value);
                    Ok(())
                }
                Item::Flush => {
                    if let Flush::OnStream = lent.gpu.capabilities().flush {
                        batch.flush();
                    }
                    Ok(())
                }
            };
            if let Err(failure) = added {
                sends.iter().for_each(|request| request.take_back(&failure));
                return Err(failure);
            }
        }
        let mut submit = || lent.stream.with_timeout(wait_limit()).submit(&mut batch);
        let done = match peer {
            Some(peer) => peer.while_busy(submit),
            None => submit(),
        };
        let done = done.map_err(Failure::from);
        match &done {
            // The batch keeps the operations that were not queued.
            Err(failure) if !batch.is_empty() => sends.iter().for_each(|request| request.take_back(failure)),
            _ => sends.iter().for_each(|request| request.note_posted()),
        }
        done
    }
}

impl Drop for Items {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            self.take_back(&Failure::new("taken back: it was not posted"));
        }
    }
}

/// An `mp_desc_queue_t`.
#[derive(Debug, Default)]
pub(crate) struct List(pub(crate) Mutex<Items>);
