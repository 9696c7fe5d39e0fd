"""Suffix array over token ids: the smallest index, for corpora that do not fit into memory as an automaton.

All suffixes of all documents in sorted order (U. Manber, G. Myers, 1993; for drafting: REST, infini-gram). The places
where a context occurs are neighbours there: an interval of rows, found by binary search, whose size is the count. What
followed the context lies in the interval in order of token, and the rows are the positions, for provenance.

A plain binary search touches two far-apart places at each of its 2 log n probes. So every 32nd row has its first
five tokens written out: the search runs over these keys, which are dense, and only its last five probes look into
the corpus. A cursor keeps its interval between steps: if the next token narrows it, that takes a search within it;
only if the match breaks, or is held to a limit, is the whole array searched again.

Cost: 8.75 bytes per token and 8 per document on disk, O(log n) per step. Successors are counted exactly in intervals
of up to 64 rows; larger ones are estimated from 64 to 256 rows at equal distances, which misses no successor that
follows more often than once in so many (rows are sorted, so this is a stratified sample) and draws nothing at random.
The frozen automaton is several times quicker and exact, in six times the space.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from redraft.retrieval.kernel import inner, kernel
from redraft.retrieval.suffix_sorting import sort_suffixes
from redraft.retrieval.tokens import as_tokens

__all__ = [
    "KEY_STRIDE",
    "KEY_TOKENS",
    "SUCCESSORS",
    "SuffixArray",
    "array_advance",
    "array_longest",
    "array_search",
    "array_shapes",
    "array_shorten",
    "array_successors",
    "as_suffix_array",
    "build_suffix_array",
    "find",
    "mark_starts",
    "successors",
]

KEY_STRIDE = 32  # every so many rows has a key
KEY_TOKENS = 5
SUCCESSORS = 8  # the most that array_successors reports
EXACT_ROWS = 64  # intervals up to this size are counted, not sampled
SAMPLED_KEYS = 256
NARROWED_ROWS = 2048  # smaller intervals are narrowed in place, larger ones searched by their keys


class SuffixArray(NamedTuple):
    """Arrays of the index, C-contiguous and read-only (so that kernels compile once, mapped or not).

    A cursor is (low, high, length): rows low to high - 1 start with the last `length` tokens of the context. The cursor
    of the empty match is (0, n, 0).
    """

    tokens: np.ndarray  # int32[n], documents laid end to end
    suffixes: np.ndarray  # int32[n]: positions in the order of the rest of their document
    document_starts: (
        np.ndarray
    )  # uint8[n // 8 + 1]: bit p % 8 of byte p // 8 is set where a document starts; so is bit n
    keys: np.ndarray  # int32[ceil(n / 32), 5]: first tokens of every 32nd row's suffix, -1 beyond its document


@inner
def _starts_document(array, position):
    return (array.document_starts[position >> 3] >> (position & 7)) & 1


@inner
def token_after(array, row, depth):
    """Token `depth` places into the suffix of `row`, -1 if its document ends there. `depth` tokens must be in it."""
    position = np.int64(array.suffixes[row]) + depth
    if depth > 0 and _starts_document(array, position):
        return np.int64(-1)
    return np.int64(array.tokens[position])


@inner
def _compare_key(array, key, window, length):
    """Sign of (the suffix of a key - the pattern), as far as the key goes; 0 if it starts with the pattern.

    The pattern is the last `length` tokens of the context; window[0] is its newest token, as in all kernels here.
    """
    for i in range(min(length, KEY_TOKENS)):
        token = array.keys[key, i]
        wanted = window[length - 1 - i]
        if token != wanted:
            return -1 if token < wanted else 1
    return 0


@inner
def _compare_row(array, row, window, length):
    """Sign of (the suffix of `row` - the pattern); 0 if it starts with the pattern."""
    position = np.int64(array.suffixes[row])
    for i in range(length):
        if i > 0 and _starts_document(array, position + i):
            return -1
        token = array.tokens[position + i]
        wanted = window[length - 1 - i]
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
    n = np.int64(array.suffixes.shape[0])
    n_keys = np.int64(array.keys.shape[0])
    first = _first_key(array, np.int64(0), n_keys, window, length, 0)
    step = np.int64(1)  # the keys above the pattern are mostly near
    while first + step < n_keys and _compare_key(array, first + step, window, length) == 0:
        step *= 2
    last = _first_key(array, first, min(n_keys, first + step), window, length, 1)
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
    low, high = np.int64(0), np.int64(array.suffixes.shape[0])
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
    found_low, found_high = np.int64(0), np.int64(array.suffixes.shape[0])
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
    kept, distinct, once = 0, 0, 0
    current, run = np.int64(-1), np.int64(0)
    for i in range(samples + 1):
        token = np.int64(-2)
        if i < samples:
            if by_key:
                token = np.int64(array.keys[first_key + i * n_keys // samples, length])
            else:
                token = token_after(array, low + i * size // samples, length)
        if token == current:
            run += 1
            continue
        if current >= 0:
            distinct += 1
            once += run == 1
            kept = _offer(tokens, counts, kept, current, max(1, run * size // samples))
        current, run = token, 1
    return kept, distinct - once + np.int64(once * np.sqrt(size / max(samples, 1)))


@kernel(allocates=False)
def mark_starts(document_ends, document_starts, n):
    """Fill the bitmap `document_starts` for n tokens in documents that end at `document_ends`."""
    document_starts[:] = 0
    document_starts[n >> 3] |= np.uint8(1 << (n & 7))
    start = np.int64(0)
    for document in range(document_ends.shape[0]):
        document_starts[start >> 3] |= np.uint8(1 << (start & 7))
        start = np.int64(document_ends[document])


@kernel(allocates=False)
def _write_keys(array, keys):
    for key in range(keys.shape[0]):
        for depth in range(KEY_TOKENS):
            keys[key, depth] = token_after(array, key * KEY_STRIDE, depth)
            if keys[key, depth] < 0:
                keys[key, depth:] = -1
                break


def array_shapes(n: int) -> dict[str, tuple[int, ...]]:
    """Shape of every array of a `SuffixArray` over n tokens, tokens left out."""
    return {
        "suffixes": (n,),
        "document_starts": (n // 8 + 1,),
        "keys": (-(-n // KEY_STRIDE), KEY_TOKENS),
    }


def build_suffix_array(
    tokens,
    document_ends: np.ndarray,
    out: SuffixArray | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> SuffixArray:
    """Sort the suffixes of `tokens` (int32[n]) within the documents that end at document_ends (int64[documents]).

    `out`: writable arrays to fill (mapped files, say); its tokens are not written. Raises ValueError if the last end is
    not n, and beyond 2,147,483,647 tokens and documents.
    """
    tokens, ends = as_tokens(tokens), np.ascontiguousarray(document_ends, np.int64)
    n = len(tokens)
    if (int(ends[-1]) if len(ends) else 0) != n or (len(ends) and (ends[0] < 0 or (np.diff(ends) < 0).any())):
        raise ValueError(f"document_ends: wanted ascending ends, the last one {n}, got {ends[-3:].tolist()} at the end")
    if out is None:
        dtypes = {"suffixes": np.int32, "document_starts": np.uint8, "keys": np.int32}
        out = SuffixArray(tokens, **{name: np.empty(shape, dtypes[name]) for name, shape in array_shapes(n).items()})
    mark_starts(ends, np.asarray(out.document_starts), n)
    sort_suffixes(tokens, ends, np.asarray(out.suffixes), progress)
    array = as_suffix_array(tokens, out.suffixes, out.document_starts, out.keys)
    _write_keys(array, np.asarray(out.keys))
    return array


def as_suffix_array(*arrays: np.ndarray) -> SuffixArray:
    """Read-only views of the four arrays, whatever holds them."""
    views = [np.asarray(array).view() for array in arrays]
    for view in views:
        view.flags.writeable = False
    return SuffixArray(*views)


def find(array: SuffixArray, context, max_length: int = 32) -> tuple[int, int, int]:
    """Cursor (low, high, length) of the longest suffix of `context`, of at most `max_length` tokens, that occurs.

    array.suffixes[low:high] are the positions at which it starts.
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
