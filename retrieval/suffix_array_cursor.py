"""Cursors in a suffix array: the longest match of a context, kept from token to token, and what followed it.

A cursor is (low, high, length, frequent): rows low to high - 1 start with the last `length` tokens of the context, and the
longest suffix of these that is a frequent context (`frequent_contexts`) is number `frequent`. The empty match is
(0, n, 0, 0). With one token more, a match that is a frequent context becomes another by an edge; a rarer one
has its interval narrowed, by a search within it. If the match breaks, the frequent contexts tell where it can still hold: only
the lengths between the longest frequent suffix and the old match are searched for in the whole array, mostly one or none.

Cost: over 100 million tokens 0.7 microseconds for a token and its successors, over one million 0.25.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval.edge_rows import EDGE_TARGET, EDGE_TOKEN, HEAD, first_edge
from redraft.retrieval.frequent_contexts import (
    COUNT,
    DEPTH,
    EDGE_START,
    LEAST_ROWS,
    LENGTH,
    LINK,
    LOW,
    SHORTER,
    continued,
    head_of,
    longest_frequent,
)
from redraft.retrieval.kernel import inner, kernel
from redraft.retrieval.suffix_array import (
    KEY_STRIDE,
    KEY_TOKENS,
    N,
    SuffixArray,
    array_search,
    key_token,
    position_of,
    token_after,
    token_at,
)
from redraft.retrieval.tokens import as_tokens

__all__ = [
    "EXACT_ROWS",
    "SUCCESSORS",
    "array_advance",
    "array_shorten",
    "array_successors",
    "cursor_of",
    "find",
    "narrowed",
    "offer",
    "rows_between",
    "successors",
]

SUCCESSORS = 8  # the most that array_successors reports
EXACT_ROWS = LEAST_ROWS - 1  # intervals up to this size are counted, not sampled; frequent contexts begin behind them


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


@inner
def _key_after(array, low, high, depth, token):
    """The same for keys."""
    while low < high:
        middle = (low + high) >> 1
        if key_token(array, middle, depth) < token:
            low = middle + 1
        else:
            high = middle
    return low


@inner(inline=False)
def narrowed(array, low, high, depth, token):
    """(low, high): the rows among low..high - 1, which share `depth` tokens, whose next is `token`; low = high: none."""
    until = high
    if depth < KEY_TOKENS and high - low > 2 * KEY_STRIDE:
        key = _key_after(array, (low + KEY_STRIDE - 1) // KEY_STRIDE, (high - 1) // KEY_STRIDE + 1, depth, token)
        low, until = max(low, (key - 1) * KEY_STRIDE + 1), min(high, key * KEY_STRIDE)
    first = _first_after(array, low, until, depth, token)
    if first == high or token_after(array, first, depth) != token:
        return first, first
    last, step = first + 1, np.int64(1)  # they are mostly few
    while last + step < high and token_after(array, last + step, depth) == token:
        last += step + 1
        step *= 2
    return first, _first_after(array, last, min(high, last + step), depth, token + 1)


@inner
def cursor_of(array, context):
    """The cursor of a frequent context, 0 for the empty match."""
    row = array.contexts[context]
    low, count = np.int64(row[LOW]), np.int64(row[COUNT])
    return low, low + count, np.int64(row[LENGTH]), np.int64(context)


@inner(inline=False)
def rows_between(array, context, token):
    """(low, high): the rows of a frequent context in which `token`, with which it is none, can follow.

    They lie between those of the next lower and the next higher token with which it is: few, where it occurs often.
    """
    contexts, edges = array.contexts, array.context_edges
    low = np.int64(contexts[context, LOW])
    high = low + contexts[context, COUNT]
    begin, end = np.int64(contexts[context, EDGE_START]), np.int64(contexts[context + 1, EDGE_START])
    tail = min(end, begin + HEAD)
    below, above = np.int64(-1), np.int64(-1)
    for edge in range(begin, tail):
        if edges[edge, EDGE_TARGET] > 0:
            if edges[edge, EDGE_TOKEN] < token:
                if below < 0 or edges[edge, EDGE_TOKEN] > edges[below, EDGE_TOKEN]:
                    below = edge
            elif above < 0 or edges[edge, EDGE_TOKEN] < edges[above, EDGE_TOKEN]:
                above = edge
    higher = first_edge(edges, tail, end, token)
    if higher > tail and (below < 0 or edges[higher - 1, EDGE_TOKEN] > edges[below, EDGE_TOKEN]):
        below = higher - 1
    if higher < end and (above < 0 or edges[higher, EDGE_TOKEN] < edges[above, EDGE_TOKEN]):
        above = higher
    if below >= 0:
        before = edges[below, EDGE_TARGET]
        low = np.int64(contexts[before, LOW]) + contexts[before, COUNT]
    if above >= 0:
        high = np.int64(contexts[edges[above, EDGE_TARGET], LOW])
    return low, high


@inner(inline=False)
def _longest(array, low, high, length, window, limit, rows, tried):
    """(low, high, length) of the longest suffix of at most `limit` tokens that occurs in more than `rows` rows.

    The suffix of `length` tokens is known to, in rows low to high - 1. What occurs, its suffixes do, so the longest is
    found by bisection; that of `tried` tokens is looked for first.
    """
    failed = limit + 1
    while failed - length > 1:
        first, last = array_search(array, window, tried)
        if last - first > rows:
            low, high, length = first, last, tried
        else:
            failed = tried
        tried = (length + failed) >> 1
    return low, high, length


@inner(inline=False)
def array_advance(array, low, high, length, frequent, window, max_length):
    """Cursor (low, high, length, frequent), int64 each, after one more token of the context.

    window: int32[>= max_length], the last tokens of the context, window[0] the new one. The match is the longest suffix
    of at most `max_length` (>= 1) tokens that occurs in a document.
    """
    low, high, length, frequent = np.int64(low), np.int64(high), np.int64(length), np.int64(frequent)
    contexts, edges, token = array.contexts, array.context_edges, np.int64(window[0])
    # The longest frequent suffix is one of the cursor's and the token. A shorter one is looked at only if it occurs more
    # often: otherwise the same tokens follow it. So where the token never follows one, none longer than `limit` occurs.
    limit, suffix, rarer = min(length + 1, max_length), frequent, np.int64(-1)
    if contexts[suffix, LENGTH] >= min(DEPTH, max_length):
        suffix = np.int64(contexts[suffix, LINK])
    target = continued(contexts, edges, suffix, token)
    while target <= 0:
        rarer = suffix if target == 0 else np.int64(-1)
        if target < 0:
            limit = min(limit, np.int64(contexts[contexts[suffix, SHORTER], LENGTH]) + (suffix > 0))
        if suffix == 0:
            break
        suffix = np.int64(contexts[suffix, SHORTER])
        target = continued(contexts, edges, suffix, token)
    found_low, found_high, found, target = cursor_of(array, max(target, np.int64(0)))
    if found < limit == length + 1:
        first, last = narrowed(array, low, high, length, token)
        if first < last:
            return first, last, limit, target
        limit = length
        if rarer >= 0 and contexts[rarer, LENGTH] == length:  # the same rows
            limit = found
    if found < limit and rarer >= 0:
        # Whether the token follows `rarer` tells of all suffixes longer than the one found.
        length = np.int64(contexts[rarer, LENGTH])
        low, high = rows_between(array, rarer, token)
        low, high = narrowed(array, low, high, length, token)
        limit = limit if low < high else found
        if low < high:
            found_low, found_high, found = low, high, length + 1
    if found < limit:
        found_low, found_high, found = _longest(
            array, found_low, found_high, found, window, limit, np.int64(0), found + 1
        )
    return found_low, found_high, found, target


@inner(inline=False)
def array_shorten(array, low, high, length, frequent, window):
    """Cursor of the longest suffix shorter than `length` that occurs more often; that of the empty match if none does."""
    contexts, size, suffix = array.contexts, np.int64(high) - np.int64(low), np.int64(frequent)
    if contexts[suffix, LENGTH] == length:
        return cursor_of(array, np.int64(contexts[suffix, SHORTER]))
    while suffix > 0 and contexts[suffix, COUNT] <= size:
        suffix = np.int64(contexts[suffix, SHORTER])
    low, high, found, suffix = cursor_of(array, suffix)
    if suffix == frequent:  # else none of those between occurs more often, for the longer `frequent` does not
        low, high, found = _longest(
            array, low, high, found, window, np.int64(length) - 1, size, np.int64(length) - 1
        )
    return low, high, found, suffix


@inner
def offer(tokens, counts, kept, token, count):
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


@inner(inline=False)
def array_successors(array, low, high, length, frequent, tokens, counts, rows):
    """The most frequent next tokens of a cursor into tokens and counts (int32[8] each): by count, ties by token.

    Returns (kept, distinct): how many are filled, and how many different successors there are. Those of a frequent
    context are written out, and up to 64 rows are counted one by one: both are exact. More rows than that a context has
    only if it is longer than the frequent ones. Of these 64 rows at equal distances are counted, which misses no successor
    that follows more often than once in so many (rows are sorted, so this is a stratified sample), and scaled to high - low.
    Distinct successors are then estimated (M. Charikar et al., "Towards estimation error guarantees for distinct values",
    2000): those met once in the sample stand for sqrt(rows / samples) each.

    rows: int32[64], a buffer. Each row's token is a cache miss; all are read before one is looked at, so that the
    processor waits for them together.
    """
    if array.contexts[frequent, LENGTH] == length:
        return head_of(array.contexts, array.context_edges, frequent, tokens, counts)
    low, size = np.int64(low), np.int64(high) - np.int64(low)
    samples = min(size, EXACT_ROWS)
    for i in range(samples):
        rows[i] = position_of(array, low + (i if size == samples else i * size // samples))
    for i in range(samples):
        rows[i] = token_at(array, np.int64(rows[i]), length)
    kept, distinct, once, begin = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    while begin < samples:
        token, end = rows[begin], begin + 1
        while end < samples and rows[end] == token:
            end += 1
        if token >= 0:
            run = end - begin
            distinct += 1
            once += run == 1
            kept = offer(tokens, counts, kept, token, max(1, run * size // samples))
        begin = end
    return kept, distinct - once + np.int64(once * np.sqrt(size / max(samples, 1)))


@kernel(allocates=False)
def _find(array, window, limit):
    nothing, limit = np.int64(0), np.int64(limit)
    low, high, length = _longest(array, nothing, array.sizes[N], nothing, window, limit, nothing, limit)
    return low, high, length, longest_frequent(array.contexts, array.context_edges, window, length)


@kernel(allocates=False)
def _successors(array, low, high, length, frequent, tokens, counts, rows):
    return array_successors(array, low, high, length, frequent, tokens, counts, rows)


def find(array: SuffixArray, context, max_length: int = 32) -> tuple[int, int, int, int]:
    """Cursor (low, high, length, frequent) of the longest suffix of `context`, of at most `max_length` tokens, that occurs.

    `positions(array, low, high)` are where it starts.
    """
    if max_length < 1:
        raise ValueError(f"max_length: wanted at least 1, got {max_length}")
    window = np.ascontiguousarray(as_tokens(context, what="context")[: -max_length - 1 : -1])
    low, high, length, frequent = _find(array, window, len(window))
    return int(low), int(high), int(length), int(frequent)


def successors(array: SuffixArray, low: int, high: int, length: int, frequent: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(tokens, counts, distinct): up to eight most frequent next tokens of a cursor (int32 each), and how many different
    ones there are; see `array_successors`."""
    tokens, counts = np.empty(SUCCESSORS, np.int32), np.empty(SUCCESSORS, np.int32)
    rows = np.empty(EXACT_ROWS, np.int32)
    kept, distinct = _successors(array, low, high, length, frequent, tokens, counts, rows)
    return tokens[:kept], counts[:kept], int(distinct)
