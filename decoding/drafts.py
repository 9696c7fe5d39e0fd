"""The drafting side of the loop: one session per sequence, one call per step, and nothing that can stop the text.

Whatever a drafter does, the loop goes on: a call that raises and a tree that breaks the promises of `DraftTree` each
become an empty tree, counted by reason in `GenerationStats.failures` and logged. After a failed call the sessions may
have missed a commit, so they are opened again from the history; if that fails too, the next tries come at doubling
distances.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from redraft.decoding.pruning import best_nodes, not_deeper
from redraft.decoding.sequence import Sequence
from redraft.decoding.stats import GenerationStats
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.draft_tree import DraftTree

__all__ = ["Drafts", "Emission"]

_log = logging.getLogger(__name__)
_LONGEST_PAUSE = 64


class Emission(NamedTuple):
    """What one sequence emitted in a step (already part of it), and what the drafter may learn from that step."""

    sequence: Sequence
    tokens: list[int]
    candidates: Candidates | None


class Drafts:
    """Sessions of a batch at `drafter` (None: never drafts). Close it, or use it in a `with` block."""

    def __init__(
        self,
        drafter,
        sequences: list[Sequence],
        *,
        namespace: str,
        max_nodes: int | None,
        vocab_size: int,
        stats: GenerationStats,
    ) -> None:
        self._drafter = drafter
        self._namespace = namespace
        self._max_nodes = max_nodes
        self._vocab_size = vocab_size
        self._stats = stats
        self._sessions: dict[int, object] = {}
        self._pause = 0
        self._failed_in_a_row = 0
        if drafter is not None:
            self._open(sequences, [0] * len(sequences))

    def step(self, emissions: list[Emission]) -> list[DraftTree]:
        """Tell the drafter what each sequence emitted; returns a tree for each one that goes on, in order.

        A tree is empty where there is no draft. A sequence that has ended is told too: its last tokens join the memory.
        """
        going_on = [emission.sequence for emission in emissions if not emission.sequence.done]
        nothing = [DraftTree.empty() for _ in going_on]
        if self._drafter is None:
            return nothing
        with self._stats.timed("draft"):
            if not self._ready(emissions):
                return nothing
            try:
                trees = self._exchange(emissions)
            except Exception as error:  # noqa: BLE001 - whatever it is, the text does not depend on it
                self._fail(error)
                return nothing
            self._failed_in_a_row = 0
            return [self._usable(tree, sequence) for tree, sequence in zip(trees, going_on)]

    def _ready(self, emissions: list[Emission]) -> bool:
        """Whether there are sessions that know everything up to the last step's tokens; opens them where it is time."""
        if self._sessions:
            return True
        if self._pause > 0:
            self._pause -= 1
            return False
        self._open([emission.sequence for emission in emissions], [len(emission.tokens) for emission in emissions])
        return bool(self._sessions)

    def _exchange(self, emissions: list[Emission]) -> list[DraftTree]:
        """One call for all sequences that go on, and a last commit for those that have ended."""
        requests = []
        for sequence, tokens, candidates in emissions:
            session = self._sessions[sequence.index]
            if sequence.done or self._max_nodes == 0:
                session.commit(tokens, candidates)
            else:
                requests.append((session, tokens, candidates))
        if self._max_nodes == 0:
            return [DraftTree.empty() for emission in emissions if not emission.sequence.done]
        trees = self._drafter.step(requests) if requests else []
        if len(trees) != len(requests):
            raise ValueError(f"drafter.step: wanted {len(requests)} trees, got {len(trees)}")
        return trees

    def _usable(self, tree: DraftTree, sequence: Sequence) -> DraftTree:
        """`tree` where it is valid, without what is over the budget or too deep to be emitted."""
        try:
            tree.check(vocab_size=self._vocab_size, max_nodes=self._drafter.config.max_nodes)
        except (ValueError, TypeError, AttributeError) as error:
            self._count("invalid tree", error)
            return DraftTree.empty()
        return best_nodes(not_deeper(tree, sequence.max_length - sequence.length - 1), self._max_nodes)

    def _open(self, sequences: list[Sequence], held_back: list[int]) -> None:
        """Open a session with each history, less its last `held_back` tokens."""
        try:
            for sequence, count in zip(sequences, held_back):
                history = sequence.history()[: sequence.length - count]
                self._sessions[sequence.index] = self._drafter.open(history, namespace=self._namespace)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._count(type(error).__name__, error)
        self.close()
        self._pause = min(2**self._failed_in_a_row - 1, _LONGEST_PAUSE)
        self._failed_in_a_row += 1

    def _count(self, reason: str, error: Exception) -> None:
        if not self._stats.failures[reason]:
            _log.warning("drafting failed (%s: %s); the text goes on without this draft", reason, error)
        self._stats.failures[reason] += 1

    def close(self) -> None:
        """Close every session; a drafter that fails here is counted like one that fails elsewhere."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            try:
                session.close()
            except Exception as error:  # noqa: BLE001 - as above
                self._count(type(error).__name__, error)

    def __enter__(self) -> Drafts:
        return self

    def __exit__(self, *error) -> None:
        self.close()
