"""The key-value cache of the verifier: preallocated, one length per row, rows of a tree kept or dropped in place.

A transformers `DynamicCache` copies everything it holds at every step (`torch.cat`) and keeps one length for the whole
batch. Here each layer owns a buffer that grows by doubling; a forward writes its q new entries behind the committed
ones of each row, and after verification `keep` moves the accepted ones together and forgets the rest by shortening the
row. Rows are left-aligned, so sequences of different lengths sit side by side without padding.

Entry i of a row holds the keys and values of the token at position i: rotary embeddings bake the position in, which
is right for trees too, because an accepted node's depth is its final place.

Cost: `keep` moves at most (accepted nodes) x layers x 2 small blocks and nothing at all where the accepted nodes are
the first ones. The model sees a view of the buffer, never a copy, unless the forward addresses a strict subset of rows.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

__all__ = ["TreeCache"]


class _TreeLayer(DynamicLayer):
    """Keys and values of one layer, each [rows, kv_heads, capacity, head_dim]; lengths live in the cache."""

    def __init__(self, cache: TreeCache) -> None:
        super().__init__()
        self._cache = cache

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the new entries behind every addressed row; return keys and values up to the longest of them."""
        cache = self._cache
        if cache.counts is not None:
            key_states, value_states = key_states.split(cache.counts, 2), value_states.split(cache.counts, 2)
            key_states, value_states = [k[0] for k in key_states], [v[0] for v in value_states]
        end = max(cache.lengths[row] + states.shape[1] for row, states in zip(cache.addressed, key_states))
        self.keys = self._fitting(self.keys, key_states[0], end)
        self.values = self._fitting(self.values, value_states[0], end)
        self.is_initialized = True
        for row, keys, values in zip(cache.addressed, key_states, value_states):
            at = cache.lengths[row]
            self.keys[row, :, at : at + keys.shape[1]] = keys
            self.values[row, :, at : at + keys.shape[1]] = values
        first, last = cache.addressed[0], cache.addressed[-1]
        return self.keys[first : last + 1, :, :end], self.values[first : last + 1, :, :end]

    def _fitting(self, buffer: torch.Tensor | None, states: torch.Tensor, end: int) -> torch.Tensor:
        """`buffer` with room for `end` entries a row, of the kind of `states` [kv_heads, n, head_dim]; a new one keeps
        what is committed."""
        if buffer is not None and buffer.shape[2] >= end:
            return buffer
        capacity = max(end, self._cache.expected_length, 2 * buffer.shape[2] if buffer is not None else 0)
        rows = len(self._cache.lengths)
        larger = states.new_zeros((rows, states.shape[0], capacity, states.shape[2]))
        if buffer is not None:
            larger[:, :, : buffer.shape[2]] = buffer
        return larger

    def get_seq_length(self, *args, **kwargs) -> int:
        return max(self._cache.lengths[row] for row in self._cache.addressed)

    def get_mask_sizes(self, query, *args, **kwargs) -> tuple[int, int]:
        added = query if isinstance(query, int) else query.shape[0]  # transformers 4 hands in the positions
        return self.get_seq_length() + added, 0


class TreeCache(Cache):
    """A transformers `Cache` for trees.

    Args:
        layers: how many layers the model has.
        rows: how many sequences are decoded together.
        expected_length: entries a row will probably need; the first allocation.

    Attributes:
        lengths: committed entries of each row.
        addressed: consecutive rows that the next forward reads and writes.
        counts: where the next forward is flat, how many of its entries belong to each addressed row; else None.
    """

    def __init__(self, layers: int, rows: int, expected_length: int) -> None:
        self.lengths = [0] * rows
        self.addressed = range(rows)
        self.counts: list[int] | None = None
        self.expected_length = expected_length
        super().__init__(layers=[_TreeLayer(self) for _ in range(layers)])

    def keep(self, row: int, nodes: np.ndarray) -> None:
        """Commit the entries `nodes` (ascending, counted from the row's first uncommitted one) and drop the others."""
        base, count = self.lengths[row], len(nodes)
        moved = np.flatnonzero(nodes != np.arange(count))
        if moved.size:
            start = int(moved[0])
            for layer in self.layers:
                source = torch.as_tensor(nodes[start:] + base, dtype=torch.long, device=layer.keys.device)
                for buffer in (layer.keys[row], layer.values[row]):
                    buffer[:, base + start : base + count] = buffer.index_select(1, source)
        self.lengths[row] = base + count

    def select_rows(self, rows: list[int]) -> None:
        """Keep only `rows`, in this order; the others' memory is given back."""
        self.lengths = [self.lengths[row] for row in rows]
        self.addressed = range(len(rows))
        for layer in self.layers:
            index = torch.as_tensor(rows, dtype=torch.long, device=layer.keys.device)
            layer.keys = layer.keys.index_select(0, index)
            layer.values = layer.values.index_select(0, index)
