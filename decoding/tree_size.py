"""How many nodes to verify: as many as pay for what they cost here and now, and none where none do.

N nodes are worth scale * P(N) tokens, P being the sum of their probabilities, best first, and cost t(N) - t(0) seconds
(`step_cost.py`). Seconds are worth tokens, too: in each of them the loop writes `rate` tokens on average. So N is where

    scale * P(N) - rate * t(N)

is greatest, N = 0 included. (To maximise each step's own tokens per second instead would verify too little wherever the best nodes are
nearly certain, and too much wherever all are poor: a step with a good tree is no reason to leave out nodes that are cheaper than the next
step.) While the optimum is flat, more nodes come along, for at most 2 % of the step: rejected nodes teach the drafter, and
small probabilities are the least certain.

A batch has one budget, divided over its sequences by the same rule: the N best nodes of all trees.

`scale` is accepted over predicted, a moving average that starts at 0.8: sums of probabilities over a tree that was
chosen for its large probabilities promise too much. Costs are known before the first step (`first_costs.py`).

The ledger: what drafting has lost so far against plain decoding, in plain steps. Each step adds what it cost beyond a plain one, drafting
included, and takes off what was accepted. A step may only verify what it could lose without the sum exceeding one plain step and one in
a hundred of the steps made, and while it is above that no drafts are asked for. So the bound holds whatever a drafter promises, over any
length and from the first step: against wrong drafts of great confidence `scale` alone learns too late, and where nodes are
nearly free it would never close the gate. A tree is charged 5 % of a plain step more than its curve says: on a shared machine no
measurement is better than that, and costs that are 5 % too low would let useless drafts go on for ever.

The gate: after four steps in a row that were not worth their drafts, drafts are not even asked for, and what was emitted waits to be told. The way back is probed after 8, 16, 32 and then every 64 plain steps; a probe verifies at most
3 nodes even if that does not seem to pay, so that `scale` can recover, as far as the ledger lets it.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque

import numpy as np

from redraft.decoding.pruning import best_nodes
from redraft.decoding.step_cost import ENTRIES, StepCost, cost_of, sizes_to_try
from redraft.retrieval.draft_tree import DraftTree

__all__ = ["TreeSizer", "Trust", "sizer_of"]

_TOLERANCE = 0.02
_PRIOR_SCALE, _PRIOR_WEIGHT, _SCALE_MEMORY = 0.8, 4.0, 0.95
_RATE_WEIGHT, _RATE_MEMORY = 4.0, 0.95
_PATIENCE = 4
_PROBE_NODES = 3
_FIRST_INTERVAL, _LAST_INTERVAL = 8, 64
_MOST_LOST, _LOST_SHARE = 1.0, 0.01
_DOUBT = 0.05  # of a plain step: what a tree may cost more than its curve says; drafts that gain less may gain nothing
_WORST_DRAFTS = (
    2.0  # plain steps: a single stall (kernels that are compiled, a server that restarts) is not what drafts cost
)

_trusts: weakref.WeakKeyDictionary[object, Trust] = weakref.WeakKeyDictionary()


class Trust:
    """How much of what trees promise a model has accepted lately."""

    def __init__(self) -> None:
        self._accepted = _PRIOR_SCALE * _PRIOR_WEIGHT
        self._predicted = _PRIOR_WEIGHT

    @property
    def scale(self) -> float:
        """Accepted over predicted, between 0.01 and 1.5."""
        return min(max(self._accepted / max(self._predicted, 1e-6), 0.01), 1.5)

    def observe(self, accepted: int, predicted: float) -> None:
        self._accepted = _SCALE_MEMORY * self._accepted + accepted
        self._predicted = _SCALE_MEMORY * self._predicted + predicted


def sizer_of(model) -> TreeSizer:
    """A sizer for one call of `generate`, with what is known of `model` from earlier ones."""
    return TreeSizer(cost_of(model), _trusts.setdefault(model, Trust()))


class TreeSizer:
    """Cuts the trees of one call of `generate` down to what pays, and says when to draft at all.

    Call `wants_draft` and, where it says so, `cut`, else `plain`; then verify, then `observe`; once a step each.

    Args:
        cost, trust: what is known of the model; learned from and added to.
    """

    def __init__(self, cost: StepCost, trust: Trust) -> None:
        self._cost = cost
        self._trust = trust
        self._tokens = self._seconds = 0.0  # of recent steps: their ratio is the rate
        self._idle = 0  # steps in a row that were not worth a node
        self._plain_left = 0  # steps until the next probe; 0 = the gate is open or it is time
        self._interval = 0  # of the probes; 0 = the gate is open
        self._drafted: tuple[int, int, int, float] | None = None  # rows, context, nodes, promised tokens
        self._began = 0.0
        self._drafting = 0.0  # seconds that this step's drafts took
        self._plain_seconds: deque[float] = deque(maxlen=15)  # what recent steps say about a plain one
        self._lost = 0.0  # against plain decoding, in plain steps
        self._allowed = _MOST_LOST

    def wants_draft(self) -> bool:
        """Whether this step asks for drafts; the clock of the step starts here."""
        self._began = time.perf_counter()
        self._drafting = 0.0
        if self._plain_left > 0 or self._lost > self._allowed:
            self._plain_left = max(self._plain_left - 1, 0)
            return False
        return True

    def plain(self, rows: int, context: int) -> None:
        """This step goes without drafts."""
        self._drafted = (rows, context, 0, 0.0)

    def cut(self, trees: list[DraftTree], context: int) -> list[DraftTree]:
        """The part of each tree that is worth verifying; `context` is the longest row's length."""
        self._drafting = time.perf_counter() - self._began
        rows = len(trees)
        probs = np.concatenate([tree.probs for tree in trees])
        owners = np.repeat(np.arange(rows), [len(tree) for tree in trees])
        order = np.argsort(-probs, kind="stable")
        promised = np.concatenate([[0.0], np.cumsum(probs[order], dtype=np.float64)])
        nodes = self._to_explore(promised, rows, context)
        if nodes is None:
            nodes = self._through_the_gate(promised, rows, context)
        counts = np.bincount(owners[order[:nodes]], minlength=rows)
        self._drafted = (rows, context, nodes, float(promised[nodes]))
        return [best_nodes(tree, int(count)) for tree, count in zip(trees, counts)]

    def _to_explore(self, promised: np.ndarray, rows: int, context: int) -> int | None:
        """Nodes to verify because their cost is to be measured and they might pay; None where that is so for none."""
        most = len(promised) - 1
        tried = self._cost.tried(rows, context)
        if tried is None:
            return None
        for entries in sizes_to_try(rows):
            nodes = min(entries - rows, most)
            smaller = rows + nodes < entries  # than wanted: worth it only if nothing of about this size was tried
            if rows + nodes in tried or (smaller and max(tried) > 0.7 * (rows + nodes)):
                continue
            steps = float(self._steps(rows, context, np.array([nodes]))[0])
            pays = rows + self._trust.scale * promised[nodes] >= rows * steps
            if nodes == 0 or (pays and self._affords(steps)):
                return nodes
        self._cost.end_round(rows, context)
        return None

    def _through_the_gate(self, promised: np.ndarray, rows: int, context: int) -> int:
        """How many nodes are best, or a probe's; closes the gate where drafting has not paid for a while."""
        most = len(promised) - 1
        sizes = _sizes(rows, most)
        steps = self._steps(rows, context, sizes)
        affordable = self._affords(steps)
        affordable[0] = True
        sizes, steps = sizes[affordable], steps[affordable]
        worth = self._trust.scale * promised[sizes]
        best_now = float(((rows + worth) / steps).max())
        rate = (self._tokens + _RATE_WEIGHT * best_now) / (self._seconds + _RATE_WEIGHT)
        gain = worth - rate * (steps - 1.0)
        best = int(gain.argmax())
        if gain[best] > rate * self._drafting_steps():
            self._idle = self._interval = 0
            return int(sizes[np.flatnonzero(gain >= gain[best] - _TOLERANCE * rate * steps[best])[-1]])
        if most == 0:
            return 0
        self._idle += 1
        probing = self._interval > 0
        if probing or self._idle >= _PATIENCE:
            self._interval = min(max(2 * self._interval, _FIRST_INTERVAL), _LAST_INTERVAL)
            self._plain_left = self._interval
        if probing and best == 0:
            probe = min(_PROBE_NODES, most)
            return probe if self._affords(self._steps(rows, context, np.array([probe])))[0] else 0
        return int(sizes[best])

    def _steps(self, rows: int, context: int, nodes: np.ndarray) -> np.ndarray:
        """What steps with so many nodes take, in plain steps, seen with caution."""
        return self._cost.seconds(rows, context, rows + nodes) + _DOUBT * (nodes > 0)

    def _affords(self, steps):
        """Whether a step that takes so many plain ones may be lost, with its drafts."""
        return steps - 1.0 + self._drafting_steps() <= self._allowed - self._lost

    def _drafting_steps(self) -> float:
        """What this step's drafts took, in plain steps; 0 while it is not known how long those take."""
        if not self._plain_seconds:
            return 0.0
        return min(self._drafting / statistics.median(self._plain_seconds), _WORST_DRAFTS)

    def observe(self, accepted: int) -> None:
        """The step is done: so many drafted tokens were accepted, over all rows."""
        if self._drafted is None:
            return
        rows, context, nodes, promised = self._drafted
        verifying = time.perf_counter() - self._began - self._drafting
        self._cost.observe(rows, context, rows + nodes, verifying)
        steps = float(self._steps(rows, context, np.array([nodes]))[0])
        self._plain_seconds.append(verifying / steps)
        self._lost += steps - 1 + self._drafting_steps() - accepted / rows
        self._allowed += _LOST_SHARE
        self._tokens = _RATE_MEMORY * self._tokens + rows + accepted
        self._seconds = _RATE_MEMORY * self._seconds + steps
        if nodes:
            self._trust.observe(accepted, promised)
        self._drafted = None


def _sizes(rows: int, most: int) -> np.ndarray:
    """Numbers of nodes to choose from: few shapes, so that each is measured often and its kernels are made."""
    sizes = [0, *(entries - rows for entries in ENTRIES if rows < entries <= rows + most)]
    return np.array(sizes if most <= 1.25 * sizes[-1] else [*sizes, most])
