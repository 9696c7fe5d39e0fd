"""The edges that leave one state of an index: rows of token, target and count, in the order in which they are asked for.

The eight most frequent come first, by count and then by token: a draft reads those and follows none. The rest are in
order of token, for a binary search. The frozen automaton keeps its edges so, and the frequent contexts of a suffix array.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval.kernel import inner

__all__ = ["EDGE_COLUMNS", "EDGE_COUNT", "EDGE_TARGET", "EDGE_TOKEN", "HEAD", "find_edge", "first_edge"]

EDGE_TOKEN, EDGE_TARGET, EDGE_COUNT = range(3)
EDGE_COLUMNS = 3
HEAD = 8  # so many are in order of count


@inner
def first_edge(edges, begin, end, token):
    """The first of rows begin to end - 1 (int64), which are in order of token, whose token is at least `token`; or end."""
    while begin < end:
        middle = (begin + end) >> 1
        if edges[middle, EDGE_TOKEN] < token:
            begin = middle + 1
        else:
            end = middle
    return begin


@inner
def find_edge(edges, begin, end, token):
    """Row of the edge with `token` among rows begin to end - 1 (int64), the edges of one state; -1 if there is none."""
    tail = min(end, begin + HEAD)
    for edge in range(begin, tail):
        if edges[edge, EDGE_TOKEN] == token:
            return edge
    edge = first_edge(edges, tail, end, token)
    if edge < end and edges[edge, EDGE_TOKEN] == token:
        return edge
    return np.int64(-1)
