"""Token Recycling: what the target itself thought likely after a token the last time it saw it.

Every verified position, rejected nodes included, yields the target's top-8 next tokens. They are kept by last token
and by last two tokens (Luo et al. 2024, "Turning Trash into Treasure", keeps the last token's only), with
probabilities as coarse as evidence wants them; a later visit overwrites. Rejected nodes are most of what is learned,
since a step verifies many and accepts few.

A table is open addressing over the key (previous, token), previous = -1 for rows by last token alone. It is bounded:
when `capacity` rows are in use, the oldest row makes room. A session has a small table of its own over the
namespace's; below both may lie the model's static successor table (one row per token of the vocabulary).

Cost: one probe and one row written per row learned. A draft looks up four keys a place, and most of it is waiting for
memory: so a row is one line of it (64 bytes, key, ids and probabilities together), and a look-up in vain reads the
slots alone. It knows only two tokens of context: contexts and pointers are better wherever text repeats, this is
better where it does not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from redraft.retrieval.evidence import probability_bucket
from redraft.retrieval.kernel import inner, kernel
from redraft.retrieval.prefetch import prefetch

__all__ = ["WIDTH", "RecyclingTable", "find_row", "learn_rows", "new_table"]

WIDTH = 8  # successors kept per row
AHEAD = 32  # rows to be learned whose memory is asked for together
# columns of RecyclingTable.rows
PREVIOUS, TOKEN, BUCKETS, IDS = range(4)  # WIDTH ids
COLUMNS = 16  # a line of memory


class RecyclingTable(NamedTuple):
    """slots: int32[2**k], -1 = empty; the low k bits are the row, above them stand the hash's bits from k on;
    rows: int32[capacity, 16], each one line of memory: PREVIOUS, TOKEN (the key), BUCKETS (`evidence.probability_bucket`
    of each id, 4 bits each, the first lowest), IDS (8, -1 = none); header: int64[2]  rows in use, next row to give up."""

    slots: np.ndarray
    rows: np.ndarray
    header: np.ndarray


def new_table(capacity: int) -> RecyclingTable:
    """An empty table for `capacity` rows (0 is allowed: it learns and finds nothing)."""
    line = 4 * COLUMNS
    room = np.zeros((capacity + 1) * line, np.uint8)  # one more, to begin where a line begins
    begin = -room.__array_interface__["data"][0] % line
    return RecyclingTable(
        np.full(max(4, 1 << int(2 * capacity - 1).bit_length()), -1, np.int32),
        room[begin : begin + capacity * line].view(np.int32).reshape(capacity, COLUMNS),
        np.zeros(2, np.int64),
    )


@inner
def _hash(previous, token):
    """31 bits; callers mask it to the table's size."""
    key = (np.int64(previous) + 1) << 32 | np.int64(token)
    return ((key * 0x2545F4914F6CDD1D) >> 30) & 0x7FFFFFFF


@inner(inline=False)
def find_row(table, previous, token):
    """The row learned after (previous, token), or after token alone for previous = -1; -1 if there is none."""
    slots, rows = table.slots, table.rows
    mask = len(slots) - 1
    key = _hash(previous, token)
    slot = key & mask
    while True:
        entry = np.int64(slots[slot])
        if entry < 0:
            return np.int64(-1)
        row = entry & mask
        if (entry ^ key) & ~mask == 0 and rows[row, PREVIOUS] == previous and rows[row, TOKEN] == token:
            return row
        slot = (slot + 1) & mask


@inner
def prefetch_slot(table, previous, token):
    """Have the line fetched in which `find_row` begins."""
    prefetch(table.slots, _hash(previous, token) & (len(table.slots) - 1))


@inner
def prefetch_row(table, previous, token):
    """The same for the row that it will look at first, when the slot has come."""
    mask = len(table.slots) - 1
    key = _hash(previous, token)
    entry = np.int64(table.slots[key & mask])
    prefetch(table.rows, entry & mask if (entry ^ key) & ~mask == 0 else 0)


@inner(inline=False)
def _vacate(table, row):
    """Take a row out of the table, closing the gap in its run of slots."""
    slots, rows = table.slots, table.rows
    mask = len(slots) - 1
    hole = _hash(rows[row, PREVIOUS], rows[row, TOKEN]) & mask
    while slots[hole] & mask != row:
        hole = (hole + 1) & mask
    probe = hole
    while True:
        probe = (probe + 1) & mask
        other = slots[probe]
        if other < 0:
            break
        home = _hash(rows[other & mask, PREVIOUS], rows[other & mask, TOKEN]) & mask
        if ((probe - home) & mask) >= ((probe - hole) & mask):
            slots[hole] = other
            hole = probe
    slots[hole] = -1


@inner(inline=False)
def _row_for(table, previous, token):
    """The row of the key, made if need be."""
    row = find_row(table, previous, token)
    if row >= 0:
        return row
    slots, rows, header = table.slots, table.rows, table.header
    if header[0] < len(rows):
        row = header[0]
        header[0] += 1
    else:
        row = header[1]
        header[1] = (row + 1) % len(rows)
        _vacate(table, row)
    rows[row, IDS] = -1  # for readers that find it before it is written
    rows[row, PREVIOUS], rows[row, TOKEN] = previous, token
    mask = len(slots) - 1
    key = _hash(previous, token)
    slot = key & mask
    while slots[slot] >= 0:
        slot = (slot + 1) & mask
    slots[slot] = key & ~mask | row
    return row


@kernel(allocates=False)
def learn_rows(table, tokens, previous, ids, probs):
    """Learn verified positions in order (see `Candidates`): a row by token and, where previous >= 0, one by pair."""
    if len(table.rows) == 0:
        return
    for begin in range(0, len(tokens), AHEAD):
        end = min(begin + AHEAD, len(tokens))
        for position in range(begin, end):
            prefetch_slot(table, -1, tokens[position])
            prefetch_slot(table, previous[position], tokens[position])
        for position in range(begin, end):
            prefetch_row(table, -1, tokens[position])
            prefetch_row(table, previous[position], tokens[position])
        for position in range(begin, end):
            _learn(table, -1, tokens[position], ids[position], probs[position])
            if previous[position] >= 0:
                _learn(table, previous[position], tokens[position], ids[position], probs[position])


@inner(inline=False)
def _learn(table, previous, token, ids, probs):
    """Write the row of the key; `ids` and `probs` are those of one position."""
    row = table.rows[_row_for(table, previous, token)]
    width = min(WIDTH, len(ids))
    buckets = 0
    for rank in range(width):
        row[IDS + rank] = ids[rank]
        buckets |= probability_bucket(probs[rank]) << 4 * rank
    row[IDS + width : IDS + WIDTH] = -1
    row[BUCKETS] = buckets


@inner
def bucket(buckets, rank):
    """The bucket at `rank` in a row's BUCKETS."""
    return buckets >> 4 * rank & 15
