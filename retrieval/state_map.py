"""The linear map from a target model's hidden states to short keys: z-score, PCA and length one, folded into one matrix.

Nearest neighbours among raw hidden states are decided by a few outlier dimensions that are a hundred times as large as
the others. DReSD (Gritta et al. 2025) therefore standardises every dimension, keeps the 64 directions of most variance
and compares by cosine. With mean m, standard deviation s and principal axes A (rows),

    key(x) = y / |y|,    y = A ((x - m) / s) = W x + b,    W = A / s,    b = -W m

so what is stored and shipped is one matrix of 64 (d + 1) floats, and a projection costs 64 d multiplications: 20
microseconds for d = 1024. The map belongs to one model in one precision at one layer; states of another give keys
without meaning and without an error, so whoever stores it stores whose it is (`StateOrigin`).

Sums are kept in float64: in half precision the variance of an outlier dimension is wrong, or infinite. Directions are
unique up to sign; the largest component of each axis is made positive, so the same states give the same map.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

__all__ = ["Moments", "StateMap", "StateOrigin"]


class StateOrigin(NamedTuple):
    """Whose hidden states a map is for.

    model: its name, for people; weights_sha256: digest of its weights (`redraft.decoding.states.weights_digest`);
    dtype: it was run in; layer: as transformers numbers hidden states, -1 = behind the final norm.
    """

    model: str
    weights_sha256: str
    dtype: str
    layer: int

    def __str__(self) -> str:
        return f"model {self.model!r} (weights {self.weights_sha256[:12]}, {self.dtype}, layer {self.layer})"


class StateMap:
    """Attributes:
    matrix: float32[dimension, width], the W above.
    offset: float32[dimension], the b above.
    """

    def __init__(self, matrix: np.ndarray, offset: np.ndarray) -> None:
        self.matrix = np.ascontiguousarray(matrix, np.float32)
        self.offset = np.ascontiguousarray(offset, np.float32)
        if self.matrix.ndim != 2 or 0 in self.matrix.shape or self.offset.shape != self.matrix.shape[:1]:
            raise ValueError(f"state map: a matrix {self.matrix.shape} does not go with an offset {self.offset.shape}")
        if not (np.isfinite(self.matrix).all() and np.isfinite(self.offset).all()):
            raise ValueError("state map: holds numbers that are not finite")

    @property
    def dimension(self) -> int:
        return len(self.matrix)

    @property
    def width(self) -> int:
        return self.matrix.shape[1]

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the numbers."""
        return hashlib.sha256(self.packed().tobytes()).hexdigest()

    def packed(self) -> np.ndarray:
        """float32[dimension * (width + 1)]: each row of the matrix, then its offset."""
        return np.concatenate([self.matrix, self.offset[:, None]], axis=1).astype("<f4").reshape(-1)

    @classmethod
    def unpacked(cls, numbers: np.ndarray, dimension: int, width: int) -> StateMap:
        if dimension < 1 or width < 1 or numbers.shape != (dimension * (width + 1),):
            raise ValueError(f"state map: {numbers.size} numbers are no map from {width} to {dimension} dimensions")
        rows = numbers.reshape(dimension, width + 1)
        return cls(rows[:, :-1], rows[:, -1])

    def project(self, states: np.ndarray) -> np.ndarray:
        """float32[n, dimension], each of length one, from states float[n, width].

        Raises ValueError for another width, and for states that are not finite.
        """
        states = np.asarray(states, np.float32)
        if states.ndim != 2 or states.shape[1] != self.width:
            raise ValueError(f"hidden states: wanted shape [n, {self.width}], got {list(states.shape)}")
        if not np.isfinite(states).all():
            raise ValueError("hidden states: wanted finite numbers, got NaN or infinity")
        keys = states @ self.matrix.T + self.offset
        return keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), np.float32(1e-12))


class Moments:
    """Sums over hidden states, from which the map is computed. 8 d^2 bytes, whatever the number of states."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self._sum = np.zeros(width)
        self._products = np.zeros((width, width))
        self._shift: np.ndarray | None = None  # near the mean, so that the variance is no difference of huge numbers

    def add(self, states: np.ndarray) -> None:
        """Take in float[n, width]. Raises ValueError for states that are not finite."""
        states = np.asarray(states, np.float64)
        if not np.isfinite(states).all():
            raise ValueError("hidden states: wanted finite numbers, got NaN or infinity")
        if self._shift is None and len(states):
            self._shift = states.mean(axis=0)
        if len(states):
            shifted = states - self._shift
            self.count += len(states)
            self._sum += shifted.sum(axis=0)
            self._products += shifted.T @ shifted

    def map(self, dimension: int) -> tuple[StateMap, float]:
        """The map to `dimension` numbers, and the share of the standardised variance that it keeps.

        A dimension of the state that never changes is left out. Raises ValueError for too few states or dimensions.
        """
        width = len(self._sum)
        if not 1 <= dimension <= width:
            raise ValueError(f"dimension: wanted 1..{width}, the width of the model's states, got {dimension}")
        if self.count < 2 * dimension:
            raise ValueError(f"{dimension} directions need {2 * dimension} states or more, got {self.count}")
        mean = self._sum / self.count
        covariance = self._products / self.count - np.outer(mean, mean)
        deviation = np.sqrt(np.maximum(np.diagonal(covariance), 0.0))
        scale = np.where(deviation > 1e-12, 1.0 / np.maximum(deviation, 1e-12), 0.0)
        values, vectors = np.linalg.eigh(covariance * np.outer(scale, scale))
        axes = vectors[:, ::-1][:, :dimension].T
        largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], 1)
        axes = axes * np.where(largest < 0, -1.0, 1.0)
        matrix = axes * scale
        kept = float(values[::-1][:dimension].sum() / max(values.sum(), 1e-300))
        return StateMap(matrix, -matrix @ (mean + self._shift)), kept
