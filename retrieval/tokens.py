"""Checks on what comes from outside: every public entry point passes what it was given through here once.

Inside the package a token array is int32, one-dimensional, C-contiguous and trusted.
"""

from __future__ import annotations

import numbers
import operator

import numpy as np

__all__ = ["as_count", "as_probability", "as_step", "as_tokens"]

_INT32_MAX = 2**31 - 1
_FEW = 32


def as_tokens(values, vocab_size: int | None = None, *, what: str = "tokens") -> np.ndarray:
    """Return `values` as int32[n], C-contiguous; shares memory with `values` where no conversion is needed.

    Any one-dimensional array-like of whole numbers will do (lists, int64 arrays, torch tensors on the CPU). `what`
    names the argument in errors. Raises TypeError for ids that are not integers, ValueError for another number of
    dimensions, for a negative id and for an id at or beyond `vocab_size` (None: any non-negative int32).
    """
    array = np.asarray(values)
    if array.size == 0 and array.ndim <= 1:
        return np.empty(0, np.int32)
    if array.ndim != 1:
        raise ValueError(f"{what}: wanted a one-dimensional sequence of token ids, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what}: wanted integer token ids, got {array.dtype} values such as {array[0]!r}")
    if len(array) <= _FEW:  # a step's tokens: NumPy's reductions, or min and max, would take longer than all else here
        few = array.tolist()
        few.sort()
        low, high = few[0], few[-1]
    else:
        low, high = int(array.min()), int(array.max())
    limit = _INT32_MAX if vocab_size is None else vocab_size - 1
    if low < 0:
        raise ValueError(f"{what}: token id {low} at position {int(array.argmin())} is negative")
    if high > limit:
        wanted = f"the vocabulary has {vocab_size} ids" if vocab_size is not None else "ids must fit in int32"
        raise ValueError(f"{what}: token id {high} at position {int(array.argmax())} is too large, {wanted}")
    return np.asarray(array, np.int32, order="C")


def as_count(value, most: int, what: str) -> int:
    """Return a whole number of 0..`most` as an int. Raises TypeError for other types, ValueError beyond the limits."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{what}: wanted a whole number of 0..{most}, got {value!r}") from None
    if not 0 <= count <= most:
        raise ValueError(f"{what}: wanted 0..{most}, got {count}")
    return count


def as_probability(value, what: str) -> float:
    """Return a number of 0..1 as a float (kernels are compiled for floats). Raises TypeError, ValueError."""
    if type(value) is not float and not isinstance(value, numbers.Real):  # the latter takes a third of a microsecond
        raise TypeError(f"{what}: wanted a number of 0..1, got {value!r}")
    if not 0 <= value <= 1:
        raise ValueError(f"{what}: wanted 0..1, got {value}")
    return float(value)


def as_step(item, session_type: type) -> tuple:
    """(session, tokens, candidates, hidden, proposal) from the two to five of them that a batch has for each session.

    What is not given is None. Raises TypeError for other things than tuples and lists, other lengths and other sessions.
    """
    if not isinstance(item, (tuple, list)) or not 2 <= len(item) <= 5:
        came = f"{len(item)} things" if isinstance(item, (tuple, list)) else type(item).__name__
        raise TypeError(f"step: wanted (session, tokens[, candidates[, hidden[, proposal]]]) for each session, got {came}")
    if not isinstance(item[0], session_type):
        raise TypeError(f"step: wanted a session of this drafter first, got {type(item[0]).__name__}")
    return (*item, None, None, None)[:5]
