"""Taking text out of a context trie: afterwards it is as if it had never been there.

A document goes from its start to its end, a block at a time. Whatever context begins with a token that goes is found again by
its tokens, and the one occurrence is undone: a count less, a successor less, or the context itself.

Cost: at most nine look-ups a token, like learning it. `memory.py` decides what goes.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval import prefix_trie as pt
from redraft.retrieval.context_table import child_key, find, find_below, root_key, vacate
from redraft.retrieval.kernel import inner, kernel

__all__ = ["forget_block"]


@inner(inline=False)
def _delete(trie, node):
    """Take a context out of the table (closing the gap) and put it on the free list."""
    header, nodes = trie.header, trie.nodes
    entry = nodes[node, pt.FIRST]
    while entry >= 0:
        after = trie.successors[entry, pt.NEXT]
        pt.free_successor(trie, entry)
        entry = after
    vacate(trie, node)
    nodes[node, pt.PARENT] = header[pt.FREE_NODE]
    nodes[node, pt.TOTAL] = 0
    header[pt.FREE_NODE] = node
    header[pt.LIVE_NODES] -= 1


@inner(inline=False)
def _forget_successor(trie, node, position):
    """Undo `_observe` (or the leaf) for the successor at `position`."""
    nodes, successors = trie.nodes, trie.successors
    if nodes[node, pt.FIRST] == pt.LEAF:
        if nodes[node, pt.LAST] == position:
            _delete(trie, node)
        return
    token = trie.text[position]
    nodes[node, pt.TOTAL] -= 1
    if nodes[node, pt.LAST] == position:
        nodes[node, pt.LAST] = -1
    if nodes[node, pt.TOTAL] <= 0:
        _delete(trie, node)
        return
    entry, before = nodes[node, pt.FIRST], -1
    while entry >= 0 and successors[entry, pt.SUCCESSOR] != token:
        before, entry = entry, successors[entry, pt.NEXT]
    if entry < 0:
        return
    successors[entry, pt.COUNT] -= 1
    if successors[entry, pt.COUNT] == 0:
        if before >= 0:
            successors[before, pt.NEXT] = successors[entry, pt.NEXT]
        else:
            nodes[node, pt.FIRST] = successors[entry, pt.NEXT]
        pt.free_successor(trie, entry)


@inner(inline=False)
def forget_from(trie, start, window):
    """Forget every context that begins with the token at `start`, the first token of its document.

    `window` is an int32[8] buffer.
    """
    text = trie.text
    position = np.int64(start)
    for length in range(1, pt.MAX_CONTEXT + 1):
        window[length - 1] = text[position]
        position = pt.following(trie, position)
        if position < 0:
            return
        node, key = pt.ROOT, root_key(pt.ROOT)
        for back in range(length):
            token = window[length - 1 - back]
            key = child_key(key, token)
            node = find(trie, node, key, token)
            if node < 0:
                break
        if node >= 0:
            _forget_successor(trie, node, position)
        if length == 2:
            node = find_below(trie, pt.SKIP_ROOT, window[0])
            if node >= 0:
                _forget_successor(trie, node, position)


@kernel(allocates=False)
def forget_block(trie, block, window):
    """Forget the first block of a document and free it; returns the block that is now its first, or -1."""
    start = np.int64(block) << pt.BLOCK_BITS
    for position in range(start, start + pt.BLOCK):
        if trie.text[position] >= 0:
            forget_from(trie, position, window)
    trie.text[start : start + pt.BLOCK] = -1
    first = np.int64(trie.block_next[block])
    if first >= 0:
        trie.block_previous[first] = -1
    trie.block_next[block] = trie.header[pt.FREE_BLOCK]
    trie.header[pt.FREE_BLOCK] = block
    return first
