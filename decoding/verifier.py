"""A batch of sequences under one target model: prefill, then one forward per step over all their trees.

Every sequence accepts its own number of tokens (BASS); rows are left-aligned in the cache with a length each, so a
ragged batch needs no padding between prompt and output, and the text of a sequence does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from redraft.decoding.acceptance import accept
from redraft.decoding.candidates import Scored, learnable, prefill_positions, score
from redraft.decoding.drafts import Emission
from redraft.decoding.sampling import Choice
from redraft.decoding.sequence import Sequence
from redraft.decoding.states import Projection
from redraft.decoding.stats import GenerationStats
from redraft.decoding.target_model import TargetModel
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.draft_tree import DraftTree

__all__ = ["Verifier"]

MOST_STATES = 4096  # of a prompt's states that a drafter is told, the last ones
_PREFILL_ROWS = 64  # prompt positions whose runners-up are taught; each costs a row of the output head, 256 bring no more


class Verifier:
    """Writes into `sequences` what `target` chooses.

    Args:
        target: inside its `decoding` block.
        sequences: each with a prompt.
        choice: how tokens are chosen.
        teach: whether runners-up are to be gathered for a drafter.
        projection: how hidden states are to be projected for a drafter that takes them; its tap is open.
        stats: filled in.
        report: told of every emission: (sequence, tree, accepted nodes, tokens).
    """

    def __init__(
        self,
        target: TargetModel,
        sequences: list[Sequence],
        choice: Choice,
        *,
        teach: bool,
        projection: Projection | None = None,
        stats: GenerationStats,
        report: Callable[[Sequence, DraftTree, list[int], list[int]], None],
    ) -> None:
        self._target = target
        self._running = sequences
        self._choice = choice
        self._teach = teach
        self._projection = projection
        self._stats = stats
        self._report = report
        self._cache = target.new_cache(len(sequences), max(sequence.max_length for sequence in sequences))

    def prefill(self) -> list[Emission]:
        """Read the prompts and emit the first token of each."""
        emissions = []
        with self._stats.timed("prefill", self._target.device):
            for row, sequence in enumerate(self._running):
                history = sequence.history()
                positions = prefill_positions(history, _PREFILL_ROWS if self._teach else 1)
                logits, hidden = self._target.prefill(self._cache, row, sequence.ids, positions)
                scored = score(logits, hidden, self._target.head)
                last = Scored(scored.ids[-1:], scored.probs[-1:])
                tree = DraftTree.empty()
                path, tokens = accept(tree, self._choice.after(sequence, logits[-1:], last), sequence.append)
                self._stats.first_tokens += 1
                self._stats.new_tokens += 1
                self._report(sequence, tree, path, tokens)
                taught = None
                if self._teach:
                    previous = np.where(positions > 0, history[positions - 1], -1).astype(np.int32)
                    taught = Candidates(history[positions], previous, scored.ids, scored.probs)
                emissions.append(Emission(sequence, tokens, taught, self._states(0, 0, slice(-MOST_STATES, None))))
        return emissions

    def _states(self, row: int, start: int, entries) -> np.ndarray | None:
        """Projected states of the latest forward, where the drafter takes any."""
        if self._projection is None:
            return None
        with self._stats.timed("states", self._target.device):
            return self._projection.keys(row, start, entries)

    def verify(self, trees: list[DraftTree]) -> list[Emission]:
        """One forward: row i verifies `trees[i]`, one tree for each sequence that has not ended, and accepts."""
        self._drop_ended()
        target = self._target
        logits, hidden = target.verify(self._cache, [sequence.root for sequence in self._running], trees)
        with self._stats.timed("candidates", target.device):
            scored = score(logits, hidden, target.head)
        emissions = []
        start = 0
        for row, (sequence, tree) in enumerate(zip(self._running, trees)):
            entries = slice(start, start + len(tree) + 1)
            start = entries.stop
            own = Scored(scored.ids[entries], scored.probs[entries])
            root, before_root = sequence.root, sequence.before_root
            with self._stats.timed("accept"):
                path, tokens = accept(tree, self._choice.after(sequence, logits[entries], own), sequence.append)
                self._stats.count_step(tree, path, len(tokens))
                taught = learnable(root, before_root, tree, path, own) if self._teach else None
            with self._stats.timed("compact", target.device):
                self._cache.keep(row, np.array([0, *(node + 1 for node in path)]))
            self._report(sequence, tree, path, tokens)
            chosen_at = [0, *(node + 1 for node in path)][: len(tokens)]
            emissions.append(Emission(sequence, tokens, taught, self._states(row, entries.start, chosen_at)))
        return emissions

    def _drop_ended(self) -> None:
        """Give back the cache rows of sequences that ended in the step before."""
        going_on = [row for row, sequence in enumerate(self._running) if not sequence.done]
        if len(going_on) < len(self._running):
            self._running = [self._running[row] for row in going_on]
            self._cache.select_rows(going_on)
