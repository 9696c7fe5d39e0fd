"""The names and shapes of `docs/index-format.md`, in one place for writer and reader."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from redraft.retrieval import frequent_contexts
from redraft.retrieval.edge_rows import EDGE_COLUMNS
from redraft.retrieval.frozen_automaton import STATE_COLUMNS
from redraft.retrieval.token_recycling import WIDTH

__all__ = [
    "BUCKETS",
    "CONTEXTS",
    "CONTEXT_EDGES",
    "CORPUS_KINDS",
    "COUNTS",
    "DENSE",
    "DENSE_FAISS",
    "DENSE_MAP",
    "DENSE_POSITIONS",
    "DOCUMENT_ENDS",
    "EDGES",
    "FORMAT",
    "FORMAT_VERSIONS",
    "KEYS",
    "KINDS",
    "MANIFEST",
    "STATES",
    "SUCCESSORS",
    "SUCCESSOR_IDS",
    "SUCCESSOR_PROBS",
    "SUFFIXES",
    "TEXT",
    "TOKENS",
    "Progress",
]

FORMAT = "redraft-index"
FORMAT_VERSIONS = {"suffix_automaton": 1, "suffix_array": 3, "successors": 1, "dense": 1}  # of each kind
MANIFEST = "manifest.json"
TOKENS, DOCUMENT_ENDS = "tokens.npy", "document_ends.npy"
STATES, EDGES = "states.npy", "edges.npy"
TEXT, SUFFIXES, KEYS, BUCKETS = "text.npy", "suffixes.npy", "keys.npy", "buckets.npy"
CONTEXTS, CONTEXT_EDGES = "contexts.npy", "context_edges.npy"
SUCCESSORS, SUCCESSOR_IDS, SUCCESSOR_PROBS = "successors", "ids.npy", "probs.npy"  # the kind, and its files
DENSE, DENSE_MAP, DENSE_POSITIONS, DENSE_FAISS = "dense", "map.npy", "positions.npy", "faiss.npy"

# kind: {file: (dtype, shape of one row)}, in the order of writing.
_INT32, _WORDS = np.dtype("<i4"), (np.dtype("<u4"), ())
_ENDS = {DOCUMENT_ENDS: (np.dtype("<i8"), ())}
KINDS = {
    "suffix_automaton": {
        TOKENS: (_INT32, ()),
        **_ENDS,
        STATES: (_INT32, (STATE_COLUMNS,)),
        EDGES: (_INT32, (EDGE_COLUMNS,)),
    },
    "suffix_array": {
        **_ENDS,
        TEXT: _WORDS,
        SUFFIXES: _WORDS,
        KEYS: _WORDS,
        BUCKETS: _WORDS,
        CONTEXTS: (_INT32, (frequent_contexts.CONTEXT_COLUMNS,)),
        CONTEXT_EDGES: (_INT32, (EDGE_COLUMNS,)),
    },
    SUCCESSORS: {SUCCESSOR_IDS: (_INT32, (WIDTH,)), SUCCESSOR_PROBS: (np.dtype("<f2"), (WIDTH,))},
    DENSE: {DENSE_MAP: (np.dtype("<f4"), ()), DENSE_POSITIONS: (_INT32, ()), DENSE_FAISS: (np.dtype("u1"), ())},
}
CORPUS_KINDS = tuple(kind for kind, files in KINDS.items() if DOCUMENT_ENDS in files)

# kind: numbers that its manifest states.
_CORPUS_COUNTS = ("documents", "tokens", "max_token")
COUNTS = {kind: _CORPUS_COUNTS for kind in CORPUS_KINDS} | {
    SUCCESSORS: ("rows", "max_token"),
    DENSE: ("vectors", "dimension", "width"),
}

Progress = Callable[[str, int, int], None]  # (what is being done, done, total)


def no_progress(what: str, done: int, total: int) -> None:
    """Progress nobody watches."""
