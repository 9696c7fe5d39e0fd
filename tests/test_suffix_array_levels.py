"""Levels of a suffix array against plain Python: whatever was known of them before a token, behind it they are the same."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from test_suffix_array import NEVER, beginnings, build, check_cursor, flat, repetitive

from redraft.retrieval.frequent_contexts import COUNT, EDGE_START, LENGTH, LOW
from redraft.retrieval.kernel import kernel
from redraft.retrieval.suffix_array import positions
from redraft.retrieval.suffix_array_cursor import rows_between
from redraft.retrieval.suffix_array_levels import CURSOR, LEVELS, advance_levels, next_level


@kernel(allocates=False)
def _advance(array, source, target, window, max_length):
    advance_levels(array, source, target, window, max_length)


@kernel(allocates=False)
def _next(array, levels, level, low, high, length, frequent, window):
    return next_level(array, levels, level, low, high, length, frequent, window)


@kernel(allocates=False)
def _between(array, context, token):
    return rows_between(array, context, token)


def passages(rng: random.Random, documents: list[list[int]], alphabet: int, n: int) -> list[int]:
    """Passages of the corpus, long and short, and tokens it may not have: matches go on, break and start anew."""
    text: list[int] = []
    while len(text) < n:
        document = rng.choice(documents)
        start = rng.randrange(len(document))
        text += document[start : start + rng.choice([1, 2, 3, 5, 20])]
        text += [rng.randrange(alphabet + 1)] * (rng.random() < 0.3)
    return text


@pytest.mark.parametrize("least_rows", [1, 3, 40, NEVER])
@pytest.mark.parametrize("limit", [1, 4, 8, 11])
@pytest.mark.parametrize("alphabet", [2, 12])
def test_levels_are_those_of_the_text(limit, alphabet, least_rows):
    rng = random.Random(10 * alphabet + limit)
    documents = repetitive(rng, 12, 200, alphabet)
    array, found = build(documents, least_rows), beginnings(documents, limit)
    text, window = passages(rng, documents, alphabet, 250), np.zeros(limit, np.int32)
    levels = np.zeros(CURSOR * LEVELS, np.int64)
    for position, token in enumerate(text):
        window[1:] = window[:-1].copy()
        window[0] = token
        target = levels if rng.random() < 0.5 else np.full(CURSOR * LEVELS, 77, np.int64)
        _advance(array, levels, target, window, limit)
        levels = target
        suffix = tuple(text[max(0, position + 1 - limit) : position + 1])
        while suffix not in found:
            suffix = suffix[1:]
        here = tuple(levels[:CURSOR].tolist())
        for asked in range(rng.choice([1, 2, 3, 3, 3, 5])):
            if asked:
                here = tuple(map(int, _next(array, levels, asked, *here, window)))
                times = len(found[suffix])
                while suffix and len(found[suffix]) == times:
                    suffix = suffix[1:]
            check_cursor(array, here, suffix, found, least_rows)
            if asked < LEVELS:
                assert tuple(levels[CURSOR * asked :][:CURSOR].tolist()) == here
            if not suffix:
                break


def test_of_an_index_without_tokens_there_is_one_level():
    array = build([[]])
    levels = np.zeros(CURSOR * LEVELS, np.int64)
    _advance(array, levels, levels, np.array([1] * 8, np.int32), 8)
    assert levels[:CURSOR].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("alphabet", [3, 12, 60])
def test_rows_of_a_rare_token_lie_between_the_frequent_ones(alphabet):
    """All of them, and of no token that makes a frequent context."""
    rng = random.Random(alphabet)
    documents = repetitive(rng, 12, 300, alphabet)
    array = build(documents, 5)
    tokens, ends = flat(documents)
    places, ends = positions(array, 0, len(tokens)), set(ends.tolist())
    rows, edges = array.contexts.tolist(), array.context_edges.tolist()
    tried = 0
    for number, (row, following) in enumerate(itertools.pairwise(rows)):
        frequent = {token for token, target, _ in edges[row[EDGE_START] : following[EDGE_START]] if target}
        after = [
            int(tokens[place + row[LENGTH]]) if place + row[LENGTH] not in ends or not row[LENGTH] else -1
            for place in places[row[LOW] : row[LOW] + row[COUNT]].tolist()
        ]
        for token in set(range(alphabet + 1)) - frequent:
            low, high = map(int, _between(array, number, token))
            between = after[low - row[LOW] : high - row[LOW]]
            assert between.count(token) == after.count(token) and not frequent.intersection(between)
            tried += 1
    assert tried > 100
