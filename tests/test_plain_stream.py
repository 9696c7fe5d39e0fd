"""The plain stream: the messages of `Decode` over a Unix socket without gRPC, from the server's side and the client's."""

from __future__ import annotations

import logging
import queue
import socket
import stat
import threading
import time

import numpy as np
import pytest
from scripted_drafter import VOCAB_SIZE, ScriptedDrafter, count_up, in_turn, late
from serving import RawPlainStream, RawStream, ServerProcess, running, until
from test_client import same
from test_server import close, commit, draft, expected, open_, tokens_of, truncate

from redraft.client.draft_client import DraftClient
from redraft.client.plain_stream import PlainStream
from redraft.retrieval.config import DraftConfig
from redraft.server.listen_address import ListenError
from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import FRAME, framed

CONFIG = DraftConfig(vocab_size=VOCAB_SIZE)


@pytest.fixture
def listen(tmp_path):
    return f"unix:{tmp_path}/s"


def request(step: int, *steps) -> bytes:
    return framed(pb.DecodeRequest(step=step, steps=steps))


# --- the server ------------------------------------------------------------------------------------------------------
def test_it_answers_as_the_stream_over_grpc_does(listen):
    messages = [
        [open_(1, [1, 2]), open_(2, [9]), draft(1), draft(2)],
        [commit(1, 2, [3, 4]), commit(2, 7, [5]), draft(1, max_nodes=4), draft(2)],
        [truncate(1, 1), open_(1, [4]), close(2), draft(2), draft(1)],
        [draft(77)],
        [],
    ]
    with running(ScriptedDrafter(), listen), RawStream(listen) as grpc, RawPlainStream(listen) as plain:
        for message in messages:
            assert plain.ask(*message) == grpc.ask(*message)


def test_get_info_tells_its_name_and_the_socket_is_its_owners_alone(listen, tmp_path):
    with running(ScriptedDrafter(), listen), RawStream(listen) as stream:
        assert stream.stub.GetInfo(pb.GetInfoRequest()).plain_socket == "s.plain"
        assert stat.S_IMODE((tmp_path / "s.plain").stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []
    with running(ScriptedDrafter(), "127.0.0.1:0") as server, RawStream(str(server.address)) as stream:
        assert stream.stub.GetInfo(pb.GetInfoRequest()).plain_socket == ""


def test_it_is_not_there_before_the_server_is_warm(listen, tmp_path):
    with running(ScriptedDrafter(warmup_seconds=0.5), listen, wait=False):
        until((tmp_path / "s").exists)
        assert not (tmp_path / "s.plain").exists()
        until((tmp_path / "s.plain").exists)


def test_what_a_killed_server_left_is_replaced_and_other_files_are_not(listen, tmp_path):
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "s.plain"))
    with running(ScriptedDrafter(), listen), RawPlainStream(listen) as stream:
        assert tokens_of(stream.ask(open_(1, [1]), draft(1))) == {1: expected(1)}
    (tmp_path / "s.plain").write_text("precious")
    refused = pytest.raises(ListenError, match="s.plain: the file exists and is not a socket")
    with refused, running(ScriptedDrafter(), listen):
        pass
    assert (tmp_path / "s.plain").read_text() == "precious"


