"""Which of the client's sessions a server has, and telling it what it does not know of them.

A session sits on one stream, under an id of that stream: its seat. Until the next message the seat keeps what the session
has been told since. Where there is no seat, or one on a stream that is gone, the session is opened anew from its history.

The client's lock is held throughout.
"""

from __future__ import annotations

import itertools
import logging

from redraft.client.client_session import ClientSession, Seat
from redraft.client.client_stats import ClientStats
from redraft.client.connection import Connection
from redraft.client.outgoing import Commit, Outgoing
from redraft.client.replies import read_states
from redraft.retrieval.state_map import StateMap, StateOrigin
from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import pack_int32

__all__ = ["Seating", "leave"]

_log = logging.getLogger("redraft.client")


def leave(session: ClientSession) -> None:
    """The session has no seat any more."""
    if session.seat is not None:
        session.seat.connection.seats.pop(session.seat.remote, None)
        session.seat = None


class Seating:
    """Attributes: states: what `DraftClient.states` hands out, None until `learn_states` found it."""

    def __init__(self, stats: ClientStats) -> None:
        self.states: tuple[StateMap, StateOrigin] | None = None
        self._states_sent: pb.StateMap | None = None  # the message that `states` was read from
        self._stats = stats
        self._remote_ids = itertools.count(1)

    def learn_states(self, info) -> None:
        """Take the map for hidden states from what a server says of itself, unless there is one already."""
        if self.states is None:
            self.states, self._states_sent = read_states(info), info.state_map

    def is_up_to_date(self, connection: Connection, sessions) -> bool:
        """Whether the server knows all of these sessions up to their last commit, and answers for them."""
        for session in sessions:
            seat = session.seat
            if seat is None or seat.connection is not connection or seat.unsent or (seat.reopened and not seat.ready):
                return False
        return True

    def bring_up_to_date(self, outgoing: Outgoing, session: ClientSession) -> str | None:
        """Tell the server all of a session that it does not know; returns why the session cannot draft now."""
        seat = session.seat
        if seat is None or seat.connection is not outgoing.connection:
            if session.too_large:
                return "too_large"
            if not session.retry.allows():
                return "session"
            self.take(outgoing, session, reopened=True)
            return "reopening"
        if seat.reopened and not seat.ready:
            return "reopening"
        self.tell(outgoing, session)
        return None

    def take(self, outgoing: Outgoing, session: ClientSession, *, reopened: bool) -> None:
        """Open a session on the stream, from its history."""
        connection = outgoing.connection
        # On the stream where it was, the server has closed it and learned its output: now all of it is prompt.
        learned = session.seat is None and session.was_seated
        cut = session.length if learned else session.prompt_length
        prompt, output = pack_int32(session.tokens[:cut]), pack_int32(session.tokens[cut:])
        if not outgoing.fits(len(prompt) + len(session.namespace)) or not outgoing.fits(len(output)):
            session.too_large = True
            _log.warning("session %d does not fit into a message: it drafts without the server", session.id)
            return
        session.seat = Seat(connection, next(self._remote_ids), reopened)
        connection.seats[session.seat.remote] = session
        outgoing.add_open(session.seat, prompt, session.namespace)
        if output:
            outgoing.add_commit(session.seat.remote, Commit(cut, output))
        self._stats.reopened += session.was_seated
        session.was_seated = True

    def tell(self, outgoing: Outgoing, session: ClientSession) -> None:
        """Add to a message what a session that is seated has been told since the last one."""
        for change in session.seat.unsent:
            if isinstance(change, int):
                outgoing.add_truncate(session.seat.remote, change)
                continue
            if change.hidden is not None and not self._takes_states(outgoing.connection.info, len(change.hidden)):
                change.drop_hidden()
                self._stats.hidden_dropped += 1
            if not outgoing.fits(change.size):
                change.drop_candidates()
                self._stats.candidates_dropped += 1
            outgoing.add_commit(session.seat.remote, change)
        session.seat.unsent.clear()

    def _takes_states(self, info, size: int) -> bool:
        """Whether a server takes states projected with the map that this client has handed out."""
        if self.states is None:  # the caller projects with a map of its own
            return info.hidden_size > 0 and size % (4 * info.hidden_size) == 0
        return info.state_map.numbers == self._states_sent.numbers
