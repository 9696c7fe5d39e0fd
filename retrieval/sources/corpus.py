"""Evidence from corpus indexes: what followed the last tokens in a large body of text.

A cursor per index and place in the tree walks the frozen automaton or the suffix array. What a
corpus adds are mostly the general habits of a language or a code base, and those are short: the eight most frequent
successors of the longest context, and of the next two that occurred more often, are candidates.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval import evidence as ev
from redraft.retrieval import frozen_automaton as fa
from redraft.retrieval import suffix_array_cursor as sa
from redraft.retrieval import suffix_array_levels as levels
from redraft.retrieval.kernel import inner
from redraft.retrieval.knowledge import AUTOMATON, CURSOR, array_at, automaton_at
from redraft.retrieval.sources.contexts import put_by_level

MAX_CONTEXT = 8
MAX_LEVELS = 3
MAX_SUCCESSORS = 8


@inner(inline=False)
def advance(knowledge, places, source, target, token):
    """Cursors of place `target`: those of `source` after one more `token`, which is in the target's window already."""
    cursors = places.cursors
    for index in range(len(knowledge.kinds)):
        column = CURSOR * index
        if knowledge.kinds[index] == AUTOMATON:
            cursors[target, column], cursors[target, column + 2] = fa.frozen_advance(
                automaton_at(knowledge.corpora, index), cursors[source, column], cursors[source, column + 2], token, MAX_CONTEXT
            )
        else:
            levels.advance_levels(
                array_at(knowledge.corpora, index),
                cursors[source, column : column + CURSOR],
                cursors[target, column : column + CURSOR],
                places.windows[target],
                MAX_CONTEXT,
            )


@inner(inline=False)
def _vote(ballot, token, count, total, level, match, rank):
    """One successor of a matched context."""
    row = ev.candidate(ballot, token)
    first = ev.first_cell(ev.CORPUS_FIRST_CELLS, level, match, count, total, ev.recency(rank, 0))
    cell = ev.next_cell(ev.CORPUS_NEXT_CELLS, match, count, total)
    put_by_level(ballot, row, ev.CORPUS_FIRST, first, ev.CORPUS_NEXT, cell)
    ballot.named_by[row] |= ev.BY_CORPUS


@inner(inline=False)
def _add_automaton(ballot, automaton, state, length):
    """Add the successors of the matched state; returns (total, distinct) of the longest match, (0, 0) for none."""
    states, edges = automaton.states, automaton.edges
    longest_total, longest_distinct = np.int64(0), np.int64(0)
    match, level, last_total = np.int64(length), 0, np.int64(0)
    while state > 0 and level < MAX_LEVELS:
        total = np.int64(states[state, fa.COUNT])
        begin, end = np.int64(states[state, fa.EDGE_START]), np.int64(states[state + 1, fa.EDGE_START])
        if total > last_total and end > begin:
            for edge in range(begin, min(end, begin + MAX_SUCCESSORS)):
                token, count = edges[edge, fa.EDGE_TOKEN], edges[edge, fa.EDGE_COUNT]
                _vote(ballot, token, count, total, level, match, edge - begin)
            if level == 0:
                longest_total, longest_distinct = total, end - begin
            last_total = total
            level += 1
        state = np.int64(states[state, fa.LINK])
        match = np.int64(states[state, fa.LENGTH])
    return longest_total, longest_distinct


@inner
def add_corpora(ballot, knowledge, places, place):
    """Add what the indexes know; returns (total, distinct, length) of the longest match among them."""
    best_total, best_distinct, best_length = np.int64(0), np.int64(0), np.int64(0)
    for index in range(len(knowledge.kinds)):
        state, length = places.cursors[place, CURSOR * index], places.cursors[place, CURSOR * index + 2]
        if length == 0:
            continue
        if knowledge.kinds[index] == AUTOMATON:
            total, distinct = _add_automaton(ballot, automaton_at(knowledge.corpora, index), state, length)
        else:
            total, distinct = _add_array(ballot, knowledge, places, place, index)
        if total > 0 and length > best_length:
            best_total, best_distinct, best_length = total, distinct, length
    return best_total, best_distinct, best_length


@inner(inline=False)
def _add_array(ballot, knowledge, places, place, index):
    """The same for a suffix array; the tokens and counts of a level lie in the look-up buffer."""
    array, cursors = array_at(knowledge.corpora, index), places.cursors[place, CURSOR * index : CURSOR * (index + 1)]
    low, high, length, frequent = cursors[0], cursors[1], cursors[2], cursors[3]
    tokens, counts = places.path[:MAX_SUCCESSORS], places.path[MAX_SUCCESSORS : 2 * MAX_SUCCESSORS]
    rows = places.path[2 * MAX_SUCCESSORS :]
    longest_total, longest_distinct = np.int64(0), np.int64(0)
    level, asked = 0, 0
    while length > 0 and level < MAX_LEVELS:
        found, distinct = sa.array_successors(array, low, high, length, frequent, tokens, counts, rows)
        for rank in range(found):
            _vote(ballot, tokens[rank], counts[rank], high - low, level, length, rank)
        if found:  # a context that only ends documents is no level, as in the automaton
            if level == 0:
                longest_total, longest_distinct = high - low, np.int64(distinct)
            level += 1
        asked += 1
        if level < MAX_LEVELS:
            low, high, length, frequent = levels.next_level(
                array, cursors, asked, low, high, length, frequent, places.windows[place]
            )
    return longest_total, longest_distinct