def test_messages_come_in_any_pieces_and_are_answered_in_order(listen):
    data = request(1, open_(1, [1, 2])) + request(2, draft(1)) + request(3, commit(1, 2, [7]), draft(1))
    with running(ScriptedDrafter(), listen):
        for size in (1, 3, 7, len(data)):
            with RawPlainStream(listen) as stream:
                for begin in range(0, len(data), size):
                    stream.socket.sendall(data[begin : begin + size])
                    if size < 5:
                        time.sleep(0.0002)  # so that the server sees pieces
                replies = [stream.read() for _ in range(3)]
                assert [reply.step for reply in replies] == [1, 2, 3]
                assert tokens_of(replies[1]) == {1: expected(1, 2)} and tokens_of(replies[2]) == {1: expected(1, 2, 7)}
                stream.end()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (FRAME.pack(70_000) + b"\0" * 70_000, "wanted messages of at most 65536 bytes, got 70000"),
        (FRAME.pack(2**32 - 1), "wanted messages of at most 65536 bytes, got 4294967295"),
        (FRAME.pack(3) + b"\xff\xff\xff", "wanted a DecodeRequest, got 3 bytes that are none"),
    ],
)
def test_what_is_no_message_ends_its_own_stream_only_and_is_told_why(listen, data, text):
    drafter = ScriptedDrafter()
    with running(drafter, listen, max_message_bytes=65_536), RawPlainStream(listen) as other:
        other.ask(open_(1, [1]))
        with RawPlainStream(listen) as stream:
            largest = pb.DecodeRequest(step=1, steps=[open_(1, [2])])
            largest.steps[0].open.namespace = "n" * (65_536 - largest.ByteSize() - 8)  # tags and lengths
            assert largest.ByteSize() == 65_536
            stream.socket.sendall(framed(largest))
            assert stream.read().errors == []
            stream.socket.sendall(data)
            reply = stream.read()
            assert (reply.step, [error.message for error in reply.errors]) == (0, [text])
            assert stream.read() is None
        until(lambda: drafter.sessions[2].closed)
        assert tokens_of(other.ask(draft(1))) == {1: expected(1)}


@pytest.mark.parametrize("left", [b"", b"\1", FRAME.pack(100) + b"\0" * 50])
def test_a_stream_that_ends_anywhere_closes_its_sessions(listen, left):
    drafter = ScriptedDrafter()
    with running(drafter, listen) as server:
        with RawPlainStream(listen) as stream:
            stream.ask(open_(1, [1]), open_(2, [2]))
            stream.socket.sendall(left)
        until(lambda: len(server.service.table) == 0 and all(session.closed for session in drafter.sessions.values()))


def test_a_client_that_goes_away_while_it_is_answered_leaves_nothing(listen, caplog):
    drafter = ScriptedDrafter(late(0.2))
    with running(drafter, listen) as server:
        with RawPlainStream(listen) as stream:
            stream.ask(open_(1, [1] * 6000))
            for step in range(3):
                stream.socket.sendall(request(step, draft(1), open_(step + 2, [1] * 6000)))
        until(lambda: drafter.sessions[1].closed and len(server.service.table) == 0)
        with RawPlainStream(listen) as stream:
            assert not stream.ask(open_(1, [1])).errors
            stream.socket.sendall(request(2, draft(1)))
            time.sleep(0.5)  # goes away with a reply unread
        until(lambda: len(server.service.table) == 0)
    assert caplog.records == []  # it is nobody's fault


def test_messages_that_wait_in_line_do_not_hold_up_other_streams(listen):
    with running(ScriptedDrafter(late(0.002)), listen), RawPlainStream(listen) as eager, RawPlainStream(listen) as other:
        eager.ask(open_(1, [1]))
        other.ask(open_(1, [2]))
        eager.socket.sendall(b"".join(request(step, draft(1)) for step in range(500)))  # a second's work
        started = time.monotonic()
        other.ask(draft(1))
        assert time.monotonic() - started < 0.6
        assert [eager.read().step for _ in range(500)] == list(range(500))


def test_the_server_finishes_the_step_at_hand_and_ends_the_stream(listen):
    with ServerProcess(listen, script="late(0.5)") as server, RawPlainStream(listen) as stream:
        stream.ask(open_(1, [1] * 6000))
        stream.socket.sendall(request(7, draft(1), open_(2, [1] * 6000)))  # in a worker thread, for its prompt's sake
        time.sleep(0.2)
        assert server.terminate() == 0, server.output
        reply = stream.read()
        assert reply.step == 7 and len(reply.trees) == 1
        assert stream.read() is None


# --- the client ------------------------------------------------------------------------------------------------------
def test_the_client_uses_it(listen):
    drafter = ScriptedDrafter()
    with running(drafter, listen) as server, DraftClient(listen, CONFIG, timeout=5.0, require=True) as client:
        over_grpc = server.service.Decode
        server.service.Decode = lambda *_: pytest.fail("a stream over gRPC was opened")
        session = client.open([1, 2])
        assert same(session.draft(), count_up(np.array([1, 2]), 32))
        server.service.Decode = over_grpc
    assert client.stats.fallbacks == {}


