"""Where the server listens, and the guards around it.

A Unix socket is the default: no port, and file permissions say who may ask. gRPC binds a socket path without asking
whether another server lives there and takes the path away from it silently, so a lock beside the socket is held for as
long as the server runs. The lock dies with its process, whatever killed it: a socket file that nobody holds is stale
and is replaced. The socket is made with mode 0600, by umask before it exists, not by chmod afterwards.

TCP is open to other machines unless the address is a loopback one, so it needs TLS or an explicit "insecure".
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from redraft.retrieval.errors import RedraftError

__all__ = ["ListenAddress", "ListenError"]

_LONGEST_SOCKET_PATH = 107  # bytes; sun_path of Linux less its closing zero


class ListenError(RedraftError):
    """The server cannot listen where it was told to."""


@dataclass(frozen=True)
class ListenAddress:
    """A parsed `unix:PATH` or `HOST:PORT`; exactly one of `path` and `host` is set."""

    path: Path | None = None
    host: str | None = None
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Raises ValueError that says what was wanted."""
        if text.startswith("unix:"):
            name = text.removeprefix("unix:")
            name = name.removeprefix("//") if name.startswith("///") else name
            if not name:
                raise ValueError("listen address: wanted unix:PATH, got an empty path")
            path = Path(os.path.abspath(name))
            if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
                raise ValueError(
                    f"listen address: a Unix socket's path may have {_LONGEST_SOCKET_PATH} bytes,"
                    f" {path} has {len(os.fsencode(path))}"
                )
            return cls(path=path)
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"listen address: wanted unix:PATH or HOST:PORT, got {text!r}")
        return cls(host=host, port=int(port))

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def private(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def plain_path(self) -> Path | None:
        """Where streams without gRPC are served, beside the socket; None for TCP, and where the path would be too long."""
        if self.path is None:
            return None
        path = self.path.with_name(self.path.name + ".plain")
        return path if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH else None

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Hold the address: raises ListenError if another server has it, makes room for ours otherwise.

        A TCP port needs no lock: the kernel refuses the second server.
        """
        if self.path is None:
            yield
            return
        lock = _lock(self.path)
        paths = [path for path in (self.path, self.plain_path) if path is not None]
        try:
            for path in paths:
                _refuse_foreign(path)
            try:
                yield
            finally:
                for path in paths:
                    path.unlink(missing_ok=True)
        finally:
            _lock_path(self.path).unlink(missing_ok=True)  # while it is still held
            os.close(lock)

    @contextlib.contextmanager
    def private_mode(self) -> Iterator[None]:
        """While this is held, the files that the process makes are for its own user alone."""
        old = os.umask(0o177)
        try:
            yield
        finally:
            os.umask(old)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _lock(path: Path) -> int:
    """Take the lock beside `path`; returns its file descriptor, which holds it until closed."""
    while True:
        try:
            lock = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ListenError(f"cannot listen on unix:{path}: {error.strerror} ({_lock_path(path)})") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(lock, 32).decode(errors="replace").strip()
            os.close(lock)
            raise ListenError(
                f"another redraft server (process {owner or 'unknown'}) is listening on unix:{path};"
                " stop it or choose another path"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(_lock_path(path))):
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
        os.close(lock)  # the server before us removed the file between our open and our lock: take the new one


def _refuse_foreign(path: Path) -> None:
    """Raise ListenError if `path` is a file that is no socket, or a socket on which some other program answers."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"cannot listen on unix:{path}: the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return  # nobody listens: left behind by a server that was killed
    raise ListenError(f"cannot listen on unix:{path}: another program is listening there")
