"""The corpus indexes, and the model's successor table, that a drafter has open at one time.

A value: opening or closing an index makes a new one, and whoever holds the old one (a session in the middle of a step, a
tree that may be asked for its provenance) goes on with it. The files of an index are unmapped when the last holder lets
go, so an index can be replaced by a new version while sessions draft from it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from redraft.retrieval.dense_index import DenseIndex
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.evidence import MAX_CORPORA
from redraft.retrieval.index_directory import CorpusIndex, open_indexes
from redraft.retrieval.knowledge import corpora_bundle
from redraft.retrieval.provenance import Occurrence
from redraft.retrieval.successor_table import SuccessorTable, open_successors

__all__ = ["OpenIndexes"]


class OpenIndexes:
    """Attributes:
    paths: what was opened, in order; a directory of shards is one path.
    indexes: every CorpusIndex, in the order in which they are asked.
    successors: the SuccessorTable; without rows where none is open.
    bundle: their arrays and those of the successor table, for the kernels.
    """

    def __init__(self, successors: SuccessorTable | None = None, opened=None) -> None:
        self.successors = successors or SuccessorTable()
        self._opened: dict[str, tuple[CorpusIndex, ...]] = opened or {}
        self.indexes = tuple(index for indexes in self._opened.values() for index in indexes)
        structures = [index.automaton or index.array for index in self.indexes]
        self.bundle = corpora_bundle(self.successors.ids, self.successors.probs, structures)

    @property
    def paths(self) -> list[str]:
        return list(self._opened)

    def opening(self, path, *, tokenizer_fingerprint: str | None, vocab_size: int | None) -> OpenIndexes:
        """These and the index, or directory of shards, at `path`; if it is among them, that one is opened anew.

        Raises IndexFormatError for one that cannot be used, or not beside the others, and ValueError for too many.
        """
        path = os.fspath(path)
        found = open_indexes(path, tokenizer_fingerprint=tokenizer_fingerprint, vocab_size=vocab_size)
        others = [index for opened, indexes in self._opened.items() if opened != path for index in indexes]
        if len(others) + len(found) > MAX_CORPORA:
            raise ValueError(
                f"{path}: {len(found)} more with {len(others)} open, at most {MAX_CORPORA} indexes can be open at a"
                " time: join some with redraft index merge"
            )
        for index in found:
            _check_fits(index, [*others, *found, *self._table()])
        return OpenIndexes(self.successors, {**self._opened, path: tuple(found)})

    def with_successors(self, path, *, tokenizer_fingerprint: str | None, vocab_size: int | None) -> OpenIndexes:
        """These with the successor table at `path` instead of the present one. Raises IndexFormatError."""
        table = open_successors(path, tokenizer_fingerprint=tokenizer_fingerprint, vocab_size=vocab_size)
        _check_fits(table, self.indexes)
        return OpenIndexes(table, self._opened)

    def _table(self) -> list[SuccessorTable]:
        return [self.successors] if self.successors.path else []

    def without(self, path) -> OpenIndexes:
        """These but the one opened as `path`. Raises KeyError if there is none."""
        path = os.fspath(path)
        if path not in self._opened:
            raise KeyError(f"no index {path} is open; open are: {', '.join(self._opened) or 'none'}")
        return OpenIndexes(self.successors, {other: found for other, found in self._opened.items() if other != path})

    def check_fits(self, index: DenseIndex) -> None:
        """Raise IndexFormatError unless `index` can be used beside these."""
        _check_fits(index, [*self.indexes, *self._table()])

    def locate(self, passages: Sequence[np.ndarray], more: CorpusIndex | None = None) -> list[Occurrence | None]:
        """For each passage (int32[n]) the first place of its longest suffix, of two tokens or more, that occurs.

        The place is that of its last token. Of several indexes that hold an equally long one, the first is named; `more`
        is one more, asked last.
        """
        indexes = self.indexes if more is None else (*self.indexes, more)
        return [_locate(indexes, passage) for passage in passages]


def _locate(indexes: Sequence[CorpusIndex], passage: np.ndarray) -> Occurrence | None:
    longest, place = 1, None
    for index in indexes if len(passage) > longest else ():
        position, length = index.first_occurrence(passage)
        if length > longest:
            longest, place = length, Occurrence(str(index.path), *index.locate(position))
    return place


def _check_fits(
    index: CorpusIndex | SuccessorTable | DenseIndex, beside: Sequence[CorpusIndex | SuccessorTable]
) -> None:
    """Indexes made with different tokenizers cannot be used together: the ids of one mean nothing in the other."""
    ours = index.manifest["tokenizer"]
    for other in beside:
        theirs = other.manifest["tokenizer"]
        if None not in (ours["fingerprint"], theirs["fingerprint"]) and ours["fingerprint"] != theirs["fingerprint"]:
            raise IndexFormatError(
                f"{index.path}: built with tokenizer {ours['name']!r}, fingerprint {ours['fingerprint']!r}; beside it"
                f" {other.path} was built with {theirs['name']!r}, fingerprint {theirs['fingerprint']!r}"
            )
