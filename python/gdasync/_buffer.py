"""Memory of writable objects with the buffer protocol, such as bytearray and mmap."""

import ctypes
from typing import Any


def hold(thing: Any) -> tuple[int, int, Any]:
    """Address, bytes, and what keeps the memory in its place."""
    try:
        view = memoryview(thing)
    except TypeError:
        name = type(thing).__name__
        raise TypeError(
            f"'{name}' has no memory: expected a tensor (DLPack or __cuda_array_interface__) or a writable buffer"
        ) from None
    if view.readonly:
        raise ValueError("the buffer is read-only: use a bytearray or a tensor")
    if not view.contiguous or not view.nbytes:
        raise ValueError("the buffer is empty or not contiguous: expected one byte or more, one after the other")
    held = (ctypes.c_char * view.nbytes).from_buffer(view)
    return ctypes.addressof(held), view.nbytes, held
