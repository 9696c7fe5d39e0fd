"""What is learned: how far each kind of evidence can be trusted, one `Model` per namespace.

A cell holds the hit rate of the candidates it described (`rate` over `trials`), its logit (`strength`) and a
correction of its own (`bias`). A weight says how much of a slot's strength to believe. It is the sum of four: one by the
set of kinds of evidence that name the candidate (a pointer that stands alone deserves another weight than one that the
memory confirms), one by the situation, that is, by how long the matches of session, memory and corpora are, and one by
each of the last two tokens: after some tokens much is certain, after others (a bracket, "the") little is.
`blend.py` reads and teaches these tables, 1.1 MB.

A new namespace does not begin with nothing: rough values by formula, and over them what was learned in 36 answers of a
small chat model, `start_values.npz` (made by `benchmarks/start_values.py`; it holds no token ids). What all candidates
share, weights by situation and ages, is left out of it: there was no caller's draft and no index to learn them with.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import NamedTuple

import numpy as np

from redraft.retrieval import evidence as ev

__all__ = ["BIAS", "CELL_COLUMNS", "RATE", "STRENGTH", "TRIALS", "Model", "formula_model", "new_model"]

RATE, TRIALS, STRENGTH, BIAS = range(4)  # columns of Model.cells
CELL_COLUMNS = 4
START_TRIALS = 5.0  # how much the formulas weigh
START_CONSTANT = 1.0
# Neighbours of the target's state: by similarity, then by the share that agrees (SmolLM2 on Spec-Bench and HumanEval).
DENSE_START = (
    (0.01, 0.04, 0.04, 0.05, 0.11),
    (0.01, 0.04, 0.05, 0.08, 0.12),
    (0.035, 0.07, 0.11, 0.15, 0.2),
    (0.04, 0.09, 0.12, 0.22, 0.34),
    (0.05, 0.12, 0.23, 0.31, 0.52),
    (0.08, 0.16, 0.3, 0.57, 0.68),
    (0.09, 0.21, 0.4, 0.62, 0.79),
)
RERANK_START = (
    (0.02, 0.02, 0.02, 0.03, 0.12),
    (0.02, 0.02, 0.03, 0.05, 0.33),
    (0.03, 0.08, 0.14, 0.15, 0.54),
    (0.04, 0.11, 0.2, 0.26, 0.64),
    (0.045, 0.15, 0.26, 0.32, 0.72),
    (0.06, 0.15, 0.36, 0.57, 0.81),
    (0.15, 0.23, 0.47, 0.68, 0.9),
)


class Model(NamedTuple):
    """cells: float32[N_CELLS, 4]  RATE, TRIALS, STRENGTH, BIAS;
    weights: float32[N_ROWS, N_SLOTS + 1]  rows by set, situation, last token, the token before; last column: a constant."""

    cells: np.ndarray
    weights: np.ndarray


def new_model() -> Model:
    """The state of a new namespace."""
    return Model(*(table.copy() for table in _start()))


@functools.cache
def _start() -> Model:
    cells, weights = formula_model()
    with (resources.files(__package__) / "start_values.npz").open("rb") as file:
        learned = np.load(file)
        touched, by_set = learned["cells"], learned["weights"]
        if by_set.shape != (ev.N_SETS, ev.N_SLOTS + 1) or int(learned["n_cells"]) != ev.TRACK_RECORD_CELLS:
            raise ValueError("start_values.npz is of another layout of evidence: run benchmarks/start_values.py again")
        cells[touched, RATE], cells[touched, TRIALS] = learned["rates"], learned["trials"]
        cells[touched, BIAS] = learned["biases"]
    cells[touched, STRENGTH] = _logit(cells[touched, RATE])
    weights[: ev.N_SETS] = by_set
    return Model(cells, weights)


def formula_model() -> Model:
    """Rough values that are about right for text, code and conversations, in cells where nothing was learned."""
    rate = _start_rates()
    cells = np.zeros((ev.N_CELLS, CELL_COLUMNS), np.float32)
    cells[:, RATE], cells[:, TRIALS] = rate, START_TRIALS
    cells[1:, STRENGTH] = _logit(rate)[1:]
    cells[:, BIAS] = _start_biases()
    return Model(cells, _start_weights())


def _logit(rate: np.ndarray) -> np.ndarray:
    clipped = np.clip(rate, 1e-4, 1 - 1e-4)
    return np.log(clipped / (1 - clipped))


def _start_rates() -> np.ndarray:
    """float64[N_CELLS]: the hit rate of each cell before it has a trial of its own."""
    rate = np.full(ev.N_CELLS, 0.04)

    def cells(base: int, *shape: int) -> np.ndarray:
        return rate[base : base + int(np.prod(shape))].reshape(shape)

    lengths = np.array([1, 2, 3, 4, 5.5, 8, 12, 18, 30, 60])[:, None, None]
    counts = np.array([1, 2, 3.5, 6.5, 12])[:, None]
    rests = np.array([0, 1, 2, 4, 9, 25, 80])
    share = counts / (counts + rests + 2.4 / lengths**1.1)
    for base in (ev.SESSION_FIRST_CELLS, ev.MEMORY_FIRST_CELLS, ev.CORPUS_FIRST_CELLS):
        table = cells(base, ev.N_ORDERS, ev.N_LENGTHS, ev.N_COUNTS, ev.N_RESTS, ev.N_RECENCIES)
        table[0, ..., ev.SECOND :] = (share * (0.55 + 0.45 * rests / (rests + 12)))[..., None]
        table[0, ..., : ev.SECOND] = np.maximum(share * np.where(rests == 0, 1.0, 0.72), 0.07)[..., None]
        table[1:] = 0.2 * table[0]
    ratios = np.array([0.06, 0.08, 0.12, 0.22, 0.38, 0.58, 0.75, 0.93])
    for base in (ev.SESSION_NEXT_CELLS, ev.MEMORY_NEXT_CELLS, ev.CORPUS_NEXT_CELLS):
        cells(base, ev.N_LENGTHS, 6, 8)[:] = ratios
    for base in (ev.SESSION_ABSENT_CELLS, ev.MEMORY_ABSENT_CELLS, ev.CORPUS_ABSENT_CELLS):
        cells(base, ev.N_LENGTHS, 6, 5)[:] = 0.008
    runs = np.array([0.2, 0.62, 0.7, 0.78, 0.81, 0.87, 0.92, 0.965])
    for base in (ev.SESSION_POINTER_CELLS, ev.MEMORY_POINTER_CELLS):
        table = cells(base, 8, 16, 2)
        table[:] = runs[:, None, None]
        table[0, 0, 0] = 0.6  # just seated
    ranks = np.arange(1, 17)
    for base in (ev.SESSION_SKIP_CELLS, ev.MEMORY_SKIP_CELLS):
        cells(base, 6, 4, 6)[:] = (np.array([0.14, 0.2, 0.3, 0.5]) / ranks[:6, None] ** 0.9)[..., None]
    cells(ev.FREQUENT_CELLS, 16)[:] = 0.045 / ranks**0.6
    by_probability = np.array([0.005, 0.02, 0.06, 0.13, 0.3, 0.5, 0.6, 0.8])
    for base in (ev.RECYCLED_PAIR_CELLS, ev.RECYCLED_CELLS, ev.SUCCESSOR_TABLE_CELLS):
        cells(base, 8, 8)[:] = by_probability
    cells(ev.CALLER_CELLS, 8, 8, 2)[:] = by_probability[:, None, None]
    for base, start in ((ev.DENSE_CELLS, DENSE_START), (ev.RERANK_CELLS, RERANK_START)):
        cells(base, ev.N_SIMILARITIES, ev.N_SHARES, ev.N_DEPTHS * ev.N_CONFIDENCES)[:] = np.array(start)[..., None]
    for base in (ev.DENSE_ABSENT_CELLS, ev.RERANK_ABSENT_CELLS):
        cells(base, ev.N_SIMILARITIES * ev.N_DEPTHS)[:] = 0.008
    return rate


def _start_biases() -> np.ndarray:
    """float64[N_CELLS]: what the target's own opinions are worth beyond their hit rates, for candidates named by little else.

    Learned in 36 answers of a small chat model, then rounded: without them a new namespace trusts contexts of one token and
    frequent tokens too much beside a row of its target.
    """
    bias = np.zeros(ev.N_CELLS)
    visited = np.full((8, 8), 0.1)  # by rank and stored probability
    visited[0] = [0, 0, 0.1, 0.8, 1, 1, 1, 1]
    visited[1] = [0.2, 0.4, 0.8, 0.8, 0.5, 0.5, 0.5, 0.5]
    visited[2:4, :4] = [0.1, 0.2, 0.5, 0.5]
    static = np.zeros((8, 8))
    static[0] = [0, 0, 0.2, 0.3, 0.6, 0.6, 0.3, 0.3]
    static[1:3, 2:] = 0.4
    for base, table in (
        (ev.RECYCLED_PAIR_CELLS, visited),
        (ev.RECYCLED_CELLS, visited),
        (ev.SUCCESSOR_TABLE_CELLS, static),
    ):
        bias[base : base + table.size] = table.ravel()
    return bias


def _start_weights() -> np.ndarray:
    """float32[N_ROWS, N_SLOTS + 1]; evidence of a kind that names the candidate counts more."""
    weights = np.zeros((ev.N_ROWS, ev.N_SLOTS + 1), np.float32)
    by_set = weights[: ev.N_SETS]
    by_set[:] = 0.15
    sets = np.arange(ev.N_SETS)
    for slot, kind in (
        (ev.SESSION_FIRST, ev.BY_SESSION),
        (ev.MEMORY_FIRST, ev.BY_MEMORY),
        (ev.CORPUS_FIRST, ev.BY_CORPUS),
        (ev.DENSE, ev.BY_DENSE),
    ):
        by_set[:, slot] = np.where(sets & kind, 0.28, 0.1)
    by_set[:, [ev.RECYCLED_PAIR, ev.RECYCLED, ev.CALLER]] = 0.35
    by_set[:, [ev.FREQUENT, ev.AGE]] = 0.1
    by_set[:, ev.N_SLOTS] = START_CONSTANT
    return weights
