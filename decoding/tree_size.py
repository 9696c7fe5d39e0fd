"""How many nodes to verify: as many as pay for what they cost here and now, and none where none do.

A tree's worth is 1 + the sum of its nodes' probabilities of being accepted; with the nodes in order of probability, n
of them are worth (1 + scale * P(n)) tokens and take t(n) seconds. The n with the most tokens per second is verified, n =
0 included. On a flat part of the curve more nodes come along, as long as they cost at most 2 % of the best rate: rejected nodes teach the
drafter (their runners-up are learned), and small probabilities are the least certain.

t(n) is measured, never assumed: the seconds of whole steps (drafting, forward, head, top-k, bookkeeping) by number of nodes and
context length, as running medians. Machines speed up and slow down, so what is kept is the *shape* of the curve, each
sample divided by a level that follows the load. The first steps with a model try sizes upwards, two steps each, as long as more might pay; they write text
like all others. Curves belong to the model and last as long as it does.

`scale` is accepted over predicted, a moving average that starts at 0.8: sums of probabilities over a tree
chosen for its large probabilities promise too much.

The gate: after four steps in a row that were not worth a node, drafts are not even asked for, and what was emitted waits to be
told. The way back is probed after 8, 16, 32 and then every 64 plain steps; a probe verifies at most 4 nodes even if that
does not seem to pay, so that `scale` can recover. While drafting stays useless it therefore costs at most
(t(4) - t(0)) / t(0) / 64 of the time in the long run, 0.8 % where t(4) = 1.5 t(0), and 5 such probes in the first 200 steps.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import defaultdict, deque

import numpy as np

from redraft.decoding.pruning import best_nodes, by_probability
from redraft.retrieval.draft_tree import DraftTree

__all__ = ["CostCurve", "TreeSizer", "curve_of"]

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_EXPLORED = (0, 4, 8, 16, 32, 2)  # tried first, as long as they may pay
_TRIES = 2
_SAMPLES = 15  # a median runs over so many steps
_TOLERANCE = 0.02
_PRIOR_SCALE, _PRIOR_WEIGHT, _MEMORY = 0.8, 2.0, 0.9
_PATIENCE = 4
_PROBE_NODES = 4
_FIRST_INTERVAL, _LAST_INTERVAL = 8, 64

_curves: weakref.WeakKeyDictionary[object, CostCurve] = weakref.WeakKeyDictionary()


def curve_of(model) -> CostCurve:
    """The curve that is kept for `model`."""
    return _curves.setdefault(model, CostCurve())


def _size_class(nodes: int) -> int:
    """The smallest of `SIZES` that holds `nodes`."""
    return next((size for size in SIZES if size >= nodes), SIZES[-1])


class CostCurve:
    """Seconds of a step by number of nodes, up to a common factor, for each number of rows and doubling of the context.

    Attributes:
        accepted, predicted: moving sums whose ratio is the scale.
    """

    def __init__(self) -> None:
        self.accepted = _PRIOR_SCALE * _PRIOR_WEIGHT
        self.predicted = _PRIOR_WEIGHT
        self._level: float | None = None
        self._samples: dict[tuple[int, int], dict[int, deque[float]]] = defaultdict(dict)

    @property
    def scale(self) -> float:
        """Accepted over predicted, between 0.05 and 1.5."""
        return min(max(self.accepted / max(self.predicted, 1e-6), 0.05), 1.5)

    def observe(self, rows: int, context: int, nodes: int, seconds: float) -> None:
        """A step with `nodes` nodes in its widest row took `seconds`."""
        size = _size_class(nodes)
        table = self._samples[self._key(rows, context)]
        if self._level is None:
            self._level = seconds
        elif size in table:
            expected = statistics.median_low(table[size]) * self._level
            self._level *= min(max(seconds / expected, 0.5), 2.0) ** 0.2
        table.setdefault(size, deque(maxlen=_SAMPLES)).append(seconds / self._level)

    def unexplored(self, rows: int) -> list[int]:
        """The sizes that have hardly been tried yet with this number of rows, in the order to try them in."""
        tables = [table for (some_rows, _), table in self._samples.items() if some_rows == rows]
        return [size for size in _EXPLORED if sum(len(table.get(size, ())) for table in tables) < _TRIES]

    def known(self, rows: int) -> np.ndarray:
        """The sizes that were measured with this number of rows, ascending."""
        return np.array(sorted({size for key, table in self._samples.items() if key[0] == rows for size in table}), int)

    def seconds(self, rows: int, context: int, sizes: np.ndarray) -> np.ndarray:
        """float64: relative seconds at `sizes`; interpolated between and extended beyond measured ones."""
        table = self._table(rows, context)
        known = np.array(sorted(table), np.float64)
        values = np.array([table[int(size)] for size in known])  # not always rising: some kernels dislike 2 or 3 rows
        estimate = np.interp(sizes, known, values)
        if len(known) > 1:
            slope = max(values[-1] - values[0], 0.0) / (known[-1] - known[0])
            estimate += np.maximum(sizes - known[-1], 0) * slope
        return estimate

    def _key(self, rows: int, context: int) -> tuple[int, int]:
        return rows, max(context, 128).bit_length()

    def _table(self, rows: int, context: int) -> dict[int, float]:
        """Medians at this context; what is missing comes from the nearest one that has it, scaled by what both have."""
        rows, place = self._key(rows, context)
        near = sorted((key for key in self._samples if key[0] == rows), key=lambda key: abs(key[1] - place))
        merged: dict[int, float] = {}
        for key in near:
            medians = {size: statistics.median_low(samples) for size, samples in self._samples[key].items()}
            common = [merged[size] / medians[size] for size in medians if size in merged]
            factor = statistics.median(common) if common else 1.0
            for size, value in medians.items():
                merged.setdefault(size, value * factor)
        return merged or {0: 1.0}


class TreeSizer:
    """Cuts the trees of one call of `generate` down to what pays, and says when to draft at all.

    Call `wants_draft` and, where it says so, `cut`, then verify, then `observe`; once a step each. A batch is padded to its widest row, so all rows get the same
    number of nodes: narrower rows would cost as much.

    Args:
        curve: what is known of the model; learned from and added to.
    """

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self._idle = 0  # steps in a row that were not worth a node
        self._plain_left = 0  # steps until the next probe; 0 = the gate is open or it is time
        self._interval = 0  # of the probes; 0 = the gate is open
        self._drafted: tuple[int, int, int, float] | None = None  # rows, context, widest row, promised tokens
        self._began = 0.0

    def wants_draft(self) -> bool:
        """Whether this step asks for drafts; the clock of the step starts here."""
        self._began = time.perf_counter()
        if self._plain_left > 0:
            self._plain_left -= 1
            return False
        return True

    def plain(self, rows: int, context: int) -> None:
        """This step goes without drafts."""
        self._drafted = (rows, context, 0, 0.0)

    def cut(self, trees: list[DraftTree], context: int) -> list[DraftTree]:
        """The part of each tree that is worth verifying; `context` is the longest row's length."""
        rows = len(trees)
        widest = max(len(tree) for tree in trees)
        wanted = self._to_explore(trees, widest, context)
        if wanted is None:
            wanted = self._through_the_gate(self._best_size(trees, widest, context), widest)
        trees = [best_nodes(tree, wanted) for tree in trees]
        promised = float(sum(tree.probs.sum() for tree in trees))
        self._drafted = (rows, context, max(len(tree) for tree in trees), promised)
        return trees

    def _rates(self, trees: list[DraftTree], sizes: np.ndarray, context: int, scale: float) -> np.ndarray:
        """Tokens per (relative) second at `sizes`, if `scale` of what the trees promise is accepted."""
        worth = np.zeros(len(sizes))
        for tree in trees:
            sums = np.concatenate([[0.0], np.cumsum(tree.probs[by_probability(tree)], dtype=np.float64)])
            worth += 1 + scale * sums[np.minimum(sizes, len(tree))]
        return worth / self._curve.seconds(len(trees), context, sizes)

    def _to_explore(self, trees: list[DraftTree], widest: int, context: int) -> int | None:
        """A size to try because it is unknown and would pay if the trees kept all they promise; None where none is."""
        known = self._curve.known(len(trees))
        for size in self._curve.unexplored(len(trees)):
            if size > widest:
                continue
            if not len(known) or size in known:
                return size
            hope = self._rates(trees, np.array([size]), context, max(self._curve.scale, 1.0))[0]
            if hope > self._rates(trees, known, context, self._curve.scale).max():
                return size
        return None

    def _best_size(self, trees: list[DraftTree], widest: int, context: int) -> int:
        sizes = np.array([size for size in SIZES if size < widest] + [widest])
        rates = self._rates(trees, sizes, context, self._curve.scale)
        best = int(rates.argmax())
        if best == 0:
            return 0
        return int(sizes[np.flatnonzero(rates >= (1 - _TOLERANCE) * rates[best])[-1]])

    def _through_the_gate(self, wanted: int, widest: int) -> int:
        """`wanted`, or a probe's nodes; closes the gate where drafting has not paid for a while."""
        if wanted > 0:
            self._idle = self._interval = 0
            return wanted
        if widest == 0:
            return 0
        self._idle += 1
        if self._interval or self._idle >= _PATIENCE:
            probing = self._interval > 0
            self._interval = min(max(2 * self._interval, _FIRST_INTERVAL), _LAST_INTERVAL)
            self._plain_left = self._interval
            return min(_PROBE_NODES, widest) if probing else 0
        return 0

    def observe(self, accepted: int) -> None:
        """The step is done: so many drafted tokens were accepted, over all rows."""
        if self._drafted is None:
            return
        rows, context, nodes, promised = self._drafted
        self._curve.observe(rows, context, nodes, time.perf_counter() - self._began)
        if nodes:
            self._curve.accepted = _MEMORY * self._curve.accepted + accepted
            self._curve.predicted = _MEMORY * self._curve.predicted + promised
        self._drafted = None
