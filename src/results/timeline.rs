//! The stages of messages, as `gdasync trace --timeline` writes them.

use super::node::Node;
use super::{Results, Shape};

/// What a message goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stage {
    /// Its key in the file.
    pub(crate) name: &'static str,
    /// What lies between the stage before and this one.
    pub(crate) until: &'static str,
}

/// The stages in their order.
pub(crate) const STAGES: [Stage; 5] = [
    Stage { name: "enqueue", until: "" },
    Stage { name: "trigger", until: "enqueued, waits for its trigger" },
    Stage { name: "fetched", until: "triggered, not fetched yet" },
    Stage { name: "completed", until: "fetched, under way" },
    Stage { name: "released", until: "completed, its release not seen by the CPU" },
];

/// A message and when it reached its stages.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Message {
    pub(crate) rank: u64,
    pub(crate) seq: u64,
    /// Microseconds, in the order of [`STAGES`]; none for stages that it did not reach.
    pub(crate) times: [Option<f64>; STAGES.len()],
}

pub(super) fn read(root: &Node<'_>, facts: Vec<(String, String)>) -> Result<Results, Shape> {
    if root.text("unit")? != "us" {
        return Err(Shape::Expected { path: "unit".into(), what: "\"us\"" });
    }
    let mut messages = Vec::new();
    for node in root.list("messages")? {
        let mut times = [None; STAGES.len()];
        for (time, stage) in times.iter_mut().zip(STAGES) {
            *time = node.number_if_any(stage.name)?;
        }
        if times.iter().all(Option::is_none) {
            return Err(node.get(STAGES[0].name).err().unwrap_or(Shape::Empty("a message without stages")));
        }
        messages.push(Message { rank: node.count("rank")?, seq: node.count("seq")?, times });
    }
    let (groups, missing) = (Vec::new(), Vec::new());
    Ok(Results { stem: String::new(), kind: "trace --timeline".into(), facts, groups, messages, missing })
}
