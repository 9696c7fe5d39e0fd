"""Evidence from the target's own earlier opinions: Token Recycling rows and the model's static successor table.

A row's rank and stored probability choose the cell. The session's row is preferred to the namespace's: both hold the
latest visit, the session's with this text in mind.
"""

from __future__ import annotations

from redraft.retrieval import evidence as ev
from redraft.retrieval import token_recycling as tr
from redraft.retrieval.kernel import inner


@inner
def prefetch_slots(table, before_last, last):
    """Have the memory fetched in which the look-ups of `add_recycled` begin."""
    tr.prefetch_slot(table, before_last, last)
    tr.prefetch_slot(table, -1, last)


@inner
def prefetch_rows(table, before_last, last):
    """The same for the rows, when the slots have come."""
    tr.prefetch_row(table, before_last, last)
    tr.prefetch_row(table, -1, last)


@inner(inline=False)
def _add_row(ballot, row, slot, base):
    """`row`: int32[16] of a table."""
    buckets = row[tr.BUCKETS]
    for rank in range(tr.WIDTH):
        token = row[tr.IDS + rank]
        if token < 0:
            break
        entry = ev.candidate(ballot, token)
        ev.put_if_free(ballot, entry, slot, base + rank * 8 + tr.bucket(buckets, rank))
        ballot.named_by[entry] |= ev.BY_RECYCLING


@inner(inline=False)
def _add_rows(ballot, own, shared, previous, token, slot, base):
    row = tr.find_row(own, previous, token)
    if row >= 0:
        _add_row(ballot, own.rows[row], slot, base)
        return
    row = tr.find_row(shared, previous, token)
    if row >= 0:
        _add_row(ballot, shared.rows[row], slot, base)


@inner(inline=False)
def _add_successors(ballot, ids, probs):
    """`ids`, `probs`: a row of the static table."""
    for rank in range(tr.WIDTH):
        if ids[rank] < 0:
            break
        entry = ev.candidate(ballot, ids[rank])
        cell = ev.SUCCESSOR_TABLE_CELLS + rank * 8 + ev.probability_bucket(probs[rank])
        ev.put_if_free(ballot, entry, ev.SUCCESSOR_TABLE, cell)
        ballot.named_by[entry] |= ev.BY_RECYCLING


@inner(inline=False)
def add_recycled(ballot, own, shared, table_ids, table_probs, before_last, last):
    """Candidates after (before_last, last): by pair, by last token, and of the static table (empty: none)."""
    if before_last >= 0:
        _add_rows(ballot, own, shared, before_last, last, ev.RECYCLED_PAIR, ev.RECYCLED_PAIR_CELLS)
    _add_rows(ballot, own, shared, -1, last, ev.RECYCLED, ev.RECYCLED_CELLS)
    if last < len(table_ids):
        _add_successors(ballot, table_ids[last], table_probs[last])
