//! Each probe, made to complain.
