"""N-gram lookup by KMP: the longest recent match, found by one scan and no index.

The context's last tokens are looked for earlier in the context, and what followed them there is the draft. This is
the baseline that every engine ships (LLMA, prompt lookup decoding, vLLM's ngram proposer) and what the client falls
back on when the server is late or gone: it needs nothing but the tokens.

Read backwards, the suffix to be found is a prefix, so Knuth, Morris and Pratt's failure table of the reversed
suffix (at most `max_match` entries) drives one backward scan that knows after each token how much of the suffix
starts there. O(n) time for a context of n tokens, O(max_match) space, and the scan stops at the first full match, so
copied text costs far less. Three points where others differ:

- On ties the *latest* occurrence wins (others scan forward and take the earliest): what was said last is a better
  guide than what was said first, never worse in measurements.
- An occurrence may overlap the suffix, and a continuation that runs into the end of the context goes on with its
  own beginning: a text of period p is continued with period p, at any draft length.
- The occurrence never ends at the last token, so the suffix does not find itself.

The suffix automaton answers the same question in constant time per token and knows counts, too, at about a
hundred bytes a token: better for every session that lives longer than a few steps.
"""

from __future__ import annotations

import itertools

import numpy as np

from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.errors import SessionClosedError
from redraft.retrieval.kernel import kernel
from redraft.retrieval.tokens import as_tokens

__all__ = ["NgramDrafter", "NgramSession", "propose"]


@kernel
def _find(tokens, failure):
    """Longest suffix of at most len(failure) tokens that occurs earlier, latest on ties: (length, distance back).

    tokens int32[n]; failure int32[max_match] is working space: failure[k] = length of the longest proper border of
    the k + 1 last tokens read backwards. The occurrence is the suffix moved `distance` >= 1 to the left.
    """
    n = len(tokens)
    longest = min(len(failure), n - 1)
    if longest < 1:
        return 0, 0
    last = n - 1
    failure[0] = 0
    length = 0
    for k in range(1, longest):
        token = tokens[last - k]
        while length > 0 and tokens[last - length] != token:
            length = failure[length - 1]
        if tokens[last - length] == token:
            length += 1
        failure[k] = length
    best, distance, length = 0, 0, 0
    for i in range(1, n):
        token = tokens[last - i]
        while length > 0 and tokens[last - length] != token:
            length = failure[length - 1]
        if tokens[last - length] == token:
            length += 1
        if length > best:
            best, distance = length, i - length + 1
            if best == longest:
                break
    return best, distance


@kernel
def _propose(tokens, draft, min_match, failure):
    """Fill draft int32[k] with what followed the match; returns the match's length, 0 where nothing is drafted."""
    n = len(tokens)
    length, distance = _find(tokens, failure)
    if length < min_match:
        return 0
    for k in range(len(draft)):
        draft[k] = tokens[n - distance + k] if k < distance else draft[k - distance]
    return length


def _check_limits(max_tokens: int, max_match: int, min_match: int) -> None:
    if max_tokens < 0:
        raise ValueError(f"max_tokens: wanted 0 or more, got {max_tokens}")
    if not 1 <= min_match <= max_match:
        raise ValueError(f"wanted 1 <= min_match <= max_match, got min_match={min_match}, max_match={max_match}")


def propose(tokens, max_tokens: int, *, max_match: int = 8, min_match: int = 1) -> np.ndarray:
    """Draft the continuation of a context from the context alone.

    Args:
        tokens: int32-like[n], the context.
        max_tokens: how long the draft is to be.
        max_match: the longest suffix that is looked for.
        min_match: below this match length nothing is drafted.

    Returns int32[k]: max_tokens tokens, or none where nothing matches. Raises TypeError or ValueError for tokens
    that are no token ids and for limits that make no sense.
    """
    _check_limits(max_tokens, max_match, min_match)
    draft = np.empty(max_tokens, np.int32)
    found = _propose(as_tokens(tokens), draft, min_match, np.empty(max_match, np.int32))
    return draft if found else draft[:0]


