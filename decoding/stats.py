"""What a generation did: counted while it runs, so that every claim about it can be checked."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.provenance import Occurrence

__all__ = ["PHASES", "GenerationStats", "Span"]

PHASES = ("prefill", "forward", "head", "candidates", "accept", "compact", "states", "draft", "costs")


class Span(NamedTuple):
    """Accepted tokens that stand in a corpus as they were written.

    row: of the batch; begin, end: among the tokens written in that row, from 0; place: of the first one in its corpus.
    """

    row: int
    begin: int
    end: int
    place: Occurrence


@dataclass
class GenerationStats:
    """Counts and seconds of one call of `generate`, summed over its sequences.

    Attributes:
        prompt_tokens, new_tokens: tokens given and written.
        steps: target forwards after the prefill. Each sequence that takes part in a forward has made one step, so
            steps / sequences is the number of forwards where all sequences end together.
        first_tokens: tokens that came from a prefill, one per sequence; no step yields them.
        drafted: nodes verified; drafted_by_source: the same by the name of their source.
        accepted: nodes accepted; accepted_by_source; accepted_by_depth (1 = child of the last committed token).
        drafted_by_depth: nodes verified at each depth.
        empty_steps: steps without any node.
        gated_steps: steps in which drafting was not even asked for, because it did not pay.
        failures: how often drafting failed, by reason; each cost one step its draft and nothing else.
        seconds: wall time by phase (`PHASES`).
        spans: where accepted tokens stand in a corpus, in the order in which they were written; only where asked for.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    first_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    empty_steps: int = 0
    gated_steps: int = 0
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    drafted_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    spans: list[Span] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per step, bonus included; 1.0 for plain decoding. 0.0 where no step was needed."""
        return (self.new_tokens - self.first_tokens) / self.steps if self.steps else 0.0

    @property
    def decode_seconds(self) -> float:
        """Wall time of all steps: of all phases but the prefill and a model's first costs."""
        return sum(self.seconds.values()) - self.seconds["prefill"] - self.seconds["costs"]

    def count_step(self, tree: DraftTree, path: list[int], emitted: int) -> None:
        """Add one step of one sequence: `path` of `tree` was accepted and `emitted` tokens came out."""
        self.steps += 1
        self.new_tokens += emitted
        self.drafted += len(tree)
        self.accepted += len(path)
        self.empty_steps += len(tree) == 0
        for source, count in zip(*np.unique(tree.sources, return_counts=True)):
            self.drafted_by_source[source_name(source)] += int(count)
        for depth, count in zip(*np.unique(tree.depths(), return_counts=True)):
            self.drafted_by_depth[int(depth)] += int(count)
        for depth, node in enumerate(path, 1):
            self.accepted_by_source[source_name(tree.sources[node])] += 1
            self.accepted_by_depth[depth] += 1

    def add_places(self, row: int, begin: int, places: list[Occurrence | None]) -> None:
        """The tokens of `row` from `begin` on stand at `places`; what goes on where the last span ended makes it longer."""
        for at, place in enumerate(places, begin):
            if place is None:
                continue
            last = self.spans[-1] if self.spans else None
            if last is not None and (last.row, last.end) == (row, at):
                index, document, offset = last.place
                if place == (index, document, offset + at - last.begin):
                    self.spans[-1] = last._replace(end=at + 1)
                    continue
            self.spans.append(Span(row, at, at + 1, place))

    @contextmanager
    def timed(self, phase: str, device: torch.device | None = None):
        """Add the wall time of the block to `phase`; waits for a CUDA `device` so that the work is counted here."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)
            self.seconds[phase] += time.perf_counter() - start


def source_name(source: int) -> str:
    """The name of a node's source; a number without a name is one that a newer server knows."""
    return Source.NAMES[source] if source < len(Source.NAMES) else f"source {source}"
