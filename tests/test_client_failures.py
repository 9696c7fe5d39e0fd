"""The client when the server is late, wrong, refusing, hung, killed, or was never there: it goes on, and comes back.

All of it over a Unix socket, where steps go over the plain stream, and over TCP, where they go over gRPC.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import socketserver
import threading
import time
from concurrent import futures

import grpc
import numpy as np
import pytest
from scripted_drafter import BROKEN, VOCAB_SIZE, ScriptedDrafter, broken, count_up, in_turn, late, raising, silent
from serving import ServerProcess, running, until
from test_client import same

from redraft.client.draft_client import DraftClient
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.ngram import NgramDrafter
from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import FRAME, pack_float32, pack_int32

CONFIG = DraftConfig(vocab_size=VOCAB_SIZE)
PATIENT = {"timeout": 5.0, "open_timeout": 10.0}
PROMPT = [5, 6, 7, 5, 6]  # n-gram lookup continues it with 7, 5, 6, ...


@pytest.fixture(params=["unix", "tcp"])
def listen(request, tmp_path):
    if request.param == "unix":
        return f"unix:{tmp_path}/s"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def from_server(session) -> bool:
    """Ask for a tree; whether it is the scripted server's, for this very history."""
    history = session.tokens.copy()
    tree = session.draft().check(vocab_size=VOCAB_SIZE, max_nodes=32)
    if len(tree) and tree.sources[0] == Source.SESSION:
        assert same(tree, count_up(history, 32))
        return True
    assert same(tree, NgramDrafter(CONFIG).open(history).draft())
    return False


def test_a_server_that_was_never_there(listen):
    with DraftClient(listen, CONFIG) as client:
        assert client._compiled.wait(30)
        session = client.open(PROMPT)
        started = time.monotonic()
        for number in range(200):
            assert not from_server(session)
            session.commit([PROMPT[(number + 2) % 3]])
        assert time.monotonic() - started < 2.0  # nobody waited for anything
        assert client.stats.fallbacks == {"unconnected": 200} and client.stats.served == 0
        # the caller's own draft is used where nothing else is known
        assert client.open([1]).draft(proposal=[8, 9]).tokens.tolist() == [8, 9]
        with running(ScriptedDrafter(), listen):
            assert client.wait_until_ready(10)
            until(lambda: from_server(session))


def test_a_server_that_is_required_but_never_there(listen, monkeypatch):
    monkeypatch.setattr("redraft.client.draft_client._REQUIRE_SECONDS", 0.3)
    with pytest.raises(ConnectionError, match=f"no draft server to be used at {listen}: UNAVAILABLE"):
        DraftClient(listen, require=True)


def test_a_server_that_is_still_warming_up_is_waited_for_in_the_background(listen):
    with running(ScriptedDrafter(warmup_seconds=1.5), listen, wait=False), DraftClient(listen, CONFIG) as client:
        assert client._compiled.wait(30)
        session = client.open(PROMPT)
        assert not from_server(session)
        until(lambda: from_server(session))


def test_kill_9_in_mid_session_and_a_new_server_on_the_same_address(listen):
    with DraftClient(listen, CONFIG, **PATIENT) as client:
        with ServerProcess(listen, script="count_up") as server:
            assert client.wait_until_ready(30)
            sessions = [client.open(PROMPT), client.open([9, *PROMPT], namespace="tenant")]
            for number in range(20):
                assert all(map(from_server, sessions))
                for session in sessions:
                    session.commit([number])
            server.kill()
        until(lambda: not client.connected)
        for number in range(20):
            started = time.monotonic()
            assert not any(map(from_server, sessions))
            assert time.monotonic() - started < 1.0
            for session in sessions:
                session.commit([number])
        sessions[1].truncate(10)
        with running(drafter := ScriptedDrafter(), listen):
            until(lambda: client.connected)
            for session in sessions:
                until(lambda session=session: from_server(session))
                session.commit([1])
                assert from_server(session)
            # opened anew from the client's own history: prompt apart from output, which is to be remembered
            opened = {entry[2]: entry[3] for entry in drafter.log if entry[0] == "open"}
            assert opened == {"default": len(PROMPT), "tenant": 1 + len(PROMPT)}
            assert [list(remote.history) for remote in drafter.sessions.values()] == [list(s.tokens) for s in sessions]
        assert client.stats.reopened == 2 and client.stats.connections == 2


