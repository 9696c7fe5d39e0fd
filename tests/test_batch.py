"""A batch does what its sessions would do one after the other, bit for bit; and every error stays its session's own."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from redraft.retrieval import batch
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import DraftTree
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.errors import SessionClosedError

VOCABULARY = 50
ARRAYS = ("tokens", "parents", "probs", "sources")


class OneByOne:
    """A drafter's batch, done by the sessions themselves."""

    def __init__(self, drafter: Drafter) -> None:
        self.open = drafter.open

    def step(self, items):
        for session, tokens, candidates, _, _ in items:
            session.commit(tokens, candidates)
        return [session.draft(proposal=proposal) for session, *_, proposal in items]


class Batched:
    """The same by `batch`, drafts on two threads."""

    def __init__(self, drafter: Drafter, beside) -> None:
        self.open, self.drafter, self.beside = drafter.open, drafter, beside

    def step(self, items):
        assert not any(batch.commit_all([item[:4] for item in items]))
        return batch.draft_all([(session, None, None, proposal) for session, *_, proposal in items], self.beside)


class Joined:
    """The same from arrays that are joined already, as they come off the wire."""

    def __init__(self, drafter: Drafter, beside) -> None:
        self.open, self.drafter, self.beside = drafter.open, drafter, beside

    def step(self, items):
        assert not any(self.drafter.commit_joined(*joined_arguments(items)))
        requests = [(session, None, None, proposal) for session, *_, proposal in items]
        places, *arrays = self.drafter.draft_joined(requests, self.beside)
        return [DraftTree(*[array[begin:end] for array in arrays]) for begin, end in places]


def joined_arguments(items) -> tuple:
    """Sessions, sizes and arrays of `commit_joined`. items: (session, tokens, candidates or None, ...) each."""
    none = Candidates(*[np.empty(0, np.int32)] * 2, np.empty((0, 1), np.int32), np.empty((0, 1), np.float32))
    opinions = [candidates or none for _, _, candidates, *_ in items]
    sizes = [(len(tokens), len(there.tokens), there.ids.size) for (_, tokens, *_), there in zip(items, opinions)]
    arrays = [
        [getattr(there, name).reshape(-1) for there in opinions] for name in ("tokens", "previous", "ids", "probs")
    ]
    tokens = np.concatenate([np.asarray(tokens, np.int32) for _, tokens, *_ in items])
    return [session for session, *_ in items], sizes, tokens, *map(np.concatenate, arrays)


def phrases(rng: random.Random, length: int) -> list[int]:
    """Text that repeats itself, so that there is much to draft."""
    words = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 9))] for _ in range(12)]
    text: list[int] = []
    while len(text) < length:
        text += rng.choice(words)
    return text[:length]


def some_candidates(rng: random.Random, rows: int, width: int) -> Candidates | None:
    if rng.random() < 0.3:
        return None
    ids = [[rng.randrange(VOCABULARY) for _ in range(width)] for _ in range(rows)]
    probs = [[rng.random() for _ in range(width)] for _ in range(rows)]
    tokens = [rng.randrange(VOCABULARY) for _ in range(rows)]
    return Candidates.checked(tokens, [rng.randint(-1, 9) for _ in range(rows)], ids, probs, VOCABULARY)


def play(drafter, seed: int, size: int = 20, steps: int = 40) -> list[DraftTree]:
    """Long enough that tries grow, outputs join the memory while they are written, and old ones are forgotten."""
    rng = random.Random(seed)
    text = phrases(rng, 20_000)
    sessions = [drafter.open(text[99 * i : 99 * i + rng.choice([0, 1, 150])], f"n{i % 3}") for i in range(size)]
    trees = []
    for _ in range(steps):
        rng.shuffle(sessions)
        items = []
        for i, session in enumerate(sessions):
            start = rng.randrange(10_000)
            tokens = np.array(text[start : start + rng.choice([0, 1, 3, 40])], np.int32)
            proposal = rng.choice([None, None, [1, 2, 3]])
            items.append((session, tokens, some_candidates(rng, rng.randint(1, 4), rng.choice([4, 8])), None, proposal))
        trees += drafter.step(items)
    for session in sessions:
        session.close()
    return trees


@pytest.mark.parametrize("memory", [0, 1500, 2_000_000])
def test_the_same_trees_as_one_by_one(memory):
    config = DraftConfig(vocab_size=VOCABULARY, memory_tokens=memory)
    with ThreadPoolExecutor(1) as beside, Drafter(config) as one, Drafter(config) as other, Drafter(config) as third:
        expected = play(OneByOne(one), memory)
        answers = play(Batched(other, beside), memory), play(Joined(third, beside), memory)
    assert sum(map(len, expected)) > 10_000
    for got in answers:
        for tree, wanted in zip(got, expected, strict=True):
            assert all(np.array_equal(getattr(tree, name), getattr(wanted, name)) for name in ARRAYS)


def test_a_thread_that_is_at_something_else_is_not_waited_for():
    with ThreadPoolExecutor(1) as beside, Drafter(DraftConfig(vocab_size=VOCABULARY)) as drafter:
        sessions = [drafter.open([1, 2, 3, 1, 2, 3, 1]) for _ in range(batch.WORTH_A_THREAD)]
        busy = threading.Event()
        beside.submit(busy.wait, 60)
        trees = batch.draft_all([(session, 4, None, None) for session in sessions], beside)
        busy.set()
    assert all(tree.tokens[0] == 2 and len(tree) <= 4 for tree in trees)


