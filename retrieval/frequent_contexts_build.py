"""Finding the frequent contexts of a suffix array: one pass over its rows, in order.

Rows that start with the same d tokens are neighbours, so walking the rows in order, with the first nine tokens of the row
before at hand, tells for every d where a context of d tokens begins and ends (the intervals of M. Abouelhoda, S. Kurtz,
E. Ohlebusch, 2004, with no more than nine tokens compared). A context that ends with too few rows is forgotten.
One access to the text a row, however long the repeats in it are: linear time, 100 nanoseconds a row.

They come out each after its continuations; read backwards, each comes before them and the empty context first. That is
their order in the index: parents and children lie near each other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from redraft.retrieval.edge_rows import EDGE_COUNT, EDGE_TARGET, EDGE_TOKEN, HEAD
from redraft.retrieval.frequent_contexts import (
    CONTEXT_COLUMNS,
    COUNT,
    DEPTH,
    DISTINCT,
    EDGE_START,
    LENGTH,
    LINK,
    LOW,
    SHORTER,
    continued,
)
from redraft.retrieval.kernel import inner, kernel
from redraft.retrieval.suffix_array import N, SuffixArray, read_suffix
from redraft.retrieval.suffix_array_cursor import offer

__all__ = ["write_frequent_contexts"]

AT_ONCE = 64


@inner(inline=False)
def _end_run(open_at, heads, depth, row, token):
    """The rows in which `token` follows the open context of `depth` tokens end before `row`."""
    if token >= 0:
        kept, run = open_at[depth, 2], row - open_at[depth, 1]
        open_at[depth, 2] = offer(heads[depth, :, 0], heads[depth, :, 1], kept, token, run)
        open_at[depth, 3] += 1
    open_at[depth, 1] = row


@kernel(allocates=False)
def _collect(array, least, open_at, heads, before, rows, found, found_heads):
    """Fill `found` (rows of contexts, but for links, with the last token in LINK) and `found_heads`; how many there are.

    open_at: int64[9, 4] of the open context of each length: first row, first row of the run of one next token, how
    many of these are in `heads` (int64[9, 8, 2]), how many were met. before: int64[9] first tokens of the row before;
    rows: int64[64, 9] of the next ones, read together, for each is a cache miss and they are waited for at once.
    """
    n, n_found = array.sizes[N], 0
    open_at[:] = 0
    before[:] = -1
    for row in range(n + 1):
        same = -1
        if row < n:
            if row % AT_ONCE == 0:
                for i in range(min(n - row, AT_ONCE)):
                    read_suffix(array, row + i, rows[i])
            now = rows[row % AT_ONCE]
            same = 0
            while same <= DEPTH and now[same] == before[same] and now[same] >= 0:
                same += 1
        known = 0  # tokens of the row before
        while known <= DEPTH and before[known] >= 0:
            known += 1
        for depth in range(min(known, DEPTH), max(same, 0) - 1, -1):
            if depth == same:
                _end_run(open_at, heads, depth, row, before[depth])
            elif row - open_at[depth, 0] >= least or depth == 0:
                _end_run(open_at, heads, depth, row, before[depth])
                found[n_found, LENGTH], found[n_found, LOW] = depth, open_at[depth, 0]
                found[n_found, COUNT], found[n_found, DISTINCT] = row - open_at[depth, 0], open_at[depth, 3]
                found[n_found, LINK] = before[depth - 1] if depth else -1
                for rank in range(open_at[depth, 2]):
                    found_heads[n_found, rank, 0] = heads[depth, rank, 0]
                    found_heads[n_found, rank, 1] = heads[depth, rank, 1]
                n_found += 1
        for depth in range(same + 1, DEPTH + 1):
            open_at[depth, 0], open_at[depth, 1], open_at[depth, 2], open_at[depth, 3] = row, row, 0, 0
        if row < n:
            for i in range(DEPTH + 1):
                before[i] = now[i]
    return n_found


@kernel(allocates=False)
def _count_edges(contexts, heads, parents, last):
    """Fill `parents` and EDGE_START of contexts in order from the empty one on; returns how many edges there are."""
    n = contexts.shape[0] - 1
    for context in range(n + 1):
        contexts[context, EDGE_START] = 0
    for context in range(n):
        contexts[context, EDGE_START] += min(HEAD, contexts[context, DISTINCT])
        depth, token = contexts[context, LENGTH], contexts[context, LINK]
        last[depth] = context
        if depth:
            parent = last[depth - 1]
            parents[context] = parent
            if _rank_in(heads, parent, min(HEAD, contexts[parent, DISTINCT]), token) < 0:
                contexts[parent, EDGE_START] += 1
    total = 0
    for context in range(n + 1):
        total, contexts[context, EDGE_START] = total + contexts[context, EDGE_START], total
    return total


@inner
def _rank_in(heads, context, kept, token):
    for rank in range(kept):
        if heads[context, rank, 0] == token:
            return rank
    return -1


@kernel(allocates=False)
def _write_edges(contexts, heads, parents, edges):
    """Continuations come in descending order of token, so the edges behind a head are filled from their end."""
    n = contexts.shape[0] - 1
    for context in range(n):
        begin = contexts[context, EDGE_START]
        for rank in range(min(HEAD, contexts[context, DISTINCT])):
            edges[begin + rank, EDGE_TOKEN] = heads[context, rank, 0]
            edges[begin + rank, EDGE_TARGET] = 0
            edges[begin + rank, EDGE_COUNT] = heads[context, rank, 1]
        contexts[context, SHORTER] = contexts[context + 1, EDGE_START]  # where its next edge ends, for now
    for context in range(1, n):
        parent, token = parents[context], contexts[context, LINK]
        rank = _rank_in(heads, parent, min(HEAD, contexts[parent, DISTINCT]), token)
        edge = contexts[parent, EDGE_START] + rank
        if rank < 0:
            contexts[parent, SHORTER] -= 1
            edge = contexts[parent, SHORTER]
            edges[edge, EDGE_TOKEN], edges[edge, EDGE_COUNT] = token, contexts[context, COUNT]
        edges[edge, EDGE_TARGET] = context


@kernel(allocates=False)
def _write_links(contexts, edges, parents):
    """The suffixes of a frequent context are as frequent, so each link leads from the parent's by the same token."""
    n = contexts.shape[0] - 1
    contexts[0, LINK], contexts[0, SHORTER] = 0, 0
    for context in range(1, n):
        token, link = contexts[context, LINK], np.int64(0)
        if contexts[context, LENGTH] > 1:
            link = continued(contexts, edges, np.int64(contexts[parents[context], LINK]), token)
        contexts[context, LINK] = link
    for context in range(1, n):
        shorter = contexts[context, LINK]
        while shorter > 0 and contexts[shorter, COUNT] == contexts[context, COUNT]:
            shorter = contexts[shorter, LINK]
        contexts[context, SHORTER] = shorter
    for column in range(EDGE_START):
        contexts[n, column] = 0


