"""What is learned: how far each kind of evidence can be trusted, one `Model` per namespace.

A cell holds the hit rate of the candidates it described (`rate` over `trials`), its logit (`strength`) and a
correction of its own (`bias`). A weight says how much of a slot's strength to believe, by the set of kinds of evidence
that name the candidate: a pointer that stands alone deserves another weight than one that the memory confirms.
`blend.py` reads and teaches these tables. About 1 MB; the start values make an untrained model useful at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from redraft.retrieval import evidence as ev

__all__ = ["BIAS", "CELL_COLUMNS", "RATE", "STRENGTH", "TRIALS", "Model", "new_model"]

RATE, TRIALS, STRENGTH, BIAS = range(4)  # columns of Model.cells
CELL_COLUMNS = 4


class Model(NamedTuple):
    """cells: float32[N_CELLS, 4]  RATE, TRIALS, STRENGTH, BIAS; weights: float32[N_SETS, N_SLOTS + 1], last: a constant."""

    cells: np.ndarray
    weights: np.ndarray


def new_model() -> Model:
    """The state before anything was seen."""
    rate = np.full(ev.N_CELLS, 0.1)
    lengths = np.array([1, 2, 3, 4, 5.5, 8, 12, 18, 30, 60])
    counts = np.array([1, 2, 3.5, 6.5, 12])
    rests = np.array([0, 1, 2, 4, 9, 25, 80])
    prior = counts[:, None] / (counts[:, None] + rests + (2 / (1 + lengths / 2))[:, None, None])
    for base in (ev.SESSION_FIRST_CELLS, ev.MEMORY_FIRST_CELLS, ev.CORPUS_FIRST_CELLS):
        table = rate[base : base + ev._FIRST_CELLS].reshape(ev.N_ORDERS, ev.N_LENGTHS, ev.N_COUNTS, ev.N_RESTS, 2)
        table[0] = prior[..., None]
        table[1:] = 0.3 * prior[..., None]
    ratios = np.array([0.005, 0.02, 0.065, 0.17, 0.37, 0.65, 0.9, 1.0])
    for base in (ev.SESSION_NEXT_CELLS, ev.MEMORY_NEXT_CELLS, ev.CORPUS_NEXT_CELLS):
        rate[base : base + ev._NEXT_CELLS].reshape(-1, 8)[:] = 0.7 * ratios
    for base in (ev.SESSION_ABSENT_CELLS, ev.MEMORY_ABSENT_CELLS, ev.CORPUS_ABSENT_CELLS):
        rate[base : base + ev._ABSENT_CELLS] = 0.05
    by_probability = np.array([0.005, 0.02, 0.06, 0.13, 0.3, 0.5, 0.6, 0.8])
    for base in (ev.RECYCLED_PAIR_CELLS, ev.RECYCLED_CELLS, ev.SUCCESSOR_TABLE_CELLS):
        rate[base : base + ev._RECYCLED_CELLS].reshape(8, 8)[:] = by_probability
    rate[ev.CALLER_CELLS : ev.CALLER_CELLS + ev._CALLER_CELLS].reshape(8, 8, 2)[:] = by_probability[:, None, None]
    clipped = np.clip(rate, 1e-4, 1 - 1e-4)
    strength = np.log(clipped / (1 - clipped))
    strength[0] = 0.0
    weights = np.full((ev.N_SETS, ev.N_SLOTS + 1), 0.15, np.float32)
    weights[:, [ev.SESSION_FIRST, ev.MEMORY_FIRST, ev.CORPUS_FIRST]] = 0.35
    weights[:, [ev.RECYCLED_PAIR, ev.RECYCLED, ev.CALLER]] = 0.35
    weights[:, ev.N_SLOTS] = 0.0
    cells = np.zeros((ev.N_CELLS, CELL_COLUMNS), np.float32)
    cells[:, RATE], cells[:, TRIALS], cells[:, STRENGTH] = rate, 2.0, strength
    return Model(cells, weights)
