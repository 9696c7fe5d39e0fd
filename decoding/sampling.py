"""The target's choice of a next token: argmax, or one seeded draw from its processed distribution.

Processed means: after every logits processor (penalties, bans, temperature, top-k, top-p), each applied with the
history of the very path that leads to the node. The processors are transformers' own, in its order.

A draw is argmax over tokens of log p(token) + Gumbel noise, and the noise is a pure function of the seed, the absolute
position and the token id: a counter-based generator (Philox) is keyed by (seed, position) and its i-th number belongs
to token i. So each position has its own independent noise, plain and speculative decoding draw the same token at the
same position, and a rerun, another tree or another batch size writes the same text. Losslessness under sampling is thereby
an equality that a test can check. Nothing here depends on what was drafted.

Cost: one vector of vocabulary-size random numbers per *visited* node (0.3 ms for 50k tokens), none for the others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from redraft.decoding.candidates import Scored
from redraft.decoding.sequence import Sequence

__all__ = ["Choice", "gumbel", "sample", "warpers"]

_MASK64 = 2**64 - 1


def warpers(temperature: float, top_k: int | None, top_p: float | None) -> LogitsProcessorList:
    """The processors of plain sampling. Raises ValueError for values out of range."""
    if not temperature > 0:
        raise ValueError(f"temperature: wanted a number above 0 (or do_sample=False), got {temperature}")
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k: wanted a positive number, or 0 or None for all tokens, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: wanted 0 < top_p <= 1, got {top_p}")
    steps = LogitsProcessorList()
    if temperature != 1.0:
        steps.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        steps.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1.0:
        steps.append(TopPLogitsWarper(top_p))
    return steps


def gumbel(seed: int, position: int, size: int) -> np.ndarray:
    """float64[size]: standard Gumbel noise for the tokens 0..size-1 at an absolute position."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed & _MASK64, position], np.uint64)))
    exponential = generator.standard_exponential(size, method="inv")
    return -np.log(np.maximum(exponential, np.finfo(np.float64).tiny))  # zero has probability 2**-53 and no logarithm


def sample(scores: torch.Tensor, seed: int, position: int) -> int:
    """Draw one token from softmax(scores [vocabulary]) for `position`; -inf entries cannot be drawn."""
    scores = scores.double().cpu().numpy()
    return int(np.argmax(scores + gumbel(seed, position, len(scores))))


class Choice:
    """How the target chooses: `do_sample` draws, else argmax (ties: the lowest id), behind `processors`.

    `rows` is the batch that the processors were made for. Some keep something for every row (transformers' repetition
    penalty knows each row's padding), so one row's path is shown to them as if it were all rows'.
    """

    def __init__(self, do_sample: bool, processors: LogitsProcessorList, rows: int = 1) -> None:
        self._do_sample = do_sample
        self._processors = processors
        self._rows = rows

    def after(self, sequence: Sequence, logits: torch.Tensor, scored: Scored) -> Callable[[int], int]:
        """The choice behind each node: rows of `logits` and `scored` are the root (node -1) and the nodes.

        It must be asked while `sequence` ends with the node's own path, which is what the processors then see and
        what the noise is keyed by.
        """
        if not self._do_sample and not self._processors:
            return lambda node: int(scored.ids[node + 1, 0])

        return lambda node: self.pick(sequence, self.processed(sequence, logits[node + 1]))

    def processed(self, sequence: Sequence, logits: torch.Tensor) -> torch.Tensor:
        """float32[vocabulary]: `logits` of the next token, as the processors leave them."""
        scores = logits.to(torch.float32).repeat(self._rows, 1)  # a copy: processors may write into it
        ids = sequence.padded_ids.expand(self._rows, -1)
        return self._processors(ids, scores)[sequence.index if self._rows > 1 else 0]

    def pick(self, sequence: Sequence, scores: torch.Tensor) -> int:
        """The next token from processed scores."""
        return sample(scores, sequence.seed, sequence.length) if self._do_sample else int(scores.argmax())
