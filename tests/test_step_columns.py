"""Batches in columns: they do what the steps that they stand for do, and what does not fit is refused by name.

The server is asked raw, by columns and by steps side by side; the client is seen to use columns where it may, with the
same trees as in process, and to survive whatever a server answers in them.
"""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from scripted_drafter import BROKEN, VOCAB_SIZE, ScriptedDrafter, count_up, in_turn, raising
from serving import RawStream, running
from test_client import PATIENT, same
from test_client_failures import from_server, wild_server
from test_server import codes_of, commit, draft, expected, open_, tokens_of, truncate
from test_server_drafter import some_candidates, text

from redraft.client.draft_client import DraftClient
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.drafter import Drafter
from redraft.server import drafting_service
from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import pack_float32, pack_int32, unpack_int32

CONFIG = DraftConfig(vocab_size=VOCAB_SIZE)
ARRAYS = ("tokens", "previous", "ids", "probs")


@pytest.fixture
def listen(tmp_path):
    return f"unix:{tmp_path}/s"


@pytest.fixture
def messages(monkeypatch):
    """Every message that the server in this process reads."""
    seen, read_steps = [], drafting_service.read_steps

    def watched(message):
        seen.append(message)
        return read_steps(message)

    monkeypatch.setattr(drafting_service, "read_steps", watched)
    return seen


def commit_batch(steps) -> pb.CommitBatch:
    """The same commits in columns. steps: SessionSteps of equal rows for each of their candidates."""
    batch = pb.CommitBatch()
    for step in steps:
        there = step.commit.candidates
        rows = len(there.tokens) // 4
        batch.session_ids.append(step.session_id)
        batch.starts.append(step.commit.start)
        batch.lengths.append(len(step.commit.tokens) // 4)
        batch.rows.append(rows)
        batch.widths.append(len(there.ids) // 4 // rows if rows else 0)
        batch.tokens += step.commit.tokens
        for name in ARRAYS:
            setattr(batch.candidates, name, getattr(batch.candidates, name) + getattr(there, name))
    return batch


def trees_of(batch: pb.TreeBatch) -> dict[int, list[int]]:
    """Tokens by session."""
    ends = np.cumsum(batch.sizes, dtype=int)
    tokens = np.split(unpack_int32(batch.tokens, "tokens"), ends[:-1]) if len(ends) else []
    return {number: part.tolist() for number, part in zip(batch.session_ids, tokens, strict=True)}


def packed(candidates) -> pb.Candidates:
    packs = pack_int32, pack_int32, pack_int32, pack_float32
    return pb.Candidates(**{name: pack(getattr(candidates, name)) for name, pack in zip(ARRAYS, packs, strict=True)})


def some_commits(rng: random.Random, lengths: dict[int, int]) -> list[pb.SessionStep]:
    """A commit for some sessions, now and then one with a mistake; `lengths` follows those without."""
    steps = []
    for number in rng.sample(sorted(lengths), rng.randint(1, len(lengths))):
        tokens = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(4))]
        step = commit(number, lengths[number], tokens)
        if rng.random() < 0.6:
            step.commit.candidates.CopyFrom(packed(some_candidates(rng)))
        mistake = rng.choice(["gap", "id", "candidate", "previous", "prob", "stranger", *[None] * 14])
        if mistake == "gap":
            step.commit.start += 1
        elif mistake == "id":
            step.commit.tokens += pack_int32([VOCAB_SIZE])
        elif mistake == "candidate" and step.commit.candidates.ids:
            step.commit.candidates.ids = pack_int32([-1]) + step.commit.candidates.ids[4:]
        elif mistake == "previous" and step.commit.candidates.previous:
            step.commit.candidates.previous = pack_int32([-2]) + step.commit.candidates.previous[4:]
        elif mistake == "prob" and step.commit.candidates.probs:
            step.commit.candidates.probs = pack_float32([float("nan")]) + step.commit.candidates.probs[4:]
        elif mistake == "stranger":
            step.session_id += 90
        else:
            lengths[number] += len(tokens)
        steps.append(step)
    return steps


