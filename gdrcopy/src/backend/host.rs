//! Plain memory, where there is no GPU.
