"""Token Recycling: what the target itself thought likely after a token the last time it saw it.

Every verified position, rejected nodes included, yields the target's top-8 next tokens. They are kept by last token
and by last two tokens (Luo et al. 2024, "Turning Trash into Treasure", keeps the last token's only), with
probabilities; a later visit overwrites. Rejected nodes are most of what is learned, since a step verifies many
and accepts few.

A table is open addressing over the key (previous, token), previous = -1 for rows by last token alone. It is bounded:
when `capacity` rows are in use, the oldest row makes room. A session has a small table of its own over the
namespace's; below both may lie the model's static successor table (one row per token of the vocabulary).

Cost: one probe and 64 bytes copied per row learned; 72 bytes a row. It knows only two tokens of context: contexts and
pointers are better wherever text repeats, this is better where it does not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from redraft.retrieval.kernel import inner, kernel

__all__ = ["WIDTH", "RecyclingTable", "find_row", "learn_rows", "new_table"]

WIDTH = 8  # successors kept per row


class RecyclingTable(NamedTuple):
    """slots: int32[2**k], -1 = empty; keys: int64[capacity]; ids: int32[capacity, 8], -1 = none;
    probs: float32[capacity, 8]; header: int64[2]  rows in use, next row to give up."""

    slots: np.ndarray
    keys: np.ndarray
    ids: np.ndarray
    probs: np.ndarray
    header: np.ndarray


def new_table(capacity: int) -> RecyclingTable:
    """An empty table for `capacity` rows (0 is allowed: it learns and finds nothing)."""
    return RecyclingTable(
        np.full(max(4, 1 << int(2 * capacity).bit_length()), -1, np.int32),
        np.zeros(capacity, np.int64),
        np.full((capacity, WIDTH), -1, np.int32),
        np.zeros((capacity, WIDTH), np.float32),
        np.zeros(2, np.int64),
    )


@inner
def _home(key, mask):
    return ((key * 0x2545F4914F6CDD1D) >> 30) & mask


@inner(inline=False)
def find_row(table, previous, token):
    """The row learned after (previous, token), or after token alone for previous = -1; -1 if there is none."""
    key = (np.int64(previous) + 1) << 32 | np.int64(token)
    mask = len(table.slots) - 1
    slot = _home(key, mask)
    while True:
        row = table.slots[slot]
        if row < 0 or table.keys[row] == key:
            return row
        slot = (slot + 1) & mask


@inner(inline=False)
def _vacate(table, row):
    """Take a row out of the table, closing the gap in its run of slots."""
    slots, keys = table.slots, table.keys
    mask = len(slots) - 1
    hole = _home(keys[row], mask)
    while slots[hole] != row:
        hole = (hole + 1) & mask
    probe = hole
    while True:
        probe = (probe + 1) & mask
        other = slots[probe]
        if other < 0:
            break
        home = _home(keys[other], mask)
        if ((probe - home) & mask) >= ((probe - hole) & mask):
            slots[hole] = other
            hole = probe
    slots[hole] = -1


@inner(inline=False)
def _row_for(table, previous, token):
    """The row of the key, made if need be."""
    row = np.int64(find_row(table, previous, token))
    if row >= 0:
        return row
    header = table.header
    if header[0] < len(table.keys):
        row = header[0]
        header[0] += 1
    else:
        row = header[1]
        header[1] = (row + 1) % len(table.keys)
        _vacate(table, row)
    key = (np.int64(previous) + 1) << 32 | np.int64(token)
    table.keys[row] = key
    mask = len(table.slots) - 1
    slot = _home(key, mask)
    while table.slots[slot] >= 0:
        slot = (slot + 1) & mask
    table.slots[slot] = row
    return row


@kernel(allocates=False)
def learn_rows(table, tokens, previous, ids, probs):
    """Learn verified positions in order (see `Candidates`): a row by token and, where previous >= 0, one by pair."""
    if len(table.keys) == 0:
        return
    width = min(WIDTH, ids.shape[1])
    for position in range(len(tokens)):
        for by_pair in range(2):
            if by_pair and previous[position] < 0:
                continue
            row = _row_for(table, previous[position] if by_pair else -1, tokens[position])
            for rank in range(WIDTH):
                table.ids[row, rank] = ids[position, rank] if rank < width else -1
                table.probs[row, rank] = probs[position, rank] if rank < width else 0.0