@pytest.mark.parametrize("seed", range(4))
def test_columns_do_what_their_steps_do(tmp_path, seed):
    """With the real drafter, mistakes of single sessions included: the same trees, errors and texts."""
    addresses = f"unix:{tmp_path}/a", f"unix:{tmp_path}/b"
    rng, lengths, errors, trees = random.Random(seed), {}, 0, 0
    with (
        running(Drafter(CONFIG), addresses[0]),
        running(Drafter(CONFIG), addresses[1]),
        RawStream(addresses[0]) as by_steps,
        RawStream(addresses[1]) as by_columns,
    ):
        for number in range(1, 8):
            step = open_(number, text(rng.randrange(3), rng.randrange(40)))
            lengths[number] = len(step.open.prompt) // 4
            by_steps.ask(step), by_columns.ask(step)
        for _ in range(40):
            commits = some_commits(rng, lengths)
            limits = rng.choice([{}, {"max_nodes": rng.choice([0, 1, 9, 400])}, {"min_prob": 0.1}])
            ids = [step.session_id for step in commits]
            one = by_steps.ask(*commits, *[draft(number, **limits) for number in ids])
            # steps before columns, in the same message
            first = rng.randrange(len(commits))
            other = by_columns.ask(
                *commits[:first],
                commit_batch=commit_batch(commits[first:]),
                draft_batch=pb.DraftBatch(session_ids=ids, **limits),
            )
            expected = {(e.session_id, e.code, e.message) for e in one.errors}
            assert {(e.session_id, e.code, e.message) for e in other.errors} == expected
            assert not other.trees
            assert list(other.tree_batch.session_ids) == [tree.session_id for tree in one.trees]
            assert list(other.tree_batch.sizes) == [len(tree.sources) for tree in one.trees]
            for name in ("tokens", "parents", "probs", "sources"):
                assert getattr(other.tree_batch, name) == b"".join(getattr(tree, name) for tree in one.trees)
            errors += len(expected)
            trees += len(one.trees)
    assert errors > 5 and trees > 60


def some_batch() -> pb.CommitBatch:
    """Commits to sessions 1, 2 and 3 of one token each, the first two with a row of candidates."""
    opinions = pb.Candidates(
        tokens=pack_int32([1]), previous=pack_int32([-1]), ids=pack_int32([2, 3]), probs=pack_float32([0.5, 0.25])
    )
    brings = {1: {"candidates": opinions}, 2: {"candidates": opinions}, 3: {}}
    return commit_batch([commit(number, 1, [number + 10], **brings[number]) for number in (1, 2, 3)])


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("starts", [1, 1], "commit_batch.starts: wanted one for each of 3 sessions, got 2"),
        ("starts", [1, 1, 1, 1], "commit_batch.starts: wanted one for each of 3 sessions, got 4"),
        ("lengths", [1, 1], "commit_batch.lengths: wanted one for each of 3 sessions, got 2"),
        ("rows", [], "commit_batch.rows: wanted one for each of 3 sessions, got 0"),
        ("widths", [2, 2, 0, 0], "commit_batch.widths: wanted one for each of 3 sessions, got 4"),
        ("session_ids", [1, 2, 2], "commit_batch.session_ids: wanted every session once, got 2 twice"),
        ("lengths", [1, 1, 2], "commit_batch.tokens: wanted 16 bytes for 4 values of 3 sessions, got 12"),
        ("tokens", b"123", "commit_batch.tokens: wanted 12 bytes for 3 values of 3 sessions, got 3"),
        ("rows", [1, 1, 1], "commit_batch.candidates.tokens: wanted 12 bytes for 3 values of 3 sessions, got 8"),
        ("rows", [1, 1, 2**32 - 1], "commit_batch.candidates.tokens: wanted 17179869188 bytes"),
        ("widths", [2, 3, 0], "commit_batch.candidates.ids: wanted 20 bytes for 5 values of 3 sessions, got 16"),
        ("candidates.tokens", b"", "commit_batch.candidates.tokens: wanted 8 bytes for 2 values of 3 sessions, got 0"),
        ("candidates.previous", b"1234", "commit_batch.candidates.previous: wanted 8 bytes for 2 values"),
        (
            "candidates.ids",
            b"\0" * 20,
            "commit_batch.candidates.ids: wanted 16 bytes for 4 values of 3 sessions, got 20",
        ),
        ("candidates.probs", b"\0" * 15, "commit_batch.candidates.probs: wanted 16 bytes for 4 values"),
    ],
)
def test_broken_columns_are_an_error_of_every_session_in_them(listen, field, value, text):
    drafter = ScriptedDrafter()
    with running(drafter, listen), RawStream(listen) as stream:
        stream.ask(*[open_(number, [number]) for number in (1, 2, 3, 4)])
        batch = some_batch()
        holder, name = (batch.candidates, field.split(".")[1]) if "." in field else (batch, field)
        if isinstance(value, bytes):
            setattr(holder, name, value)
        else:
            del getattr(holder, name)[:]
            getattr(holder, name).extend(value)
        failing = set(batch.session_ids)
        reply = stream.ask(
            commit(4, 1, [9]), commit_batch=batch, draft_batch=pb.DraftBatch(session_ids=[4, *sorted(failing)])
        )
        assert codes_of(reply) == dict.fromkeys(failing, "INVALID_ARGUMENT")
        assert len(reply.errors) == len(failing)
        assert all(text in error.message for error in reply.errors), reply.errors
        assert trees_of(reply.tree_batch) == {4: expected(4, 9)}
        # nothing of it was done, and the stream goes on
        reply = stream.ask(commit_batch=some_batch(), draft_batch=pb.DraftBatch(session_ids=[3, 1, 2]))
        assert not reply.errors
        assert trees_of(reply.tree_batch) == {number: expected(number, number + 10) for number in (3, 1, 2)}
        assert [session.history.tolist() for session in drafter.sessions.values()] == [
            [1, 11],
            [2, 12],
            [3, 13],
            [4, 9],
        ]


