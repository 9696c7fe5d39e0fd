"""The draft tree: the most probable nodes first, until the budget is spent.

The expected number of accepted tokens is the sum of the nodes' path probabilities, and no child is more probable than
its parent; so the n most probable nodes are a tree, and the best tree of n nodes (the argument of OPT-Tree, Wang et
al. 2024, and EAGLE-2). They are found best-first: take the best open candidate, make it a node, evaluate what may
follow it, and open those candidates.

Deep nodes are chosen for being over-rated, so the order discounts each level by `DISCOUNT`, and so does the comparison
with `min_prob` (at 2.6 nodes a step that is worth 0.03 tokens); the probability reported is not discounted. A node whose
children could not come into the tree is not evaluated, and at one whose path is improbable, or where one candidate is
nearly sure, only about as many candidates are looked at as could come in: that costs 0.003 tokens a step of 3.23 and
saves a sixth of the time.

Cost: one evaluation (`blend`) per expanded node, about two thirds of the budget.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from redraft.retrieval import blend, bundle
from redraft.retrieval import evidence as ev
from redraft.retrieval import prefix_trie as pt
from redraft.retrieval.bundle import Bundle
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.kernel import inner, kernel
from redraft.retrieval.knowledge import Places, knowledge_at, new_places, places_at, state_at
from redraft.retrieval.sources import proposal

__all__ = [
    "DISCOUNT", "MAX_BUDGET", "Workspace", "certainty", "draft_tree", "follow_tokens", "learn_tokens", "new_workspace",
    "proposal_bundle", "workspace_bundle",
]  # fmt: skip

DISCOUNT = 0.95
MAX_BUDGET = 512
MAX_DEPTH = 48
NEGLIGIBLE = 0.016  # an open candidate is dropped below this, divided by the budget
EVERYTHING = 1e9  # where candidates are not to be bounded by what could come into a tree
# A node is evaluated if its rank times this, by the source that names it, would still come into the tree: what only skips
# or frequency speak for seldom leads anywhere.
EXPANSION = np.full(len(Source.NAMES), 0.4)
EXPANSION[[Source.SKIP, Source.FREQUENT]] = 0.2


class Workspace(NamedTuple):
    """Buffers of one thread, reused from call to call.

    places, ballot: see blend; tokens, parents: int32[512], probs: float32[512], sources: uint8[512]: the tree;
    depths: int32[512] of its nodes; open_ranks: float64[512] of the open candidates, best last; open_slots: int32[512]
    where in the two following each stands (behind them the slots that are free); open_probs: float64[512];
    open_nodes: int32[512, 3]  token, parent, source.
    """

    places: Places
    ballot: ev.Ballot
    tokens: np.ndarray
    parents: np.ndarray
    probs: np.ndarray
    sources: np.ndarray
    depths: np.ndarray
    open_ranks: np.ndarray
    open_slots: np.ndarray
    open_probs: np.ndarray
    open_nodes: np.ndarray


def new_workspace() -> Workspace:
    n = MAX_BUDGET
    return Workspace(
        new_places(n + 1),
        ev.new_ballot(),
        np.zeros(n, np.int32),
        np.zeros(n, np.int32),
        np.zeros(n, np.float32),
        np.zeros(n, np.uint8),
        np.zeros(n, np.int32),
        np.zeros(n, np.float64),
        np.arange(n, dtype=np.int32),
        np.zeros(n, np.float64),
        np.zeros((n, 3), np.int32),
    )


def workspace_bundle(work: Workspace) -> Bundle:
    return Bundle([*work.places, *work.ballot, *work[2:]])


_rows_of_candidates, _rows_of_three = bundle.uint32_rows(ev.NOWHERE + 1), bundle.int32_rows(3)
_rows_of_used, _rows_of_ages = bundle.int64_rows(3), bundle.int64_rows(ev.NOWHERE + 1)


@inner
def _ballot_at(addresses):
    return ev.Ballot(
        bundle.int32s(addresses, 8),
        bundle.uint32s(addresses, 9),
        _rows_of_candidates(addresses, 10),
        bundle.float64s(addresses, 11),
        bundle.int64s(addresses, 12),
        bundle.int64s(addresses, 13),
        _rows_of_used(addresses, 14),
        _rows_of_ages(addresses, 15),
        bundle.int64s(addresses, 16),
    )


@inner
def _workspace_at(addresses):
    return Workspace(
        places_at(addresses, 0),
        _ballot_at(addresses),
        bundle.int32s(addresses, 17),
        bundle.int32s(addresses, 18),
        bundle.float32s(addresses, 19),
        bundle.uint8s(addresses, 20),
        bundle.int32s(addresses, 21),
        bundle.float64s(addresses, 22),
        bundle.int32s(addresses, 23),
        bundle.float64s(addresses, 24),
        _rows_of_three(addresses, 25),
    )


def proposal_bundle(tokens: np.ndarray, parents: np.ndarray, probs: np.ndarray) -> Bundle:
    """The caller's own draft: int32[m], int32[m], float32[m]."""
    return Bundle([tokens, parents, probs])


