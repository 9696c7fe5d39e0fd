"""One connection: a channel, and a stream of `Decode` messages, plain where the server offers that, else over gRPC.

Messages are numbered; a reply belongs to the message whose number it carries. Somebody may wait for a reply, with a
deadline, or nobody may: then the reply is only looked through for errors. When the stream ends, everybody who waits is
told at once.

The lock is the client's. It is held while a message is put together and queued, so that the order of messages is the
order of the changes they speak of, and while a reply is taken in.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from dataclasses import dataclass, field

import grpc

from redraft.client.grpc_stream import GrpcStream
from redraft.client.plain_stream import PlainStream
from redraft.v1 import drafting_pb2 as pb
from redraft.v1 import drafting_pb2_grpc as rpc

__all__ = ["Connection", "Sent"]

_log = logging.getLogger("redraft.client")

_CONNECT_SECONDS = 2.0


@dataclass
class Sent:
    """A message on its way: whom it opened, when it left, and where its reply goes (None: the stream ended)."""

    step: int
    opened: list
    at: float = field(default_factory=time.monotonic)
    late: bool = False
    reply: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)


class Connection:
    """A live stream to one server. `seats` maps the ids used on this stream to the client's sessions.

    `on_reply(connection, sent, reply)` is called with the lock held, for every reply, by whichever thread reads it.
    `on_end(connection, reason)` is called once, when the stream has ended for whatever reason, without the lock.
    """

    def __init__(self, target: str, credentials, lock: threading.Lock, on_reply, on_end) -> None:
        """Connect; takes up to some seconds, so not to be called on anybody's decode path. Raises grpc.RpcError."""
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),  # a new connection does not inherit the last one's waiting times
        ]
        if not target.startswith("unix:"):
            options += [("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000)]
        self.seats: dict[int, object] = {}
        self.alive = True
        self._lock, self._on_reply, self._on_end = lock, on_reply, on_end
        self._waiting: dict[int, Sent] = {}
        self._late = 0
        self._opening = 0
        self._steps = 0
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options)
        try:
            self.drafting = rpc.DraftingServiceStub(self._channel)
            self.info = self.drafting.GetInfo(pb.GetInfoRequest(), timeout=_CONNECT_SECONDS)
            self.admin = rpc.AdminServiceStub(self._channel)
            self._stream = self._new_stream(target)
        except BaseException:
            self._channel.close()
            raise
        self._stream.start()

    def _new_stream(self, target: str) -> PlainStream | GrpcStream:
        if self.info.plain_socket and target.startswith("unix:"):
            folder, name = os.path.dirname(target.removeprefix("unix:")), os.path.basename(self.info.plain_socket)
            try:
                if "\0" in name:  # a socket's path would end there, and be another
                    raise OSError(f"{name!r} is no file's name")
                return PlainStream(os.path.join(folder, name), self._take_in, self._ended)
            except OSError as error:
                _log.warning("the plain stream beside %s cannot be had (%s): steps go over gRPC", target, error)
        return GrpcStream(self.drafting, self._take_in, self._ended)

    @property
    def behind(self) -> bool:
        """Whether the server owes the reply to a message that somebody gave up waiting for."""
        return self._late > 0

    @property
    def opening(self) -> bool:
        """Whether the server is still at sessions to be opened: everything behind them takes longer."""
        return self._opening > 0

    def send(self, request, opened: list) -> Sent:
        """Number a DecodeRequest and queue it; never blocks. The lock is held. `opened`: seats that it opens."""
        self._steps += 1
        request.step = self._steps
        sent = Sent(self._steps, opened)
        if not self.alive:
            sent.reply.put(None)
            return sent
        self._waiting[sent.step] = sent
        self._opening += bool(opened)
        self._stream.send(request)
        return sent

    def take_in(self) -> None:
        """Take in the replies that have come to messages nobody waits for. The lock is not held."""
        if self._waiting:
            self._stream.take_in()

    def wait(self, sent: Sent, seconds: float):
        """The reply to a message; None if the stream ended. Raises queue.Empty when the deadline passes."""
        try:
            return self._stream.wait(sent.reply, seconds)
        except queue.Empty:
            with self._lock:
                if sent.step in self._waiting:
                    sent.late = True
                    self._late += 1
                    raise
        return sent.reply.get_nowait()  # it came in the very moment

    def overdue(self) -> float:
        """For how many seconds the oldest message has been without a reply; 0 if there is none."""
        self.take_in()
        with self._lock:
            oldest = min((sent.at for sent in self._waiting.values()), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def close(self) -> None:
        """End the stream in order, so that the server closes its sessions; waits a moment for that."""
        self._stream.close()
        self._channel.close()

    def abort(self) -> None:
        """End the stream without ceremony."""
        self._stream.abort()
        self._channel.close()

    def _ended(self, reason: str) -> None:
        with self._lock:
            self.alive = False
            for sent in self._waiting.values():
                sent.reply.put(None)
            self._waiting.clear()
        self._on_end(self, reason)
        self._channel.close()

    def _take_in(self, reply) -> None:
        with self._lock:
            sent = self._waiting.pop(reply.step, None)
            if sent is None:
                return  # a number that we never sent, or sent once and had answered: not ours to act on
            self._opening -= bool(sent.opened)
            self._late -= sent.late
            self._on_reply(self, sent, reply)
            sent.reply.put(reply)  # with the lock held: who gives up waiting finds it either owed or there
