"""What a tree looks like to the target model: one row of tokens, explicit positions and a mask of ancestors.

The tokens are the last committed token (the root, entry 0) and the nodes in their own order. A node stands at the
position of its depth, so siblings share one, and sees the committed text, its ancestors and itself.

The mask is additive in the model's dtype: zero or the dtype's most negative number. A boolean mask would be *added* by
transformers' eager attention and be wrong without a word; infinities would turn rows of padding into NaN.

Grouped-query attention: transformers copies keys and values once per query head (`repeat_kv`) whenever there is more
than one query, which costs a third of a tree's extra time at a context of 1k. `packed_sdpa` folds the query
heads of a group into the query axis instead, (rows, heads, q, d) -> (rows, kv_heads, groups * q, d), with the mask
tiled: the same sums without the copies. It is registered as an attention implementation and used while we decode.

Several sequences at once lie one behind the other in a single row (`flat_inputs`), so that all layers but attention
work on nodes alone, however unequal the trees are; attention takes them apart again (`Ragged`) and lets each one see its own row of the
cache, as long as it is. A model whose attention is not transformers' own to replace gets rows padded to the largest tree (`tree_inputs`).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from redraft.retrieval.draft_tree import DraftTree

__all__ = ["PACKED", "Ragged", "ancestors", "flat_inputs", "packed_attention", "ragged", "tree_inputs", "tree_mask"]

PACKED = "redraft_packed_sdpa"


def ancestors(tree: DraftTree) -> np.ndarray:
    """bool[n + 1, n + 1]: entry i (0 the root, then the nodes) sees entry j: itself and those above it."""
    n = len(tree)
    sees = np.eye(n + 1, dtype=bool)
    for node, parent in enumerate(tree.parents):
        sees[node + 1] |= sees[parent + 1]
    return sees


def tree_inputs(roots: list[int], lengths: list[int], trees: list[DraftTree]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and positions of every row, each int64[rows, q] with q = 1 + the largest tree.

    `lengths` counts the committed tokens that lie in the cache, so a root stands at its row's length. Rows with
    smaller trees are filled with copies of their root, which nobody sees.
    """
    width = 1 + max(len(tree) for tree in trees)
    tokens = np.empty((len(trees), width), np.int64)
    positions = np.empty((len(trees), width), np.int64)
    for i, tree in enumerate(trees):
        tokens[i] = roots[i]
        positions[i] = lengths[i]
        tokens[i, 1 : len(tree) + 1] = tree.tokens
        positions[i, 1 : len(tree) + 1] = lengths[i] + tree.depths()
    return tokens, positions


def flat_inputs(roots: list[int], lengths: list[int], trees: list[DraftTree]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and positions of all trees, root and nodes of one behind those of the other, each int64[1, entries]."""
    parts = [tree_inputs([root], [length], [tree]) for root, length, tree in zip(roots, lengths, trees)]
    tokens, positions = zip(*parts)
    return np.concatenate(tokens, axis=1), np.concatenate(positions, axis=1)


def tree_mask(lengths: list[int], trees: list[DraftTree], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive mask [rows, 1, q, longest length + q] for inputs made by `tree_inputs`."""
    width = 1 + max(len(tree) for tree in trees)
    sees = np.zeros((len(trees), 1, width, max(lengths) + width), bool)
    for i, (length, tree) in enumerate(zip(lengths, trees)):
        sees[i, 0, :, :length] = True
        sees[i, 0, : len(tree) + 1, length : length + len(tree) + 1] = ancestors(tree)
    mask = torch.zeros(sees.shape, dtype=dtype)
    mask.masked_fill_(torch.from_numpy(~sees), torch.finfo(dtype).min)
    return mask.to(device)


class Ragged(NamedTuple):
    """One sequence of a flat forward: its entries among the queries, what it may see of its cache row, and its mask.

    `mask` is additive [1, 1, entries, length + entries]; None where there is a single entry, which sees everything.
    """

    start: int
    entries: int
    length: int
    mask: torch.Tensor | None


_local = threading.local()  # of this thread's forward: `rows`, where it is a flat one; the mask that was tiled last


@contextmanager
def ragged(rows: list[Ragged]):
    """Within the block, a forward's queries are those of several sequences, one behind the other."""
    _local.rows = rows
    try:
        yield
    finally:
        del _local.rows


def packed_sdpa(module, query, key, value, attention_mask, **kwargs):
    """transformers' sdpa attention, with the query heads of a key-value head side by side for trees and single queries."""
    scale = kwargs.get("scaling")
    rows = getattr(_local, "rows", None)
    if rows is not None:
        parts = [
            _attend(
                query[:, :, row.start : row.start + row.entries],
                key[i : i + 1, :, : row.length + row.entries],
                value[i : i + 1, :, : row.length + row.entries],
                row.mask,
                scale,
            )
            for i, row in enumerate(rows)
        ]
        return torch.cat(parts, 2).transpose(1, 2).contiguous(), None
    prompt = attention_mask is None and query.shape[2] > 1  # causal
    if prompt or (attention_mask is not None and attention_mask.shape[1] != 1):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    mask = attention_mask
    groups = query.shape[1] // key.shape[1]
    if mask is not None and groups > 1:
        if getattr(_local, "mask", None) is not mask:  # the first layer of a forward; the others find it
            _local.mask, _local.tiled = mask, tiled(mask, groups)
        mask = _local.tiled
    return _attend(query, key, value, mask, scale).transpose(1, 2).contiguous(), None


def tiled(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """`mask` once for each query head of a group."""
    return mask.repeat(1, 1, groups, 1)


def _attend(query, key, value, mask, scale) -> torch.Tensor:
    """Attention [rows, heads, queries, d] with a mask that is tiled already."""
    rows, heads, queries, dim = query.shape
    packed = query.reshape(rows, key.shape[1], -1, dim)
    output = torch.nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    return output.reshape(rows, heads, queries, -1)


AttentionInterface.register(PACKED, packed_sdpa)
AttentionMaskInterface.register(PACKED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])

_users: weakref.WeakKeyDictionary[PreTrainedModel, Counter] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def packed_attention(model: PreTrainedModel):
    """Within the block a model with sdpa attention uses `packed_sdpa`; several threads may share one model."""
    config = model.config.get_text_config()
    with _lock:
        users = _users.setdefault(model, Counter())
        if users["now"] == 0 and config._attn_implementation == "sdpa":
            config._attn_implementation = PACKED
        users["now"] += 1
    try:
        yield
    finally:
        _local.__dict__.clear()
        with _lock:
            users["now"] -= 1
            if users["now"] == 0 and config._attn_implementation == PACKED:
                config._attn_implementation = "sdpa"
