"""Several indexes become one, without their texts: an index holds its documents' tokens.

Neither structure can be joined cheaply, so the merged one is built anew from all documents, one from each index in
turn. Shards that are given in their order thus become the very index that a build in one go makes. Exact copies of
a document are dropped, as in a build.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from redraft.index_builders.progress import Progress
from redraft.index_builders.structures import check_output, choose_kind, in_turn, write_index
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.index_directory import CorpusIndex, index_folders, open_index

__all__ = ["common_tokenizer", "merge_indexes"]


def merge_indexes(
    paths: list[str],
    output: str | Path,
    *,
    force: bool = False,
    kind: str | None = None,
    memory_limit: int | None = None,
    progress: Progress | None = None,
) -> dict:
    """Write the documents of the indexes at `paths` as one index; returns {documents, tokens, duplicates}.

    A directory of indexes counts as all that are in it. `output` may be one of `paths` if `force` is set; `kind` and
    `memory_limit` are as for a build. Raises IndexFormatError for a path that is no index and for indexes of different
    tokenizers, FileExistsError for an output that exists, ValueError beyond `memory_limit` bytes.
    """
    progress = progress or Progress(quiet=True)
    check_output(Path(output), force)
    with ExitStack() as stack:
        indexes = [stack.enter_context(open_index(path)) for path in index_folders(*paths)]
        tokenizer = common_tokenizer(indexes)
        total = sum(len(index.tokens) for index in indexes)
        counts = {"documents": 0, "tokens": 0, "duplicates": 0}
        write_index(
            Path(output),
            _distinct(indexes, counts),
            total,
            choose_kind(kind, total, memory_limit),
            progress,
            tokenizer=tokenizer,
            options=_common_options(indexes),
            sources=_joined_sources(indexes),
            force=force,
        )
    return counts


def _distinct(indexes: list[CorpusIndex], counts: dict[str, int]) -> Iterator[np.ndarray]:
    """Every document that is not a copy of an earlier one; keeps `counts`."""
    seen: set[bytes] = set()
    for document in in_turn(index.documents() for index in indexes):
        digest = hashlib.blake2b(document.tobytes(), digest_size=16).digest()
        if digest in seen:
            counts["duplicates"] += 1
            continue
        seen.add(digest)
        counts["documents"] += 1
        counts["tokens"] += len(document)
        yield document


def common_tokenizer(indexes: Sequence[CorpusIndex]) -> dict:
    """The tokenizer that all were built with, as their manifests describe it. Raises IndexFormatError for two."""
    first = indexes[0]
    for index in indexes[1:]:
        ours, theirs = first.manifest["tokenizer"], index.manifest["tokenizer"]
        if ours["fingerprint"] != theirs["fingerprint"]:
            raise IndexFormatError(
                f"{index.path} was built with tokenizer {theirs['name']!r} ({theirs['fingerprint']}),"
                f" {first.path} with {ours['name']!r} ({ours['fingerprint']}): their token ids do not mean the same"
            )
    return first.manifest["tokenizer"]


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
