"""The server around a scripted drafter: steps in order, errors of one session alone, limits, expiry, admin, metrics."""

from __future__ import annotations

import time
import urllib.request

import grpc
import numpy as np
import pytest
from scripted_drafter import ScriptedDrafter, count_up, in_turn, late, raising
from serving import RawPlainStream, RawStream, running, until

from redraft.retrieval.config import DraftConfig
from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import pack_float32, pack_int32, unpack_int32


@pytest.fixture
def listen(tmp_path):
    return f"unix:{tmp_path}/s"


def open_(session_id, prompt, namespace=""):
    data = prompt if isinstance(prompt, bytes) else pack_int32(prompt)
    return pb.SessionStep(session_id=session_id, open=pb.OpenStep(prompt=data, namespace=namespace))


def commit(session_id, start, tokens, **fields):
    data = tokens if isinstance(tokens, bytes) else pack_int32(tokens)
    return pb.SessionStep(session_id=session_id, commit=pb.CommitStep(start=start, tokens=data, **fields))


def truncate(session_id, length):
    return pb.SessionStep(session_id=session_id, truncate=pb.TruncateStep(length=length))


def draft(session_id, **fields):
    return pb.SessionStep(session_id=session_id, draft=pb.DraftStep(**fields))


def close(session_id):
    return pb.SessionStep(session_id=session_id, close=pb.CloseStep())


def tokens_of(reply) -> dict[int, list[int]]:
    return {tree.session_id: unpack_int32(tree.tokens, "tokens").tolist() for tree in reply.trees}


def codes_of(reply) -> dict[int, str]:
    prefix = "SESSION_ERROR_CODE_"
    return {e.session_id: pb.SessionErrorCode.Name(e.code).removeprefix(prefix) for e in reply.errors}


def expected(*history) -> list[int]:
    return count_up(np.array(history, np.int32), 32).tokens.tolist()


def test_a_batch_of_steps_in_order(listen):
    drafter = ScriptedDrafter()
    with running(drafter, listen), RawStream(listen) as stream:
        reply = stream.ask(open_(7, [1, 2, 3]), open_(8, []), draft(7), commit(8, 0, [5]), draft(8), draft(7))
        assert not reply.errors
        assert [tree.session_id for tree in reply.trees] == [7, 8, 7]
        assert tokens_of(reply) == {7: expected(1, 2, 3), 8: expected(5)}
        reply = stream.ask(commit(7, 3, [4, 5]), truncate(7, 4), commit(7, 4, [0]), draft(7), close(8))
        assert tokens_of(reply) == {7: expected(1, 2, 3, 4, 0)}
        assert [entry[0] for entry in drafter.log] == [
            *("open", "open", "draft", "commit", "draft", "draft"),
            *("commit", "truncate", "commit", "draft", "close"),
        ]


def test_everything_a_step_carries_reaches_the_drafter(listen):
    drafter = ScriptedDrafter()
    candidates = pb.Candidates(
        tokens=pack_int32([1, 2]),
        previous=pack_int32([-1, 1]),
        ids=pack_int32([3, 4, 5, 6]),
        probs=pack_float32([0.5, 0.25, 0.5, 0.125]),
    )
    proposal = pb.Proposal(tokens=pack_int32([9, 8]), parents=pack_int32([-1, -1]), probs=pack_float32([0.5, 0.25]))
    with running(drafter, listen), RawStream(listen) as stream:
        stream.ask(open_(1, [1], "tenant"), commit(1, 1, [2], candidates=candidates, hidden=pack_float32([0.5, -2])))
        reply = stream.ask(draft(1, max_nodes=3, min_prob=0.5, proposal=proposal))
        assert len(reply.trees[0].sources) == 3
        stream.ask(draft(1, max_nodes=400), draft(1, proposal=pb.Proposal(tokens=pack_int32([9, 8, 7]))))
        session = drafter.sessions[1]
        assert session.namespace == "tenant"
        assert session.candidates[0].ids.tolist() == [[3, 4], [5, 6]]
        assert session.candidates[0].previous.tolist() == [-1, 1]
        assert session.hidden[0].tolist() == [[0.5, -2.0]]
        assert session.proposals[0].parents.tolist() == [-1, -1]
        assert session.proposals[2].tolist() == [9, 8, 7]
        budgets = [entry[2:] for entry in drafter.log if entry[0] == "draft"]
        assert budgets == [(3, 0.5), (400, None), (None, None)]


