//! No module: the NVIDIA driver's resource-manager interface.
