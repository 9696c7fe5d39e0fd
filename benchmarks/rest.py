"""Two peers that draft from a corpus, behind the interface that a replay drives.

`Rest` is REST as published (Z. He et al., "REST: Retrieval-Based Speculative Decoding", 2023) and as its authors' code
runs it: the longest suffix of the context, of 16 down to 2 tokens, that occurs in the corpus; the up to 10 tokens after
each of its first 5,000 occurrences, in suffix order, are counted prefix by prefix; the most frequent prefixes are the
tree. Its suffix array is ours (a suffix array is a suffix array), the drafting is done here in NumPy, so its time means
nothing.

`Aded` is the package `draftretriever` 0.1.1 from PyPI. It bears the name of REST's own extension but comes from ADED (X.
Liu et al., 2024): a matrix of trigram counts, searched by the last two tokens with a Monte Carlo tree search. Its reader
also learns: it takes the trigrams of every query of three tokens or more into its counts and so remembers the
text that is being written, and the texts before it. Asked with two tokens (`frozen`) it knows the corpus alone, asked
with 16, as its authors do, it is to be compared with a drafter that has a memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.index_directory import CorpusIndex, open_index
from redraft.retrieval.suffix_array import positions
from redraft.retrieval.suffix_array_cursor import find

__all__ = ["Aded", "Rest"]

NODES = 32  # unless the call says otherwise
SPAN, SHORTEST, OCCURRENCES, AHEAD = 16, 2, 5000, 10  # the published defaults


@dataclass(frozen=True)
class Rest:
    """REST over the suffix array index at `path`."""

    path: str
    name: str = "REST as published"

    def make(self) -> _Drafter:
        """Open the index."""
        return _Drafter(_CorpusOfRest(open_index(self.path)))


@dataclass(frozen=True)
class Aded:
    """draftretriever over its own file at `path`; `frozen`: kept from learning."""

    path: str
    frozen: bool = False

    @property
    def name(self) -> str:
        return "draftretriever (ADED), kept from learning" if self.frozen else "draftretriever (ADED), learning"

    def make(self) -> _Drafter:
        """Open the index anew: nothing is learned yet."""
        return _Drafter(_CorpusOfAded(self.path, self.frozen))


class _Drafter:
    def __init__(self, corpus: _CorpusOfRest | _CorpusOfAded) -> None:
        self._corpus = corpus

    def open(self, prompt: np.ndarray) -> _Session:
        return _Session(self._corpus, prompt)

    def __enter__(self) -> _Drafter:
        return self

    def __exit__(self, *exception) -> None:
        self._corpus.close()


class _Session:
    def __init__(self, corpus: _CorpusOfRest | _CorpusOfAded, prompt: np.ndarray) -> None:
        self._corpus, self._tail = corpus, np.asarray(prompt[-SPAN:], np.int32)

    def draft(self, max_nodes: int | None = None, min_prob: float | None = None) -> _Draft:
        budget = max_nodes or NODES
        return _Draft(self._corpus.paths(self._tail, budget), budget)

    def commit(self, tokens: np.ndarray) -> None:
        self._tail = np.concatenate([self._tail, np.asarray(tokens, np.int32)])[-SPAN:]

    def close(self) -> None:
        pass


class _CorpusOfRest:
    def __init__(self, index: CorpusIndex) -> None:
        self._index = index

    def paths(self, tail: np.ndarray, nodes: int) -> list[tuple[int, ...]]:
        """The most frequent prefixes of what followed, parents before children; ties: shorter first, then by token."""
        low, high, length, _ = find(self._index.array, tail, SPAN)
        if length < SHORTEST:
            return []
        counts: Counter[tuple[int, ...]] = Counter()
        for start in (positions(self._index.array, low, min(high, low + OCCURRENCES)) + length).tolist():
            document = int(np.searchsorted(self._index.document_ends, start - 1, side="right"))
            after = self._index.tokens[start : min(start + AHEAD, int(self._index.document_ends[document]))].tolist()
            for depth in range(1, len(after) + 1):
                counts[tuple(after[:depth])] += 1
        ranked = sorted(counts, key=lambda path: (-counts[path], len(path), path))
        return ranked[:nodes]

    def close(self) -> None:
        self._index.close()


class _CorpusOfAded:
    def __init__(self, path: str, frozen: bool) -> None:
        import draftretriever

        self._reader, self._frozen = draftretriever.Reader(path), frozen

    def paths(self, tail: np.ndarray, nodes: int) -> list[tuple[int, ...]]:
        """The first search that finds anything, for the last 16 tokens, then 15, down to 2; paths end in -2."""
        for span in range(2 if self._frozen else min(SPAN, len(tail)), SHORTEST - 1, -1):
            found, *_ = self._reader.search(tail[-span:].tolist(), choices=nodes)
            if found:
                return [tuple(token for token in path if token >= 0) for path in found]
        return []

    def close(self) -> None:
        self._reader = None


@dataclass(frozen=True)
class _Draft:
    paths: list[tuple[int, ...]]  # from the root down
    budget: int

    def tree(self) -> DraftTree:
        """The same as arrays; neither peer names probabilities."""
        nodes: dict[tuple[int, ...], int] = {}
        tokens, parents = [], []
        for path in self.paths:
            for depth in range(1, len(path) + 1):
                if path[:depth] not in nodes and len(tokens) < self.budget:
                    parents.append(nodes.get(path[: depth - 1], -1))
                    nodes[path[:depth]] = len(tokens)
                    tokens.append(path[depth - 1])
        n = len(tokens)
        return DraftTree(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.ones(n, np.float32),
            np.full(n, Source.CORPUS, np.uint8),
        )
