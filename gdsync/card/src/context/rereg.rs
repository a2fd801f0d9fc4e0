//! REREG_MR: changes a memory region under its key.

use rustix::io::Errno;

use super::{Context, Result};
use crate::abi::{ib_uverbs_rereg_mr, ib_uverbs_rereg_mr_resp};
use crate::command::Command;
use crate::user::User;

/// `enum ib_mr_rereg_flags`
mod flag {
    pub(super) const TRANSLATION: u32 = 1;
    pub(super) const PD: u32 = 1 << 1;
    pub(super) const ACCESS: u32 = 1 << 2;
}

impl Context {
    /// As mlx5's driver where the card can change the region in place: the keys stay.
    pub(super) fn rereg_mr(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_rereg_mr = command.request()?;
        command.check_response::<ib_uverbs_rereg_mr_resp>()?;
        let has = |bit| request.flags & bit != 0;
        if request.flags == 0 {
            return Err(Errno::INVAL);
        }
        if has(!(flag::TRANSLATION | flag::PD | flag::ACCESS)) {
            return Err(Errno::OPNOTSUPP);
        }
        let mr = self.mrs.get(request.mr_handle)?;
        let mut current = mr.attr.lock();
        let mut attr = current.clone();
        if has(flag::TRANSLATION) {
            (attr.start, attr.length, attr.hca_va) = (request.start, request.length, request.hca_va);
            // The new memory is the program's, as the kernel has it.
            attr.dma_buf = None;
        }
        if has(flag::PD) {
            attr.pd = self.pds.get(request.pd_handle)?;
        }
        if has(flag::ACCESS) {
            attr.access_flags = request.access_flags;
        }
        let (memory, access) = attr.check()?;
        let changed = self.hca.card.reregister(mr.key, attr.pd.pdn, &memory, attr.hca_va, access);
        changed.map_err(|_| Errno::INVAL)?;
        *current = attr;
        command.respond(user, &ib_uverbs_rereg_mr_resp { lkey: mr.key, rkey: mr.key })
    }
}
