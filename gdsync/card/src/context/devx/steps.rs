//! Transitions of queue pairs made by DevX.

use gdsync_device::error::Error;
use gdsync_device::{Access, QpAddress, QpAttr, QpState, mtu_bytes};
use rdma_core_sys::mlx5::ifc::{Field, Opcode, Status, command, create_qp, path, qpc};

use super::firmware::{MIN_UDP_SPORT, Refusal, at_least, narrow, opcode};
use super::queues::{Object, same};
use crate::address::{GidType, Link, Port};
use crate::context::Context;
use crate::context::device::{MAX_RD_ATOMIC, MTU};
use crate::context::modify::{PATIENCE, Route, delay};

type Result<T> = std::result::Result<T, Refusal>;

/// A transition, and the fields of the context that it sets.
struct Step {
    from: QpState,
    to: QpState,
    fields: &'static [Field],
}

/// Bits of `opt_param_mask`, and the fields that each sets: `MLX5_QP_OPTPAR_RRE`, `_RAE`, `_RWE` and `_RNR_TIMEOUT`.
const OPTIONAL: [(u32, &[Field]); 4] = [
    (1 << 1, &[qpc::RRE]),
    (1 << 2, &[qpc::RAE, qpc::ATOMIC_MODE]),
    (1 << 3, &[qpc::RWE]),
    (1 << 6, &[qpc::MIN_RNR_NAK]),
];

impl Step {
    fn of(opcode: Opcode) -> Option<Self> {
        let step = |from, to, fields| Some(Self { from, to, fields });
        match opcode {
            Opcode::RST2INIT_QP => step(
                QpState::RESET,
                QpState::INIT,
                &[path::PKEY_INDEX, path::VHCA_PORT_NUM, qpc::ATOMIC_MODE, qpc::RRE, qpc::RWE, qpc::RAE],
            ),
            Opcode::INIT2INIT_QP => step(QpState::INIT, QpState::INIT, &[]),
            Opcode::INIT2RTR_QP => step(
                QpState::INIT,
                QpState::RTR,
                &[
                    qpc::MTU,
                    qpc::LOG_MSG_MAX,
                    qpc::REMOTE_QPN,
                    qpc::NEXT_RCV_PSN,
                    qpc::LOG_RRA_MAX,
                    qpc::MIN_RNR_NAK,
                    path::GRH,
                    path::RLID,
                    path::SRC_ADDR_INDEX,
                    path::HOP_LIMIT,
                    path::TCLASS,
                    path::FLOW_LABEL,
                    path::DSCP,
                    path::UDP_SPORT,
                    path::ETH_PRIO,
                    path::SL,
                ],
            ),
            Opcode::RTR2RTS_QP => step(
                QpState::RTR,
                QpState::RTS,
                &[path::ACK_TIMEOUT, qpc::RETRY_COUNT, qpc::RNR_RETRY, qpc::NEXT_SEND_PSN, qpc::LOG_SRA_MAX],
            ),
            Opcode::RTS2RTS_QP => step(QpState::RTS, QpState::RTS, &[]),
            _ => None,
        }
    }
}

impl Context {
    /// Takes a queue pair through the step that the command names.
    pub(super) fn modify_object(&self, object: &Object, input: &[u8]) -> Result<()> {
        let opcode = opcode(input);
        let Object::Qp(qp) = object else {
            return Err(Refusal::operation(opcode, "changes no other object"));
        };
        same(input, qp.qpn)?;
        // One transition at a time.
        let mut known = qp.context.lock();
        let state = qp.hca.card.state(qp.qpn).map_err(|error| Refusal::resource(error.to_string()))?;
        let (to, step) = match opcode {
            Opcode::TO_ERR_QP => (QpState::ERR, None),
            Opcode::TO_RST_QP => (QpState::RESET, None),
            _ => {
                let step = Step::of(opcode);
                let step = step.ok_or_else(|| Refusal::operation(opcode, "changes no queue pair"))?;
                (step.to, Some(step))
            }
        };
        let (mut attr, mut psn) = (QpAttr::to(to), None);
        let mut new = known.clone();
        if let Some(step) = step {
            if state != step.from {
                let why = format!("the queue pair is in {state}, not in {}", step.from);
                return Err(Refusal::new(Status::BAD_QP_STATE, why));
            }
            at_least(input, command::LONG)?;
            let optional = command::OPT_PARAM_MASK.get(input);
            if OPTIONAL.iter().fold(optional, |rest, (bit, _)| rest & !bit) != 0 {
                return Err(Refusal::parameter(format!("opt_param_mask is {optional:#x}")));
            }
            let given = &input[create_qp::CONTEXT / 8..];
            let chosen = OPTIONAL.iter().filter(|(bit, _)| optional & bit != 0);
            let fields: Vec<_> = step.fields.iter().chain(chosen.flat_map(|(_, fields)| *fields)).collect();
            for field in &fields {
                field.set(&mut new, field.get(given));
            }
            let sets = |field| fields.contains(&&field);
            if sets(qpc::RRE) || sets(qpc::RAE) || sets(qpc::RWE) {
                if self.hca.modes.no_atomics && qpc::RAE.get(&new) == 1 {
                    return Err(Refusal::parameter("rae is set, and there are no atomics"));
                }
                attr.access = Some(access(&new));
            }
            if sets(qpc::MIN_RNR_NAK) {
                attr.min_rnr_timer = Some(narrow(qpc::MIN_RNR_NAK.get(&new)));
            }
            match step.to {
                QpState::INIT => check_port(&new)?,
                QpState::RTR => {
                    // GID and MAC are longer than a field.
                    for range in [path::RGID / 8..path::RGID / 8 + 16, path::RMAC / 8..path::RMAC / 8 + 6] {
                        new[range.clone()].copy_from_slice(&given[range]);
                    }
                    self.to_rtr(&mut attr, &new)?;
                }
                QpState::RTS if step.from == QpState::RTR => {
                    psn = Some(qpc::NEXT_SEND_PSN.get(&new));
                    to_rts(&mut attr, &new)?;
                }
                _ => {}
            }
        }
        if self.hca.modes.late_flush && to == QpState::ERR {
            delay().map_err(|errno| Refusal::new(Status::INT_ERR, errno.to_string()))?;
        }
        qp.hca.card.modify_qp(qp.qpn, &attr, psn, PATIENCE).map_err(|error| match error {
            Error::Deadline { .. } => Refusal::new(Status::BAD_SYS_STATE, error.to_string()),
            _ => Refusal::parameter(error.to_string()),
        })?;
        *known = new;
        Ok(())
    }