def test_a_session_twice_among_drafts_is_refused(listen):
    with running(ScriptedDrafter(), listen), RawStream(listen) as stream:
        stream.ask(open_(1, [1]), open_(2, [2]))
        reply = stream.ask(draft_batch=pb.DraftBatch(session_ids=[1, 2, 1]))
        assert codes_of(reply) == {1: "INVALID_ARGUMENT", 2: "INVALID_ARGUMENT"} and len(reply.errors) == 2
        assert "draft_batch.session_ids: wanted every session once, got 1 twice" in reply.errors[0].message
        assert trees_of(stream.ask(draft_batch=pb.DraftBatch(session_ids=[1])).tree_batch) == {1: expected(1)}


def test_a_session_twice_among_very_many_is_found_at_once(listen):
    with running(ScriptedDrafter(), listen), RawStream(listen) as stream:
        started = time.monotonic()
        reply = stream.ask(draft_batch=pb.DraftBatch(session_ids=[*range(30_000), 5]))
        assert len(reply.errors) == 30_000 and "got 5 twice" in reply.errors[-1].message
        assert time.monotonic() - started < 3


def test_steps_then_commits_then_drafts(listen):
    with running(ScriptedDrafter(), listen) as server, RawStream(listen) as stream:
        reply = stream.ask(
            open_(5, [1, 2]),
            draft(5),
            commit_batch=commit_batch([commit(5, 2, [3])]),
            draft_batch=pb.DraftBatch(session_ids=[5], max_nodes=3),
        )
        assert tokens_of(reply) == {5: expected(1, 2)}
        assert trees_of(reply.tree_batch) == {5: expected(1, 2, 3)[:3]}
        activity = server.service.activity
        assert (activity.committed_tokens, activity.trees, activity.nodes) == (1, 2, 8 + 3)


def test_a_session_whose_step_failed_is_passed_over_in_the_columns(listen):
    drafter = ScriptedDrafter()
    with running(drafter, listen), RawStream(listen) as stream:
        stream.ask(open_(1, [1]), open_(2, [2]))
        reply = stream.ask(
            truncate(1, 7),
            commit_batch=commit_batch([commit(1, 1, [3]), commit(2, 1, [4])]),
            draft_batch=pb.DraftBatch(session_ids=[1, 2]),
        )
        assert codes_of(reply) == {1: "INVALID_ARGUMENT"} and len(reply.errors) == 1
        assert trees_of(reply.tree_batch) == {2: expected(2, 4)}
        assert [session.history.tolist() for session in drafter.sessions.values()] == [[1], [2, 4]]


def test_a_batch_of_nobody_is_answered(listen):
    with running(ScriptedDrafter(), listen), RawStream(listen) as stream:
        reply = stream.ask(commit_batch=pb.CommitBatch(), draft_batch=pb.DraftBatch())
        assert reply.HasField("tree_batch") and not reply.errors
        reply = stream.ask(draft_batch=pb.DraftBatch(session_ids=[8]))
        assert codes_of(reply) == {8: "UNKNOWN_SESSION"} and trees_of(reply.tree_batch) == {}


