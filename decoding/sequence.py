"""One sequence being decoded: its tokens so far, and where it must end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

__all__ = ["Sequence"]


class Sequence:
    """A prompt and what was written after it.

    Args:
        index: its row in the caller's batch.
        prompt: int64[n], n >= 1, on the device of the logits.
        max_length: tokens at which it is cut, prompt included.
        eos: ids that end it.
        seed: of its noise, where it is sampled.
        padding: int64[m] that stands before the prompt for logits processors and stopping criteria, as it does when
            transformers decodes a left-padded batch; nobody else sees it.
        stops: told the padded ids int64[1, m + length] after every token, returns whether the text ends there.

    Attributes:
        length: tokens so far, prompt included; the last one is the *root*, not in the cache yet once decoding began.
        done: whether it has ended.
        sources: for every written token the source that drafted it, -1 for those of the target alone.
    """

    def __init__(
        self,
        index: int,
        prompt: torch.Tensor,
        max_length: int,
        *,
        eos: frozenset[int] = frozenset(),
        seed: int = 0,
        padding: torch.Tensor | None = None,
        stops: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        self.index = index
        self.prompt_length = len(prompt)
        self.length = len(prompt)
        self.max_length = max_length
        self.seed = seed
        self.done = False
        self.sources: list[int] = []
        self._eos = eos
        self._stops = stops
        self._padding = 0 if padding is None else len(padding)
        self._buffer = torch.empty(self._padding + max_length, dtype=torch.long, device=prompt.device)
        if padding is not None:
            self._buffer[: self._padding] = padding
        self._ids = self._buffer[self._padding :]
        self._ids[: len(prompt)] = prompt

    @property
    def ids(self) -> torch.Tensor:
        """int64[length], a view."""
        return self._ids[: self.length]

    @property
    def padded_ids(self) -> torch.Tensor:
        """int64[1, m + length], a view: what logits processors and stopping criteria are shown."""
        return self._buffer[None, : self._padding + self.length]

    @property
    def root(self) -> int:
        return int(self._ids[self.length - 1])

    @property
    def before_root(self) -> int:
        return int(self._ids[self.length - 2]) if self.length > 1 else -1

    def history(self) -> np.ndarray:
        """int32[length], a copy on the CPU."""
        return self.ids.cpu().numpy().astype(np.int32)

    def append(self, token: int) -> bool:
        """Write one token; returns whether the text ends with it."""
        self._ids[self.length] = token
        self.length += 1
        self.done = token in self._eos or self.length >= self.max_length
        if self._stops is not None and self._stops(self.padded_ids):
            self.done = True
        return self.done
