"""Steps into messages, replies into trees: the client's half of `drafting.proto`.

Every tree is checked before anybody uses it, for the server may be wrong or somebody else. A whole batch is checked in
one pass over all nodes, which costs little more than one tree does; only when that fails is each tree checked by itself
to tell the good from the bad.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval.candidates import Candidates
from redraft.retrieval.draft_tree import DraftTree
from redraft.v1.wire import pack_float32, pack_int32, unpack_float32, unpack_int32

__all__ = ["add_commit", "add_draft", "add_open", "pack_candidates", "read_trees"]


def add_open(request, remote: int, prompt: bytes, namespace: str) -> None:
    """Open session `remote` with a packed prompt."""
    fields = request.steps.add(session_id=remote).open
    fields.prompt = prompt
    fields.namespace = namespace


def add_commit(
    request, remote: int, start: int, tokens: bytes, candidates: dict[str, bytes] | None, hidden: bytes
) -> None:
    """Commit packed tokens at position `start`, with packed candidates (`pack_candidates`) and hidden state."""
    fields = request.steps.add(session_id=remote).commit
    fields.start = start
    fields.tokens = tokens
    if candidates is not None:
        target = fields.candidates
        for name, data in candidates.items():
            setattr(target, name, data)
    if hidden:
        fields.hidden = hidden


def pack_candidates(candidates: Candidates) -> dict[str, bytes]:
    """The fields of the message Candidates."""
    return {
        "tokens": pack_int32(candidates.tokens),
        "previous": pack_int32(candidates.previous),
        "ids": pack_int32(candidates.ids),
        "probs": pack_float32(candidates.probs),
    }


def add_draft(request, remote: int, max_nodes: int | None, min_prob: float | None, proposal) -> None:
    """Ask for a tree. `proposal`: None, a DraftTree or int32[n] for a chain."""
    fields = request.steps.add(session_id=remote).draft
    fields.SetInParent()
    if max_nodes is not None:
        fields.max_nodes = max_nodes
    if min_prob is not None:
        fields.min_prob = min_prob
    if isinstance(proposal, DraftTree):
        fields.proposal.tokens = pack_int32(proposal.tokens)
        fields.proposal.parents = pack_int32(proposal.parents)
        fields.proposal.probs = pack_float32(proposal.probs)
    elif proposal is not None:
        fields.proposal.tokens = pack_int32(proposal)


def read_trees(messages, budgets: dict[int, int], vocab_size: int | None) -> dict[int, DraftTree]:
    """The trees of a reply by session id, those that keep every promise of `DraftTree`; the others are left out.

    `budgets` names the sessions that were asked for, with the most nodes that each may have. A session's second tree
    in one reply, and a tree for a session that was not asked for, are left out, too.
    """
    wanted = {message.session_id: message for message in reversed(messages) if message.session_id in budgets}
    fields = [(message.tokens, message.parents, message.probs, message.sources) for message in wanted.values()]
    sizes = [len(sources) for *_, sources in fields]
    limits = [budgets[remote] for remote in wanted]
    if all(len(t) == len(p) == len(q) == 4 * n for (t, p, q, _), n in zip(fields, sizes)):
        # joined in a bytearray, so that the arrays belong to the caller and may be written to
        tokens, parents, probs, sources = (bytearray().join(column) for column in zip(*fields)) if fields else [b""] * 4
        tokens, parents = np.frombuffer(tokens, "<i4"), np.frombuffer(parents, "<i4")
        probs, sources = np.frombuffer(probs, "<f4"), np.frombuffer(sources, np.uint8)
        if _all_sound(tokens, parents, probs, np.array(sizes, np.int64), np.array(limits, np.int64), vocab_size):
            trees, start = {}, 0
            for remote, size in zip(wanted, sizes):
                cut = slice(start, start + size)
                trees[remote] = DraftTree(tokens[cut], parents[cut], probs[cut], sources[cut])
                start += size
            return trees
    return _sound_ones(wanted, budgets, vocab_size)


def _all_sound(tokens, parents, probs, sizes, limits, vocab_size: int | None) -> bool:
    """`DraftTree.check` for many trees at once; the arrays hold their nodes one tree after the other."""
    if (sizes > limits).any():
        return False
    n = len(tokens)
    if n == 0:
        return True
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    place = np.arange(n)
    if (parents < -1).any() or (parents >= place - starts).any():
        return False
    if int(tokens.min()) < 0 or (vocab_size is not None and int(tokens.max()) >= vocab_size):
        return False
    if not (probs.min() >= 0 and probs.max() <= 1.0001):  # not a number compares false
        return False
    # A node's parent among all nodes; the roots of a tree share a parent that no other tree has.
    parent = np.where(parents >= 0, parents + starts, n + starts)
    edges = np.sort(parent << 32 | tokens)
    return not (edges[1:] == edges[:-1]).any()


def _sound_ones(wanted: dict, budgets: dict[int, int], vocab_size: int | None) -> dict[int, DraftTree]:
    trees = {}
    for remote, message in wanted.items():
        try:
            tree = DraftTree(
                unpack_int32(message.tokens, "tokens"),
                unpack_int32(message.parents, "parents"),
                unpack_float32(message.probs, "probs"),
                np.frombuffer(message.sources, np.uint8),
            )
            trees[remote] = tree.check(vocab_size=vocab_size, max_nodes=budgets[remote])
        except ValueError:
            continue
    return trees