def test_a_drafter_that_fails_loses_one_session_of_the_batch(listen):
    script = in_turn(count_up, raising(RuntimeError("boom")), count_up)
    with running(ScriptedDrafter(script), listen), RawStream(listen) as stream:
        stream.ask(open_(1, [1]), open_(2, [2]), open_(3, [3]))
        reply = stream.ask(draft_batch=pb.DraftBatch(session_ids=[1, 2, 3]))
        assert codes_of(reply) == {2: "INTERNAL"} and "RuntimeError: boom" in reply.errors[0].message
        assert trees_of(reply.tree_batch) == {1: expected(1), 3: expected(3)}
        assert codes_of(stream.ask(draft_batch=pb.DraftBatch(session_ids=[2]))) == {2: "UNKNOWN_SESSION"}


# --- the client --------------------------------------------------------------------------------------------------------
def in_columns(message) -> bool:
    return message.HasField("commit_batch") and message.HasField("draft_batch") and not message.steps


def test_the_client_uses_columns_and_the_trees_are_those_in_process(listen, messages):
    local, rng = Drafter(CONFIG), random.Random(3)
    with running(Drafter(CONFIG), listen), DraftClient(listen, CONFIG, **PATIENT) as client:
        prompts = [text(rng.randrange(3), rng.randrange(1, 60)) for _ in range(6)]
        pairs = [(local.open(prompt), client.open(prompt)) for prompt in prompts]
        for _ in range(60):
            some, emitted = rng.sample(pairs, rng.randint(2, 6)), text(rng.randrange(3), 30)
            batch = [
                (pair, emitted[3 * i : 3 * i + rng.randrange(4)], rng.choice([None, some_candidates(rng)]))
                for i, pair in enumerate(some)
            ]
            mine = local.step([(mine, *rest) for (mine, _), *rest in batch])
            theirs = client.step([(theirs, np.array(tokens, np.int32), c) for (_, theirs), tokens, c in batch])
            assert all(map(same, mine, theirs))
            assert in_columns(messages[-1])
        assert client.stats.served == client.stats.trees and not client.stats.fallbacks
        assert all(mine.length == theirs.length for mine, theirs in pairs)


def test_what_columns_do_not_carry_goes_by_steps(listen, messages):
    drafter = ScriptedDrafter()
    with running(drafter, listen), DraftClient(listen, CONFIG, **PATIENT) as client:
        one, two = sessions = client.open([1]), client.open([2])

        def step(*requests) -> bool:
            """Whether it went in columns; the server's histories are right either way."""
            trees = client.step(list(requests))
            histories = [session.history for session in drafter.sessions.values()]
            assert [history.tolist() for history in histories] == [session.tokens.tolist() for session in sessions]
            assert [tree.tokens.tolist() for tree in trees] == [count_up(h, 32).tokens.tolist() for h in histories]
            return in_columns(messages[-1])

        assert step((one, [5]), (two, [6]))
        assert not step((one, [5], None, None, [7]), (two, [6]))
        assert not step((one, [5], None, np.zeros((1, 2))), (two, [6]))
        assert step((one, []), (two, [6]))
        one.commit([3])
        assert not step((one, [4]), (two, [6]))
        two.truncate(2)
        assert not step((one, [4]), (two, [6]))
        assert step((one, [4]), (two, [6]))
        assert not client.stats.fallbacks


def test_a_batch_too_large_for_a_message_goes_by_steps(listen, messages):
    with (
        running(drafter := ScriptedDrafter(), listen, max_message_bytes=65_536),
        DraftClient(listen, CONFIG, **PATIENT) as client,
    ):
        sessions = [client.open([number]) for number in range(4)]
        client.step([(session, np.full(6000, 2, np.int32)) for session in sessions])
        assert client.stats.served == 4 and not in_columns(messages[-1])
        assert [session.length for session in drafter.sessions.values()] == [6001] * 4


def test_a_server_that_does_not_know_columns_is_asked_by_steps(listen):
    requests = []

    def answer(request):
        requests.append(request)
        return pb.DecodeResponse(step=request.step).SerializeToString()

    with wild_server(listen, answer), DraftClient(listen, CONFIG, **PATIENT) as client:
        sessions = client.open([1]), client.open([2])
        client.step([(session, [3]) for session in sessions])
        last = requests[-1]
        assert [step.WhichOneof("action") for step in last.steps] == ["commit", "commit", "draft", "draft"]
        assert not last.HasField("commit_batch") and not last.HasField("draft_batch")


