//! Transitions of queue pairs.

use std::time::Duration;

use gdsync::Error;
use gdsync::hca::Gid;
use gdsync::verbs::{Access, QpAddress, QpAttr, QpState};

use super::qp::{CONTEXT, DevxQp};
use super::status::{Refusal, refuse};
use super::{Input, LONG};
use crate::address::{PORT, ROUTED};
use crate::complaint::complain;
use crate::context::{ACTIVE_MTU, has_atomics};
use crate::handle;
use crate::modify::MAX_RD_ATOMIC;

const RST2INIT: u32 = 0x502;
const INIT2RTR: u32 = 0x503;
const RTR2RTS: u32 = 0x504;
const RTS2RTS: u32 = 0x505;
const TO_ERR: u32 = 0x507;
const TO_RST: u32 = 0x50a;
const INIT2INIT: u32 = 0x50e;

/// Optional parameters: rights, and the pause of a sender.
const RIGHTS: u32 = 1 << 1 | 1 << 2 | 1 << 3;
const RNR_TIMEOUT: u32 = 1 << 6;
/// Where the primary path begins.
const PATH: usize = CONTEXT + 0xc0;
/// How long a peer may take to be found.
const PATIENCE: Duration = Duration::from_secs(10);

/// Takes a queue pair through the step that the mailbox names.
pub(super) fn run(qp: &DevxQp, mailbox: &[u8]) -> Result<(), Refusal> {
    let input = &Input(mailbox);
    let opcode = input.opcode();
    let state = qp.hca.card.state(qp.qpn()).map_err(|_| refuse::state())?;
    let (from, to) = match opcode {
        RST2INIT => (QpState::RESET, QpState::INIT),
        INIT2INIT => (QpState::INIT, QpState::INIT),
        INIT2RTR => (QpState::INIT, QpState::RTR),
        RTR2RTS => (QpState::RTR, QpState::RTS),
        RTS2RTS => (QpState::RTS, QpState::RTS),
        TO_ERR => (state, QpState::ERR),
        TO_RST => (state, QpState::RESET),
        _ => return Err(refuse::operation(0x50, format!("command {opcode:#x} changes no queue pair"))),
    };
    if state != from {
        return Err(refuse::state());
    }
    let (mut attr, mut psn) = (QpAttr::to(to), None);
    if !matches!(opcode, TO_ERR | TO_RST) {
        if mailbox.len() < LONG {
            return Err(refuse::length(true));
        }
        input.require(&[(CONTEXT + 0x13, 2, 3, "pm_state")])?;
        let optional = input.get(0x80, 32);
        if optional & !(RIGHTS | RNR_TIMEOUT) != 0 {
            return Err(refuse::parameter(0x51, format!("opt_param_mask is {optional:#x}")));
        }
        if opcode == RST2INIT || optional & RIGHTS != 0 {
            attr = attr.access(rights(input)?);
        }
        if opcode == INIT2RTR || optional & RNR_TIMEOUT != 0 {
            attr = attr.min_rnr_timer(narrow(input.get(CONTEXT + 0x4a3, 5)));
        }
    }
    match opcode {
        RST2INIT => {
            input.require(&[
                (PATH + 0x128, 8, PORT.into(), "vhca_port_num"),
                (PATH + 0x10, 16, 0, "pkey_index"),
            ])?;
        }
        INIT2RTR => {
            input.require(&[(CONTEXT + 0x43, 5, 30, "log_msg_max")])?;
            let mtu = input.get(CONTEXT + 0x40, 3);
            if !(1..=ACTIVE_MTU.0).contains(&mtu) {
                return Err(refuse::parameter(0x52, format!("mtu is {mtu}")));
            }
            let outstanding = outstanding(input.get(CONTEXT + 0x488, 3))?;
            attr = attr.remote(remote(input)?).path_mtu(128 << mtu).max_dest_rd_atomic(outstanding);
        }
        RTR2RTS => {
            let outstanding = outstanding(input.get(CONTEXT + 0x388, 3))?;
            attr = attr
                .timeout(narrow(input.get(PATH + 0x40, 5)))
                .retry_cnt(narrow(input.get(CONTEXT + 0x38d, 3)))
                .rnr_retry(narrow(input.get(CONTEXT + 0x390, 3)))
                .max_rd_atomic(outstanding);
            psn = Some(input.get(CONTEXT + 0x3c8, 24));
        }
        _ => {}
    }
    qp.hca.card.modify_qp(qp.qpn(), &attr, psn, PATIENCE).map_err(|error| refused(&error))
}

/// A field of fewer than eight bits.
fn narrow(field: u32) -> u8 {
    u8::try_from(field).unwrap_or(u8::MAX)
}

/// READs and atomics, of which the field is the logarithm.
fn outstanding(log: u32) -> Result<u8, Refusal> {
    let count = 1u8.checked_shl(log).filter(|&count| count != 0 && count <= MAX_RD_ATOMIC);
    count.ok_or_else(|| refuse::limit(0x53, format!("2^{log} READs outstanding")))
}

fn rights(input: &Input<'_>) -> Result<Access, Refusal> {
    let mut access = Access::LOCAL_WRITE;
    let (read, write, atomic) = (0x490, 0x491, 0x492);
    access.set(Access::REMOTE_READ, input.get(CONTEXT + read, 1) == 1);
    access.set(Access::REMOTE_WRITE, input.get(CONTEXT + write, 1) == 1);
    if input.get(CONTEXT + atomic, 1) == 1 {
        if !has_atomics() {
            return Err(refuse::parameter(0x58, "rae is set: the device has no atomics"));
        }
        input.require(&[(CONTEXT + 0x48c, 4, 3, "atomic_mode")])?;
        access |= Access::REMOTE_ATOMIC;
    }
    Ok(access)
}

/// The peer that the path names.
fn remote(input: &Input<'_>) -> Result<QpAddress, Refusal> {
    let mut gid = [0; 16];
    for (n, byte) in gid.iter_mut().enumerate() {
        *byte = narrow(input.get(PATH + 0x80 + 8 * n, 8));
    }
    let mut mac = [0; 6];
    for (n, byte) in mac.iter_mut().enumerate() {
        *byte = narrow(input.get(PATH + 0x130 + 8 * n, 8));
    }
    input.require(&[
        (PATH + 0x128, 8, PORT.into(), "vhca_port_num"),
        (PATH + 0x48, 8, ROUTED.into(), "src_addr_index: GID index 1 is RoCE v2"),
    ])?;
    if input.get(PATH + 0x58, 8) == 0 {
        return Err(refuse::parameter(0x54, "a path with hop_limit 0 ends at the first router"));
    }
    if mac != handle::mac(&gid) {
        return Err(refuse::parameter(0x55, format!("rmac {mac:x?} is not that of the peer")));
    }
    if input.get(PATH + 0x110, 16) < 0xc000 {
        return Err(refuse::parameter(0x56, "udp_sport is below those of RoCE v2"));
    }
    let (qpn, psn) = (input.get(CONTEXT + 0xa8, 24), input.get(CONTEXT + 0x4a8, 24));
    Ok(QpAddress::new(Gid(gid), qpn, psn))
}

/// Why the HCA did not do it: a peer that is gone is no fault of the caller's.
fn refused(error: &Error) -> Refusal {
    match error {
        Error::Peer { .. } | Error::Deadline { .. } => {
            complain(format!("DevX: the peer of a queue pair: {error}"));
            refuse::state()
        }
        _ => refuse::parameter(0x57, error.to_string()),
    }
}
