"""Keeps a connection to the server, in a thread of its own: nobody's decode path ever waits for connecting.

While there is none it tries again, at the intervals of the circuit breaker; a stream that has owed an answer for too
long is given up, and so is a server that the client may not use.
"""

from __future__ import annotations

import logging
import threading

import grpc

from redraft.client.circuit_breaker import CircuitBreaker
from redraft.client.connection import Connection

__all__ = ["ConnectionKeeper"]

_log = logging.getLogger("redraft.client")

_HUNG_SECONDS = 10.0  # a stream without an answer for so long is given up
_CLOSE_SECONDS = 5.0


class ConnectionKeeper:
    """`current` is the connection in use, or None; `trouble` says why there is none; `connected` is set while there is.

    refuse(info): why a server that says `info` of itself may not be used, or None.
    on_connect(connection): called with the lock held, before anybody uses it. on_reply: as for `Connection`.
    """

    def __init__(
        self, target: str, credentials, lock: threading.Lock, breaker: CircuitBreaker, refuse, on_connect, on_reply
    ) -> None:
        self.current: Connection | None = None
        self.trouble = "not connected yet"
        self.connected = threading.Event()
        self._target, self._credentials, self._lock, self._breaker = target, credentials, lock, breaker
        self._refuse, self._on_connect, self._on_reply = refuse, on_connect, on_reply
        self._closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="redraft-client", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection, in order, and the thread."""
        with self._lock:
            self._closed = True
            connection, self.current = self.current, None
        self.connected.clear()
        self._wake.set()
        if connection is not None:
            connection.close()
        self._thread.join(_CLOSE_SECONDS)

    def _keep(self) -> None:
        while not self._closed:
            self._wake.clear()
            connection = self.current
            if connection is not None:
                if connection.overdue() > _HUNG_SECONDS:
                    connection.abort()
                self._wake.wait(_HUNG_SECONDS / 4)
            elif self._breaker.allows():
                self._connect()
            else:
                self._wake.wait(self._breaker.remaining())

    def _connect(self) -> None:
        try:
            connection = Connection(self._target, self._credentials, self._lock, self._on_reply, self._on_end)
        except grpc.RpcError as error:
            self.trouble = f"{error.code().name}: {error.details()}"
            self._breaker.failure()
            return
        refusal = self._refuse(connection.info)
        with self._lock:
            if refusal is None and connection.alive and not self._closed:
                self._on_connect(connection)
                self.current = connection
                self._breaker.try_now()
                self.connected.set()
                return
        if refusal is not None and refusal != self.trouble:
            _log.warning("the draft server at %s is not used: %s", self._target, refusal)
            self.trouble = refusal
        self._breaker.failure()
        connection.close()

    def _on_end(self, connection: Connection, reason: str) -> None:
        with self._lock:
            if self.current is not connection:
                return  # closed by ourselves
            self.current = None
            self.connected.clear()
            self._breaker.failure()
            self.trouble = reason
        _log.warning("lost the draft server at %s (%s): going on without it", self._target, reason)
        self._wake.set()
