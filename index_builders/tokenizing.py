"""Documents become tokens, part by part, in a way that can be interrupted and shared out.

Documents stream: what is held is one batch of texts and the hash of every document, to drop exact copies. Shard i of n
takes document k, counted over the whole corpus without its copies, where k mod n = i - 1: so n shards together
take every document once, with nothing to agree on, and their documents in turn are those of the whole in order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from redraft.index_builders.progress import Progress, memory_in_use, readable_bytes
from redraft.index_builders.readers.documents import Document, ReadOptions, Tally
from redraft.index_builders.readers.reading import read_documents
from redraft.index_builders.readers.sources import SourceFile, signature
from redraft.index_builders.structures import KINDS, memory_needed
from redraft.index_builders.token_parts import TokenParts
from redraft.index_builders.tokenizers import Tokenizer
from redraft.retrieval.tokens import as_tokens

__all__ = ["BuildOptions", "Counts", "plan_of", "recorded", "tokenize", "with_chat_template"]

_BATCH_CHARACTERS = 4 << 20
_BATCH_DOCUMENTS = 4096
_PART_TOKENS = 4_000_000
_LEAST_ROOM = 10_000_000  # bytes for tokens: in less, parts would be too many to be advice


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
class Counts:
    """How far the corpus has been tokenized. Stored with every part."""

    read: int = 0  # documents that came from the readers, duplicates included
    unique: int = 0  # of these, documents of all shards without duplicates
    documents: int = 0  # documents of this shard
    tokens: int = 0
    by_source: list[list[int]] = field(default_factory=list)  # [documents, tokens] of each source


def tokenize(
    files: list[SourceFile],
    tokenizer: Tokenizer,
    options: BuildOptions,
    parts: TokenParts,
    tally: Tally,
    progress: Progress,
) -> Counts:
    """Fill `parts` with the tokens of all documents; goes on after the last part that is there."""
    counts = Counts(by_source=[[0, 0] for _ in range(1 + max(file.source for file in files))])
    if parts.state:
        counts = Counts(**parts.state)
        progress.say(f"resuming after {counts.documents:,} documents, {counts.tokens:,} tokens")
    limit = options.max_tokens
    fresh: list[np.ndarray] = []  # documents of the part that is being filled
    fresh_tokens = 0
    total, held = sum(file.size for file in files), memory_in_use()
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
            _check_memory(counts.tokens, tally.bytes_read / max(1, total), options, held)
            if counts.tokens == limit:
                break
        if fresh:
            parts.add(fresh, asdict(counts))
    return counts


def _batches(
    files: list[SourceFile], options: BuildOptions, counts: Counts, tally: Tally
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


def _check_memory(tokens: int, share: float, options: BuildOptions, held: int) -> None:
    """Raise ValueError, with the way out, once `tokens`, from `share` of the corpus, are more than memory may hold.

    held: bytes this process had in use before the first of them, which every part of the corpus would need as well.
    """
    needed = memory_needed(tokens, options.kind)
    if options.memory_limit is None or needed <= options.memory_limit:
        return
    room = options.memory_limit - held
    if room < _LEAST_ROOM:
        raise ValueError(
            f"--memory-limit is {readable_bytes(options.memory_limit)}, and {readable_bytes(held)} are in use before the"
            f" first token is read: the smallest part of a corpus takes {readable_bytes(held + _LEAST_ROOM)}"
        )
    more = math.ceil(options.shard[1] * max(2.0, 1.2 * (needed - held) / room / max(share, 0.01)))
    raise ValueError(
        f"{share:.0%} of the corpus gave {tokens:,} tokens, which take {readable_bytes(needed)} of memory to build;"
        f" --memory-limit is {readable_bytes(options.memory_limit)}. Build parts with --shard 1/{more} to {more}/{more},"
        " or fewer tokens with --max-tokens"
    )


def recorded(options: BuildOptions) -> dict:
    """The options that decide what is in the index, as its manifest keeps them."""
    return {
        "text_key": options.read.text_key,
        "roles": [] if options.chat_template else list(options.read.roles),
        "chat_template": options.chat_template,
        "exclude": list(options.read.exclude),
        "max_tokens": options.max_tokens,
        "shard": list(options.shard),
    }


def plan_of(files: list[SourceFile], tokenizer: Tokenizer, options: BuildOptions) -> dict | None:
    """What must be the same for a build to resume; None where standard input, which is read once, is a source."""
    if any(str(file.path) == "-" for file in files):
        return None
    return {"sources": signature(files), "tokenizer": tokenizer.fingerprint, "options": recorded(options)}


def with_chat_template(options: BuildOptions, tokenizer: Tokenizer) -> BuildOptions:
    """The options with the chat template in place if it is wanted. Raises ValueError if there is none."""
    if not options.chat_template:
        return options
    tokenizer.render_chat([{"role": "user", "content": "?"}])
    return replace(options, read=replace(options.read, render_chat=tokenizer.render_chat))
