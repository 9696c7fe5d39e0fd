"""The list of candidates against a plain one, and the buckets against their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest

from redraft.retrieval import evidence as ev
from redraft.retrieval.kernel import kernel

PROBABILITIES = (0.01, 0.03, 0.1, 0.25, 0.5, 0.8, 0.95)


def bucket(edges, x):
    """How many of the edges lie at or below x."""
    return sum(x >= edge for edge in edges)


@kernel
def _of_numbers(x):
    return (
        ev.length_bucket(x), ev.count_bucket(x), ev.rest_bucket(x), ev.total_bucket(x), ev.run_bucket(x),
        ev.absent_cell(0, 1, 1, x), ev.next_cell(0, 1, x, 1 << 30),
    )  # fmt: skip


@kernel
def _of_probability(p):
    return ev.probability_bucket(p)


@kernel
def _of_ranks(rank, distance):
    return ev.recency(rank, distance)


@kernel
def _clear(ballot, most):
    ev.clear(ballot, most, 1)


@kernel
def _add(ballot, tokens, rows, slot):
    for i in range(len(tokens)):
        rows[i] = ev.candidate(ballot, tokens[i])
        ev.put_if_free(ballot, rows[i], slot, i + 1)


def test_buckets_of_numbers():
    edges = {
        0: (2, 3, 4, 5, 7, 10, 15, 23, 41), 1: (2, 3, 5, 9), 2: (1, 2, 3, 6, 13, 41), 3: (2, 3, 5, 9, 25),
        4: (1, 2, 3, 5, 9, 17, 41), 5: (2, 3, 5, 11),
    }  # fmt: skip
    for x in [*range(1, 60), 1000, 2**30]:
        found = _of_numbers(x)
        assert {i: found[i] for i in edges} == {i: bucket(edges[i], x) for i in edges}, x
        share = x / 2**30
        shares = 7 if share >= 0.999 else bucket(PROBABILITIES[:6], share)
        assert found[6] == bucket((2, 3, 5, 10, 31), x) * 8 + shares


def test_buckets_of_probabilities():
    for edge in PROBABILITIES:
        for p in (math.nextafter(edge, 0), edge, math.nextafter(edge, 1)):
            assert _of_probability(p) == bucket(PROBABILITIES, p), p
    assert _of_probability(0.0) == 0 and _of_probability(1.0) == 7


def test_recency():
    for distance, first in ((1, ev.LATEST_RECENT), (80, ev.LATEST_RECENT), (81, ev.LATEST), (1001, ev.LATEST_OLD)):
        found = [_of_ranks(rank, distance) for rank in range(4)]
        assert found == [first, ev.SECOND, ev.EARLIER, ev.EARLIER]


@pytest.mark.parametrize("most", [1, 3, 24, 48])
def test_candidates_come_once_and_only_while_there_is_room(most):
    rng, ballot = np.random.default_rng(most), ev.new_ballot()
    for _ in range(60):
        _clear(ballot, most)
        tokens = rng.choice([rng.integers(0, 60, 80), rng.integers(0, 2**31 - 1, 80)]).astype(np.int32)
        tokens[rng.random(80) < 0.1] = -1
        rows, wanted, first = np.empty(80, np.int64), {}, {}
        _add(ballot, tokens, rows, 3)
        for i, (token, row) in enumerate(zip(tokens.tolist(), rows.tolist())):
            if token >= 0 and len(wanted) < most:
                wanted.setdefault(token, len(wanted))
            assert row == wanted.get(token, ev.NOWHERE)
            first.setdefault(row, i + 1)
        assert ballot.header[ev.N_CANDIDATES] == len(wanted)
        assert ballot.tokens[: len(wanted)].tolist() == list(wanted)
        assert not ballot.named_by[: len(wanted)].any()
        assert ballot.cells[3, : len(wanted)].tolist() == [first[row] for row in range(len(wanted))]
        ballot.named_by[: len(wanted)] = 1


@kernel
def narrowed(ballot, most, least, fitting, taken):
    ev.clear(ballot, most, least)
    ev.narrow(ballot, fitting, taken)
    return ballot.header[ev.MOST]


@pytest.mark.parametrize(
    ("least", "fitting", "taken", "wanted"),
    [(4, 1e9, 0, 24), (4, 1e9, 1, 24), (4, 10, 0, 9), (8, 10, 0, 17), (4, 20, 0.5, 9), (4, 20, 0.99, 4), (8, 0.1, 0, 8)],
)
def test_a_place_wants_as_many_candidates_as_could_come_into_the_tree(least, fitting, taken, wanted):
    """All of them where nothing bounds the tree, however sure one is: otherwise nothing would be left to learn from."""
    assert narrowed(ev.new_ballot(), 24, least, float(fitting), float(taken)) == wanted
