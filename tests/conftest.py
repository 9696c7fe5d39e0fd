"""Kernels compiled by tests are dropped when the engine under them is newer, as `redraft.retrieval.kernel` does for
its own: Numba itself does not notice that a called function has changed. And where the suite was started as a background
job, whose Ctrl-C a shell turns off, it is turned on again: every process that a test starts would inherit it."""

from __future__ import annotations

import signal
from pathlib import Path

from redraft.retrieval import kernel


def pytest_configure():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = Path(kernel.__file__).resolve().parent
    newest = max(source.stat().st_mtime for source in engine.rglob("*.py"))
    for compiled in Path(__file__).parent.glob("__pycache__/*.nbi"):
        if compiled.stat().st_mtime < newest:
            compiled.unlink(missing_ok=True)
