"""Online suffix automaton: every substring of everything appended so far, with exact counts and positions.

The automaton of a text is the smallest deterministic automaton that accepts exactly its substrings. A state stands for
the substrings that end at the same set of positions; its longest has `length` tokens, and its suffix link leads to the
state of the longest suffix that ends at more positions. Following a context token by token, and a suffix link where
the next token does not continue, keeps the longest suffix of the context that occurs in the text: of any length, at
amortised constant cost.

Construction after A. Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), in the form
that takes many documents (M. Mohri, P. Moreno, E. Weinstein, "General suffix automaton construction algorithm and
space bounds", 2009): a document starts at the root, and a step into a state that exists already either stops there or
splits it. No substring reaches over the end of a document.

Cost: with n tokens at most 2n states and 3n edges (about 1.4n and 2.1n on text and code), amortised O(1) per token for
any input. Its edges are kept as `automaton_edges` says. Counts are not kept up while appending (on a constant text that
would walk n links for every token); one pass over the states in order of length gives all of them when they are asked
for, and they are kept until the next append.

The frozen form (`frozen_automaton`) is smaller and is read in place from disk. A suffix array takes a sixth of its
space and looks up in O(log n). The n-gram matcher needs no memory at all but finds only one place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from redraft.retrieval.automaton_edges import (
    EDGE_NEXT,
    EDGE_TARGET,
    EDGE_TOKEN,
    FIRST_END,
    LAST,
    LENGTH,
    LINK,
    MORE,
    N_EDGES,
    N_HASHED,
    N_STATES,
    N_TOKENS,
    TARGET,
    TOKEN,
    WANTED_HASHED,
    add_edge,
    edge_row,
    move_edges,
    target_of,
)
from redraft.retrieval.kernel import inner, kernel
from redraft.retrieval.tokens import as_tokens

__all__ = ["AutomatonArrays", "SuffixAutomaton"]

_MAX_TOKENS = 2**31 // 3  # edges are numbered in int32 and there may be three per token


class AutomatonArrays(NamedTuple):
    """The growing automaton.

    Invariants:
        1. State 0 is the root: length 0, link -1, first end -1.
        2. The link of any other state is strictly shorter than the state.
        3. An edge leads to a state at least one longer than the state it leaves, never to the root.
        4. A state's first edge is in its row, the others are in `edges`.
        5. `edges` is never more than two thirds full, so that every probe ends.
    """

    # int32[capacity, 6]: length, suffix link, end of the first occurrence, token (-1: no edges) and target of the
    # first edge, row of the next edge (-1: none)
    states: np.ndarray
    # int32[slots, 4]: state + 1 (0: free slot), token, target, row of the next edge of the state (-1: none)
    edges: np.ndarray


@inner
def _new_state(arrays, counters, length, first_end):
    """Number of a new state without link and edges."""
    states = arrays.states
    state = counters[N_STATES]
    counters[N_STATES] += 1
    states[state, LENGTH] = length
    states[state, FIRST_END] = first_end
    states[state, TOKEN] = -1
    states[state, MORE] = -1
    return state


@inner(inline=False)
def _split(arrays, counters, parent, token, target):
    """A new state for those substrings of `target` that are at most one longer than `parent`."""
    states, edges = arrays.states, arrays.edges
    clone = _new_state(arrays, counters, states[parent, LENGTH] + 1, states[target, FIRST_END])
    states[clone, LINK] = states[target, LINK]
    states[target, LINK] = clone
    if states[target, TOKEN] >= 0:
        add_edge(arrays, counters, clone, states[target, TOKEN], states[target, TARGET])
    row = states[target, MORE]
    while row >= 0:
        add_edge(arrays, counters, clone, edges[row, EDGE_TOKEN], edges[row, EDGE_TARGET])
        row = edges[row, EDGE_NEXT]
    while parent >= 0 and target_of(arrays, parent, token) == target:
        if states[parent, TOKEN] == token:
            states[parent, TARGET] = clone
        else:
            edges[edge_row(edges, parent, token), EDGE_TARGET] = clone
        parent = np.int64(states[parent, LINK])
    return clone


@kernel(allocates=False)
def _extend(arrays, counters, position_states, tokens):
    """Append `tokens` to the open document; returns how many fitted.

    A token is looked up completely before anything is changed. Where the tables lack the room that it takes, the call
    ends and says so in counters[WANTED_HASHED]; the caller makes room and goes on with the same token.
    """
    states, edges = arrays.states, arrays.edges
    for i in range(tokens.shape[0]):
        token, last = tokens[i], counters[LAST]
        # Up the links to the first suffix that was followed by this token before; the longer ones were not.
        parent, target, fresh, hashed = last, np.int64(-1), 0, counters[N_HASHED]
        while parent >= 0:
            target = target_of(arrays, parent, token)
            if target >= 0:
                break
            fresh += 1
            hashed += states[parent, TOKEN] >= 0
            parent = np.int64(states[parent, LINK])
        split = target >= 0 and states[target, LENGTH] != states[parent, LENGTH] + 1
        if split:
            hashed += 1  # a fresh edge may leave `target`, and is then copied, too
            row = states[target, MORE]
            while row >= 0:
                hashed += 1
                row = edges[row, EDGE_NEXT]
        if hashed > edges.shape[0] * 2 // 3 or counters[N_STATES] + 2 > states.shape[0]:
            counters[WANTED_HASHED] = hashed
            return i

        state = np.int64(-1)
        if fresh > 0:
            state = _new_state(arrays, counters, states[last, LENGTH] + 1, counters[N_TOKENS])
            walker = last
            for _ in range(fresh):
                add_edge(arrays, counters, walker, token, state)
                walker = np.int64(states[walker, LINK])
        if split:
            target = _split(arrays, counters, parent, token, target)
        if fresh > 0:
            states[state, LINK] = max(target, 0)
        else:
            state = target  # the document so far is a substring of an earlier one
        counters[LAST] = state
        position_states[counters[N_TOKENS]] = state
        counters[N_TOKENS] += 1
    return tokens.shape[0]


@kernel(allocates=False)
def _longest_match(arrays, context):
    """(state, length) of the longest suffix of `context` that occurs in a document."""
    states = arrays.states
    state, length = np.int64(0), np.int64(0)
    for i in range(context.shape[0]):
        target = target_of(arrays, state, context[i])
        while target < 0 and state > 0:
            state = np.int64(states[state, LINK])
            length = np.int64(states[state, LENGTH])
            target = target_of(arrays, state, context[i])
        if target >= 0:
            state = target
            length += 1
    return state, length


@kernel(allocates=False)
def _by_length(states, starts, order):
    """Counting sort: order = the states from shortest to longest. starts: zeros, two more than the longest length."""
    for state in range(order.shape[0]):
        starts[states[state, LENGTH] + 1] += 1
    for length in range(starts.shape[0] - 1):
        starts[length + 1] += starts[length]
    for state in range(order.shape[0]):
        length = states[state, LENGTH]
        order[starts[length]] = state
        starts[length] += 1


@kernel(allocates=False)
def _total(states, order, position_states, counts, last_ends):
    """Fill counts (given as zeros) and last_ends (given as -1): see `SuffixAutomaton.totals`.

    Every position counts once for the state of its whole document so far, and every state passes what it has on to its
    link: the suffixes of its substrings end wherever these end.
    """
    for position in range(position_states.shape[0]):
        counts[position_states[position]] += 1
        last_ends[position_states[position]] = position
    for i in range(order.shape[0] - 1, 0, -1):
        state = order[i]
        link = states[state, LINK]
        counts[link] += counts[state]
        last_ends[link] = max(last_ends[link], last_ends[state])
    last_ends[0] = -1  # the empty context ends everywhere: no position means anything


class SuffixAutomaton:
    """Substrings of documents that grow at the end. Not safe for concurrent appends; readers need no lock between them.

    `capacity_hint` is how many tokens to expect (room is made as needed in any case).

    A match is a pair (state, length): `length` tokens at the end of the context, and the state that holds them. Counts,
    positions and successors belong to the state: they are the same for every length that leads to it.
    """

    def __init__(self, capacity_hint: int = 1024) -> None:
        capacity = max(16, capacity_hint)
        self._tokens = np.empty(capacity, np.int32)
        self._position_states = np.empty(capacity, np.int32)
        self._document_ends: list[int] = []
        self._counters = np.array([1, 0, 0, 0, 0, 0], np.int64)
        states = np.empty((capacity * 8 // 5, 6), np.int32)  # what source code needs
        states[0] = 0, -1, -1, -1, -1, -1
        self.arrays = AutomatonArrays(states, np.zeros((capacity * 3 // 2, 4), np.int32))
        self._cached_totals: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def n_tokens(self) -> int:
        return int(self._counters[N_TOKENS])

    @property
    def n_documents(self) -> int:
        """Ended documents, and the open one if it has any tokens."""
        return len(self.document_ends)

    @property
    def n_states(self) -> int:
        return int(self._counters[N_STATES])

    @property
    def n_edges(self) -> int:
        return int(self._counters[N_EDGES])

    @property
    def nbytes(self) -> int:
        """Bytes held, room for growth included."""
        arrays = (self._tokens, self._position_states, self.arrays.states, self.arrays.edges)
        return sum(array.nbytes for array in arrays)

    @property
    def tokens(self) -> np.ndarray:
        """int32[n_tokens], read-only: all documents, one after the other, nothing between them."""
        view = self._tokens[: self.n_tokens]
        view.flags.writeable = False
        return view

    @property
    def document_ends(self) -> np.ndarray:
        """int64[n_documents]: where each document ends in `tokens` (exclusive)."""
        ends = np.array(self._document_ends, np.int64)
        if self.n_tokens > (ends[-1] if len(ends) else 0):
            return np.append(ends, self.n_tokens)
        return ends

    def append(self, tokens) -> None:
        """Append to the open document. `tokens`: 1-D, non-negative ids that fit in int32.

        Raises TypeError and ValueError for other ids, ValueError beyond 715 million tokens.
        """
        tokens = as_tokens(tokens)
        start, total = self.n_tokens, self.n_tokens + len(tokens)
        if total > _MAX_TOKENS:
            raise ValueError(f"a suffix automaton holds at most {_MAX_TOKENS} tokens, got {total}: use a suffix array")
        if total > len(self._tokens):
            capacity = max(total, len(self._tokens) * 3 // 2)
            self._tokens = _enlarged(self._tokens, start, capacity)
            self._position_states = _enlarged(self._position_states, start, capacity)
        self._tokens[start:total] = tokens
        self._cached_totals = None
        done = 0
        while True:
            done += _extend(self.arrays, self._counters, self._position_states, tokens[done:])
            if done == len(tokens):
                return
            self._make_room()

    def _make_room(self) -> None:
        """Enlarge whichever table the kernel stopped at."""
        states, edges = self.arrays
        if self.n_states + 2 > len(states):
            self.arrays = AutomatonArrays(_enlarged(states, self.n_states, len(states) * 3 // 2), edges)
            return
        n_slots = max(len(edges), int(self._counters[WANTED_HASHED])) * 3 // 2 + 1
        self.arrays = AutomatonArrays(states, np.zeros((n_slots, 4), np.int32))
        move_edges(edges, self.arrays)

    def end_document(self) -> None:
        """End the open document, even an empty one: what comes next starts another."""
        self._document_ends.append(self.n_tokens)
        self._counters[LAST] = 0

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, exactly as if nothing else had been appended. Rebuilds: O(length).

        Documents that ended at `length` or before stay ended; a document that is cut short is open again.
        """
        if not 0 <= length <= self.n_tokens:
            raise ValueError(f"truncate: wanted a length of 0 to {self.n_tokens} tokens, got {length}")
        if length == self.n_tokens:
            return
        kept, ends = self._tokens[:length].copy(), [end for end in self._document_ends if end <= length]
        self.__init__(length)
        start = 0
        for end in ends:
            self.append(kept[start:end])
            self.end_document()
            start = end
        self.append(kept[start:])

    def longest_match(self, context) -> tuple[int, int]:
        """(state, length) of the longest suffix of `context` that occurs in a document; (0, 0) if there is none."""
        state, length = _longest_match(self.arrays, as_tokens(context, what="context"))
        return int(state), int(length)

    def totals(self) -> tuple[np.ndarray, np.ndarray]:
        """(counts, last_ends), int32[n_states] each, as of the last append. O(n) once, then kept until the next."""
        if self._cached_totals is None:
            states = self.arrays.states[: self.n_states]
            order = np.empty(len(states), np.int32)
            _by_length(states, np.zeros(int(states[:, LENGTH].max()) + 2, np.int32), order)
            counts, last_ends = np.zeros(len(states), np.int32), np.full(len(states), -1, np.int32)
            _total(states, order, self._position_states[: self.n_tokens], counts, last_ends)
            self._cached_totals = counts, last_ends
        return self._cached_totals

    def count(self, state: int) -> int:
        """How often the substrings of `state` occur (the root: the number of tokens)."""
        return int(self.totals()[0][state])

    def first_end(self, state: int) -> int:
        """Position of the last token of the first occurrence, in `tokens`; -1 for the root."""
        return int(self.arrays.states[state, FIRST_END])

    def last_end(self, state: int) -> int:
        """Position of the last token of the latest occurrence, in `tokens`; -1 for the root."""
        return int(self.totals()[1][state])

    def successors(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, counts), int32 each: what followed, most frequent first, ties by token id.

        The counts add up to the state's count less the occurrences that ended a document.
        """
        counts, (states, edges) = self.totals()[0], self.arrays
        found = []
        if states[state, TOKEN] >= 0:
            found.append((-int(counts[states[state, TARGET]]), int(states[state, TOKEN])))
        row = int(states[state, MORE])
        while row >= 0:
            found.append((-int(counts[edges[row, EDGE_TARGET]]), int(edges[row, EDGE_TOKEN])))
            row = int(edges[row, EDGE_NEXT])
        pairs = np.array(sorted(found), np.int32).reshape(-1, 2)
        return pairs[:, 1].copy(), -pairs[:, 0]


def _enlarged(array: np.ndarray, used: int, capacity: int) -> np.ndarray:
    """A copy of the first `used` rows with room for `capacity`."""
    larger = np.empty((capacity, *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger
