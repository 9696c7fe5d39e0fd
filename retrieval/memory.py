"""What a namespace remembers: earlier outputs, as one context trie with a token budget.

Every output is a document of its own, so contexts never reach from one into the next. A session's output joins while it
is written, some way behind, and its end when the session closes. When the budget is exceeded, the oldest blocks (32
tokens) of the document that was longest unused are forgotten, exactly: the trie is then as if it had never seen them.
A document is used when it is appended to, or when text is being copied from it.

Not safe for concurrent writers; the namespace holds a lock. Readers may go on meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from redraft.retrieval import prefix_trie as pt
from redraft.retrieval.forgetting import forget_block
from redraft.retrieval.kernel import kernel

__all__ = ["Memory"]

N_FREQUENT = 16
_REFRESH_SHARE = 16  # the list of frequent tokens is renewed when the memory has changed by this share


class _Document:
    __slots__ = ("first_block", "tail", "tokens")

    def __init__(self):
        self.first_block, self.tail, self.tokens = -1, -1, 0


class Memory:
    """The documents of one namespace.

    Attributes:
        trie: PrefixTrie; replaced when it grows.
        frequent: int32[16], the most frequent tokens, -1 = none.
        n_tokens: tokens remembered, at most `budget` (rounded up to a block).
    """

    def __init__(self, budget: int):
        self.budget = budget
        self._window = np.zeros(pt.MAX_CONTEXT, np.int32)
        self._best = np.zeros(N_FREQUENT, np.int64)
        self.frequent = np.full(N_FREQUENT, -1, np.int32)
        self.clear()

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self.trie = pt.create(256)
        self._documents: OrderedDict[int, _Document] = OrderedDict()  # longest unused first
        self._owners: dict[int, int] = {}  # block -> document
        self.n_tokens = 0
        self._changed = 0
        self.frequent[:] = -1

    def __contains__(self, document: int) -> bool:
        return document in self._documents

    def append(self, document: int, tokens: np.ndarray) -> None:
        """Add int32[n] `tokens` to `document` (any int; a new one begins it), forgetting what exceeds the budget."""
        if self.budget == 0:
            return
        begin = 0
        while begin < len(tokens):  # in slices, so that a long document cannot overshoot the budget
            self._append(document, tokens[begin : begin + 1024])
            begin += 1024
            while self.n_tokens > self.budget:
                self._forget_oldest_block()
        if self._changed * _REFRESH_SHARE > self.n_tokens:
            self.refresh_frequent()

    def _append(self, document: int, tokens: np.ndarray) -> None:
        entry = self._documents.setdefault(document, _Document())
        self._documents.move_to_end(document)
        done = 0
        while done < len(tokens):
            before = entry.tail
            tail, done = pt.append_tokens(self.trie, before, tokens, done)
            self._own_blocks(document, entry, before, tail)
            entry.tail = tail
            if done < len(tokens):
                self._grow()
        entry.tokens += len(tokens)
        self.n_tokens += len(tokens)
        self._changed += len(tokens)

    def _grow(self) -> None:
        """Go on in a larger trie, and leave readers the present one whole: they must not meet, in an array that both
        share, an index that lies beyond an array that only the new one has in its larger size."""
        larger = pt.grown(self.trie)
        self.trie = pt.PrefixTrie(*(new.copy() if new is old else new for new, old in zip(larger, self.trie)))

    def _own_blocks(self, document: int, entry: _Document, before: int, tail: int) -> None:
        """Note which blocks between two tails belong to the document."""
        if tail < 0 or (before >= 0 and before >> pt.BLOCK_BITS == tail >> pt.BLOCK_BITS):
            return
        block = tail >> pt.BLOCK_BITS
        last = before >> pt.BLOCK_BITS if before >= 0 else -1
        while block != last:
            self._owners[block] = document
            if self.trie.block_previous[block] < 0:
                entry.first_block = block
                break
            block = int(self.trie.block_previous[block])

    def touch(self, position: int) -> None:
        """The text at `position` was of use."""
        document = self._owners.get(position >> pt.BLOCK_BITS)
        if document is not None:
            self._documents.move_to_end(document)

    def _forget_oldest_block(self) -> None:
        document = next(iter(self._documents))
        self._forget_first_block(document, self._documents[document])

    def _forget_first_block(self, document: int, entry: _Document) -> None:
        block = entry.first_block
        in_block = int((self.trie.text[block * pt.BLOCK : (block + 1) * pt.BLOCK] >= 0).sum())
        entry.first_block = int(forget_block(self.trie, block, self._window))
        del self._owners[block]
        entry.tokens -= in_block
        self.n_tokens -= in_block
        self._changed += in_block
        if entry.first_block < 0:
            del self._documents[document]

    def forget(self, document: int) -> bool:
        """Forget one document; returns whether there was anything to forget."""
        entry = self._documents.get(document)
        if entry is None:
            return False
        while document in self._documents:
            self._forget_first_block(document, entry)
        self.refresh_frequent()
        return True

    def refresh_frequent(self) -> None:
        """Renew the list of the most frequent tokens."""
        self._changed = 0
        frequent = np.full(N_FREQUENT, -1, np.int32)
        _most_frequent(self.trie, frequent, self._best)
        self.frequent = frequent

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.trie)


@kernel(allocates=False)
def _most_frequent(trie, frequent, best):
    """Fill `frequent` with the tokens of the largest totals, ties by lower token id; `best` is an int64[16] buffer."""
    best[:] = 0
    n = 0
    for node in range(2, trie.header[pt.NODES]):
        total, token = trie.nodes[node, pt.TOTAL], trie.nodes[node, pt.TOKEN]
        if total == 0 or trie.nodes[node, pt.PARENT] != pt.ROOT:
            continue
        at = n
        while at > 0 and (best[at - 1] < total or (best[at - 1] == total and frequent[at - 1] > token)):
            if at < len(best):
                best[at], frequent[at] = best[at - 1], frequent[at - 1]
            at -= 1
        if at < len(best):
            best[at], frequent[at] = total, token
            n = min(n + 1, len(best))
