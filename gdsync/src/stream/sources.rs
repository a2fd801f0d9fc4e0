//! The queues that a submission uses.

use std::sync::Arc;

use super::op::{Op, Source};

/// A source of a submission, and the index of the last operation that uses it.
pub(super) type Use = (usize, Arc<dyn Source>);

/// The distinct sources of a submission.
pub(super) fn sources_of(ops: &[Op]) -> Vec<Use> {
    let mut found: Vec<Use> = Vec::new();
    for (index, op) in ops.iter().enumerate() {
        let (Op::Trigger(source, _) | Op::Await(source, _)) = op else { continue };
        match found.iter_mut().find(|(_, known)| Arc::ptr_eq(known, source)) {
            Some((last, _)) => *last = index,
            None => found.push((index, source.clone())),
        }
    }
    found
}