@pytest.mark.parametrize(
    ("step", "code", "text"),
    [
        (commit(1, 2, [5]), "POSITION_MISMATCH", "starts at 2 and repeats what is there, the session has 3 tokens"),
        (commit(1, 4, [5]), "POSITION_MISMATCH", "starts at 4 and leaves a gap, the session has 3 tokens"),
        (commit(9, 0, [5]), "UNKNOWN_SESSION", "not open on this stream"),
        (draft(9), "UNKNOWN_SESSION", "not open on this stream"),
        (truncate(9, 0), "UNKNOWN_SESSION", "not open on this stream"),
        (open_(1, [1]), "ALREADY_OPEN", "close it first"),
        (open_(9, b"\0\0\0"), "INVALID_ARGUMENT", "prompt: wanted a multiple of 4 bytes"),
        (open_(9, [64]), "INVALID_ARGUMENT", "token id 64 at position 0 is too large, the vocabulary has 64 ids"),
        (commit(1, 3, b"\0"), "INVALID_ARGUMENT", "tokens: wanted a multiple of 4 bytes"),
        (commit(1, 3, [1, -1]), "INVALID_ARGUMENT", "token id -1 at position 1 is negative"),
        (commit(1, 3, [1], hidden=b"123"), "INVALID_ARGUMENT", "hidden: wanted a multiple of 4 bytes"),
        (
            commit(1, 3, [1], candidates=pb.Candidates(tokens=pack_int32([1, 2]), ids=pack_int32([1, 2, 3]))),
            "INVALID_ARGUMENT",
            "candidates.ids: wanted a multiple of 2",
        ),
        (
            commit(1, 3, [1], candidates=pb.Candidates(ids=pack_int32([1]))),
            "INVALID_ARGUMENT",
            "candidates.ids: wanted a multiple of 0",
        ),
        (truncate(1, 4), "INVALID_ARGUMENT", "length: wanted 0..3, got 4"),
        (
            draft(1, proposal=pb.Proposal(tokens=pack_int32([1, 1]), parents=pack_int32([-1, -1]), probs=b"\0" * 8)),
            "INVALID_ARGUMENT",
            "two siblings carry the same token",
        ),
        (pb.SessionStep(session_id=1), "INVALID_ARGUMENT", "no action"),
    ],
)
def test_an_error_is_one_sessions_own(listen, step, code, text):
    with running(ScriptedDrafter(), listen), RawStream(listen) as stream:
        stream.ask(open_(1, [1, 2, 3]), open_(2, [4]))
        failing = step.session_id
        # what follows in the message is skipped for the failing session and done for the other
        reply = stream.ask(step, commit(failing, 3, [6]), draft(failing), commit(2, 1, [5]), draft(2))
        assert codes_of(reply) == {failing: code}
        assert text in reply.errors[0].message and f"session {failing}" in reply.errors[0].message
        assert tokens_of(reply) == {2: expected(4, 5)}
        # and the failing one is as it was
        assert tokens_of(stream.ask(draft(1), draft(2))) == {1: expected(1, 2, 3), 2: expected(4, 5)}


