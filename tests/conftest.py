"""Kernels compiled by tests are dropped when the engine under them is newer, as `redraft.retrieval.kernel` does for
its own: Numba itself does not notice that a called function has changed."""

from __future__ import annotations

from pathlib import Path

from redraft.retrieval import kernel


def pytest_configure():
    engine = Path(kernel.__file__).resolve().parent
    newest = max(source.stat().st_mtime for source in engine.rglob("*.py"))
    for compiled in Path(__file__).parent.glob("__pycache__/*.nbi"):
        if compiled.stat().st_mtime < newest:
            compiled.unlink(missing_ok=True)
