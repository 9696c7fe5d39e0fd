"""Index directories: how a corpus structure is stored and opened in place (`docs/index-format.md`).

Opening maps the files and reads no more than their headers, so it takes as long for a billion tokens as for ten (the
system is asked to read a suffix array's keys in the background), and all processes of a host share the pages. Whatever is wrong with a directory raises IndexFormatError, which names the
path, what was found and what was wanted. Writing is in `index_writer`,
reading all of it in `index_verification`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from redraft.retrieval import frequent_contexts
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.frozen_automaton import (
    EDGE_START,
    FIRST_END,
    FrozenAutomaton,
    as_frozen,
    freeze,
    frozen_walk,
)
from redraft.retrieval.index_files import check_tokenizer, open_arrays, read_manifest
from redraft.retrieval.index_format import (
    BUCKETS,
    CONTEXT_EDGES,
    CONTEXTS,
    CORPUS_KINDS,
    DENSE,
    DOCUMENT_ENDS,
    EDGES,
    KEYS,
    KINDS,
    MANIFEST,
    STATES,
    SUCCESSORS,
    SUFFIXES,
    TEXT,
    TOKENS,
    Progress,
    no_progress,
)
from redraft.retrieval.index_writer import IndexWriter
from redraft.retrieval.suffix_array import (
    SuffixArray,
    Text,
    array_first,
    array_sizes,
    as_suffix_array,
)
from redraft.retrieval.suffix_array_build import array_words, build_suffix_array
from redraft.retrieval.suffix_array_cursor import find
from redraft.retrieval.suffix_automaton import SuffixAutomaton

__all__ = [
    "CorpusIndex",
    "index_folders",
    "open_index",
    "open_indexes",
    "warm_lookups",
    "write_array_index",
    "write_automaton_index",
]


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
    progress = progress or no_progress
    with IndexWriter(path, kind="suffix_automaton", force=force) as writer:
        progress("freezing", 0, automaton.n_tokens)
        writer.write(TOKENS, automaton.tokens)
        writer.write(DOCUMENT_ENDS, automaton.document_ends)
        states = writer.create(STATES, automaton.n_states + 1)
        edges = writer.create(EDGES, automaton.n_edges)
        freeze(automaton, FrozenAutomaton(states, edges))
        progress("freezing", automaton.n_tokens, automaton.n_tokens)
        counts = _counts(automaton.tokens, automaton.document_ends)
        writer.publish(counts=counts, tokenizer=tokenizer, options=options, sources=sources, progress=progress)


def write_array_index(
    path: str | os.PathLike,
    tokens: np.ndarray,
    document_ends: np.ndarray,
    *,
    tokenizer: dict,
    options: dict,
    sources: list,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Sort `tokens` (int32[n], documents laid end to end, ending at document_ends) and write a suffix array index.

    The rest is as for `write_automaton_index`. `tokens` may be mapped from a file; beside it, sorting takes nine bytes
    per token of memory, and the mapped output.
    """
    counts = _counts(tokens, document_ends)
    with IndexWriter(path, kind="suffix_array", force=force) as writer:
        writer.write(DOCUMENT_ENDS, document_ends)
        build_suffix_array(tokens, document_ends, lambda name, rows: writer.create(f"{name}.npy", rows), progress)
        writer.publish(counts=counts, tokenizer=tokenizer, options=options, sources=sources, progress=progress)


def _counts(tokens: np.ndarray, document_ends: np.ndarray) -> dict[str, int]:
    """What the manifest states of a corpus."""
    return {"documents": len(document_ends), "tokens": len(tokens), "max_token": tokens.max(initial=-1)}