def test_killed_while_a_step_waits(listen):
    with (
        ServerProcess(listen, script="in_turn(count_up, late(30))") as server,
        DraftClient(listen, CONFIG, timeout=20.0, require=True) as client,
    ):
        session = client.open(PROMPT)
        assert from_server(session)
        server.process.send_signal(signal.SIGSTOP)  # so that it cannot answer before it is killed
        started = time.monotonic()
        with futures.ThreadPoolExecutor(1) as pool:
            step = pool.submit(from_server, session)
            time.sleep(0.2)
            server.kill()
            assert step.result(10) is False
        assert time.monotonic() - started < 5.0  # not the deadline: the stream's end was noticed
        assert client.stats.fallbacks["lost"] == 1


def test_a_late_server_costs_a_deadline_now_and_then(listen):
    drafter = ScriptedDrafter()
    with running(drafter, listen), DraftClient(listen, CONFIG, timeout=0.05, open_timeout=5.0, require=True) as client:
        session = client.open(PROMPT)
        assert from_server(session)
        drafter.script = late(0.2)
        started, slowest = time.monotonic(), 0.0
        for number in range(150):
            before = time.monotonic()
            assert not from_server(session)
            slowest = max(slowest, time.monotonic() - before)
            session.commit([number % VOCAB_SIZE])
            time.sleep(0.005)
        elapsed = time.monotonic() - started
        reasons = client.stats.fallbacks
        assert slowest < 0.05 + 0.2
        assert reasons["late"] >= 2 and reasons["behind"] and reasons["paused"]
        assert reasons["late"] <= 3 + elapsed / 0.2  # the pauses grow
        assert client.stats.late_replies >= reasons["late"] - 1
        drafter.script = count_up
        until(lambda: from_server(session))
        # the answers that came late were thrown away, the commits were not lost
        assert list(drafter.sessions[1].history) == list(session.tokens)
        assert client.stats.reopened == 0


def test_a_server_that_hangs_and_wakes_again(listen):
    with (
        ServerProcess(listen, script="count_up") as server,
        DraftClient(listen, CONFIG, timeout=0.1, open_timeout=5.0, require=True) as client,
    ):
        session = client.open(PROMPT)
        assert from_server(session)
        server.process.send_signal(signal.SIGSTOP)
        assert not from_server(session)
        started = time.monotonic()
        for number in range(100):
            session.commit([number % VOCAB_SIZE])
            assert not from_server(session)
        assert time.monotonic() - started < 1.0
        server.process.send_signal(signal.SIGCONT)
        until(lambda: from_server(session))
        assert client.stats.connections == 1 and client.stats.reopened == 0


def test_a_server_that_hangs_for_good_is_given_up(listen, monkeypatch):
    monkeypatch.setattr("redraft.client.connection_keeper._HUNG_SECONDS", 0.5)
    with DraftClient(listen, CONFIG, timeout=0.1, open_timeout=5.0) as client:
        with ServerProcess(listen, script="count_up") as server:
            assert client.wait_until_ready(30)
            session = client.open(PROMPT)
            assert from_server(session)
            server.process.send_signal(signal.SIGSTOP)
            assert not from_server(session)
            until(lambda: not client.connected)
        with running(ScriptedDrafter(), listen):
            until(lambda: from_server(session))


def test_a_server_whose_answer_nobody_has_read_yet_is_not_given_up(listen, monkeypatch):
    monkeypatch.setattr("redraft.client.connection_keeper._HUNG_SECONDS", 0.3)
    with running(ScriptedDrafter(), listen), DraftClient(listen, CONFIG, **PATIENT, require=True) as client:
        session = client.open(PROMPT)  # is answered, and then the target takes its time
        time.sleep(1.0)
        assert client.connected and from_server(session)
        assert client.stats.connections == 1 and client.stats.reopened == 0


@pytest.mark.parametrize("kind", BROKEN)
def test_a_server_that_answers_garbage(listen, kind):
    drafter = ScriptedDrafter(broken(kind))
    with running(drafter, listen), DraftClient(listen, CONFIG, **PATIENT, require=True) as client:
        session = client.open(PROMPT)
        for number in range(30):
            assert not from_server(session)
            session.commit([number])
        assert client.stats.served == 0
        assert 1 < client.stats.fallbacks["invalid"] < 30 and client.stats.fallbacks["paused"]
        drafter.script = count_up
        until(lambda: from_server(session))


