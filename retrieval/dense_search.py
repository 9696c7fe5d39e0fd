"""When and where a session asks with the target's hidden state, and what it makes of the answers.

A search of the session's own text costs some 40 microseconds and is made at every step. Stores cost three times as much, most
of it in Python and little in the index, so they are asked only where that can pay: where the sparse sources are unsure what
comes next (AdaPLD). What was found stays, and is followed on, until the next search.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval.dense_index import DenseIndex
from redraft.retrieval.dense_memory import DenseMemory
from redraft.retrieval.neighbours import (
    CURSORS,
    LENGTH,
    Neighbours,
    continuations,
    new_neighbours,
    put,
    relative_confidence,
)
from redraft.retrieval.state_ring import StateRing

__all__ = ["RING", "SURE", "DenseSearch", "checked_states"]

RING = 4096  # of its own states that a session keeps, 1 MB
SURE = 0.75  # probability of the likeliest next token at which stores are not asked


def checked_states(hidden, dimension: int, length: int) -> np.ndarray:
    """float32[m, dimension], 1 <= m <= length, from what a caller sent with a commit.

    Raises ValueError where no dense index is open, for another shape, numbers that are not finite, and states of no length.
    """
    if dimension == 0:
        raise ValueError("hidden: this drafter has no dense index that could be asked with a hidden state")
    if length < 1:
        raise ValueError(
            "hidden: no token of this text was chosen from a state: it has no prompt and one token at most"
        )
    states = np.asarray(hidden, np.float32)
    if states.ndim == 1:
        states = states[None]
    if states.ndim != 2 or states.shape[1] != dimension or not 1 <= len(states) <= length:
        raise ValueError(
            f"hidden: wanted shape [{dimension}] or [1..{length}, {dimension}], got {list(np.shape(hidden))}"
        )
    if not np.isfinite(states).all():
        raise ValueError("hidden: wanted finite numbers, got NaN or infinity")
    norms = np.linalg.norm(states, axis=1)
    if not (np.abs(norms - 1.0) < 0.01).all():
        raise ValueError(f"hidden: wanted projected states of length one, got lengths {norms.min():g}..{norms.max():g}")
    return states


class DenseSearch:
    """The dense side of one session.

    Attributes:
        ring: keys of the session's recent tokens; neighbours: what the kernels see; asked: how often stores were asked.
    """

    def __init__(self, dimension: int) -> None:
        self.ring = StateRing(RING, dimension)
        self.neighbours: Neighbours = new_neighbours()
        self.asked = 0
        self._key: np.ndarray | None = None

    def take(self, keys: np.ndarray, tokens: np.ndarray, length: int) -> None:
        """The states of the text's last tokens (int32[n], as many as keys) have come; the text has `length` tokens."""
        self.ring.add(keys, tokens, length - len(keys))
        self._key = keys[-1]

    @property
    def waiting(self) -> bool:
        """Whether the last token's state has come and nothing has been asked with it yet."""
        return self._key is not None

    def forget_key(self) -> None:
        self._key = None

    def cut(self, length: int) -> None:
        self.ring.cut(length)
        self._key = None

    def own(self, text: np.ndarray) -> int:
        """Search the session's own `text` (int32[n]); returns the bits of what is followed."""
        length = len(text)
        similarities, positions = self.ring.search(self._key, int(text[-1]), length - 1, CURSORS)
        tokens = continuations(text, positions, length)
        return put(self.neighbours, True, similarities, tokens, relative_confidence(similarities), length)

    def stores(self, text: np.ndarray, index: DenseIndex | None, memory: DenseMemory) -> int:
        """Search what lies outside the session; returns the bits of what is followed."""
        self.asked += 1
        token = int(text[-1])
        remembered = memory.search(self._key, token, CURSORS)
        retrieved = similarities = np.array([similarity for similarity, _, _ in remembered], np.float32)
        tokens = np.full((len(remembered), LENGTH), -1, np.int32)
        for row, (_, stored, place) in zip(tokens, remembered):
            continuation = _up_to_end(stored[place + 1 : place + 1 + LENGTH])
            row[: len(continuation)] = continuation
        if index is not None:
            near, positions = index.search(self._key, token, 2 * CURSORS)
            retrieved = np.concatenate([retrieved, near])
            near, positions = near[:CURSORS], positions[:CURSORS]
            ends = index.corpus.document_ends
            ends = ends[ends.searchsorted(positions, side="right")]
            similarities = np.concatenate([similarities, near])
            tokens = np.concatenate([tokens, continuations(index.corpus.tokens, positions, ends)])
        best = np.argsort(-similarities, kind="stable")[:CURSORS]
        confidence = relative_confidence(retrieved)
        return put(self.neighbours, False, similarities[best], tokens[best], confidence, len(text))


def _up_to_end(continuation: np.ndarray) -> np.ndarray:
    ends = np.flatnonzero(continuation < 0)
    return continuation[: ends[0]] if len(ends) else continuation
