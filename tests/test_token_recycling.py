"""The recycling table against its plain twin: rows by token and by pair, replacement at capacity, widths of k."""

from __future__ import annotations

import numpy as np
import pytest
from naive_recycling import NaiveRecycling

from redraft.retrieval.candidates import Candidates
from redraft.retrieval.evidence import probability_bucket
from redraft.retrieval.token_recycling import BUCKETS, IDS, WIDTH, bucket, find_row, learn_rows, new_table


def assert_same(table, naive, letters):
    assert table.header[0] == len(naive.rows) == (table.slots >= 0).sum()
    for token in range(letters):
        for previous in range(-1, letters):
            row, wanted = int(find_row(table, previous, token)), naive.find(previous, token)
            assert (row >= 0) == (wanted is not None), (previous, token)
            if row >= 0:
                ids, probs = wanted
                assert ids_of(table, row) == ids + [-1] * (WIDTH - len(ids))
                buckets = [int(bucket(table.rows[row, BUCKETS], rank)) for rank in range(WIDTH)]
                assert buckets == [probability_bucket(np.float32(p)) for p in probs] + [0] * (WIDTH - len(ids))


def ids_of(table, row):
    return table.rows[int(row), IDS : IDS + WIDTH].tolist()


@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 7, 40, 1000])
@pytest.mark.parametrize("letters", [1, 2, 4, 9])
def test_random_rows(capacity, letters):
    rng = np.random.default_rng(capacity * 10 + letters)
    table, naive = new_table(capacity), NaiveRecycling(capacity)
    for _ in range(30):
        m, k = int(rng.integers(0, 6)), int(rng.choice([0, 1, 3, 8, 12]))
        rows = (
            rng.integers(0, letters, m).astype(np.int32),
            rng.integers(-1, letters, m).astype(np.int32),
            rng.integers(0, 50, (m, k)).astype(np.int32),
            rng.random((m, k)).astype(np.float32),
        )
        learn_rows(table, *rows)
        naive.learn(*(array.tolist() for array in rows))
        assert_same(table, naive, letters)


def test_the_twin_has_the_width_of_the_table():
    assert WIDTH == 8 and IDS + WIDTH <= new_table(3).rows.shape[1]


def test_large_ids_and_a_table_that_turns_over_many_times():
    table, naive = new_table(16), NaiveRecycling(16)
    rng = np.random.default_rng(1)
    alphabet = np.array([0, 1, 2**31 - 1, 2**31 - 2, 50_000], np.int32)
    for _ in range(400):
        token, previous = rng.choice(alphabet, 1), rng.choice(alphabet, 1)
        ids, probs = rng.choice(alphabet, (1, 2)), np.array([[0.5, 0.25]], np.float32)
        learn_rows(table, token, previous, ids, probs)
        naive.learn(token.tolist(), previous.tolist(), ids.tolist(), probs.tolist())
    for previous in (-1, *alphabet.tolist()):
        for token in alphabet.tolist():
            row, wanted = int(find_row(table, previous, token)), naive.find(previous, token)
            assert (row >= 0) == (wanted is not None)
            if row >= 0:
                assert ids_of(table, row)[:2] == wanted[0]


def test_the_last_visit_of_a_step_counts():
    """Rejected nodes come first and accepted ones last, so that these are what stays."""
    learned = Candidates.checked([5, 5], [1, -1], [[7, 8], [9, 3]], [[0.6, 0.1], [0.5, 0.2]])
    table = new_table(10)
    learn_rows(table, learned.tokens, learned.previous, learned.ids, learned.probs)
    assert ids_of(table, find_row(table, -1, 5))[:2] == [9, 3]
    assert ids_of(table, find_row(table, 1, 5))[:2] == [7, 8]
    assert int(find_row(table, 5, 1)) == -1


@pytest.mark.parametrize("capacity", [0, 1, 5, 4096])
def test_a_row_is_one_line_of_memory(capacity):
    rows = new_table(capacity).rows
    assert rows.shape[0] == capacity and rows.strides[0] == 64 and rows.flags.c_contiguous
    assert capacity == 0 or rows.__array_interface__["data"][0] % 64 == 0
