"""Steps into messages: what a client has to say is put together here, packed, and sent.

A message may not exceed the server's limit. What does not fit in goes ahead in messages of its own, whose replies nobody
waits for; the stream keeps the order.
"""

from __future__ import annotations

from redraft.client.connection import Connection, Sent
from redraft.retrieval.draft_tree import DraftTree
from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import pack_float32, pack_int32

__all__ = ["Commit", "Outgoing"]

_STEP_BYTES = 64  # what a step's framing takes in a message, generously
_DEFAULT_LIMIT = 4 << 20  # gRPC's own, for a server that names none


class Commit:
    """A commit, packed for the wire: at position `start`, tokens, the arrays of `Candidates` or none, hidden states.

    size: bytes on the wire, more or less.
    """

    __slots__ = ("candidates", "hidden", "size", "start", "tokens")

    def __init__(
        self, start: int, tokens: bytes, candidates: tuple[bytes, ...] | None = None, hidden: bytes | None = None
    ) -> None:
        self.start, self.tokens, self.candidates, self.hidden = start, tokens, candidates, hidden
        self.size = len(tokens)
        if candidates is not None:
            self.size += sum(map(len, candidates))
        if hidden is not None:
            self.size += len(hidden)

    def drop_candidates(self) -> None:
        """Leave out what the target thought likely, and its states: the tokens must arrive."""
        self.candidates, self.hidden, self.size = None, None, len(self.tokens)

    def drop_hidden(self) -> None:
        """Leave out the target's states."""
        self.size -= len(self.hidden)
        self.hidden = None


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
        fields.start, fields.tokens = commit.start, commit.tokens
        if commit.candidates is not None:
            there = fields.candidates
            there.tokens, there.previous, there.ids, there.probs = commit.candidates
        if commit.hidden is not None:
            fields.hidden = commit.hidden

    def add_truncate(self, remote: int, length: int) -> None:
        """Cut session `remote` back."""
        self._step(remote, 0).truncate.length = length

    def add_close(self, remote: int) -> None:
        """Close session `remote`."""
        self._step(remote, 0).close.SetInParent()

    def add_batch(self, remotes: list[int], starts: list[int], columns: tuple, max_nodes, min_prob) -> bool:
        """Commit to, and ask trees for, the sessions `remotes`; False, and nothing is done, if that does not fit in a message.

        starts: the sessions' lengths before. columns: as in `CheckedCommits`.
        """
        sizes, *arrays = columns
        size = sum([array.nbytes for array in arrays]) + _STEP_BYTES * len(remotes)
        if not self.fits(size):
            return False
        self._make_room(size)
        lengths, rows, numbers = zip(*sizes)
        commits = self._request.commit_batch
        commits.session_ids.extend(remotes)
        commits.starts.extend(starts)
        commits.lengths.extend(lengths)
        commits.rows.extend(rows)
        commits.widths.extend([number // row if row else 0 for number, row in zip(numbers, rows)])
        tokens, last, previous, ids, probs = arrays
        commits.tokens = pack_int32(tokens)
        candidates = commits.candidates
        candidates.tokens, candidates.previous = pack_int32(last), pack_int32(previous)
        candidates.ids, candidates.probs = pack_int32(ids), pack_float32(probs)
        drafts = self._request.draft_batch
        drafts.session_ids.extend(remotes)
        if max_nodes is not None:
            drafts.max_nodes = max_nodes
        if min_prob is not None:
            drafts.min_prob = min_prob
        return True

    def add_drafts(self, drafts, max_nodes: int | None, min_prob: float | None) -> None:
        """Ask for trees, all in one message. drafts: (seat, proposal) each, a proposal as for `Session.draft`."""
        self._make_room(sum([_STEP_BYTES + (0 if proposal is None else 12 * len(proposal)) for _, proposal in drafts]))
        fields = pb.DraftStep(max_nodes=max_nodes, min_prob=min_prob)
        add = self._request.steps.add
        for seat, proposal in drafts:
            step = add(session_id=seat.remote, draft=fields)
            if isinstance(proposal, DraftTree):
                proposed = step.draft.proposal
                proposed.tokens = pack_int32(proposal.tokens)
                proposed.parents = pack_int32(proposal.parents)
                proposed.probs = pack_float32(proposal.probs)
            elif proposal is not None:
                step.draft.proposal.tokens = pack_int32(proposal)

    def send(self) -> Sent | None:
        """Send what is left; None if there is nothing."""
        if not self._size:
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
