"""Where and when a record was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

__all__ = ["RECORDS", "provenance"]

RECORDS = Path(__file__).resolve().parent / "record"


def provenance(*packages: str) -> dict:
    """Date, commit, machine, and the versions of Python and of `packages`."""
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "numba", *packages)}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": f"{_processor()}, {os.cpu_count()} logical cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": versions,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=RECORDS.parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None
