"""Which part of a draft the target keeps: walk down the tree along the tokens that the target itself chooses.

At each visited node the target's next token is chosen (argmax, or one draw from its processed distribution); it is
emitted whatever the tree says. If it is a child of the node, the walk goes on there, for the logits behind that child
are computed already; otherwise the step ends. The emitted tokens are therefore exactly the target's own sequential
choices, and the tree only decides how many of them one forward yields: lossless for every tree that does not depend on
the draws, and no lossless rule accepts more. docs/verification.md has the proof and the rules that look similar and
are wrong.
"""

from __future__ import annotations

from collections.abc import Callable

from redraft.retrieval.draft_tree import DraftTree

__all__ = ["accept"]


def accept(
    tree: DraftTree, choose: Callable[[int], int], is_last: Callable[[int], bool]
) -> tuple[list[int], list[int]]:
    """Walk `tree` and return (accepted nodes from the top down, emitted tokens).

    `choose(node)` gives the target's next token after `node` (-1 = the root) and is called once per visited node,
    from the root downwards. `is_last(token)` is told every emitted token and says whether the text ends with it: nothing
    is accepted or emitted behind an end. There is one emitted token more than there are accepted nodes, except
    that a token which ends the text and is also a drafted child counts as accepted.
    """
    child_of = {(int(parent), int(token)): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens))}
    path: list[int] = []
    tokens: list[int] = []
    node = -1
    while True:
        token = choose(node)
        tokens.append(token)
        ended = is_last(token)
        child = child_of.get((node, token))
        if child is not None:
            path.append(child)
        if ended or child is None:
            return path, tokens
        node = child
