"""Several indexes become one, without their texts: an index holds its documents' tokens.

Suffix automata cannot be joined cheaply, so the merged one is built anew from all documents, one from each index in
turn. Shards that are given in their order thus become the very index that a build in one go makes. Exact copies of
a document are dropped, as in a build.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from redraft.index_builders.build import BYTES_PER_TOKEN
from redraft.index_builders.progress import Progress, readable_bytes
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.index_directory import CorpusIndex, open_index, write_automaton_index
from redraft.retrieval.suffix_automaton import SuffixAutomaton

__all__ = ["merge_indexes"]


def merge_indexes(
    paths: list[str],
    output: str | Path,
    *,
    force: bool = False,
    memory_limit: int | None = None,
    progress: Progress | None = None,
) -> dict:
    """Write the documents of the indexes at `paths` (two or more) as one index; returns {documents, tokens, duplicates}.

    `output` may be one of `paths` if `force` is set. Raises IndexFormatError for a path that is no index and for
    indexes of different tokenizers, FileExistsError for an output that exists, ValueError beyond `memory_limit` bytes.
    """
    progress = progress or Progress(quiet=True)
    if Path(output).exists() and not force:
        raise FileExistsError(f"{output} exists already; replace it with --force")
    with ExitStack() as stack:
        indexes = [stack.enter_context(open_index(path)) for path in paths]
        tokenizer = _common_tokenizer(indexes)
        total = sum(len(index.tokens) for index in indexes)
        if memory_limit is not None and total * BYTES_PER_TOKEN > memory_limit:
            raise ValueError(
                f"{total:,} tokens need about {readable_bytes(total * BYTES_PER_TOKEN)} of memory to merge,"
                f" --memory-limit is {readable_bytes(memory_limit)}; a server can also open the indexes side by side"
            )
        automaton = SuffixAutomaton(capacity_hint=total)
        seen: set[bytes] = set()
        duplicates = done = 0
        with progress.phase("merging", total, "tokens") as report:
            for document in _in_turn(indexes):
                done += len(document)
                digest = hashlib.blake2b(np.ascontiguousarray(document).tobytes(), digest_size=16).digest()
                if digest in seen:
                    duplicates += 1
                    continue
                seen.add(digest)
                automaton.append(document)
                automaton.end_document()
                report(done, automaton.n_documents, automaton.n_tokens)
        with progress.stages() as report:
            write_automaton_index(
                output,
                automaton,
                tokenizer=tokenizer,
                options=_common_options(indexes),
                sources=_joined_sources(indexes),
                force=force,
                progress=report,
            )
    return {"documents": automaton.n_documents, "tokens": automaton.n_tokens, "duplicates": duplicates}


def _common_tokenizer(indexes: list[CorpusIndex]) -> dict:
    first = indexes[0]
    for index in indexes[1:]:
        ours, theirs = first.manifest["tokenizer"], index.manifest["tokenizer"]
        if ours["fingerprint"] != theirs["fingerprint"]:
            raise IndexFormatError(
                f"{index.path} was built with tokenizer {theirs['name']!r} ({theirs['fingerprint']}),"
                f" {first.path} with {ours['name']!r} ({ours['fingerprint']}): their token ids do not mean the same"
            )
    return first.manifest["tokenizer"]


def _in_turn(indexes: list[CorpusIndex]) -> Iterator[np.ndarray]:
    """The first document of every index, then the second of every index, and so on."""
    for number in range(max(len(index.document_ends) for index in indexes)):
        for index in indexes:
            if number < len(index.document_ends):
                start = int(index.document_ends[number - 1]) if number else 0
                yield index.tokens[start : int(index.document_ends[number])]


def _common_options(indexes: list[CorpusIndex]) -> dict:
    """The options that all were built with; for all shards of one build, those of that build."""
    options = [dict(index.manifest["options"]) for index in indexes]
    if [option.get("shard") for option in options] == [[i, len(indexes)] for i in range(1, len(indexes) + 1)]:
        options = [option | {"shard": [1, 1]} for option in options]
    first = options[0]
    return {name: first[name] for name in first if all(option.get(name) == first[name] for option in options)}


def _joined_sources(indexes: list[CorpusIndex]) -> list[dict]:
    """Every source once, with its documents and tokens in all the indexes."""
    joined: dict[str, dict] = {}
    for index in indexes:
        for source in index.manifest["sources"]:
            entry = joined.setdefault(source["source"], {"source": source["source"], "documents": 0, "tokens": 0})
            entry["documents"] += source["documents"]
            entry["tokens"] += source["tokens"]
    return list(joined.values())
