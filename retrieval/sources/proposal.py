"""Evidence from the caller's own draft: a chain or tree handed in with the step (a draft head's, a predicted output).

The tree that is being grown keeps, per place, the node of the proposal that it coincides with; the children of that
node are candidates. The proposal's own conditional probability, its rank among its siblings and whether it stands
first choose the cell, so that an over-confident caller is corrected by what the target accepts.
"""

from __future__ import annotations

from redraft.retrieval import evidence as ev
from redraft.retrieval.kernel import inner


@inner(inline=False)
def add_proposed(ballot, tokens, parents, probs, at):
    """Add the children of proposal node `at` (-1: the proposal's roots; -2: the path has left the proposal)."""
    if at == -2:
        return
    above = probs[at] if at >= 0 else 1.0
    rank = 0
    for node in range(at + 1, len(tokens)):
        if parents[node] != at:
            continue
        row = ev.candidate(ballot, tokens[node])
        if row != ev.NOWHERE and ballot.cells[ev.CALLER, row] == 0:
            conditional = probs[node] / above if above > 0 else 0.0
            bucket = ev.probability_bucket(conditional)
            ev.put(ballot, row, ev.CALLER, ev.CALLER_CELLS + (bucket * 8 + min(rank, 7)) * 2 + (1 if at < 0 else 0))
            ballot.named_by[row] |= ev.BY_CALLER
        rank += 1


@inner(inline=False)
def follow(tokens, parents, at, token):
    """The child of proposal node `at` with `token`, or -2."""
    if at == -2:
        return -2
    for node in range(at + 1, len(tokens)):
        if parents[node] == at and tokens[node] == token:
            return node
    return -2