@inner
def _proposal_at(addresses):
    return bundle.int32s(addresses, 0), bundle.int32s(addresses, 1), bundle.float32s(addresses, 2)


@inner(inline=False)
def _open(work, n_open, room, rank, prob, token, parent, source):
    """Insert a candidate in order of rank, keeping the best `room`; returns how many are open. Best last."""
    ranks, slots = work.open_ranks, work.open_slots
    if n_open == room:
        # the worst (first) makes way
        at, slot = 0, slots[0]
        while at + 1 < n_open and ranks[at + 1] < rank:
            ranks[at], slots[at] = ranks[at + 1], slots[at + 1]
            at += 1
    else:
        at, slot = n_open, slots[n_open]
        while at > 0 and ranks[at - 1] >= rank:
            ranks[at], slots[at] = ranks[at - 1], slots[at - 1]
            at -= 1
        n_open += 1
    ranks[at], slots[at] = rank, slot
    work.open_probs[slot] = prob
    work.open_nodes[slot, 0], work.open_nodes[slot, 1], work.open_nodes[slot, 2] = token, parent, source
    return n_open


@inner(inline=False)
def _expand(knowledge, work, draft, enabled, node, n_open, room, floor, min_prob):
    """Evaluate the place behind `node` (-1: the root) and open its candidates; returns how many are open."""
    places, ballot = work.places, work.ballot
    above, depth = 1.0, 1
    if node >= 0:
        above, depth = np.float64(work.probs[node]), work.depths[node] + 1
    discount = DISCOUNT**depth
    # No more than 1 / p candidates have a probability of p: those that matter are few where the path is improbable.
    needed = work.open_ranks[0] if n_open == room else floor
    blend.gather(knowledge, places, node + 1, ballot, draft, enabled, above * discount / needed)
    blend.score(knowledge.model, ballot)
    for row in range(ballot.header[ev.N_CANDIDATES]):
        prob = above * ballot.scores[row]
        rank = prob * discount
        if rank < floor or rank < min_prob or (n_open == room and rank <= work.open_ranks[0]):
            continue
        slot = blend.strongest_slot(knowledge.model, ballot, row)
        n_open = _open(work, n_open, room, rank, prob, ballot.tokens[row], node, ev.SLOT_SOURCE[slot])
    return n_open


@inner
def _foresee_end(knowledge, places):
    """`blend.foresee` for the end of the committed text."""
    window, filled = places.windows[0], places.filled[0]
    if filled > 0:
        blend.foresee(knowledge, window[0], window[1:], filled - 1)


@inner(inline=False)
def _take_nodes(work, n, n_open, max_nodes):
    """The best open candidates become nodes n, n + 1, ... until one may have children in the tree.

    Returns (nodes, open candidates, where the last node stood among them; -1: the tree is complete).
    """
    while n < max_nodes and n_open > 0:
        n_open -= 1
        rank, slot = work.open_ranks[n_open], work.open_slots[n_open]
        parent = work.open_nodes[slot, 1]
        work.tokens[n], work.parents[n] = work.open_nodes[slot, 0], parent
        work.probs[n], work.sources[n] = work.open_probs[slot], work.open_nodes[slot, 2]
        work.depths[n] = work.depths[parent] + 1 if parent >= 0 else 1
        n += 1
        room = max_nodes - n
        if room == 0 or work.depths[n - 1] >= MAX_DEPTH:
            continue
        if n_open < room or EXPANSION[work.sources[n - 1]] * rank > work.open_ranks[0]:
            return n, n_open, np.int64(slot)
    return n, n_open, np.int64(-1)


