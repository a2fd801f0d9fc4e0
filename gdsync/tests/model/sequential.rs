//! What a list means: each request done after the other, on two plain memories.

use gdsync::mlx5::{CqeOpcode, Opcode};

use super::common;
use super::list::{Data, REGION, Request, What, total};

/// Both memories, and the completions of both sides, after the list was done in order.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) memories: [Vec<u8>; 2],
    pub(crate) sent: Vec<(u64, Opcode, usize)>,
    pub(crate) received: Vec<(u64, CqeOpcode, usize, Option<u32>)>,
}

pub(crate) fn start(seed: usize) -> Vec<u8> {
    common::pattern(REGION, seed)
}

pub(crate) fn gather(memory: &[u8], data: &Data) -> Vec<u8> {
    match data {
        Data::Inline(bytes) => bytes.clone(),
        Data::Parts(parts) => parts.iter().flat_map(|&(at, len)| memory[at..at + len].to_vec()).collect(),
    }
}

pub(crate) fn scatter(memory: &mut [u8], parts: &[(usize, usize)], mut bytes: &[u8]) {
    for &(at, len) in parts {
        let (now, later) = bytes.split_at(len.min(bytes.len()));
        memory[at..at + now.len()].copy_from_slice(now);
        bytes = later;
    }
}

/// Also the word that each compare-and-swap found.
pub(crate) fn model(list: &[Request]) -> (Outcome, Vec<u64>) {
    let mut words = vec![0; list.len()];
    let mut outcome = Outcome { memories: [start(1), start(2)], ..Outcome::default() };
    let [a, b] = &mut outcome.memories;
    for (i, request) in list.iter().enumerate() {
        let imm = request.imm;
        let recv_id = outcome.received.len() as u64;
        let mut receive = |opcode, len| outcome.received.push((recv_id, opcode, len, imm));
        let (opcode, len) = match &request.what {
            What::Send(data, to) => {
                let bytes = gather(a, data);
                scatter(b, to, &bytes);
                let of = |with, without| if imm.is_some() { with } else { without };
                receive(of(CqeOpcode::RESP_SEND_IMM, CqeOpcode::RESP_SEND), bytes.len());
                (if imm.is_some() { Opcode::SEND_IMM } else { Opcode::SEND }, 0)
            }
            What::Write(data, at) => {
                let bytes = gather(a, data);
                scatter(b, &[(*at, bytes.len())], &bytes);
                if imm.is_some() {
                    receive(CqeOpcode::RESP_WR_IMM, bytes.len());
                }
                (if imm.is_some() { Opcode::RDMA_WRITE_IMM } else { Opcode::RDMA_WRITE }, 0)
            }
            What::Read(to, at) => {
                scatter(a, to, &b[*at..at + total(to)]);
                (Opcode::RDMA_READ, total(to))
            }
            What::CompareSwap { word, swap, result, .. } => {
                let (old, new) = (value(b, *word), *swap);
                words[i] = old;
                if compare(&request.what, old) == old {
                    scatter(b, &[(*word, 8)], &new.to_ne_bytes());
                }
                scatter(a, &[(*result, 8)], &old.to_ne_bytes());
                (Opcode::ATOMIC_CS, 8)
            }
            What::FetchAdd { word, add, result } => {
                let old = value(b, *word);
                scatter(b, &[(*word, 8)], &old.wrapping_add(*add).to_ne_bytes());
                scatter(a, &[(*result, 8)], &old.to_ne_bytes());
                (Opcode::ATOMIC_FA, 8)
            }
            What::Nop => (Opcode::NOP, 0),
        };
        outcome.sent.push((i as u64, opcode, len));
    }
    (outcome, words)
}

pub(crate) fn value(memory: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(memory[at..at + 8].try_into().unwrap())
}

/// `None` compares with what is there, so that it hits.
pub(crate) fn compare(what: &What, there: u64) -> u64 {
    match what {
        What::CompareSwap { compare, .. } => compare.unwrap_or(there),
        _ => unreachable!("only a compare-and-swap compares"),
    }
}
