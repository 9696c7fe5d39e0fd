"""The draft tree as a value: what it promises, what `check` refuses, and what is read off it."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.retrieval.draft_tree import DraftTree, Source


def tree(tokens, parents, probs=None, sources=None):
    n = len(tokens)
    return DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array([0.5] * n if probs is None else probs, np.float32),
        np.array([0] * n if sources is None else sources, np.uint8),
    )


def random_tree(rng, n, letters=6):
    tokens, parents, probs, edges = [], [], [], set()
    while len(tokens) < n:
        parent, token = int(rng.integers(-1, len(tokens))), int(rng.integers(0, letters))
        if (parent, token) not in edges:
            edges.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            probs.append(float(rng.random()) * (probs[parent] if parent >= 0 else 1.0))
    return tree(tokens, parents, probs)


@pytest.mark.parametrize("seed", range(30))
def test_depths_and_best_path(seed):
    rng = np.random.default_rng(seed)
    drafted = random_tree(rng, int(rng.integers(1, 40))).check(vocab_size=6, max_nodes=40)

    def path_to(node):
        return [] if node < 0 else [*path_to(int(drafted.parents[node])), node]

    paths = [path_to(node) for node in range(len(drafted))]
    assert drafted.depths().tolist() == [len(path) for path in paths]
    expected = [sum(float(drafted.probs[i]) for i in path) for path in paths]
    best = paths[int(np.argmax(expected))]
    assert drafted.best_path().tolist() == [int(drafted.tokens[i]) for i in best]


def test_an_empty_tree():
    empty = DraftTree.empty().check(vocab_size=1, max_nodes=0)
    assert len(empty) == 0 and empty.best_path().tolist() == [] and empty.depths().tolist() == []
    assert empty.best_path().dtype == np.int32


def test_a_chain():
    chain = DraftTree.chain([4, 0, 4], [0.9, 0.5, 0.1], source=Source.CALLER).check(vocab_size=5)
    assert chain.parents.tolist() == [-1, 0, 1] and chain.sources.tolist() == [Source.CALLER] * 3
    assert chain.best_path().tolist() == [4, 0, 4] and chain.depths().tolist() == [1, 2, 3]
    assert DraftTree.chain([1, 2]).probs.tolist() == [1.0, 1.0]
    assert len(DraftTree.chain([]).check()) == 0


GOOD = tree([1, 2, 1], [-1, 0, 0])


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (tree([1, 2], [-1, 1]), "parent"),
        (tree([1, 2], [1, -1]), "parent"),
        (tree([1, 2], [-1, -2]), "parent"),
        (tree([1, 1], [-1, -1]), "siblings"),
        (tree([1, 2, 2], [-1, 0, 0]), "siblings"),
        (tree([1, -2], [-1, 0]), "vocabulary"),
        (tree([1, 7], [-1, 0]), "vocabulary"),
        (tree([1, 2], [-1, 0], [0.5, np.nan]), "probs"),
        (tree([1, 2], [-1, 0], [0.5, np.inf]), "probs"),
        (tree([1, 2], [-1, 0], [0.5, -0.1]), "probs"),
        (tree([1, 2], [-1, 0], [1.5, 0.1]), "probs"),
        (tree([1, 2, 3, 4, 5], [-1] * 5), "budget"),
        (DraftTree(GOOD.tokens, GOOD.parents[:2], GOOD.probs, GOOD.sources), "parents"),
        (DraftTree(GOOD.tokens.astype(np.int64), GOOD.parents, GOOD.probs, GOOD.sources), "tokens"),
        (DraftTree(GOOD.tokens, GOOD.parents, GOOD.probs.astype(float), GOOD.sources), "probs"),
        (DraftTree(GOOD.tokens, GOOD.parents, GOOD.probs, GOOD.sources[:1]), "sources"),
    ],
)
def test_what_check_refuses(broken, said):
    with pytest.raises(ValueError, match=said):
        broken.check(vocab_size=7, max_nodes=4)


def test_what_check_lets_pass():
    assert GOOD.check(vocab_size=3, max_nodes=3) is GOOD
    tree([2**31 - 1, 0], [-1, -1]).check()


def test_source_names():
    ids = [value for name, value in vars(Source).items() if isinstance(value, int)]
    assert sorted(ids) == list(range(len(Source.NAMES)))
    assert all(Source.NAMES[value] == name.lower() for name, value in vars(Source).items() if isinstance(value, int))
