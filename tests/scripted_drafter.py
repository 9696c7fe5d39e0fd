"""A drafter whose trees are written in advance: the seam for failure tests of the verifier loop, server and client.

It has the interface of `redraft.Drafter` and none of its sources. A *script* decides every tree: a function of the
session's history (int32[n], prompt and output) and the node budget that returns a `DraftTree`, or sleeps, or raises, or
returns garbage. What it was told is kept for the test to look at: `drafter.log` holds one tuple per call, and a
session keeps its `history`, `candidates` and `hidden` states.

    drafter = ScriptedDrafter(knows(answer))            # drafts the true continuation, with wrong siblings
    drafter = ScriptedDrafter(late(0.5))                # answers after half a second
    drafter = ScriptedDrafter(raising(RuntimeError("boom")))
    drafter = ScriptedDrafter(broken("cycle"))          # parents in a cycle; see BROKEN for the other kinds
    drafter = ScriptedDrafter(in_turn(count_up, raising(OSError()), count_up))
"""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np

from redraft.retrieval import batch
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.errors import IndexFormatError, SessionClosedError
from redraft.retrieval.tokens import as_count, as_tokens

VOCAB_SIZE = 64


def tree_of(tokens, parents, probs=None, source: int = Source.SESSION) -> DraftTree:
    """A tree from plain lists; probabilities fall with depth unless given."""
    n = len(tokens)
    tree = DraftTree(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.ones(n, np.float32), np.full(n, source, np.uint8)
    )
    probs = 0.5 ** tree.depths() if probs is None else probs
    return DraftTree(tree.tokens, tree.parents, np.array(probs, np.float32), tree.sources)


def count_up(history: np.ndarray, max_nodes: int) -> DraftTree:
    """Up to 8 nodes that depend on the last token and on the length, so that a stale or swapped answer shows."""
    if not len(history):
        return DraftTree.empty()
    last, salt = int(history[-1]), len(history)
    tokens = [(last + 1) % VOCAB_SIZE, (last + salt % 7 + 2) % VOCAB_SIZE]
    parents = [-1, -1]
    while len(tokens) < 8:
        tokens.append((tokens[-2] + 3) % VOCAB_SIZE)
        parents.append(len(tokens) - 3)
    n = min(max_nodes, 8)
    return tree_of(tokens[:n], parents[:n])


def silent(history: np.ndarray, max_nodes: int) -> DraftTree:
    """Never drafts."""
    return DraftTree.empty()


def knows(sequence, length: int = 4, vocab_size: int = VOCAB_SIZE):
    """Drafts what follows in `sequence` (prompt and output), each true node beside a wrong sibling that comes first."""
    sequence = [int(token) for token in sequence]

    def script(history: np.ndarray, max_nodes: int) -> DraftTree:
        if list(history) != sequence[: len(history)]:
            return DraftTree.empty()
        tokens, parents, parent = [], [], -1
        for token in sequence[len(history) : len(history) + length]:
            tokens += [(token + 1) % vocab_size, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return tree_of(tokens[:max_nodes], parents[:max_nodes])

    return script


def late(seconds: float, then=count_up):
    """Answers as `then` does, after `seconds`."""

    def script(history: np.ndarray, max_nodes: int) -> DraftTree:
        time.sleep(seconds)
        return then(history, max_nodes)

    return script


def raising(error: BaseException):
    """Raises `error` at every draft."""

    def script(history: np.ndarray, max_nodes: int) -> DraftTree:
        raise error

    return script


def in_turn(*scripts):
    """Uses each script for one draft; the last one stays."""
    turn = itertools.chain(scripts, itertools.repeat(scripts[-1]))

    def script(history: np.ndarray, max_nodes: int) -> DraftTree:
        return next(turn)(history, max_nodes)

    return script


# Every promise of `DraftTree`, broken once. Arrays are written by hand: no constructor would make them.
BROKEN = {
    "cycle": ([1, 2, 3], [2, 0, 1], [0.5, 0.5, 0.5]),
    "own parent": ([1], [0], [0.5]),
    "parent below -1": ([1, 2], [-2, 0], [0.5, 0.5]),
    "id beyond the vocabulary": ([VOCAB_SIZE, 2], [-1, 0], [0.5, 0.5]),
    "huge id": ([2**31 - 1], [-1], [0.5]),
    "negative id": ([-1], [-1], [0.5]),
    "too many nodes": (list(range(40)) * 20, list(range(-1, 799)), [0.5] * 800),
    "twin siblings": ([5, 5], [-1, -1], [0.5, 0.5]),
    "probability above one": ([5], [-1], [1.5]),
    "probability not a number": ([5], [-1], [float("nan")]),
}


def broken(kind: str):
    """Returns the tree `BROKEN[kind]`, whatever was asked."""
    tokens, parents, probs = BROKEN[kind]
    tree = DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(probs, np.float32),
        np.zeros(len(tokens), np.uint8),
    )

    def script(history: np.ndarray, max_nodes: int) -> DraftTree:
        return tree

    return script


