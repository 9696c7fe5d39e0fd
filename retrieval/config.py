"""What a drafter can be told. Every field has a default that works; `vocab_size` is the only one worth giving always."""

from __future__ import annotations

import numbers
from dataclasses import dataclass

from redraft.retrieval.draft_tree import Source
from redraft.retrieval.tokens import as_probability

__all__ = ["DraftConfig"]


@dataclass(frozen=True)
class DraftConfig:
    """Settings of a `Drafter`.

    Attributes:
        vocab_size: ids are 0..vocab_size-1; None accepts any non-negative int32.
        max_nodes: draft budget, the most nodes in one tree (1 to 512).
        min_prob: a node is drafted only if its estimated path probability, less 5 % for each level (deep nodes are easily
            over-rated), reaches this (0 = fill the budget).
        memory_tokens: how many tokens of earlier outputs a namespace remembers; the oldest unused go first. 0 = none.
        prompt_tokens: the same for earlier prompts, in a memory of their own; 0, the default: they are not remembered. Worth
            it where prompts bring what later outputs copy and later prompts leave out, such as files or records.
        dense_keys: how many hidden states of its outputs a namespace keeps for dense retrieval, 256 bytes each; the oldest
            outputs go first. 0 = none. Without a dense index there are none.
        tokenizer_fingerprint: what an index must have been built with; None skips the check.
        disabled: names of sources to leave out (`Source.NAMES`), for ablations.
    """

    vocab_size: int | None = None
    max_nodes: int = 32
    min_prob: float = 0.0
    memory_tokens: int = 2_000_000
    prompt_tokens: int = 0
    dense_keys: int = 65_536
    tokenizer_fingerprint: str | None = None
    disabled: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.vocab_size is not None:
            self._check_count("vocab_size", 1, 2**31 - 1)
        self._check_count("max_nodes", 1, 512)
        for name in ("memory_tokens", "prompt_tokens", "dense_keys"):
            self._check_count(name, 0, 2**30)
        if not as_probability(self.min_prob, "min_prob") < 1:
            raise ValueError(f"min_prob: wanted 0 <= min_prob < 1, got {self.min_prob}")
        unknown = sorted({self.disabled} if isinstance(self.disabled, str) else set(self.disabled) - set(Source.NAMES))
        if unknown:
            raise ValueError(f"disabled: wanted a set of names out of {', '.join(Source.NAMES)}, got {unknown}")

    def _check_count(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name}: wanted a whole number, got {value!r}")
        if not least <= value <= most:
            raise ValueError(f"{name}: wanted {least}..{most}, got {value}")
