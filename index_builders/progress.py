"""What a long command says while it works: a bar on a terminal, else one line every few seconds, on stderr."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tqdm import tqdm

__all__ = ["Progress", "memory_in_use", "readable_bytes"]


def memory_in_use() -> int:
    """Resident memory of this process in bytes; 0 where the system does not say (no /proc)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def readable_bytes(count: float) -> str:
    """`1.5 GB` and the like, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


class Progress:
    """Reports phases one after the other and remembers how long each took.

    Attributes:
        seconds: phase name -> seconds so far.
    """

    def __init__(self, stream=None, quiet: bool = False, every: float = 5.0) -> None:
        self.stream = stream or sys.stderr
        self.quiet = quiet
        self.every = every
        self.seconds: dict[str, float] = {}

    def say(self, text: str) -> None:
        """One line, above the bar if there is one."""
        if not self.quiet:
            tqdm.write(text, file=self.stream)

    def warn(self, text: str) -> None:
        """One line, even where progress is not wanted."""
        tqdm.write(f"warning: {text}", file=self.stream)

    @contextmanager
    def phase(self, name: str, total: int, unit: str, first_tokens: int = 0):
        """Yields `report(done, documents=None, tokens=None)`; call it as often as you like, it draws seldom.

        `total` and `done` are counted in `unit`. Tokens up to `first_tokens` are not of this phase's making.
        """
        started = time.monotonic()
        terminal = self.stream.isatty() and not self.quiet
        bar = tqdm(
            total=total or None,
            unit=unit,
            unit_scale=True,
            desc=name,
            file=self.stream,
            disable=not terminal,
            leave=False,
            mininterval=0.2,
        )
        last_line = started

        def report(done: int, documents: int | None = None, tokens: int | None = None) -> None:
            nonlocal last_line
            now = time.monotonic()
            if terminal:
                bar.set_postfix_str(_facts(now - started, documents, tokens, first_tokens), refresh=False)
                bar.update(done - bar.n)
            elif not self.quiet and now - last_line >= self.every:
                last_line = now
                share = f"{done / total:.0%}, " if total else ""
                print(
                    f"{name}: {share}{_facts(now - started, documents, tokens, first_tokens)}",
                    file=self.stream,
                    flush=True,
                )

        try:
            yield report
        finally:
            bar.close()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    @contextmanager
    def stages(self):
        """Yields `report(what, done, total)` for work that names its own phases, in bytes or anything else."""
        with ExitStack() as current:
            name, report_done = "", None

            def report(what: str, done: int, total: int) -> None:
                nonlocal name, report_done
                if what != name:
                    current.close()
                    name, report_done = what, current.enter_context(self.phase(what, total, ""))
                report_done(done)

            yield report


def _facts(seconds: float, documents: int | None, tokens: int | None, first_tokens: int) -> str:
    facts = []
    if documents is not None:
        facts.append(f"{documents:,} documents")
    if tokens is not None:
        facts.append(f"{tokens:,} tokens, {(tokens - first_tokens) / max(seconds, 1e-3):,.0f} tokens/s")
    facts.append(f"{readable_bytes(memory_in_use())} memory")
    return ", ".join(facts)