def tree_batch(ids, trees) -> pb.TreeBatch:
    """trees: (tokens, parents, probs) each."""
    return pb.TreeBatch(
        session_ids=ids,
        sizes=[len(tokens) for tokens, _, _ in trees],
        tokens=b"".join(pack_int32(tokens) for tokens, _, _ in trees),
        parents=b"".join(pack_int32(parents) for _, parents, _ in trees),
        probs=b"".join(pack_float32(probs) for *_, probs in trees),
        sources=bytes(sum(len(tokens) for tokens, _, _ in trees)),
    )


GOOD = ([1, 2], [-1, 0], [0.5, 0.25])


def changed(ids, **fields) -> pb.TreeBatch:
    batch = tree_batch(ids, [GOOD, GOOD])
    for name, value in fields.items():
        batch.ClearField(name)
        batch.MergeFrom(pb.TreeBatch(**{name: value}))
    return batch


# What comes for two sessions, and which of them get the server's tree.
ANSWERS = {
    "sound": (lambda ids: tree_batch(ids, [GOOD, GOOD]), [True, True]),
    "in another order": (lambda ids: tree_batch(ids[::-1], [GOOD, GOOD]), [True, True]),
    "the first twice": (lambda ids: tree_batch([ids[0], *ids], [GOOD, BROKEN["cycle"], GOOD]), [True, True]),
    "a stranger's, too": (lambda ids: tree_batch([777, *ids], [GOOD, GOOD, GOOD]), [True, True]),
    "only the second": (lambda ids: tree_batch(ids[1:], [GOOD]), [False, True]),
    "no message": (lambda ids: pb.TreeBatch(), [False, False]),
    "sizes that add up to less": (lambda ids: changed(ids, sizes=[2, 1]), [False, False]),
    "sizes for three": (lambda ids: changed(ids, sizes=[2, 2, 0]), [False, False]),
    "ids of three": (lambda ids: changed(ids, session_ids=[*ids, 777]), [False, False]),
    "half a token": (lambda ids: changed(ids, tokens=b"\0" * 15), [False, False]),
    "too few sources": (lambda ids: changed(ids, sources=b"\0"), [False, False]),
    **{
        f"{kind} in the second": (lambda ids, kind=kind: tree_batch(ids, [GOOD, BROKEN[kind]]), [True, False])
        for kind in BROKEN
    },
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_whatever_a_server_answers_in_columns(listen, kind):
    make, served = ANSWERS[kind]

    def answer(request):
        reply = pb.DecodeResponse(step=request.step)
        if request.HasField("draft_batch"):
            reply.tree_batch.CopyFrom(make(list(request.draft_batch.session_ids)))
        return reply.SerializeToString()

    with wild_server(listen, answer, batches=True), DraftClient(listen, CONFIG, **PATIENT) as client:
        sessions = client.open([4, 5, 4, 5]), client.open([4, 5, 4, 5])
        trees = client.step([(session, [4]) for session in sessions])
        assert [len(tree) > 0 and tree.sources[0] == Source.SESSION for tree in trees] == served
        assert [tree.tokens.tolist() for tree, sound in zip(trees, served) if sound] == [[1, 2]] * sum(served)
        assert client.stats.served == sum(served)
        assert client.stats.fallbacks["invalid"] == 2 - sum(served)


def test_a_session_refused_in_a_batch_is_opened_anew(listen):
    """One session is lost to the server: the others are served, and it comes back."""
    drafter = ScriptedDrafter(in_turn(count_up, count_up, raising(RuntimeError("boom")), count_up))
    with running(drafter, listen), DraftClient(listen, CONFIG, **PATIENT) as client:
        one, two = client.open([1]), client.open([2])
        client.step([(one, [5]), (two, [6])])
        trees = client.step([(one, [5]), (two, [6])])
        assert [tree.sources[0] == Source.SESSION if len(tree) else False for tree in trees] == [False, True]
        assert client.stats.fallbacks == {"session": 1}
        for _ in range(3):
            client.step([(one, [5]), (two, [6])])
        assert from_server(one) and from_server(two)
        assert client.stats.reopened == 1
        assert drafter.sessions[3].history.tolist() == one.tokens.tolist()
