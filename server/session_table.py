"""The sessions that the server holds: one `StreamSessions` per stream, a limit over all of them, idle expiry.

Ids are the clients' own, so they mean something only within their stream: two clients that both count from 1 never
meet. A stream that ends, however it ends, takes its sessions with it, so no lease is needed and nothing leaks. Sessions
that are taken out here are handed back to be closed by the caller, because closing teaches the memory and takes time.

The event loop and the worker threads both come here: the count has a lock. One stream is never worked on by two threads
at a time (`StreamSessions.busy`).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

__all__ = ["HeldSession", "SessionTable", "StreamSessions"]


@dataclass
class HeldSession:
    """A drafter's session, what it was opened with, and when it was last used (seconds, monotonic)."""

    session: object
    prompt_length: int
    last_used: float

    @property
    def output_length(self) -> int:
        """Tokens that closing will teach the memory."""
        return max(0, self.session.length - self.prompt_length)


class SessionTable:
    """All streams' sessions. `max_sessions` bounds their number, `idle_seconds` how long one may lie unused."""

    def __init__(self, max_sessions: int, idle_seconds: float, clock=time.monotonic) -> None:
        self.max_sessions = max_sessions
        self.idle_seconds = idle_seconds
        self.clock = clock
        self._streams: set[StreamSessions] = set()
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def new_stream(self) -> StreamSessions:
        stream = StreamSessions(self)
        self._streams.add(stream)
        return stream

    def end_stream(self, stream: StreamSessions) -> list[HeldSession]:
        """Forget a stream; returns its sessions, still to be closed."""
        self._streams.discard(stream)
        return [stream.remove(session_id) for session_id in list(stream.sessions)]

    def expire(self) -> list[HeldSession]:
        """Take out every session that was idle for too long; returns them, still to be closed."""
        latest = self.clock() - self.idle_seconds
        expired = []
        for stream in list(self._streams):
            if not stream.busy:
                idle = [session_id for session_id, held in stream.sessions.items() if held.last_used < latest]
                expired += [stream.remove(session_id) for session_id in idle]
        return expired

    def _take_place(self) -> bool:
        with self._lock:
            if self._count >= self.max_sessions:
                return False
            self._count += 1
            return True

    def _free_place(self) -> None:
        with self._lock:
            self._count -= 1


class StreamSessions:
    """The sessions of one stream, by the client's ids."""

    def __init__(self, table: SessionTable) -> None:
        self.table = table
        self.sessions: dict[int, HeldSession] = {}
        self.busy = False  # a worker thread is at it: the sweeper stays away

    def add(self, session_id: int, open_session) -> bool:
        """Keep what `open_session()` returns; False, without calling it, when the server is full."""
        if not self.table._take_place():
            return False
        try:
            session = open_session()
            self.sessions[session_id] = HeldSession(session, session.length, self.table.clock())
        except BaseException:
            self.table._free_place()
            raise
        return True

    def remove(self, session_id: int) -> HeldSession | None:
        """Take a session out; it is still to be closed. None if there is no such session."""
        held = self.sessions.pop(session_id, None)
        if held is not None:
            self.table._free_place()
        return held
