"""The frequent contexts of a suffix array, written out: what a draft asks of a large corpus most often.

Contexts of up to eight tokens that occur at least 65 times are few (one for 130 tokens of text), and nearly every place
of a draft asks for some: its second and third levels mostly do. By binary search each costs dozens of cache misses, and
counting its successors over a million rows even more, the more the larger the corpus. So these contexts have what is
asked of them written out when the index is built: the rows, the exact counts of the eight most frequent next tokens, the
context with one token more, and the one with fewer. It is the top of the suffix tree, without its compressed edges and
with suffix links (E. Ukkonen, 1995); rarer contexts are left to the array, where an interval is a few cache lines.

Cost: a step is a scan of eight tokens, whatever the size of the corpus; 28 bytes for each context and 12 for each edge,
0.7 bytes per token of the corpus. Found in one pass over the sorted rows (`frequent_contexts_build`).
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval.edge_rows import EDGE_COUNT, EDGE_TARGET, EDGE_TOKEN, HEAD, find_edge
from redraft.retrieval.kernel import inner

__all__ = [
    "CONTEXT_COLUMNS", "COUNT", "DEPTH", "DISTINCT", "EDGE_START", "LEAST_ROWS", "LENGTH", "LINK", "LOW", "SHORTER",
    "continued", "head_of", "longest_frequent",
]  # fmt: skip

DEPTH = 8  # tokens of the longest contexts: what a draft looks at
LEAST_ROWS = 65  # of a context that is written out; where there are fewer, cursors count every row

# columns of a context
LENGTH, LINK, SHORTER, LOW, COUNT, DISTINCT, EDGE_START = range(7)
CONTEXT_COLUMNS = 7


@inner
def continued(contexts, edges, context, token):
    """The context that is `context` and then `token`; 0 if that is not a frequent one, -1 if it does not occur."""
    begin, end = np.int64(contexts[context, EDGE_START]), np.int64(contexts[context + 1, EDGE_START])
    edge = find_edge(edges, begin, end, token)
    if edge >= 0:
        return np.int64(edges[edge, EDGE_TARGET])
    return np.int64(-1 if contexts[context, DISTINCT] <= HEAD else 0)  # all are written out, or the frequent ones are


@inner
def head_of(contexts, edges, context, tokens, counts):
    """The most frequent next tokens of a context into tokens and counts; returns (how many are filled, distinct)."""
    begin, distinct = np.int64(contexts[context, EDGE_START]), np.int64(contexts[context, DISTINCT])
    kept = min(distinct, HEAD)
    for rank in range(kept):
        tokens[rank], counts[rank] = edges[begin + rank, EDGE_TOKEN], edges[begin + rank, EDGE_COUNT]
    return kept, distinct


@inner
def longest_frequent(contexts, edges, window, length):
    """The longest frequent context among the suffixes of at most `length` tokens (window[0] the newest), 0 for none."""
    for tokens in range(min(length, DEPTH), 0, -1):
        context = np.int64(0)
        for back in range(tokens - 1, -1, -1):
            context = continued(contexts, edges, context, window[back])
            if context <= 0:
                break
        if context > 0:
            return context
    return np.int64(0)
