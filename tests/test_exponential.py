"""The exponential of the hot loops against the one of the standard library."""

from __future__ import annotations

import math

import numpy as np

from redraft.retrieval.exponential import exponential
from redraft.retrieval.kernel import kernel


@kernel(allocates=False)
def _fill(values, results):
    for i in range(len(values)):
        results[i] = exponential(values[i])


def test_the_exponential():
    values = np.concatenate([np.linspace(-700, 700, 4001), np.linspace(-1, 1, 2001), [0.0, math.log(2) / 2]])
    results = np.zeros_like(values)
    _fill(values, results)
    np.testing.assert_allclose(results, [math.exp(value) for value in values], rtol=1e-8)
    assert getattr(exponential, "py_func", exponential)(0.0) == 1.0  # the same without compilation
