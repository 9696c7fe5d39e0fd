"""Which structure a corpus gets, and writing it: the suffix automaton or the suffix array.

The automaton is several times quicker to ask and exact; the array takes a tenth of the space, on disk and while it is
built. So a corpus gets the automaton unless it is too large for that: beyond `AUTOMATON_TOKENS`, or beyond the memory
that the build may take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from redraft.index_builders.progress import Progress, memory_in_use, readable_bytes
from redraft.retrieval.index_directory import write_array_index, write_automaton_index
from redraft.retrieval.index_format import MANIFEST
from redraft.retrieval.suffix_automaton import SuffixAutomaton

__all__ = [
    "AUTOMATON_TOKENS",
    "BYTES_PER_TOKEN",
    "KINDS",
    "check_output",
    "choose_kind",
    "in_turn",
    "memory_needed",
    "write_index",
]

KINDS = ("suffix_automaton", "suffix_array")
AUTOMATON_TOKENS = 50_000_000  # 2.8 GB on disk

# Most memory that building takes for each token, the pages of the files that are being written included.
BYTES_PER_TOKEN = {"suffix_automaton": 145, "suffix_array": 24}

_APPENDED_AT_ONCE = 1 << 18


def check_output(output: Path, force: bool) -> None:
    """Raise FileExistsError for an output that will not be replaced, NotADirectoryError for one in a file; better before
    the work than after it."""
    folder = next(folder for folder in output.absolute().parents if folder.exists())
    if not folder.is_dir():
        raise NotADirectoryError(f"{output}: {folder} is a file, wanted a folder for the index to be made in")
    if not output.exists():
        return
    if not force:
        raise FileExistsError(f"{output} exists already: choose another name, or replace it with --force")
    if not (output.is_dir() and ((output / MANIFEST).is_file() or not any(output.iterdir()))):
        raise FileExistsError(f"{output} is not an index directory and is not replaced")


def memory_needed(tokens: int, kind: str | None) -> int:
    """Bytes this process will hold at its largest: what it holds now, and `kind` (or the smaller one) of `tokens`."""
    return memory_in_use() + tokens * BYTES_PER_TOKEN[kind or "suffix_array"]


def choose_kind(kind: str | None, tokens: int, memory_limit: int | None) -> str:
    """`kind`, or what suits so many tokens. Raises ValueError where building would take more than `memory_limit`."""
    if kind is None:
        fits = memory_limit is None or memory_needed(tokens, "suffix_automaton") <= memory_limit
        kind = "suffix_automaton" if fits and tokens <= AUTOMATON_TOKENS else "suffix_array"
    needed = memory_needed(tokens, kind)
    if memory_limit is not None and needed > memory_limit:
        raise ValueError(
            f"a {kind.replace('_', ' ')} of {tokens:,} tokens takes {readable_bytes(needed)} of memory to build,"
            f" the limit is {readable_bytes(memory_limit)}"
        )
    return kind


def in_turn(sequences: Iterable[Iterable[np.ndarray]]) -> Iterator[np.ndarray]:
    """The first document of every sequence, then the second of every one, and so on until all have ended."""
    running = [iter(sequence) for sequence in sequences]
    while running:
        ended = []
        for iterator in running:
            document = next(iterator, None)
            if document is None:
                ended.append(iterator)
            else:
                yield document
        running = [iterator for iterator in running if iterator not in ended]


def write_index(
    output: Path,
    documents: Iterable[np.ndarray],
    tokens: int,
    kind: str,
    progress: Progress,
    *,
    tokenizer: dict,
    options: dict,
    sources: list,
    force: bool,
) -> None:
    """Build `kind` from `documents` (int32 arrays with at most `tokens` ids in all) and write it to `output`."""
    record = {"tokenizer": tokenizer, "options": options, "sources": sources, "force": force}
    if kind == "suffix_automaton":
        automaton = _automaton_of(documents, tokens, progress)
        with progress.stages() as report:
            write_automaton_index(output, automaton, **record, progress=report)
    else:
        flat, ends = _laid_out(documents, tokens, progress)
        with progress.stages() as report:
            write_array_index(output, flat, ends, **record, progress=report)


def _automaton_of(documents: Iterable[np.ndarray], tokens: int, progress: Progress) -> SuffixAutomaton:
    automaton = SuffixAutomaton(capacity_hint=tokens)
    with progress.phase("building", tokens, "tokens") as report:
        for document in documents:
            for start in range(0, len(document), _APPENDED_AT_ONCE):
                automaton.append(document[start : start + _APPENDED_AT_ONCE])
                report(automaton.n_tokens, None, automaton.n_tokens)
            automaton.end_document()
    return automaton


def _laid_out(documents: Iterable[np.ndarray], tokens: int, progress: Progress) -> tuple[np.ndarray, np.ndarray]:
    """(int32 tokens of all documents end to end, int64 end of each)."""
    flat, ends, used = np.empty(tokens, np.int32), [], 0
    with progress.phase("gathering", tokens, "tokens") as report:
        for document in documents:
            flat[used : used + len(document)] = document
            used += len(document)
            ends.append(used)
            report(used, len(ends), used)
    return flat[:used], np.array(ends, np.int64)
