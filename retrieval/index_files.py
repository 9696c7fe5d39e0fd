"""What every index directory has, whatever it holds: a manifest, arrays in files, digests (`docs/index-format.md`).

Whatever is wrong raises IndexFormatError, which names the path, what was found and what was wanted.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from pathlib import Path

import numpy as np

from redraft import __version__
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.index_format import (
    BUCKETS,
    CONTEXT_EDGES,
    CONTEXTS,
    COUNTS,
    FORMAT,
    FORMAT_VERSIONS,
    KEYS,
    KINDS,
    MANIFEST,
    Progress,
)
from redraft.retrieval.index_writer import describe_file

__all__ = ["check_digests", "check_tokenizer", "open_arrays", "read_manifest"]

# Read in the background from opening on: where every search begins, a seventh of the index. The rest is read where it is
# touched, two megabytes at a time (`_advise`): with MADV_RANDOM the first 300 drafts took 4 seconds instead of 0.8.
_READ_AHEAD = (BUCKETS, KEYS, CONTEXTS, CONTEXT_EDGES)
_MANIFEST_TYPES = {"kind": str, "tokenizer": dict, "options": dict, "sources": list, "files": dict}


def read_manifest(path: str | os.PathLike) -> dict:
    """The manifest of the index at `path`, checked. Raises IndexFormatError."""
    path = Path(path)
    file = path / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IndexFormatError(
            f"{path}: {_what_is_there(path)}; wanted an index directory with {MANIFEST}, or a directory of such"
        ) from error
    except UnicodeDecodeError as error:
        raise IndexFormatError(f"{file}: not UTF-8 text ({error}); wanted a JSON object") from error
    try:
        manifest = json.loads(text)
    except json.JSONDecodeError as error:
        raise IndexFormatError(f"{file}: malformed JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise IndexFormatError(f'{file}: wanted a JSON object with "format": "{FORMAT}"')
    _check_version(path, manifest)
    _check_types(file, manifest, _MANIFEST_TYPES)
    if manifest["kind"] not in KINDS:
        raise IndexFormatError(f"{path}: kind {manifest['kind']!r}, wanted one of {', '.join(KINDS)}")
    _check_types(file, manifest, dict.fromkeys(COUNTS[manifest["kind"]], int))
    for name in KINDS[manifest["kind"]]:
        entry = manifest["files"].get(name)
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int):
            raise IndexFormatError(f'{file}: "files" lacks size and digest of {name}')
    return manifest


def _check_version(path: Path, manifest: dict) -> None:
    """That this redraft reads the version; a kind it does not know may be of any that it knows, and is refused later."""
    version, known = manifest.get("format_version"), FORMAT_VERSIONS
    readable = {known[manifest["kind"]]} if manifest.get("kind") in known else set(known.values())
    if version in readable:
        return
    wanted = " or ".join(map(str, sorted(readable)))
    newer = isinstance(version, int) and version > max(readable)
    raise IndexFormatError(
        f"{path}: format version {version!r}, this redraft ({__version__}) reads version {wanted} of this kind; "
        + ("upgrade redraft or rebuild the index" if newer else "rebuild the index")
    )


def _check_types(file: Path, manifest: dict, types: dict[str, type]) -> None:
    for key, wanted in types.items():
        if not isinstance(manifest.get(key), wanted):
            raise IndexFormatError(f'{file}: "{key}" is {manifest.get(key)!r}, wanted {wanted.__name__}')


def _what_is_there(path: Path) -> str:
    if path.is_dir():
        return "a directory without a manifest (not an index, or one that was never finished)"
    if path.exists():
        return "a file, not a directory"
    set_aside = sorted(path.parent.glob(f"{path.name}.old-*")) if path.parent.is_dir() else []
    return f"missing (its last version is at {set_aside[-1]}: rename it)" if set_aside else "missing"


def check_tokenizer(path: Path, manifest: dict, fingerprint: str | None) -> None:
    """Raise IndexFormatError unless the index was built with the tokenizer of this fingerprint (None: any)."""
    tokenizer = manifest["tokenizer"]
    if fingerprint is not None and tokenizer.get("fingerprint") != fingerprint:
        raise IndexFormatError(
            f"{path}: built with tokenizer {tokenizer.get('name')!r}, fingerprint {tokenizer.get('fingerprint')!r};"
            f" wanted fingerprint {fingerprint!r}: rebuild the index with the model's tokenizer"
        )


def open_arrays(path: Path, manifest: dict) -> dict[str, np.ndarray]:
    """Every file of the index, mapped read-only: {name: array}. Raises IndexFormatError."""
    return {
        name: _open_array(path / name, manifest["files"][name], dtype, row)
        for name, (dtype, row) in KINDS[manifest["kind"]].items()
    }


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
    mapped = np.memmap(file, wanted, "r", offset, shape)
    _advise(mapped._mmap, file.name)
    return np.asarray(mapped)


def _advise(mapped: mmap.mmap, name: str) -> None:
    """Tell the system how this file is read: everywhere, a few bytes at a place.

    A draft over 100M tokens touches 280 pages of 4 kB. In huge pages that is one page fault for each two megabytes instead of
    sixteen pages, and few look-ups of addresses: 65 microseconds a draft instead of 73, and the first 500 drafts after
    opening wait half as long. Where kernel or file system have none, the advice is refused or only reads ahead further.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    if name in _READ_AHEAD and hasattr(mapped, "madvise"):  # Windows has none
        mapped.madvise(mmap.MADV_WILLNEED)


def check_digests(path: Path, manifest: dict, progress: Progress) -> None:
    """Read every file of the index; raise IndexFormatError that names the first one whose digest is another."""
    files, names = manifest["files"], KINDS[manifest["kind"]]
    total, done = sum(files[name]["bytes"] for name in names), 0
    for name in names:
        found = describe_file(path / name, lambda n, base=done: progress("verifying", base + n, total))
        if found["sha256"] != files[name].get("sha256"):
            raise IndexFormatError(
                f"{path / name}: sha256 {found['sha256']}, the manifest wants {files[name].get('sha256')}: changed"
            )
        done += found["bytes"]
