"""Evidence from neighbours of the target's hidden state: what it wrote next where it was in a similar state before.

`neighbours.py` holds the continuations; a place in the tree has one bit for each that agrees with the path so far. The
tokens that the remaining ones come to next are candidates. The similarity of the best that names a token, the share of the
neighbours' weight that agrees with it, how far they have been followed, and the confidence of the whole search choose the
cell. Where neighbours speak and name other tokens only, that is evidence as well (`evidence.dense_absent_cell`).

Stores (a dense index, the namespace's dense memory) and the session's own text have a slot each: the first names what no
other source may know, the second chooses among matches that other sources name, too (PLD+).
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval import evidence as ev
from redraft.retrieval.kernel import inner
from redraft.retrieval.neighbours import CURSORS, LENGTH


@inner(inline=False)
def still_followed(neighbours, following, now, token):
    """Those bits of `following` whose neighbours continue with `token` at text position `now`."""
    left = 0
    for column in range(2 * CURSORS):
        if following >> column & 1:
            depth = now - neighbours.found[2 if column >= CURSORS else 0]
            if depth < LENGTH and neighbours.tokens[column, depth] == token:
                left |= 1 << column
    return left


@inner(inline=False)
def add_followed(ballot, neighbours, following, now, own, slot, base):
    """Add what the neighbours of one search come to next; returns (similarity of the best, depth), (-1, 0) if none speaks."""
    first = CURSORS if own else 0
    depth = now - neighbours.found[2 * own]
    if depth >= LENGTH or (following >> first & ((1 << CURSORS) - 1)) == 0:
        return np.float32(-1.0), np.int64(0)
    total, best = np.float32(0.0), np.float32(-1.0)
    for column in range(first, first + CURSORS):
        if following >> column & 1 and neighbours.tokens[column, depth] >= 0:
            total += neighbours.weights[column]
            best = max(best, neighbours.similarities[column])
    for column in range(first, first + CURSORS):
        token = neighbours.tokens[column, depth]
        if following >> column & 1 == 0 or token < 0:
            continue
        row = ev.candidate(ballot, token)
        if row == ev.NOWHERE or ballot.cells[slot, row] != 0:
            continue
        agreeing = np.float32(0.0)
        for other in range(column, first + CURSORS):
            if following >> other & 1 and neighbours.tokens[other, depth] == token:
                agreeing += neighbours.weights[other]
        cell = ev.dense_cell(
            base, neighbours.similarities[column], agreeing / total, depth, neighbours.found[2 * own + 1]
        )
        ev.put(ballot, row, slot, cell)
        if not own:
            ballot.named_by[row] |= ev.BY_DENSE
    return best, np.int64(depth)
