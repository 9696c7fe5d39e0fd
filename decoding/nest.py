"""NEST, Nearest Neighbor Speculative Decoding (Li et al. 2024): LOSSY. The text is a mixture of target and corpus.

Everywhere else in this package drafts only decide how fast the target writes what it would write anyway. Here they change it:
spans are copied from the corpus of a dense index where the target finds them likely enough, so that the text is grounded in
documents that it can name. It is off unless `generate(acceptance="nest")` is asked for.

    lambda = sigmoid((min d / max d - ALPHA) / TAU)              d: squared distances of the nearest RETRIEVED keys
    p      = lambda p_target + (1 - lambda) p_kNN                p_kNN: tokens chosen at those keys, weighted by nearness
    w      = argmax p, or one draw
    span   : if lambda <= DELTA, what follows the nearest key at which w was chosen, up to SPAN tokens (dynamic span selection)
    accept : token by token while p(token) > GAMMA / 2 max p (relaxed acceptance); at the first that is not, w again
    stream : a span that was accepted whole goes on in the same document; no place is copied twice

ALPHA, TAU, DELTA, SPAN, RETRIEVED are the published defaults, GAMMA the one published for the smallest model. One thing is
different: keys here have length one, so their distances lie between 0 and 4 whatever the model, and nearness is
exp(-4 d) (`neighbours.SHARPNESS`) instead of exp(-d / sqrt(dimension)), which would weigh all alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from redraft.decoding.sampling import Choice
from redraft.decoding.sequence import Sequence
from redraft.decoding.states import Projection
from redraft.decoding.stats import GenerationStats
from redraft.decoding.target_model import TargetModel
from redraft.retrieval.dense_index import DenseIndex
from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.neighbours import NEST_ALPHA, NEST_TAU, SHARPNESS, relative_confidence
from redraft.retrieval.provenance import Occurrence

__all__ = ["ALPHA", "DELTA", "GAMMA", "RETRIEVED", "SPAN", "TAU", "decode_nest"]

ALPHA, TAU = NEST_ALPHA, NEST_TAU
DELTA = 0.5
GAMMA = 5e-4
SPAN = 64
RETRIEVED = 1024


def decode_nest(
    target: TargetModel,
    sequences: list[Sequence],
    drafter,
    choice: Choice,
    *,
    streamer=None,
    on_step: Callable | None = None,
) -> GenerationStats:
    """Write `sequences` to their ends, one after the other. Raises ValueError without a dense index in this process."""
    from redraft.decoding.generate import Step  # it stands on this module

    dense = getattr(drafter, "dense", None)
    if dense is None:
        raise ValueError("acceptance='nest': wanted a redraft.Drafter with a dense index (Drafter(dense=...))")
    projection = Projection(target.model, dense.map, dense.origin)
    stats = GenerationStats(prompt_tokens=sum(sequence.length for sequence in sequences))

    def report(sequence: Sequence, tree: DraftTree, accepted: int, tokens: list[int], places: list[Occurrence]) -> None:
        path = list(range(accepted))
        stats.count_step(tree, path, len(tokens))
        stats.add_places(sequence.index, len(sequence.sources), places[:accepted])
        sources = [int(Source.DENSE)] * accepted + [-1] * (len(tokens) - accepted)
        sequence.sources += sources
        if streamer is not None:
            streamer.put(torch.tensor(tokens))
        if on_step is not None:
            on_step(Step(sequence.index, tokens, sources, tree))

    with target.decoding(stats), projection.tap:
        for sequence in sequences:
            _Writer(target, sequence, dense, projection, choice, stats).write(report)
    if streamer is not None:
        streamer.end()
    return stats


class _Writer:
    """Writes one sequence. `span` is what is to be verified next: tokens of the corpus from position `at` on."""

    def __init__(self, target, sequence, dense: DenseIndex, projection, choice, stats) -> None:
        self._target, self._sequence, self._dense = target, sequence, dense
        self._projection, self._choice, self._stats = projection, choice, stats
        self._cache = target.new_cache(1, sequence.max_length)
        self._used = np.zeros(len(dense.corpus.tokens), bool)
        self._at, self._span = 0, np.empty(0, np.int32)

    def write(self, report) -> None:
        sequence = self._sequence
        with self._stats.timed("prefill", self._target.device):
            last = np.array([sequence.length - 1])
            logits, _ = self._target.prefill(self._cache, 0, sequence.ids, last)
            key = self._projection.keys(0, 0, slice(-1, None))[0]
        mixture, confidence, neighbours = self._mixture(logits[0], key)
        token = self._choose(mixture)
        self._select(token, confidence, neighbours)
        sequence.append(token)
        self._stats.first_tokens += 1
        self._stats.new_tokens += 1
        sequence.sources.append(-1)
        while not sequence.done:
            self._step(report)

    def _step(self, report) -> None:
        sequence = self._sequence
        room = sequence.max_length - sequence.length
        span, first = self._span[:room], self._at
        tree = DraftTree.chain(span, source=Source.DENSE)
        logits, _ = self._target.verify(self._cache, [sequence.root], [tree])
        with self._stats.timed("states", self._target.device):
            keys = self._projection.keys(0, 0, slice(0, len(span) + 1))
        tokens: list[int] = []
        accepted = 0
        with self._stats.timed("accept", self._target.device):
            while not sequence.done:
                mixture, confidence, neighbours = self._mixture(logits[accepted], keys[accepted])
                drafted = accepted < len(span)
                if drafted and float(mixture[span[accepted]]) > 0.5 * GAMMA * float(mixture.max()):
                    tokens.append(int(span[accepted]))
                    sequence.append(tokens[-1])
                    self._used[first + accepted] = True
                    accepted += 1
                    if accepted == len(span) and not sequence.done and self._stream(first + accepted):
                        break
                    continue
                token = self._choose(mixture)
                self._select(token, confidence, neighbours)
                tokens.append(token)
                sequence.append(token)
                break
        whole = len(tokens) == accepted  # the last accepted token is the root of the next step, and is run again there
        self._cache.keep(0, np.arange(accepted + (not whole)))
        report(sequence, tree, accepted, tokens, self._places(first, accepted))

    def _mixture(self, logits: torch.Tensor, key: np.ndarray):
        """p as float32[vocabulary], lambda, and the neighbours: (positions, tokens chosen there, weights)."""
        similarities, positions = self._dense.nearest(key, RETRIEVED)
        free = ~self._used[positions]
        similarities, positions = similarities[free], positions[free]
        confidence = relative_confidence(similarities)
        chosen = self._dense.corpus.tokens[positions]
        weights = np.exp(SHARPNESS * (similarities - 1.0))
        mixture = torch.softmax(self._choice.processed(self._sequence, logits), -1)
        if len(positions):
            retrieved = torch.zeros_like(mixture)
            shares = torch.from_numpy(weights / weights.sum()).to(retrieved)
            retrieved.index_add_(0, torch.from_numpy(chosen.astype(np.int64)).to(retrieved.device), shares)
            mixture = confidence * mixture + (1.0 - confidence) * retrieved
        return mixture, confidence, (positions, chosen, weights)

    def _choose(self, mixture: torch.Tensor) -> int:
        return self._choice.pick(self._sequence, mixture.log())

    def _select(self, token: int, confidence: float, neighbours) -> None:
        """The span behind `token`: of the neighbours that chose it, what follows the nearest."""
        positions, chosen, weights = neighbours
        same = np.flatnonzero(chosen == token)
        if confidence > DELTA or len(same) == 0:
            self._span = np.empty(0, np.int32)
            return
        self._stream(int(positions[same[weights[same].argmax()]]) + 1)

    def _stream(self, at: int) -> bool:
        """Take the span from position `at` on, up to the end of its document; returns whether there is any."""
        corpus = self._dense.corpus
        end = int(corpus.document_ends[corpus.document_ends.searchsorted(max(at - 1, 0), side="right")])
        self._at, self._span = at, np.array(corpus.tokens[at : min(at + SPAN, end)], np.int32)
        return len(self._span) > 0

    def _places(self, first: int, count: int) -> list[Occurrence]:
        corpus = self._dense.corpus
        return [Occurrence(str(corpus.path), *corpus.locate(first + i)) for i in range(count)]
