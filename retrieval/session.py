"""One sequence being decoded: it is told what the target wrote, and asked for what may come next."""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from redraft.retrieval import best_first
from redraft.retrieval import prefix_trie as pt
from redraft.retrieval.bundle import Bundle
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.dense_search import SURE, DenseSearch, checked_states
from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.errors import SessionClosedError
from redraft.retrieval.knowledge import new_places, session_bundle
from redraft.retrieval.neighbours import CURSORS, new_neighbours
from redraft.retrieval.provenance import PASSAGE_TOKENS, Origin
from redraft.retrieval.token_recycling import learn_rows, new_table
from redraft.retrieval.tokens import as_count, as_probability, as_tokens

if TYPE_CHECKING:
    from redraft.retrieval.drafter import Drafter
    from redraft.retrieval.namespace import Namespace

__all__ = ["Session"]

RECYCLED_ROWS = 4096  # of the target's opinions kept per session
PROMPT_SLICE = 1024  # tokens of a prompt read before others may have the processor: about half a millisecond
PROMPT_TAIL = 4  # tokens of the prompt remembered with the output, so that openings are remembered, too
# A session's output joins the memory while it is written, so that sessions side by side learn from each other; what is
# newer than the lag does not yet, as the session's own text says it already. Measured: 3.208 tokens per step for 3.203.
SHARE_LAG, SHARE_STEP = 256, 32  # tokens
_NO_DRAFT = best_first.proposal_bundle(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))
_NO_NEIGHBOURS = new_neighbours()
_OWN_COLUMNS, _STORE_COLUMNS = ((1 << CURSORS) - 1) << CURSORS, (1 << CURSORS) - 1
_local = threading.local()
# Where there are more threads than cores, a neighbour's step would otherwise wait for the scheduler's slice of 3 ms to end.
_give_way = getattr(os, "sched_yield", functools.partial(time.sleep, 0))


def _workspace() -> tuple[best_first.Workspace, np.ndarray]:
    """The buffers of this thread, and the addresses of their bundle."""
    try:
        return _local.workspace
    except AttributeError:
        work = best_first.new_workspace()
        _local.workspace = work, best_first.workspace_bundle(work).addresses
        return _local.workspace


def _own_candidates(candidates: Candidates, vocab_size: int | None) -> Candidates:
    """Checked against this drafter's vocabulary, in arrays that kernels take (writable ones: one compiled form)."""
    if not isinstance(candidates, Candidates):
        raise TypeError(f"candidates: wanted redraft.Candidates or None, got {type(candidates).__name__}")
    return candidates.copied(vocab_size)


