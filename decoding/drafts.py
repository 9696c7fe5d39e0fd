"""The drafting side of the loop: one session per sequence, one call per step, and nothing that can stop the text.

Whatever a drafter does, the loop goes on: a call that raises and a tree that breaks the promises of `DraftTree` each
become an empty tree, counted by reason in `GenerationStats.failures` and logged. After a failed call the sessions may
have missed a commit, so they are opened again from the history; if that fails too, the next tries come at doubling
distances.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from redraft.decoding.pruning import best_nodes, not_deeper
from redraft.decoding.sequence import Sequence
from redraft.decoding.stats import GenerationStats
from redraft.decoding.tree_size import TreeSizer
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.draft_tree import DraftTree

__all__ = ["Drafts", "Emission"]

_log = logging.getLogger(__name__)
_LONGEST_PAUSE = 64


class Emission(NamedTuple):
    """What one sequence emitted in a step (already part of it), and what the drafter may learn from that step.

    states: float32[m, d], projected hidden states: of the tokens, and in the first emission of the prompt's before them.
    """

    sequence: Sequence
    tokens: list[int]
    candidates: Candidates | None
    states: np.ndarray | None = None


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
        sizer: TreeSizer | None,
        stats: GenerationStats,
    ) -> None:
        self._drafter = drafter
        self._sizer = sizer
        self._untold: dict[int, list[Emission]] = {}  # of steps that went without drafting
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
            wanted = self._wanted(emissions)
            if wanted and not self._ready(emissions):
                return nothing
            try:
                trees = self._exchange(emissions, wanted)
            except Exception as error:  # noqa: BLE001 - whatever it is, the text does not depend on it
                self._fail(error)
                return nothing
            self._failed_in_a_row = 0
            trees = [self._usable(tree, sequence) for tree, sequence in zip(trees, going_on)]
            if self._sizer is not None and trees and wanted:
                return self._sizer.cut(trees, max(sequence.length for sequence in going_on))
            return trees

    def _wanted(self, emissions: list[Emission]) -> bool:
        """Whether this step is to have drafts; tells the sizer how the step before went."""
        if self._sizer is None:
            return self._max_nodes != 0
        self._sizer.observe(sum(len(emission.tokens) - 1 for emission in emissions))
        if self._max_nodes != 0 and self._sizer.wants_draft():
            return True
        lengths = [emission.sequence.length for emission in emissions if not emission.sequence.done]
        self._sizer.plain(len(lengths), max(lengths, default=0))
        self._stats.gated_steps += len(lengths)
        return False

    def _ready(self, emissions: list[Emission]) -> bool:
        """Whether there are sessions that know everything but what is still untold; opens them where it is time."""
        if self._sessions:
            return True
        if self._pause > 0:
            self._pause -= 1
            return False
        self._untold.clear()
        self._open([emission.sequence for emission in emissions], [len(emission.tokens) for emission in emissions])
        return bool(self._sessions)

    def _exchange(self, emissions: list[Emission], wanted: bool) -> list[DraftTree]:
        """One call for all sequences that go on, and a last commit for those that have ended.

        Where no drafts are wanted, nobody is called and what was emitted waits for the next call.
        """
        requests = []
        for emission in emissions:
            sequence = emission.sequence
            told = [*self._untold.pop(sequence.index, ()), emission]
            if sequence.done and sequence.index in self._sessions:
                self._sessions[sequence.index].commit(*_joined(told))
            elif not sequence.done and wanted:
                requests.append((self._sessions[sequence.index], *_joined(told)))
            elif not sequence.done:
                self._untold[sequence.index] = told
        if not requests:
            return [DraftTree.empty() for emission in emissions if not emission.sequence.done]
        trees = self._drafter.step(requests)
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


def _joined(emissions: list[Emission]) -> tuple[list[int], Candidates | None, np.ndarray | None]:
    """The tokens, candidates and states of consecutive steps, as those of one."""
    tokens = [token for emission in emissions for token in emission.tokens]
    states = [emission.states for emission in emissions if emission.states is not None]
    states = np.concatenate(states) if states else None
    learned = [emission.candidates for emission in emissions if emission.candidates is not None]
    if len(learned) < 2:
        return tokens, learned[0] if learned else None, states
    columns = (
        np.concatenate([getattr(part, name) for part in learned]) for name in ("tokens", "previous", "ids", "probs")
    )
    return tokens, Candidates(*columns), states
