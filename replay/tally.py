"""What a replay counts: tokens per step, accepted nodes by source, honesty of the probabilities, time by call.

The walk down a draft tree is the verifier's: from the last committed token, on to the child that carries the token
that the model wrote next. A node is *visited* when its parent is accepted: the target would be asked there whether
it agrees. Probabilities are judged on visited nodes: the node's own probability given its parent (its path
probability over its parent's) against whether it was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.kernel import kernel

__all__ = ["BINS", "Tally", "expected_calibration_error", "reliability"]

BINS = 20  # of equal width between 0 and 1
_SOURCES = len(Source.NAMES)
_COUNT, _SUM, _HITS = 0, 1, 2


@kernel
def _walk(tokens, parents, probs, sources, truth, by_source, visited, paths, depth, on_path):
    """See `Tally.walk`; depth int32[n] and on_path bool[n] (all False) are working space.

    Returns -1, having counted nothing more, at the first node that breaks the promises of a draft tree. Adds to three tables: by_source int64[sources, 2], nodes drafted and accepted; visited and paths
    float64[sources, BINS, 3], number, sum of probabilities and number accepted: of the visited nodes by their
    probability given the parent, and of all nodes by their path probability.
    Nodes beyond the end of `truth` are counted as drafted and left out of the rest.
    """
    accepted = 0
    for i in range(len(tokens)):
        parent = parents[i]
        source = sources[i]
        if not (-1 <= parent < i and 0 <= probs[i] <= 1.0001 and source < len(by_source)):
            return -1
        for j in range(i):
            if parents[j] == parent and tokens[j] == tokens[i]:
                return -1
        depth[i] = 1 if parent < 0 else depth[parent] + 1
        by_source[source, 0] += 1
        if depth[i] > len(truth):
            continue
        reached = parent < 0 or on_path[parent]
        if reached and tokens[i] == truth[depth[i] - 1]:
            on_path[i] = True
            accepted += 1
            by_source[source, 1] += 1
        path = min(float(probs[i]), 1.0)
        cell = paths[source, min(int(path * BINS), BINS - 1)]
        cell[_COUNT] += 1
        cell[_SUM] += path
        cell[_HITS] += on_path[i]
        if reached:
            above = 1.0 if parent < 0 else float(probs[parent])
            given = min(path / above, 1.0) if above > 0 else 0.0
            cell = visited[source, min(int(given * BINS), BINS - 1)]
            cell[_COUNT] += 1
            cell[_SUM] += given
            cell[_HITS] += on_path[i]
    return accepted


def expected_calibration_error(table: np.ndarray) -> float | None:
    """Of a reliability table float64[BINS, 3]: mean distance between promised and seen, weighted by bin; None if empty."""
    total = table[:, _COUNT].sum()
    return float(np.abs(table[:, _SUM] - table[:, _HITS]).sum() / total) if total else None


def reliability(table: np.ndarray) -> list[dict]:
    """The filled bins of a reliability table: how many nodes, mean probability promised, share accepted."""
    return [
        {"nodes": int(count), "promised": total / count, "accepted": hits / count}
        for count, total, hits in table.tolist()
        if count
    ]


@dataclass
class Tally:
    """Sums over the steps of one workload. Times are nanoseconds of the calling thread per call; commits and opens also count tokens."""

    items: int = 0
    steps: int = 0
    emitted: int = 0
    nodes: int = 0
    accepted: int = 0
    loop_steps: int = 0
    loop_emitted: int = 0
    by_source: np.ndarray = field(default_factory=lambda: np.zeros((_SOURCES, 2), np.int64))
    visited: np.ndarray = field(default_factory=lambda: np.zeros((_SOURCES, BINS, 3)))
    paths: np.ndarray = field(default_factory=lambda: np.zeros((_SOURCES, BINS, 3)))
    draft_ns: list[int] = field(default_factory=list)
    commit_ns: list[int] = field(default_factory=list)
    commit_tokens: list[int] = field(default_factory=list)
    open_ns: list[int] = field(default_factory=list)
    open_tokens: list[int] = field(default_factory=list)
    close_ns: list[int] = field(default_factory=list)
    close_tokens: list[int] = field(default_factory=list)

    def walk(self, tree: DraftTree, truth: np.ndarray) -> int:
        """Follow `truth` (int32[m], what the model wrote next) down a draft tree; returns how many nodes it accepts.

        Raises ValueError for a tree that is none: a result would mean nothing.
        """
        n = len(tree)
        accepted = _walk(
            tree.tokens, tree.parents, tree.probs, tree.sources, truth,
            self.by_source, self.visited, self.paths, np.empty(n, np.int32), np.zeros(n, bool),
        )  # fmt: skip
        if accepted < 0:
            tree.check()
            raise ValueError(f"draft tree: sources must be below {_SOURCES}, got {int(tree.sources.max())}")
        self.nodes += n
        self.accepted += accepted
        return accepted

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / max(self.steps, 1)

    def summary(self) -> dict:
        """The tally as plain numbers for a table or a JSON record; times in microseconds."""
        steps = max(self.steps, 1)
        outside = self.steps - self.loop_steps
        used = [s for s in range(_SOURCES) if self.by_source[s, 0]]
        return {
            "items": self.items,
            "steps": self.steps,
            "emitted": self.emitted,
            "tokens_per_step": self.tokens_per_step if self.steps else None,
            "tokens_per_step_outside_loops": (self.emitted - self.loop_emitted) / outside if outside else None,
            "share_in_loops": self.loop_emitted / max(self.emitted, 1),
            "nodes_per_step": self.nodes / steps,
            "accepted_share": self.accepted / max(self.nodes, 1),
            "calibration_error": expected_calibration_error(self.visited.sum(axis=0)),
            "path_calibration_error": expected_calibration_error(self.paths.sum(axis=0)),
            "reliability": reliability(self.visited.sum(axis=0)),
            "sources": {
                Source.NAMES[s]: {
                    "nodes_per_step": int(self.by_source[s, 0]) / steps,
                    "accepted_per_step": int(self.by_source[s, 1]) / steps,
                    "calibration_error": expected_calibration_error(self.visited[s]),
                    "reliability": reliability(self.visited[s]),
                }
                for s in used
            },
            "draft_us": _spread(np.array(self.draft_ns) / 1000),
            "commit_us_per_token": _rate(self.commit_ns, self.commit_tokens),
            "open_us_per_token": _rate(self.open_ns, self.open_tokens),
            "close_us_per_token": _rate(self.close_ns, self.close_tokens),
            "open_us": _spread(np.array(self.open_ns) / 1000),
            "close_us": _spread(np.array(self.close_ns) / 1000),
        }

    def add(self, other: Tally) -> None:
        """Add another tally's sums to this one's."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def _spread(values: np.ndarray) -> dict:
    if not len(values):
        return {"p50": None, "p99": None, "mean": None}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": float(p50), "p99": float(p99), "mean": float(values.mean())}


def _rate(nanoseconds: list[int], tokens: list[int]) -> dict:
    """Microseconds per token: over all calls together (mean), and the spread of the calls' own rates."""
    times, counts = np.array(nanoseconds, np.float64) / 1000, np.array(tokens, np.float64)
    called = counts > 0
    spread = _spread(times[called] / counts[called])
    return spread | {"mean": float(times.sum() / counts.sum()) if counts.sum() else None}
