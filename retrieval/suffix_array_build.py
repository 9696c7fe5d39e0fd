"""Building a suffix array: the text packed, its suffixes sorted, their keys and the keys' buckets written.

Sorting (`suffix_sorting`) is nearly all of the work and works on plain int32, nine bytes per token beside the tokens; what
is kept is packed from its result (`packed`) and is all that the arrays of `suffix_array` hold. Then the frequent contexts
are collected from the sorted rows (`frequent_contexts_build`). Linear time on any text.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from redraft.retrieval.edge_rows import EDGE_COLUMNS
from redraft.retrieval.frequent_contexts import CONTEXT_COLUMNS, LEAST_ROWS
from redraft.retrieval.frequent_contexts_build import write_frequent_contexts
from redraft.retrieval.kernel import kernel
from redraft.retrieval.packed import n_words, pack
from redraft.retrieval.suffix_array import (
    BUCKET_BITS,
    BUCKETS,
    KEY_BITS,
    KEY_STRIDE,
    KEY_TOKENS,
    POSITION_BITS,
    SHIFT,
    TEXT_BITS,
    N,
    SuffixArray,
    array_sizes,
    as_suffix_array,
    token_after,
)
from redraft.retrieval.suffix_sorting import sort_suffixes
from redraft.retrieval.tokens import as_tokens

__all__ = ["array_words", "build_suffix_array", "starts"]


@kernel(allocates=False)
def _write_keys(array, keys):
    for key in range(keys.shape[0]):
        keys[key, :] = 0
        for depth in range(KEY_TOKENS):
            keys[key, depth] = token_after(array, key * KEY_STRIDE, depth) + 1
            if keys[key, depth] == 0:
                break


@kernel(allocates=False)
def _write_buckets(keys, shift, buckets):
    """`keys`: int64[keys, 5] as `_write_keys` leaves them."""
    bucket = 0
    for key in range(keys.shape[0]):
        while bucket <= (keys[key, 0] - 1) >> shift:
            buckets[bucket] = key
            bucket += 1
    buckets[bucket:] = keys.shape[0]


def array_words(sizes: np.ndarray) -> dict[str, int]:
    """How many words each of the packed arrays has."""
    n = int(sizes[N])
    return {
        "text": n_words(n + 1, int(sizes[TEXT_BITS])),
        "suffixes": n_words(n, int(sizes[POSITION_BITS])),
        "keys": n_words(-(-n // KEY_STRIDE) * KEY_TOKENS, int(sizes[KEY_BITS])),
        "buckets": n_words(int(sizes[BUCKETS]) + 1, int(sizes[BUCKET_BITS])),
    }


def build_suffix_array(
    tokens,
    document_ends: np.ndarray,
    create: Callable[[str, int], np.ndarray] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    least_rows: int = LEAST_ROWS,
) -> SuffixArray:
    """Sort the suffixes of `tokens` (int32[n]) within the documents that end at document_ends (int64[documents]).

    create: makes the array of that name with so many rows (a mapped file, say). least_rows: a context that occurs as often
    is a frequent one. Raises ValueError if the last end is not n, and beyond 2,147,483,647 tokens and documents.
    """
    tokens, ends = as_tokens(tokens), np.ascontiguousarray(document_ends, np.int64)
    n = len(tokens)
    if (int(ends[-1]) if len(ends) else 0) != n or (len(ends) and (ends[0] < 0 or (np.diff(ends) < 0).any())):
        raise ValueError(f"document_ends: wanted ascending ends, the last one {n}, got {ends[-3:].tolist()} at the end")
    sizes, create = array_sizes(n, int(tokens.max(initial=-1))), create or _in_memory
    out = {name: create(name, words) for name, words in array_words(sizes).items()}
    pack(_entries(tokens, ends), sizes[TEXT_BITS], np.asarray(out["text"]))
    pack(sort_suffixes(tokens, ends, progress), sizes[POSITION_BITS], np.asarray(out["suffixes"]))
    none = _in_memory("contexts", 0), _in_memory("context_edges", 0)
    array = as_suffix_array(*out.values(), *none, sizes)
    keys = np.empty((-(-n // KEY_STRIDE), KEY_TOKENS), np.int64)
    _write_keys(array, keys)
    pack(keys.reshape(-1), sizes[KEY_BITS], np.asarray(out["keys"]))
    buckets = np.empty(sizes[BUCKETS] + 1, np.int64)
    _write_buckets(keys, sizes[SHIFT], buckets)
    pack(buckets, sizes[BUCKET_BITS], np.asarray(out["buckets"]))
    return as_suffix_array(*out.values(), *write_frequent_contexts(array, least_rows, create), sizes)


_ROWS = {"contexts": CONTEXT_COLUMNS, "context_edges": EDGE_COLUMNS}  # int32; the others are words


def _in_memory(name: str, rows: int) -> np.ndarray:
    return np.empty((rows, _ROWS[name]), np.int32) if name in _ROWS else np.empty(rows, np.uint32)


def _entries(tokens: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """uint32[n + 1]: what `SuffixArray.text` holds."""
    entries = np.empty(len(tokens) + 1, np.uint32)
    np.left_shift(tokens.view(np.uint32), np.uint32(1), out=entries[:-1])
    entries[starts(ends)] |= np.uint32(1)
    entries[-1] = 1
    return entries


def starts(ends: np.ndarray) -> np.ndarray:
    """Where the documents that are not empty start, given all ends."""
    begins = np.concatenate([[0], ends])[:-1]
    return begins[begins < ends]
