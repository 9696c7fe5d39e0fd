"""Suffix array over token ids: the smallest index, for corpora that do not fit into memory as an automaton.

All suffixes of all documents in sorted order (U. Manber, G. Myers, 1993; for drafting: REST, infini-gram). The places
where a context occurs are neighbours there: an interval of rows, found by binary search, whose size is the count. What
followed the context lies in the interval in order of token, and the rows are the positions, for provenance.

A plain binary search touches two far-apart places at each of its 2 log n probes. So every 32nd row has its first
five tokens written out: the search runs over these keys, which are dense, and only its last five probes look into
the corpus. Where the keys of each first token begin is written down as well, so a search starts among these.

All arrays are packed bit by bit (`packed`) and read where they are. Where a document starts is a bit of its
first token's entry, so that a probe that reads a token knows from the same cache line whether its document ended before.

Contexts that occur often are not searched at all: what a draft asks of them is written out (`frequent_contexts`), and the
array answers for the rarer ones. A draft holds cursors in both (`suffix_array_cursor`, `suffix_array_levels`).

Cost: with 100M tokens of a vocabulary of 50,000 ids 6.5 bytes per token on disk (2.1 the text, 3.4 the positions, 0.3 the
keys, 0.7 the frequent contexts), with 152,000 ids 6.8, and 8 per document; O(log n) per search. The frozen automaton is
quicker, in ten times the space.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from redraft.retrieval.kernel import inner, kernel
from redraft.retrieval.packed import bits_for, gather, packed_at, unpack

__all__ = [
    "BUCKETS", "BUCKET_BITS", "KEY_BITS", "KEY_STRIDE", "KEY_TOKENS", "POSITION_BITS", "SHIFT", "TEXT_BITS", "N",
    "SuffixArray", "Text", "array_first", "array_search", "array_sizes", "as_suffix_array", "bucket_bounds", "entries_of",
    "highest_key", "key_token", "position_of", "positions", "read_suffix", "token_after", "token_at",
]  # fmt: skip

KEY_STRIDE = 32  # every so many rows has a key
KEY_TOKENS = 5


class SuffixArray(NamedTuple):
    """Arrays of the index, C-contiguous and read-only (so that kernels compile once, mapped or not); the first four are
    uint32 words of packed values.
    """

    text: np.ndarray  # n + 1 entries: token id * 2 + 1 where a document starts, + 0 elsewhere; the last one is 1
    suffixes: np.ndarray  # n positions in the order of the rest of their document
    keys: np.ndarray  # 5 for every 32nd row: id + 1 of its suffix's first tokens, 0 beyond its document
    buckets: np.ndarray  # for b from 0 on the first key whose first token is at least b << shift; then how many keys
    contexts: np.ndarray  # int32[contexts + 1, 7], int32[edges, 3]: the frequent contexts
    context_edges: np.ndarray
    sizes: np.ndarray  # int64[N_SIZES], by the names below


N, TEXT_BITS, POSITION_BITS, KEY_BITS, BUCKET_BITS, BUCKETS, SHIFT, N_SIZES = range(8)


@inner
def position_of(array, row):
    return packed_at(array.suffixes, row, array.sizes[POSITION_BITS])


@inner
def _entry(array, position):
    return packed_at(array.text, position, array.sizes[TEXT_BITS])


@inner
def key_token(array, key, i):
    """Token `i` of a key, -1 beyond its document."""
    return packed_at(array.keys, key * KEY_TOKENS + i, array.sizes[KEY_BITS]) - 1


@inner
def token_at(array, position, depth):
    """Token `depth` places behind `position`, -1 if its document ends there. `depth` tokens must be in it."""
    entry = _entry(array, position + depth)
    if depth > 0 and entry & 1:
        return np.int64(-1)
    return entry >> 1


@inner
def token_after(array, row, depth):
    """The same for the suffix of `row`."""
    return token_at(array, position_of(array, row), depth)


@inner
def read_suffix(array, row, tokens):
    """Fill `tokens` with the first ones of the suffix of `row`, -1 beyond its document."""
    position, i = position_of(array, row), 0
    while i < tokens.shape[0]:
        entry = _entry(array, position + i)
        if i > 0 and entry & 1:
            break
        tokens[i] = entry >> 1
        i += 1
    tokens[i:] = -1


@inner
def _compare_key(array, key, window, length):
    """Sign of (the suffix of a key - the pattern), as far as the key goes; 0 if it starts with the pattern.

    The pattern is the last `length` tokens of the context; window[0] is its newest token, as in all kernels here.
    """
    for i in range(min(length, KEY_TOKENS)):
        token = key_token(array, key, i)
        wanted = window[length - 1 - i]
        if token != wanted:
            return -1 if token < wanted else 1
    return 0


@inner
def _compare_row(array, row, window, length):
    """Sign of (the suffix of `row` - the pattern); 0 if it starts with the pattern."""
    position = position_of(array, row)
    for i in range(length):
        entry = _entry(array, position + i)
        if i > 0 and entry & 1:
            return -1
        token, wanted = entry >> 1, window[length - 1 - i]
        if token != wanted:
            return -1 if token < wanted else 1
    return 0


@inner
def _first_key(array, low, high, window, length, sign):
    """First key in low..high - 1 that compares at least `sign` (0: not below the pattern, 1: above it), else high."""
    while low < high:
        middle = (low + high) >> 1
        if _compare_key(array, middle, window, length) < sign:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def _first_row(array, low, high, window, length, sign):
    """The same for rows."""
    while low < high:
        middle = (low + high) >> 1
        if _compare_row(array, middle, window, length) < sign:
            low = middle + 1
        else:
            high = middle
    return low


@inner(inline=False)
def array_search(array, window, length):
    """(low, high): the rows that start with the last `length` >= 1 tokens of the context; low = high: none do."""
    n = array.sizes[N]
    bucket = np.int64(window[length - 1]) >> array.sizes[SHIFT]
    if bucket >= array.sizes[BUCKETS]:
        return n, n
    first = packed_at(array.buckets, bucket, array.sizes[BUCKET_BITS])
    beyond = packed_at(array.buckets, bucket + 1, array.sizes[BUCKET_BITS])
    first = _first_key(array, first, beyond, window, length, 0)
    step = np.int64(1)  # the keys above the pattern are mostly near
    while first + step < beyond and _compare_key(array, first + step, window, length) == 0:
        step *= 2
    last = _first_key(array, first, min(beyond, first + step), window, length, 1)
    # Row first * 32 is the first key not below the pattern, so the first row is among the 32 up to there; likewise for
    # the end. Keys that say nothing of tokens beyond the fifth leave the whole range of equal keys.
    beyond, short = min(n, last * KEY_STRIDE), length <= KEY_TOKENS
    until = min(n, first * KEY_STRIDE) if short else beyond
    low = _first_row(array, max(np.int64(0), (first - 1) * KEY_STRIDE + 1), until, window, length, 0)
    if low == n or _compare_row(array, low, window, length) != 0:
        return low, low
    high = low + 1
    if short and last > first:
        high = max(high, (last - 1) * KEY_STRIDE + 1)
    step = np.int64(1)  # the rows are mostly few as well
    while high + step < beyond and _compare_row(array, high + step, window, length) == 0:
        high += step + 1
        step *= 2
    high = _first_row(array, high, min(beyond, high + step), window, length, 1)
    return low, high


@kernel(allocates=False)
def array_first(array, low, high):
    """The first position among rows low to high - 1; n for none."""
    first = array.sizes[N]
    for row in range(low, high):
        first = min(first, position_of(array, row))
    return first


def array_sizes(n: int, max_token: int) -> np.ndarray:
    """`SuffixArray.sizes` of n tokens of ids up to max_token. There is one bucket for two keys at most."""
    n_keys, shift = -(-n // KEY_STRIDE), 0
    while (max_token >> shift) >= max(1, n_keys // 2):
        shift += 1
    bits = bits_for(max_token) + 1, bits_for(n - 1), bits_for(max_token + 1), bits_for(n_keys)
    return np.array([n, *bits, (max_token >> shift) + 1, shift], np.int64)


def as_suffix_array(text, suffixes, keys, buckets, contexts, context_edges, sizes) -> SuffixArray:
    """Read-only views of the arrays, whatever holds them."""
    parts = text, suffixes, keys, buckets, contexts, context_edges, sizes
    views = [np.asarray(part).view() for part in parts]
    for view in views:
        view.flags.writeable = False
    return SuffixArray(*views)


def positions(array: SuffixArray, low: int, high: int) -> np.ndarray:
    """int64[high - low]: the positions of rows low to high - 1."""
    found = np.empty(high - low, np.int64)
    unpack(array.suffixes, array.sizes[POSITION_BITS], low, found)
    return found


def entries_of(array: SuffixArray, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """(int32[end - begin] tokens from position `begin` on, bool[end - begin] whether a document starts there)."""
    entries = np.empty(end - begin, np.int64)
    unpack(array.text, array.sizes[TEXT_BITS], begin, entries)
    return (entries >> 1).astype(np.int32), (entries & 1).astype(bool)


def highest_key(array: SuffixArray) -> int:
    """The highest token id among the keys, -1 if there is none."""
    found = np.empty(-(-array.sizes[N] // KEY_STRIDE) * KEY_TOKENS, np.int64)
    unpack(array.keys, array.sizes[KEY_BITS], 0, found)
    return int(found.max(initial=0)) - 1


def bucket_bounds(array: SuffixArray) -> np.ndarray:
    """int64[buckets + 1]: the keys at which buckets begin, and how many keys there are."""
    bounds = np.empty(array.sizes[BUCKETS] + 1, np.int64)
    unpack(array.buckets, array.sizes[BUCKET_BITS], 0, bounds)
    return bounds


class Text:
    """The tokens of a suffix array, read like int32[n]: a slice or positions unpack what they ask for."""

    def __init__(self, array: SuffixArray) -> None:
        self._array = array

    def __len__(self) -> int:
        return int(self._array.sizes[N])

    def __getitem__(self, at) -> np.ndarray:
        if isinstance(at, slice):
            begin, end, step = at.indices(len(self))
            return entries_of(self._array, begin, max(begin, end))[0] if step == 1 else self[np.arange(begin, end, step)]
        places = np.asarray(at, np.int64)
        if places.size and not 0 <= places.min() <= places.max() < len(self):
            raise IndexError(f"positions: wanted 0..{len(self) - 1}, got {places.min()}..{places.max()}")
        entries = np.empty(places.shape, np.int64)
        gather(self._array.text, self._array.sizes[TEXT_BITS], places.reshape(-1), entries.reshape(-1))
        return (entries >> 1).astype(np.int32)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self[:].astype(dtype or np.int32, copy=False)
