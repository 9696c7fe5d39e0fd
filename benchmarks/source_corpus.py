"""Source files as token arrays: real text in any amount, without a download."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from redraft.index_builders.tokenizers import Tokenizer, load_tokenizer

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


def python_source(
    tokenizer: str | Path, wanted: int, roots: list[Path] | None = None, kept: Path | None = None
) -> list[np.ndarray]:
    """At most `wanted` tokens of Python files, one document a file.

    roots: where they lie (default: this interpreter's library and installed packages); exact copies are left out.
    kept: a .npz file that holds the result of the first call for those after it, which may want less: tokenizing takes
    longer than all else.
    """
    if kept is not None and kept.is_file():
        with np.load(kept) as arrays:
            ends = arrays["ends"][arrays["ends"] <= wanted]
            return np.split(arrays["tokens"][: ends[-1]], ends[:-1])
    documents = _tokenized(load_tokenizer(tokenizer), wanted, roots)
    if kept is not None:
        ends = np.cumsum([len(document) for document in documents])
        np.savez(kept, tokens=np.concatenate(documents), ends=ends)
    return documents


def _tokenized(tokenizer: Tokenizer, wanted: int, roots: list[Path] | None) -> list[np.ndarray]:
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
