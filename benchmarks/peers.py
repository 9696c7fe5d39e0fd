"""Other drafters behind the interface that a replay drives, so that all are measured by the same walk.

`arctic-inference` (SuffixDecoding, C++) is used as its vLLM plugin uses it: one request per session, the response
added as it is emitted, `speculate` over the last `max_tree_depth` tokens, responses of finished requests kept.
Converting its lists into a `DraftTree` is not timed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.errors import import_extra

__all__ = ["ARCTIC_BEST", "ARCTIC_DEFAULT", "Arctic"]

_DEPTH = 64  # SuffixDecodingCache's own default


@dataclass(frozen=True)
class Arctic:
    """SuffixDecodingCache with these arguments to `speculate`; its own default is a chain, factor 1, probability 0.1.

    `max_tokens` is always given: the library's default for it (None) raises AttributeError in 0.3.0.
    """

    name: str
    factor: float = 1.0
    min_token_prob: float = 0.1
    tree: bool = False
    max_tokens: int = 32

    def make(self) -> _ArcticDrafter:
        """A fresh cache."""
        return _ArcticDrafter(self)


ARCTIC_DEFAULT = Arctic("arctic default")
ARCTIC_BEST = Arctic("arctic best", factor=16.0, min_token_prob=0.001, tree=True)


class _ArcticDrafter:
    def __init__(self, settings: Arctic) -> None:
        self._settings = settings
        self._cache = import_extra("arctic_inference.suffix_decoding", "dev").SuffixDecodingCache(_DEPTH)
        self._opened = 0

    def open(self, prompt: np.ndarray) -> _ArcticSession:
        """Start a request; its whole context goes into a suffix tree of its own."""
        self._opened += 1
        return _ArcticSession(self._cache, self._settings, self._opened, prompt)

    def __enter__(self) -> _ArcticDrafter:
        return self

    def __exit__(self, *exception) -> None:
        self._cache = None


class _ArcticSession:
    def __init__(self, cache, settings: Arctic, request: int, prompt: np.ndarray) -> None:
        self._cache, self._settings, self._request = cache, settings, request
        cache.start_request(request, np.ascontiguousarray(prompt))
        self._tail = np.array(prompt[-_DEPTH:])

    def draft(self, max_nodes: int | None = None, min_prob: float | None = None) -> _ArcticDraft:
        """`speculate` at the settings; `min_prob` is taken for `min_token_prob`, which is a path probability, too."""
        settings = self._settings
        answer = self._cache.speculate(
            self._request,
            self._tail,
            max_spec_tokens=settings.max_tokens if max_nodes is None else max_nodes,
            max_spec_factor=settings.factor,
            min_token_prob=settings.min_token_prob if min_prob is None else min_prob,
            use_tree_spec=settings.tree,
        )
        return _ArcticDraft(answer)

    def commit(self, tokens: np.ndarray) -> None:
        """Add what was emitted to the request's tree and to the one that all requests share."""
        self._cache.add_active_response(self._request, np.ascontiguousarray(tokens))
        self._tail = np.concatenate((self._tail, tokens))[-_DEPTH:]

    def close(self) -> None:
        """Drop the request's own tree; its response stays in the shared one."""
        self._cache.stop_request(self._request)


@dataclass(frozen=True)
class _ArcticDraft:
    answer: object = field(repr=False)

    def tree(self) -> DraftTree:
        """The same draft as arrays. It does not say whether the request or the memory had it: all is MEMORY."""
        answer = self.answer
        n = len(answer.token_ids)
        return DraftTree(
            np.array(answer.token_ids, np.int32).reshape(n),
            np.array(answer.parents, np.int32).reshape(n),
            np.array(answer.probs, np.float32).reshape(n),
            np.full(n, Source.MEMORY, np.uint8),
        )