class CorpusIndex:
    """An open index. Read-only and safe to share between threads; `close` lets go of the mapped files.

    Attributes:
        path: where it was opened.
        manifest: the parsed manifest.
        tokens: int32[n], all documents laid end to end; of a suffix array a `Text`, which is read like one.
        document_ends: int64[documents], where each ends in `tokens`.
        automaton: FrozenAutomaton, for kind "suffix_automaton"; else None.
        array: SuffixArray, for kind "suffix_array"; else None.
    """

    def __init__(self, path: Path, manifest: dict, arrays: dict[str, np.ndarray]) -> None:
        self.path, self.manifest = path, manifest
        self.document_ends = arrays[DOCUMENT_ENDS]
        self.automaton: FrozenAutomaton | None = None
        self.array: SuffixArray | None = None
        if self.kind == "suffix_automaton":
            self.tokens: np.ndarray | Text = arrays[TOKENS]
            self.automaton = as_frozen(arrays[STATES], arrays[EDGES])
        else:
            sizes = array_sizes(manifest["tokens"], manifest["max_token"])
            files = TEXT, SUFFIXES, KEYS, BUCKETS, CONTEXTS, CONTEXT_EDGES
            self.array = as_suffix_array(*(arrays[name] for name in files), sizes)
            self.tokens = Text(self.array)

    @property
    def kind(self) -> str:
        return self.manifest["kind"]

    @property
    def tokens_sha256(self) -> str:
        """Digest of the file that holds the tokens."""
        return self.manifest["files"][TOKENS if self.automaton is not None else TEXT]["sha256"]

    def documents(self) -> Iterator[np.ndarray]:
        """The tokens of every document."""
        begin = 0
        for end in self.document_ends.tolist():
            yield self.tokens[begin:end]
            begin = end

    def locate(self, position: int) -> tuple[int, int]:
        """(document, offset in it) of a position in `tokens`. Raises IndexError outside the corpus."""
        if not 0 <= position < len(self.tokens):
            raise IndexError(f"position {position} is outside the {len(self.tokens)} tokens of {self.path}")
        document = int(np.searchsorted(self.document_ends, position, side="right"))
        start = int(self.document_ends[document - 1]) if document else 0
        return document, int(position) - start

    def first_occurrence(self, passage: np.ndarray) -> tuple[int, int]:
        """(position, length) of the longest suffix of `passage` (int32[n > 0]) that occurs; (-1, 0) if none does.

        The position is that of its last token where it occurs first. A suffix array reads all rows of the passage for
        that: four bytes or less for each time that it occurs.
        """
        if self.automaton is not None:
            state, length = frozen_walk(self.automaton, passage, len(passage))
            return int(self.automaton.states[state, FIRST_END]), int(length)
        low, high, length, _ = find(self.array, passage, len(passage))
        return (int(array_first(self.array, low, high)) + length - 1, length) if length else (-1, 0)

    def close(self) -> None:
        """Let go of the files; what still holds one of the arrays keeps it mapped."""
        self.tokens = self.document_ends = self.automaton = self.array = None

    def __enter__(self) -> CorpusIndex:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def open_index(
    path: str | os.PathLike, *, tokenizer_fingerprint: str | None = None, vocab_size: int | None = None
) -> CorpusIndex:
    """Open an index in place.

    tokenizer_fingerprint: the index must have been built with it (None: any). vocab_size: its ids must lie below.
    Raises IndexFormatError if the directory is not an index that this version reads, is incomplete, or does not fit.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if manifest["kind"] not in CORPUS_KINDS:
        what = {SUCCESSORS: "a model's successor table", DENSE: "a dense index"}[manifest["kind"]]
        raise IndexFormatError(f"{path}: {what}, wanted an index of a corpus")
    check_tokenizer(path, manifest, tokenizer_fingerprint)
    if vocab_size is not None and manifest["max_token"] >= vocab_size:
        raise IndexFormatError(
            f"{path}: holds token id {manifest['max_token']}, wanted ids below the vocabulary size {vocab_size}:"
            " was it built with another tokenizer?"
        )
    arrays = open_arrays(path, manifest)
    _check_lengths(path, manifest, arrays)
    return CorpusIndex(path, manifest, arrays)


def open_indexes(
    path: str | os.PathLike, *, tokenizer_fingerprint: str | None = None, vocab_size: int | None = None
) -> list[CorpusIndex]:
    """The index at `path`, or all indexes in the directory `path`, in order of name (numbers count as numbers).

    The rest is as for `open_index`.
    """
    wanted = {"tokenizer_fingerprint": tokenizer_fingerprint, "vocab_size": vocab_size}
    return [open_index(folder, **wanted) for folder in index_folders(path)]


def index_folders(*paths: str | os.PathLike) -> list[Path]:
    """Every path itself, or the folders in it if it is a directory of indexes, in order of name (numbers count as numbers).

    Every one of these must be an index, hidden ones apart: what a build left behind is an error, for a shard might be
    missing. Raises IndexFormatError. One that is named twice, itself and by its directory say, is one.
    """
    found: dict[str, Path] = {}
    for path in paths:
        for folder in _folders_at(Path(path)):
            found.setdefault(os.path.realpath(folder), folder)
    return list(found.values())


def _folders_at(path: Path) -> list[Path]:
    folders = [folder for folder in path.iterdir() if folder.is_dir()] if path.is_dir() else []
    folders = sorted((folder for folder in folders if not folder.name.startswith(".")), key=_shard_order)
    if (path / MANIFEST).exists() or not folders:
        folders = [path]
    for folder in folders:
        if folder != path and re.search(r"\.(work|tmp-\d+|old-\d+)$", folder.name):
            raise IndexFormatError(f"{folder}: left behind by a build; finish the build, or remove the folder")
    return folders


def _shard_order(folder: Path) -> list:
    """part-2 comes before part-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", folder.name)]


def warm_lookups() -> None:
    """Compile (or load) what `CorpusIndex.first_occurrence` runs, on corpora of one token."""
    for kind in CORPUS_KINDS:
        arrays = {name: np.zeros((2, *row), dtype) for name, (dtype, row) in KINDS[kind].items()}
        manifest = {"kind": kind, "tokens": 1, "max_token": 0}
        CorpusIndex(Path(), manifest, arrays).first_occurrence(np.zeros(1, np.int32))


def _check_lengths(path: Path, manifest: dict, arrays: dict[str, np.ndarray]) -> None:
    """The counts that the files and the manifest must agree on."""
    ends = arrays[DOCUMENT_ENDS]
    checks = [
        ("documents", len(ends), manifest["documents"]),
        ("end of the last document", int(ends[-1]) if len(ends) else 0, manifest["tokens"]),
    ]
    if manifest["kind"] == "suffix_automaton":
        states = arrays[STATES]
        checks.insert(0, ("tokens", len(arrays[TOKENS]), manifest["tokens"]))
        checks.append(("states, the last row included", max(2, len(states)), len(states)))
        checks.append(("edges", len(arrays[EDGES]), int(states[-1, EDGE_START]) if len(states) else 0))
    else:
        for name, words in array_words(array_sizes(manifest["tokens"], manifest["max_token"])).items():
            checks.append((f"words of {name} for {manifest['tokens']} tokens", len(arrays[f"{name}.npy"]), words))
        contexts = arrays[CONTEXTS]
        checks.append(("contexts, the last row included", max(2, len(contexts)), len(contexts)))
        edges = int(contexts[-1, frequent_contexts.EDGE_START]) if len(contexts) else 0
        checks.append(("edges of contexts", len(arrays[CONTEXT_EDGES]), edges))
    for what, found, wanted in checks:
        if found != wanted:
            raise IndexFormatError(f"{path}: {what}: found {found}, wanted {wanted}")
