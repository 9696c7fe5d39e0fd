"""A corpus becomes an index: list the files, tokenize, build the structure, write the directory.

Documents stream: what is held is one batch of texts, the hash of every document (to drop exact copies), and then
the structure itself. Tokens go to a work folder (`my.index.work`) part by part on the way, so that a build that was killed
goes on with the part it was in, and ends in the same bytes as one that was not. The index appears under its name
complete or not at all, and an index that was there before stays until then.

Big corpora are cut with `shard=(i, n)`: document k, counted over the whole corpus without its duplicates, belongs to
shard k mod n, so n builds on n machines together index every document once, with nothing to agree on.
"""

from __future__ import annotations

import glob
import hashlib
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from redraft.index_builders.documents import Document, ReadOptions, Tally
from redraft.index_builders.progress import Progress, readable_bytes
from redraft.index_builders.readers import read_documents
from redraft.index_builders.sources import SourceFile, list_files, signature
from redraft.index_builders.structures import KINDS, check_output, choose_kind, memory_needed, write_index
from redraft.index_builders.token_parts import TokenParts
from redraft.index_builders.tokenizers import Tokenizer, load_tokenizer
from redraft.retrieval.tokens import as_tokens

__all__ = ["BuildOptions", "BuildSummary", "build_index"]

_BATCH_CHARACTERS = 4 << 20
_BATCH_DOCUMENTS = 4096
_PART_TOKENS = 4_000_000


@dataclass(frozen=True)
class BuildOptions:
    """How to build.

    Attributes:
        read: how to read the sources.
        max_tokens: stop after this many; the last document is cut to fit.
        chat_template: write whole chats out with the tokenizer's chat template, instead of single turns.
        shard: (i, n), 1 <= i <= n: build the i-th of n parts of the corpus.
        force: replace an index that exists.
        kind: one of `KINDS`; None chooses by size and memory.
        memory_limit: bytes; a corpus that needs more is refused as soon as that is seen.
    """

    read: ReadOptions = field(default_factory=ReadOptions)
    max_tokens: int | None = None
    chat_template: bool = False
    shard: tuple[int, int] = (1, 1)
    force: bool = False
    kind: str | None = None
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens: wanted at least 1, got {self.max_tokens}")
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(f"kind: wanted one of {', '.join(KINDS)}, got {self.kind!r}")
        number, count = self.shard
        if not 1 <= number <= count:
            raise ValueError(f"shard: wanted i/N with 1 <= i <= N, got {number}/{count}")


