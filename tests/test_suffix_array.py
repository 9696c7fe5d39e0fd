"""The suffix array against plain Python: order, intervals, successors, cursors; many documents, repeats."""

from __future__ import annotations

import random

import naive_automaton as naive
import numpy as np
import pytest
from test_suffix_automaton import TABLE, random_documents

from redraft.retrieval.edge_rows import EDGE_COLUMNS
from redraft.retrieval.frequent_contexts import (
    CONTEXT_COLUMNS,
    COUNT,
    DEPTH,
    DISTINCT,
    EDGE_START,
    LEAST_ROWS,
    LENGTH,
    LINK,
    LOW,
    SHORTER,
)
from redraft.retrieval.kernel import kernel
from redraft.retrieval.suffix_array import KEY_STRIDE, SuffixArray, Text, positions
from redraft.retrieval.suffix_array_build import build_suffix_array
from redraft.retrieval.suffix_array_cursor import EXACT_ROWS, array_advance, array_shorten, find, successors
from redraft.retrieval.suffix_sorting import sort_suffixes

NEVER = 1 << 30  # rows that no context has: none is frequent


def flat(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array([token for document in documents for token in document], np.int32)
    return tokens, np.cumsum([len(document) for document in documents], dtype=np.int64)


def build(documents: list[list[int]], least_rows: int = LEAST_ROWS) -> SuffixArray:
    return build_suffix_array(*flat(documents), least_rows=least_rows)


@kernel(allocates=False)
def _advance(array, low, high, length, frequent, window, max_length):
    return array_advance(array, low, high, length, frequent, window, max_length)


@kernel(allocates=False)
def _shorten(array, low, high, length, frequent, window):
    return array_shorten(array, low, high, length, frequent, window)


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
    low, high, length, frequent = find(array, context, limit)
    suffix = naive.longest_suffix(documents, context, limit)
    assert length == len(suffix)
    ends = naive.occurrences(documents, suffix) if suffix else range(array.sizes[0])
    assert high - low == len(ends)
    if suffix:
        assert sorted((positions(array, low, high) + length - 1).tolist()) == ends
    expected = naive.successors(documents, suffix)
    tokens, counts, distinct = successors(array, low, high, length, frequent)
    if high - low <= EXACT_ROWS or array.contexts[frequent, LENGTH] == length:
        assert list(zip(tokens.tolist(), counts.tolist(), strict=True)) == expected[:8]
        assert distinct == len(expected)
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
        array = build(documents, rng.choice([1, 2, 5, NEVER]))
        alphabet = [token for document in documents for token in document] or [0]
        for _ in range(6):
            context = [rng.choice([*alphabet, 4]) for _ in range(rng.randint(0, 9))]
            check_find(array, documents, context, rng.choice([1, 2, 3, 1000]))


@pytest.mark.parametrize("least_rows", [LEAST_ROWS, NEVER])
@pytest.mark.parametrize("alphabet", [2, 30])
def test_find_in_large_intervals(alphabet, least_rows):
    """Thousands of rows: keys decide, matches go beyond their five tokens, successors are sampled."""
    rng = random.Random(alphabet)
    documents = repetitive(rng, 20, 600, alphabet)
    array = build(documents, least_rows)
    for _ in range(60):
        document = rng.choice(documents)
        end = rng.randint(1, len(document))
        check_find(array, documents, document[max(0, end - 12) : end], rng.choice([1, 2, 3, 4, 5, 6, 9]))
    check_find(array, documents, [], 1)


def test_a_large_sample_is_bounded_and_close():
    """Known shares of successors in one interval of 60,000 rows."""
    tokens = np.array([token for i in range(60_000) for token in (0, 1 + (i * 7919) % 10 % 4)], np.int32)
    array = build_suffix_array(tokens, np.array([len(tokens)]), least_rows=NEVER)
    low, high, length, frequent = find(array, [0], 4)
    assert (high - low, length, frequent) == (60_000, 1, 0)
    found, counts, _ = successors(array, low, high, length, frequent)
    assert sorted(found.tolist()) == [1, 2, 3, 4]
    wanted = np.array([0, 18_000, 18_000, 12_000, 12_000])[found]
    assert np.abs(counts - wanted).max() <= 2 * 60_000 / EXACT_ROWS


@pytest.mark.parametrize("n_distinct", [1, 40, 1000, 20_000])
def test_distinct_successors_are_estimated_within_a_factor(n_distinct):
    """Zipf-distributed successors of one token; the estimator's guarantee is the root of rows / samples, here 31."""
    ranks = np.arange(1, n_distinct + 1)
    drawn = np.random.default_rng(n_distinct).choice(ranks, 60_000, p=(1 / ranks) / (1 / ranks).sum())
    tokens = np.stack([np.zeros_like(drawn), drawn], axis=1).reshape(-1).astype(np.int32)
    array = build_suffix_array(tokens, np.array([len(tokens)]), least_rows=NEVER)
    found, present = successors(array, *find(array, [0], 4))[2], len(np.unique(drawn))
    assert present / 31 <= found <= present * 31
    array = build_suffix_array(tokens, np.array([len(tokens)]))
    assert successors(array, *find(array, [0], 4))[2] == present


@pytest.mark.parametrize("least_rows", [1, NEVER])
def test_of_successors_that_are_as_frequent_the_lower_ids_are_kept(least_rows):
    documents = [[0, token] for token in range(1, 12)]
    check_find(build(documents, least_rows), documents, [0], 4)


def test_every_row_of_a_rare_context_is_counted():
    """Up to one row less than a frequent context has; tokens that follow once each are all found."""
    for n in (LEAST_ROWS - 1, LEAST_ROWS):
        array = build([[0, token] for token in range(1, n + 1)])
        cursor = find(array, [0], 4)
        assert cursor[1] - cursor[0] == n and (cursor[3] > 0) == (n == LEAST_ROWS)
        tokens, counts, distinct = successors(array, *cursor)
        assert (tokens.tolist(), counts.tolist(), distinct) == ([*range(1, 9)], [1] * 8, n)


def beginnings(documents: list[list[int]], most: int) -> dict[tuple[int, ...], list[int]]:
    """Where each sequence of up to `most` tokens starts; the empty one at every token."""
    found: dict[tuple[int, ...], list[int]] = {}
    base = 0
    for document in documents:
        for start in range(len(document)):
            for end in range(start, min(len(document), start + most) + 1):
                found.setdefault(tuple(document[start:end]), []).append(base + start)
        base += len(document)
    return found


def check_cursor(array, cursor, suffix, found, least_rows):
    """The cursor stands at `suffix`: its rows, its length, and the longest context of it that is frequent enough."""
    low, high, length, frequent = cursor
    assert length == len(suffix) and sorted(positions(array, low, high).tolist()) == found[suffix]
    wanted = suffix[-DEPTH:]
    while wanted and len(found[wanted]) < least_rows:
        wanted = wanted[1:]
    if wanted:
        context = array.contexts[frequent]
        assert (context[LOW], context[LENGTH]) == (find(array, wanted)[0], len(wanted))
    else:
        assert frequent == 0


@pytest.mark.parametrize("least_rows", [1, 3, 40, NEVER])
@pytest.mark.parametrize("limit", [1, 4, 8, 11])
@pytest.mark.parametrize("alphabet", [2, 12])
def test_cursors_advance_and_shorten(limit, alphabet, least_rows):
    """Along a text that partly occurs, the cursor is the longest match of each moment, and shortens as defined, until
    nothing is left; whichever contexts count as frequent."""
    rng = random.Random(10 * alphabet + limit)
    documents = repetitive(rng, 12, 300, alphabet)
    array, found = build(documents, least_rows), beginnings(documents, limit)
    text = [
        *documents[3][50:90],
        *(rng.randrange(alphabet + 1) for _ in range(40)),
        *documents[5][-30:],
        *documents[6][:20],
    ]
    window = np.zeros(limit, np.int32)
    cursor = 0, int(array.sizes[0]), 0, 0
    for position, token in enumerate(text):
        window[1:] = window[:-1].copy()
        window[0] = token
        cursor = here = _advance(array, *cursor, window, limit)
        suffix = tuple(text[max(0, position + 1 - limit) : position + 1])
        while suffix not in found:
            suffix = suffix[1:]
        while True:
            check_cursor(array, here, suffix, found, least_rows)
            if not suffix:
                break
            here, times = _shorten(array, *here, window), len(found[suffix])
            while suffix and len(found[suffix]) == times:
                suffix = suffix[1:]


@pytest.mark.parametrize("least_rows", [1, 2, 9])
def test_frequent_contexts_are_all_of_them_with_their_counts(least_rows):
    """Every number of the two tables, against plain Python, and no context too many."""
    rng = random.Random(least_rows)
    documents = [*repetitive(rng, 8, 120, 12), [], [0], [0], [2**31 - 1] * 20, *[[5, 6, 7, 2**31 - 1]] * 3]
    array, found = build(documents, least_rows), beginnings(documents, DEPTH)
    wanted = {context: starts for context, starts in found.items() if len(starts) >= least_rows or not context}
    rows, edges = array.contexts.tolist(), array.context_edges.tolist()
    places = positions(array, 0, int(array.sizes[0]))
    flat_tokens, _ = flat(documents)
    contexts = [tuple(flat_tokens[places[row[LOW]] :][: row[LENGTH]].tolist()) for row in rows[:-1]]
    assert sorted(contexts) == sorted(wanted) and contexts[0] == () and rows[-1][EDGE_START] == len(edges)
    for number, (context, row, following) in enumerate(zip(contexts, rows, rows[1:])):
        assert sorted(places[row[LOW] : row[LOW] + row[COUNT]].tolist()) == wanted[context]
        expected = naive.successors(documents, list(context))
        assert row[DISTINCT] == len(expected)
        head, tail = edges[row[EDGE_START] : following[EDGE_START]][:8], edges[row[EDGE_START] : following[EDGE_START]][8:]
        assert [(token, count) for token, _, count in head] == expected[:8]
        later = sorted(token for token, _ in expected[8:] if (*context, token) in wanted)
        assert [token for token, _, _ in tail] == later and all(count == dict(expected)[token] for token, _, count in tail)
        for token, target, _ in head + tail:
            assert (contexts[target] if target else None) == (
                (*context, token) if (*context, token) in wanted else None
            )
        if context:
            assert find(array, list(context), DEPTH)[3] == number
            assert contexts[row[LINK]] == context[1:]
            shorter = context[1:]
            while shorter and len(wanted[shorter]) == row[COUNT]:
                shorter = shorter[1:]
            assert contexts[row[SHORTER]] == shorter


def test_nothing_is_left_of_what_the_memory_held():
    documents = repetitive(random.Random(3), 6, 80, 9)

    def dirty(name: str, rows: int) -> np.ndarray:
        columns = {"contexts": CONTEXT_COLUMNS, "context_edges": EDGE_COLUMNS}.get(name)
        return np.full((rows, columns), 77, np.int32) if columns else np.full(rows, 77, np.uint32)

    for array, clean in zip(build_suffix_array(*flat(documents), dirty, least_rows=3), build(documents, 3), strict=True):
        assert np.array_equal(array, clean)


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_empty(documents):
    array = build(documents)
    assert find(array, [1, 2]) == (0, 0, 0, 0)
    assert _advance(array, 0, 0, 0, 0, np.array([1], np.int32), 1) == (0, 0, 0, 0)
    tokens, counts, distinct = successors(array, 0, 0, 0, 0)
    assert (tokens.tolist(), counts.tolist(), distinct) == ([], [], 0)


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
        _shorten(build(documents), 0, 0, 0, 0, np.zeros(1, np.int32))
    assert len(getattr(_shorten, "signatures", [()])) == 1
