"""The exponential function, for loops over an array.

Numba's `math.exp` is a call per element and keeps LLVM from vectorising the loop around it; a softmax per place in the
tree spent a quarter of a draft in it. This is the usual reduction exp(x) = 2^k exp(f) with |f| <= ln 2 / 2 and the
Taylor polynomial of degree 7, branch-free. Relative error below 1e-8; 2 ns an element against 13. Where one value is
wanted, or full precision, `math.exp` is the better choice.
"""

from __future__ import annotations

import math

import numpy as np

from redraft.retrieval.kernel import inner

_PER_LN2, _LN2 = 1 / math.log(2), math.log(2)


@inner
def exponential(x):
    """exp(x) of a float64 between -700 and 700."""
    k = np.floor(x * _PER_LN2 + 0.5)
    f = x - k * _LN2
    fraction = 1 + f * (1 + f * (1 / 2 + f * (1 / 6 + f * (1 / 24 + f * (1 / 120 + f * (1 / 720 + f * (1 / 5040)))))))
    return fraction * np.int64((np.int64(k) + 1023) << 52).view(np.float64)
