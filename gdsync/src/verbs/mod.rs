//! Devices, protection domains, memory regions, completion queues and queue pairs.
use std::fmt;
/// placeholder
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState { /// x
    Reset }
impl fmt::Display for QpState { fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str("RESET") } }
/// placeholder
#[derive(Clone, Debug, thiserror::Error)]
#[error("x")]
pub struct CompletionError;
