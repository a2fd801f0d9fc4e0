//! CREATE_CQ.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Arc;

use parking_lot::Mutex;

use super::memory::{Page, Umem};
use super::status::{Refusal, refuse};
use super::{EQN, Input, LOG_MAX_CQ};
use crate::cq::Cq;
use crate::domain::Users;
use crate::hca::Hca;

/// `MLX5_CMD_OP_CREATE_CQ`
pub(super) const CREATE: u32 = 0x400;

/// Those there are.
static ALL: Mutex<BTreeMap<u32, Arc<Users>>> = Mutex::new(BTreeMap::new());

/// A completion queue in registered memory.
pub(super) struct DevxCq {
    cqn: u32,
    hca: &'static Hca,
    _umems: [Arc<Umem>; 2],
}

impl DevxCq {
    pub(super) fn create(hca: &'static Hca, input: &Input<'_>) -> Result<Self, Refusal> {
        let context = 0x80;
        input.require(&[
            (context + 0x06, 1, 1, "dbr_umem_valid"),
            (context + 0x08, 3, 0, "cqe_sz"),
            (context + 0x0b, 1, 0, "cc"),
            (context + 0x11, 1, 0, "cqe_comp_en"),
            (context + 0x54, 6, 0, "page_offset"),
            (context + 0xc3, 5, 0, "log_page_size"),
            (context + 0xb8, 8, EQN, "c_eqn"),
            (0x2e0, 1, 1, "cq_umem_valid"),
        ])?;
        let log = input.get(context + 0x63, 5);
        if log > LOG_MAX_CQ {
            return Err(refuse::limit(0x30, format!("log_cq_size is {log}")));
        }
        // Any page that there is: nobody arms the queue.
        Page::find(input.get(context + 0x68, 24))?;
        let ring_umem = Umem::find(input.get(0x2c0, 32))?;
        let record_umem = Umem::find(input.get(context + 0x20, 32))?;
        let ring = ring_umem.part(input.get64(0x280), 64 << log, 64)?;
        let record = record_umem.part(input.get64(context + 0x1c0), 8, 8)?;
        let ignore_overrun = input.get(context + 0x0e, 1) == 1;
        let cqn = hca.card.create_cq(ring, record, ignore_overrun, None);
        // Its owner alone polls it.
        hca.card.read_by_owner(cqn);
        ALL.lock().insert(cqn, Arc::default());
        Ok(Self { cqn, hca, _umems: [ring_umem, record_umem] })
    }

    pub(super) fn cqn(&self) -> u32 {
        self.cqn
    }

    /// It is to be destroyed.
    pub(super) fn leave(&self) -> Result<(), c_int> {
        let mut all = ALL.lock();
        if let Some(users) = all.get(&self.cqn) {
            users.none()?;
        }
        all.remove(&self.cqn);
        Ok(())
    }
}

impl Drop for DevxCq {
    fn drop(&mut self) {
        self.hca.card.destroy_cq(self.cqn);
    }
}

/// A queue that a queue pair uses, of either kind.
pub(super) struct Used {
    cqn: u32,
    hca: &'static Hca,
}

impl Used {
    pub(super) fn find(hca: &'static Hca, cqn: u32) -> Result<Self, Refusal> {
        let used = Self { cqn, hca };
        if used.with(Users::add).is_some() {
            return Ok(used);
        }
        // It is not counted, so not to be given back.
        std::mem::forget(used);
        Err(refuse::resource(0x31, format!("completion queue {cqn:#x} is not there")))
    }

    pub(super) fn cqn(&self) -> u32 {
        self.cqn
    }

    fn with(&self, f: impl Fn(&Users)) -> Option<()> {
        if let Some(users) = ALL.lock().get(&self.cqn) {
            f(users);
            return Some(());
        }
        self.hca.roster.with_cq(self.cqn, |cq| {
            // SAFETY: it is in the list, so it is there.
            f(&unsafe { Cq::of(cq) }.users);
        })
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        self.with(Users::remove);
    }
}
