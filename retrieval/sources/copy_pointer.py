"""A position that is being copied, kept alive over edits.

A long match means that the text is being copied from one place. The pointer sits on that place and proposes the token
there, whatever the contexts say. When the target writes another token (a changed name, number or argument), the
pointer looks for that token a little further on and a little back, and goes on there; a substitution leaves it at the
next token. Its last eight hits and misses tell how far to trust it; four misses in eight lift it off. Where the pointer
in the session's own text can be trusted all but blindly, only that text is asked (`blend.gather`): in a long copy other
sources name the same token, and take most of the time.

Cost: a few comparisons per token. Without pointers contexts would have to be unboundedly long; with them 8 tokens do.
The idea is the LZ77-style match model of the PAQ compressors (Mahoney) with recovery, here per tree node.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval import evidence as ev
from redraft.retrieval import prefix_trie as pt
from redraft.retrieval.kernel import inner
from redraft.retrieval.model import RATE

SEAT_LENGTH = 4  # match length at which a pointer is seated
AHEAD, BACK = 8, 4  # how far it looks for its place after a miss
MAX_MISSES = 4  # in the last eight
SURE = 0.97  # hit rate of a pointer's cell from which on it is as good as sure; 0.9 costs 0.003 tokens a step of 3.23
LONG = 17  # hits in a row without which it is not: after a break other sources have time to find their place, too

# columns of a pointer's state
AT, RUN, HISTORY = range(3)  # position of the token it proposes (-1: lifted off), hits in a row, last 8 misses as bits
_MISSES = np.array([history.bit_count() for history in range(256)])


@inner(inline=False)
def step(trie, pointers, place, column, token):
    """Move the pointer in pointers[place, column : column + 3] over `token`."""
    at = np.int64(pointers[place, column + AT])
    if at < 0:
        return
    if at >= len(trie.text):  # the memory was forgotten, and a smaller one has begun
        pointers[place, column + AT] = -1
        return
    history = pointers[place, column + HISTORY]
    if trie.text[at] == token:
        pointers[place, column + AT] = pt.following(trie, at)
        pointers[place, column + RUN] += 1
        pointers[place, column + HISTORY] = (history << 1) & 255
        return
    history = (history << 1 | 1) & 255
    pointers[place, column + RUN] = 0
    pointers[place, column + HISTORY] = history
    if _MISSES[history] >= MAX_MISSES:
        pointers[place, column + AT] = -1
        return
    found, ahead, back = np.int64(-1), at, at
    for distance in range(1, AHEAD + 1):
        if ahead >= 0:
            ahead = pt.following(trie, ahead)
            if ahead >= 0 and trie.text[ahead] == token:
                found = ahead
                break
        if distance <= BACK and back >= 0:
            back = pt.preceding(trie, back)
            if back >= 0 and trie.text[back] == token:
                found = back
                break
    pointers[place, column + AT] = pt.following(trie, found if found >= 0 else at)


@inner(inline=False)
def seat(trie, pointers, place, column, path, stored, length):
    """Seat a lifted pointer at the latest occurrence of the matched context, if it is long enough."""
    if pointers[place, column + AT] >= 0 or length < SEAT_LENGTH:
        return
    pointers[place, column + AT] = trie.nodes[path[stored - 1], pt.LAST]
    pointers[place, column + RUN] = 0
    pointers[place, column + HISTORY] = 0


@inner
def _cell(pointers, place, column, base):
    """What a seated pointer is judged by: its run and its last eight hits and misses."""
    history = pointers[place, column + HISTORY]
    older = 1 if history >> 4 else 0
    return np.int64(base + (ev.run_bucket(pointers[place, column + RUN]) * 16 + (history & 15)) * 2 + older)


@inner
def is_sure(cells, pointers, place, column, base):
    """Whether the pointer is seated, has been right for long, and is hardly ever wrong in such a state."""
    long = pointers[place, column + AT] >= 0 and pointers[place, column + RUN] >= LONG
    return long and cells[_cell(pointers, place, column, base), RATE] >= SURE


@inner(inline=False)
def add_pointed(ballot, trie, pointers, place, column, slot, base):
    """The token under the pointer is a candidate; returns its cell, 0 if there is none."""
    at = pointers[place, column + AT]
    if at < 0 or at >= len(trie.text):
        return np.int64(0)
    token = trie.text[at]
    if token < 0:
        return np.int64(0)
    row = ev.candidate(ballot, token)
    cell = _cell(pointers, place, column, base)
    ev.put(ballot, row, slot, cell)
    ballot.named_by[row] |= ev.BY_POINTER
    return cell