class ScriptedSession:
    """The session of a `ScriptedDrafter`: keeps everything it was told."""

    def __init__(self, drafter: ScriptedDrafter, number: int, prompt: np.ndarray, namespace: str) -> None:
        self.id = number
        self.namespace = namespace
        self.closed = False
        self.history = prompt.copy()
        self.candidates: list = []
        self.hidden: list = []
        self.proposals: list = []
        self._drafter = drafter

    @property
    def length(self) -> int:
        return len(self.history)

    def draft(self, max_nodes: int | None = None, min_prob: float | None = None, proposal=None) -> DraftTree:
        self._check_open()
        self._drafter.log.append(("draft", self.id, max_nodes, min_prob))
        if isinstance(proposal, DraftTree):
            proposal.check(vocab_size=self._drafter.config.vocab_size)
        self.proposals.append(proposal)
        return self._drafter.script(
            self.history.copy(), self._drafter.config.max_nodes if max_nodes is None else max_nodes
        )

    def commit(self, tokens, candidates=None, hidden=None) -> None:
        self._check_open()
        tokens = as_tokens(tokens, self._drafter.config.vocab_size)
        self._drafter.log.append(("commit", self.id, [int(token) for token in tokens]))
        self.history = np.concatenate([self.history, tokens])
        self.candidates.append(candidates)
        self.hidden.append(hidden)

    def truncate(self, length: int) -> None:
        self._check_open()
        length = as_count(length, self.length, "length")
        self._drafter.log.append(("truncate", self.id, length))
        self.history = self.history[:length]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._drafter.log.append(("close", self.id))

    def __enter__(self) -> ScriptedSession:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise SessionClosedError(f"session {self.id} is closed")


def _attempt(function, *arguments):
    """What `function` returns or raises."""
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 - the caller looks at it
        return error


class ScriptedDrafter:
    """The interface of `redraft.Drafter`; `script(history, max_nodes)` makes every tree and may be exchanged."""

    def __init__(self, script=count_up, config: DraftConfig | None = None, *, warmup_seconds: float = 0.0) -> None:
        self.script = script
        self.config = config or DraftConfig(vocab_size=VOCAB_SIZE)
        self.sessions: dict[int, ScriptedSession] = {}
        self.log: list[tuple] = []
        self.index_paths: list[str] = []
        self.hidden_size = 2
        self.states = None
        self.warm = threading.Event()
        self.closed = False
        self._warmup_seconds = warmup_seconds
        self._numbers = itertools.count(1)

    def warmup(self) -> None:
        time.sleep(self._warmup_seconds)
        self.warm.set()

    def open(self, prompt, namespace: str = "default") -> ScriptedSession:
        prompt = as_tokens(prompt, self.config.vocab_size, what="prompt")
        session = ScriptedSession(self, next(self._numbers), prompt, namespace)
        self.sessions[session.id] = session
        self.log.append(("open", session.id, namespace, len(prompt)))
        return session

    def step(self, requests) -> list[DraftTree]:
        """requests: [(session, tokens[, candidates[, hidden[, proposal]]]), ...]."""
        for session, tokens, *rest in requests:
            session.commit(tokens, *rest[:2])
        return [request[0].draft(proposal=request[4] if len(request) > 4 else None) for request in requests]

    def commit_joined(self, *commits) -> list[Exception | None]:
        return [_attempt(session.commit, *arguments) for session, *arguments in batch.apart(*commits)]

    def draft_joined(self, requests, beside=None) -> tuple:
        answers = [_attempt(session.draft, *arguments) for session, *arguments in requests]
        trees = [answer for answer in answers if isinstance(answer, DraftTree)]
        places, end = [], 0
        for answer in answers:
            if isinstance(answer, DraftTree):
                end += len(answer)
                answer = end - len(answer), end
            places.append(answer)
        names = "tokens", "parents", "probs", "sources"
        trees.append(DraftTree.empty())
        return places, *[np.concatenate([getattr(tree, name) for tree in trees]) for name in names]

    def load_index(self, path) -> None:
        if "missing" in str(path):
            raise IndexFormatError(f"{path}: not an index")
        self.index_paths.append(str(path))

    def unload_index(self, path) -> None:
        if str(path) not in self.index_paths:
            raise KeyError(f"no index {path} is open")
        self.index_paths.remove(str(path))

    def forget(self, namespace: str) -> None:
        self.log.append(("forget", namespace))

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> ScriptedDrafter:
        return self

    def __exit__(self, *error) -> None:
        self.close()
