"""Drafting by a server, with the interface of the in-process `Drafter`: swap one for the other and nothing else changes.

Drafting must never hurt. Every call here comes back within its deadline: when the server is late, gone, wrong or was
never there, the session drafts by itself, from its own copy of the history with n-gram lookup, and the generated text is
the same, as the verifier decides what is kept. The rules:

- One stream per client. A step of a whole batch is one message and one reply; commits travel with the next draft.
- A reply that comes after its deadline is thrown away. While the server owes one it is not asked again, so a late
  server costs one deadline, not one per step; after several failures in a row it is asked at growing intervals.
- Connecting happens in a thread of its own. When a stream is there again, each session is opened anew from its history
  with its next draft and asks the server from then on; nobody waits for that.
- Every tree is checked before it is returned.
- The caller's own mistakes (ids out of range, a closed session) raise at once, as they do in process.

Forking: gRPC does not survive it. Make the client in the process that uses it (in a worker's own initialisation, say).
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from dataclasses import replace

import grpc
import numpy as np

from redraft.client.asking import ask, queue_commits
from redraft.client.checked_commits import CheckedCommits, checked_commits
from redraft.client.circuit_breaker import CircuitBreaker
from redraft.client.client_session import ClientSession
from redraft.client.client_stats import ClientStats
from redraft.client.connection import Connection, Sent
from redraft.client.connection_keeper import ConnectionKeeper
from redraft.client.outgoing import Outgoing
from redraft.client.replies import compile_checks, read_tree_batch, read_trees
from redraft.client.seating import Seating, leave
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import DraftTree
from redraft.retrieval.errors import IndexFormatError, RedraftError
from redraft.retrieval.ngram import NgramDrafter
from redraft.retrieval.provenance import Occurrence
from redraft.retrieval.state_map import StateMap, StateOrigin
from redraft.retrieval.tokens import as_count, as_probability, as_step, as_tokens
from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import pack_int32

__all__ = ["DraftClient"]

_log = logging.getLogger("redraft.client")

_REQUIRE_SECONDS = 10.0  # how long `require=True` waits for a server
_ADMIN_SECONDS = 120.0
_POST_COMMITS = 64  # commits that have waited for a draft go without one
_MOST_UNSENT = 1024  # commits kept for a server that does not answer, before the session is rather opened anew


class DraftClient:
    """Asks a draft server at `target`, `unix:PATH` or `HOST:PORT`.

    Args:
        target: where the server listens.
        config: `vocab_size`, `max_nodes`, `min_prob` and `tokenizer_fingerprint` as in process; a server that has
            another vocabulary or fingerprint is not used. None: what the server says.
        timeout: seconds that a step may wait for the server.
        open_timeout: the same for the first draft of a session, which waits for the prompt to be read.
        require: wait for the server now, and raise ConnectionError if none is there.
        credentials: `grpc.ssl_channel_credentials(...)` for a server with TLS.

    Threads may share a client; one session belongs to one thread at a time.
    """

    def __init__(
        self,
        target: str,
        config: DraftConfig | None = None,
        *,
        timeout: float = 0.02,
        open_timeout: float = 0.5,
        require: bool = False,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        if not (timeout > 0 and open_timeout > 0):
            raise ValueError(f"wanted timeouts above 0 seconds, got timeout={timeout}, open_timeout={open_timeout}")
        self.target = target
        self.stats = ClientStats()
        self._given_config = config
        self._config = config or DraftConfig()
        self._timeout, self._open_timeout = timeout, open_timeout
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._breaker = CircuitBreaker()
        self._session_ids = itertools.count(1)
        self._closed = False
        self._seating = Seating(self.stats)
        self._compiled = threading.Event()
        self._ngram = NgramDrafter(self._config)
        threading.Thread(target=self._compile, name="redraft-client-compiler", daemon=True).start()
        self._keeper = ConnectionKeeper(
            target, credentials, self._lock, self._breaker, self._mismatch, self._on_connect, self._on_reply
        )
        if require and not self.wait_until_ready(_REQUIRE_SECONDS):
            self.close()
            raise ConnectionError(f"no draft server to be used at {target}: {self._keeper.trouble}")

    # The interface of a drafter.

    @property
    def config(self) -> DraftConfig:
        """The config given, or what the server says of itself (defaults until it is connected)."""
        return self._config

    @property
    def states(self) -> tuple[StateMap, StateOrigin] | None:
        """How hidden states that commits bring are to be projected, and whose they must be, as `Drafter.states` says it.

        None while no server is connected, and where it takes none. A server with another map that comes later gets no states.
        """
        with self._lock:
            if self._keeper.current is not None:
                self._seating.learn_states(self._keeper.current.info)
            return self._seating.states

    @property
    def hidden_size(self) -> int:
        """Numbers in a projected hidden state; 0 where `states` is None."""
        states = self.states
        return states[0].dimension if states is not None else 0

    def open(self, prompt_ids, namespace: str = "default") -> ClientSession:
        """Start a session. Does not wait: the server reads the prompt while the target model does."""
        self._check_usable()
        if not isinstance(namespace, str):
            raise TypeError(f"namespace: wanted a string, got {type(namespace).__name__}")
        prompt = as_tokens(prompt_ids, self._config.vocab_size, what="prompt_ids")
        session = ClientSession(self, next(self._session_ids), prompt, namespace)
        with self._lock:
            if self._obstacle() is None:
                outgoing = Outgoing(self._keeper.current)
                self._seating.take(outgoing, session, reopened=False)
                outgoing.send()
        return session

    def step(self, requests) -> list[DraftTree]:
        """Commit and draft for a batch, in one round trip.

        requests: `(session, tokens[, candidates[, hidden[, proposal]]])` each, every session at most once. Returns
        the trees in the same order. Raises before anything is committed if any request is wrong.
        """
        self._check_usable()
        sessions, commits, proposals = [], [], []
        for request in requests:
            session, tokens, candidates, hidden, proposal = as_step(request, ClientSession)
            if session._client is not self:
                raise ValueError(f"session {session.id} belongs to another client")
            session.check_open()
            sessions.append(session)
            commits.append((tokens, candidates, hidden))
            proposals.append(None if proposal is None else self.checked_proposal(proposal))
        if len(set(sessions)) != len(sessions):
            raise ValueError("step: a session may come only once in a batch")
        checked = checked_commits(commits, self._config.vocab_size, compiled=self._compiled.is_set())
        return self.draft_for(sessions, None, None, proposals, checked)

    def load_index(self, path) -> None:
        """Let the server draft from one more index; `path` is one of its own machine."""
        self._administer("LoadIndex", pb.LoadIndexRequest(path=os.fspath(path)))

    def unload_index(self, path) -> None:
        """Let the server draft from an index no longer."""
        self._administer("UnloadIndex", pb.UnloadIndexRequest(path=os.fspath(path)))

    @property
    def index_paths(self) -> list[str]:
        """Indexes that the server drafts from."""
        return list(self._administer("ListIndexes", pb.ListIndexesRequest()).paths)

    def locate(self, passages) -> list[Occurrence | None]:
        """Where passages occur in the indexes that the server has open; see `DraftTree.provenance`, the way to ask.

        passages: int32-like[n] each, the token in question last. Waits for the server, other than drafting does.
        """
        vocab_size = self._config.vocab_size
        packed = [pack_int32(as_tokens(passage, vocab_size, what="passages")) for passage in passages]
        reply = self._call("drafting", "Locate", pb.LocateRequest(passages=packed), "this server is too old for that")
        return [
            Occurrence(place.index_path, place.document, place.offset) if place.index_path else None
            for place in reply.occurrences
        ]

    def forget(self, namespace: str) -> None:
        """Let the server drop all that it learned in a namespace."""
        self._administer("ForgetNamespace", pb.ForgetNamespaceRequest(namespace=namespace))

    def close(self) -> None:
        """End the stream, and with it all sessions; closing twice is fine."""
        self._closed = True
        self._keeper.close()

    def __enter__(self) -> DraftClient:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    # Beyond it.

    @property
    def connected(self) -> bool:
        """Whether a server answers."""
        return self._keeper.connected.is_set()

    def wait_until_ready(self, seconds: float) -> bool:
        """Wait for the server to be connected (and the fallback to be compiled); False if it is not by then."""
        deadline = time.monotonic() + seconds
        return self._keeper.connected.wait(seconds) and self._compiled.wait(max(0.0, deadline - time.monotonic()))

    # What sessions call.

    def checked_proposal(self, proposal):
        """A DraftTree, int32[n] or None; raises TypeError or ValueError."""
        if proposal is None:
            return None
        if isinstance(proposal, DraftTree):
            return proposal.check(vocab_size=self._config.vocab_size)
        return as_tokens(proposal, self._config.vocab_size, what="proposal")

    def commit_session(self, session: ClientSession, tokens, candidates, hidden) -> None:
        """Take in a commit; raises TypeError or ValueError. Those that wait for no draft are sent once there are many."""
        commits = [(tokens, candidates, hidden)]
        checked = checked_commits(commits, self._config.vocab_size, compiled=self._compiled.is_set())
        with self._lock:
            queue_commits([session], checked)
            if session.seat is not None and len(session.seat.unsent) >= _POST_COMMITS:
                self._post_unsent(session)

    def truncate_session(self, session: ClientSession, length: int) -> None:
        with self._lock:
            session.cut(length)

    def close_session(self, session: ClientSession) -> None:
        """Tell the server, if it has the session; nobody waits for that."""
        with self._lock:
            seat, connection = session.seat, self._keeper.current
            if seat is not None and seat.connection is connection and connection.alive:
                outgoing = Outgoing(connection)
                self._seating.tell(outgoing, session)
                outgoing.add_close(seat.remote)
                outgoing.send()
            leave(session)

    def draft_for(
        self, sessions, max_nodes: int | None, min_prob: float | None, proposals, commits: CheckedCommits | None = None
    ) -> list[DraftTree]:
        """One round: take in a commit of each session, if there are any, ask the server for a tree for each, and draft
        for those that it does not answer."""
        self._check_usable()
        max_nodes, min_prob = self._limits(max_nodes, min_prob)
        connection = self._keeper.current
        if connection is not None:
            connection.take_in()
        with self._lock:
            connection, obstacle = self._keeper.current, self._obstacle()
            if obstacle is None:
                question = ask(connection, self._seating, sessions, proposals, max_nodes, min_prob, commits)
                sent, asked, reasons, patient = question
            else:
                sent, asked, reasons = None, {}, [obstacle] * len(sessions)
                if commits is not None:
                    queue_commits(sessions, commits)
        found = {}
        if sent is not None:
            budget = connection.info.max_nodes if max_nodes is None else max_nodes
            found, failures = self._collect(connection, sent, asked, budget, patient)
            reasons += failures
        self.stats.trees += len(sessions)
        self.stats.served += len(found)
        if len(found) == len(sessions):
            return [found[remote] for remote in asked]
        self.stats.fallbacks.update(reasons)
        trees = {asked[remote]: tree for remote, tree in found.items()}
        return [
            trees[session] if session in trees else self._fall_back(session, max_nodes, min_prob, proposal)
            for session, proposal in zip(sessions, proposals)
        ]

    # One round, with the lock held.

    def _obstacle(self) -> str | None:
        """Why the server cannot be asked now; None if it can."""
        if self._keeper.current is None or not self._keeper.current.alive:
            return "unconnected"
        if self._keeper.current.behind:
            return "behind"
        if not self._breaker.allows():
            return "paused"
        return None

    def _post_unsent(self, session: ClientSession) -> None:
        """Send commits that nobody asks a draft for; give the seat up if they cannot be sent for long."""
        if self._obstacle() is None and session.seat.connection is self._keeper.current:
            outgoing = Outgoing(self._keeper.current)
            self._seating.tell(outgoing, session)
            outgoing.send()
        elif len(session.seat.unsent) > _MOST_UNSENT:
            leave(session)

    # One round, without the lock.

    def _collect(self, connection: Connection, sent: Sent, asked: dict[int, ClientSession], budget: int, patient: bool):
        """Wait for the reply; returns the sound trees by remote id, and reasons for the sessions without one."""
        locate = self.locate
        origins = {remote: session.origin(locate) for remote, session in asked.items()}  # while the server works
        try:
            reply = connection.wait(sent, self._open_timeout if patient else self._timeout)
        except queue.Empty:
            if not connection.opening:  # behind another session's long prompt it is no wonder
                self._breaker.failure()
            return {}, ["late"] * len(asked)
        if reply is None:
            return {}, ["lost"] * len(asked)
        read, trees = (read_tree_batch, reply.tree_batch) if reply.HasField("tree_batch") else (read_trees, reply.trees)
        found = read(trees, origins, budget, self._config.vocab_size, compiled=self._compiled.is_set())
        reasons = []
        if len(found) < len(asked):
            refused = {error.session_id for error in reply.errors}
            reasons = ["session" if remote in refused else "invalid" for remote in asked if remote not in found]
        if "invalid" in reasons:
            _log.warning("the draft server at %s sent a tree that is broken, or none", self.target)
            self._breaker.failure()
        elif found:
            self._breaker.success()
        for remote in found:
            if (retry := asked[remote].retry).failures:
                retry.success()
        return found, reasons

    def _fall_back(self, session: ClientSession, max_nodes, min_prob, proposal) -> DraftTree:
        """Draft without the server. Until the kernel is compiled there is only the caller's own proposal."""
        history = session.tokens if self._compiled.is_set() else session.tokens[:0]
        budget = self._config.max_nodes if max_nodes is None else max_nodes
        return self._ngram.open(history).draft(budget, min_prob, proposal)

    def _limits(self, max_nodes: int | None, min_prob: float | None) -> tuple[int | None, float | None]:
        """What to ask for where the caller says nothing; raises ValueError for what makes no sense."""
        given = self._given_config
        if max_nodes is None:
            max_nodes = None if given is None else given.max_nodes
        else:
            max_nodes = as_count(max_nodes, 512, "max_nodes")
        if min_prob is None:
            min_prob = None if given is None else given.min_prob
        else:
            min_prob = as_probability(min_prob, "min_prob")
        return max_nodes, min_prob

    # Replies and connections, in threads of their own.

    def _on_reply(self, connection: Connection, sent: Sent, reply) -> None:
        """Called for every reply, late ones included, with the lock held."""
        self.stats.late_replies += sent.late
        if reply.errors:
            outgoing = Outgoing(connection)
            for error in reply.errors:
                session = connection.seats.get(error.session_id)
                if session is not None:
                    _log.warning("the draft server refused a session: %s", error.message)
                    session.retry.failure()
                    leave(session)
                    outgoing.add_close(error.session_id)
            outgoing.send()
        for seat in sent.opened:
            seat.ready = True

    def _on_connect(self, connection: Connection) -> None:
        """Called for every new connection, with the lock held; sessions find out at their next draft."""
        if self._given_config is None:
            info = connection.info
            self._config = replace(self._config, vocab_size=info.vocab_size or None, max_nodes=info.max_nodes)
        self.stats.connections += 1

    def _mismatch(self, info) -> str | None:
        """Why this server is not ours to use; None if it is."""
        ours = self._given_config
        if ours is None:
            return None
        if ours.vocab_size and info.vocab_size and ours.vocab_size != info.vocab_size:
            return f"its vocabulary has {info.vocab_size} ids, ours {ours.vocab_size}"
        if ours.tokenizer_fingerprint and info.tokenizer_fingerprint not in ("", ours.tokenizer_fingerprint):
            return f"its tokenizer is {info.tokenizer_fingerprint}, ours {ours.tokenizer_fingerprint}"
        return None

    def _compile(self) -> None:
        self._ngram.open(np.array([1, 2, 1], np.int32)).draft()
        compile_checks()
        self._compiled.set()

    def _administer(self, method: str, request):
        return self._call("admin", method, request, "indexes are managed over a Unix socket only")

    def _call(self, service: str, method: str, request, unimplemented: str):
        """A unary call of a service that the connection has, with its errors as ours."""
        connection = self._keeper.current
        if connection is None:
            raise ConnectionError(f"no draft server at {self.target}: {self._keeper.trouble}")
        try:
            return getattr(getattr(connection, service), method)(request, timeout=_ADMIN_SECONDS)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                raise KeyError(error.details()) from None
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise ValueError(error.details()) from None
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise IndexFormatError(error.details()) from None
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise RedraftError(f"{self.target}: {unimplemented}") from None
            raise ConnectionError(f"{self.target}: {error.code().name}: {error.details()}") from None

    def _check_usable(self) -> None:
        if self._closed:
            raise RedraftError("the client is closed")
        if os.getpid() != self._pid:
            raise RedraftError("this client was made before a fork: make one in the process that uses it")
