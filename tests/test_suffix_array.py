"""The suffix array against plain Python: order, intervals, successors, cursors; many documents, repeats."""

from __future__ import annotations

import random

import naive_automaton as naive
import numpy as np
import pytest
from test_suffix_automaton import TABLE, random_documents

from redraft.retrieval.kernel import kernel
from redraft.retrieval.suffix_array import (
    EXACT_ROWS,
    KEY_STRIDE,
    SAMPLED_KEYS,
    SuffixArray,
    Text,
    array_advance,
    array_shorten,
    array_successors,
    find,
    positions,
    successors,
)
from redraft.retrieval.suffix_array_build import build_suffix_array
from redraft.retrieval.suffix_sorting import sort_suffixes


def flat(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array([token for document in documents for token in document], np.int32)
    return tokens, np.cumsum([len(document) for document in documents], dtype=np.int64)


def build(documents: list[list[int]]) -> SuffixArray:
    return build_suffix_array(*flat(documents))


@kernel(allocates=False)
def _advance(array, low, high, length, window, filled, max_length):
    return array_advance(array, low, high, length, window, filled, max_length)


@kernel(allocates=False)
def _shorten(array, low, high, length, window):
    return array_shorten(array, low, high, length, window)


def distinct_successors(array: SuffixArray, low: int, high: int, length: int) -> int:
    return array_successors(array, low, high, length, np.zeros(8, np.int32), np.zeros(8, np.int32))[1]


def repetitive(rng: random.Random, n_documents: int, size: int, alphabet: int) -> list[list[int]]:
    """Documents that copy from earlier ones: long matches and large intervals."""
    documents: list[list[int]] = []
    for _ in range(n_documents):
        document: list[int] = []
        while len(document) < size:
            if documents and rng.random() < 0.5:
                source = rng.choice(documents)
                start = rng.randrange(len(source))
                document += source[start : start + rng.randint(1, 20)]
            else:
                document.append(rng.randrange(alphabet) ** 2 // alphabet)
        documents.append(document)
    return documents


def check_find(array: SuffixArray, documents: list[list[int]], context: list[int], limit: int) -> None:
    low, high, length = find(array, context, limit)
    suffix = naive.longest_suffix(documents, context, limit)
    assert length == len(suffix)
    ends = naive.occurrences(documents, suffix) if suffix else range(array.sizes[0])
    assert high - low == len(ends)
    if suffix:
        assert sorted((positions(array, low, high) + length - 1).tolist()) == ends
    expected = naive.successors(documents, suffix)
    tokens, counts = successors(array, low, high, length)
    if high - low <= EXACT_ROWS:
        assert list(zip(tokens.tolist(), counts.tolist(), strict=True)) == expected[:8]
        assert distinct_successors(array, low, high, length) == len(expected)
    else:
        check_estimate(dict(zip(tokens.tolist(), counts.tolist(), strict=True)), dict(expected), high - low)


def check_estimate(found: dict[int, int], expected: dict[int, int], size: int) -> None:
    """A sample at equal distances over sorted rows is at most about one distance off at either end of a run."""
    assert list(found.values()) == sorted(found.values(), reverse=True)
    slack = 2 * size / EXACT_ROWS + 2 * KEY_STRIDE + 2
    for token, count in found.items():
        assert abs(count - expected[token]) <= slack
    if len(found) < 8:
        assert all(count <= slack for token, count in expected.items() if token not in found)


# --- Sorting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", TABLE)
def test_order_table(documents):
    assert sort_suffixes(*flat(documents)).tolist() == naive.suffix_array(documents)


@pytest.mark.parametrize("seed", range(25))
def test_order_of_random_documents(seed):
    rng = random.Random(seed)
    for _ in range(40):
        documents = random_documents(rng)
        assert sort_suffixes(*flat(documents)).tolist() == naive.suffix_array(documents)


@pytest.mark.parametrize(
    "documents",
    [
        [[0] * 500, [0] * 300],
        [[0, 1] * 200],
        [[*range(50)] * 8],
        [[*range(50, 0, -1)] * 8],
        [naive.fibonacci_word(700)],
        [[token] for token in [3, 0, 3, 1] * 50],
        [[2**31 - 1, 0] * 100, [2**31 - 1]],
    ],
)
def test_order_of_repeats(documents):
    """Several rounds of names, and the alphabet's ends."""
    assert sort_suffixes(*flat(documents)).tolist() == naive.suffix_array(documents)


def test_order_of_a_copied_corpus():
    documents = repetitive(random.Random(2), 12, 150, 40)
    assert sort_suffixes(*flat(documents)).tolist() == naive.suffix_array(documents)


# --- The stored form ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("highest", [0, 1, 254, 255, 49_151, 65_535, 65_536, 2**31 - 1])
def test_tokens_and_positions_come_back(highest):
    """Ids at both sides of a power of two, as many tokens, empty documents at both ends."""
    rng = random.Random(highest)
    for n in (1, 2, 31, 33, 256, 257):
        documents = [[], [rng.choice([0, highest]) for _ in range(n - 1)], [highest], []]
        array = build(documents)
        tokens, _ = flat(documents)
        text, places = Text(array), np.array([n - 1, 0, n // 2])
        assert len(text) == n and np.asarray(text).tolist() == text[:].tolist() == tokens.tolist()
        assert text[n // 2 : n + 9].tolist() == tokens[n // 2 :].tolist() and text[1::2].tolist() == tokens[1::2].tolist()
        assert text[places].tolist() == tokens[places].tolist() and text[-1:].dtype == np.int32 and len(text[5:5]) == 0
        assert text[n - 1] == highest
        with pytest.raises(IndexError, match=f"wanted 0..{n - 1}, got 0..{n}"):
            text[np.array([0, n])]
        assert positions(array, 0, n).tolist() == naive.suffix_array(documents)
        assert array.sizes.tolist()[0] == n and array.sizes[1] == max(1, highest.bit_length()) + 1
        check_find(array, documents, [0, highest], 5)


# --- Queries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [documents for documents in TABLE if any(documents)])
def test_find_table(documents):
    rng = random.Random(1)
    array = build(documents)
    everything = [token for document in documents for token in document]
    for _ in range(40):
        start, end = sorted(rng.choices(range(len(everything) + 1), k=2))
        check_find(array, documents, everything[start:end], rng.choice([1, 2, 3, 5, 6, 1000]))


@pytest.mark.parametrize("seed", range(25))
def test_find_in_random_documents(seed):
    rng = random.Random(seed)
    for _ in range(10):
        documents = random_documents(rng)
        array = build(documents)
        alphabet = [token for document in documents for token in document] or [0]
        for _ in range(6):
            context = [rng.choice([*alphabet, 4]) for _ in range(rng.randint(0, 9))]
            check_find(array, documents, context, rng.choice([1, 2, 3, 1000]))


@pytest.mark.parametrize("alphabet", [2, 30])
def test_find_in_large_intervals(alphabet):
    """Thousands of rows: keys decide, matches go beyond their five tokens, successors are sampled."""
    rng = random.Random(alphabet)
    documents = repetitive(rng, 20, 600, alphabet)
    array = build(documents)
    for _ in range(60):
        document = rng.choice(documents)
        end = rng.randint(1, len(document))
        check_find(array, documents, document[max(0, end - 12) : end], rng.choice([1, 2, 3, 4, 5, 6, 9]))
    check_find(array, documents, [], 1)


def test_a_large_sample_is_bounded_and_close():
    """Known shares of successors in one interval of 60,000 rows."""
    tokens = np.array([token for i in range(60_000) for token in (0, 1 + (i * 7919) % 10 % 4)], np.int32)
    array = build_suffix_array(tokens, np.array([len(tokens)]))
    low, high, length = find(array, [0], 4)
    assert (high - low, length) == (60_000, 1)
    found, counts = successors(array, low, high, length)
    assert found.tolist() == [1, 2, 3, 4]
    assert np.abs(counts - np.array([18_000, 18_000, 12_000, 12_000])).max() <= 2 * 60_000 / SAMPLED_KEYS


@pytest.mark.parametrize("n_distinct", [1, 40, 1000, 20_000])
def test_distinct_successors_are_estimated_within_a_factor(n_distinct):
    """Zipf-distributed successors of one token; the estimator's guarantee is the root of rows / samples, here 15."""
    ranks = np.arange(1, n_distinct + 1)
    drawn = np.random.default_rng(n_distinct).choice(ranks, 60_000, p=(1 / ranks) / (1 / ranks).sum())
    tokens = np.stack([np.zeros_like(drawn), drawn], axis=1).reshape(-1).astype(np.int32)
    array = build_suffix_array(tokens, np.array([len(tokens)]))
    low, high, length = find(array, [0], 4)
    found, present = distinct_successors(array, low, high, length), len(np.unique(drawn))
    assert present / 15.4 <= found <= present * 15.4


@pytest.mark.parametrize("limit", [1, 4, 7])
@pytest.mark.parametrize("alphabet", [2, 12])
def test_cursors_advance_and_shorten(limit, alphabet):
    """Along a text that partly occurs, the cursor is the longest match of each moment, and shortens as defined."""
    rng = random.Random(10 * alphabet + limit)
    documents = repetitive(rng, 12, 300, alphabet)
    array = build(documents)
    text = [
        *documents[3][50:90],
        *(rng.randrange(alphabet + 1) for _ in range(40)),
        *documents[5][-30:],
        *documents[6][:20],
    ]
    window = np.zeros(limit, np.int32)
    low, high, length = 0, int(array.sizes[0]), 0
    for position, token in enumerate(text):
        window[1:] = window[:-1].copy()
        window[0] = token
        context = text[max(0, position + 1 - limit) : position + 1]
        low, high, length = _advance(array, low, high, length, window, len(context), limit)
        suffix = naive.longest_suffix(documents, context)
        assert length == len(suffix)
        if length:
            assert high - low == len(naive.occurrences(documents, suffix))
        shorter_low, shorter_high, shorter = _shorten(array, low, high, length, window)
        wanted = suffix[1:]
        while wanted and len(naive.occurrences(documents, wanted)) == high - low:
            wanted = wanted[1:]
        assert shorter == len(wanted)
        assert shorter_high - shorter_low == (
            len(naive.occurrences(documents, wanted)) if wanted else array.sizes[0]
        )


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_empty(documents):
    array = build(documents)
    assert find(array, [1, 2]) == (0, 0, 0)
    assert _advance(array, 0, 0, 0, np.array([1], np.int32), 1, 1) == (0, 0, 0)
    assert [part.tolist() for part in successors(array, 0, 0, 0)] == [[], []]


def test_wrong_arguments():
    with pytest.raises(ValueError, match="wanted ascending ends, the last one 3"):
        build_suffix_array([1, 2, 3], np.array([2]))
    with pytest.raises(ValueError, match="wanted ascending ends, the last one 3"):
        build_suffix_array([1, 2, 3], np.array([2, 1, 3]))
    with pytest.raises(ValueError, match="max_length: wanted at least 1, got 0"):
        find(build([[1]]), [1], 0)


def test_arrays_are_read_only_and_of_one_type():
    for documents in ([], [[3]], [[1, 2], [1, 3]]):
        for array in build(documents):
            assert array.flags.c_contiguous and not array.flags.writeable
        _shorten(build(documents), 0, 0, 0, np.zeros(1, np.int32))
    assert len(getattr(_shorten, "signatures", [()])) == 1
