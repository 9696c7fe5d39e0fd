"""The layout of evidence: what a source can say about a candidate token, and where that is learned.

A candidate is judged by *cells*. A cell is one situation ("the session's longest match has 3 tokens, this successor
was seen twice, others never, it is the most recent one") and holds how often a candidate in that situation was right.
Every source owns one or two *slots*, and puts into a candidate's slot the number of the cell that describes it. What a
source adds is thus one integer per candidate; `blend.py` does the arithmetic, the same for all.

This file lists the slots and lays the cells of all sources out in one table. To add a source: give it a slot here, a
file in `sources/`, and a line in `blend.gather`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from redraft.retrieval.draft_tree import Source
from redraft.retrieval.kernel import inner

MAX_CANDIDATES = 48  # per place in the tree, where corpora are asked
FEWER_CANDIDATES = 24  # elsewhere: more would cost time and add nothing
MIN_BREADTH, FEWER_BREADTH = 8, 4  # in the same two cases so many at least, however few could come into the tree;
BREADTH = 0.2  # for each that could, this times as many
LEAST_LEFT = 1e-3  # however sure a candidate is
NOWHERE = MAX_CANDIDATES  # the row of candidates for which there is no room: written to, never read
N_LOOKUP = 256  # entries of Ballot.lookup, of which few may collide
N_USED = 256  # entries of Ballot.used
MAX_CORPORA = 8  # indexes asked at once

# --- slots -----------------------------------------------------------------------------------------------------------
(
    SESSION_FIRST,  # longest context of this session that names the candidate
    SESSION_NEXT,  # the next shorter one with more occurrences
    MEMORY_FIRST,
    MEMORY_NEXT,
    CORPUS_FIRST,
    CORPUS_NEXT,
    SESSION_POINTER,
    MEMORY_POINTER,
    SESSION_SKIP,
    MEMORY_SKIP,
    FREQUENT,
    RECYCLED_PAIR,  # Token Recycling, by the last two tokens
    RECYCLED,  # by the last token
    SUCCESSOR_TABLE,  # the model's own static table
    CALLER,
    DENSE,  # neighbours of the target's state in a dense index or the namespace's dense memory
    RERANK,  # in the session's own text: which of several matches is like this moment
    AGE,  # this and the following name no candidates
    TRACK_RECORD,  # how often this very token was right where it was a candidate
    TRACK_RECORD_PAIR,  # the same after the last token
    N_SLOTS,
) = range(21)

# Which kind of evidence names a candidate: chooses the weights it is judged by.
BY_SESSION, BY_MEMORY, BY_CORPUS, BY_POINTER, BY_SKIP, BY_RECYCLING, BY_CALLER, BY_DENSE = (
    1 << i for i in range(8)
)
N_SETS = 1 << 8
N_SITUATIONS = 6 * 6 * 3 + 1  # lengths of the longest matches in session, memory and corpora; in a copy that is sure
N_TOKEN_ROWS = 1024  # rows of weights by the last token, and as many by the one before; tokens share them

# rows of the weights: all sets, then these
SITUATION_ROWS = N_SETS
LAST_ROWS = SITUATION_ROWS + N_SITUATIONS
IN_A_COPY = LAST_ROWS - 1  # the last situation: less evidence is present there, so it needs weights of its own
BEFORE_LAST_ROWS = LAST_ROWS + N_TOKEN_ROWS
N_ROWS = BEFORE_LAST_ROWS + N_TOKEN_ROWS

# slot that can name a candidate -> Source id reported for a node
SLOT_SOURCE = np.array(
    [
        Source.SESSION, Source.SESSION, Source.MEMORY, Source.MEMORY, Source.CORPUS, Source.CORPUS,
        Source.POINTER, Source.POINTER, Source.SKIP, Source.SKIP, Source.FREQUENT,
        Source.RECYCLING, Source.RECYCLING, Source.RECYCLING, Source.CALLER,
        Source.DENSE, Source.RERANK,
    ],
    np.uint8,
)  # fmt: skip

# --- cells -----------------------------------------------------------------------------------------------------------
N_ORDERS, N_LENGTHS, N_COUNTS, N_RESTS = 3, 10, 5, 7
# Where a successor stands in its context's list, most recent first; of the first, how long ago that was.
LATEST_OLD, LATEST, LATEST_RECENT, SECOND, EARLIER, N_RECENCIES = range(6)
_FIRST_CELLS = N_ORDERS * N_LENGTHS * N_COUNTS * N_RESTS * N_RECENCIES
_NEXT_CELLS = N_LENGTHS * 6 * 8
_ABSENT_CELLS = N_LENGTHS * 6 * 5
_POINTER_CELLS = 8 * 16 * 2
_SKIP_CELLS = 6 * 4 * 6
_FREQUENT_CELLS = 16
_AGE_CELLS = 16 * 2 * 2
_RECYCLED_CELLS = 8 * 8
_CALLER_CELLS = 8 * 8 * 2
N_SIMILARITIES, N_SHARES, N_DEPTHS, N_CONFIDENCES = 7, 5, 4, 3
_DENSE_CELLS = N_SIMILARITIES * N_SHARES * N_DEPTHS * N_CONFIDENCES
_DENSE_ABSENT_CELLS = N_SIMILARITIES * N_DEPTHS
TRACK_RECORD_BITS, TRACK_RECORD_PAIR_BITS = 13, 15

_sizes = [1]  # cell 0 is "no evidence": it weighs nothing and learns nothing


def _cells(size: int) -> int:
    """Reserve `size` cells; returns the number of the first."""
    _sizes.append(size)
    return sum(_sizes[:-1])


SESSION_FIRST_CELLS, MEMORY_FIRST_CELLS, CORPUS_FIRST_CELLS = (_cells(_FIRST_CELLS) for _ in range(3))
SESSION_NEXT_CELLS, MEMORY_NEXT_CELLS, CORPUS_NEXT_CELLS = (_cells(_NEXT_CELLS) for _ in range(3))
SESSION_ABSENT_CELLS, MEMORY_ABSENT_CELLS, CORPUS_ABSENT_CELLS = (_cells(_ABSENT_CELLS) for _ in range(3))
DENSE_ABSENT_CELLS, RERANK_ABSENT_CELLS = (_cells(_DENSE_ABSENT_CELLS) for _ in range(2))
SESSION_POINTER_CELLS, MEMORY_POINTER_CELLS = (_cells(_POINTER_CELLS) for _ in range(2))
SESSION_SKIP_CELLS, MEMORY_SKIP_CELLS = (_cells(_SKIP_CELLS) for _ in range(2))
FREQUENT_CELLS = _cells(_FREQUENT_CELLS)
AGE_CELLS = _cells(_AGE_CELLS)
RECYCLED_PAIR_CELLS, RECYCLED_CELLS, SUCCESSOR_TABLE_CELLS = (_cells(_RECYCLED_CELLS) for _ in range(3))
CALLER_CELLS = _cells(_CALLER_CELLS)
DENSE_CELLS, RERANK_CELLS = (_cells(_DENSE_CELLS) for _ in range(2))
TRACK_RECORD_CELLS = _cells(1 << TRACK_RECORD_BITS)
TRACK_RECORD_PAIR_CELLS = _cells(1 << TRACK_RECORD_PAIR_BITS)
N_CELLS = sum(_sizes)


# entries of Ballot.header
N_CANDIDATES, STAMP, SITUATION, MOST, USED_STAMP, PRESENT, LAST_ROW, BEFORE_LAST_ROW, N_PRESENT, LEAST = range(10)


class Ballot(NamedTuple):
    """The candidates for one place and the evidence for each.

    tokens: int32[49]; named_by: uint32[49]  BY_* bits; cells: uint32[N_SLOTS, 49]  cell per slot and candidate, 0 = none;
    scores: float64[49]  filled by `blend.score`; lookup: int64[256]  open addressing, stamp << 8 | candidate;
    used: int64[256, 3]  stamp, token and where this session last used it: a draft meets the same tokens at many places;
    rows: int64[2, 49]  buffer of `contexts.add_ages`; slots: int64[N_SLOTS]  those in which some candidate has a cell;
    header: int64[10]  N_CANDIDATES at this place, its STAMP, row of the SITUATION's weights, MOST candidates wanted, stamp of
    `used`, PRESENT: a bit per slot in which some candidate has a cell, the rows of weights of the last two tokens, how many `slots` there are, and the LEAST that MOST may become.
    """

    tokens: np.ndarray
    named_by: np.ndarray
    cells: np.ndarray
    scores: np.ndarray
    lookup: np.ndarray
    header: np.ndarray
    used: np.ndarray
    rows: np.ndarray
    slots: np.ndarray


def new_ballot() -> Ballot:
    return Ballot(
        np.zeros(NOWHERE + 1, np.int32),
        np.zeros(NOWHERE + 1, np.uint32),
        np.zeros((N_SLOTS, NOWHERE + 1), np.uint32),
        np.zeros(NOWHERE + 1, np.float64),
        np.zeros(N_LOOKUP, np.int64),
        np.array([0, 0, SITUATION_ROWS, MAX_CANDIDATES, 0, 0, LAST_ROWS, BEFORE_LAST_ROWS, 0, MIN_BREADTH], np.int64),
        np.zeros((N_USED, 3), np.int64),
        np.zeros((2, NOWHERE + 1), np.int64),
        np.zeros(N_SLOTS, np.int64),
    )


@inner(inline=False)
def clear(ballot, most, least):
    """Begin another place, which is to have at most `most` candidates, and to be bounded to `least` at the worst."""
    header = ballot.header
    for slot in range(N_SLOTS):
        if header[PRESENT] >> slot & 1:
            ballot.cells[slot, : header[N_CANDIDATES]] = 0
    header[N_CANDIDATES] = 0
    header[STAMP] += 1
    header[MOST] = most
    header[LEAST] = least
    header[PRESENT] = 0


@inner(inline=False)
def narrow(ballot, fitting, taken):
    """Want no more candidates here than could come into the tree, give or take a few.

    fitting: how often the least probability that a candidate must have goes into what all can have together; taken: the
    share of it that belongs to one that is there already.
    """
    least = ballot.header[LEAST]
    further = np.int64(BREADTH * least * fitting * max(1.0 - taken, LEAST_LEFT))
    ballot.header[MOST] = min(ballot.header[MOST], max(least, further + 1))


@inner(inline=False)
def candidate(ballot, token):
    """The row of `token`, added if it is new and there is room; `NOWHERE` if there is none.

    Half of the tokens named are candidates already, which no processor can guess: so nothing here, nor what callers do
    with the row, depends on a jump.
    """
    lookup, header, tokens, named_by = ballot.lookup, ballot.header, ballot.tokens, ballot.named_by
    stamp, n = header[STAMP] << 8, header[N_CANDIDATES]
    slot = (np.int64(token) * 0x9E3779B1 >> 16) & (N_LOOKUP - 1)
    entry = lookup[slot]
    while (entry >= stamp) & (tokens[entry & 255] != token):
        slot = (slot + 1) & (N_LOOKUP - 1)
        entry = lookup[slot]
    known = np.int64(entry >= stamp)
    added = (1 - known) & np.int64(n < header[MOST]) & np.int64(token >= 0)
    row = (entry & 255) * known + n * added + NOWHERE * (1 - known - added)
    header[N_CANDIDATES] = n + added
    lookup[slot] = (stamp | row) * added + entry * (1 - added)
    tokens[row] = token
    named_by[row] *= np.uint32(known)
    return row


@inner(inline=False)
def put(ballot, row, slot, cell):
    """Describe candidate `row` by `cell` in `slot`."""
    ballot.cells[slot, row] = cell
    ballot.header[PRESENT] |= 1 << slot


@inner(inline=False)
def put_if_free(ballot, row, slot, cell):
    """The same where the candidate has no cell in `slot`."""
    there = ballot.cells[slot, row]
    put(ballot, row, slot, cell if there == 0 else there)


# --- buckets ---------------------------------------------------------------------------------------------------------
# By table or by counting the edges that lie below: which bucket it is no processor can guess, so there must be no jump.
def _buckets(*edges: int) -> np.ndarray:
    """int64: the bucket of every number up to the last edge; `edges` are the first numbers of buckets 1, 2, ..."""
    return np.searchsorted(edges, np.arange(edges[-1] + 1), side="right")


_LENGTHS = _buckets(2, 3, 4, 5, 7, 10, 15, 23, 41)
_COUNTS = _buckets(2, 3, 5, 9)
_RESTS = _buckets(1, 2, 3, 6, 13, 41)
_TOTALS = _buckets(2, 3, 5, 9, 25)
_NEXT_COUNTS = _buckets(2, 3, 5, 10, 31)
_DISTINCT = _buckets(2, 3, 5, 11)
_RUNS = _buckets(1, 2, 3, 5, 9, 17, 41)


@inner(inline=False)
def length_bucket(length):
    """1, 2, 3, 4, 5-6, 7-9, 10-14, 15-22, 23-40, 41+."""
    return _LENGTHS[min(length, 41)]


@inner(inline=False)
def count_bucket(count):
    """1, 2, 3-4, 5-8, 9+."""
    return _COUNTS[min(count, 9)]


@inner(inline=False)
def rest_bucket(rest):
    """0, 1, 2, 3-5, 6-12, 13-40, 41+."""
    return _RESTS[min(rest, 41)]


@inner(inline=False)
def total_bucket(total):
    """1, 2, 3-4, 5-8, 9-24, 25+."""
    return _TOTALS[min(total, 25)]


@inner(inline=False)
def probability_bucket(p):
    """Edges .01, .03, .1, .25, .5, .8, .95."""
    low = np.int64(p >= 0.01) + np.int64(p >= 0.03) + np.int64(p >= 0.1) + np.int64(p >= 0.25)
    return low + np.int64(p >= 0.5) + np.int64(p >= 0.8) + np.int64(p >= 0.95)


@inner(inline=False)
def first_cell(base, order, length, count, total, recency):
    bucket = (order * N_LENGTHS + length_bucket(length)) * N_COUNTS + count_bucket(count)
    return base + (bucket * N_RESTS + rest_bucket(max(total - count, 0))) * N_RECENCIES + recency


@inner(inline=False)
def recency(rank, distance):
    """Of the successor at `rank` in its list; `distance` is how many tokens ago the first of the list was used."""
    latest = LATEST_RECENT - np.int64(distance > 80) - np.int64(distance > 1000)
    return min(SECOND + rank - 1, EARLIER) if rank else latest


@inner(inline=False)
def situation(session_length, memory_length, corpus_length):
    """Row of the weights for the lengths of the three matches."""
    row = 0 if corpus_length == 0 else 1 if corpus_length < 3 else 2
    for length in (session_length, memory_length):
        row = row * 6 + (min(length, 3) if length < 4 else 4 if length < 7 else 5)
    return SITUATION_ROWS + row


@inner(inline=False)
def token_row(rows, token):
    """Row of the weights for `token` (-1: none), of those that begin at `rows`."""
    return rows + (token & (N_TOKEN_ROWS - 1))


@inner(inline=False)
def next_cell(base, length, count, total):
    """Counts 1, 2, 3-4, 5-9, 10-30, 31+; the share of the total by `probability_bucket`, with .999 for its last edge."""
    share = count / max(total, count)
    shares = min(probability_bucket(share), 6) + np.int64(share >= 0.999)
    return base + (length_bucket(length) * 6 + _NEXT_COUNTS[min(count, 31)]) * 8 + shares


@inner(inline=False)
def absent_cell(base, length, total, distinct):
    """Of 0-1, 2, 3-4, 5-10, 11+ distinct successors."""
    return base + (length_bucket(length) * 6 + total_bucket(total)) * 5 + _DISTINCT[min(distinct, 11)]


@inner(inline=False)
def run_bucket(run):
    """0, 1, 2, 3-4, 5-8, 9-16, 17-40, 41+."""
    return _RUNS[min(run, 41)]


@inner(inline=False)
def similarity_bucket(similarity):
    """Edges .2, .35, .5, .65, .8, .9."""
    if similarity < 0.5:
        return 0 if similarity < 0.2 else (1 if similarity < 0.35 else 2)
    if similarity < 0.8:
        return 3 if similarity < 0.65 else 4
    return 5 if similarity < 0.9 else 6


@inner(inline=False)
def depth_bucket(depth):
    """Tokens followed since the search: 0, 1-2, 3-6, 7+."""
    if depth <= 2:
        return 0 if depth == 0 else 1
    return 2 if depth <= 6 else 3


@inner(inline=False)
def dense_cell(base, similarity, share, depth, confidence):
    shares = 0 if share < 0.15 else 1 if share < 0.35 else 2 if share < 0.65 else 3 if share < 0.95 else 4
    bucket = (similarity_bucket(similarity) * N_SHARES + shares) * N_DEPTHS + depth_bucket(depth)
    return base + bucket * N_CONFIDENCES + confidence


@inner(inline=False)
def dense_absent_cell(base, similarity, depth):
    return base + similarity_bucket(similarity) * N_DEPTHS + depth_bucket(depth)
