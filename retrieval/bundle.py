"""Many arrays as one argument of a kernel.

Numba unpacks every array that Python hands to a kernel, at about 0.2 microseconds each: with the fifty arrays that a
draft looks at, a quarter of its time. So arrays that stay the same from call to call are described once, as addresses
and lengths in a single int64 vector, and the kernel makes them from that vector at no cost.

Whoever calls a kernel with a `Bundle` holds on to the bundle until the kernel has returned: it keeps the arrays alive.
A bundle is never changed; a new one replaces it when an array is replaced.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numba.np import arrayobj

from redraft.retrieval.kernel import inner

__all__ = [
    "Bundle",
    "float32_rows",
    "float32s",
    "float64s",
    "int32_rows",
    "int32s",
    "int64_rows",
    "int64s",
    "uint8s",
    "uint32_rows",
    "uint32s",
]  # fmt: skip


_PLACE = struct.Struct("=qq")


class Bundle:
    """Attributes: addresses: int64[2 n], address and length (first dimension) of each array; arrays: those arrays;
    place: address and length of `addresses` as the bytes of two int64, to be strung together into a list of bundles
    (`int64s` finds them in it)."""

    __slots__ = ("addresses", "arrays", "place")

    def __init__(self, arrays, like: Bundle | None = None):
        """`like`: a bundle of as many arrays, of which those that are in both need not be looked at again."""
        self.arrays = tuple(arrays)
        if like is None:
            self.addresses = np.array([_place_of(i, array) for i, array in enumerate(self.arrays)], np.int64).reshape(-1)
        else:
            self.addresses = like.addresses.copy()
            for i, (array, known) in enumerate(zip(self.arrays, like.arrays, strict=True)):
                if array is not known:
                    self.addresses[2 * i : 2 * i + 2] = _place_of(i, array)
        self.place = _PLACE.pack(self.addresses.__array_interface__["data"][0], len(self.addresses))


def _place_of(i: int, array: np.ndarray) -> tuple[int, int]:
    flags = array.flags
    if not flags.c_contiguous:
        raise ValueError(f"bundle: array {i} is not C-contiguous")
    if flags.writeable and array.size:  # a fifth of the time that the other way takes
        return ctypes.addressof(ctypes.c_char.from_buffer(array)), len(array)
    return array.__array_interface__["data"][0], len(array)


def _maker(numba_type, dtype, columns: int | None):
    """A function (addresses, i) -> array i of a bundle, of `dtype`; two-dimensional if `columns` is given."""
    if numba.config.DISABLE_JIT:
        return functools.partial(_array_at, dtype=np.dtype(dtype), columns=columns)
    array_type = types.Array(numba_type, 1 if columns is None else 2, "C")
    item = np.dtype(dtype).itemsize

    @intrinsic
    def array_at(typing_context, address, length):
        def codegen(context, builder, signature, arguments):
            array = context.make_array(array_type)(context, builder)
            shape, strides = [arguments[1]], [context.get_constant(types.intp, item)]
            if columns is not None:
                shape.append(context.get_constant(types.intp, columns))
                strides.insert(0, context.get_constant(types.intp, item * columns))
            arrayobj.populate_array(
                array,
                data=builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(numba_type))),
                shape=shape,
                strides=strides,
                itemsize=context.get_constant(types.intp, item),
                meminfo=None,
            )
            return array._getvalue()

        return array_type(types.int64, types.int64), codegen

    @inner
    def array_of_bundle(addresses, i):
        return array_at(addresses[2 * i], addresses[2 * i + 1])

    return array_of_bundle


def _array_at(addresses, i, dtype: np.dtype, columns: int | None) -> np.ndarray:
    """What the compiled maker does, for runs without compilation."""
    shape = (int(addresses[2 * i + 1]),) if columns is None else (int(addresses[2 * i + 1]), columns)
    size = dtype.itemsize * int(np.prod(shape))
    if size == 0:
        return np.empty(shape, dtype)
    return np.frombuffer((ctypes.c_char * size).from_address(int(addresses[2 * i])), dtype).reshape(shape)


def int32_rows(columns: int):
    """A maker of int32[n, columns]."""
    return _maker(types.int32, np.int32, columns)


def float32_rows(columns: int):
    """A maker of float32[n, columns]."""
    return _maker(types.float32, np.float32, columns)


def int64_rows(columns: int):
    """A maker of int64[n, columns]."""
    return _maker(types.int64, np.int64, columns)


def uint32_rows(columns: int):
    """A maker of uint32[n, columns]."""
    return _maker(types.uint32, np.uint32, columns)


int32s = _maker(types.int32, np.int32, None)
int64s = _maker(types.int64, np.int64, None)
float32s = _maker(types.float32, np.float32, None)
float64s = _maker(types.float64, np.float64, None)
uint32s = _maker(types.uint32, np.uint32, None)
uint8s = _maker(types.uint8, np.uint8, None)
