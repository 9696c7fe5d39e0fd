"""Frozen suffix automaton: the read-only form of `suffix_automaton`, queried in place from mapped files.

Two arrays of rows instead of a growing hash table: a state's numbers lie side by side, and so do its edges, so that a
step on cold pages touches two of them. A state's edges start with its eight most frequent successors, counts included:
a draft reads those without following an edge. The rest are in order of token id for a binary search.
`docs/index-format.md` is the layout's specification.

Cost: 20 bytes per state and 12 per edge, on text and code 54 to 60 bytes per token with the tokens themselves. A step
is amortised O(log V) (V: successors of a state; nearly always under nine). Freezing is one pass over the edges; the
few long rows (the root's, above all) are sorted in place, which makes it O(n log V) in theory and linear in practice.

A suffix array (`suffix_array`) takes 6 bytes per token and is the better one where this does not fit into memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from redraft.retrieval import suffix_automaton as online
from redraft.retrieval.edge_rows import EDGE_COLUMNS, EDGE_COUNT, EDGE_TARGET, EDGE_TOKEN, HEAD, find_edge
from redraft.retrieval.kernel import inner, kernel
from redraft.retrieval.suffix_automaton import SuffixAutomaton

__all__ = [
    "COUNT", "EDGE_START", "FIRST_END", "LENGTH", "LINK", "STATE_COLUMNS", "FrozenAutomaton", "freeze", "frozen_advance",
    "frozen_edge", "frozen_walk",
]  # fmt: skip

LENGTH, LINK, COUNT, FIRST_END, EDGE_START = 0, 1, 2, 3, 4
STATE_COLUMNS = 5


class FrozenAutomaton(NamedTuple):
    """Row arrays, C-contiguous and read-only (so that kernels compile once, mapped or not).

    The edges of a state are rows states[state, EDGE_START] to states[state + 1, EDGE_START] - 1. State 0 is the root.
    """

    states: np.ndarray  # int32[n_states + 1, 5]: length, link, count, first end, first edge; the last row is a sentinel
    edges: np.ndarray  # int32[n_edges, 3]: token, target, count


@inner
def frozen_edge(automaton, state, token):
    """Row of the edge that leaves `state` with `token`, -1 if there is none."""
    begin, end = np.int64(automaton.states[state, EDGE_START]), np.int64(automaton.states[state + 1, EDGE_START])
    return find_edge(automaton.edges, begin, end, token)


@inner
def frozen_advance(automaton, state, length, token, max_length):
    """(state, length), int64 each, after one more token of the context.

    Up the suffix links until `token` continues; then cut to the state that holds the last `max_length` tokens of the
    match (at least 1), so that counts are those of the shortened match. (0, 0) is the empty match.
    """
    states = automaton.states
    state, length = np.int64(state), np.int64(length)
    edge = frozen_edge(automaton, state, token)
    while edge < 0:
        if state == 0:
            return np.int64(0), np.int64(0)
        state = np.int64(states[state, LINK])
        length = np.int64(states[state, LENGTH])
        edge = frozen_edge(automaton, state, token)
    state = np.int64(automaton.edges[edge, EDGE_TARGET])
    length += 1
    if length > max_length:
        link = np.int64(states[state, LINK])
        while states[link, LENGTH] >= max_length:
            state = link
            link = np.int64(states[state, LINK])
        length = np.int64(max_length)
    return state, length


@kernel(allocates=False)
def frozen_walk(automaton, context, max_length):
    """(state, length) of the longest suffix of `context` (int32[n]) of at most `max_length` tokens that occurs."""
    state, length = np.int64(0), np.int64(0)
    for i in range(context.shape[0]):
        state, length = frozen_advance(automaton, state, length, context[i], max_length)
    return state, length


@inner
def _comes_first(edges, a, b):
    """Whether row a belongs before row b among the most frequent: higher count, then lower token."""
    if edges[a, EDGE_COUNT] != edges[b, EDGE_COUNT]:
        return edges[a, EDGE_COUNT] > edges[b, EDGE_COUNT]
    return edges[a, EDGE_TOKEN] < edges[b, EDGE_TOKEN]


@inner
def _swap(edges, a, b):
    for column in range(EDGE_COLUMNS):
        edges[a, column], edges[b, column] = edges[b, column], edges[a, column]


@inner
def _sort_head(edges, begin, end):
    """Move the HEAD most frequent of rows begin..end to the front, in order."""
    for row in range(begin, end):
        place = row
        if row >= begin + HEAD:
            place = begin + HEAD - 1
            if not _comes_first(edges, row, place):
                continue
            _swap(edges, row, place)
        while place > begin and _comes_first(edges, place, place - 1):
            _swap(edges, place, place - 1)
            place -= 1


@inner
def _sift_down(edges, begin, root, size):
    """Heap by token: let the row at `root` sink to its place among `size` rows from `begin`."""
    while 2 * root + 1 < size:
        child = 2 * root + 1
        if child + 1 < size and edges[begin + child, EDGE_TOKEN] < edges[begin + child + 1, EDGE_TOKEN]:
            child += 1
        if edges[begin + root, EDGE_TOKEN] >= edges[begin + child, EDGE_TOKEN]:
            return
        _swap(edges, begin + root, begin + child)
        root = child


@inner
def _sort_by_token(edges, begin, end):
    """Heap sort: in place, no worst case."""
    size = end - begin
    for root in range(size // 2 - 1, -1, -1):
        _sift_down(edges, begin, root, size)
    for last in range(size - 1, 0, -1):
        _swap(edges, begin, begin + last)
        _sift_down(edges, begin, 0, last)


@inner
def _write_edge(edges, row, token, target, counts):
    edges[row, EDGE_TOKEN] = token
    edges[row, EDGE_TARGET] = target
    edges[row, EDGE_COUNT] = counts[target]


@kernel(allocates=False)
def _freeze(arrays, counts, states, edges):
    """Fill the frozen `states` and `edges` from the online tables."""
    end = np.int64(0)
    n_states = counts.shape[0]
    for state in range(n_states):
        states[state, LENGTH] = arrays.states[state, online.LENGTH]
        states[state, LINK] = arrays.states[state, online.LINK]
        states[state, COUNT] = counts[state]
        states[state, FIRST_END] = arrays.states[state, online.FIRST_END]
        states[state, EDGE_START] = end
        if arrays.states[state, online.TOKEN] < 0:
            continue
        begin = end
        _write_edge(edges, end, arrays.states[state, online.TOKEN], arrays.states[state, online.TARGET], counts)
        end += 1
        row = arrays.states[state, online.MORE]
        while row >= 0:
            _write_edge(edges, end, arrays.edges[row, online.EDGE_TOKEN], arrays.edges[row, online.EDGE_TARGET], counts)
            end += 1
            row = arrays.edges[row, online.EDGE_NEXT]
        if end - begin > 1:
            _sort_head(edges, begin, end)
        if end - begin > HEAD:
            _sort_by_token(edges, begin + HEAD, end)
    states[n_states, LENGTH] = 0
    states[n_states, LINK] = -1
    states[n_states, COUNT] = 0
    states[n_states, FIRST_END] = -1
    states[n_states, EDGE_START] = end


def freeze(automaton: SuffixAutomaton, out: FrozenAutomaton | None = None) -> FrozenAutomaton:
    """The automaton as it is now, in rows. `out`: writable arrays of the right shape to fill (mapped files, say)."""
    counts, _ = automaton.totals()
    if out is None:
        states = np.empty((automaton.n_states + 1, STATE_COLUMNS), np.int32)
        out = FrozenAutomaton(states, np.empty((automaton.n_edges, EDGE_COLUMNS), np.int32))
    _freeze(automaton.arrays, counts, np.asarray(out.states), np.asarray(out.edges))
    return as_frozen(out.states, out.edges)


def as_frozen(states: np.ndarray, edges: np.ndarray) -> FrozenAutomaton:
    """Read-only views of the two arrays, whatever holds them."""
    views = [np.asarray(array).view() for array in (states, edges)]
    for view in views:
        view.flags.writeable = False
    return FrozenAutomaton(*views)
