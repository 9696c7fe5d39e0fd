"""The target's own runners-up: the top 8 next tokens of every verified position, with their probabilities.

They are what Token Recycling learns from, rejected nodes included, and the first of them is the greedy choice.

Two details matter. The greatest 8 of 50 000 logits are found by the maxima of blocks of 128 first (the 8 greatest values
lie in the 8 blocks with the greatest maxima), which reads the logits once. And half-precision logits of usual size have
steps of 0.06 to 0.125, so about two positions in a hundred are exact ties that different kernels break
differently: the 8 finalists are scored again in float32 from the hidden state and the output embedding's rows, which
costs 8 dot products a position and makes greedy text depend far less on the shape of the forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from redraft.retrieval.candidates import Candidates
from redraft.retrieval.draft_tree import DraftTree

__all__ = ["TOP", "Scored", "learnable", "prefill_positions", "score"]

TOP = 8
_BLOCK = 128


@dataclass(frozen=True)
class Scored:
    """The best next tokens at n positions: ids int32[n, TOP], best first (ties: lowest id), probs float32[n, TOP]."""

    ids: np.ndarray
    probs: np.ndarray


def _top(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids of the `count` greatest entries of each row of logits [n, vocabulary]."""
    n, vocabulary = logits.shape
    if vocabulary % _BLOCK or vocabulary < 16 * _BLOCK * count:
        return logits.topk(count, dim=-1)
    blocks = logits.view(n, vocabulary // _BLOCK, _BLOCK)
    chosen = blocks.amax(-1).topk(count, dim=-1).indices
    finalists = blocks.gather(1, chosen[..., None].expand(n, count, _BLOCK)).view(n, count * _BLOCK)
    values, places = finalists.topk(count, dim=-1)
    return values, chosen.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK


def score(logits: torch.Tensor, hidden: torch.Tensor | None, head: torch.Tensor | None) -> Scored:
    """Find and score the best next tokens of logits [n, vocabulary].

    With `hidden` [n, d] and `head` [vocabulary, d] the finalists' logits are computed again in float32.
    """
    count = min(TOP, logits.shape[-1])
    values, ids = _top(logits, count)
    greatest = values[:, :1]
    # log-sum-exp in the logits' own dtype, summed in float32: no float32 copy of all logits, and rounding averages out
    sums = (logits - greatest).exp_().sum(-1, keepdim=True, dtype=torch.float32)
    total = greatest.float() + sums.log()
    values = values.float()
    if head is not None:
        values = torch.bmm(head[ids].float(), hidden.float()[..., None]).squeeze(-1)
    probs = torch.exp(values - total).clamp_(max=1.0)
    ids, values, probs = ids.cpu().numpy(), values.cpu().numpy(), probs.cpu().numpy()
    order = np.lexsort((ids, -values), axis=-1)
    return Scored(
        np.take_along_axis(ids, order, -1).astype(np.int32), np.take_along_axis(probs, order, -1).astype(np.float32)
    )


def learnable(root: int, before_root: int, tree: DraftTree, path: list[int], scored: Scored) -> Candidates:
    """What a verified tree teaches, in the order in which it is to be learned: wrong nodes, then root and `path`.

    `scored` has one row for the root and one per node; `before_root` is -1 where the root is the first token.
    """
    tokens = np.concatenate([[root], tree.tokens]).astype(np.int32)
    previous = np.concatenate([[before_root], tokens[tree.parents + 1]]).astype(np.int32)
    kept = np.zeros(len(tokens), bool)
    kept[[0, *(node + 1 for node in path)]] = True
    order = np.concatenate([np.flatnonzero(~kept), np.flatnonzero(kept)])
    return Candidates(tokens[order], previous[order], scored.ids[order], scored.probs[order])


def prefill_positions(ids: np.ndarray, limit: int) -> np.ndarray:
    """The prompt positions worth a row: the last occurrence of each distinct token, the latest `limit`, ascending."""
    reversed_first = np.unique(ids[::-1], return_index=True)[1]
    return np.sort(len(ids) - 1 - reversed_first)[-limit:]
