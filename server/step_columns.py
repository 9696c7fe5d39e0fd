"""Commits and drafts of many sessions in columns: read, taken apart where need be, and answered.

A message per session and step costs Python a microsecond for every field that it touches, more than the field is worth.
In columns (`CommitBatch`, `DraftBatch`, `TreeBatch`) a field is touched once for all sessions, and the joined arrays are
what the drafter takes and gives anyway. Whether the columns fit each other is seen here; what one session's part of
them holds is that session's own affair, and where one is not as it should be, `commit_steps` makes of them the steps
that they stand for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import join_float32, join_int32, pack_float32, pack_int32

__all__ = ["CommitColumns", "check_once_each", "commit_steps", "read_commits", "write_trees"]


class CommitColumns(NamedTuple):
    """ids and starts of the sessions; sizes: (tokens, rows, ids of candidates) of each; fields: the bytes of the arrays."""

    ids: list[int]
    starts: list[int]
    sizes: list[tuple[int, int, int]]
    fields: tuple[bytes, bytes, bytes, bytes, bytes]

    def arrays(self) -> list[np.ndarray]:
        """tokens, last, previous, ids and probs of all, as `Drafter.commit_joined` takes them."""
        *int32, probs = [(field,) for field in self.fields]
        return [*map(join_int32, int32), join_float32(probs)]


def read_commits(batch) -> CommitColumns:
    """What a CommitBatch holds. Raises ValueError for columns that do not fit each other."""
    ids, lengths, rows, widths = list(batch.session_ids), list(batch.lengths), list(batch.rows), list(batch.widths)
    starts, there = list(batch.starts), batch.candidates
    check_once_each("commit_batch", ids)
    for name, column in (("starts", starts), ("lengths", lengths), ("rows", rows), ("widths", widths)):
        if len(column) != len(ids):
            raise ValueError(f"commit_batch.{name}: wanted one for each of {len(ids)} sessions, got {len(column)}")
    numbers = [row * width for row, width in zip(rows, widths)]
    fields = batch.tokens, there.tokens, there.previous, there.ids, there.probs
    all_tokens, all_rows, all_numbers = sum(lengths), sum(rows), sum(numbers)
    names = "tokens", "candidates.tokens", "candidates.previous", "candidates.ids", "candidates.probs"
    for name, field, wanted in zip(names, fields, (all_tokens, all_rows, all_rows, all_numbers, all_numbers)):
        if len(field) != 4 * wanted:
            raise ValueError(
                f"commit_batch.{name}: wanted {4 * wanted} bytes for {wanted} values of {len(ids)} sessions,"
                f" got {len(field)}"
            )
    return CommitColumns(ids, starts, list(zip(lengths, rows, numbers)), fields)


def check_once_each(what: str, ids) -> None:
    """Raises ValueError for a session that comes twice."""
    if len(set(ids)) != len(ids):
        seen: set[int] = set()
        for session_id in ids:
            if session_id in seen:
                raise ValueError(f"{what}.session_ids: wanted every session once, got {session_id} twice")
            seen.add(session_id)


def commit_steps(columns: CommitColumns) -> list[tuple[int, pb.CommitStep]]:
    """The session ids and commits that the columns stand for."""
    tokens, last, previous, ids, probs = columns.fields
    steps, begin, row, first = [], 0, 0, 0
    for session_id, start, (length, rows, numbers) in zip(columns.ids, columns.starts, columns.sizes):
        end, below, after = begin + 4 * length, row + 4 * rows, first + 4 * numbers
        fields = pb.CommitStep(start=start, tokens=tokens[begin:end])
        if rows:
            fields.candidates.tokens, fields.candidates.previous = last[row:below], previous[row:below]
            fields.candidates.ids, fields.candidates.probs = ids[first:after], probs[first:after]
        steps.append((session_id, fields))
        begin, row, first = end, below, after
    return steps


def write_trees(batch, ids: list[int], places: list[tuple[int, int]], tokens, parents, probs, sources) -> None:
    """Fill a TreeBatch with the trees at `places` (begin, end) in the arrays: one for each of `ids`."""
    batch.session_ids.extend(ids)
    batch.sizes.extend([end - begin for begin, end in places])
    fours = [slice(4 * begin, 4 * end) for begin, end in places]  # without the unused room between trees
    tokens, parents, probs, sources = pack_int32(tokens), pack_int32(parents), pack_float32(probs), sources.tobytes()
    batch.tokens, batch.parents = (
        b"".join([tokens[four] for four in fours]),
        b"".join([parents[four] for four in fours]),
    )
    batch.probs = b"".join([probs[four] for four in fours])
    batch.sources = b"".join([sources[begin:end] for begin, end in places])
