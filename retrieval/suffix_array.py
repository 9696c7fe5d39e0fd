"""Suffix array over token ids: the smallest index, for corpora that do not fit into memory as an automaton.

All suffixes of all documents in sorted order (U. Manber, G. Myers, 1993; for drafting: REST, infini-gram). The places
where a context occurs are neighbours there: an interval of rows, found by binary search, whose size is the count. What
followed the context lies in the interval in order of token, and the rows are the positions, for provenance.

A plain binary search touches two far-apart places at each of its 2 log n probes. So every 32nd row has its first
five tokens written out: the search runs over these keys, which are dense, and only its last five probes look into
the corpus. Where the keys of each first token begin is written down as well, so a search starts among these. A cursor keeps its interval between steps: if the next token narrows it, that takes a search within it;
only if the match breaks, or is held to a limit, is the whole array searched again.

All arrays are packed bit by bit (`packed`) and read where they are. Where a document starts is a bit of its
first token's entry, so that a probe that reads a token knows from the same cache line whether its document ended before.

Cost: with 100M tokens of a vocabulary of 50,000 ids 5.8 bytes per token on disk (2.1 the text, 3.4 the positions, 0.3 the
keys), with 152,000 ids 6.1, and 8 per document; O(log n) per step. Successors are counted exactly in intervals
of up to 64 rows; larger ones are estimated from 64 to 256 rows at equal distances, which misses no successor that
follows more often than once in so many (rows are sorted, so this is a stratified sample) and draws nothing at random.
The frozen automaton is several times quicker and exact, in ten times the space.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from redraft.retrieval.kernel import inner, kernel
from redraft.retrieval.packed import bits_for, gather, packed_at, unpack
from redraft.retrieval.tokens import as_tokens

__all__ = [
    "BUCKETS", "BUCKET_BITS", "KEY_BITS", "KEY_STRIDE", "KEY_TOKENS", "POSITION_BITS", "SHIFT", "SUCCESSORS",
    "TEXT_BITS", "N", "SuffixArray", "Text", "array_advance", "array_first", "array_longest", "array_search",
    "array_shorten", "array_sizes", "array_successors", "as_suffix_array", "bucket_bounds", "entries_of", "find",
    "highest_key", "positions", "successors", "token_after",
]  # fmt: skip

KEY_STRIDE = 32  # every so many rows has a key
KEY_TOKENS = 5
SUCCESSORS = 8  # the most that array_successors reports
EXACT_ROWS = 64  # intervals up to this size are counted, not sampled
SAMPLED_KEYS = 256
NARROWED_ROWS = 2048  # smaller intervals are narrowed in place, larger ones searched by their keys


class SuffixArray(NamedTuple):
    """Arrays of the index, C-contiguous and read-only (so that kernels compile once, mapped or not); the first four are
    uint32 words of packed values.

    A cursor is (low, high, length): rows low to high - 1 start with the last `length` tokens of the context. The cursor
    of the empty match is (0, n, 0).
    """

    text: np.ndarray  # n + 1 entries: token id * 2 + 1 where a document starts, + 0 elsewhere; the last one is 1
    suffixes: np.ndarray  # n positions in the order of the rest of their document
    keys: np.ndarray  # 5 for every 32nd row: id + 1 of its suffix's first tokens, 0 beyond its document
    buckets: np.ndarray  # for b from 0 on the first key whose first token is at least b << shift; then how many keys
    sizes: np.ndarray  # int64[N_SIZES], by the names below


N, TEXT_BITS, POSITION_BITS, KEY_BITS, BUCKET_BITS, BUCKETS, SHIFT, N_SIZES = range(8)


@inner
def _position(array, row):
    return packed_at(array.suffixes, row, array.sizes[POSITION_BITS])


@inner
def _entry(array, position):
    return packed_at(array.text, position, array.sizes[TEXT_BITS])


@inner
def _key_token(array, key, i):
    """Token `i` of a key, -1 beyond its document."""
    return packed_at(array.keys, key * KEY_TOKENS + i, array.sizes[KEY_BITS]) - 1


@inner
def token_after(array, row, depth):
    """Token `depth` places into the suffix of `row`, -1 if its document ends there. `depth` tokens must be in it."""
    entry = _entry(array, _position(array, row) + depth)
    if depth > 0 and entry & 1:
        return np.int64(-1)
    return entry >> 1


@inner
def _compare_key(array, key, window, length):
    """Sign of (the suffix of a key - the pattern), as far as the key goes; 0 if it starts with the pattern.

    The pattern is the last `length` tokens of the context; window[0] is its newest token, as in all kernels here.
    """
    for i in range(min(length, KEY_TOKENS)):
        token = _key_token(array, key, i)
        wanted = window[length - 1 - i]
        if token != wanted:
            return -1 if token < wanted else 1
    return 0


@inner
def _compare_row(array, row, window, length):
    """Sign of (the suffix of `row` - the pattern); 0 if it starts with the pattern."""
    position = _position(array, row)
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
    below = max(np.int64(0), (first - 1) * KEY_STRIDE + 1)
    beyond = min(n, last * KEY_STRIDE)
    if length <= KEY_TOKENS:
        low = _first_row(array, below, min(n, first * KEY_STRIDE), window, length, 0)
        high = _first_row(array, max(low, (last - 1) * KEY_STRIDE + 1), beyond, window, length, 1)
    else:
        low = _first_row(array, below, beyond, window, length, 0)
        high = _first_row(array, low, beyond, window, length, 1)
    return low, high


@inner
def _first_after(array, low, high, depth, token):
    """First row in low..high - 1, which share `depth` tokens, whose next is at least `token`; high if there is none."""
    while low < high:
        middle = (low + high) >> 1
        if token_after(array, middle, depth) < token:
            low = middle + 1
        else:
            high = middle
    return low


@kernel(allocates=False)
def array_longest(array, window, limit):
    """Cursor (low, high, length) of the longest suffix of at most `limit` tokens that occurs, found from nothing.

    window: int32[>= limit], the last tokens of the context, newest first. Every suffix of what occurs occurs, so its
    length is found by bisection, the whole limit first.
    """
    low, high = np.int64(0), array.sizes[N]
    found, failed, length = np.int64(0), np.int64(limit) + 1, np.int64(limit)
    while failed - found > 1:
        first, last = array_search(array, window, length)
        if first < last:
            low, high, found = first, last, length
        else:
            failed = length
        length = (found + failed) >> 1
    return low, high, found


@inner
def array_advance(array, low, high, length, window, filled, max_length):
    """Cursor (low, high, length), int64 each, after one more token of the context.

    window: int32[>= max_length], the last tokens of the context, window[0] the new one; `filled` of them are there. The
    match is the longest suffix of at most `max_length` (>= 1) tokens that occurs in a document.
    """
    low, high, length = np.int64(low), np.int64(high), np.int64(length)
    if length < max_length:
        if high - low <= NARROWED_ROWS:
            first = _first_after(array, low, high, length, np.int64(window[0]))
            last = _first_after(array, first, high, length, np.int64(window[0]) + 1)
        else:
            first, last = array_search(array, window, length + 1)
        if first < last:
            return first, last, length + 1
    return array_longest(array, window, min(length, filled, max_length))


@inner
def array_shorten(array, low, high, length, window):
    """Cursor of the longest suffix shorter than `length` that occurs more often; (0, n, 0) if only the empty one."""
    size = high - low
    found_low, found_high = np.int64(0), array.sizes[N]
    found, failed = np.int64(0), np.int64(length)
    tried = np.int64(length) - 1
    while failed - found > 1:
        first, last = array_search(array, window, tried)
        if last - first > size:
            found_low, found_high, found = first, last, tried
        else:
            failed = tried
        tried = (found + failed) >> 1
    return found_low, found_high, found


@inner
def _offer(tokens, counts, kept, token, count):
    """Put a successor among the `kept` most frequent, ties by token; returns how many are kept."""
    place = kept
    if kept == SUCCESSORS:
        place = SUCCESSORS - 1
        if counts[place] >= count:  # tokens come in ascending order: on a tie the kept one is lower
            return kept
    else:
        kept += 1
    while place > 0 and counts[place - 1] < count:
        counts[place], tokens[place] = counts[place - 1], tokens[place - 1]
        place -= 1
    counts[place], tokens[place] = count, token
    return kept


@inner
def _sampled(array, rows, by_key, i, samples, length):
    """The next token in the i-th of `samples` rows, or keys, at equal distances; rows: (the first one, how many)."""
    row = rows[0] + i * rows[1] // samples
    if by_key:
        return _key_token(array, row, length)
    return token_after(array, row, length)


@kernel(allocates=False)
def array_successors(array, low, high, length, tokens, counts):
    """The most frequent next tokens of a cursor into tokens and counts (int32[8] each): by count, ties by token.

    Returns (kept, distinct): how many are filled, and how many different successors there are. Up to 64 rows are
    counted exactly; of more, a sample at equal distances is, and the counts are scaled to high - low. Distinct
    successors are then estimated (M. Charikar et al., "Towards estimation error guarantees for distinct values",
    2000): those met once in the sample stand for sqrt(rows / samples) each.
    """
    low, high = np.int64(low), np.int64(high)
    size = high - low
    first_key = (low + KEY_STRIDE - 1) // KEY_STRIDE
    n_keys = (high + KEY_STRIDE - 1) // KEY_STRIDE - first_key
    by_key = length < KEY_TOKENS and n_keys >= EXACT_ROWS
    samples = min(size, EXACT_ROWS)
    if by_key:
        samples = min(n_keys, SAMPLED_KEYS)
    rows = low, size
    if by_key:
        rows = first_key, n_keys
    kept, distinct, once, begin = 0, 0, 0, np.int64(0)
    last = _sampled(array, rows, by_key, samples - 1, samples, length) if samples else np.int64(-1)
    while begin < samples:
        token = _sampled(array, rows, by_key, begin, samples, length)
        end = samples  # tokens ascend: the last one's run is known where it begins
        if token != last:
            end = begin + 1
            while _sampled(array, rows, by_key, end, samples, length) == token:
                end += 1
        if token >= 0:
            run = end - begin
            distinct += 1
            once += run == 1
            kept = _offer(tokens, counts, kept, token, max(1, run * size // samples))
        begin = end
    return kept, distinct - once + np.int64(once * np.sqrt(size / max(samples, 1)))


@kernel(allocates=False)
def array_first(array, low, high):
    """The first position among rows low to high - 1; n for none."""
    first = array.sizes[N]
    for row in range(low, high):
        first = min(first, _position(array, row))
    return first


def array_sizes(n: int, max_token: int) -> np.ndarray:
    """`SuffixArray.sizes` of n tokens of ids up to max_token. There is one bucket for two keys at most."""
    n_keys, shift = -(-n // KEY_STRIDE), 0
    while (max_token >> shift) >= max(1, n_keys // 2):
        shift += 1
    bits = bits_for(max_token) + 1, bits_for(n - 1), bits_for(max_token + 1), bits_for(n_keys)
    return np.array([n, *bits, (max_token >> shift) + 1, shift], np.int64)


def as_suffix_array(text, suffixes, keys, buckets, sizes) -> SuffixArray:
    """Read-only views of the arrays, whatever holds them."""
    views = [np.asarray(array).view() for array in (text, suffixes, keys, buckets, sizes)]
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


def find(array: SuffixArray, context, max_length: int = 32) -> tuple[int, int, int]:
    """Cursor (low, high, length) of the longest suffix of `context`, of at most `max_length` tokens, that occurs.

    `positions(array, low, high)` are where it starts.
    """
    if max_length < 1:
        raise ValueError(f"max_length: wanted at least 1, got {max_length}")
    window = np.ascontiguousarray(as_tokens(context, what="context")[: -max_length - 1 : -1])
    low, high, length = array_longest(array, window, len(window))
    return int(low), int(high), int(length)


def successors(array: SuffixArray, low: int, high: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, counts), int32 each: up to eight most frequent next tokens of a cursor; see `array_successors`."""
    tokens, counts = np.empty(SUCCESSORS, np.int32), np.empty(SUCCESSORS, np.int32)
    kept, _ = array_successors(array, low, high, length, tokens, counts)
    return tokens[:kept], counts[:kept]