    fn to_rtr(&self, attr: &mut QpAttr, context: &[u8]) -> Result<()> {
        check_port(context)?;
        let mtu = narrow(qpc::MTU.get(context));
        if !(1..=MTU).contains(&mtu) {
            return Err(Refusal::parameter(format!("mtu is {mtu}")));
        }
        if qpc::LOG_MSG_MAX.get(context) == 0 {
            return Err(Refusal::parameter("log_msg_max is 0, so a message has one byte"));
        }
        attr.path_mtu = mtu_bytes(mtu);
        attr.max_dest_rd_atomic = Some(outstanding(qpc::LOG_RRA_MAX.get(context))?);
        let dgid = bytes(context, path::RGID);
        let port = self.hca.port;
        let sgid_index = narrow(path::SRC_ADDR_INDEX.get(context));
        if port.link == Link::Ethernet {
            check_ethernet(context, port, sgid_index, &dgid, bytes(context, path::RMAC))?;
        }
        let route = Route {
            is_global: u8::from(port.link == Link::Ethernet || path::GRH.get(context) == 1),
            port_num: 1,
            sgid_index,
            dlid: narrow(path::RLID.get(context)),
            dgid,
        };
        let gid = self.check_path(&route).map_err(|_| Refusal::parameter("the path leads to no port"))?;
        let (qpn, psn) = (qpc::REMOTE_QPN.get(context), qpc::NEXT_RCV_PSN.get(context));
        attr.remote = Some(QpAddress::new(gid, qpn, psn));
        Ok(())
    }
}

/// Checks what a packet on Ethernet needs, without which none arrives.
fn check_ethernet(context: &[u8], port: Port, sgid_index: u8, dgid: &[u8; 16], rmac: [u8; 6]) -> Result<()> {
    let [.., a, b, c] = *dgid;
    let peer = Port { link: port.link, number: u32::from_be_bytes([0, a, b, c]) };
    if rmac != peer.mac() {
        return Err(Refusal::parameter(format!("rmac {rmac:x?} is not that of the peer")));
    }
    if path::HOP_LIMIT.get(context) == 0 {
        return Err(Refusal::parameter("hop_limit is 0, so the packets end at the first router"));
    }
    let is_v2 = port.gid(sgid_index.into()).is_some_and(|(_, kind)| kind == GidType::RoceV2);
    if is_v2 && path::UDP_SPORT.get(context) < MIN_UDP_SPORT {
        return Err(Refusal::parameter("udp_sport is below those of RoCE v2"));
    }
    Ok(())
}

fn to_rts(attr: &mut QpAttr, context: &[u8]) -> Result<()> {
    attr.timeout = Some(narrow(path::ACK_TIMEOUT.get(context)));
    attr.retry_cnt = Some(narrow(qpc::RETRY_COUNT.get(context)));
    attr.rnr_retry = Some(narrow(qpc::RNR_RETRY.get(context)));
    attr.max_rd_atomic = Some(outstanding(qpc::LOG_SRA_MAX.get(context))?);
    Ok(())
}

fn check_port(context: &[u8]) -> Result<()> {
    let (port, pkey) = (path::VHCA_PORT_NUM.get(context), path::PKEY_INDEX.get(context));
    if port == 1 && pkey == 0 {
        return Ok(());
    }
    Err(Refusal::parameter(format!("vhca_port_num is {port} and pkey_index {pkey} where 1 and 0 are needed")))
}

/// READs and atomics; the field is the logarithm.
fn outstanding(log: u32) -> Result<u8> {
    let count = 1u8.checked_shl(log).filter(|&count| count <= MAX_RD_ATOMIC);
    count.ok_or_else(|| Refusal::new(Status::LIM_ERR, format!("2^{log} READs outstanding")))
}

fn access(context: &[u8]) -> Access {
    let mut access = Access::LOCAL_WRITE;
    access.set(Access::REMOTE_READ, qpc::RRE.get(context) == 1);
    access.set(Access::REMOTE_WRITE, qpc::RWE.get(context) == 1);
    access.set(Access::REMOTE_ATOMIC, qpc::RAE.get(context) == 1 && qpc::ATOMIC_MODE.get(context) != 0);
    access
}

/// Bytes of the context from a bit on; 0 where it ends.
fn bytes<const N: usize>(context: &[u8], bit: usize) -> [u8; N] {
    context.get(bit / 8..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; N])
}
