"""One message that asks for trees: in columns where that is enough, as steps of each session where it is not.

In columns the joined arrays of a batch's commits go out as they were checked, and one field holds for all sessions what
steps say in a message for each; for 64 sessions this spares the client 0.3 ms and the server 0.2. They are enough where
a commit is all that the server has to be told of each session: it knows all of them and is up to date, nobody brings
hidden states or a draft of his own, and it all fits into one message.

The client's lock is held throughout.
"""

from __future__ import annotations

from typing import NamedTuple

from redraft.client.checked_commits import CheckedCommits
from redraft.client.client_session import ClientSession
from redraft.client.connection import Connection, Sent
from redraft.client.outgoing import Outgoing
from redraft.client.seating import Seating

__all__ = ["Question", "ask", "queue_commits"]

_BULK_BYTES = 1 << 16  # a message larger than this may take as long as opening a session does


class Question(NamedTuple):
    """sent: the message, None if there is nobody to be asked for; asked: the sessions by remote id; reasons: why others
    are not among them; patient: whether to wait as for sessions that are opened."""

    sent: Sent | None
    asked: dict[int, ClientSession]
    reasons: list[str]
    patient: bool


def ask(
    connection: Connection,
    seating: Seating,
    sessions: list[ClientSession],
    proposals,
    max_nodes: int | None,
    min_prob: float | None,
    commits: CheckedCommits | None,
) -> Question:
    """Send one message: a commit to each session, if there are any, and a request for a tree for each. The commits join
    the sessions' own histories, too."""
    if commits is not None:
        if commits.columns is not None and not any(proposal is not None for proposal in proposals):
            question = _in_columns(connection, seating, sessions, commits.columns, max_nodes, min_prob)
            if question is not None:
                for session, tokens in zip(sessions, commits.tokens):  # while the server works
                    session.append(tokens)
                return question
        queue_commits(sessions, commits)
    return _by_steps(connection, seating, sessions, proposals, max_nodes, min_prob)


def queue_commits(sessions, commits: CheckedCommits) -> None:
    """Take the commits into the sessions' histories, and keep them for the next message."""
    for session, tokens, commit in zip(sessions, commits.tokens, commits.apart()):
        session.queue(session.append(tokens), *commit)


def _in_columns(connection, seating, sessions, columns, max_nodes, min_prob) -> Question | None:
    """None, and nothing is sent, where columns are not enough."""
    if not (connection.info.batches and seating.is_up_to_date(connection, sessions)):
        return None
    outgoing = Outgoing(connection)
    seats = [session.seat for session in sessions]
    remotes = [seat.remote for seat in seats]
    starts = [session.length for session in sessions]
    if not outgoing.add_batch(remotes, starts, columns, max_nodes, min_prob):
        return None
    patient = outgoing.total > _BULK_BYTES or not all(seat.ready for seat in seats)
    return Question(outgoing.send(), dict(zip(remotes, sessions)), [], patient)


def _by_steps(connection, seating, sessions, proposals, max_nodes, min_prob) -> Question:
    outgoing = Outgoing(connection)
    asked, reasons, drafts, patient = {}, [], [], False
    for session, proposal in zip(sessions, proposals):
        reason = seating.bring_up_to_date(outgoing, session)
        if reason is not None:
            reasons.append(reason)
            continue
        seat = session.seat
        drafts.append((seat, proposal))
        asked[seat.remote] = session
        patient |= not seat.ready
    # As in process, all commits come before any draft; and all drafts are in one message, the one we wait for.
    outgoing.add_drafts(drafts, max_nodes, min_prob)
    patient |= outgoing.total > _BULK_BYTES
    sent = outgoing.send()
    return Question(sent if asked else None, asked, reasons, patient)
