"""Where a text repeats itself: what is won inside a repetition loop says little about a drafter.

A model that got stuck writes the same sentence for ever, and any drafter is then right for ever. Such stretches are
marked so that they can be counted apart.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval.kernel import kernel

__all__ = ["in_loop"]


@kernel
def _mark(text, longest_period, repeats, marked):
    n = len(text)
    for period in range(1, longest_period + 1):
        run = 0  # how many tokens up to here equal the token one period before
        for i in range(period, n):
            run = run + 1 if text[i] == text[i - period] else 0
            if run == (repeats - 1) * period:
                marked[i - repeats * period + 1 : i + 1] = True
            elif run > (repeats - 1) * period:
                marked[i] = True


def in_loop(text: np.ndarray, *, longest_period: int = 48, repeats: int = 4) -> np.ndarray:
    """bool[n]: which of the tokens int32[n] lie in a stretch of some period <= 48 that is seen at least 4 times.

    O(n * longest_period) time.
    """
    marked = np.zeros(len(text), bool)
    _mark(text, longest_period, repeats, marked)
    return marked
