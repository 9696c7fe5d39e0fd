"""What must hold in a context trie at any time."""

from __future__ import annotations

from redraft.retrieval import context_table
from redraft.retrieval import prefix_trie as pt


def key_of(trie: pt.PrefixTrie, node: int) -> tuple[int, int]:
    """A context's key, put together from the root down as a look-up does."""
    tokens = []
    while node not in (pt.ROOT, pt.SKIP_ROOT):
        tokens.append(trie.nodes[node, pt.TOKEN])
        node = int(trie.nodes[node, pt.PARENT])
    key = context_table.root_key(node)
    for token in reversed(tokens):
        key = context_table.child_key(key, token)
    return key


def check_invariants(trie: pt.PrefixTrie) -> None:
    """Assert the invariants that the head of `prefix_trie.py` lists."""
    live = sorted(int(entry) & (len(trie.slots) - 1) for entry in trie.slots if entry >= 0)
    assert len(live) == len(set(live)) == trie.header[pt.LIVE_NODES]
    alive = set(live) | {pt.ROOT, pt.SKIP_ROOT}
    used = 0
    for node in live:
        parent, token, total, last, first = (int(x) for x in trie.nodes[node])
        key = key_of(trie, node)
        assert parent in alive and context_table.find(trie, parent, key, token) == node
        assert context_table.hash_of(trie.nodes, node) == context_table.hashed(key)
        assert parent in (pt.ROOT, pt.SKIP_ROOT) or trie.nodes[parent, pt.FIRST] != pt.LEAF
        if first == pt.LEAF:
            assert total == 1 and trie.text[last] >= 0
            continue
        counts, seen, entry = 0, set(), first
        while entry >= 0:
            successor, count, entry = (int(x) for x in trie.successors[entry])
            assert count >= 1 and successor not in seen
            seen.add(successor)
            counts += count
            used += 1
        assert len(seen) <= pt.MAX_SUCCESSORS and 1 <= counts + (total - counts) and counts <= total
    assert used == trie.header[pt.LIVE_SUCCESSORS]
