"""The draft tree's growth: valid, within its limits, and what a plain heap makes of the same scores."""

from __future__ import annotations

import numpy as np
import pytest
from engine_probe import Probe
from naive_best_first import best_first
from streams import edited, fibonacci, some_tokens

from redraft.retrieval.best_first import MAX_DEPTH, NEGLIGIBLE
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.drafter import Drafter

BUDGETS = (0, 1, 2, 8, 32, 64, 512)


def trained(rng, letters):
    """A session with a memory behind it, tables that have learned something, and recycled opinions."""
    drafter = Drafter(DraftConfig(vocab_size=max(letters, 8)))
    text = some_tokens(rng, letters, 150)
    for _ in range(3):
        with drafter.open(text[:20]) as earlier:
            earlier.commit(edited(rng, text[20:], letters))
            ids = np.array([rng.permutation(8) for _ in range(6)])
            rows = rng.integers(0, letters, 6), rng.integers(-1, letters, 6), ids, np.full((6, 8), 0.1)
            earlier.commit([], Candidates.checked(*rows))
    session = drafter.open(text[:40])
    session.commit(edited(rng, text[40:100], letters))
    return session


def assert_valid(tree, max_nodes, min_prob=0.0, vocab_size=None):
    tree.check(vocab_size=vocab_size, max_nodes=max_nodes)
    parents = tree.parents
    above = np.where(parents >= 0, tree.probs[parents], np.float32(1.0)) if len(tree) else tree.probs
    assert (tree.probs <= above).all()
    assert (tree.probs >= np.float32(min_prob)).all() and (tree.probs > 0).all()
    assert len(tree) == 0 or tree.depths().max() <= MAX_DEPTH
    assert set(tree.sources.tolist()) <= set(range(len(Source.NAMES)))
    siblings: dict[int, float] = {}  # children of one node may not promise more than the node
    for parent, prob in zip(parents.tolist(), tree.probs.tolist()):
        siblings[parent] = siblings.get(parent, 0.0) + prob
    for parent, total in siblings.items():
        assert total <= (1.0 if parent < 0 else float(tree.probs[parent])) * (1 + 1e-5)


@pytest.mark.parametrize("letters", [2, 3, 4, 60])
@pytest.mark.parametrize("max_nodes", BUDGETS)
def test_the_tree_of_a_plain_heap(letters, max_nodes):
    rng = np.random.default_rng(100 + letters)
    session = trained(rng, letters)
    for round_number in range(3):
        min_prob = (0.0, 0.02, 0.3)[round_number]
        proposal = DraftTree.chain(some_tokens(rng, letters, 5), [0.9, 0.8, 0.5, 0.3, 0.1]) if round_number else None
        tree = session.draft(max_nodes=max_nodes, min_prob=min_prob, proposal=proposal)
        assert_valid(tree, max_nodes, min_prob, session._drafter.config.vocab_size)
        if max_nodes <= 64 or round_number == 0:
            wanted = best_first(Probe(session), max_nodes, min_prob)
            assert list(zip(tree.tokens.tolist(), tree.parents.tolist())) == [(node[0], node[1]) for node in wanted]
            assert tree.probs.tolist() == pytest.approx([node[2] for node in wanted], rel=1e-6)
            assert tree.sources.tolist() == [node[3] for node in wanted]
        session.commit(some_tokens(rng, letters, 3))


@pytest.mark.parametrize("text", [[0] * 300, [0, 1] * 150, fibonacci(300), [1, 0, 0] * 100])
@pytest.mark.parametrize("max_nodes", BUDGETS)
def test_regular_texts(text, max_nodes):
    drafter = Drafter(DraftConfig(vocab_size=2))
    with drafter.open(text) as session:
        for _ in range(3):
            assert_valid(session.draft(max_nodes=max_nodes), max_nodes, vocab_size=2)
            session.commit(text[:60])
        tree = session.draft(max_nodes=max_nodes)
        assert_valid(tree, max_nodes, vocab_size=2)
        assert (len(tree) > 0) == (max_nodes > 0)


def test_a_sure_text_is_drafted_as_deep_as_trees_go():
    drafter = Drafter(DraftConfig())
    session = drafter.open([0] * 50)
    session.commit([0] * 3000)
    tree = session.draft(max_nodes=512)
    assert tree.depths().max() == MAX_DEPTH
    assert session.draft(max_nodes=8).parents.tolist() == [-1, 0, 1, 2, 3, 4, 5, 6]


def test_a_smaller_budget_gives_the_beginning_of_the_tree():
    """Nearly: a node is skipped where its children could hardly come in, and where little is to be won fewer candidates
    share the probability. So the last places may differ, and hardly what the tree promises."""
    session = trained(np.random.default_rng(3), 4)
    large = session.draft(max_nodes=64)
    for max_nodes in (1, 2, 4, 8, 16, 32):
        small = session.draft(max_nodes=max_nodes)
        same = (small.tokens == large.tokens[: len(small)]) & (small.parents == large.parents[: len(small)])
        assert max_nodes > 8 or same[: max_nodes // 2 + 1].all()
        assert small.probs.sum() == pytest.approx(large.probs[: len(small)].sum(), rel=0.02)


def test_a_threshold_leaves_out_what_is_below_and_nothing_else():
    session = trained(np.random.default_rng(4), 4)
    everything = session.draft(max_nodes=512)
    for min_prob in (0.001, 0.01, 0.1, 0.5, 1.0):
        tree = session.draft(max_nodes=512, min_prob=min_prob)
        assert_valid(tree, 512, min_prob)
        assert len(tree) <= (everything.probs >= min_prob).sum()
    assert len(session.draft(min_prob=1.0)) == 0


def test_negligible_candidates_do_not_fill_a_budget():
    session = trained(np.random.default_rng(5), 60)
    for max_nodes in (8, 64, 512):
        tree = session.draft(max_nodes=max_nodes)
        assert tree.probs.min() >= np.float32(NEGLIGIBLE / max_nodes)


def test_of_equals_the_first_opened_comes_first():
    """An untrained model judges all of a caller's equally probable siblings alike."""
    tokens = np.array([90, 10, 80, 20, 70, 30, 60, 40, 50, 5, 95, 15, 85, 25], np.int32)
    n = len(tokens)
    proposal = DraftTree(tokens, np.full(n, -1, np.int32), np.full(n, 0.04, np.float32), np.zeros(n, np.uint8))
    for max_nodes in (n - 2, 64):
        tree = Drafter().open([]).draft(max_nodes=max_nodes, proposal=proposal)
        equals = tree.tokens[tree.probs == tree.probs[-1]].tolist()
        assert len(equals) > 3 and equals == tokens.tolist()[: len(equals)]


def test_drafting_changes_nothing():
    session = trained(np.random.default_rng(6), 4)
    first = session.draft(max_nodes=32)
    for _ in range(3):
        session.draft(max_nodes=512, proposal=[1, 2, 3])
    again = session.draft(max_nodes=32)
    for name in ("tokens", "parents", "probs", "sources"):
        assert (getattr(first, name) == getattr(again, name)).all()


def test_a_tree_is_the_callers_to_keep():
    session = trained(np.random.default_rng(7), 4)
    first = session.draft()
    copy = first.tokens.copy(), first.probs.copy()
    session.commit([1, 2])
    session.draft()
    assert (first.tokens == copy[0]).all() and (first.probs == copy[1]).all()
