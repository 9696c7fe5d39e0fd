"""All that a draft may look at, and where each source stands in it.

Sessions, namespaces and drafters own their arrays; each describes its own once, as a `Bundle`. `knowledge_at` and its
neighbours turn bundles back into the tuples that the kernels work with, inside the kernel and at no cost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from redraft.retrieval import bundle, frequent_contexts, suffix_array_levels
from redraft.retrieval import evidence as ev
from redraft.retrieval import prefix_trie as pt
from redraft.retrieval.bundle import Bundle
from redraft.retrieval.edge_rows import EDGE_COLUMNS
from redraft.retrieval.frozen_automaton import STATE_COLUMNS, FrozenAutomaton
from redraft.retrieval.kernel import inner
from redraft.retrieval.model import CELL_COLUMNS, Model
from redraft.retrieval.neighbours import LENGTH, Neighbours
from redraft.retrieval.suffix_array import SuffixArray
from redraft.retrieval.suffix_array_cursor import EXACT_ROWS
from redraft.retrieval.token_recycling import COLUMNS, WIDTH, RecyclingTable

__all__ = [
    "AUTOMATON", "SUFFIX_ARRAY", "Knowledge", "Places", "array_at", "automaton_at", "corpora_bundle", "knowledge_at",
    "namespace_bundle", "new_places", "places_at", "session_bundle",
]  # fmt: skip

AUTOMATON, SUFFIX_ARRAY = 0, 1  # kinds of corpus index
ENTRIES = 7  # of the corpora's bundle, per index
# columns per index: state, -, length of an automaton; levels of a suffix array, each low, high, length, frequent
CURSOR = suffix_array_levels.CURSOR * suffix_array_levels.LEVELS
PATH = 3 * pt.MAX_CONTEXT + EXACT_ROWS  # int32 buffer for look-ups: of three tries; of an index, its successors and what its rows say

_trie_nodes, _trie_successors = bundle.int32_rows(5), bundle.int32_rows(3)
_recycled_rows = bundle.int32_rows(COLUMNS)
_rows_of_ids, _rows_of_probs = bundle.int32_rows(WIDTH), bundle.float32_rows(WIDTH)
_cells, _weights = bundle.float32_rows(CELL_COLUMNS), bundle.float32_rows(ev.N_SLOTS + 1)
_states, _edges = bundle.int32_rows(STATE_COLUMNS), bundle.int32_rows(EDGE_COLUMNS)
_windows, _cursors = bundle.int32_rows(pt.MAX_CONTEXT), bundle.int64_rows(CURSOR * ev.MAX_CORPORA)
_contexts, _context_edges = bundle.int32_rows(frequent_contexts.CONTEXT_COLUMNS), bundle.int32_rows(EDGE_COLUMNS)
_pointers = bundle.int64_rows(6)
_continuations = bundle.int32_rows(LENGTH)


class Knowledge(NamedTuple):
    """session, memory, prompts: PrefixTrie (the session's text, earlier outputs, earlier prompts); frequent: int32[16], -1 = end; recycled, recycled_base: RecyclingTable of the
    session and of the namespace; successor_ids: int32[V, 8], successor_probs: float32[V, 8] (V = 0: no table);
    neighbours: of the target's state; model: Model; corpora: the drafter's addresses; kinds: int64[number of corpora]."""

    session: pt.PrefixTrie
    memory: pt.PrefixTrie
    prompts: pt.PrefixTrie
    frequent: np.ndarray
    recycled: RecyclingTable
    recycled_base: RecyclingTable
    successor_ids: np.ndarray
    successor_probs: np.ndarray
    neighbours: Neighbours
    model: Model
    corpora: np.ndarray
    kinds: np.ndarray


class Places(NamedTuple):
    """Where each source stands at each place; place 0 is the committed text, place i + 1 node i of the tree.

    windows: int32[n, 8]  last tokens, newest first; filled: int32[n]  how many are valid;
    pointers: int64[n, 6]  copy pointers of session and memory; cursors: int64[n, 96]  in each corpus index;
    proposed: int32[n]  node of the caller's draft (-1 its root, -2 none);
    following: int32[n]  neighbours of the target's state that agree so far, as bits; now: int64[n]  tokens so far;
    path: int32[80]  buffer for look-ups.
    """

    windows: np.ndarray
    filled: np.ndarray
    pointers: np.ndarray
    cursors: np.ndarray
    proposed: np.ndarray
    following: np.ndarray
    now: np.ndarray
    path: np.ndarray


def new_places(n: int) -> Places:
    """Room for `n` places; place 0 stands at the beginning of an empty text."""
    places = Places(
        np.full((n, pt.MAX_CONTEXT), -1, np.int32),
        np.zeros(n, np.int32),
        np.zeros((n, 6), np.int64),
        np.zeros((n, CURSOR * ev.MAX_CORPORA), np.int64),
        np.full(n, -2, np.int32),
        np.zeros(n, np.int32),
        np.zeros(n, np.int64),
        np.zeros(PATH, np.int32),
    )
    places.pointers[0, [0, 3]] = -1
    return places


def session_bundle(
    trie: pt.PrefixTrie, recycled: RecyclingTable, state: Places, neighbours: Neighbours, like: Bundle | None
) -> Bundle:
    return Bundle([*trie, *recycled, *state, *neighbours], like)


def namespace_bundle(
    trie: pt.PrefixTrie, frequent: np.ndarray, recycled: RecyclingTable, model: Model, prompts: pt.PrefixTrie,
    like: Bundle | None,
) -> Bundle:  # fmt: skip
    return Bundle([*trie, frequent, *recycled, *model, *prompts], like)


def corpora_bundle(successor_ids: np.ndarray, successor_probs: np.ndarray, indexes) -> Bundle:
    """`indexes`: FrozenAutomaton and SuffixArray tuples; `ENTRIES` of the bundle each."""
    kinds, arrays = [], []
    for index in indexes:
        kinds.append(AUTOMATON if isinstance(index, FrozenAutomaton) else SUFFIX_ARRAY)
        arrays += [*index, *([np.empty(0, np.int32)] * (ENTRIES - len(index)))]
    return Bundle([successor_ids, successor_probs, np.array(kinds, np.int64), *arrays])


@inner
def trie_at(addresses, i):
    return pt.PrefixTrie(
        bundle.int32s(addresses, i),
        bundle.int32s(addresses, i + 1),
        bundle.int32s(addresses, i + 2),
        _trie_nodes(addresses, i + 3),
        _trie_successors(addresses, i + 4),
        bundle.int32s(addresses, i + 5),
        bundle.int64s(addresses, i + 6),
    )


@inner
def recycling_at(addresses, i):
    return RecyclingTable(
        bundle.int32s(addresses, i),
        _recycled_rows(addresses, i + 1),
        bundle.int64s(addresses, i + 2),
    )


@inner
def places_at(addresses, i):
    return Places(
        _windows(addresses, i),
        bundle.int32s(addresses, i + 1),
        _pointers(addresses, i + 2),
        _cursors(addresses, i + 3),
        bundle.int32s(addresses, i + 4),
        bundle.int32s(addresses, i + 5),
        bundle.int64s(addresses, i + 6),
        bundle.int32s(addresses, i + 7),
    )


@inner
def neighbours_at(addresses, i):
    return Neighbours(
        _continuations(addresses, i),
        bundle.float32s(addresses, i + 1),
        bundle.float32s(addresses, i + 2),
        bundle.int64s(addresses, i + 3),
    )


@inner
def state_at(session):
    """The session's own place."""
    return places_at(session, 10)


@inner
def knowledge_at(session, namespace, drafter):
    """Knowledge from the addresses of the three owners' bundles."""
    return Knowledge(
        trie_at(session, 0),
        trie_at(namespace, 0),
        trie_at(namespace, 13),
        bundle.int32s(namespace, 7),
        recycling_at(session, 7),
        recycling_at(namespace, 8),
        _rows_of_ids(drafter, 0),
        _rows_of_probs(drafter, 1),
        neighbours_at(session, 18),
        Model(_cells(namespace, 11), _weights(namespace, 12)),
        drafter,
        bundle.int64s(drafter, 2),
    )


@inner
def automaton_at(addresses, index):
    """The frozen automaton of corpus `index`."""
    return FrozenAutomaton(_states(addresses, 3 + ENTRIES * index), _edges(addresses, 4 + ENTRIES * index))


@inner
def array_at(addresses, index):
    """The suffix array of corpus `index`."""
    return SuffixArray(
        bundle.uint32s(addresses, 3 + ENTRIES * index),
        bundle.uint32s(addresses, 4 + ENTRIES * index),
        bundle.uint32s(addresses, 5 + ENTRIES * index),
        bundle.uint32s(addresses, 6 + ENTRIES * index),
        _contexts(addresses, 7 + ENTRIES * index),
        _context_edges(addresses, 8 + ENTRIES * index),
        bundle.int64s(addresses, 9 + ENTRIES * index),
    )
