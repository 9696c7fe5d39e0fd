"""The hash table of a context trie: from the tokens of a context to its node.

A context's key is made of its tokens alone, last token first: a polynomial in them, to which a token further back adds
one term. So all the keys of a look-up are known before its first node is, and what it is going to read can be asked
for ahead, all levels at once; found by (parent, token) each level would wait for the one above, two misses at a time.
A key can also be made from a node, by the tokens on its way up, which is what closing a gap and growing the table need.

Open addressing, at most two thirds full. An entry holds the node in the low bits, as many as the table's size has, and
above them the bits of the hash that its place does not tell, so that a look-up rarely reads the row of another node,
which is a cache miss. What is found is compared by parent and token: equal keys do no harm.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval.kernel import inner, kernel
from redraft.retrieval.prefetch import prefetch

__all__ = [
    "PARENT", "ROOT", "SKIP_ROOT", "TOKEN", "child_key", "enter", "find", "find_below", "hash_of", "hashed",
    "prefetch_node", "prefetch_slot", "rehash", "root_key", "slots_for", "vacate",
]  # fmt: skip

ROOT, SKIP_ROOT = 0, 1
PARENT, TOKEN = 0, 1  # columns of a trie's nodes
_BASE = 0x5851F42D4C957F2D  # of the polynomial
_MIX = 0x2545F4914F6CDD1D


def slots_for(n_nodes: int) -> int:
    """Power of two that keeps the table at most 2/3 full."""
    return 1 << int(n_nodes * 3 // 2).bit_length()


@inner
def root_key(root):
    """Key of the empty context below `root`: the sum so far, and what the next term is multiplied with."""
    return np.int64(root), np.int64(_BASE)


@inner
def child_key(key, token):
    """Key of the context that has `token` before it."""
    return key[0] + (np.int64(token) + 1) * key[1], key[1] * np.int64(_BASE)


@inner
def hashed(key):
    """31 bits; to be masked to the table's size."""
    return (key[0] * np.int64(_MIX) >> 29) & 0x7FFFFFFF


@inner(inline=False)
def hash_of(nodes, node):
    """The same from a node."""
    total = np.int64(0)
    while node > SKIP_ROOT:
        total = (total + np.int64(nodes[node, TOKEN]) + 1) * np.int64(_BASE)
        node = np.int64(nodes[node, PARENT])
    return hashed((total + node, np.int64(0)))


@inner
def enter(slots, code, node):
    """Enter a node into the table that does not hold it; `code`: its hash."""
    mask = len(slots) - 1
    slot = code & mask
    while slots[slot] >= 0:
        slot = (slot + 1) & mask
    slots[slot] = code & ~mask | node


@kernel(allocates=False)
def rehash(nodes, n_nodes, total, slots):
    """Enter the live ones of the first `n_nodes` nodes into the empty table `slots`; live: their column `total` is not 0."""
    for node in range(SKIP_ROOT + 1, n_nodes):
        if nodes[node, total] > 0:
            enter(slots, hash_of(nodes, node), node)


@inner
def find(trie, parent, key, token):
    """The node below `parent` for `token`, whose key is `key`; -1 if there is none."""
    nodes, slots = trie.nodes, trie.slots
    mask = len(slots) - 1
    code = hashed(key)
    slot = code & mask
    while True:
        entry = np.int64(slots[slot])
        if entry < 0:
            return np.int64(-1)
        node = entry & mask
        if (entry ^ code) & ~mask == 0 and nodes[node, PARENT] == parent and nodes[node, TOKEN] == token:
            return node
        slot = (slot + 1) & mask


@inner
def find_below(trie, root, token):
    """The node of the context of one token below `root`, or -1."""
    return find(trie, root, child_key(root_key(root), token), token)


@inner
def prefetch_slot(trie, key):
    """Have the line of the table fetched in which `find` begins."""
    prefetch(trie.slots, hashed(key) & (len(trie.slots) - 1))


@inner
def prefetch_node(trie, key):
    """The same for the row of the node that `find` will look at first, when its slot has come."""
    mask = len(trie.slots) - 1
    code = hashed(key)
    entry = np.int64(trie.slots[code & mask])
    prefetch(trie.nodes, entry & mask if (entry ^ code) & ~mask == 0 else ROOT)


@inner(inline=False)
def vacate(trie, node):
    """Take a node out of the table, closing the gap in its run of slots."""
    nodes, slots = trie.nodes, trie.slots
    mask = len(slots) - 1
    hole = hash_of(nodes, node) & mask
    while slots[hole] & mask != node:
        hole = (hole + 1) & mask
    probe = hole
    while True:
        probe = (probe + 1) & mask
        other = np.int64(slots[probe])
        if other < 0:
            break
        home = hash_of(nodes, other & mask) & mask
        if ((probe - home) & mask) >= ((probe - hole) & mask):
            slots[hole] = other
            hole = probe
    slots[hole] = -1
