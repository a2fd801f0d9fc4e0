//! Commands as the firmware reads and answers them, and those that are about the whole device.

use std::fmt;

use rdma_core_sys::mlx5::ifc::{
    Field, Opcode, Status, answer, atomic_cap, cap, command, query_roce_address, roce_cap,
};
use rustix::io::Errno;

use crate::address::{GidType, Link};
use crate::context::Context;
use crate::context::device::{MAX_RQ_DESC, MAX_SQ_DESC};

/// The command of a mailbox.
pub(super) fn opcode(input: &[u8]) -> Opcode {
    Opcode(narrow(command::OPCODE.get(input)))
}

/// A field of fewer bits than its type.
pub(super) fn narrow<T: TryFrom<u32> + Default>(field: u32) -> T {
    T::try_from(field).unwrap_or_default()
}

/// An answer.
#[derive(Debug)]
pub(super) struct Response(Vec<u8>);

impl Response {
    /// One of this length, all zero.
    pub(super) fn new(len: usize) -> Self {
        Self(vec![0; len])
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// # Errors
    /// `BAD_OUTPUT_LEN` if it is shorter.
    pub(super) fn at_least(&self, len: usize) -> Result<(), Refusal> {
        if self.0.len() < len {
            return Err(Refusal::new(Status::BAD_OUTPUT_LEN, format!("an answer of {} bytes", self.0.len())));
        }
        Ok(())
    }

    /// Sets a field inside the length that [`Response::at_least`] has checked.
    pub(super) fn set(&mut self, field: Field, value: u32) {
        field.set(&mut self.0, value);
    }

    /// Writes bytes from a byte on, as far as there is room.
    pub(super) fn put(&mut self, at: usize, bytes: &[u8]) {
        let room = self.0.get_mut(at..).unwrap_or_default();
        let len = room.len().min(bytes.len());
        room[..len].copy_from_slice(&bytes[..len]);
    }

    /// The number of what was created.
    pub(super) fn set_number(&mut self, number: u32) {
        self.set(answer::NUMBER, number);
    }

    /// Answers that the command was refused.
    pub(super) fn refuse(&mut self, refusal: &Refusal) {
        self.0.fill(0);
        if self.at_least(command::SHORT).is_ok() {
            self.set(answer::STATUS, refusal.status.0.into());
            self.set(answer::SYNDROME, SYNDROME);
        }
    }
}

/// The syndrome of every refusal: the log has the reason. Of no card's firmware.
const SYNDROME: u32 = 0x005d_0000;

/// A command that is not carried out.
#[derive(Debug)]
pub(super) struct Refusal {
    status: Status,
    why: String,
}

impl Refusal {
    pub(super) fn new(status: Status, why: impl Into<String>) -> Self {
        Self { status, why: why.into() }
    }

    /// A command that this card does not have, here.
    pub(super) fn operation(opcode: Opcode, why: &str) -> Self {
        Self::new(Status::BAD_OP, format!("{:#x} {why}", opcode.0))
    }

    /// `EREMOTEIO`, whereupon libmlx5 looks at the status. A command that is not there fails as if the kernel did not let it pass,
    /// which programs take for "not supported".
    pub(super) fn errno(&self) -> Errno {
        if self.status == Status::BAD_OP { Errno::OPNOTSUPP } else { Errno::REMOTEIO }
    }

    /// A field that asks for what this card does not do.
    pub(super) fn parameter(why: impl Into<String>) -> Self {
        Self::new(Status::BAD_PARAM, why)
    }

    /// Something that is not there.
    pub(super) fn resource(why: impl Into<String>) -> Self {
        Self::new(Status::BAD_RES, why)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.status.name(), self.why)
    }
}

/// Checks what each command has.
pub(super) fn check_lengths(input: &[u8], response: &Response) -> Result<(), Refusal> {
    at_least(input, command::SHORT)?;
    response.at_least(command::SHORT)
}

/// # Errors
/// `BAD_INPUT_LEN` for a command that is shorter.
pub(super) fn at_least(input: &[u8], len: usize) -> Result<(), Refusal> {
    if input.len() < len {
        return Err(Refusal::new(Status::BAD_INPUT_LEN, format!("a command of {} bytes", input.len())));
    }
    Ok(())
}

/// Requires fields to have values: others ask for what this card does not do.
pub(super) fn require(input: &[u8], fields: &[(Field, u32, &str)]) -> Result<(), Refusal> {
    for &(field, value, name) in fields {
        let found = field.get(input);
        if found != value {
            return Err(Refusal::parameter(format!("{name} is {found:#x} where {value:#x} is needed")));
        }
    }
    Ok(())
}