@pytest.mark.parametrize(
    "tokens, candidates, error",
    [
        ([VOCABULARY], None, "too large"),
        (np.array([3, -1], np.int32), None, "negative"),
        ([0.5], None, "integer"),
        ([[1]], None, "one-dimensional"),
        ([1], [1], "redraft.Candidates"),
        ([1], Candidates([1], [0], [[VOCABULARY]], [[0.5]]), "too large"),
        ([1], Candidates([1], [0], [[2]], [[2.0]]), "between 0 and 1"),
        ([1], Candidates([1, 2], [0], [[2]], [[0.5]]), "wanted shape"),
    ],
)
def test_what_is_wrong_is_returned_and_the_others_go_on(tokens, candidates, error):
    with Drafter(DraftConfig(vocab_size=VOCABULARY)) as drafter:
        one, wrong, other = (drafter.open([1, 2, 1]) for _ in range(3))
        got = batch.commit_all([(one, [2], None, None), (wrong, tokens, candidates, None), (other, [7], None, None)])
        assert got[0] is got[2] is None and error in str(got[1])
        with pytest.raises(type(got[1])):
            wrong.commit(tokens, candidates)
        assert [session.tokens().tolist() for session in (one, wrong, other)] == [[1, 2, 1, 2], [1, 2, 1], [1, 2, 1, 7]]
        with pytest.raises(type(got[1])):
            drafter.step([(one, [1]), (wrong, tokens, candidates)])


@pytest.mark.parametrize("where", ["tokens", "last", "previous", "ids", "probs"])
@pytest.mark.parametrize("size", [1, 3])
def test_what_is_wrong_in_joined_arrays_is_its_sessions_own(size, where):
    sound = Candidates.checked([1], [0], [[2, 3]], [[0.5, 0.25]])
    with Drafter(DraftConfig(vocab_size=VOCABULARY)) as drafter:
        sessions = [drafter.open([1, 2, 1]) for _ in range(size)]
        sessions_, sizes, *arrays = joined_arguments([(session, [2], sound) for session in sessions])
        array = arrays[["tokens", "last", "previous", "ids", "probs"].index(where)]
        array[-1] = VOCABULARY if array.dtype == np.int32 else np.nan
        got = drafter.commit_joined(sessions_, sizes, *arrays)
        assert got[:-1] == [None] * (size - 1) and isinstance(got[-1], ValueError)
        assert [session.length for session in sessions] == [4] * (size - 1) + [3]


def test_what_a_session_of_a_batch_copies_from_is_not_forgotten_first():
    passages = np.random.default_rng(3).permutation(400).astype(np.int32).reshape(4, 100)
    with Drafter(DraftConfig(memory_tokens=220)) as drafter:
        for passage in passages[:2]:
            with drafter.open([]) as session:
                session.commit(passage)
        copying, beside = drafter.open(passages[0, :10]), drafter.open([], "elsewhere")
        assert (
            batch.commit_all([(copying, passages[0, 10:50], None, None), (beside, passages[3], None, None)])
            == [None] * 2
        )
        with drafter.open([]) as session:
            session.commit(passages[2, :60])
        for passage, known in zip(passages[:2], (True, False)):
            with drafter.open(passage[2:8]) as session:
                assert (passage[8] in session.draft().tokens) == known


def test_errors_of_a_batch_that_is_taken_in_by_parts():
    n = 2 * batch.AT_ONCE + 3
    with Drafter(DraftConfig(vocab_size=VOCABULARY)) as drafter:
        sessions = [drafter.open([1]) for _ in range(n)]
        wrong = {0, batch.AT_ONCE, n - 1}
        got = batch.commit_all([(session, [-1 if i in wrong else 2], None, None) for i, session in enumerate(sessions)])
        assert {i for i, error in enumerate(got) if error is not None} == wrong and len(got) == n
        assert [session.length for session in sessions] == [1 if i in wrong else 2 for i in range(n)]


def test_a_closed_session_and_a_bad_budget_are_their_own():
    with Drafter(DraftConfig(vocab_size=VOCABULARY)) as drafter:
        one, closed, other = (drafter.open([1, 2, 1, 2, 1]) for _ in range(3))
        closed.close()
        got = batch.commit_all([(one, [2], None, None), (closed, [2], None, None), (other, [2], None, None)])
        assert got[0] is got[2] is None and isinstance(got[1], SessionClosedError)
        got = batch.draft_all([(one, None, None, None), (closed, None, None, None), (other, 513, None, None)])
        assert got[0].tokens[0] == 1 and isinstance(got[1], SessionClosedError) and isinstance(got[2], ValueError)
        assert len(batch.draft_all([(one, 0, None, None), (other, 2, None, None)])[0]) == 0
        for requests in ([(closed, None, None, None)], [(closed, None, None, None), (other, -1, None, None)]):
            places, *arrays = drafter.draft_joined(requests)
            assert all(isinstance(place, Exception) for place in places) and not any(map(len, arrays))


def test_a_session_twice_and_what_has_to_be_converted():
    with Drafter(DraftConfig(vocab_size=VOCABULARY)) as drafter:
        one, other = drafter.open([]), drafter.open([])
        assert (
            batch.commit_all([(one, [1], None, None), (other, [5], None, None), (one, [2], None, None)]) == [None] * 3
        )
        loose = Candidates([1], [-1], [[3, 4]], [[0.5, 0.25]])  # lists, as somebody may write it
        assert batch.commit_all([(one, [3], loose, None), (other, (6,), None, None)]) == [None] * 2
        assert one.tokens().tolist() == [1, 2, 3] and other.tokens().tolist() == [5, 6]
        one.commit([1])
        assert {2, 3, 4} <= set(one.draft().tokens.tolist())
