"""What a message and its reply take alone, over gRPC and over a plain Unix socket: the floors under `round_trip.py`.

Messages of a decode step's size go over a stream to an asyncio server in a process of its own, which answers without looking
at them; the client sends and reads as `DraftClient` does: over gRPC by a queue each way and a reading thread, over the plain
stream by itself. Between messages it works for as long as a benchmark's target model does, because a server that has just
answered is still awake.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time

import grpc
import numpy as np

__all__ = ["round_trips"]

REQUEST, REPLY = b"\1" * 330, b"\2" * 470
METHOD = "/bare.Bare/Stream"
PAUSE = 100e-6  # seconds


class _Echo(grpc.GenericRpcHandler):
    def service(self, details):
        async def answer(_, context):
            while await context.read() is not grpc.aio.EOF:
                await context.write(REPLY)

        return grpc.stream_stream_rpc_method_handler(answer)


async def _serve_grpc(path: str) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Echo(),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


async def _serve_plain(path: str) -> None:
    async def answer(reader, writer):
        while await reader.readexactly(len(REQUEST)):
            writer.write(REPLY)
            await writer.drain()

    server = await asyncio.start_unix_server(answer, path)
    print("ready", flush=True)
    await server.serve_forever()


def round_trips(kind: str, messages: int) -> np.ndarray:
    """Microseconds of each, over `kind` of stream, "grpc" or "plain"."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/bare.sock"
        command = [sys.executable, __file__, kind, path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout.readline() == "ready\n"
                return {"grpc": _over_grpc, "plain": _over_socket}[kind](path, messages)
            finally:
                server.kill()


def _over_grpc(path: str, messages: int) -> np.ndarray:
    sending, replies = queue.SimpleQueue(), queue.SimpleQueue()
    with grpc.insecure_channel(f"unix:{path}") as channel:
        call = channel.stream_stream(METHOD)(iter(sending.get, None))

        def read() -> None:
            for reply in call:
                replies.put(reply)

        reader = threading.Thread(target=read)
        reader.start()
        microseconds = _timed(messages, lambda: (sending.put(REQUEST), replies.get(timeout=10.0))[1])
        sending.put(None)
        reader.join()
    return microseconds


def _over_socket(path: str, messages: int) -> np.ndarray:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(10.0)
        stream.connect(path)
        return _timed(messages, lambda: (stream.send(REQUEST), stream.recv(1 << 16))[1])


def _timed(messages: int, ask) -> np.ndarray:
    """Microseconds of each but the first tenth."""
    microseconds = []
    for _ in range(messages):
        until = time.perf_counter() + PAUSE
        while time.perf_counter() < until:
            pass
        started = time.perf_counter()
        assert ask() == REPLY
        microseconds.append((time.perf_counter() - started) * 1e6)
    return np.array(microseconds[messages // 10 :])


if __name__ == "__main__":
    asyncio.run({"grpc": _serve_grpc, "plain": _serve_plain}[sys.argv[1]](sys.argv[2]))
