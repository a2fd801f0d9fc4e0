//! Contexts, the puts and gets of NCCL, and their requests.

use std::ffi::c_int;
use std::sync::Arc;

use gdsync_capi_support::handles::{Handle, Table};
use mp::{AnyRequest, Result, Rma, Signal, Window};

use crate::abi::SIGNAL_INC;
use crate::collective::{Collective, why};
use crate::region::Region;

/// The kinds of handles.
pub(crate) const KINDS: [&str; 7] =
    ["", "context of init", "listenComm", "collComm", "rmaCtx", "registration (mhandle)", "request"];

pub(crate) static REGIONS: Table<Arc<Region>> = Table::new(5, &KINDS);

fn region(handle: Handle) -> gdsync::Result<Arc<Region>> {
    let found = REGIONS.get(handle).map(|region| region.clone());
    found.map_err(|_| {
        gdsync::Error::invalid("a registration (mhandle)", format!("{handle:#x}"), "one of regMrSym")
    })
}

/// Queue pairs to all ranks, for each context of NCCL.
#[derive(Debug)]
pub(crate) struct Contexts {
    pub(crate) collective: Arc<Collective>,
    connections: Vec<Window>,
}

/// An operation under way, for `test`.
#[derive(Debug)]
pub(crate) enum Request {
    /// Nothing was to do, or nothing can be done any more.
    Ready,
    /// To a rank.
    Started(usize, mp::Request),
}

/// A place in registered memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At {
    pub(crate) region: Handle,
    pub(crate) offset: u64,
}

/// A signal behind a put.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SignalAt {
    pub(crate) at: At,
    pub(crate) value: u64,
    pub(crate) op: u32,
}

fn number(value: u64) -> gdsync::Result<usize> {
    usize::try_from(value).map_err(|_| gdsync::Error::invalid("an offset", value, "one inside its memory"))
}

impl At {
    fn find(&self) -> gdsync::Result<(Arc<Region>, usize)> {
        Ok((region(self.region)?, number(self.offset)?))
    }
}

impl Contexts {
    /// Makes `count` of them. All ranks must call it.
    pub(crate) fn new(collective: Arc<Collective>, count: usize) -> Result<Self> {
        let connections = (0..count).map(|_| collective.connections()).collect::<Result<_>>()?;
        Ok(Self { collective, connections })
    }

    fn connection(&self, context: c_int) -> gdsync::Result<&Window> {
        let found = usize::try_from(context).ok().and_then(|context| self.connections.get(context));
        found.ok_or_else(|| {
            gdsync::Error::invalid("the number of the context", context, "one that createContext has made")
        })
    }

    /// Starts an operation on a rank; what fails is not returned, but releases all streams.
    fn start(&self, rank: u32, post: impl FnOnce(usize) -> Result<Option<mp::Request>>) -> Request {
        let rank = rank as usize;
        if self.collective.has_failed() {
            return Request::Ready;
        }
        match post(rank) {
            Ok(Some(request)) => Request::Started(rank, request),
            Ok(None) => Request::Ready,
            Err(error) => {
                self.collective.operation_failed(rank, &why(&error));
                Request::Ready
            }
        }
    }

    /// Writes `size` bytes to a rank, and signals behind them: behind all that this context has written to the rank before.
    pub(crate) fn put(
        &self,
        context: c_int,
        (from, to): (At, At),
        size: usize,
        rank: u32,
        signal: Option<SignalAt>,
    ) -> Request {
        self.start(rank, |rank| {
            let connection = self.connection(context)?;
            let signal = match signal {
                Some(signal) => {
                    let (region, offset) = signal.at.find()?;
                    let value = if signal.op == SIGNAL_INC { 1 } else { signal.value };
                    Some((region.window.through(connection)?, offset, value))
                }
                None => None,
            };
            let signal = signal
                .as_ref()
                .map(|(window, offset, value)| (window, Signal::add(*offset, *value).of(window)));
            if size == 0 {
                let alone = signal.map(|(window, signal)| window.start(&Rma::signal(rank, signal)));
                return alone.transpose();
            }
            let ((source, at), (target, offset)) = (from.find()?, to.find()?);
            let put = Rma::put(&source.registration, at..at.saturating_add(size), rank, offset);
            let put = match signal {
                Some((_, signal)) => put.with_signal(signal),
                None => put,
            };
            target.window.through(connection)?.start(&put).map(Some)
        })
    }

    /// Reads `size` bytes from a rank.
    pub(crate) fn get(&self, context: c_int, (from, to): (At, At), size: usize, rank: u32) -> Request {
        self.start(rank, |rank| {
            let connection = self.connection(context)?;
            if size == 0 {
                return Ok(None);
            }
            let ((source, offset), (target, at)) = (from.find()?, to.find()?);
            let get = Rma::get(&target.registration, at..at.saturating_add(size), rank, offset);
            source.window.through(connection)?.start(&get).map(Some)
        })
    }

    /// Makes what complete gets have brought visible to kernels that run.
    pub(crate) fn flush(&self, region: Handle) -> Request {
        let flushed = self::region(region).and_then(|region| region.registration.memory().flush());
        if let Err(error) = flushed {
            self.collective.fail(self.collective.rank(), &error.to_string());
        }
        Request::Ready
    }
}

impl Request {
    /// Whether it is complete, or counts as it.
    pub(crate) fn is_complete(&self, collective: &Collective) -> bool {
        if collective.has_failed() {
            return collective.is_released();
        }
        let Self::Started(rank, request) = self else { return true };
        collective.progress();
        match request.outcome() {
            None => false,
            Some(Ok(_)) => true,
            Some(Err(error)) => {
                collective.operation_failed(*rank, &why(&error));
                // Another thread may still release words.
                !collective.has_failed() || collective.is_released()
            }
        }
    }
}