def test_where_the_path_would_be_too_long_steps_go_over_grpc(tmp_path, caplog):
    room = 107 - len(str(tmp_path)) - 1
    listen = f"unix:{tmp_path}/{'s' * room}"
    with running(ScriptedDrafter(), listen), DraftClient(listen, CONFIG, timeout=5.0, require=True) as client:
        assert same(client.open([1]).draft(), count_up(np.array([1]), 32))
    assert "no plain stream is served" in caplog.text


def test_where_the_socket_is_out_of_reach_steps_go_over_grpc(listen, tmp_path, caplog):
    with running(ScriptedDrafter(), listen):
        (tmp_path / "s.plain").unlink()
        with DraftClient(listen, CONFIG, timeout=5.0, require=True) as client:
            assert same(client.open([1]).draft(), count_up(np.array([1]), 32))
    assert [record.levelno for record in caplog.records if "steps go over gRPC" in record.message] == [logging.WARNING]


@pytest.mark.parametrize("form", ["unix:{}", "unix://{}"])
def test_both_forms_of_an_address(tmp_path, form):
    target = form.format(tmp_path / "s")
    with running(ScriptedDrafter(), f"unix:{tmp_path}/s"), DraftClient(target, CONFIG, require=True) as client:
        assert type(client._keeper.current._stream) is PlainStream


@pytest.mark.parametrize("name", ["../s.elsewhere", "/{}/s.elsewhere", "..", "s\0x", "s" * 300])
def test_a_server_cannot_send_the_client_to_any_other_place(tmp_path, name, caplog):
    (tmp_path / "there").mkdir()
    elsewhere = tmp_path / "s.elsewhere"
    listen = f"unix:{tmp_path}/there/s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(elsewhere))
        other.listen()
        other.setblocking(False)
        with running(ScriptedDrafter(), listen) as server:
            server.service.plain_socket = name.format(tmp_path)
            with DraftClient(listen, CONFIG, timeout=5.0, require=True) as client:
                assert same(client.open([1]).draft(), count_up(np.array([1]), 32))
        with pytest.raises(BlockingIOError):
            other.accept()
    assert "steps go over gRPC" in caplog.text


def test_a_lost_server_is_noticed_while_nobody_asks(listen):
    with DraftClient(listen, CONFIG, timeout=5.0) as client:
        with ServerProcess(listen, script="count_up") as server:
            assert client.wait_until_ready(30)
            server.kill()
        until(lambda: not client.connected, 5.0)


def test_nobody_who_sends_waits_for_a_server_that_does_not_read(listen):
    drafter = ScriptedDrafter()
    with running(drafter, listen), DraftClient(listen, CONFIG, timeout=0.05, open_timeout=20.0, require=True) as client:
        session = client.open([1])
        assert same(session.draft(), count_up(np.array([1]), 32))
        drafter.script = in_turn(late(1.0), count_up)
        session.draft()
        assert client.stats.fallbacks == {"late": 1}  # the server is at it for a second and reads nothing
        until(lambda: client._breaker.allows())
        connection, started = client._keeper.current, time.monotonic()
        prompts = [np.full(200_000, token, np.int32).tobytes() for token in range(8)]  # 6 MB, more than a socket holds
        for session_id, prompt in enumerate(prompts):
            message = pb.DecodeRequest(step=1000, steps=[open_(100 + session_id, prompt)])
            connection._stream.send(message)
        assert time.monotonic() - started < 0.5
        until(lambda: len(drafter.sessions) == 1 + len(prompts), 20)
        opened = [one.history for one in drafter.sessions.values()][1:]
        assert [(len(history), set(history)) for history in opened] == [(200_000, {token}) for token in range(8)]
        session.commit([2])
        until(lambda: same(session.draft(), count_up(np.array([1, 2]), 32)))


