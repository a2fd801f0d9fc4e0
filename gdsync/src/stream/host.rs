//! The host engine.
/// x
#[derive(Debug)]
pub struct HostStreamConfig;
