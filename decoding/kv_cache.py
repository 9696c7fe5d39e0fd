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
        """Write q new entries behind every addressed row; return keys and values up to the longest of them."""
        cache = self._cache
        added = key_states.shape[2]
        end = max(cache.lengths[row] for row in cache.addressed) + added
        self.keys = self._fitting(self.keys, key_states, end)
        self.values = self._fitting(self.values, value_states, end)
        self.is_initialized = True
        for i, row in enumerate(cache.addressed):
            at = cache.lengths[row]
            self.keys[row, :, at : at + added] = key_states[i]
            self.values[row, :, at : at + added] = value_states[i]
        first, last = cache.addressed[0], cache.addressed[-1]
        return self.keys[first : last + 1, :, :end], self.values[first : last + 1, :, :end]

    def _fitting(self, buffer: torch.Tensor | None, states: torch.Tensor, end: int) -> torch.Tensor:
        """`buffer` with room for `end` entries a row; a new one keeps what is committed."""
        if buffer is not None and buffer.shape[2] >= end:
            return buffer
        capacity = max(end, self._cache.expected_length, 2 * buffer.shape[2] if buffer is not None else 0)
        rows = len(self._cache.lengths)
        larger = states.new_zeros((rows, states.shape[1], capacity, states.shape[3]))
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
    """

    def __init__(self, layers: int, rows: int, expected_length: int) -> None:
        self.lengths = [0] * rows
        self.addressed = range(rows)
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
