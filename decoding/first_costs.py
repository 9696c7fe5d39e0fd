"""The first round of a model's cost curve (`step_cost.py`), measured at its first use, so that the first tree has the right size already.

Learning the curve from the text alone was tried: the first answer then pays for it, with plain steps and with trees that are too
large, and where its drafts are poor it is slower than plain decoding. Forwards over made-up nodes behind a made-up context cost
no text anything and are over once for all.

Cost: one pass over the sizes that makes kernels, then passes until three are over or a second has passed, one at least; of each size
the shortest time counts, for other processes can only make it longer. That is the time of 20 to 35 plain steps, once for each model and process (1.3 s for 135M parameters on one core), in the phase
"costs". Without a drafter nothing is measured.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from redraft.decoding.candidates import score
from redraft.decoding.step_cost import StepCost
from redraft.decoding.target_model import TargetModel
from redraft.retrieval.draft_tree import DraftTree, Source

__all__ = ["measure_costs"]

_ENTRIES = (
    1,
    8,
    16,
    32,
    4,
    2,
)  # a small one behind a large one: what the large one left in the caches is paid for by either
_CONTEXT = 128
_ROUNDS, _SECONDS = 3, 1.0


def measure_costs(target: TargetModel, cost: StepCost) -> None:
    """Fill `cost`; `target` is inside its `decoding` block."""
    most = min((limit for limit in (target.max_positions, target.window) if limit is not None), default=2 * _CONTEXT)
    context = max(min(_CONTEXT, most // 2), 1)
    prompt = np.arange(context) % target.vocab_size
    cache = target.new_cache(1, context + max(_ENTRIES))
    target.prefill(cache, 0, torch.from_numpy(prompt).to(target.device), np.array([context - 1]))
    root = int(prompt[-1])
    least = dict.fromkeys(_ENTRIES, math.inf)
    began = time.perf_counter()
    for number in range(1 + _ROUNDS):
        for entries in _ENTRIES:
            started = time.perf_counter()
            logits, hidden = target.verify(cache, [root], [_tree(entries - 1, target.vocab_size)])
            score(logits, hidden, target.head)
            least[entries] = min(least[entries], time.perf_counter() - started)
        if number and time.perf_counter() - began > _SECONDS:
            break
    cost.add_round(1, context, least)


def _tree(nodes: int, vocab_size: int) -> DraftTree:
    """Two children under every node: what is measured is how many there are."""
    order = np.arange(nodes)
    return DraftTree(
        (order % vocab_size).astype(np.int32),
        ((order - 2) // 2).astype(np.int32),
        np.full(nodes, 0.5, np.float32),
        np.full(nodes, Source.SESSION, np.uint8),
    )