/// The first UDP source port of RoCE v2.
pub(super) const MIN_UDP_SPORT: u32 = 0xc000;
/// Log2 of the largest queues, and of how many queues there may be.
pub(super) const LOG_MAX_QP_SZ: u32 = 15;
pub(super) const LOG_MAX_CQ_SZ: u32 = 22;
const LOG_MAX_QP: u32 = 14;
const LOG_MAX_CQ: u32 = 20;
/// 1 GiB
pub(super) const LOG_MAX_MSG: u32 = 30;

impl Context {
    /// A command that is not about an object.
    pub(super) fn general(&self, input: &[u8], response: &mut Response) -> Result<(), Refusal> {
        match opcode(input) {
            Opcode::QUERY_HCA_CAP => self.query_hca_cap(input, response),
            // No ports are bonded: all zero.
            Opcode::QUERY_LAG => Ok(()),
            Opcode::QUERY_ROCE_ADDRESS => self.query_roce_address(input, response),
            other => Err(Refusal::operation(other, "is not a command of the device")),
        }
    }

    fn query_roce_address(&self, input: &[u8], response: &mut Response) -> Result<(), Refusal> {
        response.at_least(query_roce_address::ANSWER)?;
        let index = query_roce_address::INDEX.get(input);
        let port = self.hca.port;
        // Of an entry without an address: all zero.
        let Some((gid, kind)) = port.gid(index).filter(|(_, kind)| *kind != GidType::InfiniBand) else {
            return if index < port.link.gids() {
                Ok(())
            } else {
                Err(Refusal::new(Status::BAD_INDEX, format!("GID {index}")))
            };
        };
        response.put(query_roce_address::SOURCE_L3_ADDRESS / 8, &gid.0);
        response.put(query_roce_address::SOURCE_MAC / 8, &port.mac());
        response.set(query_roce_address::ROCE_L3_TYPE, u32::from(!gid.is_ipv4()));
        response.set(query_roce_address::ROCE_VERSION, if kind == GidType::RoceV2 { 2 } else { 0 });
        Ok(())
    }

    fn query_hca_cap(&self, input: &[u8], response: &mut Response) -> Result<(), Refusal> {
        response.at_least(cap::ANSWER)?;
        let link = self.hca.port.link;
        // The last bit asks for the maximum or the current values, which are the same. A capability that is not set is absent.
        match command::OP_MOD.get(input) >> 1 {
            0 => {
                response.set(cap::LOG_MAX_QP_SZ, LOG_MAX_QP_SZ);
                response.set(cap::LOG_MAX_QP, LOG_MAX_QP);
                response.set(cap::LOG_MAX_CQ_SZ, LOG_MAX_CQ_SZ);
                response.set(cap::LOG_MAX_CQ, LOG_MAX_CQ);
                response.set(cap::PORT_TYPE, u32::from(link == Link::Ethernet));
                response.set(cap::CQE_VERSION, 1);
                response.set(cap::ATOMIC, u32::from(!self.hca.modes.no_atomics));
                response.set(cap::RC, 1);
                response.set(cap::MAX_WQE_SZ_SQ, MAX_SQ_DESC.into());
                response.set(cap::MAX_WQE_SZ_RQ, MAX_RQ_DESC.into());
                response.set(cap::LOG_MAX_RMP, LOG_MAX_QP);
                // UCX makes its queues by DevX where this is 30. Before 1.22 it also needs mkeys of mlx5dv then, but does not ask for
                // them: its writes and atomics reach wrong addresses.
                response.set(cap::LOG_MAX_MSG, if self.hca.modes.log_max_msg { LOG_MAX_MSG } else { 0 });
            }
            atomic_cap::TYPE if !self.hca.modes.no_atomics => {
                // The old value of 8 bytes comes in the byte order of the host.
                response.set(atomic_cap::REQ_8B_ENDIANNESS_MODE, 1);
                response.set(atomic_cap::SUPPORTED_REQ_8B_ENDIANNESS_MODE_1, 1);
                // Compare and swap, fetch and add, and both with masks, of 4 and 8 bytes.
                response.set(atomic_cap::OPERATIONS, 0xf);
                response.set(atomic_cap::SIZE_QP, 4 | 8);
                // Programs ask for this, too, where they use no DC.
                response.set(atomic_cap::SIZE_DC, 4 | 8);
            }
            roce_cap::TYPE if link == Link::Ethernet => {
                response.set(roce_cap::ADDRESS_TABLE_SIZE, link.gids());
                response.set(roce_cap::MIN_SRC_UDP_PORT, MIN_UDP_SPORT);
                response.set(roce_cap::MAX_SRC_UDP_PORT, u16::MAX.into());
            }
            _ => {}
        }
        Ok(())
    }
}