def write_frequent_contexts(
    array: SuffixArray, least: int, create: Callable[[str, int], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The contexts of `array` (whose own are not looked at) with at least `least` rows, and their edges, in what
    `create(name, rows)` makes for "contexts" and "context_edges"."""
    most = DEPTH * int(array.sizes[N]) // least + 1  # pages that are not written to cost nothing
    found, heads = np.empty((most, CONTEXT_COLUMNS), np.int32), np.empty((most, HEAD, 2), np.int32)
    open_at, open_heads = np.zeros((DEPTH + 1, 4), np.int64), np.zeros((DEPTH + 1, HEAD, 2), np.int64)
    before, rows = np.zeros(DEPTH + 1, np.int64), np.zeros((AT_ONCE, DEPTH + 1), np.int64)
    n = _collect(array, least, open_at, open_heads, before, rows, found, heads)
    contexts = np.asarray(create("contexts", n + 1))
    contexts[:n], heads = found[:n][::-1], np.ascontiguousarray(heads[:n][::-1])
    parents = np.zeros(n, np.int32)
    n_edges = _count_edges(contexts, heads, parents, np.zeros(DEPTH + 1, np.int32))
    edges = np.asarray(create("context_edges", n_edges))
    _write_edges(contexts, heads, parents, edges)
    _write_links(contexts, edges, parents)
    return contexts, edges
