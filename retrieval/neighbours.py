"""What a dense search found, in the form in which the draft tree follows it: a few continuations, each with a weight.

A neighbour is a place where the target, in a similar state, chose the token that it has chosen now. What it wrote there
next is a guess at what it will write here. The tree never looks at the stores: the next `LENGTH` tokens behind every
neighbour are copied out once per search, and a node of the tree keeps one bit per neighbour, set as long as the tokens on the
way to the node are the neighbour's. Up to `CURSORS` neighbours come from the dense index and the namespace's dense memory
(columns from 0), as many from the session's own text (columns from CURSORS), which the state ring ranks.

How far the whole search can be trusted is NEST's relative retrieval confidence (Li et al. 2024): with squared distances
d, the nearest compared with the farthest of those retrieved,

    lambda = sigmoid((min d / max d - 0.3) / 0.1)        near 0: one is much nearer than the rest

It and the similarities are evidence only (`sources/dense.py`); what they are worth is learned from what the target accepts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["CURSORS", "LENGTH", "Neighbours", "continuations", "new_neighbours", "put", "relative_confidence"]

CURSORS = 8  # followed from stores, and as many from the session's own text
LENGTH = 32  # tokens copied behind a neighbour
NEST_ALPHA, NEST_TAU = 0.3, 0.1
CONFIDENCE_EDGES = (0.2, 0.7)  # of lambda, between its buckets
_BEHIND = np.arange(1, LENGTH + 1)
SHARPNESS = 8.0  # of the weights: a neighbour 0.1 less similar counts about half


class Neighbours(NamedTuple):
    """tokens: int32[2 * CURSORS, LENGTH], -1 behind the end of a document; similarities, weights: float32[2 * CURSORS];
    found: int64[4]: for the stores' search and for the session's own, the length of the text then, and a bucket of lambda."""

    tokens: np.ndarray
    similarities: np.ndarray
    weights: np.ndarray
    found: np.ndarray


def new_neighbours() -> Neighbours:
    """None found."""
    n = 2 * CURSORS
    return Neighbours(
        np.full((n, LENGTH), -1, np.int32),
        np.zeros(n, np.float32),
        np.zeros(n, np.float32),
        np.zeros(4, np.int64),
    )


def relative_confidence(similarities: np.ndarray) -> float:
    """Lambda of cosine similarities: 0 trusts retrieval, 1 does not."""
    if len(similarities) == 0:
        return 1.0
    distances = np.maximum(1.0 - similarities, 1e-6)  # half the squared distance of keys of length one
    ratio = float(distances.min() / distances.max())
    return float(1.0 / (1.0 + np.exp(-(ratio - NEST_ALPHA) / NEST_TAU)))


def continuations(text: np.ndarray, places: np.ndarray, ends: np.ndarray | int) -> np.ndarray:
    """int32[m, LENGTH], the tokens of `text` behind each of `places` (int[m]), -1 from `ends` (of each, or of all) on."""
    at = places[:, None] + _BEHIND
    tokens = np.take(text, at, mode="clip")
    tokens[at >= (ends if np.isscalar(ends) else ends[:, None])] = -1
    return tokens


def put(
    neighbours: Neighbours, own: bool, similarities: np.ndarray, tokens: np.ndarray, confidence: float, length: int
) -> int:
    """Take what one search found, best first: similarities float32[m], continuations int32[m, LENGTH]; m <= CURSORS.

    own: whether it is the session's own search; length: of the text now. Returns the bits of its columns.
    """
    first, found = CURSORS if own else 0, len(similarities)
    columns = slice(first, first + found)
    neighbours.tokens[columns] = tokens
    neighbours.similarities[columns] = similarities
    neighbours.weights[columns] = np.exp(SHARPNESS * (similarities - 1.0))
    neighbours.found[2 * own] = length
    neighbours.found[2 * own + 1] = sum(confidence > edge for edge in CONFIDENCE_EDGES)
    return ((1 << found) - 1) << first
