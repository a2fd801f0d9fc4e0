//! Proptest strategies for legal sends, shared with other crates by path.

use core::ops::RangeInclusive;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// SGEs, possibly empty, with a total below the maximum message.
pub(crate) fn sges(count: RangeInclusive<usize>) -> impl Strategy<Value = Vec<DataSeg>> {
    let len = prop_oneof![Just(0), 1..=MAX_MESSAGE >> 6];
    vec((any::<u64>(), len, any::<u32>()).prop_map(|(addr, len, lkey)| DataSeg { addr, len, lkey }), count)
}

/// An owned operation, for comparison.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Plain {
    pub(crate) opcode: Opcode,
    pub(crate) remote: RemoteAddr,
    pub(crate) sges: Vec<DataSeg>,
    pub(crate) inline: Vec<u8>,
    pub(crate) imm: Option<u32>,
    /// Swap or add, and compare operands.
    pub(crate) operands: [u64; 2],
}

impl Plain {
    pub(crate) fn op(&self) -> SendOp<'_> {
        let (remote, sges, imm) = (self.remote, &self.sges[..], self.imm);
        let payload =
            if self.inline.is_empty() { Payload::Sges(sges) } else { Payload::Inline(&self.inline) };
        let [swap_or_add, compare] = self.operands;
        match self.opcode {
            Opcode::SEND | Opcode::SEND_IMM => SendOp::Send { payload, imm },
            Opcode::RDMA_WRITE | Opcode::RDMA_WRITE_IMM => SendOp::Write { remote, payload, imm },
            Opcode::RDMA_READ => SendOp::Read { remote, sges },
            Opcode::ATOMIC_CS => SendOp::CompareSwap { remote, compare, swap: swap_or_add, result: sges[0] },
            Opcode::ATOMIC_FA => SendOp::FetchAdd { remote, add: swap_or_add, result: sges[0] },
            _ => SendOp::Nop,
        }
    }
}

/// Any operation that can be encoded.
pub(crate) fn legal() -> impl Strategy<Value = Plain> {
    let remote = || any::<(u64, u32)>().prop_map(|(addr, rkey)| RemoteAddr { addr, rkey });
    let result = || any::<(u64, u32)>().prop_map(|(addr, lkey)| vec![DataSeg { addr, len: 8, lkey }]);
    let payload = |max_sges, max_inline| {
        prop_oneof![
            sges(0..=max_sges).prop_map(|sges| (sges, vec![])),
            vec(any::<u8>(), 0..=max_inline).prop_map(|inline| (vec![], inline)),
        ]
    };
    let some = |sges: &Vec<DataSeg>| sges.iter().any(|sge| sge.len > 0);
    prop_oneof![
        Just(Plain::default()),
        (payload(62, 988), any::<Option<u32>>()).prop_map(|((sges, inline), imm)| {
            let opcode = if imm.is_some() { Opcode::SEND_IMM } else { Opcode::SEND };
            Plain { opcode, sges, inline, imm, ..Plain::default() }
        }),
        (remote(), payload(61, 972), any::<Option<u32>>()).prop_map(|(remote, (sges, inline), imm)| {
            let opcode = if imm.is_some() { Opcode::RDMA_WRITE_IMM } else { Opcode::RDMA_WRITE };
            Plain { opcode, remote, sges, inline, imm, ..Plain::default() }
        }),
        (remote(), sges(1..=61).prop_filter("a read has bytes", some)).prop_map(|(remote, sges)| {
            Plain { opcode: Opcode::RDMA_READ, remote, sges, ..Plain::default() }
        }),
        (remote(), any::<[u64; 2]>(), result()).prop_map(|(remote, operands, sges)| {
            Plain { opcode: Opcode::ATOMIC_CS, remote, operands, sges, ..Plain::default() }
        }),
        (remote(), any::<u64>(), result()).prop_map(|(remote, add, sges)| {
            Plain { opcode: Opcode::ATOMIC_FA, remote, operands: [add, 0], sges, ..Plain::default() }
        }),
    ]
}