@dataclass
class _Counts:
    """How far the corpus has been tokenized. Stored with every part."""

    read: int = 0  # documents that came from the readers, duplicates included
    unique: int = 0  # of these, documents of all shards without duplicates
    documents: int = 0  # documents of this shard
    tokens: int = 0
    by_source: list[list[int]] = field(default_factory=list)  # [documents, tokens] of each source


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
    beyond `options.memory_limit`, OSError when the disk is full. In every case an existing index is left as it was. What is tokenized already stays in
    `<output>.work`, from where the same call resumes.
    """
    options = options or BuildOptions()
    progress = progress or Progress(quiet=True)
    output = Path(output)
    check_output(output, options.force)
    started = time.monotonic()
    files = list_files(sources, options.read)
    progress.say(f"{len(files):,} files, {readable_bytes(sum(file.size for file in files))}")
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    if options.chat_template:
        tokenizer.render_chat([{"role": "user", "content": "?"}])  # no template: say so now
        options = replace(options, read=replace(options.read, render_chat=tokenizer.render_chat))
    progress.seconds["listing files, loading the tokenizer"] = time.monotonic() - started

    tally = Tally(warn=progress.warn)
    output.parent.mkdir(parents=True, exist_ok=True)
    with TokenParts(output.with_name(output.name + ".work"), _plan(files, tokenizer, options)) as parts:
        _remove_leftovers(output)
        try:
            resumed = parts.state["tokens"] if parts.state else 0
            counts = _tokenize(files, tokenizer, options, parts, tally, progress)
            write_index(
                output,
                parts.documents(),
                counts.tokens,
                choose_kind(options.kind, counts.tokens, options.memory_limit),
                progress,
                tokenizer=tokenizer.describe(),
                options=_recorded(options),
                sources=_recorded_sources(sources, counts),
                force=options.force,
            )
        except BaseException as error:
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = str(output)  # a full disk does not say where
            if parts.state and parts.resumable:
                kept = parts.state["tokens"]
                progress.say(f"{kept:,} tokens are kept in {parts.folder}: the same command resumes there")
            raise
        parts.remove()
    return BuildSummary(
        documents=counts.documents,
        tokens=counts.tokens,
        duplicates=counts.read - counts.unique,
        bad_records=tally.bad_records,
        skipped_files=tally.skipped_files,
        empty=tally.empty,
        resumed_tokens=resumed,
        seconds=progress.seconds,
        index_bytes=sum(path.stat().st_size for path in output.iterdir()),
    )


def _tokenize(
    files: list[SourceFile],
    tokenizer: Tokenizer,
    options: BuildOptions,
    parts: TokenParts,
    tally: Tally,
    progress: Progress,
) -> _Counts:
    """Fill `parts` with the tokens of all documents; goes on after the last part that is there."""
    counts = _Counts(by_source=[[0, 0] for _ in range(1 + max(file.source for file in files))])
    if parts.state:
        counts = _Counts(**parts.state)
        progress.say(f"resuming after {counts.documents:,} documents, {counts.tokens:,} tokens")
    limit = options.max_tokens
    fresh: list[np.ndarray] = []  # documents of the part that is being filled
    fresh_tokens = 0
    total = sum(file.size for file in files)
    with progress.phase("tokenizing", total, "B", counts.tokens) as report:
        for batch in _batches(files, options, counts, tally):
            for (source, document), tokens in zip(batch, _encode(batch, tokenizer), strict=True):
                tokens = tokens if limit is None else tokens[: limit - counts.tokens]
                if len(tokens) == 0:
                    tally.empty += limit is None or counts.tokens < limit
                    continue
                fresh.append(tokens)
                fresh_tokens += len(tokens)
                counts.documents += 1
                counts.tokens += len(tokens)
                counts.by_source[source][0] += 1
                counts.by_source[source][1] += len(tokens)
            if fresh_tokens >= _PART_TOKENS:
                parts.add(fresh, asdict(counts))
                fresh, fresh_tokens = [], 0
            report(tally.bytes_read, counts.documents, counts.tokens)
            _check_memory(counts.tokens, tally.bytes_read / max(1, total), options)
            if counts.tokens == limit:
                break
        if fresh:
            parts.add(fresh, asdict(counts))
    if counts.documents == 0:
        raise ValueError(_nothing_found(len(files), counts, tally, options))
    return counts


def _batches(
    files: list[SourceFile], options: BuildOptions, counts: _Counts, tally: Tally
) -> Iterator[list[tuple[int, Document]]]:
    """This shard's documents without exact duplicates, in batches; those before `counts.read` are only remembered.

    `counts.read` and `counts.unique` are, at each batch, those of the documents up to its end.
    """
    number, shards = options.shard
    resume_at, seen = counts.read, set()
    batch: list[tuple[int, Document]] = []
    characters = 0
    for position, (source, document) in enumerate(read_documents(files, options.read, tally)):
        digest = _digest(document)
        if position < resume_at:
            seen.add(digest)
            continue
        counts.read += 1
        if digest in seen:
            continue
        seen.add(digest)
        counts.unique += 1
        if (counts.unique - 1) % shards != number - 1:
            continue
        batch.append((source, document))
        characters += len(document.content)
        if characters >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _digest(document: Document) -> bytes:
    content = document.content
    data = content.encode() if isinstance(content, str) else np.ascontiguousarray(content, np.int32).tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


def _encode(batch: list[tuple[int, Document]], tokenizer: Tokenizer) -> list[np.ndarray]:
    """int32 tokens of each document of the batch; token ids that came as such are checked."""
    texts = [document.content for _, document in batch if isinstance(document.content, str)]
    encoded = iter(tokenizer.encode_batch(texts))
    return [
        next(encoded)
        if isinstance(document.content, str)
        else as_tokens(document.content, tokenizer.vocab_size, what=document.where)
        for _, document in batch
    ]


def _check_memory(tokens: int, share: float, options: BuildOptions) -> None:
    """Raise ValueError, with the way out, once `tokens`, from `share` of the corpus, are more than memory may hold."""
    needed = memory_needed(tokens, options.kind)
    if options.memory_limit is None or needed <= options.memory_limit:
        return
    more = math.ceil(options.shard[1] * max(2.0, 1.2 * needed / options.memory_limit / max(share, 0.01)))
    raise ValueError(
        f"{share:.0%} of the corpus gave {tokens:,} tokens, which take {readable_bytes(needed)} of memory to build;"
        f" --memory-limit is {readable_bytes(options.memory_limit)}. Build parts with --shard 1/{more} to {more}/{more},"
        " or fewer tokens with --max-tokens"
    )


def _remove_leftovers(output: Path) -> None:
    """Delete temporary directories of builds that were killed while they wrote."""
    for path in output.resolve().parent.glob(glob.escape(output.resolve().name) + ".tmp-*"):
        process = path.name.rpartition("-")[2]
        if process.isdecimal() and not Path("/proc", process).exists() and Path("/proc/self").exists():
            shutil.rmtree(path)


def _recorded(options: BuildOptions) -> dict:
    """The options that decide what is in the index, as its manifest keeps them."""
    return {
        "text_key": options.read.text_key,
        "roles": [] if options.chat_template else list(options.read.roles),
        "chat_template": options.chat_template,
        "exclude": list(options.read.exclude),
        "max_tokens": options.max_tokens,
        "shard": list(options.shard),
    }


def _recorded_sources(sources: list[str], counts: _Counts) -> list[dict]:
    return [
        {"source": source, "documents": documents, "tokens": tokens}
        for source, (documents, tokens) in zip(sources, counts.by_source, strict=True)
    ]


def _plan(files: list[SourceFile], tokenizer: Tokenizer, options: BuildOptions) -> dict | None:
    """What must be the same for a build to resume; None where standard input, which is read once, is a source."""
    if any(str(file.path) == "-" for file in files):
        return None
    return {"sources": signature(files), "tokenizer": tokenizer.fingerprint, "options": _recorded(options)}


def _nothing_found(n_files: int, counts: _Counts, tally: Tally, options: BuildOptions) -> str:
    number, shards = options.shard
    found = (
        f"{counts.unique} documents, none for shard {number}/{shards}"
        if counts.unique
        else f"{tally.empty} empty, {tally.bad_records} bad records, {tally.skipped_files} files that are not text"
    )
    return (
        f"nothing to index: {n_files} files gave {found}"
        f" (of chats, turns of these roles are taken: {', '.join(options.read.roles)})"
    )
