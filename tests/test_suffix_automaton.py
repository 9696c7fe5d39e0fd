"""The online suffix automaton against plain Python: matches, counts, positions, successors, documents, truncation."""

from __future__ import annotations

import random

import naive_automaton as naive
import numpy as np
import pytest

from redraft.retrieval.automaton_edges import EDGE_STATE, EDGE_TARGET, LENGTH, LINK, TARGET, TOKEN
from redraft.retrieval.suffix_automaton import SuffixAutomaton

ALPHABETS = ([0], [0, 1], [0, 2**31 - 1], [7, 8, 9], [0, 1, 2, 3])

# Documents that broke a draft of this file or another implementation, and the shapes that strain it most.
TABLE = [
    [[]],
    [[0]],
    [[5], [5], [5]],
    [[0, 1, 1]],  # a split copies an edge that was added for the same token
    [[1, 0, 0, 1, 0], [1, 0, 0]],  # a document inside an earlier one
    [[1, 2], [2, 3]],  # 1 2 2 3 must not match across the end
    [[0, 0, 0], [], [0, 0, 0, 0]],
    [[0] * 40],
    [[0, 1] * 20],
    [[0, 1, 2, 3, 4, 5, 6] * 6],
    [naive.fibonacci_word(55), naive.fibonacci_word(34)],
]


def build(documents: list[list[int]], rng: random.Random) -> SuffixAutomaton:
    """Every document in pieces of random size, as a session appends them."""
    automaton = SuffixAutomaton()
    for document in documents:
        start = 0
        while start < len(document):
            end = start + rng.randint(1, len(document) - start)
            automaton.append(document[start:end])
            start = end
        automaton.end_document()
    return automaton


def random_documents(rng: random.Random) -> list[list[int]]:
    alphabet = rng.choice(ALPHABETS)
    documents = [
        [rng.choice(alphabet) for _ in range(rng.choice([0, 1, 1, 2, 5, 12, 30]))] for _ in range(rng.randint(1, 5))
    ]
    return documents + [documents[0]] if rng.random() < 0.3 else documents


def check_answers(automaton: SuffixAutomaton, documents: list[list[int]], context: list[int]) -> None:
    state, length = automaton.longest_match(context)
    suffix = naive.longest_suffix(documents, context)
    assert length == len(suffix)
    ends = naive.occurrences(documents, suffix)
    assert automaton.count(state) == (len(ends) if suffix else automaton.n_tokens)
    assert (automaton.first_end(state), automaton.last_end(state)) == ((ends[0], ends[-1]) if ends else (-1, -1))
    tokens, counts = automaton.successors(state)
    assert tokens.dtype == counts.dtype == np.int32
    assert list(zip(tokens.tolist(), counts.tolist(), strict=True)) == naive.successors(documents, suffix)


def check_invariants(automaton: SuffixAutomaton) -> None:
    """The numbered promises of `AutomatonArrays`."""
    states, edges = automaton.arrays.states[: automaton.n_states], automaton.arrays.edges
    assert states[0, LENGTH] == 0 and states[0, LINK] == -1 and automaton.first_end(0) == -1
    assert (states[states[1:, LINK], LENGTH] < states[1:, LENGTH]).all()
    first, taken = states[states[:, TOKEN] >= 0], edges[edges[:, EDGE_STATE] > 0]
    assert (states[first[:, TARGET], LENGTH] > first[:, LENGTH]).all()
    assert (states[taken[:, EDGE_TARGET], LENGTH] > states[taken[:, EDGE_STATE] - 1, LENGTH]).all()
    assert (states[taken[:, EDGE_STATE] - 1, TOKEN] >= 0).all()
    assert len(first) + len(taken) == automaton.n_edges and 3 * len(taken) <= 2 * len(edges)


@pytest.mark.parametrize("documents", TABLE)
def test_table(documents):
    rng = random.Random(0)
    automaton = build(documents, rng)
    check_invariants(automaton)
    for document in documents:
        for end in range(len(document) + 1):
            check_answers(automaton, documents, document[max(0, end - rng.randint(0, 60)) : end])
    everything = [token for document in documents for token in document]
    for _ in range(30):
        start, end = sorted(rng.choices(range(len(everything) + 1), k=2))
        check_answers(automaton, documents, everything[start:end])


@pytest.mark.parametrize("seed", range(40))
def test_random_documents(seed):
    rng = random.Random(seed)
    for _ in range(25):
        documents = random_documents(rng)
        automaton = build(documents, rng)
        check_invariants(automaton)
        alphabet = [token for document in documents for token in document] or [0]
        for _ in range(6):
            check_answers(automaton, documents, [rng.choice([*alphabet, 4]) for _ in range(rng.randint(0, 9))])


