"""Evidence from contexts that occurred before: the session's own text and the namespace's memory.

The longest matching context speaks first, then shorter ones that occurred more often (PPM's escape levels; two are
enough). Of each, the successors most recently seen are candidates. What they get is not an escape formula but a cell
by match length, count, count of the rest, and recency, whose hit rate is learned; where the context names other tokens
only, that too is evidence ("absent"). Cost: a look-up and two short lists per place.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval import evidence as ev
from redraft.retrieval import prefix_trie as pt
from redraft.retrieval.context_table import child_key, find_below, prefetch_node, prefetch_slot, root_key
from redraft.retrieval.kernel import inner
from redraft.retrieval.prefetch import prefetch

MAX_LEVELS = 2
MAX_SKIPS = 6
MAX_SUCCESSORS = 16  # read per context, and no more than half of the candidates that are wanted


@inner(inline=False)
def add_contexts(
    ballot, cells, session, trie, path, stored, length, now, first_slot, next_slot, first_cells, next_cells, named_by
):  # fmt: skip
    """Add the successors of the matched contexts; returns (total, distinct, cell of the successor last seen) of the
    longest, zeros if none matched.

    `path`, `stored`, `length` as `prefix_trie.look_up` gives them; `now` is the position of the next token where
    positions are times, as in a session's own text, else a large number.
    """
    nodes, successors = trie.nodes, trie.successors
    most = min(MAX_SUCCESSORS, ballot.header[ev.MOST] // 2)
    longest_total, longest_distinct, latest = 0, 0, np.int64(0)
    level, last_total = 0, 0
    for depth in range(stored, 0, -1):
        node = path[depth - 1]
        total = nodes[node, pt.TOTAL]
        if level and total <= last_total:
            continue
        match = length if depth == stored else depth
        distance = now - np.int64(nodes[node, pt.LAST])
        entry = nodes[node, pt.FIRST]
        rank = 0
        while rank < most:
            if entry == pt.LEAF:
                token, count = trie.text[nodes[node, pt.LAST]], 1
            elif entry >= 0:
                token, count = successors[entry, pt.SUCCESSOR], successors[entry, pt.COUNT]
            else:
                break
            prefetch_slot(session, child_key(root_key(pt.ROOT), token))  # which `add_ages` will look at
            row = ev.candidate(ballot, token)
            first = ev.first_cell(first_cells, level, match, count, total, ev.recency(rank, distance))
            latest = first if level + rank == 0 else latest
            prefetch(cells, first)
            if level:
                after = ev.next_cell(next_cells, match, count, total)
                prefetch(cells, after)
                put_by_level(ballot, row, first_slot, first, next_slot, after)
            else:
                ev.put_if_free(ballot, row, first_slot, first)
            ballot.named_by[row] |= named_by
            rank += 1
            entry = successors[entry, pt.NEXT] if entry >= 0 else -1
        if level == 0:
            longest_total, longest_distinct = total, rank
        last_total = total
        level += 1
        if level == MAX_LEVELS:
            break
    return longest_total, longest_distinct, latest


@inner(inline=False)
def put_by_level(ballot, row, first_slot, first_cell, next_slot, next_cell):
    """Describe a candidate by its cell as one of the longest context that names it, or else as one of the next."""
    named = ballot.cells[first_slot, row] != 0
    ev.put_if_free(ballot, row, next_slot if named else first_slot, next_cell if named else first_cell)


@inner(inline=False)
def mark_absent(ballot, first_slot, cell):
    """Every candidate that this source did not name gets `cell`."""
    for row in range(ballot.header[ev.N_CANDIDATES]):
        there = ballot.cells[first_slot, row]
        ballot.cells[first_slot, row] = cell if there == 0 else there
    ballot.header[ev.PRESENT] |= 1 << first_slot


@inner
def foresee_contexts(trie, path, stored):
    """Have the second successors fetched of the two longest contexts; the first ones a look-up has asked for."""
    for depth in range(max(stored - 2, 0), stored):
        entry = trie.nodes[path[depth], pt.FIRST]
        prefetch(trie.successors, trie.successors[max(entry, 0), pt.NEXT])


@inner
def foresee_skips(trie, before_last):
    """Have the first successor fetched that `add_skips` will look at."""
    node = find_below(trie, pt.SKIP_ROOT, before_last)
    prefetch(trie.successors, trie.nodes[max(node, 0), pt.FIRST])


@inner(inline=False)
def add_skips(ballot, trie, before_last, slot, base):
    """Candidates that once followed two places after the token before the last, whatever stood between."""
    node = find_below(trie, pt.SKIP_ROOT, before_last)
    if node < 0:
        return
    most = min(MAX_SKIPS, ballot.header[ev.MOST])
    total = trie.nodes[node, pt.TOTAL]
    totals = min(total - 1 if total <= 2 else ev.rest_bucket(total) - 1, 5)
    entry = trie.nodes[node, pt.FIRST]
    rank = 0
    while rank < most:
        if entry == pt.LEAF:
            token, count = trie.text[trie.nodes[node, pt.LAST]], 1
        elif entry >= 0:
            token, count = trie.successors[entry, pt.SUCCESSOR], trie.successors[entry, pt.COUNT]
        else:
            break
        row = ev.candidate(ballot, token)
        counts = np.int64(count > 1) + np.int64(count > 2) + np.int64(count > 5)
        ev.put(ballot, row, slot, base + (rank * 4 + counts) * 6 + totals)
        ballot.named_by[row] |= ev.BY_SKIP
        rank += 1
        entry = trie.successors[entry, pt.NEXT] if entry >= 0 else -1


@inner(inline=False)
def add_frequent(ballot, frequent):
    """The memory's most frequent tokens are candidates everywhere."""
    for rank in range(len(frequent)):
        if frequent[rank] < 0:
            break
        ev.put(ballot, ev.candidate(ballot, frequent[rank]), ev.FREQUENT, ev.FREQUENT_CELLS + rank)


