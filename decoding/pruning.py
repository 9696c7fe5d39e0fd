"""Cutting a draft tree down without breaking it: every kept node's parent is kept."""

from __future__ import annotations

import numpy as np

from redraft.retrieval.draft_tree import DraftTree

__all__ = ["best_nodes", "by_probability", "not_deeper"]


def by_probability(tree: DraftTree) -> np.ndarray:
    """Node ids, best first; a parent comes before its children where probabilities fall along paths, as they should."""
    return np.argsort(-tree.probs, kind="stable")


def best_nodes(tree: DraftTree, count: int | None) -> DraftTree:
    """The `count` nodes with the highest path probability; None keeps all.

    That is the best subtree of this size, and the tree that a best-first drafter would have given for this budget.
    """
    if count is None or count >= len(tree):
        return tree
    kept = np.zeros(len(tree), bool)
    kept[by_probability(tree)[:count]] = True
    return _subtree(tree, kept)


def not_deeper(tree: DraftTree, depth: int) -> DraftTree:
    """The nodes at most `depth` below the last committed token; deeper ones could never be emitted."""
    depths = tree.depths()
    if not len(tree) or int(depths.max()) <= depth:
        return tree
    return _subtree(tree, depths <= depth)


def _subtree(tree: DraftTree, kept: np.ndarray) -> DraftTree:
    """The nodes marked in `kept`, less those whose parent is not kept (a foreign tree's probabilities may rise)."""
    number = np.full(len(tree) + 1, -1, np.int32)  # the last entry answers for parent -1
    parents = np.empty(len(tree), np.int32)
    count = 0
    for node, parent in enumerate(tree.parents):
        if kept[node] and (parent < 0 or number[parent] >= 0):
            parents[count] = number[parent]
            number[node] = count
            count += 1
    chosen = np.flatnonzero(number[:-1] >= 0)
    return DraftTree(tree.tokens[chosen], parents[:count], tree.probs[chosen], tree.sources[chosen], tree.origin)
