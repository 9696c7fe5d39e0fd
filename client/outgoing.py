"""Steps into messages: what a client has to say is put together here, packed, and sent.

A message may not exceed the server's limit. What does not fit in goes ahead in messages of its own, whose replies nobody
waits for; the stream keeps the order.
"""

from __future__ import annotations

from dataclasses import dataclass

from redraft.client.connection import Connection, Sent
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.draft_tree import DraftTree
from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import pack_float32, pack_int32

__all__ = ["Commit", "Outgoing"]

_STEP_BYTES = 64  # what a step's framing takes in a message, generously
_DEFAULT_LIMIT = 4 << 20  # gRPC's own, for a server that names none


@dataclass
class Commit:
    """A commit, packed for the wire: at position `start`, tokens, the fields of the message Candidates, hidden states."""

    start: int
    tokens: bytes
    candidates: dict[str, bytes] | None = None
    hidden: bytes = b""

    @classmethod
    def packed(cls, start: int, tokens, candidates: Candidates | None, hidden) -> Commit:
        """From checked arrays, which are copied."""
        fields = None
        if candidates is not None:
            fields = {
                "tokens": pack_int32(candidates.tokens),
                "previous": pack_int32(candidates.previous),
                "ids": pack_int32(candidates.ids),
                "probs": pack_float32(candidates.probs),
            }
        return cls(start, pack_int32(tokens), fields, b"" if hidden is None else pack_float32(hidden))

    @property
    def size(self) -> int:
        """Bytes on the wire, more or less."""
        candidates = sum(map(len, self.candidates.values())) if self.candidates else 0
        return len(self.tokens) + candidates + len(self.hidden)


class Outgoing:
    """A message being put together, for one connection. The client's lock is held."""

    def __init__(self, connection: Connection) -> None:
        self.total = 0  # bytes of all messages
        self.connection = connection
        self._limit = connection.info.max_message_bytes or _DEFAULT_LIMIT
        self._start()

    def _start(self) -> None:
        self._request, self._opened, self._size = pb.DecodeRequest(), [], 0

    def fits(self, size: int) -> bool:
        """Whether a step of so many bytes fits into a message at all."""
        return size + 2 * _STEP_BYTES <= self._limit

    def add_open(self, seat, prompt: bytes, namespace: str) -> None:
        """Open a session under `seat.remote`; the seat is told when the server has done it."""
        fields = self._step(seat.remote, len(prompt) + len(namespace)).open
        fields.prompt = prompt
        fields.namespace = namespace
        self._opened.append(seat)

    def add_commit(self, remote: int, commit: Commit) -> None:
        """Commit to session `remote`."""
        fields = self._step(remote, commit.size).commit
        fields.start = commit.start
        fields.tokens = commit.tokens
        if commit.candidates is not None:
            candidates = fields.candidates
            for name, data in commit.candidates.items():
                setattr(candidates, name, data)
        if commit.hidden:
            fields.hidden = commit.hidden

    def add_truncate(self, remote: int, length: int) -> None:
        """Cut session `remote` back."""
        self._step(remote, 0).truncate.length = length

    def add_close(self, remote: int) -> None:
        """Close session `remote`."""
        self._step(remote, 0).close.SetInParent()

    def add_drafts(self, drafts, max_nodes: int | None, min_prob: float | None) -> None:
        """Ask for trees, all in one message. drafts: (seat, proposal) each, a proposal as for `Session.draft`."""
        self._make_room(sum(_STEP_BYTES + (0 if proposal is None else 12 * len(proposal)) for _, proposal in drafts))
        for seat, proposal in drafts:
            fields = self._request.steps.add(session_id=seat.remote).draft
            fields.SetInParent()
            if max_nodes is not None:
                fields.max_nodes = max_nodes
            if min_prob is not None:
                fields.min_prob = min_prob
            if isinstance(proposal, DraftTree):
                fields.proposal.tokens = pack_int32(proposal.tokens)
                fields.proposal.parents = pack_int32(proposal.parents)
                fields.proposal.probs = pack_float32(proposal.probs)
            elif proposal is not None:
                fields.proposal.tokens = pack_int32(proposal)

    def send(self) -> Sent | None:
        """Send what is left; None if there is nothing."""
        if not self._request.steps:
            return None
        sent = self.connection.send(self._request, self._opened)
        self._start()
        return sent

    def _step(self, remote: int, size: int):
        self._make_room(size)
        return self._request.steps.add(session_id=remote)

    def _make_room(self, size: int) -> None:
        if self._size + size + _STEP_BYTES > self._limit:
            self.send()
        self._size += size + _STEP_BYTES
        self.total += size + _STEP_BYTES