def test_one_broken_tree_does_not_spoil_the_batch(listen):
    drafter = ScriptedDrafter(in_turn(count_up, broken("cycle"), count_up))
    with running(drafter, listen), DraftClient(listen, CONFIG, **PATIENT, require=True) as client:
        sessions = [client.open([*PROMPT, number]) for number in (6, 7, 5)]
        trees = client.step([(session, []) for session in sessions])
        assert [tree.sources[0] for tree in trees] == [Source.SESSION, Source.NGRAM, Source.SESSION]
        assert client.stats.fallbacks == {"invalid": 1}


# What a server that is not ours, or gone mad, may answer to a message.
WILD_ANSWERS = {
    "no bytes of ours": lambda request: b"\xff\xff\xff\xff",
    "nothing": lambda request: pb.DecodeResponse(step=request.step).SerializeToString(),
    "another step": lambda request: pb.DecodeResponse(step=request.step + 7).SerializeToString(),
    "another session": lambda request: pb.DecodeResponse(
        step=request.step, trees=[pb.DraftTree(session_id=12345, tokens=b"\0\0\0\0")]
    ).SerializeToString(),
    "arrays cut short": lambda request: pb.DecodeResponse(
        step=request.step,
        trees=[
            pb.DraftTree(
                session_id=request.steps[-1].session_id,
                tokens=pack_int32([1, 2])[:-1],
                parents=pack_int32([-1, 0]),
                probs=pack_float32([0.5, 0.5]),
                sources=b"\0\0",
            )
        ],
    ).SerializeToString(),
}


@contextlib.contextmanager
def wild_server(listen: str, answer, **says):
    """A server that answers each message of a stream, plain where it listens on a Unix socket, with the bytes `answer(request)`.

    says: more fields of its GetInfoResponse.
    """
    path = listen.removeprefix("unix:") + ".plain" if listen.startswith("unix:") else None
    info = pb.GetInfoResponse(vocab_size=64, max_nodes=32, max_message_bytes=4 << 20, **says)
    info.plain_socket = "" if path is None else path.rpartition("/")[2]

    def decode(requests, context):
        for request in requests:
            yield answer(request)

    handlers = {
        "Decode": grpc.stream_stream_rpc_method_handler(decode, pb.DecodeRequest.FromString),
        "GetInfo": grpc.unary_unary_rpc_method_handler(
            lambda request, context: info, pb.GetInfoRequest.FromString, pb.GetInfoResponse.SerializeToString
        ),
    }
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("redraft.v1.DraftingService", handlers)])
    server.add_insecure_port(listen)
    with PlainServer(path, answer) if path else contextlib.nullcontext():
        server.start()
        try:
            yield
        finally:
            server.stop(0).wait()


class PlainServer(socketserver.ThreadingUnixStreamServer):
    """Answers each message of a plain stream with the bytes `answer(request)`, their size before them."""

    daemon_threads, block_on_close = True, False

    def __init__(self, path: str, answer) -> None:
        super().__init__(path, _PlainStream)
        self.answer, self.streams = answer, []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *error) -> None:
        self.shutdown()
        super().__exit__(*error)
        for stream in self.streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        os.unlink(self.server_address)


