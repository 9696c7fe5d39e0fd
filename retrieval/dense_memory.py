"""A namespace's dense memory: the projected states of what its sessions wrote, searched exactly.

A neighbour is of use only where the token chosen there is the token just committed. So keys are kept sorted by that token,
and a search compares with those of one token only: exact, never starved by the filter, and a few hundred comparisons out of
ten thousand keys; inverted lists whose centres are the tokens themselves need no training and no second structure.

Outputs come in one by one. Each makes a part of its own, and parts are merged as their sizes allow (the logarithmic method
of Bentley and Saxe 1980): each is at least twice as large as the next, so n keys lie in log n parts and a key is
copied log n times. Parts never change. Searching reads one tuple of them, which a writer replaces when it is done, so the
two never race and a search waits for nobody. Writers are serialised by their caller.

Bounded by a number of keys; the oldest outputs go first. What is forgotten is gone from every array.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["DenseMemory"]


class _Part(NamedTuple):
    """tokens: int32[n], ascending; keys: float32[n, d]; places: int64[n], of the token in `text`; owners: int64[n];
    text: int32[m], outputs, each followed by -1; text_owners: int64[m], ascending."""

    tokens: np.ndarray
    keys: np.ndarray
    places: np.ndarray
    owners: np.ndarray
    text: np.ndarray
    text_owners: np.ndarray


class DenseMemory:
    """Attributes:
    budget: keys kept at most. parts: tuple of parts, oldest first.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.parts: tuple[_Part, ...] = ()

    def __len__(self) -> int:
        return sum(len(part.tokens) for part in self.parts)

    def append(self, owner: int, text: np.ndarray, keys: np.ndarray, places: np.ndarray) -> None:
        """Add an output: int32[m] `text`, and the keys (float32[n, d]) of its tokens at `places` (int64[n]).

        Owners come in ascending order. An output with more keys than the budget keeps the last ones.
        """
        if self.budget == 0 or len(keys) == 0:
            return
        keys, places = keys[-self.budget :], places[-self.budget :]
        added = _sorted(
            text[places], keys, places, np.full(len(keys), owner), np.append(text, np.int32(-1)),
            np.full(len(text) + 1, owner),
        )  # fmt: skip
        parts = list(self.parts)
        excess = len(self) + len(keys) - self.budget
        while excess > 0:
            oldest = int(parts[0].text_owners[0])
            left = _without(parts[0], oldest)
            excess -= len(parts[0].tokens) - len(left.tokens)
            parts[0] = left
            if len(left.text) == 0:
                del parts[0]
        while parts and len(parts[-1].tokens) < 2 * len(added.tokens):
            added = _joined(parts.pop(), added)
        self.parts = (*parts, added)

    def search(self, key: np.ndarray, token: int, count: int) -> list[tuple[float, np.ndarray, int]]:
        """The nearest places where `token` was chosen: (similarity, text, place in it), nearest first."""
        found = []
        for part in self.parts:
            low, high = np.searchsorted(part.tokens, [token, token + 1])
            if low == high:
                continue
            similarities = part.keys[low:high] @ key
            best = np.argsort(-similarities, kind="stable")[:count]
            found += [(float(similarities[i]), part.text, int(part.places[low + i])) for i in best]
        return sorted(found, key=lambda neighbour: -neighbour[0])[:count]

    def forget(self, owner: int) -> bool:
        """Forget one output; returns whether there was anything to forget."""
        parts = [_without(part, owner) for part in self.parts]
        forgotten = any(len(new.text) < len(old.text) for new, old in zip(parts, self.parts))
        self.parts = tuple(part for part in parts if len(part.text))
        return forgotten

    def clear(self) -> None:
        self.parts = ()


def _sorted(tokens, keys, places, owners, text, text_owners) -> _Part:
    order = np.argsort(tokens, kind="stable")
    return _Part(tokens[order], keys[order], places[order], owners[order], text, text_owners)


def _joined(older: _Part, newer: _Part) -> _Part:
    columns = [np.concatenate(pair) for pair in zip(older, newer)]
    columns[2][len(older.places) :] += len(older.text)
    return _sorted(*columns)


def _without(part: _Part, owner: int) -> _Part:
    kept = part.text_owners != owner
    if kept.all():
        return part
    moved = np.cumsum(kept) - 1
    rows = part.owners != owner
    return _Part(
        part.tokens[rows], part.keys[rows], moved[part.places[rows]], part.owners[rows],
        part.text[kept], part.text_owners[kept],
    )  # fmt: skip
