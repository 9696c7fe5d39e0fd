"""Asking with the target's state: the ring and the memory find what comparing with everything finds, what is forgotten is gone,
sessions follow what was found, and what cannot be a state is refused."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from test_dense_index import ORIGIN, write
from test_index_directory import write as write_corpus

from redraft.retrieval.config import DraftConfig
from redraft.retrieval.dense_index import open_dense
from redraft.retrieval.dense_memory import DenseMemory
from redraft.retrieval.dense_search import DenseSearch
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.index_directory import open_index
from redraft.retrieval.neighbours import CURSORS, LENGTH, continuations, new_neighbours, put, relative_confidence
from redraft.retrieval.state_map import StateMap
from redraft.retrieval.state_ring import StateRing

DIMENSION = 16
ONLY_DENSE = frozenset(Source.NAMES) - {"dense"}


def unit(rng, count=None, dimension=DIMENSION):
    keys = rng.normal(size=(count or 1, dimension)).astype(np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    return keys if count else keys[0]


# --- The ring --------------------------------------------------------------------------------------------------------


def test_the_ring_holds_the_latest_states_and_goes_back():
    rng = np.random.default_rng(0)
    for capacity in (1, 7, 50):
        ring, text, kept = StateRing(capacity, DIMENSION), [], {}
        for _ in range(60):
            if text and rng.random() < 0.2:
                del text[int(rng.integers(0, len(text))) :]
                ring.cut(len(text))
                kept = {position: key for position, key in kept.items() if position < len(text)}
            tokens = rng.integers(0, 3, int(rng.integers(1, 9)))
            text += tokens.tolist()
            if rng.random() < 0.8:  # a commit may come without states
                keys = unit(rng, len(tokens))
                first = len(text) - len(tokens)
                ring.add(keys, tokens.astype(np.int32), first)
                for i, added in enumerate(keys):
                    kept = {p: k for p, k in kept.items() if (p - first - i) % capacity} | {first + i: added}
            key, token = unit(rng), int(rng.integers(0, 3))
            wanted = [(float(k @ key), p) for p, k in kept.items() if text[p] == token and p < len(text) - 1]
            wanted = sorted(wanted, key=lambda found: (-found[0], -found[1]))[:4]
            similarities, positions = ring.search(key, token, len(text) - 1, 4)
            assert positions.tolist() == [p for _, p in wanted]
            assert np.allclose(similarities, [s for s, _ in wanted], atol=1e-6)
            assert ring.since(2)[1].tolist() == sorted(p for p in kept if p >= 2)


def test_of_equal_states_the_latest_come_first():
    ring, key = StateRing(4, DIMENSION), unit(np.random.default_rng(1))
    ring.add(np.tile(key, (6, 1)), np.ones(6, np.int32), 0)
    assert ring.search(key, 1, 5, 2)[1].tolist() == [4, 3]


# --- The memory ------------------------------------------------------------------------------------------------------


class NaiveMemory:
    def __init__(self, budget):
        self.budget, self.outputs = budget, []

    def append(self, owner, text, keys, places):
        if self.budget and len(keys):
            self.outputs.append((owner, text.tolist(), keys[-self.budget :], places[-self.budget :].tolist()))
        while sum(len(keys) for _, _, keys, _ in self.outputs) > self.budget:
            del self.outputs[0]

    def search(self, key, token, count):
        found = [
            (float(k @ key), text[place + 1 :])
            for _, text, keys, places in self.outputs
            for k, place in zip(keys, places)
            if text[place] == token
        ]
        return sorted(found, key=lambda neighbour: -neighbour[0])[:count]


@pytest.mark.parametrize("budget", [0, 10, 100, 10_000])
def test_the_memory_finds_what_comparing_with_all_finds(budget):
    rng = np.random.default_rng(budget)
    memory, naive = DenseMemory(budget), NaiveMemory(budget)
    for owner in range(60):
        text = rng.integers(0, 3, int(rng.integers(0, 30))).astype(np.int32)
        places = np.flatnonzero(rng.random(len(text)) < 0.8)
        keys = unit(rng, len(places)) if len(places) else np.empty((0, DIMENSION), np.float32)
        memory.append(owner, text, keys, places)
        naive.append(owner, text, keys, places)
        if naive.outputs and rng.random() < 0.3:
            gone = naive.outputs.pop(int(rng.integers(0, len(naive.outputs))))[0]
            assert memory.forget(gone) and not memory.forget(gone)
        assert len(memory) == sum(len(keys) for _, _, keys, _ in naive.outputs) <= budget
        assert len(memory.parts) <= 12
        key, token = unit(rng), int(rng.integers(0, 3))
        wanted = naive.search(key, token, 5)
        found = memory.search(key, token, 5)
        assert np.allclose([s for s, *_ in found], [s for s, _ in wanted], atol=1e-6)
        for (_, text, place), (_, continuation) in zip(found, wanted):
            assert text[place + 1 : place + 1 + len(continuation) + 1].tolist() == [*continuation, -1]
    memory.clear()
    assert len(memory) == 0 and memory.search(unit(rng), 1, 5) == []


def test_searching_and_adding_do_not_meet():
    rng = np.random.default_rng(1)
    memory, stop, wrong = DenseMemory(2000), threading.Event(), []

    def search():
        generator = np.random.default_rng(2)
        while not stop.is_set():
            for similarity, text, place in memory.search(unit(generator), 1, 8):
                if text[place] != 1 or not -1.01 <= similarity <= 1.01:
                    wrong.append((similarity, place))

    readers = [threading.Thread(target=search) for _ in range(2)]
    for reader in readers:
        reader.start()
    for owner in range(150):
        memory.append(owner, rng.integers(0, 3, 40).astype(np.int32), unit(rng, 40), np.arange(40))
        if owner % 5 == 0:
            memory.forget(owner - 3)
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong and len(memory) <= 2000


# --- Sessions --------------------------------------------------------------------------------------------------------


def test_neither_this_moment_nor_the_next_output_is_found():
    search, keys, text = DenseSearch(DIMENSION), unit(np.random.default_rng(3), 5), np.array([1, 2, 1, 2, 1], np.int32)
    memory = DenseMemory(100)
    for owner, output in enumerate(([1, 5], [7, 8])):
        memory.append(owner, np.array(output, np.int32), keys[:2], np.arange(2))
    search.take(keys, text, 5)
    assert search.own(text) == 0b11 << CURSORS  # positions 0 and 2
    assert search.stores(text, None, memory) == 1
    assert search.neighbours.tokens[0].tolist() == [5] + [-1] * (LENGTH - 1)


@pytest.fixture
def store(tmp_path):
    """A corpus in which nothing repeats, and the dense index of its states: (path, texts, keys by position)."""
    rng = np.random.default_rng(4)
    documents = [rng.permutation(50)[:40].tolist() for _ in range(8)]
    with open_index(write_corpus(tmp_path / "my.index", documents)) as corpus:
        keys = unit(rng, 320)
        write(tmp_path / "my.dense", corpus, keys[1:])
    return tmp_path / "my.dense", [token for document in documents for token in document], keys


CONFIG = DraftConfig(vocab_size=50, disabled=ONLY_DENSE)


def test_a_neighbour_is_followed_to_the_end_of_its_document(store):
    path, text, keys = store
    with Drafter(CONFIG, dense=path) as drafter, drafter.open([7]) as session:
        assert drafter.hidden_size == DIMENSION and drafter.states[1] == ORIGIN
        session.commit([text[50]], hidden=keys[50])
        tree = session.draft(max_nodes=30)
        assert tree.best_path().tolist() == text[51:80][: len(tree.best_path())] and len(tree.best_path()) > 5
        assert set(tree.sources.tolist()) == {Source.DENSE}
        session.commit(text[51:54])  # without a state, what was found is followed on
        assert session.draft().best_path()[:5].tolist() == text[54:59]
        session.commit([49 if text[54] != 49 else 48])
        assert len(session.draft()) == 0
        session.commit([text[77]], hidden=keys[77])
        assert session.draft().best_path().tolist() == text[78:80]  # document 1 ends there


def test_a_neighbour_whose_token_is_another_is_none(store):
    path, text, keys = store
    with Drafter(CONFIG, dense=path) as drafter, drafter.open([7]) as session:
        session.commit([(text[50] + 1) % 50], hidden=keys[50])
        tree = session.draft()
        assert all(token != text[51] for token in tree.tokens[tree.parents == -1]) or len(tree) == 0


def test_where_the_others_are_sure_stores_are_not_asked(store):
    path, _, _ = store
    rng = np.random.default_rng(5)
    with (
        Drafter(DraftConfig(vocab_size=50), dense=path) as drafter,
        drafter.open([1, 2, 3, 4, 5, 6, 7, 8] * 20) as session,
    ):
        for token in (1, 2, 3, 4, 5, 6, 7, 8) * 6:
            session.commit([token], hidden=unit(rng))
            session.draft()
        assert session._dense.asked < 24
        before = session._dense.asked
        for token in rng.integers(9, 50, 20):
            session.commit([token], hidden=unit(rng))
            session.draft()
        assert session._dense.asked >= before + 15


def test_of_equal_passages_that_like_this_moment_comes_first(store):
    rng = np.random.default_rng(6)
    prompt = [1, 2, 3, 10, 1, 2, 3, 11, 1, 2, 3, 12, 9, 9, 1, 2, 3]
    states = unit(rng, len(prompt))
    config = DraftConfig(vocab_size=50, disabled=frozenset({"dense"}))
    for at, wanted in ((2, 10), (6, 11), (10, 12)):
        with Drafter(config, dense=store[0]) as drafter, drafter.open(prompt[:-1]) as session:
            states[-1] = states[at]
            session.commit(prompt[-1:], hidden=states[1:])
            tree = session.draft()
            assert tree.best_path()[0] == wanted


def test_outputs_join_the_dense_memory_and_can_be_forgotten(store):
    rng = np.random.default_rng(7)
    output = rng.permutation(40)[:20]
    keys = unit(rng, 20)

    def drafted(drafter, namespace):
        with drafter.open([45], namespace=namespace) as session:
            session.commit([output[4]], hidden=keys[4])
            return session.draft().best_path().tolist()

    with Drafter(CONFIG, dense=store[0]) as drafter:
        before = drafted(drafter, "a")
        for namespace in ("a", "b"):
            session = drafter.open([41, 42], namespace=namespace)
            for begin in range(0, 20, 5):
                session.commit(output[begin : begin + 5], hidden=keys[begin : begin + 5])
            session.close()
            assert drafted(drafter, namespace)[:6] == output[5:11].tolist()
            assert drafted(drafter, "another") == before
        assert drafter.forget("b", session.id)
        assert drafted(drafter, "b") == before
        drafter.forget("a")
        assert drafted(drafter, "a") == before
        session = drafter.open([41], namespace="a")
        session.commit(output, hidden=keys)
        session.truncate(3)
        session.close()
        assert drafted(drafter, "a") == before


def test_what_is_no_state_is_refused(store):
    key = unit(np.random.default_rng(8))
    with Drafter(DraftConfig(vocab_size=50)) as drafter, drafter.open([1, 2]) as session:
        assert drafter.hidden_size == 0 and drafter.states is None
        with pytest.raises(ValueError, match="has no dense index"):
            session.commit([3], hidden=key)
    with Drafter(CONFIG, dense=store[0]) as drafter, drafter.open([1, 2]) as session:
        for bad, message in (
            (key[:15], r"wanted shape \[16\] or \[1\.\.2, 16\], got \[15\]"),
            (np.tile(key, (3, 1)), r"got \[3, 16\]"),
            (np.empty((0, 16)), r"got \[0, 16\]"),
            (key * np.nan, "NaN or infinity"),
            (np.where(np.arange(16) == 3, np.inf, key), "NaN or infinity"),
            (key * 0, "length one, got lengths 0..0"),
            (key * 3, "length one"),
        ):
            with pytest.raises(ValueError, match=message):
                session.commit([3], hidden=bad)
        assert session.length == 2
    with (
        Drafter(CONFIG, dense=store[0]) as drafter,
        drafter.open([]) as session,
        pytest.raises(ValueError, match="no token of this text was chosen from a state"),
    ):
        session.commit([3], hidden=key)


def test_another_map_does_not_take_the_place_of_one_in_use(store, tmp_path):
    with open_dense(store[0]) as index, Drafter(CONFIG, dense=store[0]) as drafter:
        drafter.load_dense(store[0])
        rng = np.random.default_rng(9)
        other = StateMap(rng.normal(size=(DIMENSION, 40)), np.zeros(DIMENSION))
        write(tmp_path / "other.dense", index.corpus, unit(rng, 100), state_map=other)
        with pytest.raises(ValueError, match="begin a new drafter"):
            drafter.load_dense(tmp_path / "other.dense")
    with pytest.raises(IndexFormatError, match="missing"):
        Drafter(CONFIG, dense=tmp_path / "nothing")
    with pytest.raises(ValueError, match="dense_keys"):
        DraftConfig(dense_keys=-1)


def test_provenance_of_dense_drafts(store):
    path, text, keys = store
    with Drafter(CONFIG, dense=path) as drafter, drafter.open([7]) as session:
        session.commit([text[50]], hidden=keys[50])
        tree = session.draft(max_nodes=6)
        for token, place in zip(tree.tokens, tree.provenance()):
            assert place is not None and text[place.document * 40 + place.offset] == token


def test_relative_confidence():
    assert relative_confidence(np.array([], np.float32)) == 1.0
    assert relative_confidence(np.array([0.99, 0.1, 0.0], np.float32)) < 0.1
    assert relative_confidence(np.array([0.3, 0.3, 0.29], np.float32)) > 0.99


def test_what_one_search_found_replaces_what_its_kind_found_before():
    neighbours, text = new_neighbours(), np.arange(100, dtype=np.int32)
    stored = continuations(text, np.array([3, 80]), np.array([7, 100]))
    assert stored[0].tolist() == [4, 5, 6] + [-1] * (LENGTH - 3)
    assert stored[1].tolist() == [*range(81, 100)] + [-1] * (LENGTH - 19)
    assert continuations(text, np.array([98, 99]), 100)[:, 0].tolist() == [99, -1]
    for own, confidence, bucket in ((False, 0.1, 0), (True, 0.5, 1), (False, 0.9, 2)):
        first, before = CURSORS * own, neighbours.tokens.copy()
        bits = put(neighbours, own, np.array([0.9, 0.8], np.float32), stored, confidence, 17 + bucket)
        assert bits == 0b11 << first
        assert (neighbours.tokens[first : first + 2] == stored).all()
        assert np.allclose(neighbours.similarities[first : first + 2], [0.9, 0.8])
        assert np.isclose(neighbours.weights[first] / neighbours.weights[first + 1], np.exp(0.8), rtol=1e-4)
        assert neighbours.found[2 * own : 2 * own + 2].tolist() == [17 + bucket, bucket]
        other = slice(CURSORS, None) if not own else slice(0, CURSORS)
        assert (neighbours.tokens[other] == before[other]).all()