@kernel(allocates=False)
def draft_tree(session, namespace, drafter, workspace, proposed, enabled, max_nodes, min_prob):
    """Grow a tree into the workspace's `tokens` etc.; returns its number of nodes.

    Args:
        session, namespace, drafter, workspace, proposed: addresses of their bundles; only the workspace is changed.
        enabled: a bit per `Source`.
        min_prob: a node's discounted path probability must reach this.
    """
    knowledge, work = knowledge_at(session, namespace, drafter), _workspace_at(workspace)
    draft = _proposal_at(proposed)
    places = work.places
    blend.copy_place(state_at(session), places)
    places.proposed[0] = -1 if len(draft[0]) else -2
    work.ballot.header[ev.USED_STAMP] += 1
    floor = NEGLIGIBLE / max_nodes
    _foresee_end(knowledge, places)
    n, n_open, foreseen = 0, 0, -1
    while True:
        n_open = _expand(knowledge, work, draft, enabled, n - 1, n_open, max_nodes - n, floor, min_prob)
        n, n_open, slot = _take_nodes(work, n, n_open, max_nodes)
        if slot < 0:
            return n
        token, parent = work.tokens[n - 1], work.parents[n - 1]
        if slot != foreseen:
            blend.foresee(knowledge, token, places.windows[parent + 1], places.filled[parent + 1])
        if n_open > 0:  # the best of the others may come next
            foreseen = work.open_slots[n_open - 1]
            before = work.open_nodes[foreseen, 1] + 1
            blend.foresee(knowledge, work.open_nodes[foreseen, 0], places.windows[before], places.filled[before])
        blend.advance(knowledge, places, parent + 1, n, token)
        places.proposed[n] = proposal.follow(draft[0], draft[1], places.proposed[parent + 1], token)


@kernel(allocates=False)
def certainty(session, namespace, drafter, workspace, proposed, enabled):
    """How probable the likeliest next token is by what is known now: whether a slower source is worth asking."""
    knowledge, state, ballot = knowledge_at(session, namespace, drafter), state_at(session), _ballot_at(workspace)
    ballot.header[ev.USED_STAMP] += 1
    blend.gather(knowledge, state, 0, ballot, _proposal_at(proposed), enabled, EVERYTHING)
    blend.score(knowledge.model, ballot)
    best = 0.0
    for row in range(ballot.header[ev.N_CANDIDATES]):
        best = max(best, ballot.scores[row])
    return best


@kernel(allocates=False)
def learn_tokens(session, namespace, drafter, workspace, proposed, enabled, tail, tokens, begin):
    """The target wrote tokens[begin:]: learn from each what the evidence said of it, then take it into the session.

    `tail` is the position of the session's last token (-1: none). Returns (tail, done, length, copied_from): the first
    two as `append_tokens` does, so that what `done` leaves is to be learned with `grown` arrays; the session's length; and
    the place in the memory that its pointer copies from, -1 for none.
    """
    knowledge, state, ballot = knowledge_at(session, namespace, drafter), state_at(session), _ballot_at(workspace)
    draft = _proposal_at(proposed)
    tail = np.int64(tail)
    done = np.int64(begin)
    _foresee_end(knowledge, state)
    while done < len(tokens) and pt.has_room(knowledge.session):
        token = tokens[done]
        ballot.header[ev.USED_STAMP] += 1
        blend.gather(knowledge, state, 0, ballot, draft, enabled, EVERYTHING)
        blend.score(knowledge.model, ballot)
        blend.foresee(knowledge, token, state.windows[0], state.filled[0])
        blend.learn(knowledge.model, ballot, token)
        state.proposed[0] = proposal.follow(draft[0], draft[1], state.proposed[0], token)
        blend.advance(knowledge, state, 0, 0, token)
        tail = pt.place_token(knowledge.session, tail, token)
        pt.insert(knowledge.session, tail)
        done += 1
    return tail, done, state.now[0], state.pointers[0, blend.MEMORY_POINTER]


@kernel(allocates=False)
def follow_tokens(session, namespace, drafter, tokens):
    """Move the session's place over `tokens` without learning: the end of a prompt, or a changed set of indexes."""
    knowledge, state = knowledge_at(session, namespace, drafter), state_at(session)
    for token in tokens:
        blend.advance(knowledge, state, 0, 0, token)
