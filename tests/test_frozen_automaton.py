"""The frozen automaton against plain Python and against the automaton it was frozen from."""

from __future__ import annotations

import random

import naive_automaton as naive
import numpy as np
import pytest
from test_suffix_automaton import TABLE, build, random_documents

from redraft.retrieval.edge_rows import EDGE_COUNT, EDGE_TARGET, EDGE_TOKEN, HEAD
from redraft.retrieval.frozen_automaton import (
    COUNT,
    EDGE_START,
    FIRST_END,
    LENGTH,
    LINK,
    FrozenAutomaton,
    freeze,
    frozen_advance,
    frozen_edge,
    frozen_walk,
)
from redraft.retrieval.suffix_automaton import SuffixAutomaton


def edges_of(frozen: FrozenAutomaton, state: int) -> np.ndarray:
    return frozen.edges[frozen.states[state, EDGE_START] : frozen.states[state + 1, EDGE_START]]


def check_answers(frozen: FrozenAutomaton, documents: list[list[int]], context: list[int], limit: int) -> None:
    state, length = frozen_walk(frozen, np.array(context, np.int32), limit)
    suffix = naive.longest_suffix(documents, context, limit)
    assert length == len(suffix)
    ends = naive.occurrences(documents, suffix)
    if suffix:
        assert (frozen.states[state, COUNT], frozen.states[state, FIRST_END]) == (len(ends), ends[0])
    else:
        assert (state, frozen.states[0, COUNT], frozen.states[0, FIRST_END]) == (0, sum(map(len, documents)), -1)
    expected = naive.successors(documents, suffix)
    found = [(int(row[EDGE_TOKEN]), int(row[EDGE_COUNT])) for row in edges_of(frozen, state)]
    assert found == expected[:HEAD] + sorted(expected[HEAD:])
    for token, count in expected:
        edge = frozen_edge(frozen, state, token)
        assert frozen.edges[edge, EDGE_TOKEN] == token
        assert frozen.states[frozen.edges[edge, EDGE_TARGET], COUNT] == count


@pytest.mark.parametrize("documents", TABLE)
def test_table(documents):
    rng = random.Random(1)
    frozen = freeze(build(documents, rng))
    everything = [token for document in documents for token in document]
    for _ in range(60):
        start, end = sorted(rng.choices(range(len(everything) + 1), k=2))
        check_answers(frozen, documents, everything[start:end], rng.choice([1, 2, 3, 8, 1000]))


@pytest.mark.parametrize("seed", range(30))
def test_random_documents(seed):
    rng = random.Random(seed)
    for _ in range(15):
        documents = random_documents(rng)
        frozen = freeze(build(documents, rng))
        alphabet = [token for document in documents for token in document] or [0]
        for _ in range(6):
            context = [rng.choice([*alphabet, 4]) for _ in range(rng.randint(0, 9))]
            check_answers(frozen, documents, context, rng.choice([1, 2, 3, 1000]))


@pytest.mark.parametrize("n_successors", [7, 8, 9, 10, 17, 300])
def test_states_with_many_successors(n_successors):
    """The eight most frequent first, the rest by id; every one is found and nothing else is."""
    rng = random.Random(n_successors)
    ids = rng.sample(range(2, 5000, 2), n_successors)
    documents = [[1, token] for token in ids for _ in range(rng.randint(1, 4))]
    rng.shuffle(documents)
    frozen = freeze(build(documents, rng))
    check_answers(frozen, documents, [1], 10)
    check_answers(frozen, documents, [], 10)
    state, _ = frozen_walk(frozen, np.array([1], np.int32), 10)
    for absent in [0, 1, 3, 5001, 2**31 - 1, *(token + 1 for token in ids)]:
        assert frozen_edge(frozen, state, absent) == -1


def test_advance_shortens_to_the_limit_at_every_step():
    text = naive.fibonacci_word(200)
    frozen = freeze(build([text], random.Random(0)))
    state, length = 0, 0
    for position, token in enumerate(text):
        state, length = frozen_advance(frozen, state, length, token, 5)
        assert length == min(position + 1, 5)
        assert frozen.states[frozen.states[state, LINK], LENGTH] < length <= frozen.states[state, LENGTH]
        suffix = text[position + 1 - length : position + 1]
        assert frozen.states[state, COUNT] == len(naive.occurrences([text], suffix))


def test_an_unknown_token_returns_to_the_root():
    frozen = freeze(build([[1, 2, 3]], random.Random(0)))
    state, length = frozen_walk(frozen, np.array([1, 2], np.int32), 9)
    assert length == 2
    assert frozen_advance(frozen, state, length, 99, 9) == (0, 0)


def test_empty():
    frozen = freeze(SuffixAutomaton())
    assert frozen.states.shape == (2, 5) and frozen.edges.shape == (0, 3)
    assert frozen_walk(frozen, np.array([1, 2], np.int32), 9) == (0, 0)


def test_same_documents_same_bytes():
    """However they were appended: indexes can be compared by digest."""
    documents = random_documents(random.Random(8))
    a, b = (freeze(build(documents, random.Random(seed))) for seed in (1, 2))
    assert a.states.tobytes() == b.states.tobytes() and a.edges.tobytes() == b.edges.tobytes()


def test_arrays_are_read_only_and_of_one_type():
    """Kernels compile once for all automata: no writable, empty or one-row variant is a type of its own."""
    for documents in ([], [[3]], [[1, 2], [1, 3]]):
        frozen = freeze(build(documents, random.Random(0)))
        for array in frozen:
            assert array.dtype == np.int32 and array.flags.c_contiguous and not array.flags.writeable
        frozen_walk(frozen, np.array([1], np.int32), 4)
    assert len(getattr(frozen_walk, "signatures", [()])) == 1
