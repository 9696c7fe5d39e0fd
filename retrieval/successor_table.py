"""A model's own successor table on disk: for each token of the vocabulary, the likeliest next tokens and their
probabilities (`docs/index-format.md`; `redraft index build-successors` makes it).

It is the row of Token Recycling under all others (`token_recycling`, `sources/recycling`): what is proposed after a
token of which neither the session nor the namespace has seen the target's opinion. It holds no user's text. Two or
three megabytes; it is read into memory and checked, since a draft may hold no id outside the vocabulary.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.index_files import check_tokenizer, open_arrays, read_manifest
from redraft.retrieval.index_format import SUCCESSOR_IDS, SUCCESSOR_PROBS, SUCCESSORS
from redraft.retrieval.token_recycling import WIDTH

__all__ = ["SuccessorTable", "open_successors"]


class SuccessorTable:
    """Attributes:
    path: where it was opened, None for no table.
    manifest: the parsed manifest.
    ids: int32[vocabulary, 8], most likely first; no rows where there is no table.
    probs: float32[vocabulary, 8].
    """

    def __init__(self, path: Path | None = None, manifest: dict | None = None, ids=None, probs=None) -> None:
        self.path, self.manifest = path, manifest or {}
        self.ids = np.empty((0, WIDTH), np.int32) if ids is None else ids
        self.probs = np.empty((0, WIDTH), np.float32) if probs is None else probs


def open_successors(
    path: str | os.PathLike, *, tokenizer_fingerprint: str | None = None, vocab_size: int | None = None
) -> SuccessorTable:
    """Read a successor table.

    tokenizer_fingerprint: of the tokenizer that its model has (None: any). vocab_size: how many rows it must have
    (None: any). Raises IndexFormatError if there is none that this version reads, it is damaged, or does not fit.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if manifest["kind"] != SUCCESSORS:
        raise IndexFormatError(f"{path}: kind {manifest['kind']!r}, wanted {SUCCESSORS!r}, a model's successor table")
    check_tokenizer(path, manifest, tokenizer_fingerprint)
    if vocab_size is not None and manifest["rows"] != vocab_size:
        raise IndexFormatError(
            f"{path}: made with a model of {manifest['rows']} token ids, wanted the vocabulary size {vocab_size}:"
            " build it with the target model"
        )
    arrays = open_arrays(path, manifest)
    ids = np.array(arrays[SUCCESSOR_IDS], np.int32)
    probs = np.array(arrays[SUCCESSOR_PROBS], np.float32)
    for name, array in ((SUCCESSOR_IDS, ids), (SUCCESSOR_PROBS, probs)):
        if len(array) != manifest["rows"]:
            raise IndexFormatError(f"{path / name}: {len(array)} rows, wanted {manifest['rows']}")
    if ids.min(initial=0) < 0 or ids.max(initial=-1) >= len(ids):
        raise IndexFormatError(
            f"{path / SUCCESSOR_IDS}: holds numbers outside the vocabulary, wanted 0..{len(ids) - 1}"
        )
    if not ((probs >= 0) & (probs <= 1)).all():
        raise IndexFormatError(f"{path / SUCCESSOR_PROBS}: holds numbers that are no probabilities")
    return SuccessorTable(path, manifest, ids, probs)
