"""The draft tree: what every drafter returns and every verifier takes.

A tree in topological order, as four parallel arrays. It is a plain value: the same class crosses the wire, comes
out of the kernels and goes into the verifier, and whoever receives one from outside checks it with `check`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from redraft.retrieval.provenance import Occurrence, Origin, passages

__all__ = ["DraftTree", "Source"]


class Source:
    """Ids of the origins a node can have (`DraftTree.sources`): the strongest evidence that named the token."""

    SESSION = 0
    MEMORY = 1
    CORPUS = 2
    POINTER = 3
    RECYCLING = 4
    SKIP = 5
    FREQUENT = 6
    CALLER = 7
    NGRAM = 8
    DENSE = 9
    RERANK = 10
    NAMES = (
        "session", "memory", "corpus", "pointer", "recycling", "skip", "frequent", "caller", "ngram", "dense", "rerank",
    )  # fmt: skip


@dataclass(frozen=True, eq=False, init=False)
class DraftTree:
    """A tree of likely next tokens.

    Attributes:
        tokens: int32[n], the drafted token of each node.
        parents: int32[n], index of the parent node, -1 for a child of the last committed token; parents[i] < i.
        probs: float32[n], estimated probability that the node and all above it are accepted.
        sources: uint8[n], where each node came from (`Source`).
        origin: what `provenance` needs to know of the draft, if the drafter says it.

    Siblings have different tokens. n = 0 is a valid answer: nothing worth verifying was found.
    """

    tokens: np.ndarray
    parents: np.ndarray
    probs: np.ndarray
    sources: np.ndarray
    origin: Origin | None = field(default=None, repr=False)

    def __init__(
        self,
        tokens: np.ndarray,
        parents: np.ndarray,
        probs: np.ndarray,
        sources: np.ndarray,
        origin: Origin | None = None,
    ) -> None:
        fields = self.__dict__  # what a frozen dataclass does of itself takes twice as long, for every tree of a batch
        fields["tokens"], fields["parents"], fields["probs"], fields["sources"] = tokens, parents, probs, sources
        fields["origin"] = origin

    def __len__(self) -> int:
        return len(self.tokens)

    def __getstate__(self) -> dict:
        """A copy for another process leaves out `origin`, which holds whole indexes."""
        return {**self.__dict__, "origin": None}

    @classmethod
    def empty(cls) -> DraftTree:
        return cls(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8))

    @classmethod
    def chain(cls, tokens, probs=None, source: int = Source.NGRAM) -> DraftTree:
        """A tree without branches: `tokens` one after the other. `probs` are path probabilities (default: all 1)."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        n = len(tokens)
        probs = np.ones(n, np.float32) if probs is None else np.ascontiguousarray(probs, np.float32)
        return cls(tokens, np.arange(-1, n - 1, dtype=np.int32), probs, np.full(n, source, np.uint8))

    def depths(self) -> np.ndarray:
        """int32[n]: 1 for a child of the last committed token, one more for each level below."""
        depths = np.empty(len(self), np.int32)
        for i, parent in enumerate(self.parents):
            depths[i] = 1 if parent < 0 else depths[parent] + 1
        return depths

    def best_path(self) -> np.ndarray:
        """int32[depth]: the chain with the most expected accepted tokens, for engines that take only chains."""
        n = len(self)
        if n == 0:
            return np.empty(0, np.int32)
        value = self.probs.astype(np.float64).copy()  # expected accepted tokens on the way down to each node
        for i in range(n):
            if self.parents[i] >= 0:
                value[i] += value[self.parents[i]]
        node, path = int(value.argmax()), []
        while node >= 0:
            path.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return np.array(path[::-1], np.int32)

    def provenance(self, among: Iterable[int] | None = None) -> list[Occurrence | None]:
        """Where in a corpus each node that an index, or a dense index, proposed comes from; None for all other nodes.

        Looked up now, in the indexes that were open when the tree was drafted (by a server: that are open now). Takes
        some microseconds for each node. `among`: only these nodes are looked up (default: all).
        """
        places: list[Occurrence | None] = [None] * len(self)
        nodes = np.flatnonzero(np.isin(self.sources, (Source.CORPUS, Source.DENSE))).tolist()
        if among is not None:
            nodes = [node for node in among if node in set(nodes)]
        if self.origin is not None and nodes:
            wanted = passages(self.origin.context, self.tokens, self.parents, nodes)
            for node, place in zip(nodes, self.origin.locate(wanted)):
                places[node] = place
        return places

    def check(self, *, vocab_size: int | None = None, max_nodes: int | None = None) -> DraftTree:
        """Return self if every promise of the class holds; raise ValueError that names the first broken one."""
        n = len(self.tokens)
        for name, dtype in (("tokens", np.int32), ("parents", np.int32), ("probs", np.float32), ("sources", np.uint8)):
            array = getattr(self, name)
            if array.shape != (n,) or array.dtype != dtype:
                raise ValueError(f"draft tree: {name} is {array.dtype}{array.shape}, wanted {np.dtype(dtype)}({n},)")
        if max_nodes is not None and n > max_nodes:
            raise ValueError(f"draft tree: {n} nodes exceed the budget of {max_nodes}")
        if n == 0:
            return self
        if (self.parents < -1).any() or (self.parents >= np.arange(n)).any():
            raise ValueError("draft tree: every parent must be -1 or an earlier node")
        if int(self.tokens.min()) < 0 or (vocab_size is not None and int(self.tokens.max()) >= vocab_size):
            raise ValueError(
                f"draft tree: token ids {int(self.tokens.min())}..{int(self.tokens.max())} leave the vocabulary"
                f" of {vocab_size} ids"
            )
        if not np.isfinite(self.probs).all() or self.probs.min() < 0 or self.probs.max() > 1.0001:
            raise ValueError("draft tree: probs must be finite and between 0 and 1")
        edges = self.parents.astype(np.int64) << 32 | self.tokens
        if len(np.unique(edges)) != n:
            raise ValueError("draft tree: two siblings carry the same token")
        return self
