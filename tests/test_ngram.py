"""N-gram lookup against its plain-Python twin, and the drafter around it."""

from __future__ import annotations

import os
import subprocess
import sys

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import ngram_propose

from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.errors import SessionClosedError
from redraft.retrieval.ngram import NgramDrafter, propose


def fibonacci(n: int) -> list[int]:
    text, following = [0], [0, 1]
    while len(text) < n:
        text, following = following, following + text
    return text[:n]


def small_texts():
    """Texts over the letters 0.. of a 2- to 4-letter alphabet; token id 0 is one of them."""
    return st.integers(1, 3).flatmap(lambda top: st.lists(st.integers(0, top), max_size=60))


@settings(max_examples=1500, deadline=None)
@given(small_texts(), st.integers(0, 12), st.integers(1, 9), st.integers(1, 9))
def test_agrees_with_the_specification(text, max_tokens, max_match, min_match):
    min_match = min(min_match, max_match)
    got = propose(np.array(text, np.int32), max_tokens, max_match=max_match, min_match=min_match)
    assert got.dtype == np.int32
    assert got.tolist() == ngram_propose(text, max_tokens, max_match, min_match)


@pytest.mark.parametrize(
    "text",
    [[0] * 40, [3] * 7, [0, 1] * 20, [5, 0, 0] * 11 + [5], list(range(7)) * 4, fibonacci(90), [1] + [0] * 30 + [1]],
    ids=["constant 0", "constant 3", "period 2", "period 3", "period 7", "fibonacci", "bracketed"],
)
def test_structured_texts_at_every_length(text):
    for n in range(len(text) + 1):
        for max_match in (1, 2, 3, 8, 100):
            assert propose(text[:n], 20, max_match=max_match).tolist() == ngram_propose(text[:n], 20, max_match)


def test_latest_occurrence_wins():
    assert propose([7, 1, 8, 7, 2, 8, 7], 2).tolist() == [2, 8]


def test_longer_match_beats_later_match():
    assert propose([4, 5, 1, 9, 5, 2, 9, 4, 5], 1).tolist() == [1]


def test_a_period_goes_on_beyond_the_end_of_the_text():
    assert propose([1, 2, 3, 1, 2, 3], 7).tolist() == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_to_say():
    for text in ([], [5], [1, 2, 3]):
        assert propose(text, 5).tolist() == []
    assert propose([1, 1], 0).tolist() == []
    assert propose([1, 2, 1], 5, min_match=2).tolist() == []


def test_read_only_input():
    tokens = np.frombuffer(np.array([1, 2, 1], np.int32).tobytes(), np.int32)
    assert not tokens.flags.writeable
    assert propose(tokens, 2).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([1, 2], -1), "max_tokens: wanted 0 or more, got -1"),
        (([1, -2], 3), "token id -2 at position 1 is negative"),
        (([[1]], 3), "one-dimensional"),
    ],
)
def test_bad_input(arguments, error):
    with pytest.raises(ValueError, match=error):
        propose(*arguments)


def test_bad_match_limits():
    with pytest.raises(ValueError, match="min_match=3, max_match=2"):
        propose([1, 2], 3, max_match=2, min_match=3)
    with pytest.raises(ValueError, match="min_match=0"):
        propose([1, 2], 3, min_match=0)


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="this is that run")
def test_without_compilation():
    """The same tests pass when the kernels run as plain Python."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    env = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class TestDrafter:
    def test_session_drafts_what_propose_says(self):
        text = [3, 1, 4, 1, 5, 9, 3, 1]
        with NgramDrafter(DraftConfig(vocab_size=10), chain=4) as drafter, drafter.open(text[:5]) as session:
            session.commit(text[5:])
            assert session.length == len(text)
            tree = session.draft().check(vocab_size=10, max_nodes=4)
            assert tree.tokens.tolist() == propose(text, 4).tolist() == [4, 1, 5, 9]
            assert set(tree.sources.tolist()) == {Source.NGRAM}
            assert (np.diff(tree.probs) < 0).all()

    def test_budget_and_probability_floor(self):
        with NgramDrafter(DraftConfig(max_nodes=3)) as drafter:
            session = drafter.open([1, 2] * 8)
            assert len(session.draft()) == 3
            assert len(session.draft(max_nodes=2)) == 2
            floor = float(session.draft(max_nodes=10).probs[4])
            assert len(session.draft(max_nodes=10, min_prob=floor)) == 5

    def test_many_commits_and_truncate(self):
        session = NgramDrafter().open([])
        assert len(session.draft()) == 0
        for token in range(2000):
            session.commit([token % 700])
        assert session.length == 2000
        assert session.draft().tokens[0] == 600
        session.truncate(703)
        assert session.draft().tokens[:2].tolist() == [3, 4]
        with pytest.raises(ValueError, match="from 0 to 703, got 704"):
            session.truncate(704)

    def test_own_draft_is_used_where_nothing_matches(self):
        session = NgramDrafter(DraftConfig(max_nodes=2)).open([1, 2, 3])
        tree = session.draft(proposal=[7, 8, 9])
        assert tree.tokens.tolist() == [7, 8]
        assert tree.sources.tolist() == [Source.CALLER] * 2
        assert session.draft(proposal=DraftTree.chain([6])).tokens.tolist() == [6]

    def test_batch_step_answers_in_order(self):
        drafter = NgramDrafter(chain=1)
        one, two, three = drafter.open([1, 5]), drafter.open([2, 6]), drafter.open([3, 7])
        trees = drafter.step([(two, [2]), (one, [1]), (three, [9], None, None, [4])])
        assert [tree.tokens.tolist() for tree in trees] == [[6], [5], [4]]

    def test_closed(self):
        session = NgramDrafter().open([1])
        session.close()
        session.close()
        assert session.closed
        for call in (session.draft, lambda: session.commit([1]), lambda: session.truncate(0)):
            with pytest.raises(SessionClosedError, match="is closed"):
                call()

    def test_ids_beyond_the_vocabulary(self):
        drafter = NgramDrafter(DraftConfig(vocab_size=4))
        with pytest.raises(ValueError, match="token id 4 .* 4 ids"):
            drafter.open([1, 4])
        session = drafter.open([1])
        with pytest.raises(ValueError, match="too large"):
            session.commit([2, 9])
        assert session.length == 1