def test_replies_to_others_are_handed_on(listen):
    """Four threads of one client with different waiting times: whose turn it is to read takes in what is not his."""
    drafter = ScriptedDrafter(late(0.005))
    with running(drafter, listen), DraftClient(listen, CONFIG, timeout=10.0, open_timeout=10.0, require=True) as client:
        wrong = []

        def decode(token: int) -> None:
            with client.open([token]) as session:
                for length in range(1, 40):
                    if not same(session.draft(), count_up(np.full(length, token), 32)):
                        wrong.append((token, length))
                    session.commit([token])

        threads = [threading.Thread(target=decode, args=(token,)) for token in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == [] and client.stats.served == 4 * 39 and client.stats.fallbacks == {}


class Ends:
    """Both ends of a stream: ours, and a socket that says what a test wants."""

    def __init__(self, tmp_path, on_reply=None) -> None:
        self.replies, self.reasons = [], queue.SimpleQueue()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "s.plain"))
            server.listen()
            self.stream = PlainStream(str(tmp_path / "s.plain"), on_reply or self.replies.append, self.reasons.put)
            self.other, _ = server.accept()
        self.stream.start()


def test_many_who_wait_each_get_their_own_soon(tmp_path):
    """One at a time reads; whoever stops reading leaves it to another, whoever's reply another has read is told."""
    waiting = [queue.SimpleQueue() for _ in range(8)]
    ends = Ends(tmp_path, on_reply=lambda reply: waiting[reply.step].put(reply))
    seconds = {}

    def wait(number: int) -> None:
        started = time.monotonic()
        assert ends.stream.wait(waiting[number], 20.0).step == number
        seconds[number] = time.monotonic() - started

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for step in (3, 0, 7, 1, 2, 6, 5, 4):  # the first to wait is the first to read
        ends.other.sendall(framed(pb.DecodeResponse(step=step)))
        until(lambda step=step: step in seconds, 8.0)
    for thread in threads:
        thread.join(5)
    ends.stream.abort()


def test_ctrl_c_while_reading_ends_the_stream(tmp_path):
    """A part of a message may be lost: what follows would be misread."""

    def interrupt(reply) -> None:
        raise KeyboardInterrupt

    ends = Ends(tmp_path, on_reply=interrupt)
    ends.other.sendall(framed(pb.DecodeResponse(step=1)) + framed(pb.DecodeResponse(step=2)))
    with pytest.raises(KeyboardInterrupt):
        ends.stream.wait(queue.SimpleQueue(), 5.0)
    assert ends.reasons.get(timeout=5) == "reading was interrupted"
    assert ends.other.recv(1) == b""
    ends.stream.take_in()  # it is everybody's turn again, and nothing comes
    assert ends.reasons.empty()


