"""What can be replayed: a name, and how to make a fresh drafter of that kind for each workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from redraft.retrieval.config import DraftConfig
from redraft.retrieval.ngram import NgramDrafter

__all__ = ["Contender", "Ngram", "Redraft"]


class Contender(Protocol):
    """Picklable, so that workloads can be replayed by several processes."""

    @property
    def name(self) -> str:
        """What tables and records call it."""

    def make(self):
        """A fresh drafter: empty memory, the tables of a new namespace."""


@dataclass(frozen=True)
class Redraft:
    """Redraft's own `Drafter`, with or without indexes."""

    config: DraftConfig
    indexes: tuple[str, ...] = ()
    name: str = "redraft"

    def make(self):
        """A fresh `Drafter`."""
        from redraft.retrieval.drafter import Drafter

        return Drafter(self.config, indexes=list(self.indexes))


@dataclass(frozen=True)
class Ngram:
    """N-gram lookup alone: the baseline that every engine ships."""

    config: DraftConfig
    name: str = "ngram"

    def make(self) -> NgramDrafter:
        """A fresh `NgramDrafter`."""
        return NgramDrafter(self.config)
