"""A corpus becomes an index: list the files, tokenize, build the structure, write the directory.

Tokens go to a work folder (`my.index.work`) on the way, so that a build that was killed goes on with the part it was
in, and ends in the same bytes as one that was not. The index appears under its name complete or not at all, and an
index that was there before stays until then.
"""

from __future__ import annotations

import glob
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from redraft.index_builders.progress import Progress, readable_bytes
from redraft.index_builders.readers.documents import Tally
from redraft.index_builders.readers.sources import SourceFile, list_files
from redraft.index_builders.structures import check_output, choose_kind, write_index
from redraft.index_builders.token_parts import TokenParts
from redraft.index_builders.tokenizers import Tokenizer, load_tokenizer
from redraft.index_builders.tokenizing import BuildOptions, Counts, plan_of, recorded, tokenize, with_chat_template

__all__ = ["BuildOptions", "BuildSummary", "Corpus", "build_index", "open_corpus", "write_corpus"]


@dataclass(frozen=True)
class BuildSummary:
    """What a build did.

    Attributes:
        documents, tokens: in the index.
        duplicates: documents that were exact copies of earlier ones, dropped.
        bad_records, skipped_files, empty: see `Tally`.
        resumed_tokens: how many of the tokens came from an interrupted build.
        seconds: phase -> seconds.
        index_bytes: size of the index directory.
    """

    documents: int
    tokens: int
    duplicates: int
    bad_records: int
    skipped_files: int
    empty: int
    resumed_tokens: int
    seconds: dict[str, float]
    index_bytes: int


@dataclass(frozen=True)
class Corpus:
    """What a build starts from: the sources as they were named, their files, the tokenizer, options that fit it."""

    sources: list[str]
    files: list[SourceFile]
    tokenizer: Tokenizer
    options: BuildOptions


def build_index(
    sources: list[str],
    tokenizer: str | Path | Tokenizer,
    output: str | Path,
    options: BuildOptions | None = None,
    progress: Progress | None = None,
) -> BuildSummary:
    """Build the index directory `output` from `sources` (files, folders, patterns, `-`).

    Raises FileNotFoundError for a source that is not there, FileExistsError for an output that is (without
    `options.force`), ValueError for bad records, a corpus without documents, ids outside the vocabulary or a corpus
    beyond `options.memory_limit`, OSError when the disk is full. In every case an existing index is left as it was. What
    is tokenized already stays in `<output>.work`, from where the same call resumes.
    """
    output, progress = Path(output), progress or Progress(quiet=True)
    corpus = open_corpus(sources, tokenizer, output, options or BuildOptions(), progress)
    tally = Tally(warn=progress.warn)
    with TokenParts(
        output.with_name(output.name + ".work"), plan_of(corpus.files, corpus.tokenizer, corpus.options)
    ) as parts:
        try:
            resumed = parts.state["tokens"] if parts.state else 0
            counts = tokenize(corpus.files, corpus.tokenizer, corpus.options, parts, tally, progress)
            summary = write_corpus(corpus, parts.documents(), counts, tally, output, progress)
        except BaseException:
            if parts.state and parts.resumable:
                kept = parts.state["tokens"]
                progress.say(f"{kept:,} tokens are kept in {parts.folder}: the same command resumes there")
            raise
        parts.remove()
    return replace(summary, resumed_tokens=resumed)


def open_corpus(
    sources: list[str], tokenizer: str | Path | Tokenizer, output: Path, options: BuildOptions, progress: Progress
) -> Corpus:
    """List the files, load the tokenizer, make room for the output: whatever can fail at once fails here."""
    started = time.monotonic()
    check_output(output, options.force)
    files = list_files(sources, options.read)
    progress.say(f"{len(files):,} files, {readable_bytes(sum(file.size for file in files))}")
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    options = with_chat_template(options, tokenizer)
    output.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(output)
    progress.seconds["listing files, loading the tokenizer"] = time.monotonic() - started
    return Corpus(sources, files, tokenizer, options)


def write_corpus(
    corpus: Corpus, documents: Iterable[np.ndarray], counts: Counts, tally: Tally, output: Path, progress: Progress
) -> BuildSummary:
    """Write the index from its tokenized documents. Raises ValueError if there are none."""
    if counts.documents == 0:
        raise ValueError(_nothing_found(corpus, counts, tally))
    options = corpus.options
    try:
        write_index(
            output,
            documents,
            counts.tokens,
            choose_kind(options.kind, counts.tokens, options.memory_limit),
            progress,
            tokenizer=corpus.tokenizer.describe(),
            options=recorded(options),
            sources=[
                {"source": source, "documents": documents, "tokens": tokens}
                for source, (documents, tokens) in zip(corpus.sources, counts.by_source, strict=True)
            ],
            force=options.force,
        )
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(output)  # a full disk does not say where
        raise
    return BuildSummary(
        documents=counts.documents,
        tokens=counts.tokens,
        duplicates=counts.read - counts.unique,
        bad_records=tally.bad_records,
        skipped_files=tally.skipped_files,
        empty=tally.empty,
        resumed_tokens=0,
        seconds=progress.seconds,
        index_bytes=sum(path.stat().st_size for path in output.iterdir()),
    )


def _remove_leftovers(output: Path) -> None:
    """Delete temporary directories of builds that were killed while they wrote."""
    for path in output.resolve().parent.glob(glob.escape(output.resolve().name) + ".tmp-*"):
        process = path.name.rpartition("-")[2]
        if process.isdecimal() and not Path("/proc", process).exists() and Path("/proc/self").exists():
            shutil.rmtree(path)


def _nothing_found(corpus: Corpus, counts: Counts, tally: Tally) -> str:
    number, shards = corpus.options.shard
    found = (
        f"{counts.unique} documents, none for shard {number}/{shards}"
        if counts.unique
        else f"{tally.empty} empty, {tally.bad_records} bad records, {tally.skipped_files} files that are not text"
    )
    return (
        f"nothing to index: {len(corpus.files)} files gave {found}"
        f" (of chats, turns of these roles are taken: {', '.join(corpus.options.read.roles)})"
    )
