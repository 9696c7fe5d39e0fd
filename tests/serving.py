"""Draft servers for tests: in a thread of this process, or in a process of their own that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc

from redraft.server.draft_server import DraftServer, ServerSettings
from redraft.server.listen_address import ListenAddress
from redraft.v1 import drafting_pb2 as pb
from redraft.v1 import drafting_pb2_grpc as rpc
from redraft.v1.wire import FRAME, framed

TESTS = Path(__file__).parent


@contextlib.contextmanager
def running(drafter, listen: str, *, wait: bool = True, **settings):
    """A server around `drafter` in a thread; yields the DraftServer. An error of the server is raised at the end."""
    ready, box = threading.Event(), {}

    async def main() -> None:
        server = DraftServer(lambda: drafter, ServerSettings(listen=ListenAddress.parse(listen), **settings))
        box.update(server=server, loop=asyncio.get_running_loop())
        if not wait:
            ready.set()
        await server.run(lambda server: ready.set())

    def work() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread below
            box["error"] = error
        finally:
            ready.set()

    thread = threading.Thread(target=work, name="server under test")
    thread.start()
    ready.wait(60)
    try:
        if "error" in box:
            raise box["error"]
        yield box["server"]
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended by itself
            box["loop"].call_soon_threadsafe(box["server"].stop)
        thread.join(30)
        assert not thread.is_alive()
    if "error" in box:
        raise box["error"]


class ServerProcess:
    """`redraft serve` in a process of its own.

    With `script` a scripted server instead (an expression of scripted_drafter.py); with `watch` a real one that tells
    at its end what was compiled after it was ready.
    """

    def __init__(self, listen: str, *arguments: str, script: str | None = None, watch: bool = False) -> None:
        self.listen = listen
        command = [sys.executable, "-m", "redraft", "serve", "--listen", listen, *arguments]
        if script is not None:
            command = [sys.executable, str(TESTS / "serving.py"), listen, script]
        elif watch:
            command = [sys.executable, str(TESTS / "test_server_drafter.py"), listen]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(300) and "is ready" in self.output, self.output

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if "is ready" in line:
                self._ready.set()
        self._ready.set()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(60)
        self._reader.join(5)
        return code

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error) -> None:
        if self.process.poll() is None:
            self.kill()


class RawStream:
    """A `Decode` stream without the client's kindness: messages are sent as they are."""

    def __init__(self, listen: str) -> None:
        import queue

        self.channel = grpc.insecure_channel(listen, [("grpc.use_local_subchannel_pool", 1)])
        self.stub = rpc.DraftingServiceStub(self.channel)
        self.admin = rpc.AdminServiceStub(self.channel)
        self._outgoing: queue.SimpleQueue = queue.SimpleQueue()
        self.call = self.stub.Decode(iter(self._outgoing.get, None))
        self._step = 0

    def ask(self, *steps: pb.SessionStep, **batches) -> pb.DecodeResponse:
        self._step += 1
        self._outgoing.put(pb.DecodeRequest(step=self._step, steps=steps, **batches))
        reply = next(self.call)
        assert reply.step == self._step
        return reply

    def post(self, step: int, *steps: pb.SessionStep) -> None:
        """Send a message; its reply is for `read`."""
        self._outgoing.put(pb.DecodeRequest(step=step, steps=steps))

    def read(self) -> pb.DecodeResponse:
        return next(self.call)

    def end(self) -> None:
        """End the stream in order."""
        self._outgoing.put(None)
        assert list(self.call) == []

    def close(self) -> None:
        self._outgoing.put(None)
        self.call.cancel()
        self.channel.close()

    def __enter__(self) -> RawStream:
        return self

    def __exit__(self, *error) -> None:
        self.close()


class RawPlainStream:
    """The same over the plain stream of a server at `unix:PATH`; `socket` for who wants to send something else."""

    def __init__(self, listen: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(listen.removeprefix("unix:") + ".plain")
        self._step = 0

    def ask(self, *steps: pb.SessionStep) -> pb.DecodeResponse:
        self._step += 1
        self.socket.sendall(framed(pb.DecodeRequest(step=self._step, steps=steps)))
        reply = self.read()
        assert reply.step == self._step
        return reply

    def post(self, step: int, *steps: pb.SessionStep) -> None:
        """Send a message; its reply is for `read`."""
        self.socket.sendall(framed(pb.DecodeRequest(step=step, steps=steps)))

    def read(self) -> pb.DecodeResponse | None:
        """The next reply; None at the end of the stream."""
        head = self._exactly(FRAME.size)
        return None if head is None else pb.DecodeResponse.FromString(self._exactly(*FRAME.unpack(head)))

    def _exactly(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            try:
                more = self.socket.recv(size - len(data))
            except ConnectionResetError:  # the server has ended the stream and left some of what we sent unread
                more = b""
            if not more:
                assert not data, "the stream ended within a message"
                return None
            data += more
        return data

    def end(self) -> None:
        """End the stream in order."""
        self.socket.shutdown(socket.SHUT_WR)
        assert self.read() is None

    def __enter__(self) -> RawPlainStream:
        return self

    def __exit__(self, *error) -> None:
        self.socket.close()


def until(condition, seconds: float = 10.0) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def main() -> None:
    """`serving.py LISTEN SCRIPT`: a scripted server."""
    import scripted_drafter

    from redraft.server.draft_server import serve

    listen, script = sys.argv[1:]
    drafter = scripted_drafter.ScriptedDrafter(eval(script, vars(scripted_drafter)))
    settings = ServerSettings(listen=ListenAddress.parse(listen))
    serve(lambda: drafter, settings, lambda server: print("the scripted server is ready", flush=True))


if __name__ == "__main__":
    main()
