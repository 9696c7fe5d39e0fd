"""Source files as token arrays: real text in any amount, without a download."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

__all__ = ["python_source"]

_BATCH = 512


def _files(roots: list[Path]) -> Iterator[str]:
    """The text of every Python file under `roots`, in order of path, each text once."""
    seen = set()
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if path.is_file():
                content = path.read_bytes()
                digest = hashlib.md5(content, usedforsecurity=False).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield content.decode("utf-8", errors="replace")


def python_source(tokenizer, wanted: int, roots: list[Path] | None = None) -> list[np.ndarray]:
    """At most `wanted` tokens of Python files, one document a file, from `roots` (default: this interpreter's library
    and installed packages). Exact copies are left out."""
    paths = sysconfig.get_paths()
    documents, total, batch = [], 0, []

    def encode() -> int:
        encoded = tokenizer.encode_batch(batch)
        documents.extend(encoded)
        batch.clear()
        return sum(map(len, encoded))

    for text in _files(roots or [Path(paths["stdlib"]), Path(paths["purelib"])]):
        batch.append(text)
        if len(batch) == _BATCH:
            total += encode()
            if total >= wanted:
                break
    total += encode()
    while total > wanted:
        total -= len(documents.pop())
    return documents
