"""The edges that leave one state of an index: rows of token, target and count, in the order in which they are asked for.

The eight most frequent come first, by count and then by token: a draft reads those and follows none. The rest are in
order of token, for a binary search. The frozen automaton keeps its edges so, and the frequent contexts of a suffix array.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval.kernel import inner

__all__ = ["EDGE_COLUMNS", "EDGE_COUNT", "EDGE_TARGET", "EDGE_TOKEN", "HEAD", "find_edge"]

EDGE_TOKEN, EDGE_TARGET, EDGE_COUNT = range(3)
EDGE_COLUMNS = 3
HEAD = 8  # so many are in order of count


@inner
def find_edge(edges, begin, end, token):
    """Row of the edge with `token` among rows begin to end - 1 (int64), the edges of one state; -1 if there is none."""
    low = min(end, begin + HEAD)
    for edge in range(begin, low):
        if edges[edge, EDGE_TOKEN] == token:
            return edge
    high = end
    while low < high:
        middle = (low + high) >> 1
        if edges[middle, EDGE_TOKEN] < token:
            low = middle + 1
        else:
            high = middle
    if low < end and edges[low, EDGE_TOKEN] == token:
        return low
    return np.int64(-1)
