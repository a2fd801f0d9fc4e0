//! The exchange of somebody else, whose answers are looked at before anybody relies on them.

use std::time::Duration;

use super::Exchange;
use crate::error::{Error, Result};

/// An exchange that gives a part of every rank, or an error.
#[derive(Debug)]
pub(crate) struct Checked(pub(crate) Box<dyn Exchange>);

impl Exchange for Checked {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn allgather(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let parts = self.0.allgather(bytes, timeout)?;
        let (count, size) = (parts.len(), self.size());
        if count == size {
            return Ok(parts);
        }
        let what = format!("gave the bytes of {count} ranks, not of {size}");
        Err(Error::bootstrap("the exchange", what, "let allgather return a part of every rank"))
    }

    fn barrier(&mut self, timeout: Duration) -> Result<()> {
        self.0.barrier(timeout)
    }

    fn regroup(&mut self, without: &[usize], timeout: Duration) -> Result<(Box<dyn Exchange>, Vec<usize>)> {
        let (next, former) = self.0.regroup(without, timeout)?;
        Ok((Box::new(Self(next)), former))
    }
}
