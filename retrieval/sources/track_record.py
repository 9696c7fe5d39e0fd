"""Evidence from the candidate's own past: how often this token was right where it was a candidate.

Counts say how often a token came after a context; they do not say how often it was expected and did not come. Two
hashed cells per candidate do: one for the token, one for the token after the last one. Names no candidates of its own.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval import evidence as ev
from redraft.retrieval.kernel import inner
from redraft.retrieval.prefetch import prefetch


@inner
def _cells_of(token, last):
    alone = (token * 0x9E3779B1 >> 13) & ((1 << ev.TRACK_RECORD_BITS) - 1)
    pair = ((token * 0x9E3779B1 + last) * 0x2545F491 >> 20) & ((1 << ev.TRACK_RECORD_PAIR_BITS) - 1)
    return ev.TRACK_RECORD_CELLS + alone, ev.TRACK_RECORD_PAIR_CELLS + pair


@inner(inline=False)
def foresee_track_records(ballot, cells, last):
    for row in range(ballot.header[ev.N_CANDIDATES]):
        alone, pair = _cells_of(np.int64(ballot.tokens[row]), last)
        prefetch(cells, alone)
        prefetch(cells, pair)


@inner(inline=False)
def add_track_records(ballot, cells, last):
    """Give every candidate its two cells; tokens that share a cell share their record.

    Half of the lines of memory that a draft looks at hold such cells, so they are asked for: `score` comes to them last.
    """
    for row in range(ballot.header[ev.N_CANDIDATES]):
        alone, pair = _cells_of(np.int64(ballot.tokens[row]), last)
        prefetch(cells, alone)
        prefetch(cells, pair)
        ballot.cells[ev.TRACK_RECORD, row], ballot.cells[ev.TRACK_RECORD_PAIR, row] = alone, pair
    ballot.header[ev.PRESENT] |= 1 << ev.TRACK_RECORD | 1 << ev.TRACK_RECORD_PAIR
