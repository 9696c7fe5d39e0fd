"""The edges of a growing suffix automaton: which state a token leads to, and every edge of a state.

Most states have one edge, which is kept in the state's own row and costs no look-up. The others are rows of one hash table,
keyed by state and token, with linear probing and never more than two thirds full; so one is found in a probe or two.
They are linked into a list per state as well, which is what a split of the state copies. A table that has become too
small is replaced by a larger one, into which all rows are moved.

Cost: 16 bytes a row. A sorted list per state, as the frozen automaton keeps it, is smaller but cannot grow.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval.kernel import inner, kernel

__all__ = ["add_edge", "edge_row", "move_edges", "target_of"]

# Columns of `AutomatonArrays.states` and `.edges` (`suffix_automaton`).
LENGTH, LINK, FIRST_END, TOKEN, TARGET, MORE = 0, 1, 2, 3, 4, 5
EDGE_STATE, EDGE_TOKEN, EDGE_TARGET, EDGE_NEXT = 0, 1, 2, 3

# Entries of the int64 array in which the kernel keeps its counters.
N_STATES, N_EDGES, N_HASHED, LAST, N_TOKENS, WANTED_HASHED = 0, 1, 2, 3, 4, 5


@inner
def _slot(state, token, n_slots):
    """Where the probe for (state, token) starts. Products stay below 2**63: the same with and without compilation."""
    mixed = np.int64(state) * 0x5851F42D + np.int64(token) * 0x4C957F2D
    mixed = ((mixed ^ (mixed >> 31)) & 0x7FFFFFFF) * 0x5BD1E995
    return (((mixed >> 24) & 0x7FFFFFFF) * n_slots) >> 31


@inner
def edge_row(edges, state, token):
    """Row of `edges` for (state, token), or the free row where it belongs."""
    n_slots = edges.shape[0]
    slot = _slot(state, token, n_slots)
    while edges[slot, EDGE_STATE] != 0 and (edges[slot, EDGE_STATE] != state + 1 or edges[slot, EDGE_TOKEN] != token):
        slot += 1
        if slot == n_slots:
            slot = 0
    return slot


@inner
def target_of(arrays, state, token):
    """The state that `token` leads to from `state`, -1 if it never followed there."""
    states, edges = arrays.states, arrays.edges
    if states[state, TOKEN] == token:
        return np.int64(states[state, TARGET])
    if states[state, MORE] < 0:
        return np.int64(-1)
    row = edge_row(edges, state, token)
    return np.int64(edges[row, EDGE_TARGET]) if edges[row, EDGE_STATE] != 0 else np.int64(-1)


@inner
def _insert(arrays, state, token, target):
    """Put an edge into the table, at the head of its state's list."""
    states, edges = arrays.states, arrays.edges
    row = edge_row(edges, state, token)
    edges[row, EDGE_STATE] = state + 1
    edges[row, EDGE_TOKEN] = token
    edges[row, EDGE_TARGET] = target
    edges[row, EDGE_NEXT] = states[state, MORE]
    states[state, MORE] = row


@inner
def add_edge(arrays, counters, state, token, target):
    """Add an edge that is not there yet."""
    states = arrays.states
    counters[N_EDGES] += 1
    if states[state, TOKEN] < 0:
        states[state, TOKEN] = token
        states[state, TARGET] = target
    else:
        counters[N_HASHED] += 1
        _insert(arrays, state, token, target)


@kernel(allocates=False)
def move_edges(old, arrays):
    """Insert the edges of the table `old` into the larger, empty table of `arrays`."""
    for row in range(old.shape[0]):
        if old[row, EDGE_STATE] != 0:
            arrays.states[old[row, EDGE_STATE] - 1, MORE] = -1
    for row in range(old.shape[0]):
        if old[row, EDGE_STATE] != 0:
            _insert(arrays, old[row, EDGE_STATE] - 1, old[row, EDGE_TOKEN], old[row, EDGE_TARGET])
