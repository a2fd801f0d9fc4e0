//! Legal lists of work requests, and ways to drive them through queues.

use std::ops::Range;

use proptest::prelude::*;

/// Bytes of memory on each side.
pub(crate) const REGION: usize = 48 << 10;
pub(crate) const INLINE: usize = 100;

/// Parts of a region, in list order: offset and length.
pub(crate) type Parts = Vec<(usize, usize)>;

#[derive(Clone, Debug)]
pub(crate) enum Data {
    Parts(Parts),
    Inline(Vec<u8>),
}

#[derive(Clone, Debug)]
pub(crate) enum What {
    /// With the buffers of the receive it meets.
    Send(Data, Parts),
    /// To this offset.
    Write(Data, usize),
    Read(Parts, usize),
    CompareSwap {
        word: usize,
        compare: Option<u64>,
        swap: u64,
        result: usize,
    },
    FetchAdd {
        word: usize,
        add: u64,
        result: usize,
    },
    Nop,
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) what: What,
    pub(crate) imm: Option<u32>,
    pub(crate) fence: bool,
}

/// How the list is driven.
#[derive(Clone, Debug)]
pub(crate) struct Drive {
    pub(crate) max_send_wr: usize,
    pub(crate) max_recv_wr: usize,
    pub(crate) batch: usize,
    /// Polls between two posts, in turn.
    pub(crate) polls: Vec<usize>,
    pub(crate) by_stream: bool,
    pub(crate) two_hcas: bool,
}

pub(crate) fn total(parts: &[(usize, usize)]) -> usize {
    parts.iter().map(|p| p.1).sum()
}

pub(crate) fn parts(min: usize) -> impl Strategy<Value = Parts> {
    let len = prop_oneof![4 => 0usize..70, 3 => 0usize..3000, 1 => 0usize..13_600];
    let part = (0..REGION, len).prop_map(|(at, len)| (at.min(REGION - len), len));
    prop::collection::vec(part, min..=3)
}

pub(crate) fn data() -> impl Strategy<Value = Data> {
    prop_oneof![
        3 => parts(0).prop_map(Data::Parts),
        1 => prop::collection::vec(any::<u8>(), 0..=INLINE).prop_map(Data::Inline),
    ]
}

impl Data {
    fn len(&self) -> usize {
        match self {
            Data::Parts(parts) => total(parts),
            Data::Inline(bytes) => bytes.len(),
        }
    }
}

/// Makes `parts` hold `len` bytes: the last one grows.
pub(crate) fn grown(mut parts: Parts, len: usize) -> Parts {
    let missing = len.saturating_sub(total(&parts));
    if missing > 0 {
        let (at, last) = parts.pop().unwrap_or((0, 0));
        let last = last + missing;
        parts.push((at.min(REGION - last), last));
    }
    parts
}

pub(crate) fn what() -> impl Strategy<Value = What> {
    let word = || (0..16usize).prop_map(|i| 8 * i);
    let result = 0..REGION - 8;
    prop_oneof![
        3 => (data(), parts(0)).prop_map(|(d, to)| { let to = grown(to, d.len()); What::Send(d, to) }),
        3 => (data(), 0..REGION).prop_map(|(d, at)| { let at = at.min(REGION - d.len()); What::Write(d, at) }),
        2 => (parts(1), 0..REGION).prop_map(|(to, at)| {
            let to = grown(to.clone(), total(&to).max(1));
            let at = at.min(REGION - total(&to));
            What::Read(to, at)
        }),
        1 => (word(), prop::option::of(any::<u64>()), any::<u64>(), result.clone())
            .prop_map(|(word, compare, swap, result)| What::CompareSwap { word, compare, swap, result }),
        1 => (word(), any::<u64>(), result).prop_map(|(word, add, result)| What::FetchAdd { word, add, result }),
        1 => Just(What::Nop),
    ]
}

pub(crate) fn requests() -> impl Strategy<Value = Vec<Request>> {
    let one = (what(), prop::option::of(any::<u32>()), prop::bool::weighted(0.1))
        .prop_map(|(what, imm, fence)| Request { what, imm, fence });
    prop::collection::vec(one, 1..60).prop_map(|mut list| {
        fence_hazards(&mut list);
        list
    })
}

pub(crate) fn drive() -> impl Strategy<Value = Drive> {
    (1usize..6, 1usize..6, 1usize..5, prop::collection::vec(0usize..4, 1..6), any::<bool>(), any::<bool>())
        .prop_map(|(max_send_wr, max_recv_wr, batch, polls, by_stream, two_hcas)| Drive {
            max_send_wr,
            max_recv_wr,
            batch: batch.min(max_send_wr),
            polls,
            by_stream,
            two_hcas,
        })
}

pub(crate) fn ranges(parts: &[(usize, usize)]) -> Vec<Range<usize>> {
    parts.iter().map(|&(at, len)| at..at + len).collect()
}

pub(crate) fn meet(a: &[Range<usize>], b: &[Range<usize>]) -> bool {
    a.iter().any(|x| b.iter().any(|y| x.start < y.end && y.start < x.end))
}

/// READs and atomics are not ordered against what follows them: where that matters a legal list has a fence.
pub(crate) fn fence_hazards(list: &mut [Request]) {
    let (mut landing, mut read) = (vec![], vec![]);
    for request in list {
        let (from, to) = match &request.what {
            What::Send(Data::Parts(from), to) => (ranges(from), ranges(to)),
            What::Send(Data::Inline(_), to) => (vec![], ranges(to)),
            What::Write(Data::Parts(from), at) => (ranges(from), ranges(&[(*at, total(from))])),
            What::Write(Data::Inline(bytes), at) => (vec![], ranges(&[(*at, bytes.len())])),
            What::CompareSwap { word, .. } | What::FetchAdd { word, .. } => (vec![], ranges(&[(*word, 8)])),
            What::Read(..) | What::Nop => (vec![], vec![]),
        };
        request.fence |= meet(&from, &landing) || meet(&to, &read);
        if request.fence {
            (landing, read) = (vec![], vec![]);
        }
        match &request.what {
            What::Read(to, at) => {
                landing.extend(ranges(to));
                read.push(*at..at + total(to));
            }
            What::CompareSwap { result, .. } | What::FetchAdd { result, .. } => {
                landing.push(*result..result + 8)
            }
            _ => {}
        }
    }
}
