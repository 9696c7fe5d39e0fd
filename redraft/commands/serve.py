"""Run the draft server: it holds the indexes and the memory, and answers every inference process beside it.

Each flag can also be set in the environment, as REDRAFT_ and its name in capitals: REDRAFT_LISTEN, REDRAFT_MAX_SESSIONS.
REDRAFT_INDEX may name several, separated by colons. A flag on the command line wins.

The server ends well on SIGTERM and SIGINT: running steps are finished, exit code 0.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

DEFAULT_LISTEN = "unix:/run/redraft.sock"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


# gRPC reads this when it is first imported. Without its event engine the thread that waits for an event also reads it from
# the socket, in place of being handed it by another: 50 us less on every round trip, measured in benchmarks/round_trip.py.
_POLLING = "-event_engine_client,-event_engine_listener"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags; the environment supplies their defaults."""
    os.environ.setdefault("GRPC_EXPERIMENTS", _POLLING)
    from redraft.retrieval.config import DraftConfig
    from redraft.server.draft_server import ServerSettings

    def add(flag: str, *, default=None, **options) -> None:
        parser.add_argument(flag, default=_environment(flag, default), **options)

    parser.add_argument(
        "--index",
        action="append",
        metavar="DIR",
        help="an index built by `redraft index build`, or a directory of several; may be given several times",
    )
    add("--successors", metavar="DIR", help="the model's table made by `redraft index build-successors`")
    add("--dense", metavar="DIR", help="a dense index of the model made by `redraft index build-dense`")
    add("--listen", default=DEFAULT_LISTEN, type=_address, metavar="ADDRESS", help="unix:PATH or HOST:PORT")
    add("--vocab-size", type=int, metavar="N", help="token ids are 0..N-1; without it any non-negative int32 is taken")
    add(
        "--max-nodes",
        type=int,
        default=DraftConfig.max_nodes,
        metavar="N",
        help="draft budget where a client names none",
    )
    add(
        "--memory-tokens",
        type=int,
        default=DraftConfig.memory_tokens,
        metavar="N",
        help="tokens of earlier outputs that each namespace remembers",
    )
    add(
        "--prompt-tokens",
        type=int,
        default=DraftConfig.prompt_tokens,
        metavar="N",
        help="tokens of earlier prompts that each namespace remembers beside them; 0: none",
    )
    add(
        "--max-sessions",
        type=int,
        default=ServerSettings.max_sessions,
        metavar="N",
        help="most sessions at a time, over all clients",
    )
    add(
        "--idle-seconds",
        type=float,
        default=ServerSettings.idle_seconds,
        metavar="S",
        help="close a session that was not used for so long; its output joins the memory",
    )
    add(
        "--max-message-mb",
        type=int,
        default=ServerSettings.max_message_bytes >> 20,
        metavar="MB",
        help="largest message received, in MiB",
    )
    add("--metrics", type=_address, metavar="HOST:PORT", help="serve Prometheus metrics there")
    add("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain, for TCP")
    add("--tls-key", type=Path, metavar="FILE", help="PEM private key, for TCP")
    parser.add_argument(
        "--insecure",
        action="store_true",
        default=_flag_set("--insecure", parser),
        help="allow TCP beyond loopback without TLS",
    )
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    from redraft.retrieval.config import DraftConfig
    from redraft.server.draft_server import ServerSettings, serve

    # Nothing is done yet when these fail: the flags were wrong, which is a matter of usage.
    try:
        settings = ServerSettings(
            listen=args.listen,
            max_sessions=args.max_sessions,
            idle_seconds=args.idle_seconds,
            max_message_bytes=args.max_message_mb << 20,
            metrics=args.metrics,
            tls_cert=args.tls_cert,
            tls_key=args.tls_key,
            insecure=args.insecure,
        )
        config = DraftConfig(
            vocab_size=args.vocab_size,
            max_nodes=args.max_nodes,
            memory_tokens=args.memory_tokens,
            prompt_tokens=args.prompt_tokens,
        )
    except ValueError as error:
        args.usage_error(str(error))
    indexes = args.index or [path for path in os.environ.get("REDRAFT_INDEX", "").split(os.pathsep) if path]

    def make_drafter():
        from redraft.retrieval.drafter import Drafter

        return Drafter(config, indexes=indexes, successors=args.successors, dense=args.dense)

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    serve(make_drafter, settings, on_ready=_announce)
    print("redraft has stopped", flush=True)
    return 0


def _announce(server) -> None:
    """Say that the server is ready, where, and with what."""
    config, paths = server.service.drafter.config, server.service.drafter.index_paths
    vocabulary = f"vocabulary {config.vocab_size}" if config.vocab_size else "any vocabulary"
    indexes = {0: "no index", 1: "1 index"}.get(len(paths), f"{len(paths)} indexes")
    if server.service.drafter.indexes.successors.path:
        indexes += " and a successor table"
    if server.service.drafter.dense is not None:
        indexes += f" and {len(server.service.drafter.dense):,} states"
    sessions = f"at most {server.settings.max_sessions} sessions"
    print(f"redraft is ready on {server.address} ({indexes}, {vocabulary}, {sessions})", flush=True)


def _address(text: str):
    from redraft.server.listen_address import ListenAddress

    try:
        return ListenAddress.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _variable(flag: str) -> str:
    return "REDRAFT_" + flag.removeprefix("--").replace("-", "_").upper()


def _environment(flag: str, default):
    """What the environment says of a flag, as text that argparse converts as it would the command line's."""
    text = os.environ.get(_variable(flag))
    return default if text is None else text


def _flag_set(flag: str, parser: argparse.ArgumentParser) -> bool:
    text = os.environ.get(_variable(flag), "").strip().lower()
    if text not in _TRUE + _FALSE:
        parser.error(f"{_variable(flag)}: wanted one of {', '.join(_TRUE + _FALSE[1:])}, got {text!r}")
    return text in _TRUE
