"""Evidence from the target's own earlier opinions: Token Recycling rows and the model's static successor table.

A row's rank and stored probability choose the cell. The session's row is preferred to the namespace's: both hold the
latest visit, the session's with this text in mind.
"""

from __future__ import annotations

from redraft.retrieval import evidence as ev
from redraft.retrieval.kernel import inner
from redraft.retrieval.token_recycling import WIDTH, find_row


@inner(inline=False)
def _add_row(ballot, ids, probs, row, slot, base):
    for rank in range(WIDTH):
        token = ids[row, rank]
        if token < 0:
            break
        entry = ev.candidate(ballot, token)
        if entry >= 0 and ballot.cells[slot, entry] == 0:
            ev.put(ballot, entry, slot, base + rank * 8 + ev.probability_bucket(probs[row, rank]))
            ballot.named_by[entry] |= ev.BY_RECYCLING


@inner(inline=False)
def _add_rows(ballot, own, shared, previous, token, slot, base):
    row = find_row(own, previous, token)
    if row >= 0:
        _add_row(ballot, own.ids, own.probs, row, slot, base)
        return
    row = find_row(shared, previous, token)
    if row >= 0:
        _add_row(ballot, shared.ids, shared.probs, row, slot, base)


@inner(inline=False)
def add_recycled(ballot, own, shared, table_ids, table_probs, before_last, last):
    """Candidates after (before_last, last): by pair, by last token, and of the static table (empty: none)."""
    if before_last >= 0:
        _add_rows(ballot, own, shared, before_last, last, ev.RECYCLED_PAIR, ev.RECYCLED_PAIR_CELLS)
    _add_rows(ballot, own, shared, -1, last, ev.RECYCLED, ev.RECYCLED_CELLS)
    if last < len(table_ids):
        _add_row(ballot, table_ids, table_probs, last, ev.SUCCESSOR_TABLE, ev.SUCCESSOR_TABLE_CELLS)
