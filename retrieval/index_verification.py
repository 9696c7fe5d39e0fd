"""Verifying an index directory: reading all of it, where opening reads no more than the headers.

The digests tell whether the files are those that were written. Then every number is looked at, whoever wrote it: no kernel,
which check nothing, may be led outside an array or around in a circle.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from redraft.retrieval import frequent_contexts
from redraft.retrieval.dense_index import verify_dense
from redraft.retrieval.edge_rows import EDGE_TARGET, EDGE_TOKEN, HEAD
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.frozen_automaton import EDGE_START, FIRST_END, LENGTH, LINK
from redraft.retrieval.index_directory import CorpusIndex, open_index
from redraft.retrieval.index_files import check_digests, read_manifest
from redraft.retrieval.index_format import (
    BUCKETS,
    CONTEXT_EDGES,
    CONTEXTS,
    DENSE,
    DOCUMENT_ENDS,
    EDGES,
    KEYS,
    STATES,
    SUCCESSORS,
    SUFFIXES,
    TEXT,
    TOKENS,
    Progress,
    no_progress,
)
from redraft.retrieval.successor_table import open_successors
from redraft.retrieval.suffix_array import KEY_STRIDE, SuffixArray, bucket_bounds, entries_of, highest_key, positions
from redraft.retrieval.suffix_array_build import starts

__all__ = ["verify_index"]


def verify_index(path: str | os.PathLike, progress: Progress | None = None) -> dict:
    """Read the whole index at `path`: digests, and that every number in it lies where it may; returns the manifest.

    Raises IndexFormatError that names the first file that is wrong.
    """
    path, progress = Path(path), progress or no_progress
    kind = read_manifest(path)["kind"]
    if kind == DENSE:
        return verify_dense(path, progress)
    if kind == SUCCESSORS:
        manifest = open_successors(path).manifest
        check_digests(path, manifest, progress)
        return manifest
    with open_index(path) as index:
        check_digests(path, index.manifest, progress)
        _check_ranges(index)
        return index.manifest


def _check_ranges(index: CorpusIndex) -> None:
    """That no kernel can be led outside an array, whoever wrote the files."""
    ends = index.document_ends
    checks = {DOCUMENT_ENDS: len(ends) == 0 or ends[0] >= 0 and (np.diff(ends) >= 0).all()}
    checks |= _automaton_ranges(index) if index.automaton else _array_ranges(index)
    for name, holds in checks.items():
        if not holds:
            raise IndexFormatError(f"{index.path / name}: holds numbers outside the corpus or the structure")


def _automaton_ranges(index: CorpusIndex) -> dict[str, bool]:
    """Links lead to shorter contexts, so that following them ends."""
    states, edges = index.automaton
    tokens, n_states, highest = index.tokens, len(states) - 1, index.manifest["max_token"]
    links, lengths, first_ends = states[:-1, LINK], states[:-1, LENGTH], states[1:-1, FIRST_END]
    return {
        TOKENS: len(tokens) == 0 or tokens.min() >= 0 and tokens.max() == highest,
        STATES: links[0] == -1
        and (links[1:] >= 0).all()
        and (links < n_states).all()
        and lengths[0] == 0
        and (lengths[links[1:]] < lengths[1:]).all()
        and (np.diff(states[:, EDGE_START]) >= 0).all()
        and states[0, EDGE_START] == 0
        and ((first_ends >= 0) & (first_ends < len(tokens))).all(),
        EDGES: len(edges) == 0
        or 0 <= edges[:, EDGE_TOKEN].min() <= edges[:, EDGE_TOKEN].max() <= highest
        and 0 < edges[:, EDGE_TARGET].min() <= edges[:, EDGE_TARGET].max() < n_states,
    }


_VERIFIED_AT_ONCE = 1 << 20


def _array_ranges(index: CorpusIndex) -> dict[str, bool]:
    """A packed number cannot be negative. That no kernel leaves the text takes the bits where documents start."""
    array, n = index.array, len(index.tokens)
    highest, last_row, found = -1, -1, []
    for begin in range(0, n, _VERIFIED_AT_ONCE):
        end = min(n, begin + _VERIFIED_AT_ONCE)
        tokens, begins = entries_of(array, begin, end)
        highest = max(highest, int(tokens.max()))
        found.append(begin + np.flatnonzero(begins))
        last_row = max(last_row, int(positions(array, begin, end).max()))
    found = np.concatenate([*found, n + np.flatnonzero(entries_of(array, n, n + 1)[1])])
    wanted, bounds = np.concatenate([starts(index.document_ends), [n]]), bucket_bounds(array)
    return {
        TEXT: highest == index.manifest["max_token"] and np.array_equal(found, wanted),
        SUFFIXES: last_row < n,
        KEYS: highest_key(array) <= highest,
        BUCKETS: (np.diff(bounds) >= 0).all() and bounds[-1] == -(-n // KEY_STRIDE),
        **_context_ranges(array, n, highest),
    }


def _context_ranges(array: SuffixArray, n: int, highest: int) -> dict[str, bool]:
    """Links lead to shorter contexts, so that following them ends, and edges to contexts that are one token longer."""
    fc = frequent_contexts
    contexts, edges = array.contexts[:-1], array.context_edges
    lengths, begins = contexts[:, fc.LENGTH], array.contexts[:, fc.EDGE_START]
    targets = edges[:, EDGE_TARGET]
    fit = (
        lengths.min() == lengths[0] == 0
        and lengths.max() <= fc.DEPTH
        and contexts[:, [fc.LINK, fc.SHORTER, fc.LOW, fc.COUNT, fc.DISTINCT]].min() >= 0
        and contexts[:, [fc.LINK, fc.SHORTER]].max() < len(contexts)
        and (contexts[:, fc.LOW].astype(np.int64) + contexts[:, fc.COUNT]).max() <= n
        and begins[0] == 0
        and (np.diff(begins) >= np.minimum(contexts[:, fc.DISTINCT], HEAD)).all()
    )
    lead = fit and (
        len(edges) == 0
        or 0 <= edges[:, EDGE_TOKEN].min() <= edges[:, EDGE_TOKEN].max() <= highest
        and 0 <= targets.min() <= targets.max() < len(contexts)
    )
    if fit:
        for column in (fc.LINK, fc.SHORTER):
            fit &= bool((lengths[contexts[1:, column]] < lengths[1:]).all())
    if lead:
        longer = np.repeat(lengths, np.diff(begins)) + 1
        lead = bool((lengths[targets] == np.where(targets > 0, longer, 0)).all())
    return {CONTEXTS: fit, CONTEXT_EDGES: lead}
