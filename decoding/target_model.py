"""The target model as the verifier uses it: one forward over a batch of trees, and the models it must refuse.

transformers has changed names and behaviour between 4.57 and 5.24 (`past_key_values` became `cache`), some models
cannot verify trees at all, and a mask that is ignored gives wrong text without an error. So a model is checked twice:
by its configuration (encoder-decoder, recurrent state, attention that takes no mask), and once per model by a small
trial, in which a tree's logits must equal those of its paths.
"""

from __future__ import annotations

import inspect
import time
import weakref
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from redraft.decoding.kv_cache import TreeCache
from redraft.decoding.packed_linear import packed_linears
from redraft.decoding.stats import GenerationStats
from redraft.decoding.tree_attention import (
    PACKED,
    Ragged,
    flat_inputs,
    packed_attention,
    ragged,
    tiled,
    tree_inputs,
    tree_mask,
)
from redraft.retrieval.draft_tree import DraftTree

__all__ = ["TargetModel"]

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_tried: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


class TargetModel:
    """A causal transformers model that verifies trees.

    Use it inside `with target.decoding(stats):`. Raises ValueError for models that it cannot be right with.

    Attributes:
        model: the model itself.
        vocab_size, device, dtype: of the logits.
        max_positions: positions the model was made for, None where it does not say.
        window: tokens within which its attention is full; None = always.
        head: float[vocab_size, d] where logits are hidden states times this matrix and half precision makes
            re-scoring worth it, else None.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._config = model.config.get_text_config()
        self._check_configuration()
        parameters = inspect.signature(model.forward).parameters
        missing = [name for name in ("position_ids", "attention_mask", "logits_to_keep") if name not in parameters]
        if missing:
            raise ValueError(f"{self._name} cannot verify trees: its forward takes no {' and no '.join(missing)}")
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._embeddings = model.get_output_embeddings()
        self._hidden: torch.Tensor | None = None
        self._head_began = 0.0
        self.vocab_size = int(self._embeddings.weight.shape[0])
        self.device = self._embeddings.weight.device
        self.dtype = self._embeddings.weight.dtype
        self.max_positions = getattr(self._config, "max_position_embeddings", None)
        self.window = self._window()
        self._kv_heads = getattr(self._config, "num_key_value_heads", None) or self._config.num_attention_heads
        self.head: torch.Tensor | None = None
        self._stats = GenerationStats()

    @property
    def _name(self) -> str:
        return type(self.model).__name__

    def _check_configuration(self) -> None:
        config = self._config
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise ValueError(f"{self._name} is an encoder-decoder model: only decoder-only models can be drafted for")
        kinds = set(getattr(config, "layer_types", None) or ())
        if getattr(self.model, "_is_stateful", False) or kinds - _ATTENTION:
            raise ValueError(
                f"{self._name} keeps a recurrent state (layers: {', '.join(sorted(kinds)) or 'recurrent'}), which cannot"
                " follow the branches of a draft tree: only attention models can be drafted for"
            )
        if config._attn_implementation not in ("sdpa", "eager", PACKED):
            raise ValueError(
                f"attention implementation {config._attn_implementation!r} takes no tree mask: load the model with"
                " attn_implementation='sdpa' or 'eager'"
            )

    def _window(self) -> int | None:
        """The smallest window of any layer; the tree mask is right up to there."""
        config = self._config
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            used = getattr(config, "use_sliding_window", True)
            window = getattr(config, "sliding_window", None)
            return int(window) if used and window else None
        sizes = [getattr(config, _WINDOWED[kind], None) for kind in set(kinds) if kind in _WINDOWED]
        return min((int(size) for size in sizes if size), default=None)

    def length_limit(self, prompt_length: int, max_new_tokens: int) -> int:
        """How long a text may get, prompt included. Raises ValueError where nothing right can be written."""
        wanted = prompt_length + max_new_tokens
        if self.max_positions is not None:
            if prompt_length >= self.max_positions:
                raise ValueError(
                    f"the prompt's {prompt_length} tokens fill the context of {self._name} ({self.max_positions} tokens)"
                )
            wanted = min(wanted, self.max_positions)
        if self.window is not None and wanted > self.window:
            raise ValueError(
                f"{self._name} attends to a sliding window of {self.window} tokens; drafting is right only within it,"
                f" and prompt and output may reach {wanted} tokens"
            )
        return wanted

    @contextmanager
    def decoding(self, stats: GenerationStats):
        """The block in which the model is used: evaluation mode, no gradients, phases timed into `stats`."""
        self._stats = stats
        was_training = self.model.training
        hook = self._embeddings.register_forward_pre_hook(self._before_head)
        self.model.eval()
        try:
            with torch.inference_mode(), packed_attention(self.model), packed_linears(self.model):
                if self.model not in _tried:
                    self._trial()
                    _tried.add(self.model)
                if self.dtype in (torch.bfloat16, torch.float16) and self._head_is_linear():
                    self.head = self._embeddings.weight
                yield self
        finally:
            hook.remove()
            self.model.train(was_training)

    def new_cache(self, rows: int, expected_length: int) -> TreeCache:
        return TreeCache(self._config.num_hidden_layers, rows, expected_length)

    def prefill(self, cache: TreeCache, row: int, ids: torch.Tensor, positions: np.ndarray):
        """Run a prompt, int64[n], into a row; returns logits [k, vocab_size] and hidden [k, d] at `positions`."""
        cache.addressed = range(row, row + 1)
        keep = torch.as_tensor(positions, dtype=torch.long, device=self.device)
        places = torch.arange(len(ids), device=self.device)[None]
        logits, hidden = self._forward(cache, ids[None], places, None, keep)
        cache.lengths[row] += len(ids)
        cache.addressed = range(len(cache.lengths))
        return logits[0], hidden[0]

    def verify(self, cache: TreeCache, roots: list[int], trees: list[DraftTree]):
        """One forward: row i of the cache verifies `trees[i]` under `roots[i]`.

        Returns logits [entries, vocab_size] and hidden [entries, d]: the root of the first row, its nodes, the root of the
        second row, and so on. The cache holds all of them uncommitted until `TreeCache.keep`.
        """
        began = time.perf_counter()
        if len(trees) == 1 or not self._takes_flat():
            logits, hidden = self._padded(cache, roots, trees)
        else:
            logits, hidden = self._flat(cache, roots, trees)
        self._wait()
        self._stats.seconds["forward"] += self._head_began - began
        self._stats.seconds["head"] += time.perf_counter() - self._head_began
        return logits, hidden

    def _takes_flat(self) -> bool:
        """Whether attention is ours to replace, so that several sequences may lie in one row."""
        return self._config._attn_implementation == PACKED and getattr(self.model, "_supports_attention_backend", False)

    def _padded(self, cache: TreeCache, roots: list[int], trees: list[DraftTree]):
        """Each sequence a row, as wide as the largest tree."""
        tokens, positions = tree_inputs(roots, cache.lengths, trees)
        plain = len(trees) == 1 and len(trees[0]) == 0  # a single query sees everything: no mask, the fastest kernel
        mask = None if plain else tree_mask(cache.lengths, trees, self.dtype, self.device)
        logits, hidden = self._forward(cache, self._tensor(tokens), self._tensor(positions), mask, 0)
        if len(trees) == 1:
            return logits[0], hidden[0]
        used = [row * tokens.shape[1] + entry for row, tree in enumerate(trees) for entry in range(len(tree) + 1)]
        used = torch.tensor(used, device=self.device)
        return logits.flatten(0, 1)[used], hidden.flatten(0, 1)[used]

    def _flat(self, cache: TreeCache, roots: list[int], trees: list[DraftTree]):
        """All sequences in one row, one behind the other."""
        tokens, positions = flat_inputs(roots, cache.lengths, trees)
        groups = self._config.num_attention_heads // self._kv_heads
        rows, start = [], 0
        for length, tree in zip(cache.lengths, trees):
            mask = tiled(tree_mask([length], [tree], self.dtype, self.device), groups) if len(tree) else None
            rows.append(Ragged(start, len(tree) + 1, length, mask))
            start += len(tree) + 1
        cache.counts = [row.entries for row in rows]
        unread = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)  # keeps transformers from making a mask
        try:
            with ragged(rows):
                logits, hidden = self._forward(cache, self._tensor(tokens), self._tensor(positions), unread, 0)
        finally:
            cache.counts = None
        return logits[0], hidden[0]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _forward(self, cache, ids, positions, mask, keep):
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=keep,
            **{self._cache_argument: cache},
        )
        return output.logits, self._hidden

    def _before_head(self, module, arguments) -> None:
        self._hidden = arguments[0]
        self._wait()
        self._head_began = time.perf_counter()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _head_is_linear(self) -> bool:
        """Whether logits are nothing but hidden states times the output embedding (no bias, scale or cap)."""
        if type(self._embeddings) is not torch.nn.Linear or self._embeddings.bias is not None:
            return False
        cache = self.new_cache(1, 1)
        logits, hidden = self.prefill(cache, 0, torch.zeros(1, dtype=torch.long, device=self.device), np.array([0]))
        return torch.equal(logits, self._embeddings.forward(hidden))

    def _trial(self) -> None:
        """Verify a small tree and each of its paths; raise ValueError unless the logits agree."""
        prompt = torch.arange(1, 5, device=self.device) % self.vocab_size
        tree = DraftTree(
            np.array([5, 6, 7, 8], np.int32) % self.vocab_size,
            np.array([-1, -1, 0, 1], np.int32),
            np.ones(4, np.float32),
            np.zeros(4, np.uint8),
        )
        cache = self.new_cache(1, 16)
        self.prefill(cache, 0, prompt[:3], np.array([2]))
        together = [self.verify(cache, [int(prompt[3])], [tree])[0][3:]]
        if self._takes_flat():
            cache = self.new_cache(2, 16)
            self.prefill(cache, 0, prompt[:2], np.array([1]))
            self.prefill(cache, 1, prompt[:3], np.array([2]))
            together.append(self.verify(cache, [int(prompt[2]), int(prompt[3])], [tree, tree])[0][-2:])
        together = torch.cat(together).float()
        alone = []
        for path in ([0, 2], [1, 3]):
            ids = torch.cat([prompt, torch.as_tensor(tree.tokens[path], device=self.device).long()])
            alone.append(self.prefill(self.new_cache(1, 16), 0, ids, np.array([5]))[0][0])
        alone = torch.stack(alone).float().repeat(len(together) // 2, 1)
        error = float((together - alone).norm() / (alone - alone.mean()).norm().clamp_min(1e-9))
        limit = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1
        if not error <= limit:
            raise ValueError(
                f"{self._name} cannot verify trees: in a trial a tree's logits differ from its paths' by a"
                f" relative {error:.2g} (at most {limit:g} is rounding)"
            )