def test_ctrl_c_while_sending_ends_the_stream(tmp_path, monkeypatch):
    def interrupt(*_) -> int:
        raise KeyboardInterrupt

    ends = Ends(tmp_path)
    monkeypatch.setattr("redraft.client.plain_stream.os.write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ends.stream.send(pb.DecodeRequest(step=1))
    assert ends.reasons.get(timeout=5) == "the server ended the stream" and ends.other.recv(1) == b""


def test_who_looks_in_takes_nothing_from_who_reads(tmp_path):
    ends, last, done = Ends(tmp_path), queue.SimpleQueue(), threading.Event()
    replies = [pb.DecodeResponse(step=step, errors=[pb.SessionError(message="x" * (step % 700))]) for step in range(4000)]

    def look_in() -> None:
        while not done.is_set():
            ends.stream.take_in()

    def write() -> None:
        for reply in replies:
            ends.other.sendall(framed(reply))

    threads = [threading.Thread(target=look_in), threading.Thread(target=look_in), threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    while len(ends.replies) < len(replies) and time.monotonic() - started < 10:
        with pytest.raises(queue.Empty):
            ends.stream.wait(last, 0.001)
    done.set()
    for thread in threads:
        thread.join(5)
    assert ends.replies == replies and ends.reasons.empty()
    ends.stream.abort()


def test_a_deadline_holds_whatever_comes_meanwhile(tmp_path):
    ends = Ends(tmp_path)
    piece = threading.Timer(0.3, lambda: ends.other.sendall(b"\1"))
    piece.start()
    started = time.monotonic()
    with pytest.raises(queue.Empty):
        ends.stream.wait(queue.SimpleQueue(), 0.4)
    assert 0.39 < time.monotonic() - started < 0.6
    piece.join()
    ends.stream.abort()


def test_closing_waits_until_the_server_has_read_all_but_no_longer(tmp_path):
    ends, came = Ends(tmp_path), []

    def serve() -> None:
        source = ends.other.makefile("rb")
        while head := source.read(FRAME.size):
            came.append(pb.DecodeRequest.FromString(source.read(*FRAME.unpack(head))))
            time.sleep(0.1)
        ends.other.close()

    server = threading.Thread(target=serve)
    server.start()
    ends.stream.send(pb.DecodeRequest(step=1))
    ends.stream.send(pb.DecodeRequest(step=2))
    started = time.monotonic()
    ends.stream.close()
    assert [one.step for one in came] == [1, 2] and time.monotonic() - started < 0.48
    server.join(5)


def test_what_is_sent_after_the_end_is_lost_without_a_word(tmp_path):
    ends = Ends(tmp_path)
    message = pb.DecodeRequest(step=1, steps=[open_(1, bytes(100_000))])
    for _ in range(10):  # more than the socket holds
        ends.stream.send(message)
    ends.other.close()
    assert ends.reasons.get(timeout=5)
    until(lambda: not ends.stream._watcher.is_alive())
    ends.stream.send(message)
    ends.stream.close()


@pytest.mark.parametrize("data", [FRAME.pack(2**32 - 1), FRAME.pack(4) + b"\xff\xff\xff\xff"])
def test_what_is_no_reply_ends_the_stream(tmp_path, data):
    ends = Ends(tmp_path)
    good = pb.DecodeResponse(step=3)
    ends.other.sendall(framed(good) + data)
    with pytest.raises(queue.Empty):
        ends.stream.wait(queue.SimpleQueue(), 0.1)
    assert ends.replies == [good] and ends.reasons.get(timeout=5) == "what came is no message"
    ends.stream.send(pb.DecodeRequest(step=1))  # is lost without a word
    ends.stream.close()
    assert ends.reasons.empty()  # told once


def test_a_reply_in_pieces_and_a_deadline_between_them(tmp_path):
    ends, reply = Ends(tmp_path), pb.DecodeResponse(step=3, errors=[pb.SessionError(message="x" * 1000)])
    data = framed(reply)
    for begin in range(0, len(data), 300):
        assert ends.replies == []
        ends.other.sendall(data[begin : begin + 300])
        with pytest.raises(queue.Empty):
            ends.stream.wait(queue.SimpleQueue(), 0.02)
    until(lambda: ends.stream.take_in() or ends.replies == [reply])
    ends.stream.abort()
    assert ends.reasons.get(timeout=5) == "the server ended the stream"


def test_what_came_before_the_end_is_still_read(tmp_path):
    ends = Ends(tmp_path)
    replies = [pb.DecodeResponse(step=step) for step in range(5)]
    ends.other.sendall(b"".join(map(framed, replies)))
    ends.other.close()
    assert ends.reasons.get(timeout=5) == "the server ended the stream"
    assert ends.replies == replies


@pytest.mark.parametrize("largest", [300, 60_000])
def test_what_a_slow_reader_is_sent_arrives_whole_and_in_order(tmp_path, largest):
    ends, rng, came = Ends(tmp_path), np.random.default_rng(largest), []
    sizes = rng.integers(1, largest, 4000 if largest < 1000 else 200)

    def read() -> None:
        source = ends.other.makefile("rb")
        while len(came) < len(sizes):
            if len(came) % 100 == 0:
                time.sleep(0.02)  # the socket fills up
            came.append(pb.DecodeRequest.FromString(source.read(*FRAME.unpack(source.read(FRAME.size)))))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for step, size in enumerate(sizes):
        ends.stream.send(pb.DecodeRequest(step=step, steps=[open_(step, bytes(int(size)))]))
    reader.join(20)
    assert [(one.step, len(one.steps[0].open.prompt)) for one in came] == list(enumerate(sizes))
    ends.stream.close()