@pytest.mark.parametrize(
    ("field", "data", "named"),
    [
        ("tokens", b"123", "candidates.tokens"),
        ("tokens", pack_int32([1]), "candidates.previous"),
        ("tokens", b"", "candidates.ids"),
        ("previous", b"123", "candidates.previous"),
        ("previous", pack_int32([1]), "candidates.previous"),
        ("ids", b"12345", "candidates.ids"),
        ("ids", pack_int32([3, 4, 5]), "candidates.ids"),
        ("ids", pack_int32([3, 4]), "candidates.probs"),
        ("probs", b"123", "candidates.probs"),
        ("probs", b"\0" * 12, "candidates.probs"),
    ],
)
def test_candidates_of_a_wrong_length_leave_the_neighbours_theirs(listen, field, data, named):
    sound = {
        "tokens": pack_int32([1, 2]),
        "previous": pack_int32([-1, 1]),
        "ids": pack_int32([3, 4, 5, 6]),
        "probs": pack_float32([0.5, 0.25, 0.5, 0.25]),
    }
    drafter = ScriptedDrafter()
    with running(drafter, listen), RawStream(listen) as stream:
        stream.ask(*[open_(number, [number]) for number in (1, 2, 3)])
        right, wrong = pb.Candidates(**sound), pb.Candidates(**{**sound, field: data})
        reply = stream.ask(*[commit(n, 1, [7, n], candidates=wrong if n == 2 else right) for n in (1, 2, 3)])
        assert codes_of(reply) == {2: "INVALID_ARGUMENT"} and named in reply.errors[0].message
        one, two, three = drafter.sessions.values()
        assert [session.history.tolist() for session in (one, two, three)] == [[1, 7, 1], [2], [3, 7, 3]]
        for session in (one, three):
            (got,) = session.candidates
            assert (got.tokens.tolist(), got.previous.tolist()) == ([1, 2], [-1, 1])
            assert (got.ids.tolist(), got.probs.tolist()) == ([[3, 4], [5, 6]], [[0.5, 0.25]] * 2)


def test_after_a_gap_the_session_can_be_opened_anew(listen):
    with running(ScriptedDrafter(), listen), RawStream(listen) as stream:
        stream.ask(open_(1, [1, 2, 3]))
        assert codes_of(stream.ask(commit(1, 5, [4]))) == {1: "POSITION_MISMATCH"}
        assert tokens_of(stream.ask(close(1), open_(1, [7]), draft(1))) == {1: expected(7)}


def test_a_drafter_that_fails_loses_one_session_only(listen):
    script = in_turn(raising(RuntimeError("boom")), count_up)
    with running(ScriptedDrafter(script), listen), RawStream(listen) as stream:
        reply = stream.ask(open_(1, [1]), open_(2, [2]), draft(1), draft(2))
        assert codes_of(reply) == {1: "INTERNAL"} and "RuntimeError: boom" in reply.errors[0].message
        assert tokens_of(reply) == {2: expected(2)}
        assert codes_of(stream.ask(draft(1))) == {1: "UNKNOWN_SESSION"}


def test_closing_is_idempotent_and_final(listen):
    with running(ScriptedDrafter(), listen), RawStream(listen) as stream:
        stream.ask(open_(1, [1]))
        assert not stream.ask(close(1), close(1), close(5)).errors
        assert codes_of(stream.ask(commit(1, 1, [2]))) == {1: "UNKNOWN_SESSION"}


def test_clients_with_the_same_ids_never_meet(listen):
    with running(ScriptedDrafter(), listen), RawStream(listen) as one, RawStream(listen) as two:
        one.ask(open_(1, [1, 2]))
        assert codes_of(two.ask(draft(1))) == {1: "UNKNOWN_SESSION"}
        two.ask(open_(1, [9]))
        two.ask(close(1))
        assert tokens_of(one.ask(draft(1))) == {1: expected(1, 2)}


def test_a_stream_that_ends_closes_its_sessions(listen):
    drafter = ScriptedDrafter()
    with running(drafter, listen) as server, RawStream(listen) as other:
        other.ask(open_(1, [9]))
        with RawStream(listen) as stream:
            stream.ask(open_(1, [1]), open_(2, [2]))
            stream.end()
        with RawStream(listen) as stream:
            stream.ask(open_(1, [3]))  # this one is dropped without a word
        until(lambda: sum(session.closed for session in drafter.sessions.values()) == 3)
        assert len(server.service.table) == 1
        assert tokens_of(other.ask(draft(1))) == {1: expected(9)}


