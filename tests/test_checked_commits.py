"""What the caller commits: a batch's is checked and packed as each commit alone would be."""

from __future__ import annotations

import random

import numpy as np
import pytest

from redraft.client.checked_commits import checked_commits
from redraft.client.replies import compile_checks
from redraft.retrieval.candidates import Candidates

VOCABULARY = 50


def a_commit(rng: random.Random) -> tuple:
    """In every form that a caller may choose."""
    tokens = [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 1, 5]))]
    rows, width = rng.randint(0, 3), rng.choice([1, 8])
    ids = np.array([[rng.randrange(VOCABULARY) for _ in range(width)] for _ in range(rows)], np.int32).reshape(
        rows, width
    )
    last = [rng.randrange(VOCABULARY) for _ in range(rows)]
    candidates = Candidates.checked(last, [-1] * rows, ids, np.full((rows, width), 0.5), VOCABULARY)
    if rng.random() < 0.2:
        candidates = Candidates(*[array[::-1] for array in vars(candidates).values()])  # not contiguous
    return np.array(tokens, np.int32), rng.choice([None, candidates]), rng.choice([None, None, [0.5, 1.0]])


def plain(checked) -> list:
    return [
        (tokens.tolist(), candidates if candidates and any(candidates) else None, hidden)
        for tokens, (candidates, hidden) in zip(checked.tokens, checked.apart(), strict=True)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_a_batch_is_packed_as_each_alone(seed):
    compile_checks()
    rng = random.Random(seed)
    commits = [a_commit(rng) for _ in range(rng.randint(2, 9))]
    together = checked_commits(commits, VOCABULARY, compiled=True)
    alone = [plain(checked_commits([commit], VOCABULARY, compiled=True))[0] for commit in commits]
    assert plain(together) == alone == plain(checked_commits(commits, VOCABULARY, compiled=False))
    loose = [(tokens.tolist(), candidates, hidden) for tokens, candidates, hidden in commits]
    assert plain(checked_commits(loose, VOCABULARY, compiled=True)) == alone


@pytest.mark.parametrize("seed", range(30))
def test_columns_hold_what_each_commit_brings(seed):
    compile_checks()
    rng = random.Random(seed)
    commits = [a_commit(rng) for _ in range(rng.randint(2, 9))]
    regular = all(
        hidden is None and all(array.flags.c_contiguous for array in (vars(candidates).values() if candidates else ()))
        for _, candidates, hidden in commits
    )
    for given in (commits, [(tokens.tolist(), candidates, hidden) for tokens, candidates, hidden in commits]):
        columns = checked_commits(given, VOCABULARY, compiled=True).columns
        assert (columns is not None) is regular
        if columns is None:
            continue
        sizes, tokens, *opinions = columns
        there = [candidates for _, candidates, _ in commits if candidates is not None]
        assert [length for length, _, _ in sizes] == [len(tokens) for tokens, _, _ in commits]
        assert [rows for _, rows, _ in sizes] == [0 if c is None else len(c.tokens) for _, c, _ in commits]
        assert [numbers for _, _, numbers in sizes] == [0 if c is None else c.ids.size for _, c, _ in commits]
        assert tokens.tolist() == [token for tokens, _, _ in commits for token in tokens]
        for name, array in zip(("tokens", "previous", "ids", "probs"), opinions, strict=True):
            assert array.tolist() == [value for c in there for value in getattr(c, name).ravel().tolist()]


GOOD = Candidates.checked([1, 2], [-1, 1], [[3], [4]], [[0.5], [0.5]])


@pytest.mark.parametrize(
    "tokens, candidates, hidden, error",
    [
        (np.array([VOCABULARY], np.int32), None, None, "too large"),
        (np.array([-1], np.int32), None, None, "negative"),
        (np.zeros((1, 1), np.int32), None, None, "one-dimensional"),
        ([0.5], None, None, "integer"),
        ([1], [1], None, "redraft.Candidates"),
        ([1], Candidates(GOOD.tokens, GOOD.previous, GOOD.ids + VOCABULARY, GOOD.probs), None, "too large"),
        ([1], Candidates(GOOD.tokens, GOOD.previous - 1, GOOD.ids, GOOD.probs), None, "-1"),
        ([1], Candidates(GOOD.tokens, GOOD.previous, GOOD.ids, GOOD.probs * np.float32("nan")), None, "finite"),
        ([1], Candidates(GOOD.tokens, GOOD.previous[:1], GOOD.ids, GOOD.probs), None, "wanted shape"),
        ([1], GOOD, [float("inf")], "finite"),
        ([1], GOOD, [[[1.0]]], "wanted shape"),
    ],
)
def test_what_is_wrong_raises_the_same_in_a_batch(tokens, candidates, hidden, error):
    compile_checks()
    wrong, right = (tokens, candidates, hidden), (np.array([1, 2], np.int32), GOOD, None)
    for commits in ([wrong], [right, wrong, right]):
        for compiled in (True, False):
            with pytest.raises((TypeError, ValueError), match=error):
                checked_commits(commits, VOCABULARY, compiled=compiled)


def test_nobody_waits_for_the_compiler(monkeypatch):
    def compiling(*_):
        raise AssertionError("a kernel was called")

    monkeypatch.setattr("redraft.retrieval.candidates.all_sound", compiling)
    commits = [(np.array([token], np.int32), GOOD, None) for token in (1, 2)]
    assert len(checked_commits(commits, VOCABULARY, compiled=False).tokens) == 2
    with pytest.raises(AssertionError, match="a kernel was called"):
        checked_commits(commits, VOCABULARY, compiled=True)
