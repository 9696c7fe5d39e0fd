"""What the server has done, for Prometheus, on a port of its own (`redraft serve --metrics HOST:PORT`).

Nothing is counted here: the numbers are read from the service's own `Activity` when Prometheus asks, so that metrics
cost the decode step nothing.
"""

from __future__ import annotations

from itertools import accumulate

from redraft.retrieval.errors import import_extra
from redraft.server.listen_address import ListenAddress, ListenError
from redraft.v1 import drafting_pb2 as pb

__all__ = ["serve_metrics"]


def serve_metrics(address: ListenAddress, service):
    """Serve `service`'s numbers on a thread; returns a function that stops it.

    Raises MissingExtraError without prometheus-client, ListenError if the address is taken.
    """
    prometheus = import_extra("prometheus_client", "server")
    registry = prometheus.CollectorRegistry()
    registry.register(_Collector(service))
    try:
        server, thread = prometheus.start_http_server(address.port, address.host, registry)
    except OSError as error:
        raise ListenError(f"cannot serve metrics on {address}: {error.strerror or error}") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


class _Collector:
    """Turns the service's state into metric families at each scrape."""

    def __init__(self, service) -> None:
        self._service = service

    def collect(self):
        core = import_extra("prometheus_client.core", "server")
        activity, table = self._service.activity, self._service.table
        yield core.GaugeMetricFamily("redraft_sessions", "Sessions open now.", len(table))
        for name, text, value in (
            ("redraft_steps", "Messages answered, each one decode step of a batch.", activity.messages),
            ("redraft_trees", "Draft trees returned.", activity.trees),
            ("redraft_drafted_nodes", "Nodes of all trees.", activity.nodes),
            ("redraft_committed_tokens", "Tokens committed by target models.", activity.committed_tokens),
            ("redraft_sessions_opened", "Sessions opened.", activity.opened),
            ("redraft_sessions_expired", "Sessions closed because they were idle.", activity.expired),
        ):
            yield core.CounterMetricFamily(name, text, value)
        errors = core.CounterMetricFamily("redraft_session_errors", "Errors of single sessions.", labels=["code"])
        for code, count in list(activity.errors.items()):
            name = pb.SessionErrorCode.Name(code).removeprefix("SESSION_ERROR_CODE_").lower()
            errors.add_metric([name], count)
        yield errors
        bounds = [*map(str, activity.SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(activity.by_seconds)))
        seconds = core.HistogramMetricFamily("redraft_step_seconds", "Time to answer one message.")
        seconds.add_metric([], buckets, activity.seconds)
        yield seconds
