"""Contexts of up to 8 tokens and what followed them: the structure under the session and under the memory.

A context tree as in PPM (Cleary & Witten 1984), held as a trie over reversed contexts: the root's children are the
last token of a context, their children the token before it, and so on. Each context knows how often it occurred, its
successors in most-recently-used order with counts, and where it occurred last, which is where a copy pointer is seated.
It answers what the tries of Lookahead (Zhao et al. 2023), ANPD (Ou et al. 2024) and SuffixDecoding (Oliaro et al. 2024)
answer, with constant work per token whatever the text, and it forgets exactly.

Growth is lazy. A context seen once is a leaf that keeps only the position of its successor; a longer context is stored
only when the shorter one has been seen twice. So a new text costs about one leaf a token, and the length of a unique
match is read off the text itself. Besides, every token knows what came two places later ("skip" contexts: the last
token is ignored), which bridges a substituted word.

Texts are documents in blocks of 32 tokens, linked in both directions, so that sessions grow side by side and the
oldest block of a document can go while the rest stays (`forgetting.py`). A context never reaches over the start of its document.

Cost: insert and forget touch at most 9 contexts a token; a look-up takes at most 8 probes and needs no state between
steps, so nothing goes stale when other sessions write. About 70 bytes a token on ordinary text. Matches longer than 8
tokens are the business of the copy pointers (`copy_pointer.py`); a large read-only corpus is better served by a frozen
suffix automaton (`frozen_automaton.py`) or a suffix array (`suffix_array.py`).

Invariants (tests check them):
1. A stored context's suffix (its parent) is stored and expanded. Children die before their parents.
2. A leaf has total 1, and `last` is the position of its only successor.
3. An expanded context's total is at least the sum of its successors' counts (the tail of a list over 48 is dropped).
4. `slots` finds exactly the live nodes; free nodes and successors are chained through `PARENT` and `NEXT`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from redraft.retrieval import context_table
from redraft.retrieval.context_table import PARENT, ROOT, SKIP_ROOT, TOKEN, child_key, enter, find, hashed, root_key
from redraft.retrieval.kernel import inner, kernel
from redraft.retrieval.prefetch import prefetch

__all__ = ["MAX_CONTEXT", "PrefixTrie"]

MAX_CONTEXT = 8  # tokens; with copy pointers longer contexts add nothing
MAX_SUCCESSORS = 48  # kept per context, most recently used first
BLOCK = 32  # tokens
BLOCK_BITS = 5
ROOM = 512  # tokens, the least by which a trie grows

TOTAL, LAST, FIRST = 2, 3, 4  # columns of PrefixTrie.nodes, beside PARENT and TOKEN
LEAF = -2  # in FIRST: seen once, not expanded
# columns of PrefixTrie.successors
SUCCESSOR, COUNT, NEXT = range(3)
# entries of PrefixTrie.header
NODES, FREE_NODE, LIVE_NODES, SUCCESSORS, FREE_SUCCESSOR, LIVE_SUCCESSORS, BLOCKS, FREE_BLOCK = range(8)

# The most that one inserted token can add: a leaf at each level and one for the skip context, two successors each.
_NODES_PER_TOKEN = 2 * MAX_CONTEXT + 2
_SUCCESSORS_PER_TOKEN = 2 * MAX_CONTEXT + 2


class PrefixTrie(NamedTuple):
    """The arrays of one trie. Kernels take it whole; `create`, `reserve` and `grow` make it.

    text: int32[capacity]  token at each position, -1 = unused (a document ends where its block holds -1)
    block_next, block_previous: int32[capacity / 32]  neighbouring block of the same document, -1 = none
    nodes: int32[n, 5]  PARENT, TOKEN, TOTAL, LAST, FIRST
    successors: int32[m, 3]  SUCCESSOR token, COUNT, NEXT entry in the list (-1 = end)
    slots: int32[2**k]  the hash table (`context_table`); -1 = empty
    header: int64[8]  fill and free lists
    """

    text: np.ndarray
    block_next: np.ndarray
    block_previous: np.ndarray
    nodes: np.ndarray
    successors: np.ndarray
    slots: np.ndarray
    header: np.ndarray


def create(tokens: int = 256) -> PrefixTrie:
    """An empty trie with room for about `tokens` tokens of text; it grows as needed."""
    blocks = max(2, -(-tokens // BLOCK))
    n_nodes = max(64, tokens)
    trie = PrefixTrie(
        text=np.full(blocks * BLOCK, -1, np.int32),
        block_next=np.full(blocks, -1, np.int32),
        block_previous=np.full(blocks, -1, np.int32),
        nodes=np.zeros((n_nodes, 5), np.int32),
        successors=np.zeros((max(64, tokens // 2), 3), np.int32),
        slots=np.full(context_table.slots_for(n_nodes), -1, np.int32),
        header=np.array([2, -1, 0, 0, -1, 0, 0, -1], np.int64),
    )
    trie.nodes[:2] = (-1, -1, 0, -1, -1)
    return trie


def _resized(array: np.ndarray, length: int, fill: int) -> np.ndarray:
    bigger = np.full((length, *array.shape[1:]), fill, array.dtype)
    bigger[: len(array)] = array
    return bigger


def grown(trie: PrefixTrie) -> PrefixTrie:
    """The same trie with a quarter more room, at least for `ROOM` tokens more, wherever less than a sixteenth is left:
    parts run short of room soon after one another, and every growth is a copy and a new description of the arrays."""
    text, nodes, successors, slots = trie.text, trie.nodes, trie.successors, trie.slots
    block_next, block_previous = trie.block_next, trie.block_previous
    blocks = len(block_next)
    if trie.header[FREE_BLOCK] < 0 and 16 * trie.header[BLOCKS] >= 15 * blocks:
        blocks += max(blocks // 4, ROOM // BLOCK)
        text = _resized(text, blocks * BLOCK, -1)
        block_next, block_previous = _resized(block_next, blocks, -1), _resized(block_previous, blocks, -1)
    if _short(len(nodes) - 2, trie.header[LIVE_NODES], _NODES_PER_TOKEN):
        nodes = _resized(nodes, len(nodes) + max(len(nodes) // 4, ROOM), 0)
    if _short(len(successors), trie.header[LIVE_SUCCESSORS], _SUCCESSORS_PER_TOKEN):
        successors = _resized(successors, len(successors) + max(len(successors) // 4, ROOM // 2), 0)
    if 3 * len(nodes) > 2 * len(slots):
        slots = np.full(context_table.slots_for(len(nodes)), -1, np.int32)
        context_table.rehash(trie.nodes, trie.header[NODES], TOTAL, slots)
    return PrefixTrie(text, block_next, block_previous, nodes, successors, slots, trie.header)


def _short(length: int, used: int, per_token: int) -> bool:
    return 16 * used >= 15 * length or length - used < 2 * per_token


@inner
def has_room(trie):
    """Whether one more token can be appended; if not, the caller goes on with `grown(trie)`."""
    return (
        (trie.header[FREE_BLOCK] >= 0 or trie.header[BLOCKS] < len(trie.block_next))
        and len(trie.nodes) - trie.header[LIVE_NODES] - 2 >= _NODES_PER_TOKEN
        and len(trie.successors) - trie.header[LIVE_SUCCESSORS] >= _SUCCESSORS_PER_TOKEN
    )


@inner
def following(trie, position):
    """Position of the next token of the same document, or -1."""
    after = position + 1
    if after & (BLOCK - 1) == 0:
        block = trie.block_next[position >> BLOCK_BITS]
        if block < 0:
            return -1
        after = np.int64(block) << BLOCK_BITS
    return after if trie.text[after] >= 0 else -1


@inner
def preceding(trie, position):
    """Position of the token before in the same document, or -1."""
    if position & (BLOCK - 1):
        return position - 1
    block = trie.block_previous[position >> BLOCK_BITS]
    return (np.int64(block) << BLOCK_BITS) + BLOCK - 1 if block >= 0 else np.int64(-1)


@inner(inline=False)
def place_token(trie, tail, token):
    """Write `token` behind `tail`, the last position of a document (-1: begin a document); returns its position.

    REQUIRES: `has_room`.
    """
    position = np.int64(tail) + 1
    if tail < 0 or position & (BLOCK - 1) == 0:
        header = trie.header
        block = header[FREE_BLOCK]
        if block >= 0:
            header[FREE_BLOCK] = trie.block_next[block]
        else:
            block = header[BLOCKS]
            header[BLOCKS] += 1
        trie.block_next[block] = -1
        trie.block_previous[block] = -1
        if tail >= 0:
            trie.block_previous[block] = tail >> BLOCK_BITS
            trie.block_next[tail >> BLOCK_BITS] = block
        position = np.int64(block) << BLOCK_BITS
    trie.text[position] = token
    return position


@kernel(allocates=False)
def append_tokens(trie, tail, tokens, begin):
    """Append tokens[begin:] to the document that ends at `tail` (-1: a new document) and learn them.

    Returns (tail, done): the new last position and the index of the first token not appended. `done` is less than
    len(tokens) when room ran out: the caller goes on with `grown(trie)`.
    """
    tail = np.int64(tail)
    done = np.int64(begin)
    while done < len(tokens) and has_room(trie):
        tail = place_token(trie, tail, tokens[done])
        insert(trie, tail)
        done += 1
    return tail, done


@inner(inline=False)
def _new_leaf(trie, parent, key, token, position):
    """Store a context seen for the first time, whose key is `key`, its successor being at `position`."""
    header, nodes, slots = trie.header, trie.nodes, trie.slots
    node = header[FREE_NODE]
    if node >= 0:
        header[FREE_NODE] = nodes[node, PARENT]
    else:
        node = header[NODES]
        header[NODES] += 1
    header[LIVE_NODES] += 1
    nodes[node, PARENT] = parent
    nodes[node, TOKEN] = token
    nodes[node, TOTAL] = 1
    nodes[node, LAST] = position
    nodes[node, FIRST] = LEAF
    enter(slots, hashed(key), node)


@inner
def _new_successor(trie, token, count, after):
    """A list entry in front of `after`; returns its index."""
    header, successors = trie.header, trie.successors
    entry = header[FREE_SUCCESSOR]
    if entry >= 0:
        header[FREE_SUCCESSOR] = successors[entry, NEXT]
    else:
        entry = header[SUCCESSORS]
        header[SUCCESSORS] += 1
    header[LIVE_SUCCESSORS] += 1
    successors[entry, SUCCESSOR] = token
    successors[entry, COUNT] = count
    successors[entry, NEXT] = after
    return entry


@inner
def free_successor(trie, entry):
    trie.successors[entry, NEXT] = trie.header[FREE_SUCCESSOR]
    trie.header[FREE_SUCCESSOR] = entry
    trie.header[LIVE_SUCCESSORS] -= 1


@inner(inline=False)
def _count_successor(trie, node, token):
    """One more `token` after the context: its entry moves to the front; the 49th entry is dropped."""
    nodes, successors = trie.nodes, trie.successors
    entry, before, position = nodes[node, FIRST], -1, 0
    while entry >= 0 and successors[entry, SUCCESSOR] != token:
        position += 1
        if position == MAX_SUCCESSORS:
            successors[before, NEXT] = -1
            free_successor(trie, entry)
            entry = -1
            break
        before, entry = entry, successors[entry, NEXT]
    if entry < 0:
        nodes[node, FIRST] = _new_successor(trie, token, 1, nodes[node, FIRST])
        return
    successors[entry, COUNT] += 1
    if before >= 0:
        successors[before, NEXT] = successors[entry, NEXT]
        successors[entry, NEXT] = nodes[node, FIRST]
        nodes[node, FIRST] = entry


@inner(inline=False)
def _observe(trie, node, position, token):
    """The context `node`, seen before, is followed by `token` at `position`. Returns where its only successor had
    been if this is its second time (it is expanded then), else -1."""
    nodes = trie.nodes
    first_time = np.int64(-1)
    if nodes[node, FIRST] == LEAF:
        first_time = np.int64(nodes[node, LAST])
        nodes[node, FIRST] = _new_successor(trie, trie.text[first_time], 1, -1)
    _count_successor(trie, node, token)
    nodes[node, TOTAL] += 1
    nodes[node, LAST] = position
    return first_time


@inner(inline=False)
def insert(trie, position):
    """Learn that the token at `position` follows the (up to 8) tokens before it in its document.

    REQUIRES: `has_room`, and the text already at `position`.
    """
    text = trie.text
    token = text[position]
    node, key, left = ROOT, root_key(ROOT), preceding(trie, position)
    last = left
    for length in range(1, MAX_CONTEXT + 1):
        if left < 0:
            break
        key = child_key(key, text[left])
        child = find(trie, node, key, text[left])
        if child < 0:
            _new_leaf(trie, node, key, text[left], position)
            break
        first_time = _observe(trie, child, position, token)
        if first_time >= 0 and length < MAX_CONTEXT:
            further = first_time
            for _ in range(length + 1):
                further = preceding(trie, further)
                if further < 0:
                    break
            if further >= 0:
                _new_leaf(trie, child, child_key(key, text[further]), text[further], first_time)
        node, left = child, preceding(trie, left)
    if last < 0:
        return
    before_last = preceding(trie, last)
    if before_last >= 0:
        key = child_key(root_key(SKIP_ROOT), text[before_last])
        child = find(trie, SKIP_ROOT, key, text[before_last])
        if child < 0:
            _new_leaf(trie, SKIP_ROOT, key, text[before_last], position)
        else:
            _observe(trie, child, position, token)


@inner(inline=False)
def look_up(trie, window, n_window, path):
    """Find the stored suffixes of a context.

    Args:
        window: int32[8], the last tokens, newest first; `n_window` of them are valid.
        path: int32[8], receives the nodes of the suffixes of length 1, 2, ...
    Returns (stored, length): how many nodes were written, and the length of the longest match. It is larger than
    `stored` where the longest stored context is a leaf whose text goes on matching to the left.
    """
    nodes, text = trie.nodes, trie.text
    node, key, stored = ROOT, root_key(ROOT), 0
    while stored < n_window:
        key = child_key(key, window[stored])
        node = find(trie, node, key, window[stored])
        if node < 0:
            return stored, stored
        path[stored] = node
        stored += 1
        if nodes[node, FIRST] == LEAF:
            prefetch(text, nodes[node, LAST])
            break
        prefetch(trie.successors, nodes[node, FIRST])
    length = stored
    if stored and nodes[node, FIRST] == LEAF and stored < n_window:
        position = np.int64(nodes[node, LAST])
        for _ in range(stored + 1):
            position = preceding(trie, position)
            if position < 0:
                return stored, length
        while length < n_window and text[position] == window[length]:
            length += 1
            position = preceding(trie, position)
            if position < 0:
                break
    return stored, length
