"""Provenance: where in a corpus a drafted token comes from.

Drafting keeps no record of it: most trees are never asked, and an index finds a passage again in microseconds. So a
tree carries what it was drafted from (the last tokens of the text, and whom to ask for passages), and looks its nodes
up when somebody wants to know. A passage is a drafted token and up to four tokens before it; the answer is the first
place of its longest suffix that an index holds. It names the token's own place, and the tokens before that place are
those before the token in the tree and the text, as far as they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["PASSAGE_TOKENS", "Occurrence", "Origin", "passages"]

PASSAGE_TOKENS = 5  # the longest context that an index is asked for when drafting, and the drafted token


class Occurrence(NamedTuple):
    """A place in a corpus.

    index: path of the index; for one of a directory of shards, that of the shard.
    document: number of the document in it, from 0, in the order in which it was built.
    offset: number of the token in the document, from 0.
    """

    index: str
    document: int
    offset: int


class Origin(NamedTuple):
    """What a tree was drafted from.

    context: int32[up to 4], the last tokens of the text, oldest first.
    locate: finds passages (int32[2 to 5] each); None for one whose last two tokens occur nowhere.
    """

    context: np.ndarray
    locate: Callable[[Sequence[np.ndarray]], list[Occurrence | None]]


def passages(context: np.ndarray, tokens: np.ndarray, parents: np.ndarray, nodes: Sequence[int]) -> list[np.ndarray]:
    """int32[up to 5] for each of `nodes` of a tree: the last tokens on the way to it through `context`, its own last."""
    found = []
    for node in nodes:
        path = []
        while node >= 0 and len(path) < PASSAGE_TOKENS:
            path.append(tokens[node])
            node = parents[node]
        found.append(np.concatenate((context, np.array(path[::-1], np.int32)))[-PASSAGE_TOKENS:])
    return found
