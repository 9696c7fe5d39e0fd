"""The levels of a match in a suffix array, kept from token to token: the longest suffix, and those that occur more often.

A draft asks not only for the longest match at a place but for the next two suffixes that occurred more often
(`array_shorten`). Searched for anew at every place, these cost more than the match itself, in cache misses above all. But
between two levels all suffixes end at the same positions, so with one token more they still do: the levels behind the
token are among those before it, each continued by the token, those that became as rare as the one before left out. And a
match that breaks is continued from the next level, with nothing between to be tried. It is what suffix links do in an
automaton (E. Ukkonen, 1995), for as many links as are asked for; the array has none.

Levels are int64[12]: three cursors (low, high, length, frequent), of which those with a length of -1 are not known yet; behind
the empty match none is. All zeros are the empty match, too: what a text begins with. Cost: of fifteen searches of the whole array in a draft of 32 nodes over 100M
tokens, three are left, and it takes 58 microseconds instead of 62.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval.frequent_contexts import DEPTH, LENGTH, LINK, SHORTER, continued
from redraft.retrieval.kernel import inner
from redraft.retrieval.suffix_array import N, array_search
from redraft.retrieval.suffix_array_cursor import array_advance, array_shorten, cursor_of, narrowed, rows_between

__all__ = ["CURSOR", "LEVELS", "advance_levels", "next_level"]

CURSOR = 4  # columns of a level
LEVELS = 3
UNKNOWN = -1


@inner
def _cursor(levels, level):
    at = CURSOR * level
    return levels[at], levels[at + 1], levels[at + 2], levels[at + 3]


@inner
def _put(levels, level, low, high, length, frequent):
    at = CURSOR * level
    levels[at], levels[at + 1], levels[at + 2], levels[at + 3] = low, high, length, frequent


@inner
def _known(levels, level):
    return level < LEVELS and levels[CURSOR * level + 2] != UNKNOWN


@inner
def _frequent_after(array, frequent, token):
    """The longest frequent context that is a suffix of one that ends with `frequent`, and then `token`."""
    contexts, edges = array.contexts, array.context_edges
    if contexts[frequent, LENGTH] == DEPTH:
        frequent = np.int64(contexts[frequent, LINK])
    target = continued(contexts, edges, frequent, token)
    while target <= 0 and frequent > 0:
        frequent = np.int64(contexts[frequent, SHORTER])
        target = continued(contexts, edges, frequent, token)
    return max(target, np.int64(0))


@inner(inline=False)
def _followed(array, low, high, length, frequent, token):
    """The cursor of a match and then `token`, all of it; low = high if that does not occur."""
    contexts, edges = array.contexts, array.context_edges
    if contexts[frequent, LENGTH] == length:
        target = continued(contexts, edges, frequent, token)
        if target > 0:
            return cursor_of(array, target)
        if target < 0:
            return low, low, length, frequent
        low, high = rows_between(array, frequent, token)
    low, high = narrowed(array, low, high, length, token)
    if low < high:
        frequent = _frequent_after(array, frequent, token)
    return low, high, length + 1, frequent


@inner(inline=False)
def advance_levels(array, source, target, window, max_length):
    """Levels `target` (which may be `source`) after one more token of the context; what is known of `source` is used.

    window: int32[>= max_length], the last tokens of the context, window[0] the new one. The match is the longest suffix
    of at most `max_length` (>= 1) tokens that occurs in a document.
    """
    level, written, rows, token = 0, 0, np.int64(0), np.int64(window[0])
    low, high, length, frequent = _cursor(source, 0)
    if length == 0:
        low, high, frequent = np.int64(0), array.sizes[N], np.int64(0)
    below = _known(source, 1)
    too_long = length == max_length  # one token of it is dropped; what is left ends at the same positions, or is a level
    if too_long and below and source[CURSOR + 2] == length - 1:
        level, too_long = 1, False
        low, high, length, frequent = _cursor(source, 1)
        below = _known(source, 2)
    elif too_long and array.contexts[frequent, LENGTH] == length:
        too_long = False
        low, high, length, frequent = cursor_of(array, np.int64(array.contexts[frequent, LINK]))
    while True:
        first, last, found, suffix = _followed(array, low, high, length, frequent, token)
        if too_long and first < last:
            first, last = array_search(array, window, length)
            found = length
        too_long = False
        if first == last and not below:
            first, last, found, suffix = array_advance(array, low, high, length, frequent, window, max_length)
        if last - first > rows or not below and written == 0:
            rows = last - first
            _put(target, written, first, last, found, suffix)
            written += 1
        if not below:
            break
        level += 1
        low, high, length, frequent = _cursor(source, level)
        below = _known(source, level + 1)
    for unknown in range(written, LEVELS):
        target[CURSOR * unknown + 2] = UNKNOWN


@inner
def next_level(array, levels, level, low, high, length, frequent, window):
    """The cursor of `level`, 1 to 3, given that of the one before; it is known from then on."""
    if _known(levels, level):
        return _cursor(levels, level)
    low, high, length, frequent = array_shorten(array, low, high, length, frequent, window)
    if level < LEVELS:
        _put(levels, level, low, high, length, frequent)
    return low, high, length, frequent
