"""What the target model itself thought likely at the positions that it verified: the food of Token Recycling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redraft.retrieval.kernel import kernel
from redraft.retrieval.tokens import as_tokens

__all__ = ["NO_LIMIT", "Candidates", "all_sound", "joined"]


@dataclass(frozen=True)
class Candidates:
    """The target's top-k next tokens at m verified positions, in the order in which they are to be learned.

    Later rows overwrite earlier ones, so rejected nodes come first and accepted ones last. Prefill positions are
    rows like any other.

    Attributes:
        tokens: int32[m], the input token at each position.
        previous: int32[m], the token before it on its own path; -1 where there is none.
        ids: int32[m, k], the k most likely next tokens, most likely first.
        probs: float32[m, k], their probabilities under the target's raw distribution (temperature 1, no filters).
    """

    tokens: np.ndarray
    previous: np.ndarray
    ids: np.ndarray
    probs: np.ndarray

    @classmethod
    def checked(cls, tokens, previous, ids, probs, vocab_size: int | None = None) -> Candidates:
        """Build from anything array-like. Raises TypeError or ValueError that names what came and what was wanted."""
        tokens = as_tokens(tokens, vocab_size, what="candidates.tokens")
        previous = np.asarray(previous)
        ids = np.asarray(ids)
        probs = np.ascontiguousarray(probs, np.float32)
        if previous.shape != tokens.shape:
            raise ValueError(f"candidates.previous: wanted shape {tokens.shape}, got {previous.shape}")
        if previous.size:
            before = as_tokens(np.maximum(previous, 0), vocab_size, what="candidates.previous")
            if int(previous.min()) < -1:
                raise ValueError(f"candidates.previous: wanted token ids or -1, got {int(previous.min())}")
            previous = np.where(previous < 0, np.int32(-1), before)
        previous = np.ascontiguousarray(previous, np.int32)
        if ids.ndim != 2 or ids.shape[0] != tokens.shape[0]:
            raise ValueError(f"candidates.ids: wanted shape ({tokens.shape[0]}, k), got {ids.shape}")
        if probs.shape != ids.shape:
            raise ValueError(f"candidates.probs: wanted shape {ids.shape} like ids, got {probs.shape}")
        if probs.size and not (np.isfinite(probs).all() and probs.min() >= 0 and probs.max() <= 1.0001):
            raise ValueError("candidates.probs: wanted finite probabilities between 0 and 1")
        flat = as_tokens(ids.reshape(-1), vocab_size, what="candidates.ids")
        return cls(tokens, previous, flat.reshape(ids.shape), probs)

    def copied(self, vocab_size: int | None = None) -> Candidates:
        """The same in arrays of its own, checked. Raises as `checked` does.

        A step brings a few rows, on which NumPy's checks take longer than drafting does: one pass over all of them says
        that they are sound, and only where they are not are they looked at one by one.
        """
        copies = [np.array(array, order="C") for array in (self.tokens, self.previous, self.ids, self.probs)]
        found = Candidates(*copies)
        return found if found.sound(vocab_size) else Candidates.checked(*copies, vocab_size)

    @property
    def regular(self) -> bool:
        """Whether the arrays have the types and shapes that the class promises, whatever their values."""
        tokens, previous, ids, probs = self.tokens, self.previous, self.ids, self.probs
        return (
            type(tokens) is type(previous) is type(ids) is type(probs) is np.ndarray
            and tokens.dtype == previous.dtype == ids.dtype == _INT32
            and probs.dtype == _FLOAT32
            and ids.ndim == 2
            and ids.shape == probs.shape
            and tokens.shape == previous.shape == ids.shape[:1]
        )

    def sound(self, vocab_size: int | None = None) -> bool:
        """Whether `checked` would return the same, if they are arrays that the kernel takes; False for all others."""
        tokens, previous, ids, probs = self.tokens, self.previous, self.ids, self.probs
        if not (
            self.regular and tokens.flags.carray and previous.flags.carray and ids.flags.carray and probs.flags.carray
        ):
            return False
        limit = NO_LIMIT if vocab_size is None else vocab_size
        return all_sound(_NONE, tokens, previous, ids.reshape(-1), probs.reshape(-1), limit)


NO_LIMIT = 2**31  # of ids, where the vocabulary's size is not known
_NONE = np.empty(0, np.int32)
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)  # comparing with these takes half as long as with the types


def joined(commits, vocab_size: int | None) -> tuple | None:
    """A batch's commits, `(tokens, candidates or None)` each, joined and looked at in one pass.

    Returns (sizes, tokens, last, previous, ids, probs): arrays of one dimension, one commit after the other, `last` the
    tokens of the candidates; sizes has (tokens, rows of candidates, ids of candidates) of each. None if anything is not as
    `as_tokens` and `Candidates.checked` want it, or has to be converted first.
    """
    sizes, tokens, opinions = [], [], []
    for new, candidates in commits:
        if type(new) is not np.ndarray or new.dtype != _INT32 or new.ndim != 1:
            return None
        rows = numbers = 0
        if candidates is not None:
            if not (isinstance(candidates, Candidates) and candidates.regular):
                return None
            rows, numbers = len(candidates.tokens), candidates.ids.size
            opinions.append(candidates)
        sizes.append((len(new), rows, numbers))
        tokens.append(new)
    try:
        arrays = (
            _one_after_the_other(tokens, _INT32),
            _one_after_the_other([c.tokens for c in opinions], _INT32),
            _one_after_the_other([c.previous for c in opinions], _INT32),
            _one_after_the_other([c.ids for c in opinions], _INT32),
            _one_after_the_other([c.probs for c in opinions], _FLOAT32),
        )
    except TypeError:  # one of them is not C-contiguous
        return None
    return (sizes, *arrays) if all_sound(*arrays, NO_LIMIT if vocab_size is None else vocab_size) else None


def _one_after_the_other(parts: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """`np.concatenate` for C-contiguous arrays of any shape, flat, in a quarter of its time. Raises TypeError for others."""
    return np.frombuffer(bytearray().join(parts), dtype)


@kernel(allocates=False)
def all_sound(tokens, last, previous, ids, probs, limit):
    """Whether all ids are in 0..limit-1 (`previous` may be -1) and all probabilities in 0..1; arrays of one dimension.

    tokens: of commits; last, previous, ids, probs: of the candidates of one commit or many.
    """
    for token in tokens:
        if not 0 <= token < limit:
            return False
    for row in range(len(last)):
        if not (0 <= last[row] < limit and -1 <= previous[row] < limit):
            return False
    for i in range(len(ids)):
        if not (0 <= ids[i] < limit and 0.0 <= probs[i] <= 1.0001):
            return False
    return True