def test_the_limit_of_sessions(listen):
    with running(ScriptedDrafter(), listen, max_sessions=2), RawStream(listen) as stream:
        reply = stream.ask(open_(1, [1]), open_(2, [2]), open_(3, [3]), draft(3), draft(1))
        assert codes_of(reply) == {3: "TOO_MANY_SESSIONS"} and "limit of 2" in reply.errors[0].message
        assert list(tokens_of(reply)) == [1]
        assert not stream.ask(close(2), open_(3, [3])).errors
        # a prompt that is refused takes no place
        assert codes_of(stream.ask(close(3), open_(4, [-1]), open_(5, [1]))) == {4: "INVALID_ARGUMENT"}


def test_an_idle_session_is_closed_and_a_used_one_is_not(listen):
    drafter = ScriptedDrafter()
    with running(drafter, listen, idle_seconds=0.4) as server, RawStream(listen) as stream:
        stream.ask(open_(1, [1]), open_(2, [2]))
        for _ in range(8):
            time.sleep(0.1)
            assert not stream.ask(draft(1)).errors
        assert drafter.sessions[2].closed and not drafter.sessions[1].closed
        reply = stream.ask(draft(2))
        assert codes_of(reply) == {2: "UNKNOWN_SESSION"} and "idle for more than 0.4 seconds" in reply.errors[0].message
        assert server.service.activity.expired == 1
        assert not stream.ask(open_(2, [2])).errors


def test_a_message_beyond_the_limit_ends_its_own_stream_only(listen):
    with running(ScriptedDrafter(), listen, max_message_bytes=65_536), RawStream(listen) as other:
        other.ask(open_(1, [1]))
        with RawStream(listen) as stream:
            stream.ask(open_(1, [1] * 16_000))
            with pytest.raises(grpc.RpcError) as caught:
                stream.ask(open_(2, [1] * 17_000))
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "65536" in caught.value.details()
        assert tokens_of(other.ask(draft(1))) == {1: expected(1)}


def test_bytes_that_are_no_message_end_their_own_stream_only(listen):
    with running(ScriptedDrafter(), listen), RawStream(listen) as other:
        other.ask(open_(1, [1]))
        send = other.channel.stream_stream("/redraft.v1.DraftingService/Decode")
        with pytest.raises(grpc.RpcError):
            list(send(iter([b"\xff\xff\xff"])))
        assert tokens_of(other.ask(draft(1))) == {1: expected(1)}


@pytest.mark.parametrize("Stream", [RawStream, RawPlainStream])
def test_a_long_prompt_does_not_hold_up_other_streams(listen, Stream):
    drafter = ScriptedDrafter()
    slow_open = drafter.open

    def open_slowly(prompt, namespace):
        if len(prompt) > 5000:
            time.sleep(1.0)
        return slow_open(prompt, namespace)

    drafter.open = open_slowly
    with running(drafter, listen), Stream(listen) as slow, Stream(listen) as quick:
        quick.ask(open_(1, [1]))
        slow.post(1, open_(1, [1] * 6000), draft(1))
        time.sleep(0.1)
        started = time.monotonic()
        for _ in range(20):
            quick.ask(draft(1))
        assert time.monotonic() - started < 0.7
        assert slow.read().trees[0].session_id == 1


def test_a_client_that_goes_away_during_a_long_open_leaves_nothing(listen):
    drafter = ScriptedDrafter()
    plain_open = drafter.open

    def open_slowly(prompt, namespace):
        time.sleep(0.3)
        return plain_open(prompt, namespace)

    drafter.open = open_slowly
    with running(drafter, listen) as server:
        with RawStream(listen) as stream:
            stream.post(1, open_(1, [1] * 6000))
            time.sleep(0.1)
        until(lambda: drafter.sessions and drafter.sessions[1].closed)
        assert len(server.service.table) == 0


