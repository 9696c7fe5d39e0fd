"""What gRPC alone takes for a message and its reply: the floor under `round_trip.py`.

Messages of a decode step's size go over a stream like `Decode` to an asyncio server in a process of its own, which answers
without looking at them; the client sends and reads as `DraftClient` does, by a queue each way and a reading thread. Between
messages it works for as long as a benchmark's target model does, because a server that has just answered is still awake.
"""

from __future__ import annotations

import asyncio
import os
import queue
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


async def _serve(address: str) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Echo(),))
    server.add_insecure_port(address)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def round_trips(messages: int, **environment: str) -> np.ndarray:
    """Microseconds of each. `environment`: for the server's process; this one's own was read when gRPC was imported."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/bare.sock"
        command, environment = [sys.executable, __file__, address], {**os.environ, **environment}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
            try:
                assert server.stdout.readline() == "ready\n"
                return _ask(address, messages)
            finally:
                server.kill()


def _ask(address: str, messages: int) -> np.ndarray:
    sending, replies = queue.SimpleQueue(), queue.SimpleQueue()
    microseconds = []
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(METHOD)(iter(sending.get, None))

        def read() -> None:
            for reply in call:
                replies.put(reply)

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(messages):
            until = time.perf_counter() + PAUSE
            while time.perf_counter() < until:
                pass
            started = time.perf_counter()
            sending.put(REQUEST)
            assert replies.get(timeout=10.0) == REPLY
            microseconds.append((time.perf_counter() - started) * 1e6)
        sending.put(None)
        reader.join()
    return np.array(microseconds[messages // 10 :])


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