class Session:
    """Made by `Drafter.open`. Sessions may be used from different threads, each by one thread at a time.

    Attributes:
        id: int, unique within the drafter.
        namespace: name of the namespace whose memory it shares.
        length: tokens so far, prompt included; after `close`, what it was then.
        closed: whether `close` was called.
    """

    def __init__(self, drafter: Drafter, session_id: int, namespace: Namespace, prompt: np.ndarray):
        self.id = session_id
        self.closed = False
        self._drafter = drafter
        self._namespace = namespace
        self._lock = threading.Lock()
        self._prompt_length = len(prompt)
        self._remembered = max(len(prompt) - PROMPT_TAIL, 0)  # what comes before this has joined the memory, or will not
        self._recycled = drafter.no_recycling
        self._proposal = _NO_DRAFT
        self._bundle: Bundle | None = None
        self._dense: DenseSearch | None = None  # made when the target first sends its state
        self._take_prompt(prompt)

    @property
    def namespace(self) -> str:
        return self._namespace.name

    @property
    def length(self) -> int:
        return self._final_length if self.closed else int(self._state.now[0])

    def _take_prompt(self, prompt: np.ndarray) -> None:
        """Begin with `prompt`: index it whole, and stand at its end."""
        self._trie, self._tail = pt.create(len(prompt)), -1
        for begin in range(0, len(prompt), PROMPT_SLICE):
            tokens, done = prompt[begin : begin + PROMPT_SLICE], 0
            while True:
                self._tail, done = pt.append_tokens(self._trie, self._tail, tokens, done)
                if done == len(tokens):
                    break
                self._trie = pt.grown(self._trie)
            _give_way()
        self._state = new_places(1)
        self._describe()
        self._indexes = self._drafter.indexes
        end = prompt[-pt.MAX_CONTEXT :]
        self._state.now[0] = len(prompt) - len(end)
        self._follow(end)

    def _describe(self) -> None:
        """Describe the arrays of this session anew, some of which have been replaced."""
        neighbours = self._dense.neighbours if self._dense is not None else _NO_NEIGHBOURS
        self._bundle = session_bundle(self._trie, self._recycled, self._state, neighbours, self._bundle)

    def _follow(self, tokens: np.ndarray) -> None:
        namespace = self._namespace.bundle
        best_first.follow_tokens(self._bundle.addresses, namespace.addresses, self._indexes.bundle.addresses, tokens)

    def _ready(self) -> None:
        """Check that the session is open, and let it stand in the drafter's present indexes."""
        if self.closed:
            raise SessionClosedError(f"session {self.id} is closed")
        if self._indexes is not self._drafter.indexes:
            self._indexes = self._drafter.indexes
            here, self._state = self._state, new_places(1)
            self._describe()
            self._follow(here.windows[0, : here.filled[0]][::-1].copy())
            here.cursors[:] = self._state.cursors
            self._state = here
            self._describe()

    def draft(self, max_nodes: int | None = None, min_prob: float | None = None, proposal=None) -> DraftTree:
        """A tree of likely next tokens.

        Args:
            max_nodes: draft budget of this call, 0 to 512 (default: the drafter's).
            min_prob: what a node must be worth, as `DraftConfig.min_prob` (default: the drafter's).
            proposal: the caller's own draft, a DraftTree or a chain of token ids; merged with everything else.
        Raises SessionClosedError, ValueError, TypeError.
        """
        config = self._drafter.config
        max_nodes = config.max_nodes if max_nodes is None else as_count(max_nodes, best_first.MAX_BUDGET, "max_nodes")
        min_prob = config.min_prob if min_prob is None else as_probability(min_prob, "min_prob")
        with self._lock:
            self._ready()
            self._propose(proposal)
            if max_nodes == 0:
                return DraftTree.empty()
            work, addresses = _workspace()
            if self._dense is not None and self._dense.waiting:
                self._search()
            namespace = self._namespace.bundle
            n = best_first.draft_tree(
                self._bundle.addresses, namespace.addresses, self._indexes.bundle.addresses, addresses,
                self._proposal.addresses, self._drafter.enabled, max_nodes, min_prob,
            )  # fmt: skip
            return DraftTree(
                work.tokens[:n].copy(), work.parents[:n].copy(), work.probs[:n].copy(), work.sources[:n].copy(),
                self._origin(),
            )  # fmt: skip

    def certainty(self) -> float:
        """How probable the likeliest next token is by what is known now, without asking anything slow."""
        _, addresses = _workspace()
        return best_first.certainty(
            self._bundle.addresses, self._namespace.bundle.addresses, self._indexes.bundle.addresses, addresses,
            self._proposal.addresses, self._drafter.enabled,
        )  # fmt: skip

    def _search(self) -> None:
        """Ask with the target's state: the session's own text always, stores where nothing else is sure."""
        dense, enabled = self._dense, self._drafter.enabled
        text = self._trie.text[: self.length]
        if enabled >> Source.RERANK & 1:
            self._follow_neighbours(True, dense.own(text))
        stores = self._drafter.dense, self._namespace.dense
        there_are_any = enabled >> Source.DENSE & 1 and (stores[0] is not None or len(stores[1]))
        if there_are_any and self.certainty() < SURE:
            self._follow_neighbours(False, dense.stores(text, *stores))
        dense.forget_key()

    def _follow_neighbours(self, own: bool, columns: int) -> None:
        """From now on follow these columns of the neighbours, in place of those that the last search of the kind found."""
        others = _STORE_COLUMNS if own else _OWN_COLUMNS
        self._state.following[0] = int(self._state.following[0]) & others | columns

    def _origin(self) -> Origin | None:
        """What the tree's provenance can be found from."""
        corpus = self._drafter.dense_corpus
        if corpus is None and not self._indexes.indexes:
            return None
        context = self._state.windows[0, : min(self._state.filled[0], PASSAGE_TOKENS - 1)]
        return Origin(context[::-1].copy(), functools.partial(self._indexes.locate, more=corpus))

    def _propose(self, proposal) -> None:
        """Take the caller's draft for this step, to be drafted from and, at the next commit, learned from."""
        if proposal is None:
            if self._proposal is not _NO_DRAFT:
                self._proposal = _NO_DRAFT
                self._state.proposed[0] = -2
            return
        vocab_size = self._drafter.config.vocab_size
        if not isinstance(proposal, DraftTree):
            proposal = DraftTree.chain(as_tokens(proposal, vocab_size, what="proposal"), source=Source.CALLER)
        proposal.check(vocab_size=vocab_size)
        self._proposal = best_first.proposal_bundle(
            proposal.tokens.copy(), proposal.parents.copy(), proposal.probs.copy()
        )
        self._state.proposed[0] = -1 if len(proposal) else -2

    def commit(self, tokens, candidates: Candidates | None = None, hidden=None) -> None:
        """The target emitted `tokens` (accepted ones and the bonus token).

        Args:
            tokens: int32-like[n]; may be empty.
            candidates: the target's top-k at the positions it verified, for Token Recycling.
            hidden: float32[d] or [m, d], the target's projected hidden states: row i is the one from which token i of
                the text's last m tokens, these included, was chosen. Only with a dense index.
        Raises SessionClosedError, ValueError, TypeError; nothing is taken in then.
        """
        vocab_size = self._drafter.config.vocab_size
        tokens = as_tokens(np.array(tokens), vocab_size)  # looked at once it is ours: the caller's may change meanwhile
        if candidates is not None:
            candidates = _own_candidates(candidates, vocab_size)
        with self._lock:
            self._ready()
            if hidden is not None:
                hidden = checked_states(hidden, self._drafter.hidden_size, self.length + len(tokens) - 1)
            with self._namespace.lock:
                self._learn(tokens)
                if self._dense is not None:
                    self._dense.forget_key()
                if hidden is not None:
                    self._take_states(hidden)
                if candidates is not None:
                    self._recycle(candidates)

    def _learn(self, tokens: np.ndarray) -> None:
        _, addresses = _workspace()
        namespace, done = self._namespace.bundle, 0
        while True:
            self._tail, done, length, copied_from = best_first.learn_tokens(
                self._bundle.addresses, namespace.addresses, self._indexes.bundle.addresses, addresses,
                self._proposal.addresses, self._drafter.enabled, self._tail, tokens, done,
            )  # fmt: skip
            if done == len(tokens):
                break
            self._trie = pt.grown(self._trie)
            self._describe()
        if copied_from >= 0:
            self._namespace.memory.touch(copied_from)
        if length - self._remembered >= SHARE_LAG + SHARE_STEP:
            self._remember(length - SHARE_LAG)

    def _remember(self, end: int) -> None:
        """The output up to `end` joins the namespace's memory, where other sessions find it."""
        self._namespace.memory.append(self.id, self._trie.text[self._remembered : end].copy())
        self._namespace.publish()
        self._remembered = end

    def _withdraw(self, length: int) -> None:
        """The text is cut to `length`: what the memory holds of the rest goes."""
        if length < max(self._remembered, self._prompt_length):
            self._prompt_length = min(self._prompt_length, length)
            self._remembered = max(self._prompt_length - PROMPT_TAIL, 0)
            with self._namespace.lock:
                self._namespace.memory.forget(self.id)
                self._namespace.publish()

    def _take_states(self, keys: np.ndarray) -> None:
        if self._dense is None:
            self._dense = DenseSearch(keys.shape[1])
            self._describe()
        self._dense.take(keys, self._trie.text[self.length - len(keys) : self.length], self.length)

    def _recycle(self, candidates: Candidates) -> None:
        self._namespace.ensure_recycling()
        if len(self._recycled.rows) == 0:
            self._recycled = new_table(RECYCLED_ROWS)
            self._describe()
        rows = candidates.tokens, candidates.previous, candidates.ids, candidates.probs
        learn_rows(self._recycled, *rows)
        learn_rows(self._namespace.recycled, *rows)
        self._namespace.publish()

    def tokens(self) -> np.ndarray:
        """int32[length]: prompt and everything committed; a copy."""
        return self._trie.text[: self.length].copy()

    def truncate(self, length: int) -> None:
        """Go back to the first `length` tokens (rollback, context shift): as if the rest had never been committed.

        Costs as much as opening a session with what remains. Raises ValueError if there are fewer tokens.
        """
        with self._lock:
            self._ready()
            length = as_count(length, self.length, "length")
            kept = self.tokens()[:length]
            self._withdraw(length)
            self._proposal = _NO_DRAFT
            if self._dense is not None:
                self._dense.cut(length)
            self._take_prompt(kept)

    def close(self) -> None:
        """End the session; the rest of its output joins the namespace's memory. A second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self._final_length = self.length
            self.closed = True
            with self._namespace.lock:
                self._remember(self._final_length)
                if self._drafter.config.prompt_tokens:
                    self._namespace.prompts.append(self.id, self._trie.text[: self._prompt_length].copy())
                if self._dense is not None:
                    begin = max(self._prompt_length - PROMPT_TAIL, 0)
                    keys, positions = self._dense.ring.since(self._prompt_length)
                    output = self._trie.text[begin : self._final_length].copy()
                    self._namespace.dense.append(self.id, output, keys, positions - begin)
                self._namespace.publish()
            self._drafter.discard(self)
            del self._trie, self._state, self._bundle, self._indexes, self._dense

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc) -> None:
        self.close()
