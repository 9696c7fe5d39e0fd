"""A look into the engine: what a session's sources say at one place of a tree that the test grows itself."""

from __future__ import annotations

import numpy as np

from redraft.retrieval import best_first, blend
from redraft.retrieval import evidence as ev
from redraft.retrieval.kernel import kernel
from redraft.retrieval.knowledge import knowledge_at, state_at
from redraft.retrieval.sources import proposal


@kernel(allocates=False)
def _start(session, workspace):
    state, places = state_at(session), best_first._workspace_at(workspace).places
    blend.copy_place(state, places)
    places.proposed[0] = state.proposed[0]
    best_first._workspace_at(workspace).ballot.header[ev.USED_STAMP] += 1


@kernel(allocates=False)
def _evaluate(session, namespace, drafter, workspace, proposed, enabled, place, fitting, slots):
    knowledge, work = knowledge_at(session, namespace, drafter), best_first._workspace_at(workspace)
    blend.gather(knowledge, work.places, place, work.ballot, best_first._proposal_at(proposed), enabled, fitting)
    blend.score(knowledge.model, work.ballot)
    for row in range(work.ballot.header[ev.N_CANDIDATES]):
        slots[row] = blend.strongest_slot(knowledge.model, work.ballot, row)


@kernel(allocates=False)
def _advance(session, namespace, drafter, workspace, proposed, source, target, token):
    knowledge, places = knowledge_at(session, namespace, drafter), best_first._workspace_at(workspace).places
    draft = best_first._proposal_at(proposed)
    blend.advance(knowledge, places, source, target, token)
    places.proposed[target] = proposal.follow(draft[0], draft[1], places.proposed[source], token)


class Probe:
    """Begins at the end of the session's text, which is place 0. `evaluate` seats pointers, as a draft does."""

    def __init__(self, session):
        self._session = session
        self._work = best_first.new_workspace()
        self._bundle = best_first.workspace_bundle(self._work)
        self._slots = np.zeros(ev.MAX_CANDIDATES, np.int64)
        _start(session._bundle.addresses, self._bundle.addresses)

    def _knowledge(self):
        session = self._session
        return (
            session._bundle.addresses, session._namespace.bundle.addresses, session._indexes.bundle.addresses,
            self._bundle.addresses, session._proposal.addresses,
        )  # fmt: skip

    def evaluate(self, place=0, fitting=best_first.EVERYTHING):
        """[(token, named_by, {slot: cell}, probability, source)] in the engine's order; `fitting` as `blend.gather` has it."""
        _evaluate(*self._knowledge(), self._session._drafter.enabled, place, float(fitting), self._slots)
        ballot = self._work.ballot
        found = []
        for row in range(int(ballot.header[ev.N_CANDIDATES])):
            cells = {slot: int(cell) for slot, cell in enumerate(ballot.cells[:, row]) if cell}
            source = int(ev.SLOT_SOURCE[self._slots[row]])
            named_by, score = int(ballot.named_by[row]), float(ballot.scores[row])
            found.append((int(ballot.tokens[row]), named_by, cells, score, source))
        return found

    def advance(self, source, target, token):
        """Place `target` is place `source` and then `token`."""
        _advance(*self._knowledge(), source, target, token)
