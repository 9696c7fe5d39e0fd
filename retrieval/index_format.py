"""The names and shapes of `docs/index-format.md`, in one place for writer and reader."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from redraft.retrieval.frozen_automaton import EDGE_COLUMNS, STATE_COLUMNS

__all__ = ["DOCUMENT_ENDS", "EDGES", "FORMAT", "FORMAT_VERSION", "KINDS", "MANIFEST", "STATES", "TOKENS", "Progress"]

FORMAT = "redraft-index"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENS, DOCUMENT_ENDS = "tokens.npy", "document_ends.npy"
STATES, EDGES = "states.npy", "edges.npy"

# kind: {file: (dtype, shape of one row)}, in the order of writing.
_COMMON = {TOKENS: (np.dtype("<i4"), ()), DOCUMENT_ENDS: (np.dtype("<i8"), ())}
KINDS = {
    "suffix_automaton": _COMMON
    | {STATES: (np.dtype("<i4"), (STATE_COLUMNS,)), EDGES: (np.dtype("<i4"), (EDGE_COLUMNS,))},
}

Progress = Callable[[str, int, int], None]  # (what is being done, done, total)


def no_progress(what: str, done: int, total: int) -> None:
    """Progress nobody watches."""
