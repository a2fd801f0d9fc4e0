//! Messaging on GPU streams in the manner of LibMP.
