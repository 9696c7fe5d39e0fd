"""The drafter in process: namespaces, indexes and sessions behind one object.

`DraftClient` (redraft.client) has the same interface, over gRPC.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Executor

import numpy as np

from redraft.retrieval import batch
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.dense_index import DenseIndex, open_dense
from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.index_directory import CorpusIndex, warm_lookups
from redraft.retrieval.namespace import Namespace
from redraft.retrieval.open_indexes import OpenIndexes
from redraft.retrieval.provenance import Occurrence
from redraft.retrieval.session import Session
from redraft.retrieval.state_map import StateMap, StateOrigin
from redraft.retrieval.token_recycling import new_table
from redraft.retrieval.tokens import as_step, as_tokens

__all__ = ["Drafter"]


class Drafter:
    """Drafts for any number of sessions. Safe to use from several threads.

    Args:
        config: settings; `DraftConfig()` accepts any token id.
        indexes: corpus indexes, or directories that hold several (the shards of one corpus); at most 8 altogether. The
            successors of all are candidates; the first index that names a token gives it its evidence.
        successors: the target model's own successor table (`redraft index build-successors`).
        dense: a dense index of the target model (`redraft index build-dense`); commits may then bring hidden states.
    Raises IndexFormatError for an index that cannot be used, ValueError for too many.
    """

    def __init__(self, config: DraftConfig | None = None, indexes=(), successors=None, dense=None):
        self.config = config or DraftConfig()
        self.no_recycling = new_table(0)
        self.enabled = sum(1 << i for i, name in enumerate(Source.NAMES) if name not in self.config.disabled)
        self.indexes = OpenIndexes()
        self.dense: DenseIndex | None = None
        self._indexes_lock = threading.Lock()
        self._namespaces: dict[str, Namespace] = {}
        self._sessions: dict[int, Session] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        for path in indexes:
            self.load_index(path)
        if successors is not None:
            self.load_successors(successors)
        if dense is not None:
            self.load_dense(dense)

    # --- sessions ----------------------------------------------------------------------------------------------------
    def open(self, prompt_ids=(), namespace: str = "default") -> Session:
        """Begin a session with a prompt (int32-like[n], copied; may be empty). Raises ValueError, TypeError."""
        prompt = np.array(as_tokens(prompt_ids, self.config.vocab_size, what="prompt_ids"))
        if not isinstance(namespace, str):
            raise TypeError(f"namespace: wanted a string, got {type(namespace).__name__}")
        session = Session(self, next(self._ids), self._namespace(namespace), prompt)
        with self._lock:
            self._sessions[session.id] = session
        return session

    def step(self, items) -> list[DraftTree]:
        """Commit and draft for a batch: one tree per item, in order.

        Each item is (session, tokens[, candidates[, hidden[, proposal]]]). All are committed before any is drafted.
        Raises what the first that is wrong would raise alone, when the others have been committed; before anything is, for
        what is no such item (TypeError) or another drafter's session (ValueError).
        """
        items = [as_step(item, Session) for item in items]
        for session, *_ in items:
            if session._drafter is not self:
                raise ValueError(f"step: session {session.id} belongs to another drafter")
        if len(items) == 1:
            session, *commit, proposal = items[0]
            session.commit(*commit)
            return [session.draft(proposal=proposal)]
        errors = batch.commit_all([item[:4] for item in items])
        trees = batch.draft_all([(session, None, None, proposal) for session, *_, proposal in items])
        for answer in (*errors, *trees):
            if isinstance(answer, Exception):
                raise answer
        return trees

    def commit_joined(self, *commits) -> list[Exception | None]:
        """`Session.commit` for many; see `batch.commit_joined`."""
        return batch.commit_joined(*commits)

    def draft_joined(self, requests, beside: Executor | None = None) -> tuple:
        """`Session.draft` for many; see `batch.draft_joined`."""
        return batch.draft_joined(requests, beside)

    def discard(self, session: Session) -> None:
        """Called by a session that closes."""
        with self._lock:
            self._sessions.pop(session.id, None)

    @property
    def n_sessions(self) -> int:
        return len(self._sessions)

    # --- namespaces --------------------------------------------------------------------------------------------------
    def _namespace(self, name: str) -> Namespace:
        with self._lock:
            if name not in self._namespaces:
                self._namespaces[name] = Namespace(name, self.config)
            return self._namespaces[name]

    def forget(self, namespace: str, session_id: int | None = None) -> bool:
        """Forget a whole namespace, or one closed session (its output, and its prompt where prompts are remembered); returns whether there was anything."""
        with self._lock:
            found = self._namespaces.get(namespace)
        if found is None:
            return False
        if session_id is None:
            found.forget()
            return True
        with found.lock:
            forgotten = found.memory.forget(session_id)
            forgotten |= found.prompts.forget(session_id)
            forgotten |= found.dense.forget(session_id)
            found.publish()
            return forgotten

    # --- indexes -----------------------------------------------------------------------------------------------------
    @property
    def index_paths(self) -> list[str]:
        return self.indexes.paths

    def load_index(self, path) -> None:
        """Open an index or a directory of shards; sessions use it from their next step.

        One that is open is opened anew (hot swap); what was open as that path is unmapped when nobody uses it any more.
        Raises IndexFormatError if it cannot be used, ValueError for too many; what is open stays as it is.
        """
        with self._indexes_lock:
            self.indexes = self.indexes.opening(
                path, tokenizer_fingerprint=self.config.tokenizer_fingerprint, vocab_size=self.config.vocab_size
            )

    def unload_index(self, path) -> None:
        """Stop using an index; its memory is unmapped when the last session has moved on. Raises KeyError."""
        with self._indexes_lock:
            self.indexes = self.indexes.without(path)

    def load_successors(self, path) -> None:
        """Read the target model's successor table, in place of one there is; sessions use it from their next step.

        Raises IndexFormatError if it cannot be used, or was made with a model of another vocabulary or tokenizer.
        """
        with self._indexes_lock:
            self.indexes = self.indexes.with_successors(
                path, tokenizer_fingerprint=self.config.tokenizer_fingerprint, vocab_size=self.config.vocab_size
            )

    def load_dense(self, path) -> None:
        """Open a dense index, in place of one there is; sessions ask it from their next step.

        Raises IndexFormatError if it cannot be used, MissingExtraError without FAISS, ValueError while states of another map
        may be kept: a drafter that has had a dense index takes none but its new versions.
        """
        with self._indexes_lock:
            found = open_dense(
                path, tokenizer_fingerprint=self.config.tokenizer_fingerprint, vocab_size=self.config.vocab_size
            )
            if self.dense is not None and found.map.digest != self.dense.map.digest:
                raise ValueError(
                    f"{path}: its map has digest {found.map.digest[:12]}, states kept so far were projected with"
                    f" {self.dense.map.digest[:12]} ({self.dense.path}): begin a new drafter"
                )
            self.indexes.check_fits(found)
            self.dense = found

    @property
    def dense_corpus(self) -> CorpusIndex | None:
        """The corpus that the dense index is of."""
        return self.dense.corpus if self.dense is not None else None

    @property
    def hidden_size(self) -> int:
        """Numbers in a projected hidden state that commits may bring; 0: there is no dense index, and they may bring none."""
        return self.dense.map.dimension if self.dense is not None else 0

    @property
    def states(self) -> tuple[StateMap, StateOrigin] | None:
        """How hidden states that commits bring are to be projected, and whose they must be; None: none are taken."""
        dense = self.dense
        return (dense.map, dense.origin) if dense is not None else None

    def locate(self, passages) -> list[Occurrence | None]:
        """Where passages occur in the indexes that are open now; see `DraftTree.provenance`, which is the way to ask.

        passages: int32-like[n] each, the token in question last. Raises ValueError and TypeError for bad ids.
        """
        vocab_size = self.config.vocab_size
        passages = [np.array(as_tokens(passage, vocab_size, what="passages")) for passage in passages]
        return self.indexes.locate(passages, self.dense_corpus)

    # --- life --------------------------------------------------------------------------------------------------------
    def warmup(self) -> None:
        """Compile (or load) every kernel that a session can reach, whatever indexes are opened later."""
        other = Drafter(DraftConfig())
        for _ in range(2):
            with other.open(np.arange(40) % 7) as session:
                for _ in range(12):
                    session.commit([1, 2, 3, 4, 5, 6, 0, 1], Candidates.checked([1], [0], [[2, 3]], [[0.5, 0.2]]))
                    session.draft(proposal=[2, 3])
                session.certainty()
                session.truncate(20)
        with other.open([1, 2]) as one, other.open([2, 1]) as two:
            opinions = Candidates.checked([1], [0], [[2, 3]], [[0.5, 0.2]])
            other.step([(one, [2], opinions), (two, [1], opinions)])
        warm_lookups()
        other._namespaces["default"].memory.refresh_frequent()
        other.forget("default", 1)

    def close(self) -> None:
        """Close all sessions and indexes."""
        for session in list(self._sessions.values()):
            session.close()
        with self._indexes_lock:
            for path in self.index_paths:
                self.indexes = self.indexes.without(path)
            self.dense = None

    def __enter__(self) -> Drafter:
        return self

    def __exit__(self, *exc) -> None:
        self.close()