@inner(inline=False)
def foresee_ages(ballot, trie):
    """Have the memory fetched that `add_ages` will look at for the candidates found so far."""
    for row in range(ballot.header[ev.N_CANDIDATES]):
        prefetch_node(trie, child_key(root_key(pt.ROOT), ballot.tokens[row]))


@inner(inline=False)
def add_ages(ballot, trie, now, last, before_last):
    """How long ago this session last used each candidate, and whether it repeats one of the last two tokens."""
    used, stamp, n = ballot.used, ballot.header[ev.USED_STAMP], ballot.header[ev.N_CANDIDATES]
    last_use, new, n_new = ballot.rows[0], ballot.rows[1], 0
    for row in range(n):
        token = np.int64(ballot.tokens[row])
        at = _used_at(token)
        last_use[row] = used[at, 2]
        new[n_new] = row
        n_new += np.int64((used[at, 0] != stamp) | (used[at, 1] != token))
    # In passes over all that are new to this draft, for then the misses of one pass are waited for together.
    for i in range(n_new):
        prefetch_slot(trie, child_key(root_key(pt.ROOT), ballot.tokens[new[i]]))
    for i in range(n_new):
        prefetch_node(trie, child_key(root_key(pt.ROOT), ballot.tokens[new[i]]))
    for i in range(n_new):
        token = np.int64(ballot.tokens[new[i]])
        node = find_below(trie, pt.ROOT, token)
        at = _used_at(token)
        used[at, 0], used[at, 1] = stamp, token
        used[at, 2] = trie.nodes[node, pt.LAST] if node >= 0 else -1
        last_use[new[i]] = used[at, 2]
    for row in range(n):
        token = np.int64(ballot.tokens[row])
        distance = np.float64(max(now - (last_use[row] - 1), 1))
        logarithm = (distance.view(np.int64) >> 52) - 1022  # a float's exponent
        age = min(logarithm, 15) if last_use[row] >= 0 else 0
        repeats = (2 if token == last else 0) + (1 if token == before_last else 0)
        ballot.cells[ev.AGE, row] = ev.AGE_CELLS + age * 4 + repeats
    ballot.header[ev.PRESENT] |= 1 << ev.AGE


@inner
def _used_at(token):
    return (token * 0x9E3779B1 >> 13) & (ev.N_USED - 1)
