"""What is no item of `step`: refused by every drafter alike."""

from __future__ import annotations

import pytest


def refuses_what_is_no_step(drafter, session):
    """Nothing of a batch is committed in which something is no (session, tokens, ...)."""
    length, wanted = session.length, r"step: wanted \(session, tokens\[, candidates\[, hidden\[, proposal\]\]\]\)"
    for item, came in (
        ((session,), "1 things"),
        ((session, [1], None, None, None, None), "6 things"),
        (session, "Session"),
        (None, "NoneType"),
    ):
        with pytest.raises(TypeError, match=f"{wanted} for each session, got .*{came}"):
            drafter.step([(session, [1]), item])
    for thing, came in ((None, "NoneType"), (7, "int"), ([1], "list")):
        with pytest.raises(TypeError, match=f"step: wanted a session of this drafter first, got {came}"):
            drafter.step([(session, [1]), (thing, [1])])
    assert session.length == length
