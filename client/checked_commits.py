"""What the caller commits: checked, and packed for the wire.

The arrays of a step are small, so that looking at each of them, and packing it, takes longer than what is in them. A
batch's are joined first, and looked at and packed in one pass; only where something is wrong, has to be converted, or the
kernel is not compiled yet, is each commit looked at by itself, and what is wrong named.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redraft.retrieval.candidates import Candidates, joined
from redraft.retrieval.tokens import as_tokens
from redraft.v1.wire import pack_float32, pack_int32

__all__ = ["CheckedCommits", "checked_commits"]


@dataclass(slots=True)
class CheckedCommits:
    """What a batch commits.

    tokens: int32[n] of each commit, which may be the caller's own array. columns: sizes and arrays of all, as
    `candidates.joined` returns them, where the quick check was enough and nobody brings hidden states; None elsewhere.
    """

    tokens: list[np.ndarray]
    columns: tuple | None
    _packed: list[tuple] | None = None

    def apart(self) -> list[tuple[tuple[bytes, ...] | None, bytes | None]]:
        """The bytes of each commit's arrays of candidates or None, and of its hidden states or None."""
        if self._packed is None:
            self._packed = [(candidates, None) for candidates in _packed_together(*self.columns)]
        return self._packed


def checked_commits(commits, vocab_size: int | None, *, compiled: bool) -> CheckedCommits:
    """commits: (tokens, candidates, hidden) each, as a session's `commit` takes them.

    Raises what the first that is wrong would raise alone: TypeError or ValueError. `compiled`: the quick check has been
    compiled; nobody waits for the compiler here.
    """
    if compiled and len(commits) > 1:
        arrays = _together(commits, vocab_size)
        if arrays is not None:
            tokens, columns = arrays
            if all(commit[2] is None for commit in commits):
                return CheckedCommits(tokens, columns)
            states = [_packed_states(commit[2]) for commit in commits]
            return CheckedCommits(tokens, None, list(zip(_packed_together(*columns), states)))
    tokens, packed = [], []
    for new, candidates, hidden in commits:
        tokens.append(as_tokens(new, vocab_size))
        packed.append((_packed(candidates, vocab_size, compiled), _packed_states(hidden)))
    return CheckedCommits(tokens, None, packed)


def _together(commits, vocab_size: int | None) -> tuple[list[np.ndarray], tuple] | None:
    """The tokens of each commit, and sizes and arrays of all; None where something is wrong, to be named by who looks at
    each, or has to be converted (lists of tokens are, here, as generate loops bring them)."""
    try:
        tokens = [new if type(new) is np.ndarray else as_tokens(new, vocab_size) for new, *_ in commits]
    except (TypeError, ValueError):
        return None
    columns = joined([(new, commit[1]) for new, commit in zip(tokens, commits)], vocab_size)
    return None if columns is None else (tokens, columns)


def _packed_together(sizes, tokens, last, previous, ids, probs) -> list[tuple[bytes, ...] | None]:
    """The bytes of each commit's candidates, cut from those of all."""
    last, previous, ids, probs = pack_int32(last), pack_int32(previous), pack_int32(ids), pack_float32(probs)
    packed, row, first = [], 0, 0
    for _, rows, numbers in sizes:
        if rows:
            lines, table = slice(row, row + 4 * rows), slice(first, first + 4 * numbers)
            packed.append((last[lines], previous[lines], ids[table], probs[table]))
            row, first = lines.stop, table.stop
        else:
            packed.append(None)
    return packed


def _packed(candidates, vocab_size: int | None, compiled: bool) -> tuple[bytes, ...] | None:
    if candidates is None:
        return None
    if not isinstance(candidates, Candidates):
        raise TypeError(f"candidates: wanted redraft.Candidates or None, got {type(candidates).__name__}")
    found = candidates
    if not (compiled and found.sound(vocab_size)):
        found = Candidates.checked(found.tokens, found.previous, found.ids, found.probs, vocab_size)
    return pack_int32(found.tokens), pack_int32(found.previous), pack_int32(found.ids), pack_float32(found.probs)


def _packed_states(hidden) -> bytes | None:
    """The bytes of a float32[m, d]. Raises ValueError for other numbers of dimensions, and numbers that are not finite."""
    if hidden is None:
        return None
    array = np.atleast_2d(np.asarray(hidden, np.float32))
    if array.ndim != 2:
        raise ValueError(f"hidden: wanted shape [d] or [m, d], got {list(array.shape)}")
    if not np.isfinite(array).all():
        raise ValueError("hidden: wanted finite numbers, got NaN or infinity")
    return pack_float32(array)
