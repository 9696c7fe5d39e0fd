"""Corpus indexes in the drafter: which candidates they name, of either kind and of several; never over a document's end."""

from __future__ import annotations

import random

import naive_automaton as naive
import numpy as np
import pytest
from test_suffix_automaton import TABLE, build, random_documents

from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.index_directory import write_array_index, write_automaton_index
from redraft.retrieval.sources.corpus import MAX_CONTEXT, MAX_LEVELS, MAX_SUCCESSORS

KINDS = ("suffix_automaton", "suffix_array")
V = 50
ONLY_CORPUS = frozenset(Source.NAMES) - {"corpus"}
CONFIG = DraftConfig(vocab_size=V, disabled=ONLY_CORPUS)


def write(path, documents, kind, *, vocab_size=V, fingerprint="ab12", force=False):
    """An index of `documents` at `path`."""
    rest = {
        "tokenizer": {"fingerprint": fingerprint, "name": "toy", "vocab_size": vocab_size},
        "options": {},
        "sources": [],
        "force": force,
    }
    if kind == "suffix_automaton":
        write_automaton_index(path, build(documents, random.Random(0)), **rest)
    else:
        tokens = np.array([token for document in documents for token in document], np.int32)
        ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
        write_array_index(path, tokens, ends, **rest)
    return path


def many_documents(rng: random.Random) -> list[list[int]]:
    """Ids 0 and V - 1, documents of one token, empty and equal ones, in a corpus small enough to be counted exactly."""
    alphabet = [0, V - 1, *rng.sample(range(1, V - 1), rng.choice([0, 1, 4]))]
    documents = [
        [rng.choice(alphabet) for _ in range(rng.choice([0, 1, 1, 2, 3, 8]))] for _ in range(rng.randint(1, 14))
    ]
    return documents + rng.choices(documents, k=2)


def candidates(documents: list[list[int]], context: list[int]) -> set[int]:
    """What an index must name after `context`: the most frequent successors of the two longest contexts that have any."""
    named: set[int] = set()
    suffix, levels, last = naive.longest_suffix(documents, context, MAX_CONTEXT), 0, 0
    while suffix and levels < MAX_LEVELS:
        count, after = len(naive.occurrences(documents, suffix)), naive.successors(documents, suffix)
        if count > last and after:
            named.update(token for token, _ in after[:MAX_SUCCESSORS])
            levels += 1
        last = max(last, count)
        suffix = suffix[1:]
    return named


def some_context(rng: random.Random, documents: list[list[int]]) -> list[int]:
    """Passages of the corpus one after the other, so that matches break and begin anew; sometimes over a document's end."""
    everything = [token for document in documents for token in document] or [0]
    context: list[int] = []
    for _ in range(rng.randint(0, 3)):
        start = rng.randrange(len(everything))
        context += everything[start : start + rng.randint(1, 7)]
        context += [rng.randrange(V)] * (rng.random() < 0.3)
    return context


def path_to(tree, node: int) -> list[int]:
    """Tokens above a node, from the root."""
    path = []
    while (node := int(tree.parents[node])) >= 0:
        path.append(int(tree.tokens[node]))
    return path[::-1]


def check_tree(tree, corpora: list[list[list[int]]], context: list[int], *, complete: bool) -> None:
    """Every node is named by one of the indexes; with room for all of them, the root's children are all they name."""
    tree.check(vocab_size=V)
    for node in range(len(tree)):
        before = (context + path_to(tree, node))[-MAX_CONTEXT:]
        assert any(int(tree.tokens[node]) in candidates(documents, before) for documents in corpora)
    if complete:
        children = set(tree.tokens[tree.parents < 0].tolist())
        assert children == set().union(*(candidates(documents, context) for documents in corpora))


