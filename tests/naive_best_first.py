"""The specification of `retrieval/best_first.py` in plain Python: a heap of open candidates over given scores."""

from __future__ import annotations

import heapq

import numpy as np

from redraft.retrieval.best_first import DISCOUNT, EXPANSION, MAX_DEPTH, NEGLIGIBLE


def best_first(probe, max_nodes, min_prob=0.0):
    """[(token, parent, probability, source)]: the most probable nodes first, by the scores of an `engine_probe.Probe`.

    Earlier opened candidates win ties. A node is evaluated if its children could come into the tree: if `EXPANSION` of
    its rank, by its source, is more than that of the last open candidate for which there is room; and the place is told how many
    candidates could have a better rank than that one.
    """
    nodes, depths, opened = [], [], []

    def worst(room):
        """The rank that a candidate has to beat."""
        return -heapq.nsmallest(room, opened)[-1][0] if len(opened) >= room else NEGLIGIBLE / max_nodes

    def expand(node):
        above, depth = (nodes[node][2], depths[node] + 1) if node >= 0 else (1.0, 1)
        could_beat = above * DISCOUNT**depth / worst(max_nodes - len(nodes))
        for token, _, _, score, source in probe.evaluate(node + 1, could_beat):
            prob = above * score
            rank = prob * DISCOUNT**depth
            if rank >= NEGLIGIBLE / max_nodes and rank >= min_prob:
                opened_before = expand.count = expand.count + 1
                heapq.heappush(opened, (-rank, opened_before, token, node, prob, source, depth))

    expand.count = 0
    if max_nodes:
        expand(-1)
    while opened and len(nodes) < max_nodes:
        rank, _, token, parent, prob, source, depth = heapq.heappop(opened)
        nodes.append((token, parent, float(np.float32(prob)), source))
        depths.append(depth)
        room = max_nodes - len(nodes)
        if room == 0 or depth >= MAX_DEPTH:
            continue
        if len(opened) >= room and EXPANSION[source] * -rank <= worst(room):
            continue
        probe.advance(parent + 1, len(nodes), token)
        expand(len(nodes) - 1)
    return nodes
