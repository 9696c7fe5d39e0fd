"""What an index knows of text that is like it: is it worth serving?

A sample of its documents is read as if each were held out: a match of n tokens counts only if these n tokens stand in
another document as well. For every length there are two numbers: at how many of the positions the last n tokens occur
elsewhere, and at how many of these the next token, too, follows them elsewhere, which is what a draft needs. Text
that is given instead (not from the index) is measured as it is.

Cost: one walk over the sample per length, and a small automaton of each sampled document to take its own occurrences
out of the counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numba
import numpy as np

from redraft.retrieval.frozen_automaton import COUNT, FrozenAutomaton, freeze, frozen_advance
from redraft.retrieval.index_directory import CorpusIndex
from redraft.retrieval.suffix_automaton import SuffixAutomaton

__all__ = ["MATCH_LENGTHS", "held_out_matches", "matches_of_texts"]

MATCH_LENGTHS = (2, 4, 8, 16)


def held_out_matches(index: CorpusIndex, sample_tokens: int = 200_000, seed: int = 0) -> dict:
    """Measure documents of `index`, drawn with `seed` until there are `sample_tokens`, against all its other documents.

    Returns {"documents", "positions", "matched": {n: share of positions}, "continued": {n: share of the matched}}.
    """
    return _shares(index, _sample(index, sample_tokens, seed), leave_out=True)


def matches_of_texts(index: CorpusIndex, documents: Iterable[np.ndarray]) -> dict:
    """The same for int32 token arrays that are not in the index."""
    return _shares(index, documents, leave_out=False)


def _sample(index: CorpusIndex, sample_tokens: int, seed: int) -> Iterator[np.ndarray]:
    ends = index.document_ends
    drawn = 0
    for number in np.random.default_rng(seed).permutation(len(ends)):
        if drawn >= sample_tokens:
            return
        document = index.tokens[int(ends[number - 1]) if number else 0 : int(ends[number])]
        drawn += len(document)
        yield document


def _shares(index: CorpusIndex, documents: Iterable[np.ndarray], leave_out: bool) -> dict:
    n_documents, positions = 0, 0
    matched = dict.fromkeys(MATCH_LENGTHS, 0)
    continued = dict.fromkeys(MATCH_LENGTHS, 0)
    for document in documents:
        own = _automaton_of(document if leave_out else document[:0])
        n_documents += 1
        positions += max(0, len(document) - 1)  # after every token but the last one comes a next one
        for length in MATCH_LENGTHS:
            here = _occurs_elsewhere(index.automaton, own, document, length)[:-1]
            longer = _occurs_elsewhere(index.automaton, own, document, length + 1)[1:]
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
    automaton: FrozenAutomaton, own: FrozenAutomaton, document: np.ndarray, length: int
) -> np.ndarray:
    """bool[n]: whether the `length` tokens that end at each position occur more often in `automaton` than in `own`."""
    found = np.zeros(len(document), np.bool_)
    _mark(automaton, own, np.asarray(document), length, found)
    return found


@numba.njit(nogil=True)  # not kept on disk: nothing would tell that copy when frozen_advance changes
def _mark(automaton, own, document, length, found):
    state, matched, own_state, own_matched = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for i in range(document.shape[0]):
        state, matched = frozen_advance(automaton, state, matched, document[i], length)
        own_state, own_matched = frozen_advance(own, own_state, own_matched, document[i], length)
        if matched == length:
            own_count = own.states[own_state, COUNT] if own_matched == length else 0
            found[i] = automaton.states[state, COUNT] > own_count
