"""A stream of `Decode` without gRPC: each message over a Unix socket, its size before it (docs/protocol.md, The plain stream).

The idea: no thread between the caller and the socket. Who sends writes to the socket; who waits for a reply reads from it,
one thread at a time, and takes in whatever comes, other callers' replies included. So a round trip wakes two threads, the
server's and the caller's, where gRPC for Python wakes six, and takes about half as long.

A thread beside them sleeps until the server hangs up, so that a lost server is noticed while nobody asks, and sends on what
did not fit into the socket at once: nobody who sends waits for that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import threading
import time
from collections import deque

from google.protobuf.message import DecodeError

from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import FRAME, framed

__all__ = ["PlainStream"]

_log = logging.getLogger("redraft.client")

_CONNECT_SECONDS = 2.0
_CLOSE_SECONDS = 0.5
_READ_BYTES = 1 << 18
_LARGEST_REPLY = 1 << 30  # bytes: what says it is larger is no reply
_HUNG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class PlainStream:
    """on_reply(reply) is called by whichever thread reads, replies in the order of the stream; on_end(reason) once."""

    def __init__(self, path: str, on_reply, on_end) -> None:
        """Connect. Raises OSError."""
        self._on_reply, self._on_end = on_reply, on_end
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(_CONNECT_SECONDS)
            self._socket.connect(path)
            self._wake_out, self._wake_in = os.pipe()
        except BaseException:
            self._socket.close()
            raise
        self._came = b""  # read, and not yet a whole message
        self._room = memoryview(bytearray(_READ_BYTES))
        self._turn = threading.Condition()
        self._somebody_reads = False
        self._sending = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._ended = False  # nothing more can come; set by who reads
        self._gone = False  # the socket is closed; set by the watcher with `_sending` held
        self._watcher = threading.Thread(target=self._watch, name="redraft-client-watcher", daemon=True)

    def start(self) -> None:
        """Begin to watch for the end."""
        self._watcher.start()

    def send(self, request) -> None:
        """Send a message, or have it sent once there is room; never blocks. What a stream that has ended is told is lost."""
        data = memoryview(framed(request))
        with self._sending:
            if self._gone:
                return
            try:
                if not self._unsent:
                    data = data[self._write(data) :]
                if data:
                    self._unsent.append(data)
                    os.write(self._wake_in, b"\0")
            except BaseException:  # Ctrl-C: nobody knows how much of the message has gone
                self.abort()
                raise

    def wait(self, reply: queue.SimpleQueue, seconds: float):
        """What `on_reply` or `on_end` puts into `reply`; raises queue.Empty when the seconds are over."""
        deadline = time.monotonic() + seconds
        while True:
            with self._turn:
                while self._somebody_reads and reply.empty():
                    if not self._turn.wait(deadline - time.monotonic()):
                        break
                left = deadline - time.monotonic()
                if not reply.empty() or left <= 0 or self._somebody_reads:
                    return reply.get_nowait()
                self._somebody_reads = True
            self._read_in_turn(left)

    def take_in(self) -> None:
        """Read what has come, unless somebody is reading."""
        with self._turn:
            if self._somebody_reads:
                return
            self._somebody_reads = True
        self._read_in_turn(0.0)

    def close(self) -> None:
        """End the stream in order, so that the server closes its sessions; waits a moment for that."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_CLOSE_SECONDS)
        self.abort()

    def abort(self) -> None:
        """End the stream without ceremony."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever reads is told, and so is the watcher

    # Reading: by the thread whose turn it is.

    def _read_in_turn(self, seconds: float) -> None:
        """Read once, waiting so long for something to come; then it is the others' turn."""
        try:
            self._read(seconds)
        except BaseException:  # Ctrl-C: what was read may be lost, and what follows would be misread
            self._end("reading was interrupted")
            raise
        finally:
            with self._turn:
                self._somebody_reads = False
                self._turn.notify_all()

    def _read(self, seconds: float) -> None:
        if self._ended:
            return
        try:
            self._socket.settimeout(seconds)
            n = self._socket.recv_into(self._room)
        except (TimeoutError, BlockingIOError):
            return
        except OSError as error:
            self._end(f"{type(error).__name__}: {error.strerror}")
            return
        if n == 0:
            self._end("the server ended the stream")
            return
        came = bytes(self._room[:n])
        try:
            self._came = self._take_messages(self._came + came if self._came else came)
        except DecodeError:
            self._end("what came is no message")

    def _take_messages(self, came: bytes) -> bytes:
        """Hand on every message that has come whole; returns the rest. Raises DecodeError."""
        begin = 0
        while len(came) - begin >= FRAME.size:
            (size,) = FRAME.unpack_from(came, begin)
            if size > _LARGEST_REPLY:
                raise DecodeError
            end = begin + FRAME.size + size
            if end > len(came):
                break
            reply = pb.DecodeResponse.FromString(came[begin + FRAME.size : end])
            begin = end
            self._on_reply(reply)
        return came[begin:]

    def _end(self, reason: str) -> None:
        self._ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._on_end(reason)

    # Sending, and the watcher.

    def _write(self, data: memoryview) -> int:
        """Bytes that went into the socket at once. `_sending` is held."""
        try:
            return os.write(self._socket.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # nobody is there to read it, which the watcher sees, too

    def _watch(self) -> None:
        """Until the server hangs up: send what is left as there is room. Then read what it still said, to the end."""
        while not self._ended:
            poll = select.poll()
            poll.register(self._wake_out, select.POLLIN)
            poll.register(self._socket, _HUNG_UP | (select.POLLOUT if self._unsent else 0))
            events = dict(poll.poll())
            if self._wake_out in events:
                os.read(self._wake_out, 1 << 16)
            seen = events.get(self._socket.fileno(), 0)
            if seen & _HUNG_UP:
                break
            if seen & select.POLLOUT:
                self._send_on()
        while not self._ended:
            self.take_in()
        with self._sending:
            self._gone = True
            self._socket.close()
            os.close(self._wake_out)
            os.close(self._wake_in)

    def _send_on(self) -> None:
        with self._sending:
            while self._unsent:
                sent = self._write(self._unsent[0])
                self._unsent[0] = self._unsent[0][sent:]
                if self._unsent[0]:
                    return
                self._unsent.popleft()
