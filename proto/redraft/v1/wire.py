"""Arrays to and from the `bytes` fields of the protocol: little-endian, four bytes per value; and the plain stream's framing.

Packing 8 000 tokens this way takes about 4 us, as `repeated int32` about 600 us. Unpacked arrays are views on the
message's own bytes and therefore read-only.
"""

from __future__ import annotations

import struct

import numpy as np

__all__ = ["FRAME", "framed", "join_float32", "join_int32", "pack_float32", "pack_int32", "unpack_float32", "unpack_int32"]

FRAME = struct.Struct("<I")  # stands before every message of a plain stream: its size in bytes

_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


def framed(message) -> bytes:
    """A protobuf message as it goes over a plain stream."""
    data = message.SerializeToString()
    return FRAME.pack(len(data)) + data


def pack_int32(array) -> bytes:
    """The values of `array` (any shape, row by row) as little-endian int32."""
    if type(array) is not np.ndarray or array.dtype != _INT32:
        array = np.asarray(array, _INT32)
    return array.tobytes()


def pack_float32(array) -> bytes:
    """The values of `array` (any shape, row by row) as little-endian float32."""
    if type(array) is not np.ndarray or array.dtype != _FLOAT32:
        array = np.asarray(array, _FLOAT32)
    return array.tobytes()


def unpack_int32(data: bytes, what: str) -> np.ndarray:
    """int32[len(data) / 4], read-only. `what` names the field in the ValueError for a length that is no multiple of 4."""
    return _unpack(data, _INT32, what)


def unpack_float32(data: bytes, what: str) -> np.ndarray:
    """float32[len(data) / 4], read-only. `what` names the field in the ValueError for a length that is no multiple of 4."""
    return _unpack(data, _FLOAT32, what)


def join_int32(parts: tuple[bytes, ...]) -> np.ndarray:
    """The values of all parts, each a whole number of them, one part after the other; a copy."""
    return _join(parts, _INT32)


def join_float32(parts: tuple[bytes, ...]) -> np.ndarray:
    """The values of all parts, each a whole number of them, one part after the other; a copy."""
    return _join(parts, _FLOAT32)


def _join(parts: tuple[bytes, ...], wire: np.dtype) -> np.ndarray:
    array = np.frombuffer(bytearray().join(parts), wire)
    return array if wire.isnative else array.astype(wire.newbyteorder("="))


def _unpack(data: bytes, wire: np.dtype, what: str) -> np.ndarray:
    if len(data) % 4:
        raise ValueError(f"{what}: wanted a multiple of 4 bytes ({wire.newbyteorder('=')}), got {len(data)} bytes")
    array = np.frombuffer(data, wire)
    return array if wire.isnative else array.astype(wire.newbyteorder("="))
