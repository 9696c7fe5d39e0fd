"""The `redraft` command: one word per thing a user does, each in its own module under `redraft/commands/`.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 whoever read the output has gone (`redraft ... | head`).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from redraft import __version__
from redraft.retrieval.errors import RedraftError

__all__ = ["main"]

# command: what `redraft --help` says of it. The module redraft.commands.<command> has configure(parser) and run(args).
COMMANDS = {
    "index": "build, inspect and verify corpus indexes",
    "serve": "run the draft server",
    "generate": "let a model write, with drafting",
    "replay": "measure drafting on recorded outputs",
    "bench": "measure drafting with a real model",
}


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the layout of descriptions and states defaults, where there are any worth stating."""

    def _get_help_string(self, action):
        if action.default in (None, False, argparse.SUPPRESS) or action.default == []:
            return action.help
        return super()._get_help_string(action)


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The whole grammar; only the chosen command's module is imported, so that `redraft --help` is quick."""
    parser = argparse.ArgumentParser(
        prog="redraft",
        description="Drafts tokens for large language models without a draft model: same text, fewer forward passes.",
    )
    parser.add_argument("--version", action="version", version=f"redraft {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary, formatter_class=_HelpFormatter)
        if name == chosen:
            module = importlib.import_module(f"redraft.commands.{name}")
            if module.__doc__:
                sub.description = module.__doc__
            module.configure(sub)
            sub.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # here, where a broken pipe can be dealt with, and not at the interpreter's end
    except KeyboardInterrupt:  # while the command's module is imported, too, which takes seconds for some
        print("redraft: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The shell would say the same of a program that the signal has ended. What is left to write goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: list[str]) -> int:
    chosen = next((word for word in argv if word in COMMANDS), None)
    args = _parser(chosen).parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except BrokenPipeError:
        raise
    except (RedraftError, OSError, ValueError, TypeError) as error:
        print(f"redraft {args.command}: {error}", file=sys.stderr)
        return 1