class _PlainStream(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.server.streams.append(self.request)
        with contextlib.suppress(ConnectionError):
            while head := self.rfile.read(FRAME.size):
                answer = self.server.answer(pb.DecodeRequest.FromString(self.rfile.read(*FRAME.unpack(head))))
                self.wfile.write(FRAME.pack(len(answer)) + answer)


@pytest.mark.parametrize("kind", WILD_ANSWERS)
def test_a_server_gone_mad(listen, kind):
    with DraftClient(listen, CONFIG, timeout=0.1, open_timeout=0.3) as client:
        with wild_server(listen, WILD_ANSWERS[kind]):
            assert client.wait_until_ready(30)
            session = client.open(PROMPT)
            started = time.monotonic()
            for number in range(40):
                assert not from_server(session)
                session.commit([number])
            assert time.monotonic() - started < 3.0
            assert client.stats.served == 0
        with running(ScriptedDrafter(), listen):
            until(lambda: from_server(session), 30)


def test_a_session_that_the_server_has_no_room_for(listen):
    drafter = ScriptedDrafter()
    with running(drafter, listen, max_sessions=1), DraftClient(listen, CONFIG, **PATIENT, require=True) as client:
        first, second = client.open(PROMPT), client.open(PROMPT)
        for number in range(20):
            trees = client.step([(first, [number]), (second, [number])])
            assert trees[0].sources[0] == Source.SESSION
            assert len(trees[1]) == 0 or trees[1].sources[0] == Source.NGRAM
        assert client.stats.fallbacks["session"] > 0
        first.close()
        until(lambda: from_server(second))


def test_a_session_that_was_idle_for_too_long_is_opened_anew(listen):
    drafter = ScriptedDrafter()
    with running(drafter, listen, idle_seconds=0.2), DraftClient(listen, CONFIG, **PATIENT, require=True) as client:
        session = client.open(PROMPT)
        session.commit([1])
        assert from_server(session)
        until(lambda: drafter.sessions[1].closed)
        session.commit([2])
        assert not from_server(session)
        until(lambda: from_server(session))
        # the server has learned the output once, when it closed the session: now all is prompt
        assert [entry[3] for entry in drafter.log if entry[0] == "open"] == [len(PROMPT), len(PROMPT) + 2]


def test_a_drafter_that_fails_costs_one_session_and_it_comes_back(listen):
    drafter = ScriptedDrafter(in_turn(count_up, raising(RuntimeError("boom")), count_up))
    with running(drafter, listen), DraftClient(listen, CONFIG, **PATIENT, require=True) as client:
        first, second = client.open(PROMPT), client.open(PROMPT)
        assert from_server(first)
        assert not from_server(second)
        assert from_server(first)
        until(lambda: from_server(second))
        assert client.stats.fallbacks["session"] == 1 and client.stats.reopened == 1


def test_what_does_not_fit_into_a_message(listen):
    drafter = ScriptedDrafter()
    rows = 1500
    large = Candidates.checked([1] * rows, [2] * rows, [[3] * 8] * rows, [[0.1] * 8] * rows)
    small = Candidates.checked([1], [2], [[3] * 8], [[0.1] * 8])
    with (
        running(drafter, listen, max_message_bytes=65_536),
        DraftClient(listen, CONFIG, **PATIENT, require=True) as client,
    ):
        short, long = client.open(PROMPT), client.open([1] * 20_000)
        for _ in range(3):
            assert from_server(short) and not from_server(long)
        short.commit([1], small)
        short.commit([2], large)  # goes without its candidates
        assert from_server(short)
        assert [c and len(c.tokens) for c in drafter.sessions[1].candidates] == [1, None]
        sessions = [client.open([1] * 8000) for _ in range(8)]  # together too large, so they go in several
        client.step([(session, [2] * 4000) for session in sessions])
        assert all(map(from_server, sessions))
        assert client.stats.candidates_dropped == 1
        assert client.stats.fallbacks == {"too_large": 3}
        assert client.stats.connections == 1


def test_the_end_of_a_server_is_taken_calmly(listen):
    with DraftClient(listen, CONFIG, **PATIENT) as client:
        with ServerProcess(listen, script="count_up") as server:
            assert client.wait_until_ready(30)
            session = client.open(PROMPT)
            assert from_server(session)
            assert server.terminate() == 0, server.output
        until(lambda: not client.connected)
        assert not from_server(session)


def test_silence_is_not_taken_for_failure(listen):
    with running(ScriptedDrafter(silent), listen), DraftClient(listen, CONFIG, **PATIENT, require=True) as client:
        session = client.open(PROMPT)
        for _ in range(10):
            assert len(session.draft()) == 0
        assert client.stats.served == 10


def test_prompts_of_any_length(listen):
    with running(ScriptedDrafter(), listen), DraftClient(listen, CONFIG, **PATIENT, require=True) as client:
        assert len(client.open([]).draft()) == 0
        for prompt in ([0], np.zeros(30_000, np.int64)):
            session = client.open(prompt)
            assert from_server(session)
            assert session.length == len(prompt)
        assert client.stats.served == 3


def test_hidden_states_stay_here_when_the_server_takes_none(listen):
    drafter = ScriptedDrafter()
    drafter.hidden_size = 0
    with running(drafter, listen), DraftClient(listen, CONFIG, **PATIENT, require=True) as client:
        session = client.open(PROMPT)
        session.commit([1], hidden=np.zeros(2))
        assert from_server(session)
        assert drafter.sessions[1].hidden == [None] and client.stats.hidden_dropped == 1


def test_nothing_piles_up_while_servers_come_and_go(listen):
    with DraftClient(listen, CONFIG, **PATIENT) as client:
        counts = []
        for _ in range(8):
            with running(ScriptedDrafter(), listen):
                session = client.open(PROMPT)
                until(lambda session=session: from_server(session))
                counts.append(threading.active_count())
            until(lambda: not client.connected)
        assert max(counts) <= counts[1] + 2
