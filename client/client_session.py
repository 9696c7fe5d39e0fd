"""One sequence being decoded, seen from the inference process: the history is ours, the server has a copy.

The client's own copy is the truth. Whatever happens to the server, a session can be opened anew from it, and a draft
can be made from it without any server. What the server still has to be told is queued in order at the session's *seat*,
its place on one stream, and travels with the next draft: commit and draft make one round trip.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from redraft.client.circuit_breaker import CircuitBreaker
from redraft.client.connection import Connection
from redraft.client.outgoing import Commit
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.draft_tree import DraftTree
from redraft.retrieval.errors import SessionClosedError
from redraft.retrieval.provenance import PASSAGE_TOKENS, Origin
from redraft.retrieval.tokens import as_count
from redraft.v1.wire import pack_int32

__all__ = ["ClientSession", "Seat"]


@dataclass
class Seat:
    """A session's place on one stream: `remote` is its id there, `unsent` what is to be told, in order.

    `unsent` holds `Commit`s, and an int for each truncation to that length. `ready` once the server has confirmed it.
    A `reopened` seat is not waited for: until it is ready, the session drafts by itself.
    """

    connection: Connection
    remote: int
    reopened: bool
    ready: bool = False
    unsent: list[Commit | int] = field(default_factory=list)


class ClientSession:
    """A session of a `DraftClient`; the same interface as the in-process `redraft.Session`."""

    def __init__(self, client, session_id: int, prompt: np.ndarray, namespace: str) -> None:
        self.id = session_id
        self.namespace = namespace
        self.closed = False
        self.prompt_length = len(prompt)  # of what was committed, closing teaches the memory
        self.seat: Seat | None = None
        self.was_seated = False
        self.too_large = False
        self.retry = CircuitBreaker()
        self._client = client
        self._tokens = np.empty(max(256, 2 * len(prompt)), np.int32)
        self._tokens[: len(prompt)] = prompt
        self._length = len(prompt)

    @property
    def length(self) -> int:
        """Tokens of the prompt and of all commits."""
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """int32[length], prompt and output; a view, not to be written to."""
        return self._tokens[: self._length]

    def draft(self, max_nodes: int | None = None, min_prob: float | None = None, proposal=None) -> DraftTree:
        """A draft tree for what follows, at most `max_nodes` nodes; empty is a valid answer.

        `proposal` is the caller's own draft, a DraftTree or 1-D token ids. Sends what was committed since the last draft
        along, and returns within the client's deadline whatever the server does.
        Raises SessionClosedError after close, ValueError or TypeError for arguments out of range.
        """
        self.check_open()
        return self._client.draft_for([self], max_nodes, min_prob, [self._client.checked_proposal(proposal)])[0]

    def commit(self, tokens, candidates: Candidates | None = None, hidden=None) -> None:
        """Append what the target emitted, with what it thought likely. Costs no round trip: it goes with the next draft.

        tokens: int32-like[n], may be empty. hidden: float32[d] or [m, d], projected states as for `Session.commit`.
        Raises SessionClosedError after close, ValueError or TypeError for bad ids.
        """
        self.check_open()
        self._client.commit_session(self, tokens, candidates, hidden)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens only. Raises ValueError for a length beyond the present one."""
        self.check_open()
        self._client.truncate_session(self, as_count(length, self._length, "length"))

    def close(self) -> None:
        """End the session; its output joins the namespace's memory. Closing twice is fine."""
        if not self.closed:
            self.closed = True
            self._client.close_session(self)

    def __enter__(self) -> ClientSession:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def check_open(self) -> None:
        if self.closed:
            raise SessionClosedError(f"session {self.id} is closed")

    def origin(self, locate) -> Origin:
        """What the provenance of a tree that the server drafts now can be found from."""
        return Origin(self._tokens[max(0, self._length - PASSAGE_TOKENS + 1) : self._length], locate)

    # What follows is called by the client, which holds its lock.

    def append(self, tokens: np.ndarray) -> int:
        """Add checked tokens to the history; returns its length before them."""
        start, end = self._length, self._length + len(tokens)
        if end > len(self._tokens):
            grown = np.empty(2 * end, np.int32)
            grown[:start] = self._tokens[:start]
            self._tokens = grown
        self._tokens[start:end] = tokens
        self._length = end
        return start

    def queue(self, start: int, candidates: tuple[bytes, ...] | None = None, hidden: bytes | None = None) -> None:
        """Keep what was appended at `start`, with what came along, for the server, if that has the session."""
        if self.seat is not None:
            tokens = pack_int32(self._tokens[start : self._length])
            self.seat.unsent.append(Commit(start, tokens, candidates, hidden))

    def cut(self, length: int) -> None:
        """Shorten the history, and queue the truncation if the server has the session."""
        self._tokens = self._tokens.copy()  # what is appended now must not overwrite what trees were drafted from
        self._length = length
        self.prompt_length = min(self.prompt_length, length)
        if self.seat is not None:
            self.seat.unsent.append(length)
