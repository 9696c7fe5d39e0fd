"""What a tree looks like to the target model: one row of tokens, explicit positions and a mask of ancestors.

The tokens are the last committed token (the root, entry 0) and the nodes in their own order. A node stands at the
position of its depth, so siblings share one, and sees the committed text, its ancestors and itself.

The mask is additive in the model's dtype: zero or the dtype's most negative number. A boolean mask would be *added* by
transformers' eager attention and be wrong without a word; infinities would turn rows of padding into NaN.

Grouped-query attention: transformers copies keys and values once per query head (`repeat_kv`) whenever there is more
than one query, which costs a third of a tree's extra time at a context of 1k. `packed_sdpa` folds the query
heads of a group into the query axis instead, (rows, heads, q, d) -> (rows, kv_heads, groups * q, d), with the mask
tiled: the same sums without the copies. It is registered as an attention implementation and used while we decode.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from contextlib import contextmanager

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from redraft.retrieval.draft_tree import DraftTree

__all__ = ["PACKED", "ancestors", "packed_attention", "tree_inputs", "tree_mask"]

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


def packed_sdpa(module, query, key, value, attention_mask, **kwargs):
    """transformers' sdpa attention, with the query heads of a key-value head side by side for trees and single queries."""
    rows, heads, queries, dim = query.shape
    groups = heads // key.shape[1]
    prompt = attention_mask is None and queries > 1  # causal
    if groups == 1 or prompt or (attention_mask is not None and attention_mask.shape[1] != 1):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    packed = query.reshape(rows, heads // groups, groups * queries, dim)
    mask = None if attention_mask is None else _tiled(attention_mask, rows, groups)
    output = torch.nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=mask, scale=kwargs.get("scaling")
    )
    return output.reshape(rows, heads, queries, -1).transpose(1, 2).contiguous(), None


def _tiled(mask: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """`mask` once for each query head of a group; made for the first layer of a forward and kept for the others."""
    if getattr(_last, "mask", None) is not mask or _last.groups != groups:
        _last.mask, _last.groups = mask, groups
        _last.tiled = mask.expand(rows, 1, -1, -1).repeat(1, 1, groups, 1)
    return _last.tiled


_last = threading.local()


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
        _last.__dict__.clear()
        with _lock:
            users["now"] -= 1
            if users["now"] == 0 and config._attn_implementation == PACKED:
                config._attn_implementation = "sdpa"
