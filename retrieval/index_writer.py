"""Writes an index directory so that what was there before is never harmed (`docs/index-format.md`, "Writing").

Everything goes into a temporary directory beside the target, which takes the target's name only when it is complete
and on the disk. A target that is replaced is swapped with the new one in one step, so the name always leads to a
complete index; an exception, Ctrl-C included, removes the temporary directory and nothing else.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from redraft import __version__
from redraft.retrieval.index_format import (
    CORPUS_KINDS,
    COUNTS,
    FORMAT,
    FORMAT_VERSIONS,
    KINDS,
    MANIFEST,
    Progress,
    no_progress,
)

__all__ = ["IndexWriter", "describe_file"]


class IndexWriter:
    """Builds one index directory; a context manager that leaves either a complete index or what was there before.

    with IndexWriter(path, kind="suffix_automaton", force=False) as writer:
        writer.write("tokens.npy", tokens)
        states = writer.create("states.npy", n)         # a writable mapped array, filled in place
        writer.publish(counts={"documents": ..., ...}, tokenizer=..., options=..., sources=...)

    Raises FileExistsError if `path` exists and `force` is not set, or is set but `path` is not an index directory.
    """

    def __init__(self, path: str | os.PathLike, *, kind: str, force: bool = False) -> None:
        if kind not in KINDS:
            raise ValueError(f"index kind: wanted one of {', '.join(KINDS)}, got {kind!r}")
        self.path = Path(os.path.realpath(path))  # a link to a directory keeps leading to the index
        self.kind, self.force = kind, force
        self._temporary = self.path.with_name(f"{self.path.name}.tmp-{os.getpid()}")
        self._arrays: dict[str, np.ndarray] = {}

    def __enter__(self) -> IndexWriter:
        self._check_target()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._temporary.exists():  # a killed process had the same id
            shutil.rmtree(self._temporary)
        self._temporary.mkdir()
        return self

    def __exit__(self, *exception) -> None:
        self._arrays.clear()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _check_target(self) -> None:
        if not self.path.exists():
            return
        if not self.force:
            raise FileExistsError(f"{self.path} exists already: choose another name, or replace it with --force")
        replaceable = self.path.is_dir() and ((self.path / MANIFEST).is_file() or not any(self.path.iterdir()))
        if not replaceable:
            raise FileExistsError(f"{self.path} is not an index directory and is not replaced")

    def create(self, name: str, rows: int) -> np.ndarray:
        """A new array of the index with `rows` rows, mapped from its file, to be filled."""
        dtype, row = KINDS[self.kind][name]
        shape = (rows, *row)
        file = self._temporary / name
        if 0 in shape:  # an empty file part cannot be mapped
            np.save(file, np.empty(shape, dtype))
            self._arrays[name] = np.empty(shape, dtype)
        else:
            self._arrays[name] = np.lib.format.open_memmap(file, "w+", dtype, shape)
            with file.open("r+b") as stream:  # a full disk is an error here, and would kill the process later
                os.posix_fallocate(stream.fileno(), 0, file.stat().st_size)
        return self._arrays[name]

    def write(self, name: str, array: np.ndarray) -> None:
        self.create(name, len(array))[...] = array

    def publish(
        self, *, counts: dict, tokenizer: dict, options: dict, sources: list, progress: Progress | None = None
    ) -> None:
        """Flush everything, write the manifest and give the directory its name. `counts`: the numbers of `COUNTS`."""
        progress = progress or no_progress
        missing = [name for name in KINDS[self.kind] if name not in self._arrays]
        if missing:
            raise ValueError(f"{self.path}: {', '.join(missing)} was not written")
        counts = {name: int(counts[name]) for name in COUNTS[self.kind]}
        vocab_size = tokenizer.get("vocab_size")
        if self.kind in CORPUS_KINDS and vocab_size is not None and counts["max_token"] >= vocab_size:
            # (a model may have more ids than its tokenizer)
            raise ValueError(f"the corpus holds token id {counts['max_token']}, the tokenizer has {vocab_size} ids")
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSIONS[self.kind],
            "kind": self.kind,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "redraft_version": __version__,
            "tokenizer": {key: tokenizer.get(key) for key in ("fingerprint", "name", "vocab_size")},
            **counts,
            "options": options,
            "sources": sources,
        }
        json.dumps(manifest)  # what cannot be written fails before the long part
        for array in self._arrays.values():
            if isinstance(array, np.memmap):
                array.flush()
        total = sum((self._temporary / name).stat().st_size for name in KINDS[self.kind])
        files, done = {}, 0
        for name in KINDS[self.kind]:
            files[name] = describe_file(
                self._temporary / name, lambda n, base=done: progress("digests", base + n, total)
            )
            _sync(self._temporary / name)
            done += files[name]["bytes"]
        text = json.dumps(manifest | {"files": files}, indent=2, ensure_ascii=False) + "\n"
        (self._temporary / MANIFEST).write_text(text, encoding="utf-8")
        _sync(self._temporary / MANIFEST)
        _sync(self._temporary)
        self._take_name()
        _sync(self.path.parent)

    def _take_name(self) -> None:
        self._check_target()  # someone may have been faster
        if not self.path.exists():
            self._temporary.rename(self.path)
        elif not _exchange(self._temporary, self.path):
            old = self.path.with_name(f"{self.path.name}.old-{os.getpid()}")
            self.path.rename(old)
            self._temporary.rename(self.path)
            shutil.rmtree(old)


def describe_file(file: Path, progress: Callable[[int], None]) -> dict:
    """{"bytes", "sha256"} of a file, read in pieces."""
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
            size += len(piece)
            progress(size)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _sync(path: Path) -> None:
    """Have the file's content, or the directory's entries, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system or the file system has no such step."""
    at_fdcwd, rename_exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), rename_exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))
