"""Memory of objects without DLPack: by ``__cuda_array_interface__``, or a writable buffer such as bytearray."""

import ctypes
from typing import Any


def hold(thing: Any, target: bool) -> tuple[int, int, bool, Any]:
    """Address, bytes, whether it is memory of CUDA, and what keeps it in its place."""
    array = getattr(thing, "__cuda_array_interface__", None)
    if array is not None:
        address, is_read_only = array["data"]
        if target and is_read_only:
            raise ValueError("the tensor is read-only: receive into a copy of it, or make it writable")
        return address, _contiguous(array), True, thing
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
    return ctypes.addressof(held), view.nbytes, False, held


def _contiguous(array: dict[str, Any]) -> int:
    kind, shape = array["typestr"], array["shape"]
    if not kind[2:].isdigit():
        raise ValueError(f"typestr is '{kind}': expected as '<f4'")
    nbytes = int(kind[2:])
    for size, stride in zip(reversed(shape), reversed(array.get("strides") or [None] * len(shape))):
        if size > 1 and stride not in (None, nbytes):
            raise ValueError("the tensor is not contiguous: pass tensor.contiguous(), or a part that is")
        nbytes *= size
    return nbytes
