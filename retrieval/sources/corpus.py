"""Evidence from corpus indexes: what followed the last tokens in a large body of text.

A cursor per index and place in the tree walks the frozen automaton. Contexts of up to 4 tokens are enough: what a
corpus adds are the general habits of a language or a code base, and those are short. The eight most frequent
successors of the longest context, and of the next one that occurred more often, are candidates.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval import evidence as ev
from redraft.retrieval import frozen_automaton as fa
from redraft.retrieval.kernel import inner

MAX_CONTEXT = 4
MAX_LEVELS = 2
MAX_SUCCESSORS = 8


@inner(inline=False)
def add_corpus(ballot, automaton, state, length):
    """Add the successors of the matched state; returns (total, distinct) of the longest match, (0, 0) for none."""
    states, edges = automaton.states, automaton.edges
    longest_total, longest_distinct = 0, 0
    state = np.int64(state)
    match = np.int64(length)
    level, last_total = 0, 0
    while state > 0 and level < MAX_LEVELS:
        total = states[state, fa.COUNT]
        begin, end = states[state, fa.EDGE_START], states[state + 1, fa.EDGE_START]
        if total > last_total and end > begin:
            for edge in range(begin, min(end, begin + MAX_SUCCESSORS)):
                row = ev.candidate(ballot, edges[edge, fa.EDGE_TOKEN])
                if row >= 0:
                    count = edges[edge, fa.EDGE_COUNT]
                    cells = ballot.cells
                    if cells[row, ev.CORPUS_FIRST] == 0:
                        is_top = 1 if edge == begin else 0
                        cells[row, ev.CORPUS_FIRST] = ev.first_cell(
                            ev.CORPUS_FIRST_CELLS, level, match, count, total, is_top
                        )
                        ballot.named_by[row] |= ev.BY_CORPUS
                    elif cells[row, ev.CORPUS_NEXT] == 0:
                        cells[row, ev.CORPUS_NEXT] = ev.next_cell(ev.CORPUS_NEXT_CELLS, match, count, total)
            if level == 0:
                longest_total, longest_distinct = total, end - begin
            last_total = total
            level += 1
        state = np.int64(states[state, fa.LINK])
        match = np.int64(states[state, fa.LENGTH])
    return longest_total, longest_distinct