def test_the_occasional_call(listen):
    drafter = ScriptedDrafter()
    with running(drafter, listen) as server, RawStream(listen) as stream:
        stream.ask(open_(1, [9]))
        reply = stream.stub.Step(pb.StepRequest(steps=[open_(1, [1, 2]), commit(1, 2, [3]), draft(1), draft(4)]))
        assert tokens_of(reply) == {1: expected(1, 2, 3)} and codes_of(reply) == {4: "UNKNOWN_SESSION"}
        until(lambda: drafter.sessions[2].closed)  # it ends with the call
        assert len(server.service.table) == 1


def test_info(listen):
    drafter = ScriptedDrafter(config=DraftConfig(vocab_size=64, max_nodes=16, tokenizer_fingerprint="abc"))
    with running(drafter, listen, max_sessions=5, idle_seconds=60), RawStream(listen) as stream:
        stream.ask(open_(1, [1]))
        stream.admin.LoadIndex(pb.LoadIndexRequest(path="/x.index"))
        info = stream.stub.GetInfo(pb.GetInfoRequest())
        assert (info.vocab_size, info.max_nodes, info.max_sessions, info.open_sessions) == (64, 16, 5, 1)
        assert (info.tokenizer_fingerprint, list(info.index_paths), info.idle_seconds) == ("abc", ["/x.index"], 60)
        assert info.version and info.max_message_bytes == 64 << 20


def test_administration(listen):
    drafter = ScriptedDrafter()
    with running(drafter, listen), RawStream(listen) as stream:
        admin = stream.admin
        admin.LoadIndex(pb.LoadIndexRequest(path="/a.index"))
        admin.LoadIndex(pb.LoadIndexRequest(path="/b.index"))
        admin.UnloadIndex(pb.UnloadIndexRequest(path="/a.index"))
        assert list(admin.ListIndexes(pb.ListIndexesRequest()).paths) == ["/b.index"]
        with pytest.raises(grpc.RpcError) as caught:
            admin.LoadIndex(pb.LoadIndexRequest(path="/missing.index"))
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "/missing.index: not an index" in caught.value.details()
        with pytest.raises(grpc.RpcError) as caught:
            admin.UnloadIndex(pb.UnloadIndexRequest(path="/other.index"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert caught.value.details() == "no index /other.index is open"
        admin.ForgetNamespace(pb.ForgetNamespaceRequest())
        assert drafter.log[-1] == ("forget", "default")


def test_tcp_on_loopback_serves_drafting_but_no_administration():
    with running(ScriptedDrafter(), "127.0.0.1:0") as server, RawStream(str(server.address)) as stream:
        assert server.address.port > 0
        assert tokens_of(stream.ask(open_(1, [1]), draft(1))) == {1: expected(1)}
        with pytest.raises(grpc.RpcError) as caught:
            stream.admin.ListIndexes(pb.ListIndexesRequest())
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_metrics(listen):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    from redraft.server.listen_address import ListenAddress

    metrics = ListenAddress.parse(f"127.0.0.1:{port}")
    with running(ScriptedDrafter(), listen, metrics=metrics), RawStream(listen) as stream:
        stream.ask(open_(1, [1, 2]), commit(1, 2, [3, 4]), draft(1))
        stream.ask(draft(1), commit(1, 9, []))
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines["redraft_sessions"] == "1.0"
    assert lines["redraft_steps_total"] == "2.0"
    assert lines["redraft_trees_total"] == "2.0"
    assert lines["redraft_drafted_nodes_total"] == "16.0"
    assert lines["redraft_committed_tokens_total"] == "2.0"
    assert lines['redraft_session_errors_total{code="position_mismatch"}'] == "1.0"
    assert lines['redraft_step_seconds_bucket{le="+Inf"}'] == "2.0"


def test_a_late_drafter_holds_up_its_own_stream_only_as_long_as_it_computes(listen):
    with running(ScriptedDrafter(late(0.05)), listen), RawStream(listen) as stream:
        started = time.monotonic()
        stream.ask(open_(1, [1]), draft(1))
        assert 0.05 <= time.monotonic() - started < 2
