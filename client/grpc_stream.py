"""A stream of `Decode` over gRPC: for servers on TCP, with TLS or without, and those that offer no plain stream.

A message goes through two threads on its way out and two on its way in. On a Unix socket `plain_stream.py` is faster.
"""

from __future__ import annotations

import queue
import threading

import grpc

__all__ = ["GrpcStream"]

_CLOSE_SECONDS = 0.5


class GrpcStream:
    """on_reply(reply) and, once, on_end(reason) are called by the reading thread, replies in the order of the stream."""

    def __init__(self, drafting, on_reply, on_end) -> None:
        """drafting: a DraftingServiceStub. Returns at once; a stream that cannot be had has ended."""
        self._on_reply, self._on_end = on_reply, on_end
        self._outgoing: queue.SimpleQueue = queue.SimpleQueue()
        self._call = drafting.Decode(iter(self._outgoing.get, None))
        self._reader = threading.Thread(target=self._read, name="redraft-client-reader", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._reader.start()

    def send(self, request) -> None:
        """Queue a message; never blocks."""
        self._outgoing.put(request)

    def wait(self, reply: queue.SimpleQueue, seconds: float):
        """What `on_reply` or `on_end` puts into `reply`; raises queue.Empty when the seconds are over."""
        return reply.get(timeout=seconds)

    def take_in(self) -> None:
        """Read what has come: the reading thread does."""

    def close(self) -> None:
        """End the stream in order, so that the server closes its sessions; waits a moment for that."""
        self._outgoing.put(None)
        if threading.current_thread() is not self._reader:
            self._reader.join(_CLOSE_SECONDS)
        self.abort()

    def abort(self) -> None:
        """End the stream without ceremony."""
        self._call.cancel()

    def _read(self) -> None:
        reason = "the server ended the stream"
        try:
            for reply in self._call:
                self._on_reply(reply)
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        finally:
            self._outgoing.put(None)  # lets gRPC's sending thread go
            self._on_end(reason)
