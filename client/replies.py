"""Replies into trees.

Every tree is checked before anybody uses it, for the server may be wrong or somebody else. A whole batch is checked by
one kernel in one pass over all nodes; only when that fails, or while the kernel is not compiled yet, is each tree checked
by itself.
"""

from __future__ import annotations

import logging

import numpy as np

from redraft.retrieval.candidates import NO_LIMIT, Candidates
from redraft.retrieval.draft_tree import DraftTree
from redraft.retrieval.kernel import kernel
from redraft.retrieval.provenance import Origin
from redraft.retrieval.state_map import StateMap, StateOrigin
from redraft.v1.wire import unpack_float32, unpack_int32

__all__ = ["compile_checks", "read_states", "read_tree_batch", "read_trees"]

_log = logging.getLogger("redraft.client")

_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


def read_trees(messages, asked: dict[int, Origin | None], max_nodes: int, vocab_size: int | None, *, compiled: bool):
    """The trees of a reply by session id, those that keep every promise of `DraftTree`; the others are left out.

    `asked`: the sessions that were asked for, with at most `max_nodes` nodes each, and what the provenance of their trees
    can be found from. A session's second tree in one reply, and a tree for a session that was not asked for, are left out,
    too. `compiled`: `compile_checks` has been called; nobody waits for the compiler here.
    """
    due, remotes, fields, sizes, regular = set(asked), [], [], [], compiled
    for message in messages:
        remote = message.session_id
        if remote in due:
            due.remove(remote)
            tokens, parents, probs, sources = message.tokens, message.parents, message.probs, message.sources
            size = len(sources)
            regular = regular and len(tokens) == len(parents) == len(probs) == 4 * size
            remotes.append(remote)
            fields.append((tokens, parents, probs, sources))
            sizes.append(size)
    if not remotes:
        return {}
    if regular and max(sizes) <= max_nodes:
        trees = _trees_together(remotes, sizes, map(bytearray().join, zip(*fields)), vocab_size, asked)
        if trees is not None:
            return trees
    return _sound_ones(zip(remotes, fields), max_nodes, vocab_size, asked)


def read_tree_batch(batch, asked: dict[int, Origin | None], max_nodes: int, vocab_size: int | None, *, compiled: bool):
    """The same for a `TreeBatch`; where its columns do not fit each other, none of its trees is to be trusted."""
    remotes, sizes, sources = list(batch.session_ids), list(batch.sizes), batch.sources
    fields = batch.tokens, batch.parents, batch.probs, sources
    nodes = sum(sizes)
    if len(sizes) != len(remotes) or [len(field) for field in fields] != [4 * nodes, 4 * nodes, 4 * nodes, nodes]:
        return {}
    due = set(asked)
    if (
        compiled
        and due.issuperset(remotes)
        and len(set(remotes)) == len(remotes)
        and max(sizes, default=0) <= max_nodes
    ):
        trees = _trees_together(remotes, sizes, map(bytearray, fields), vocab_size, asked)
        if trees is not None:
            return trees
    answers, start = [], 0
    for remote, size in zip(remotes, sizes):
        if remote in due:
            due.remove(remote)
            four = slice(4 * start, 4 * (start + size))
            answers.append((remote, (*[field[four] for field in fields[:3]], sources[start : start + size])))
        start += size
    return _sound_ones(answers, max_nodes, vocab_size, asked)


def _trees_together(remotes, sizes, columns, vocab_size: int | None, asked) -> dict[int, DraftTree] | None:
    """The trees cut from `columns`: tokens, parents, probs, sources of all, of lengths that fit. None if one is broken.

    The columns are bytearrays, so that the arrays belong to the caller and may be written to.
    """
    tokens, parents, probs, sources = columns
    tokens, parents = np.frombuffer(tokens, _INT32), np.frombuffer(parents, _INT32)
    probs, sources = np.frombuffer(probs, _FLOAT32), np.frombuffer(sources, np.uint8)
    if not _all_sound(
        tokens, parents, probs, np.array(sizes, np.int64), NO_LIMIT if vocab_size is None else vocab_size
    ):
        return None
    trees, start = {}, 0
    for remote, size in zip(remotes, sizes):
        cut = slice(start, start + size)
        trees[remote] = DraftTree(tokens[cut], parents[cut], probs[cut], sources[cut], asked[remote])
        start += size
    return trees


def read_states(info) -> tuple[StateMap, StateOrigin] | None:
    """The map of a GetInfoResponse and whose states it is for; None where there is none, or a broken one."""
    if not info.HasField("state_map"):
        return None
    sent = info.state_map
    try:
        numbers = unpack_float32(sent.numbers, "state_map.numbers")
        state_map = StateMap.unpacked(numbers, info.hidden_size, sent.width)
    except ValueError as error:
        _log.warning("the server's map of hidden states is not used: %s", error)
        return None
    return state_map, StateOrigin(sent.model, sent.weights_sha256, sent.dtype, sent.layer)


def compile_checks() -> None:
    """Compile the checks of a batch's trees and of candidates, so that they may be used."""
    _all_sound(np.zeros(1, _INT32), np.full(1, -1, _INT32), np.ones(1, _FLOAT32), np.ones(1, np.int64), 1)
    Candidates(
        np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    ).sound()


@kernel
def _all_sound(tokens, parents, probs, sizes, vocab_size):
    """`DraftTree.check` for many trees at once; the arrays hold their nodes one tree after the other."""
    # Siblings are chained: last_child[node + 1] is a node's youngest child so far, [0] the youngest root.
    last_child = np.full(len(tokens) + 1, -1, np.int64)
    elder = np.empty(len(tokens), np.int64)
    start = 0
    for tree in range(len(sizes)):
        last_child[: sizes[tree] + 1] = -1
        for node in range(sizes[tree]):
            token, parent, prob = tokens[start + node], parents[start + node], probs[start + node]
            if not (-1 <= parent < node and 0 <= token < vocab_size and 0.0 <= prob <= 1.0001):
                return False
            sibling = last_child[parent + 1]
            elder[node] = sibling
            while sibling >= 0:
                if tokens[start + sibling] == token:
                    return False
                sibling = elder[sibling]
            last_child[parent + 1] = node
        start += sizes[tree]
    return True


def _sound_ones(answers, max_nodes: int, vocab_size: int | None, asked) -> dict[int, DraftTree]:
    trees = {}
    for remote, fields in answers:
        tokens, parents, probs, sources = map(bytearray, fields)  # as in `_trees_together`
        try:
            tree = DraftTree(
                unpack_int32(tokens, "tokens"),
                unpack_int32(parents, "parents"),
                unpack_float32(probs, "probs"),
                np.frombuffer(sources, np.uint8),
                asked[remote],
            )
            trees[remote] = tree.check(vocab_size=vocab_size, max_nodes=max_nodes)
        except ValueError:
            continue
    return trees
