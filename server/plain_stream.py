"""`Decode` without gRPC: the same messages over a Unix socket of their own, each with its size before it.

What a step costs beside its work is mostly threads that wake each other: gRPC for Python has two on the server's side of
every message and two on the client's. Here a message wakes the event loop, and its reply the client's own thread. A
round trip takes about half the time (`benchmarks/round_trip.py` has both), and an engine in another language needs nothing
but a socket and protobuf. All else (health, information, administration, TCP, TLS) is gRPC's business.

The socket lies beside the server's, under the same lock and with the same permissions; `GetInfo` tells its name.
docs/protocol.md, The plain stream, is the specification.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from google.protobuf.message import DecodeError

from redraft.server.drafting_service import DraftingService
from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import FRAME, framed

__all__ = ["serve_plain_streams"]

_log = logging.getLogger("redraft.server")

_BUFFER_BYTES = 1 << 20  # read ahead of the message at hand; twice as much, and the client has to wait


async def serve_plain_streams(path: Path, service: DraftingService) -> asyncio.Server:
    """Listen at `path` and answer every stream as `service.Decode` does, until the server returned is closed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = _PlainStream(reader, writer, service.max_message_bytes)
        try:
            await service.serve_stream(stream.read, stream.write)
        except ConnectionError:
            pass  # the client went away and left a reply unread
        finally:
            writer.close()

    return await asyncio.start_unix_server(serve, path, limit=_BUFFER_BYTES)


class _PlainStream:
    """One client's stream, message by message."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_message_bytes: int) -> None:
        self._reader, self._writer, self._max_message_bytes = reader, writer, max_message_bytes

    async def read(self):
        """The next DecodeRequest; None where the stream ends, or has to be ended as what comes is no message."""
        try:
            (size,) = FRAME.unpack(await self._reader.readexactly(FRAME.size))
            if size > self._max_message_bytes:
                return await self._refuse(f"wanted messages of at most {self._max_message_bytes} bytes, got {size}")
            data = await self._reader.readexactly(size)
        except asyncio.IncompleteReadError:
            return None
        try:
            return pb.DecodeRequest.FromString(data)
        except DecodeError:
            return await self._refuse(f"wanted a DecodeRequest, got {size} bytes that are none")

    async def write(self, reply) -> None:
        self._writer.write(framed(reply))
        await self._writer.drain()
        await asyncio.sleep(0)  # other streams' turn, even where this one's next messages lie here already

    async def _refuse(self, text: str) -> None:
        """Say why the stream ends: in an error of no session, in answer to no step."""
        _log.warning("a plain stream is ended: %s", text)
        error = pb.SessionError(code=pb.SESSION_ERROR_CODE_INVALID_ARGUMENT, message=text)
        await self.write(pb.DecodeResponse(errors=[error]))