def test_answers_follow_every_append():
    """Totals are cached between appends, so they are asked for after each one."""
    rng = random.Random(5)
    automaton, written = SuffixAutomaton(), []
    for _ in range(60):
        token = rng.choice([0, 1])
        automaton.append([token])
        written.append(token)
        check_answers(automaton, [written], written[-rng.randint(1, 8) :])


@pytest.mark.parametrize("seed", range(20))
def test_truncate_equals_a_fresh_build(seed):
    rng = random.Random(seed)
    documents = random_documents(rng)
    automaton = build(documents, rng)
    length = rng.randint(0, automaton.n_tokens)
    automaton.truncate(length)

    shortened, left = [], length
    for document in documents:
        if len(document) > left:
            shortened.append(document[:left])
            break
        shortened.append(document)
        left -= len(document)
    assert automaton.n_tokens == length
    check_invariants(automaton)

    # A cut leaves the document open: what is appended continues it.
    if length < sum(map(len, documents)):
        automaton.append([1, 0, 1])
        shortened[-1] = [*shortened[-1], 1, 0, 1]
    for _ in range(20):
        check_answers(automaton, shortened, [rng.choice([0, 1, 2]) for _ in range(rng.randint(0, 9))])


def test_truncate_to_where_a_document_ended_keeps_it_ended():
    automaton = SuffixAutomaton()
    automaton.append([1, 2])
    automaton.end_document()
    automaton.append([3])
    automaton.truncate(2)
    automaton.append([4])
    assert automaton.longest_match([1, 2, 4])[1] == 1
    assert automaton.document_ends.tolist() == [2, 3]


@pytest.mark.parametrize("length", [-1, 4])
def test_truncate_names_a_wrong_length(length):
    automaton = SuffixAutomaton()
    automaton.append([1, 2, 3])
    with pytest.raises(ValueError, match="wanted a length of 0 to 3 tokens"):
        automaton.truncate(length)


def test_growth_from_the_smallest_tables():
    rng = random.Random(3)
    text = [rng.randint(0, 5) for _ in range(4000)]
    piecewise, at_once = SuffixAutomaton(capacity_hint=1), SuffixAutomaton(capacity_hint=len(text))
    for token in text:
        piecewise.append([token])
    at_once.append(text)
    check_invariants(piecewise)
    assert piecewise.n_states == at_once.n_states and piecewise.n_edges == at_once.n_edges
    for _ in range(200):
        start = rng.randrange(len(text))
        context = text[start : start + rng.randint(1, 12)]
        (a, length_a), (b, length_b) = piecewise.longest_match(context), at_once.longest_match(context)
        assert length_a == length_b and piecewise.count(a) == at_once.count(b)


@pytest.mark.parametrize("text", [[0] * 3000, [0, 1] * 1500, [*range(7)] * 430, naive.fibonacci_word(3000)])
def test_states_and_edges_stay_within_the_bounds(text):
    automaton = SuffixAutomaton()
    automaton.append(text)
    assert automaton.n_states <= 2 * len(text) and automaton.n_edges <= 3 * len(text)
    assert automaton.longest_match(text)[1] == len(text)
    assert automaton.count(automaton.longest_match(text[:1])[0]) == text.count(text[0])


def test_documents_and_tokens_are_kept():
    automaton = SuffixAutomaton()
    assert (automaton.n_tokens, automaton.n_documents, automaton.longest_match([1, 2])) == (0, 0, (0, 0))
    automaton.append(np.array([3, 4], np.int64))
    assert automaton.n_documents == 1
    automaton.end_document()
    automaton.end_document()
    automaton.append([5])
    assert automaton.document_ends.tolist() == [2, 2, 3] and automaton.n_documents == 3
    assert automaton.tokens.tolist() == [3, 4, 5] and automaton.tokens.dtype == np.int32
    with pytest.raises(ValueError):
        automaton.tokens[0] = 1


def test_read_only_input_is_taken_and_not_kept():
    source = np.arange(6, dtype=np.int32)
    automaton = SuffixAutomaton()
    view = np.frombuffer(source.tobytes(), np.int32)
    automaton.append(view)
    automaton.append(source)
    source[:] = 9
    assert automaton.tokens.tolist() == [*range(6), *range(6)]
    assert automaton.longest_match(view)[1] == 6


@pytest.mark.parametrize(
    "bad, error", [([-1], ValueError), ([0.5], TypeError), ([[1]], ValueError), ([2**31], ValueError)]
)
def test_bad_ids_change_nothing(bad, error):
    automaton = SuffixAutomaton()
    automaton.append([1, 2])
    with pytest.raises(error):
        automaton.append(bad)
    with pytest.raises(error):
        automaton.longest_match(bad)
    assert automaton.tokens.tolist() == [1, 2]
