"""The life of a draft server: listen, open and compile everything, serve, and end well.

The address is bound first, so that health checks are answered (NOT_SERVING) while indexes are opened and kernels are
compiled; only then do the health names "" and "redraft.v1.DraftingService" become SERVING. At the end the order is:
NOT_SERVING; every stream finishes the step it is at and is ended (clients go on by themselves); sessions are closed;
the drafter is closed last.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from redraft.retrieval.errors import import_extra
from redraft.server.drafting_service import AdminService, DraftingService
from redraft.server.listen_address import ListenAddress, ListenError
from redraft.server.metrics import serve_metrics
from redraft.server.plain_stream import serve_plain_streams
from redraft.server.session_table import SessionTable
from redraft.v1 import drafting_pb2_grpc as rpc

__all__ = ["DraftServer", "ServerSettings", "serve"]

_log = logging.getLogger("redraft.server")

_DRAIN_SECONDS = 5.0
_READINESS = "redraft.v1.DraftingService"


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a `DraftServer`.

    Attributes:
        listen: where to listen; TCP beyond loopback needs a certificate or `insecure`.
        max_sessions: most sessions at a time, over all streams.
        idle_seconds: a session unused for longer is closed, its output joins the memory.
        max_message_bytes: largest message received; a larger one ends its stream.
        metrics: where to serve Prometheus metrics, if anywhere.
        tls_cert, tls_key: PEM files; both or neither.
        insecure: allow TCP beyond loopback without TLS.
    """

    listen: ListenAddress
    max_sessions: int = 1024
    idle_seconds: float = 600.0
    max_message_bytes: int = 64 << 20
    metrics: ListenAddress | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions: wanted 1 or more, got {self.max_sessions}")
        if not self.idle_seconds > 0:
            raise ValueError(f"idle_seconds: wanted more than 0, got {self.idle_seconds}")
        if not 1 << 16 <= self.max_message_bytes < 2**31:  # a batch's drafts and proposals must fit
            raise ValueError(f"max_message_bytes: wanted 65536..2147483647, got {self.max_message_bytes}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("TLS needs both a certificate and a key, only one of them was given")
        if self.tls_cert is not None and self.listen.path is not None:
            raise ValueError(f"TLS is for TCP; {self.listen} is a Unix socket, where file permissions guard")
        if not (self.listen.private or self.tls_cert or self.insecure):
            raise ValueError(
                f"{self.listen} can be reached from other machines: give a TLS certificate and key,"
                " or say explicitly that it is to be insecure"
            )
        if self.metrics is not None and self.metrics.host is None:
            raise ValueError(f"metrics are served over HTTP: wanted HOST:PORT, got {self.metrics}")


@dataclass
class DraftServer:
    """One server. `make_drafter` is called once the address is ours: it may take its time and may raise."""

    make_drafter: Callable[[], object]
    settings: ServerSettings
    address: ListenAddress | None = None  # where it listens; with port 0 the port that was found
    service: DraftingService = field(init=False)
    _stop: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        table = SessionTable(self.settings.max_sessions, self.settings.idle_seconds)
        self.service = DraftingService(table, self.settings.max_message_bytes)

    def stop(self) -> None:
        """Ask the server to end; to be called in its event loop."""
        self._stop.set()

    async def run(self, on_ready: Callable[[DraftServer], None] = lambda server: None) -> None:
        """Serve until `stop`. `on_ready` is called once, when requests are answered.

        Raises ListenError if the address cannot be had, and whatever `make_drafter` raises.
        """
        with self.settings.listen.reserved():
            server, health = self._build()
            await self._set_health(health, "NOT_SERVING")
            await server.start()
            plain_streams = None
            sweeper = None
            stop_metrics = None
            try:
                if not await self._warm_up():
                    return
                plain_streams = await self._serve_plain_streams()
                if self.settings.metrics is not None:
                    stop_metrics = serve_metrics(self.settings.metrics, self.service)
                sweeper = asyncio.ensure_future(self.service.expire_idle_sessions())
                await self._set_health(health, "SERVING")
                on_ready(self)
                await self._stop.wait()
            finally:
                await self._set_health(health, "NOT_SERVING")
                if plain_streams is not None:
                    plain_streams.close()
                if sweeper is not None:
                    sweeper.cancel()
                await self.service.drain(_DRAIN_SECONDS)
                await server.stop(1.0)
                self.service.workers.shutdown()
                self.service.beside.shutdown()
                if stop_metrics is not None:
                    stop_metrics()
                if self.service.drafter is not None:
                    self.service.drafter.close()

    def _build(self):
        settings = self.settings
        options = [
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a rival
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # clients' keepalive pings are welcome
        ]
        server = grpc.aio.server(options=options)
        rpc.add_DraftingServiceServicer_to_server(self.service, server)
        if settings.listen.path is not None:
            rpc.add_AdminServiceServicer_to_server(AdminService(self.service), server)
        health = import_extra("grpc_health.v1.health", "server").aio.HealthServicer()
        import_extra("grpc_health.v1.health_pb2_grpc", "server").add_HealthServicer_to_server(health, server)
        self.address = self._bind(server)
        return server, health

    def _bind(self, server) -> ListenAddress:
        settings = self.settings
        try:
            if settings.tls_cert is not None:
                pair = (settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())
                port = server.add_secure_port(str(settings.listen), grpc.ssl_server_credentials([pair]))
            elif settings.listen.path is not None:
                with settings.listen.private_mode():
                    port = server.add_insecure_port(str(settings.listen))
            else:
                port = server.add_insecure_port(str(settings.listen))
        except RuntimeError as error:  # grpc's only word for every failure to bind
            raise ListenError(f"cannot listen on {settings.listen}: the address is in use or not ours") from error
        if settings.listen.path is not None:
            return settings.listen
        return ListenAddress(host=settings.listen.host, port=port)

    async def _serve_plain_streams(self) -> asyncio.Server | None:
        """Listen for streams without gRPC, where there is a path for them beside the server's own."""
        path = self.settings.listen.plain_path
        if path is None:
            if self.settings.listen.path is not None:
                _log.warning("no plain stream is served: the path of %s leaves no room for one", self.settings.listen)
            return None
        with self.settings.listen.private_mode():
            server = await serve_plain_streams(path, self.service)
        self.service.plain_socket = path.name
        return server

    async def _warm_up(self) -> bool:
        """Make the drafter and compile its kernels; False if the server was told to stop meanwhile."""
        await asyncio.sleep(0)  # let the health service answer its first callers
        warming = asyncio.ensure_future(self.service.run_in_worker(self._make_warm_drafter))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({warming, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not warming.done():
            _log.info("told to stop during warm-up: waiting for the compiler")
        drafter = await warming
        gc.collect()
        gc.freeze()  # what is loaded now stays: later collections need not look at it
        self.service.drafter = drafter
        return not self._stop.is_set()

    def _make_warm_drafter(self):
        drafter = self.make_drafter()
        drafter.warmup()
        return drafter

    async def _set_health(self, health, status: str) -> None:
        value = import_extra("grpc_health.v1.health_pb2", "server").HealthCheckResponse.ServingStatus.Value(status)
        for name in ("", _READINESS):
            await health.set(name, value)


def serve(
    make_drafter: Callable[[], object],
    settings: ServerSettings,
    on_ready: Callable[[DraftServer], None] = lambda server: None,
) -> None:
    """Run a server in this process until SIGTERM or SIGINT; returns when it has ended well."""

    async def main() -> None:
        server = DraftServer(make_drafter, settings)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        await server.run(on_ready)

    asyncio.run(main())
