"""Index directories: how a corpus structure is written, opened in place and verified (`docs/index-format.md`).

Writing never harms what is there: everything goes into a temporary directory beside the target, which takes the
target's name only when it is complete and on the disk. Opening maps the files and reads no more than their headers, so
it takes as long for a billion tokens as for ten, and all processes of a host share the pages. Whatever is wrong with a
directory raises IndexFormatError, which names the path, what was found and what was wanted.
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
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.frozen_automaton import (
    EDGE_COLUMNS,
    EDGE_START,
    EDGE_TARGET,
    FIRST_END,
    LINK,
    STATE_COLUMNS,
    FrozenAutomaton,
    as_frozen,
    freeze,
)
from redraft.retrieval.suffix_automaton import SuffixAutomaton

__all__ = ["CorpusIndex", "IndexWriter", "open_index", "read_manifest", "verify_index", "write_automaton_index"]

FORMAT = "redraft-index"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"

Progress = Callable[[str, int, int], None]  # (what is being done, done, total)

# kind: {file name: (dtype, shape beyond the first axis)}, in the order of writing.
_COMMON = {"tokens.npy": (np.int32, ()), "document_ends.npy": (np.int64, ())}
KINDS = {
    "suffix_automaton": _COMMON
    | {"states.npy": (np.int32, (STATE_COLUMNS,)), "edges.npy": (np.int32, (EDGE_COLUMNS,))},
}

_MANIFEST_TYPES = {
    "kind": str, "tokenizer": dict, "documents": int, "tokens": int, "max_token": int,
    "options": dict, "sources": list, "files": dict,
}  # fmt: skip


def _no_progress(what: str, done: int, total: int) -> None:
    """Progress nobody watches."""


class IndexWriter:
    """Builds one index directory; a context manager that leaves either a complete index or what was there before.

    with IndexWriter(path, kind="suffix_automaton", force=False) as writer:
        writer.write("tokens.npy", tokens)
        states = writer.create("states.npy", (n, 5))      # a writable mapped array, filled in place
        writer.publish(tokenizer=..., options=..., sources=...)

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

    def create(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A new array of the index, mapped from its file, to be filled."""
        dtype, _ = KINDS[self.kind][name]
        file = self._temporary / name
        if 0 in shape:  # an empty file part cannot be mapped
            np.save(file, np.empty(shape, dtype))
            self._arrays[name] = np.empty(shape, dtype)
        else:
            self._arrays[name] = np.lib.format.open_memmap(file, "w+", np.dtype(dtype).newbyteorder("<"), shape)
        return self._arrays[name]

    def write(self, name: str, array: np.ndarray) -> None:
        self.create(name, array.shape)[...] = array

    def publish(self, *, tokenizer: dict, options: dict, sources: list, progress: Progress | None = None) -> None:
        """Flush everything, write the manifest and give the directory its name."""
        progress = progress or _no_progress
        missing = [name for name in KINDS[self.kind] if name not in self._arrays]
        if missing:
            raise ValueError(f"{self.path}: {', '.join(missing)} was not written")
        tokens, documents = self._arrays["tokens.npy"], len(self._arrays["document_ends.npy"])
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "redraft_version": __version__,
            "tokenizer": _checked_tokenizer(tokenizer, int(tokens.max(initial=-1))),
            "documents": documents,
            "tokens": len(tokens),
            "max_token": int(tokens.max(initial=-1)),
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
            files[name] = _described(self._temporary / name, lambda n, base=done: progress("digests", base + n, total))
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


def _checked_tokenizer(tokenizer: dict, max_token: int) -> dict:
    described = {key: tokenizer.get(key) for key in ("fingerprint", "name", "vocab_size")}
    vocab_size = described["vocab_size"]
    if vocab_size is not None and max_token >= vocab_size:
        raise ValueError(f"the corpus holds token id {max_token}, the tokenizer has {vocab_size} ids")
    return described


def _described(file: Path, progress: Callable[[int], None]) -> dict:
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


def write_automaton_index(
    path: str | os.PathLike,
    automaton: SuffixAutomaton,
    *,
    tokenizer: dict,
    options: dict,
    sources: list,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write `automaton` as an index directory.

    tokenizer: {"fingerprint": str | None, "name": str | None, "vocab_size": int | None}. options, sources: anything
    JSON can hold. Raises FileExistsError, OSError (disk full) and ValueError (an id outside the tokenizer's
    vocabulary); the target is then as it was before.
    """
    progress = progress or _no_progress
    with IndexWriter(path, kind="suffix_automaton", force=force) as writer:
        progress("freezing", 0, automaton.n_tokens)
        writer.write("tokens.npy", automaton.tokens)
        writer.write("document_ends.npy", automaton.document_ends)
        states = writer.create("states.npy", (automaton.n_states + 1, STATE_COLUMNS))
        edges = writer.create("edges.npy", (automaton.n_edges, EDGE_COLUMNS))
        freeze(automaton, FrozenAutomaton(states, edges))
        progress("freezing", automaton.n_tokens, automaton.n_tokens)
        writer.publish(tokenizer=tokenizer, options=options, sources=sources, progress=progress)


class CorpusIndex:
    """An open index. Read-only and safe to share between threads; `close` lets go of the mapped files.

    Attributes:
        path: where it was opened.
        manifest: the parsed manifest.
        tokens: int32[n], all documents laid end to end.
        document_ends: int64[documents], where each ends in `tokens`.
        automaton: FrozenAutomaton, for kind "suffix_automaton".
    """

    def __init__(self, path: Path, manifest: dict, arrays: dict[str, np.ndarray]) -> None:
        self.path, self.manifest = path, manifest
        self.tokens, self.document_ends = arrays["tokens.npy"], arrays["document_ends.npy"]
        self.automaton = as_frozen(arrays["states.npy"], arrays["edges.npy"])

    def locate(self, position: int) -> tuple[int, int]:
        """(document, offset in it) of a position in `tokens`. Raises IndexError outside the corpus."""
        if not 0 <= position < len(self.tokens):
            raise IndexError(f"position {position} is outside the {len(self.tokens)} tokens of {self.path}")
        document = int(np.searchsorted(self.document_ends, position, side="right"))
        start = int(self.document_ends[document - 1]) if document else 0
        return document, position - start

    def close(self) -> None:
        """Let go of the files; what still holds one of the arrays keeps it mapped."""
        self.tokens = self.document_ends = self.automaton = None

    def __enter__(self) -> CorpusIndex:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def read_manifest(path: str | os.PathLike) -> dict:
    """The manifest of the index at `path`, checked. Raises IndexFormatError."""
    path = Path(path)
    file = path / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IndexFormatError(f"{path}: {_what_is_there(path)}; wanted an index directory with {MANIFEST}") from error
    except UnicodeDecodeError as error:
        raise IndexFormatError(f"{file}: not UTF-8 text ({error}); wanted a JSON object") from error
    try:
        manifest = json.loads(text)
    except json.JSONDecodeError as error:
        raise IndexFormatError(f"{file}: malformed JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise IndexFormatError(f'{file}: wanted a JSON object with "format": "{FORMAT}"')
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        raise IndexFormatError(
            f"{path}: format version {version!r}, this redraft ({__version__}) reads version {FORMAT_VERSION}"
            + ("; upgrade redraft or rebuild the index" if newer else "")
        )
    for key, wanted in _MANIFEST_TYPES.items():
        if not isinstance(manifest.get(key), wanted):
            raise IndexFormatError(f'{file}: "{key}" is {manifest.get(key)!r}, wanted {wanted.__name__}')
    if manifest["kind"] not in KINDS:
        raise IndexFormatError(f"{path}: kind {manifest['kind']!r}, wanted one of {', '.join(KINDS)}")
    for name in KINDS[manifest["kind"]]:
        entry = manifest["files"].get(name)
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int):
            raise IndexFormatError(f'{file}: "files" lacks size and digest of {name}')
    return manifest


def _what_is_there(path: Path) -> str:
    if path.is_dir():
        return "a directory without a manifest (not an index, or one that was never finished)"
    if path.exists():
        return "a file, not a directory"
    set_aside = sorted(path.parent.glob(f"{path.name}.old-*")) if path.parent.is_dir() else []
    return f"missing (its last version is at {set_aside[-1]}: rename it)" if set_aside else "missing"


def _open_array(file: Path, entry: dict, dtype: type, row: tuple[int, ...]) -> np.ndarray:
    """Map one file read-only, after checking its size, data type and shape."""
    try:
        size = file.stat().st_size
    except FileNotFoundError as error:
        raise IndexFormatError(f"{file}: missing, wanted {entry['bytes']} bytes") from error
    if size != entry["bytes"]:
        raise IndexFormatError(f"{file}: {size} bytes, the manifest wants {entry['bytes']}: cut short or changed")
    try:
        with file.open("rb") as stream:
            version = np.lib.format.read_magic(stream)
            read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, fortran, found = read_header[version](stream)
            offset = stream.tell()
    except (ValueError, KeyError) as error:
        raise IndexFormatError(f"{file}: not a .npy file ({error})") from error
    wanted = np.dtype(dtype).newbyteorder("<")
    if found != wanted or fortran and len(shape) > 1 or len(shape) != 1 + len(row) or shape[1:] != row:
        raise IndexFormatError(f"{file}: {found}{shape}, wanted {wanted} with rows of shape {row}")
    if offset + int(np.prod(shape)) * wanted.itemsize != size:
        raise IndexFormatError(f"{file}: {size} bytes do not hold {found}{shape}")
    if 0 in shape:
        empty = np.empty(shape, wanted)
        empty.flags.writeable = False
        return empty
    return np.asarray(np.memmap(file, wanted, "r", offset, shape))


def open_index(
    path: str | os.PathLike, *, tokenizer_fingerprint: str | None = None, vocab_size: int | None = None
) -> CorpusIndex:
    """Open an index in place.

    tokenizer_fingerprint: the index must have been built with it (None: any). vocab_size: its ids must lie below.
    Raises IndexFormatError if the directory is not an index that this version reads, is incomplete, or does not fit.
    """
    path = Path(path)
    manifest = read_manifest(path)
    tokenizer = manifest["tokenizer"]
    if tokenizer_fingerprint is not None and tokenizer.get("fingerprint") != tokenizer_fingerprint:
        raise IndexFormatError(
            f"{path}: built with tokenizer {tokenizer.get('name')!r}, fingerprint {tokenizer.get('fingerprint')!r};"
            f" wanted fingerprint {tokenizer_fingerprint!r}: rebuild the index with the model's tokenizer"
        )
    if vocab_size is not None and manifest["max_token"] >= vocab_size:
        raise IndexFormatError(
            f"{path}: holds token id {manifest['max_token']}, wanted ids below the vocabulary size {vocab_size}:"
            " was it built with another tokenizer?"
        )
    arrays = {
        name: _open_array(path / name, manifest["files"][name], dtype, row)
        for name, (dtype, row) in KINDS[manifest["kind"]].items()
    }
    _check_lengths(path, manifest, arrays)
    return CorpusIndex(path, manifest, arrays)


def _check_lengths(path: Path, manifest: dict, arrays: dict[str, np.ndarray]) -> None:
    """The counts that the files and the manifest must agree on."""
    ends, states = arrays["document_ends.npy"], arrays["states.npy"]
    found = {
        "tokens": len(arrays["tokens.npy"]),
        "documents": len(ends),
        "end of the last document": int(ends[-1]) if len(ends) else 0,
        "states": len(states) if len(states) > 1 else None,
        "edges": len(arrays["edges.npy"]),
    }
    wanted = {
        "tokens": manifest["tokens"],
        "documents": manifest["documents"],
        "end of the last document": manifest["tokens"],
        "states": len(states),
        "edges": int(states[-1, EDGE_START]) if len(states) else None,
    }
    for what in found:
        if found[what] != wanted[what]:
            raise IndexFormatError(f"{path}: {what}: found {found[what]}, wanted {wanted[what]}")


def verify_index(path: str | os.PathLike, progress: Progress | None = None) -> dict:
    """Read the whole index at `path`: digests, and that every number in it lies where it may; returns the manifest.

    Raises IndexFormatError that names the first file that is wrong.
    """
    path, progress = Path(path), progress or _no_progress
    with open_index(path) as index:
        files = index.manifest["files"]
        total, done = sum(files[name]["bytes"] for name in KINDS[index.manifest["kind"]]), 0
        for name in KINDS[index.manifest["kind"]]:
            found = _described(path / name, lambda n, base=done: progress("verifying", base + n, total))
            if found["sha256"] != files[name].get("sha256"):
                raise IndexFormatError(
                    f"{path / name}: sha256 {found['sha256']}, the manifest wants {files[name].get('sha256')}: changed"
                )
            done += found["bytes"]
        _check_ranges(index)
        return index.manifest


def _check_ranges(index: CorpusIndex) -> None:
    """That no kernel can be led outside an array, whoever wrote the files."""
    n_tokens, (states, edges) = len(index.tokens), index.automaton
    n_states = len(states) - 1
    links, ends = states[:-1, LINK], index.document_ends
    checks = {
        "tokens.npy": n_tokens == 0 or index.tokens.min() >= 0 and index.tokens.max() == index.manifest["max_token"],
        "document_ends.npy": len(ends) == 0 or ends[0] >= 0 and (np.diff(ends) >= 0).all(),
        "states.npy": links[0] == -1
        and (links[1:] >= 0).all()
        and (links < n_states).all()
        and (np.diff(states[:, EDGE_START]) >= 0).all()
        and states[0, EDGE_START] == 0
        and (states[:, FIRST_END] < max(1, n_tokens)).all(),
        "edges.npy": len(edges) == 0 or edges[:, EDGE_TARGET].min() > 0 and edges[:, EDGE_TARGET].max() < n_states,
    }
    for name, holds in checks.items():
        if not holds:
            raise IndexFormatError(f"{index.path / name}: holds numbers outside the corpus or the automaton")