class NgramSession:
    """One sequence under an `NgramDrafter`: the tokens so far, nothing else."""

    def __init__(self, drafter: NgramDrafter, session_id: int, prompt: np.ndarray) -> None:
        self.id = session_id
        self.closed = False
        self._drafter = drafter
        self._text = np.empty(max(256, 2 * len(prompt)), np.int32)
        self._text[: len(prompt)] = prompt
        self._length = len(prompt)

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return self._length

    def draft(self, max_nodes: int | None = None, min_prob: float | None = None, proposal=None) -> DraftTree:
        """A chain that continues the latest longest match; where nothing matches, the caller's own `proposal`."""
        self._check_open()
        return self._drafter._draft(self._text[: self._length], max_nodes, min_prob, proposal)

    def commit(self, tokens, candidates=None, hidden=None) -> None:
        """Append what the target emitted. `candidates` and `hidden` have nothing to teach this drafter."""
        self._check_open()
        tokens = as_tokens(tokens, self._drafter.config.vocab_size)
        end = self._length + len(tokens)
        if end > len(self._text):
            grown = np.empty(2 * end, np.int32)
            grown[: self._length] = self._text[: self._length]
            self._text = grown
        self._text[self._length : end] = tokens
        self._length = end

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens. Raises ValueError unless 0 <= length <= self.length."""
        self._check_open()
        if not 0 <= length <= self._length:
            raise ValueError(f"truncate: wanted a length from 0 to {self._length}, got {length}")
        self._length = length

    def close(self) -> None:
        """End the session; closing twice is fine."""
        self.closed = True
        self._text = np.empty(0, np.int32)
        self._length = 0

    def _check_open(self) -> None:
        if self.closed:
            raise SessionClosedError(f"session {self.id} is closed")

    def __enter__(self) -> NgramSession:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class NgramDrafter:
    """N-gram lookup behind the `Drafter` interface: no memory, no learning, chains only.

    `chain` is the draft length (prompt lookup's customary 10) where `draft` is not told fewer nodes.
    """

    index_paths: tuple[str, ...] = ()
    states = None

    def __init__(
        self, config: DraftConfig | None = None, *, chain: int = 10, max_match: int = 8, min_match: int = 1
    ) -> None:
        _check_limits(chain, max_match, min_match)
        self.config = DraftConfig() if config is None else config
        self._chain, self._max_match, self._min_match = chain, max_match, min_match
        self._ids = itertools.count(1)

    def open(self, prompt_ids=(), namespace: str = "default") -> NgramSession:
        """Start a sequence. `namespace` makes no difference: nothing is remembered."""
        return NgramSession(self, next(self._ids), as_tokens(prompt_ids, self.config.vocab_size, what="prompt_ids"))

    def step(self, batch) -> list[DraftTree]:
        """Commit and draft for `(session, tokens[, candidates[, hidden[, proposal]]])` items; trees in their order."""
        batch = [tuple(item) for item in batch]
        for session, tokens, *_ in batch:
            session.commit(tokens)
        return [session.draft(proposal=rest[2] if len(rest) > 2 else None) for session, _, *rest in batch]

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> NgramDrafter:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _draft(self, text: np.ndarray, max_nodes: int | None, min_prob: float | None, proposal) -> DraftTree:
        budget = self.config.max_nodes if max_nodes is None else max_nodes
        floor = self.config.min_prob if min_prob is None else min_prob
        tokens = np.empty(min(budget, self._chain), np.int32)
        length = _propose(text, tokens, self._min_match, np.empty(self._max_match, np.int32))
        if length == 0:
            return _cut(proposal, budget)
        probs = _path_probs(length, len(tokens))
        keep = int(np.count_nonzero(probs >= floor))
        return DraftTree.chain(tokens[:keep], probs[:keep], Source.NGRAM)


def _path_probs(match: int, n: int) -> np.ndarray:
    """float32[n]: how likely the first 1, 2, ... n tokens after a match are right.

    A match of m tokens is followed by the right one about m times in m + 2 (seen on recorded outputs: .22 for 1, .43
    for 2, .58 for 3, .71 for 5, .89 for 8), and every right one makes the match longer: the product telescopes.
    """
    end = match + np.arange(1, n + 1, dtype=np.float64)
    return (match * (match + 1) / (end * (end + 1))).astype(np.float32)


def _cut(proposal, budget: int) -> DraftTree:
    """The caller's own draft within the budget: parents come first, so the first nodes of a tree are a tree."""
    if proposal is None:
        return DraftTree.empty()
    if not isinstance(proposal, DraftTree):
        return DraftTree.chain(as_tokens(proposal, what="proposal")[:budget], source=Source.CALLER)
    sources = np.full(min(budget, len(proposal)), Source.CALLER, np.uint8)
    return DraftTree(proposal.tokens[:budget], proposal.parents[:budget], proposal.probs[:budget], sources)
