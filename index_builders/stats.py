"""What indexes know of text that is like them: are they worth serving?

A sample of their documents is read as if each were held out: a match of n tokens counts only if these n tokens stand in
another document as well. For every length there are two numbers: at how many of the positions the last n tokens occur
elsewhere, and at how many of these the next token, too, follows them elsewhere, which is what a draft needs. Text
that is given instead (not from an index) is measured as it is. Several indexes are asked as a drafter asks them, as if
they were one.

Cost: one walk over the sample per length and index, and a small automaton of each sampled document to take its own occurrences
out of the counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numba
import numpy as np

from redraft.retrieval.frozen_automaton import COUNT, FrozenAutomaton, freeze, frozen_advance
from redraft.retrieval.index_directory import CorpusIndex
from redraft.retrieval.suffix_array import array_search
from redraft.retrieval.suffix_automaton import SuffixAutomaton

__all__ = ["MATCH_LENGTHS", "held_out_matches", "matches_of_texts"]

MATCH_LENGTHS = (2, 4, 8, 16)


def held_out_matches(indexes: Sequence[CorpusIndex], sample_tokens: int = 200_000, seed: int = 0) -> dict:
    """Measure documents of `indexes`, drawn with `seed` until there are `sample_tokens`, against all their others.

    Returns {"documents", "positions", "matched": {n: share of positions}, "continued": {n: share of the matched}}.
    """
    return _shares(indexes, _sample(indexes, sample_tokens, seed), leave_out=True)


def matches_of_texts(indexes: Sequence[CorpusIndex], documents: Iterable[np.ndarray]) -> dict:
    """The same for int32 token arrays that are not in an index."""
    return _shares(indexes, documents, leave_out=False)


def _sample(indexes: Sequence[CorpusIndex], sample_tokens: int, seed: int) -> Iterator[np.ndarray]:
    first = np.cumsum([0, *(len(index.document_ends) for index in indexes)])  # document of each, and one past the last
    drawn = 0
    for number in np.random.default_rng(seed).permutation(int(first[-1])):
        if drawn >= sample_tokens:
            return
        part = int(np.searchsorted(first, number, side="right")) - 1
        index, number = indexes[part], int(number - first[part])
        ends = index.document_ends
        document = index.tokens[int(ends[number - 1]) if number else 0 : int(ends[number])]
        drawn += len(document)
        yield document


def _shares(indexes: Sequence[CorpusIndex], documents: Iterable[np.ndarray], leave_out: bool) -> dict:
    n_documents, positions = 0, 0
    matched = dict.fromkeys(MATCH_LENGTHS, 0)
    continued = dict.fromkeys(MATCH_LENGTHS, 0)
    for document in documents:
        document = np.asarray(document)
        own = _automaton_of(document if leave_out else document[:0])
        n_documents += 1
        positions += max(0, len(document) - 1)  # after every token but the last one comes a next one
        for length in MATCH_LENGTHS:
            here = _occurs_elsewhere(indexes, own, document, length)[:-1]
            longer = _occurs_elsewhere(indexes, own, document, length + 1)[1:]
            matched[length] += int(here.sum())
            continued[length] += int((here & longer).sum())
    return {
        "documents": n_documents,
        "positions": positions,
        "matched": {length: matched[length] / max(1, positions) for length in MATCH_LENGTHS},
        "continued": {length: continued[length] / max(1, matched[length]) for length in MATCH_LENGTHS},
    }


def _automaton_of(document: np.ndarray) -> FrozenAutomaton:
    automaton = SuffixAutomaton(capacity_hint=len(document))
    automaton.append(document)
    return freeze(automaton)


def _occurs_elsewhere(
    indexes: Sequence[CorpusIndex], own: FrozenAutomaton, document: np.ndarray, length: int
) -> np.ndarray:
    """bool[n]: whether the `length` tokens that end at each position occur more often in `indexes` than in `own`."""
    everywhere, here = np.zeros(len(document), np.int64), np.zeros(len(document), np.int64)
    for index in indexes:
        if index.automaton is not None:
            _count_in_automaton(index.automaton, document, length, everywhere)
        else:
            _count_in_array(index.array, document, length, np.empty(length, np.int32), everywhere)
    _count_in_automaton(own, document, length, here)
    return everywhere > here


# The kernels are not kept on disk: nothing would tell the copies there when the functions they call change.


@numba.njit(nogil=True)
def _count_in_automaton(automaton, document, length, counts):
    state, matched = np.int64(0), np.int64(0)
    for i in range(document.shape[0]):
        state, matched = frozen_advance(automaton, state, matched, document[i], length)
        if matched == length:
            counts[i] += automaton.states[state, COUNT]


@numba.njit(nogil=True)
def _count_in_array(array, document, length, window, counts):
    for i in range(length - 1, document.shape[0]):
        for back in range(length):
            window[back] = document[i - back]
        low, high = array_search(array, window, length)
        counts[i] += high - low
