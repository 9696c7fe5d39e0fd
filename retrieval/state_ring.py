"""The projected states of a session's own recent tokens: which of several equal passages is most like this moment.

An exact match says where the last tokens occurred before; it cannot say which occurrence is meant. PLD+ (Somasundaram et
al. 2025) compares the target's states: the state from which the last token was chosen, with those from which the same token
was chosen earlier. A ring keeps the keys of the latest `capacity` tokens; a search compares those whose token is the one in
question, about 10 microseconds for 4096 keys. The prompt's states come with the first commit, so a passage of the prompt
can be chosen among, too.
"""

from __future__ import annotations

import numpy as np

__all__ = ["StateRing"]


class StateRing:
    """Row p % capacity belongs to the token at position p of the session's text.

    keys: float32[capacity, dimension], of length one; positions: int64[capacity], -1 = none; tokens: int32[capacity].
    """

    def __init__(self, capacity: int, dimension: int) -> None:
        self.keys = np.zeros((capacity, dimension), np.float32)
        self.positions = np.full(capacity, -1, np.int64)
        self.tokens = np.full(capacity, -1, np.int32)

    def add(self, keys: np.ndarray, tokens: np.ndarray, first: int) -> None:
        """Take the keys of `tokens` (int32[n]), which stand at positions `first` and on; the last `capacity` are kept."""
        capacity = len(self.positions)
        kept = slice(max(len(keys) - capacity, 0), None)
        positions = np.arange(first, first + len(keys))[kept]
        rows = positions % capacity
        self.keys[rows], self.tokens[rows], self.positions[rows] = keys[kept], tokens[kept], positions

    def cut(self, length: int) -> None:
        """Forget what belongs to positions from `length` on."""
        gone = self.positions >= length
        self.positions[gone] = self.tokens[gone] = -1

    def search(self, key: np.ndarray, token: int, before: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(similarities float32[m], positions int64[m]) of the nearest places, ahead of position `before`, where `token` was
        chosen; nearest first, equal ones latest first."""
        rows = np.flatnonzero((self.tokens == token) & (self.positions < before))
        similarities, positions = self.keys[rows] @ key, self.positions[rows]
        order = np.lexsort((-positions, -similarities))[:count]
        return similarities[order], positions[order]

    def since(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """(keys, positions) of what is kept from `position` on, in order."""
        rows = np.flatnonzero(self.positions >= position)
        rows = rows[np.argsort(self.positions[rows])]
        return self.keys[rows], self.positions[rows]