def walk(drafter: Drafter, rng: random.Random, corpora: list[list[list[int]]], check=check_tree) -> None:
    """A session that is opened, drafted for and committed to, checked at every step."""
    documents = rng.choice(corpora)
    context = some_context(rng, documents)
    with drafter.open(context) as session:
        for _ in range(4):
            check(session.draft(max_nodes=256), corpora, context, complete=True)
            check(session.draft(max_nodes=rng.randint(1, 12)), corpora, context, complete=False)
            tokens = some_context(rng, documents)
            session.commit(tokens)
            context = context + tokens
        length = rng.randint(0, len(context))
        session.truncate(length)
        check(session.draft(max_nodes=256), corpora, context[:length], complete=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("documents", TABLE)
def test_table(documents, kind, tmp_path):
    documents = [[min(token, V - 1) for token in document] for document in documents]
    with Drafter(CONFIG, indexes=[write(tmp_path / "i", documents, kind)]) as drafter:
        for seed in range(4):
            walk(drafter, random.Random(seed), [documents])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_one_index(seed, kind, tmp_path):
    rng = random.Random(seed)
    documents = many_documents(rng)
    with Drafter(CONFIG, indexes=[write(tmp_path / "i", documents, kind)]) as drafter:
        for _ in range(3):
            walk(drafter, rng, [documents])


@pytest.mark.parametrize("seed", range(12))
def test_several_indexes_of_both_kinds(seed, tmp_path):
    rng = random.Random(seed)
    corpora = [many_documents(rng) for _ in range(rng.randint(2, 4))]
    paths = [write(tmp_path / str(i), documents, rng.choice(KINDS)) for i, documents in enumerate(corpora)]
    with Drafter(CONFIG, indexes=paths) as drafter:
        for _ in range(3):
            walk(drafter, rng, corpora)


@pytest.mark.parametrize("seed", range(10))
def test_both_kinds_give_the_same_trees(seed, tmp_path):
    """All sources on, the same life of a session: every number agrees while intervals are counted exactly."""
    rng = random.Random(100 + seed)
    documents = random_documents(rng) if seed % 2 else many_documents(rng)
    documents = [[min(token, V - 1) for token in document] for document in documents]
    drafters = [Drafter(DraftConfig(vocab_size=V), indexes=[write(tmp_path / kind, documents, kind)]) for kind in KINDS]
    for _ in range(6):
        context = some_context(rng, documents)
        sessions = [drafter.open(context) for drafter in drafters]
        for _ in range(8):
            tokens, nodes = some_context(rng, documents), rng.choice([3, 32, 256])
            trees = []
            for session in sessions:
                session.commit(tokens)
                trees.append(session.draft(max_nodes=nodes))
            for field in ("tokens", "parents", "probs", "sources"):
                assert np.array_equal(*(getattr(tree, field) for tree in trees))
        for session in sessions:
            session.close()


def test_both_kinds_give_the_same_trees_where_contexts_occur_thousands_of_times(tmp_path):
    """Frequent contexts, with more than eight successors, beside rare ones: whatever a draft asks is counted exactly."""
    rng = random.Random(0)
    phrases = [[rng.randrange(V) for _ in range(rng.randint(1, 9))] for _ in range(60)]
    documents = [
        [token for _ in range(80) for token in rng.choices(phrases, range(60, 0, -1))[0]] for _ in range(60)
    ]
    trees = 0
    with (
        Drafter(CONFIG, indexes=[write(tmp_path / KINDS[0], documents, KINDS[0])]) as one,
        Drafter(CONFIG, indexes=[write(tmp_path / KINDS[1], documents, KINDS[1])]) as other,
    ):
        for _ in range(20):
            context, more = some_context(rng, documents), some_context(rng, documents)
            with one.open(context) as session, other.open(context) as same:
                for tokens in (more, more[:3], [rng.randrange(V)]):
                    session.commit(tokens)
                    same.commit(tokens)
                    tree, same_tree = session.draft(max_nodes=64), same.draft(max_nodes=64)
                    for field in ("tokens", "parents", "probs", "sources"):
                        assert np.array_equal(getattr(tree, field), getattr(same_tree, field))
                    trees += len(tree) == 64
    assert trees > 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_ends_with_its_document(kind, tmp_path):
    documents = [[1, 2, 3, 4], [5, 6, 7, 8], [4], [0], [V - 1], [8, 9]]
    with Drafter(CONFIG, indexes=[write(tmp_path / "i", documents, kind)]) as drafter:
        for prompt, children, deepest in (
            ([1, 2], [3], 2),
            ([1, 2, 3, 4], [], 0),  # 5 is the next document's
            ([3, 4], [], 0),
            ([7, 8], [9], 1),  # 7 8 ends a document; 8 alone goes on in another
            ([0], [], 0),
            ([V - 1], [], 0),
            ([6], [7], 3),  # down to the 9 that follows 8 elsewhere
        ):
            tree = drafter.open(prompt).draft()
            assert tree.tokens[tree.parents < 0].tolist() == children
            assert int(tree.depths().max(initial=0)) == deepest


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_without_tokens(kind, tmp_path):
    """Nothing to find, and nothing to fall over."""
    path = write(tmp_path / "i", [], kind)
    with Drafter(CONFIG, indexes=[path]) as drafter, drafter.open([0, 1, V - 1]) as session:
        session.commit([0])
        assert len(session.draft()) == 0
