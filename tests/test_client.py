"""The client with a healthy server: the same answers as in process, one round trip per step, the caller's mistakes."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import subprocess
import sys
import threading

import grpc
import numpy as np
import pytest
from bad_steps import refuses_what_is_no_step
from scripted_drafter import VOCAB_SIZE, ScriptedDrafter, count_up, silent, tree_of
from serving import running, until

import redraft
from redraft.client.circuit_breaker import CircuitBreaker
from redraft.client.draft_client import DraftClient
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import DraftTree
from redraft.retrieval.errors import IndexFormatError, RedraftError, SessionClosedError

PATIENT = {"timeout": 5.0, "open_timeout": 10.0, "require": True}  # a healthy server on a busy machine


@pytest.fixture
def listen(tmp_path):
    return f"unix:{tmp_path}/s"


@pytest.fixture
def drafter():
    return ScriptedDrafter()


@pytest.fixture
def server(drafter, listen):
    with running(drafter, listen) as server:
        yield server


@pytest.fixture
def client(server, listen):
    with DraftClient(listen, **PATIENT) as client:
        yield client


def same(one: DraftTree, other: DraftTree) -> bool:
    names = ("tokens", "parents", "probs", "sources")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_it_is_public():
    assert redraft.DraftClient is DraftClient


def test_the_same_trees_as_in_process(client):
    """Whatever is done to sessions in whatever order."""
    local, rng = ScriptedDrafter(), random.Random(1)
    pairs = []
    for _ in range(400):
        if not pairs or rng.random() < 0.1:
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(5))]
            pairs.append((local.open(prompt), client.open(prompt)))
        mine, theirs = rng.choice(pairs)
        action = rng.choice(["commit", "commit", "draft", "draft", "truncate", "close", "step"])
        if action == "commit":
            tokens = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(4))]
            mine.commit(tokens), theirs.commit(tokens)
        elif action == "draft":
            budget = rng.choice([None, 0, 1, 3, 32])
            assert same(mine.draft(budget), theirs.draft(budget))
        elif action == "truncate":
            length = rng.randrange(mine.length + 1)
            mine.truncate(length), theirs.truncate(length)
        elif action == "step":
            batch = [(pair, [rng.randrange(VOCAB_SIZE)]) for pair in pairs if rng.random() < 0.7]
            expected = local.step([(mine, tokens) for (mine, _), tokens in batch])
            trees = client.step([(theirs, tokens) for (_, theirs), tokens in batch])
            assert len(expected) == len(trees) and all(map(same, expected, trees))
        elif len(pairs) > 3:
            pairs.remove((mine, theirs))
            mine.close(), theirs.close()
        assert mine.length == theirs.length and mine.closed == theirs.closed
    assert client.stats.served == client.stats.trees > 100
    assert not client.stats.fallbacks


def test_commit_and_draft_are_one_round_trip_and_so_is_a_batch(client, server):
    sessions = [client.open([number]) for number in range(8)]
    client.step([(session, []) for session in sessions])
    before = server.service.activity.messages
    sessions[0].commit([1])
    sessions[0].truncate(1)
    sessions[0].commit([2])
    sessions[0].draft()
    assert server.service.activity.messages == before + 1
    client.step([(session, [3]) for session in sessions])
    assert server.service.activity.messages == before + 2


def test_everything_reaches_the_drafter(client, drafter):
    session = client.open([1, 2], namespace="tenant")
    candidates = Candidates.checked([1, 2], [-1, 1], [[3, 4], [5, 6]], [[0.5, 0.25], [0.5, 0.125]])
    hidden = np.array([0.5, -2.0])
    client.step([(session, [3], candidates, hidden, [7, 8])])
    hidden[:] = 0  # never kept by reference
    session.draft(max_nodes=5, min_prob=0.25, proposal=tree_of([1, 2], [-1, -1]))
    (remote,) = drafter.sessions.values()
    assert remote.namespace == "tenant"
    assert remote.candidates[0].ids.tolist() == [[3, 4], [5, 6]]
    assert remote.candidates[0].probs.tolist() == [[0.5, 0.25], [0.5, 0.125]]
    assert remote.hidden[0].tolist() == [[0.5, -2.0]]
    assert remote.proposals[0].tolist() == [7, 8] and remote.proposals[1].parents.tolist() == [-1, -1]
    assert drafter.log[-1][2:] == (5, 0.25)


def test_an_empty_tree_is_an_answer_and_no_failure(client, drafter):
    drafter.script = silent
    session = client.open([1, 1, 1, 1])  # the client itself would draft here
    assert len(session.draft()) == 0
    assert client.stats.served == 1


def test_closing_reaches_the_server(client, drafter, server):
    with client.open([1]) as session:
        session.commit([2, 3])
    session.close()
    until(lambda: drafter.log and drafter.log[-1][0] == "close")
    assert list(drafter.sessions[1].history) == [1, 2, 3]
    client.open([1])
    client.close()
    until(lambda: len(server.service.table) == 0)


def test_many_commits_without_a_draft_are_not_hoarded(client, drafter):
    session = client.open([])
    for number in range(200):
        session.commit([number % VOCAB_SIZE])
    until(lambda: drafter.sessions and drafter.sessions[1].length >= 192)


def test_the_callers_mistakes_raise_at_once(client, listen):
    session, other = client.open([1]), client.open([2])
    with pytest.raises(ValueError, match="token id 64 .* is too large, the vocabulary has 64 ids"):
        client.open([64])
    for tokens, error in (([-1], ValueError), ([64], ValueError), ([[1]], ValueError), ([1.5], TypeError)):
        with pytest.raises(error):
            session.commit(tokens)
        with pytest.raises(error):
            client.step([(other, [1]), (session, tokens)])
    with pytest.raises(TypeError, match="namespace: wanted a string, got int"):
        client.open([1], namespace=1)
    with pytest.raises(TypeError, match="wanted redraft.Candidates"):
        session.commit([1], candidates=[1, 2])
    for name, array in (
        ("ids", np.array([[64]], np.int32)),
        ("tokens", np.array([-1], np.int32)),
        ("previous", np.array([-2], np.int32)),
        ("previous", np.array([1, 2], np.int32)),
        ("probs", np.array([[np.nan]], np.float32)),
        ("probs", np.array([0.5], np.float32)),
    ):
        good = Candidates.checked([1], [-1], [[2]], [[0.5]])
        with pytest.raises(ValueError, match=f"candidates.{name}"):
            session.commit([1], dataclasses.replace(good, **{name: array}))
    for hidden, message in (
        (np.zeros((1, 2, 2)), r"wanted shape \[d\] or \[m, d\]"),
        (np.full(2, np.nan), "NaN or infinity"),
    ):
        with pytest.raises(ValueError, match=message):
            session.commit([1], hidden=hidden)
    with pytest.raises(ValueError, match="length: wanted 0..1, got 2"):
        session.truncate(2)
    for arguments in ({"max_nodes": -1}, {"max_nodes": 513}, {"min_prob": 1.1}, {"proposal": [64]}):
        with pytest.raises(ValueError):
            session.draft(**arguments)
    with pytest.raises(ValueError, match="only once"):
        client.step([(session, [1]), (session, [1])])
    with DraftClient(listen, **PATIENT) as elsewhere, pytest.raises(ValueError, match="belongs to another client"):
        client.step([(other, [1]), (elsewhere.open([1]), [1])])
    refuses_what_is_no_step(client, other)
    for call in (
        lambda: session.draft(max_nodes=1.5),
        lambda: session.draft(min_prob="x"),
        lambda: session.truncate(1.0),
    ):
        with pytest.raises(TypeError):
            call()
    with DraftClient(listen, **PATIENT) as stranger, pytest.raises(ValueError, match="another client"):
        stranger.step([(session, [1])])
    assert (session.length, other.length) == (1, 1)  # nothing of a wrong call was done
    session.close()
    for call in (session.draft, lambda: session.commit([1]), lambda: session.truncate(0)):
        with pytest.raises(SessionClosedError, match="session 1 is closed"):
            call()
    with pytest.raises(SessionClosedError):
        client.step([(session, [1])])
    client.close()
    other.close()
    with pytest.raises(RedraftError, match="the client is closed"):
        client.open([1])


def test_without_a_config_the_client_learns_it_from_the_server(listen):
    served = DraftConfig(vocab_size=64, max_nodes=5)
    with running(ScriptedDrafter(config=served), listen), DraftClient(listen, **PATIENT) as client:
        assert (client.config.vocab_size, client.config.max_nodes) == (64, 5)
        assert len(client.open([1]).draft()) == 5


def test_the_clients_config_sets_the_budget(client, listen, drafter):
    with DraftClient(listen, DraftConfig(vocab_size=64, max_nodes=3, min_prob=0.5), **PATIENT) as mine:
        mine.open([1]).draft()
        assert drafter.log[-1][2:] == (3, 0.5)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (DraftConfig(vocab_size=65), "its vocabulary has 64 ids, ours 65"),
        (DraftConfig(tokenizer_fingerprint="b"), "its tokenizer is a, ours b"),
    ],
)
def test_a_server_for_another_model_is_not_used(listen, config, text):
    served = DraftConfig(vocab_size=64, tokenizer_fingerprint="a")
    with running(ScriptedDrafter(config=served), listen):
        with DraftClient(listen, config) as client:
            until(lambda: client._keeper.trouble == text)
            session = client.open([1, 2, 1, 2])
            session.draft()
            assert client.stats.fallbacks["unconnected"] == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("redraft.client.draft_client._REQUIRE_SECONDS", 1.0)
            with pytest.raises(ConnectionError, match=text):
                DraftClient(listen, config, require=True)


def test_administration(client, drafter, tmp_path):
    client.load_index(tmp_path / "a.index")
    assert client.index_paths == [f"{tmp_path}/a.index"]
    with pytest.raises(IndexFormatError, match="missing.index: not an index"):
        client.load_index("missing.index")
    client.unload_index(tmp_path / "a.index")
    with pytest.raises(KeyError, match="no index .*a.index is open"):
        client.unload_index(tmp_path / "a.index")
    client.forget("tenant")
    assert drafter.log[-1] == ("forget", "tenant")


def test_administration_is_for_unix_sockets():
    with running(ScriptedDrafter(), "127.0.0.1:0") as server, DraftClient(str(server.address), **PATIENT) as client:
        assert same(client.open([1]).draft(), count_up(np.array([1]), 32))
        with pytest.raises(RedraftError, match="over a Unix socket only"):
            client.load_index("x")


def test_threads_share_a_client(client):
    wrong = []

    def decode(seed: int) -> None:
        history = [seed]
        session = client.open(history)
        for number in range(100):
            tree = session.draft()
            if not same(tree, count_up(np.array(history), 32)):
                wrong.append((seed, number))
            history.append(number % VOCAB_SIZE)
            session.commit(history[-1:])

    threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == [] and client.stats.served == 600


def test_a_forked_process_is_told(client):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client.open([1])
        except RedraftError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"before a fork" in os.read(reader, 1000)


def test_a_process_that_forgets_to_close_ends_nevertheless(server, listen):
    code = (
        "import sys; from redraft import DraftClient; c = DraftClient(sys.argv[1], timeout=5.0, require=True);"
        "print(len(c.open([1]).draft()))"
    )
    done = subprocess.run([sys.executable, "-c", code, listen], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "8\n", "")
    until(lambda: len(server.service.table) == 0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls(tmp_path):
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")]
    newkey = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    subprocess.run(["openssl", "req", "-x509", *newkey, *subject, *files], check=True, capture_output=True)
    settings = {"tls_cert": tmp_path / "cert", "tls_key": tmp_path / "key"}
    with running(ScriptedDrafter(), "0.0.0.0:0", **settings) as server:
        target = f"localhost:{server.address.port}"
        credentials = grpc.ssl_channel_credentials((tmp_path / "cert").read_bytes())
        with DraftClient(target, credentials=credentials, **PATIENT) as client:
            assert same(client.open([1]).draft(), count_up(np.array([1]), 32))
        with DraftClient(target) as plain:
            assert not plain.wait_until_ready(0.5)


def test_the_circuit_breaker():
    now = [100.0]
    breaker = CircuitBreaker(first=1.0, longest=4.0, clock=lambda: now[0])
    breaker.failure()
    assert breaker.allows() and breaker.remaining() == 0  # one failure is no reason to wait
    for pause in (1, 2, 4, 4, 4):
        breaker.failure()
        assert not breaker.allows() and breaker.remaining() == pause
        now[0] += pause - 0.5
        assert not breaker.allows()
        now[0] += 0.5
        assert breaker.allows()
    breaker.failure()
    breaker.try_now()
    assert breaker.allows()
    breaker.failure()
    assert breaker.remaining() == 4  # nothing was forgotten
    breaker.success()
    breaker.failure()
    assert breaker.allows()
