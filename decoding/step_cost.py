"""What a step costs by its size: seconds of whole steps, kept as a curve. Drafting is not in it; it has a clock of its own.

A step is forward, head, top-k and bookkeeping together; its size is the number of *entries* that the target sees, one root
for each sequence and all nodes. Nothing is assumed of the machine; how it is measured follows from what machines do:

- They speed up and slow down and are disturbed. So sizes are tried in *rounds*, each size once, one after the other; a round
  yields ratios to its own plain step, and the curve is the median of the last rounds. (Learning from every step, with a level that
  follows the load, was tried: sizes that are seldom used drift away from those that are used always.)
- The first forward of a new shape makes kernels for it and is not counted. Few shapes are used: the sizes in `ENTRIES`.
- Longer contexts cost more per entry, so each doubling of the context has its own rounds, and so have numbers of sequences that
  differ by more than a factor of two. Elsewhere, and until a round is over, the nearest curve stands in.

The first round is no text: at a model's first use `first_costs.py` runs it, so that already the first step is
right. Later rounds write text like all other steps, with trees of a size that may not be the best: one every 512 steps, the first
of a context's or batch's own after 128. Curves belong to the model and last as long as it does.
"""

from __future__ import annotations

import statistics
import weakref
from collections import Counter, defaultdict, deque

import numpy as np

__all__ = ["ENTRIES", "StepCost", "cost_of", "sizes_to_try"]

ENTRIES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_TRIED = (
    (1, 1),
    (8, 2),
    (16, 3),
    (32, 4),
    (4, 2),
    (2, 2),  # some kernels like two rows less than four
    (64, 8),
    (128, 16),
)  # the larger of so many and so many per sequence
_KEPT_ROUNDS = 5
_ROUND_AFTER, _ROUND_EVERY = 128, 512  # steps

_costs: weakref.WeakKeyDictionary[object, StepCost] = weakref.WeakKeyDictionary()


def cost_of(model) -> StepCost:
    """The curve that is kept for `model`."""
    return _costs.setdefault(model, StepCost())


def sizes_to_try(rows: int) -> list[int]:
    """The sizes of a round, in their order."""
    return list(dict.fromkeys(max(entries, rows * each) for entries, each in _TRIED))


class _Rounds:
    """What was measured with one number of sequences and one doubling of the context: seconds by entries, by round."""

    def __init__(self) -> None:
        self.over: deque[dict[int, float]] = deque(maxlen=_KEPT_ROUNDS)
        self.current: dict[int, float] = {}
        self.steps_left = _ROUND_AFTER  # until the next round begins

    def ratios(self, rows: int) -> dict[int, float]:
        """Seconds by entries, in those of the same round's plain step."""
        found = defaultdict(list)
        for seconds in (*self.over, self.current):
            if rows in seconds:
                for entries, each in seconds.items():
                    found[entries].append(each / seconds[rows])
        return {entries: statistics.median(each) for entries, each in found.items()}


class StepCost:
    """Seconds of a step, in those of a plain step."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, int], _Rounds] = defaultdict(_Rounds)
        self._shapes: Counter[tuple[int, int]] = Counter()

    def observe(self, rows: int, context: int, entries: int, seconds: float) -> None:
        """A step of `rows` sequences, the longest `context` tokens long, took `seconds`."""
        self._shapes[rows, entries] += 1
        rounds = self._rounds[_key(rows, context)]
        if rounds.steps_left > 0:
            rounds.steps_left -= 1
        elif self._shapes[rows, entries] > 1:
            rounds.current.setdefault(entries, seconds)

    def tried(self, rows: int, context: int) -> list[int] | None:
        """Sizes that the round which is on has; None where none is on."""
        rounds = self._rounds[_key(rows, context)]
        return None if rounds.steps_left > 0 or self._has_neighbour(rows, context) else list(rounds.current)

    def _has_neighbour(self, rows: int, context: int) -> bool:
        """Whether the curve of about as many sequences will do: a batch that ends one by one would measure all the time."""
        _, doubling = _key(rows, context)
        return any(
            other != rows and rows <= 2 * other <= 4 * rows and place == doubling and rounds.over
            for (other, place), rounds in self._rounds.items()
        )

    @property
    def measured(self) -> bool:
        """Whether any round is over."""
        return any(rounds.over for rounds in self._rounds.values())

    def add_round(self, rows: int, context: int, seconds: dict[int, float]) -> None:
        """A round that was measured elsewhere: seconds by entries, kernels made."""
        rounds = self._rounds[_key(rows, context)]
        rounds.over.append(dict(seconds))
        rounds.steps_left = _ROUND_EVERY
        self._shapes.update((rows, entries) for entries in seconds)

    def knows(self, rows: int, context: int, entries: int) -> bool:
        """Whether this round has tried the size, or one before it has."""
        rounds = self._rounds[_key(rows, context)]
        return any(entries in each for each in (rounds.current, *rounds.over))

    def end_round(self, rows: int, context: int) -> None:
        """All that was worth trying is tried."""
        rounds = self._rounds[_key(rows, context)]
        if rows in rounds.current and len(rounds.current) > 1:
            rounds.over.append(rounds.current)
            rounds.current = {}
            rounds.steps_left = _ROUND_EVERY

    def seconds(self, rows: int, context: int, entries: np.ndarray) -> np.ndarray:
        """float64: plain steps' worth of seconds at `entries`; interpolated between and extended beyond tried sizes."""
        curve = self._curve(rows, context)
        known = np.array(sorted(curve), np.float64)
        values = np.array([curve[int(size)] for size in known])
        estimate = np.interp(entries, known, values)
        left = int(np.flatnonzero(known <= max(known[-1] / 2, known[0]))[-1])
        slope = max(values[-1] - values[left], 0.0) / max(known[-1] - known[left], 1.0)
        return estimate + np.maximum(entries - known[-1], 0) * slope

    def _curve(self, rows: int, context: int) -> dict[int, float]:
        """Ratios by entries; sizes that were not tried here come from the nearest number of sequences and context."""
        wanted = _key(rows, context)
        curve = {rows: 1.0} | self._rounds[wanted].ratios(rows)

        def distance(key: tuple[int, int]) -> tuple[int, int]:
            return abs(key[0] - wanted[0]), abs(key[1] - wanted[1])

        for key in sorted(self._rounds, key=distance):
            other = self._rounds[key].ratios(key[0])
            if len(other) > 1:
                known = np.array(sorted(other), np.float64)
                values = np.array([other[int(size)] for size in known])
                plain = float(np.interp(rows, known, values))
                for size in other:
                    if size > rows:
                        curve.setdefault(size, other[size] / plain)
        return curve


def _key(rows: int, context: int) -> tuple[int, int]:
    return rows, max(context, 128).bit_length()
