"""Whose memory: everything that sessions of one namespace share, and nothing that another namespace can see."""

from __future__ import annotations

import threading

from redraft.retrieval.bundle import Bundle
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.dense_memory import DenseMemory
from redraft.retrieval.knowledge import namespace_bundle
from redraft.retrieval.memory import Memory
from redraft.retrieval.model import new_model
from redraft.retrieval.token_recycling import new_table

__all__ = ["Namespace"]

RECYCLED_ROWS = 65_536  # of the target's opinions kept per namespace, 5 MB


class Namespace:
    """Memory, learned tables and recycled opinions of one namespace.

    Writers hold `lock` and call `publish` when they are done. Drafting takes no lock: it reads arrays in which every
    index is valid at any moment, so the worst that a concurrent write does to a draft is to make it a little staler than
    it might be.

    Attributes:
        bundle: the arrays as kernels take them.
        memory, prompts: Memory of earlier outputs, and of earlier prompts where they are remembered.
        dense: DenseMemory, the target's states of the outputs remembered; empty without a dense index.
    """

    def __init__(self, name: str, config: DraftConfig):
        self.name = name
        self.lock = threading.Lock()
        self.memory = Memory(config.memory_tokens)
        self.prompts = Memory(config.prompt_tokens)
        self.dense = DenseMemory(config.dense_keys)
        self.bundle: Bundle | None = None
        self._begin()

    def _begin(self) -> None:
        self.model = new_model()
        self.recycled = new_table(0)  # made when a target first sends its candidates
        self._published: tuple = (None,) * 5
        self.publish()

    def publish(self) -> None:
        """Let readers see arrays that have replaced others."""
        trie, frequent, recycled, model, prompts = self._published
        if (
            self.memory.trie is not trie
            or self.memory.frequent is not frequent
            or self.recycled is not recycled
            or self.model is not model
            or self.prompts.trie is not prompts
        ):
            self._published = self.memory.trie, self.memory.frequent, self.recycled, self.model, self.prompts.trie
            self.bundle = namespace_bundle(*self._published, self.bundle)

    def ensure_recycling(self) -> None:
        if len(self.recycled.rows) == 0:
            self.recycled = new_table(RECYCLED_ROWS)

    def forget(self) -> None:
        """Forget all texts and opinions. What was learned of how far sources can be trusted goes too."""
        with self.lock:
            self.memory.clear()
            self.prompts.clear()
            self.dense.clear()
            self._begin()
