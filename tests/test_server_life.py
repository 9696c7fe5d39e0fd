"""The server's life: addresses and their guards, warm-up before SERVING, SIGTERM, kill -9, `redraft serve`'s flags."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_drafter import ScriptedDrafter
from serving import TESTS, RawStream, ServerProcess, running, until
from test_server import draft, expected, open_, tokens_of

from redraft.retrieval.errors import IndexFormatError
from redraft.server.draft_server import ServerSettings
from redraft.server.listen_address import ListenAddress, ListenError
from redraft.v1 import drafting_pb2 as pb

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def listen(tmp_path):
    return f"unix:{tmp_path}/s"


def health(listen: str, service: str = ""):
    with grpc.insecure_channel(listen, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status


@pytest.mark.parametrize(
    ("text", "shown", "private"),
    [
        ("unix:/run/redraft.sock", "unix:/run/redraft.sock", True),
        ("unix:///run/redraft.sock", "unix:/run/redraft.sock", True),
        ("127.0.0.1:5000", "127.0.0.1:5000", True),
        ("localhost:5000", "localhost:5000", True),
        ("[::1]:5000", "[::1]:5000", True),
        ("0.0.0.0:5000", "0.0.0.0:5000", False),
        ("[::]:5000", "[::]:5000", False),
        ("example.org:5000", "example.org:5000", False),
    ],
)
def test_addresses(text, shown, private):
    address = ListenAddress.parse(text)
    assert (str(address), address.private) == (shown, private)


@pytest.mark.parametrize("text", ["", "unix:", "5000", ":5000", "host:", "host:x", "host:70000", "unix:/" + "x" * 107])
def test_addresses_that_are_none(text):
    with pytest.raises(ValueError, match="listen address"):
        ListenAddress.parse(text)


def test_tcp_beyond_loopback_needs_tls_or_a_word(tmp_path):
    everywhere = ListenAddress.parse("0.0.0.0:0")
    with pytest.raises(ValueError, match="can be reached from other machines"):
        ServerSettings(listen=everywhere)
    ServerSettings(listen=everywhere, insecure=True)
    with pytest.raises(ValueError, match="both a certificate and a key"):
        ServerSettings(listen=everywhere, tls_cert=tmp_path / "cert")


def test_the_socket_is_its_owners_alone(listen, tmp_path):
    with running(ScriptedDrafter(), listen):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []  # neither socket nor lock is left


def test_a_second_server_on_a_live_socket_is_refused_and_the_first_goes_on(listen):
    with running(ScriptedDrafter(), listen), RawStream(listen) as stream:
        stream.ask(open_(1, [1]))
        refused = pytest.raises(ListenError, match=rf"another redraft server \(process {os.getpid()}\) is listening on")
        with refused, running(ScriptedDrafter(), listen):
            pass
        assert tokens_of(stream.ask(draft(1))) == {1: expected(1)}
        with RawStream(listen) as newcomer:
            assert tokens_of(newcomer.ask(open_(1, [2]), draft(1))) == {1: expected(2)}


def test_a_second_server_on_a_tcp_port_is_refused():
    with running(ScriptedDrafter(), "127.0.0.1:0") as server:
        refused = pytest.raises(ListenError, match="in use")
        with refused, running(ScriptedDrafter(), str(server.address)):
            pass
        assert reachable(str(server.address))


def test_a_stale_socket_file_is_replaced_and_other_files_are_not(listen, tmp_path):
    path = tmp_path / "s"
    left_behind = socket.socket(socket.AF_UNIX)
    left_behind.bind(str(path))
    left_behind.close()
    with running(ScriptedDrafter(), listen), RawStream(listen) as stream:
        assert tokens_of(stream.ask(open_(1, [1]), draft(1))) == {1: expected(1)}
    path.write_text("precious")
    with pytest.raises(ListenError, match="is not a socket"), running(ScriptedDrafter(), listen):
        pass
    assert path.read_text() == "precious"


def test_another_programs_live_socket_is_left_alone(listen, tmp_path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        with pytest.raises(ListenError, match="another program is listening"), running(ScriptedDrafter(), listen):
            pass
        assert (tmp_path / "s").exists()


def test_serving_only_after_warm_up(listen):
    drafter = ScriptedDrafter(warmup_seconds=0.6)
    with running(drafter, listen, wait=False):
        until(lambda: reachable(listen))
        for name in ("", "redraft.v1.DraftingService"):
            assert health(listen, name) == NOT_SERVING
        with RawStream(listen) as stream:
            with pytest.raises(grpc.RpcError) as caught:
                stream.stub.GetInfo(pb.GetInfoRequest())
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.RpcError, match="still opening indexes"):
                stream.ask(open_(1, [1]))
        assert not drafter.warm.is_set()
        until(lambda: health(listen) == SERVING)
        assert drafter.warm.is_set()
        assert health(listen, "redraft.v1.DraftingService") == SERVING
    assert drafter.closed


def reachable(listen: str) -> bool:
    try:
        health(listen)
    except grpc.RpcError:
        return False
    return True


def test_a_drafter_that_cannot_be_made_ends_the_server(listen, tmp_path):
    drafter = ScriptedDrafter()

    def fail():
        raise IndexFormatError("my.index: cut short")

    drafter.warmup = fail
    with pytest.raises(IndexFormatError, match="cut short"), running(drafter, listen):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_well(listen, tmp_path, number):
    with ServerProcess(listen, script="late(0.3)") as server, RawStream(listen) as stream, RawStream(listen) as idle:
        idle.ask(open_(1, [1]))
        answers = []
        asking = threading.Thread(target=lambda: answers.append(stream.ask(open_(1, [1]), draft(1))))
        asking.start()
        time.sleep(0.1)
        server.process.send_signal(number)
        assert server.wait() == 0, server.output
        asking.join(5)
        assert tokens_of(answers[0]) == {1: expected(1)}  # the step it was at was finished
        assert list(idle.call) == [] and idle.call.code() == grpc.StatusCode.OK
    assert list(tmp_path.iterdir()) == []


def test_a_signal_during_warm_up_ends_the_server_well(listen):
    drafter = ScriptedDrafter(warmup_seconds=0.5)
    with running(drafter, listen, wait=False):
        until(lambda: reachable(listen))
    assert drafter.closed


def test_killed_and_started_again_on_the_same_socket(listen, tmp_path):
    with ServerProcess(listen, script="count_up") as server:
        server.kill()
    assert (tmp_path / "s").exists()
    with ServerProcess(listen, script="count_up"), RawStream(listen) as stream:
        assert tokens_of(stream.ask(open_(1, [1]), draft(1))) == {1: expected(1)}


def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "redraft", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_command_refuses_a_live_socket_with_exit_code_1(listen):
    with running(ScriptedDrafter(), listen):
        done = serve("--listen", listen)
    assert done.returncode == 1
    assert "another redraft server" in done.stderr and listen in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_refuses_what_it_cannot_open_with_exit_code_1(listen, tmp_path):
    done = serve("--listen", f"unix:{tmp_path}/nowhere/s")
    assert done.returncode == 1 and f"{tmp_path}/nowhere/s: No such file or directory" in done.stderr
    for arguments, environment in (
        (["--index", str(tmp_path / "no.index")], {}),
        ([], {"REDRAFT_INDEX": f"{tmp_path}/no.index:{tmp_path}/none.index"}),
    ):
        done = serve("--listen", listen, *arguments, **environment)
        assert done.returncode == 1 and f"{tmp_path}/no.index" in done.stderr
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_command_runs_grpc_without_its_event_engine_unless_told_otherwise():
    script = (
        "import argparse, os, sys; from redraft.commands import serve; assert 'grpc' not in sys.modules;"
        "serve.configure(argparse.ArgumentParser()); assert 'grpc' in sys.modules; print(os.environ['GRPC_EXPERIMENTS'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    for given, wanted in (({}, "-event_engine_client,-event_engine_listener"), ({"GRPC_EXPERIMENTS": ""}, "")):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env={**environment, **given}, check=True
        )
        assert done.stdout.strip() == wanted and "Unknown experiment" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        (["--listen", "nowhere"], {}, "wanted unix:PATH or HOST:PORT, got 'nowhere'"),
        ([], {"REDRAFT_LISTEN": "nowhere"}, "wanted unix:PATH or HOST:PORT, got 'nowhere'"),
        ([], {"REDRAFT_MAX_SESSIONS": "many"}, "invalid int value: 'many'"),
        ([], {"REDRAFT_INSECURE": "perhaps"}, "REDRAFT_INSECURE: wanted one of"),
        (["--listen", "0.0.0.0:5000"], {}, "can be reached from other machines"),
        (["--max-nodes", "0"], {}, "max_nodes: wanted 1..512, got 0"),
        (["--max-sessions", "0"], {}, "max_sessions: wanted 1 or more, got 0"),
        (["--listen", "127.0.0.1:5000", "--tls-cert", "x"], {}, "both a certificate and a key"),
    ],
)
def test_wrong_usage_has_exit_code_2(arguments, environment, text):
    done = serve(*arguments, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_the_example_of_the_protocol_page(listen):
    page = (TESTS.parent / "docs" / "protocol.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "unix:/run/redraft.sock" in example
    with running(ScriptedDrafter(), listen):
        names: dict = {}
        exec(example.replace("unix:/run/redraft.sock", listen), names)  # noqa: S102 - our own page
        assert names["tokens"].tolist() == expected(5, 6, 7, 5, 6, 7, 5)
        assert names["parents"][0] == -1 and not names["reply"].errors
        names["outgoing"].put(None)
