"""What a client has counted, so that silent fallbacks can be seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["ClientStats"]


@dataclass
class ClientStats:
    """Counts since the client was made.

    Attributes:
        trees: draft trees that the caller asked for.
        served: of these, how many came from the server.
        fallbacks: the others, by reason. "unconnected": no server, or not yet. "late": the server missed the deadline
            of this step. "behind": it still owes the answer to an earlier step. "paused": it failed several times in
            a row and the next try is not due. "lost": the stream ended while we waited. "invalid": the tree was broken
            or missing. "session": the server refused this session. "reopening": the session is on its way to a
            new server. "too_large": the session does not fit into one message.
        connections: how often a server was connected to.
        reopened: how often a session was opened anew from the client's own history.
        late_replies: answers that came after their deadline and were thrown away.
        candidates_dropped: candidates of single commits that did not fit into one message.
        hidden_dropped: hidden states that were not sent, because the server has no dense index.
    """

    trees: int = 0
    served: int = 0
    fallbacks: Counter = field(default_factory=Counter)
    connections: int = 0
    reopened: int = 0
    late_replies: int = 0
    candidates_dropped: int = 0
    hidden_dropped: int = 0
