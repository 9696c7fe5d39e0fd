"""What one message asks for: its steps are done in order, and the trees and errors go into the reply.

The whole of the server's dealings with the drafter is here: open, commit, truncate, draft, close. An error belongs to
one session: it is reported, the rest of that session's steps in the message are skipped, and every other session goes
on as if nothing had happened. A session whose drafter raised something unforeseen is dropped, as its state is unknown.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.errors import SessionClosedError
from redraft.server.session_table import HeldSession, StreamSessions
from redraft.server.step_columns import check_once_each, commit_steps, read_commits, write_trees
from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import join_float32, join_int32, pack_float32, pack_int32, unpack_float32, unpack_int32

__all__ = ["Activity", "StepError", "answer", "close_quietly", "expected_microseconds", "read_steps"]

_log = logging.getLogger("redraft.server")


_NO_TREES = [np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8)]
SEARCH_MICROSECONDS = 500.0  # what a state asks for may take, on a bad day: so it is done beside the event loop


class StepError(Exception):
    """A step that cannot be done; `code` is a SessionErrorCode."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Activity:
    """What the server has done since it started; metrics are read from here."""

    SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)  # upper bounds of the buckets

    messages: int = 0
    trees: int = 0
    nodes: int = 0
    committed_tokens: int = 0
    opened: int = 0
    expired: int = 0
    errors: Counter = field(default_factory=Counter)  # by SessionErrorCode
    seconds: float = 0.0
    by_seconds: list[int] = field(default_factory=lambda: [0] * (len(Activity.SECONDS) + 1))

    def answered(self, seconds: float) -> None:
        self.messages += 1
        self.seconds += seconds
        self.by_seconds[bisect_left(self.SECONDS, seconds)] += 1


class Asked(NamedTuple):
    """What a message asks for, in this order: steps (session id, name of the action, its fields); a CommitBatch; a DraftBatch."""

    steps: list[tuple[int, str, object]]
    commits: object | None = None
    drafts: object | None = None


def read_steps(message) -> Asked:
    """What a DecodeRequest or StepRequest asks for."""
    steps = []
    for step in message.steps:
        action = step.WhichOneof("action")
        steps.append((step.session_id, action, getattr(step, action) if action else None))
    if isinstance(message, pb.StepRequest):
        return Asked(steps)
    commits = message.commit_batch if message.HasField("commit_batch") else None
    return Asked(steps, commits, message.draft_batch if message.HasField("draft_batch") else None)


def expected_microseconds(stream: StreamSessions, asked: Asked) -> float:
    """About how long the steps will take: measured on one machine, good enough to tell the short from the long."""
    expected = 40.0 * len(asked.steps)
    if asked.commits is not None:
        expected += 40.0 * len(asked.commits.session_ids) + 1.5 * (len(asked.commits.tokens) // 4)
    if asked.drafts is not None:
        expected += 40.0 * len(asked.drafts.session_ids)
    for session_id, action, fields in asked.steps:
        if action == "commit":
            expected += 1.5 * (len(fields.tokens) // 4) + (SEARCH_MICROSECONDS if fields.hidden else 0.0)
        elif action == "open":
            expected += 0.3 * (len(fields.prompt) // 4)
        elif action == "truncate":  # builds the session anew
            expected += 0.3 * fields.length
        elif action == "close" and session_id in stream.sessions:
            expected += 0.5 * stream.sessions[session_id].output_length
    return expected


def answer(
    drafter, stream: StreamSessions, asked: Asked, reply, activity: Activity, beside: Executor | None = None
) -> None:
    """Do what is `asked` (from `read_steps`) for the sessions of `stream`; add trees and errors to `reply`.

    Commits, or drafts, that follow each other are one call of the drafter. `beside`: where it may do half of the drafts.
    """
    message = _Message(drafter, stream, reply, activity, beside)
    for action, run in _runs(asked.steps):
        if action == "commit":
            message.commit(run)
        elif action == "draft":
            message.draft(run)
        else:
            message.do(action, run)
    if asked.commits is not None:
        message.commit_batch(asked.commits)
    if asked.drafts is not None:
        message.draft_batch(asked.drafts)


class _Message:
    """One message being answered: sessions that have failed in it take no further part."""

    def __init__(self, drafter, stream: StreamSessions, reply, activity: Activity, beside: Executor | None) -> None:
        self._drafter, self._stream, self._beside = drafter, stream, beside
        self._reply, self._activity = reply, activity
        self._failed: set[int] = set()

    def commit(self, run) -> None:
        """Commit to the sessions of a run, whose arrays are joined as bytes and looked at once."""
        ids, sessions, sizes, parts, states = [], [], [], [], []
        for session_id, fields in run:
            if session_id not in self._failed:
                try:
                    session = _session(self._stream, session_id)
                    arrays = _commit_arrays(session, fields)
                    states.append(_hidden(fields.hidden, self._drafter.hidden_size) if fields.hidden else None)
                except Exception as error:  # noqa: BLE001 - whatever it is, the other sessions go on
                    self._report(session_id, "commit", error)
                    continue
                tokens, last, _, numbers, _ = arrays
                sizes.append((len(tokens) // 4, len(last) // 4, len(numbers) // 4))
                ids.append(session_id)
                sessions.append(session)
                parts.append(arrays)
        if ids:
            *int32, probs = zip(*parts)
            states = states if any(state is not None for state in states) else None
            self._commit(ids, sessions, sizes, *map(join_int32, int32), join_float32(probs), states)

    def commit_batch(self, batch) -> None:
        """Commit to the sessions of a CommitBatch; where one of them cannot be committed to, as though by steps."""
        try:
            columns = read_commits(batch)
        except ValueError as error:
            self._report_all(batch.session_ids, "commit", error)
            return
        sessions = self._sessions_at(columns.ids, columns.starts)
        if sessions is None:
            self.commit(commit_steps(columns))
        elif sessions:
            self._commit(columns.ids, sessions, columns.sizes, *columns.arrays())

    def _sessions_at(self, ids: list[int], lengths: list[int]) -> list | None:
        """The drafter's sessions, all of them in use and of these lengths; None if one is not."""
        held_by, now, sessions = self._stream.sessions, self._stream.table.clock(), []
        if not self._failed.isdisjoint(ids):
            return None
        for session_id, length in zip(ids, lengths):
            held = held_by.get(session_id)
            if held is None or held.session.closed or held.session.length != length:
                return None
            held.last_used = now
            sessions.append(held.session)
        return sessions

    def _commit(self, ids, sessions, sizes, *arrays) -> None:
        """Commit joined arrays, as `Drafter.commit_joined` takes them."""
        try:
            answers = self._drafter.commit_joined(sessions, sizes, *arrays)
        except Exception as error:  # noqa: BLE001 - the state of all these sessions is unknown, others go on
            answers = [error] * len(ids)
        for session_id, size, error in zip(ids, sizes, answers):
            if error is not None:
                self._report(session_id, "commit", error)
            else:
                self._activity.committed_tokens += size[0]

    def draft(self, run) -> None:
        """Draft for the sessions of a run, a tree in a message of its own for each."""
        ids, requests = [], []
        for session_id, fields in run:
            if session_id not in self._failed:
                try:
                    requests.append(_draft_request(self._stream, session_id, fields))
                    ids.append(session_id)
                except Exception as error:  # noqa: BLE001 - whatever it is, the other sessions go on
                    self._report(session_id, "draft", error)
        ids, places, (tokens, parents, probs, sources) = self._draft(ids, requests)
        tokens, parents, probs = pack_int32(tokens), pack_int32(parents), pack_float32(probs)
        sources, add = sources.tobytes(), self._reply.trees.add
        for session_id, (begin, end) in zip(ids, places):
            four = slice(4 * begin, 4 * end)
            add(
                session_id=session_id,
                tokens=tokens[four],
                parents=parents[four],
                probs=probs[four],
                sources=sources[begin:end],
            )

    def draft_batch(self, batch) -> None:
        """Draft for the sessions of a DraftBatch; all trees go into one TreeBatch."""
        trees = self._reply.tree_batch
        trees.SetInParent()
        try:
            check_once_each("draft_batch", batch.session_ids)
        except ValueError as error:
            self._report_all(batch.session_ids, "draft", error)
            return
        limits = _limits(batch)
        ids, requests = [], []
        for session_id in batch.session_ids:
            if session_id not in self._failed:
                try:
                    requests.append((_session(self._stream, session_id), *limits, None))
                    ids.append(session_id)
                except StepError as error:
                    self._report(session_id, "draft", error)
        ids, places, arrays = self._draft(ids, requests)
        if ids:
            write_trees(trees, ids, places, *arrays)

    def _draft(self, ids, requests) -> tuple[list[int], list[tuple[int, int]], list[np.ndarray]]:
        """The sessions that could be drafted for, where each one's tree stands in the arrays of all, and these."""
        if not ids:
            return [], [], _NO_TREES
        try:
            places, *arrays = self._drafter.draft_joined(requests, self._beside)
        except Exception as error:  # noqa: BLE001 - the state of all these sessions is unknown, others go on
            places, arrays = [error] * len(ids), _NO_TREES
        drafted = [], []
        for session_id, place in zip(ids, places):
            if isinstance(place, Exception):
                self._report(session_id, "draft", place)
            else:
                drafted[0].append(session_id)
                drafted[1].append(place)
                self._activity.nodes += place[1] - place[0]
        self._activity.trees += len(drafted[0])
        return *drafted, arrays

    def do(self, action: str, run) -> None:
        """Open, truncate or close the sessions of a run, one by one."""
        for session_id, fields in run:
            if session_id not in self._failed:
                try:
                    if action not in _ACTIONS:
                        text = "the step has no action that this server knows"
                        raise StepError(pb.SESSION_ERROR_CODE_INVALID_ARGUMENT, text)
                    _ACTIONS[action](self._drafter, self._stream, session_id, fields, self._activity)
                except Exception as error:  # noqa: BLE001 - whatever it is, the other sessions go on
                    self._report(session_id, action, error)

    def _report_all(self, ids, action: str, error: Exception) -> None:
        """Report the error of every session that has not failed yet."""
        for session_id in dict.fromkeys(ids):
            if session_id not in self._failed:
                self._report(session_id, action, error)

    def _report(self, session_id: int, action: str, error: Exception) -> None:
        """Add an error to the reply; a session that failed for no fault of the caller's is dropped."""
        self._failed.add(session_id)
        if isinstance(error, StepError):
            code, text = error.code, str(error)
        elif isinstance(error, (TypeError, ValueError)):
            code, text = pb.SESSION_ERROR_CODE_INVALID_ARGUMENT, str(error)
        else:
            _log.error("session %d: %s failed, the session is dropped", session_id, action, exc_info=error)
            code, text = pb.SESSION_ERROR_CODE_INTERNAL, f"{action} failed: {type(error).__name__}: {error}"
            close_quietly(self._stream.remove(session_id))
        self._activity.errors[code] += 1
        self._reply.errors.add(session_id=session_id, code=code, message=f"session {session_id}: {text}")


def _runs(steps) -> Iterator[tuple[str, list]]:
    """(action, [(session id, fields), ...]) of steps that follow each other, no session twice in one."""
    run, ids, present = [], set(), None
    for session_id, action, fields in steps:
        if action != present or session_id in ids:
            if run:
                yield present, run
            run, ids, present = [], set(), action
        run.append((session_id, fields))
        ids.add(session_id)
    if run:
        yield present, run


def close_quietly(held: HeldSession | None) -> None:
    """Close a session that was taken out of its stream; a failure is logged, as nobody is there to be told."""
    if held is None:
        return
    try:
        held.session.close()
    except Exception:  # noqa: BLE001 - nobody is there to be told
        _log.exception("a session could not be closed")


def _open(drafter, stream: StreamSessions, session_id: int, fields, activity: Activity) -> None:
    if session_id in stream.sessions:
        raise StepError(pb.SESSION_ERROR_CODE_ALREADY_OPEN, "the id is open already on this stream; close it first")
    prompt = unpack_int32(fields.prompt, "prompt")
    namespace = fields.namespace or "default"
    if not stream.add(session_id, lambda: drafter.open(prompt, namespace=namespace)):
        raise StepError(
            pb.SESSION_ERROR_CODE_TOO_MANY_SESSIONS,
            f"the server already holds its limit of {stream.table.max_sessions} sessions",
        )
    activity.opened += 1


def _commit_arrays(session, fields) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """Tokens and the four arrays of candidates, of lengths that fit; what is in them is for the drafter to check."""
    if fields.start != session.length:
        kind = "leaves a gap" if fields.start > session.length else "repeats what is there"
        raise StepError(
            pb.SESSION_ERROR_CODE_POSITION_MISMATCH,
            f"the commit starts at {fields.start} and {kind}, the session has {session.length} tokens",
        )
    tokens, there = fields.tokens, fields.candidates
    last, previous, ids, probs = there.tokens, there.previous, there.ids, there.probs
    for array, name in ((tokens, "tokens"), (last, "candidates.tokens"), (ids, "candidates.ids")):
        if len(array) % 4:
            raise ValueError(f"{name}: wanted a multiple of 4 bytes (int32), got {len(array)} bytes")
    rows = len(last) // 4
    if len(ids) // 4 % rows if rows else ids:
        raise ValueError(f"candidates.ids: wanted a multiple of {rows} (one row per position), got {len(ids) // 4} ids")
    if len(probs) != len(ids):
        raise ValueError(f"candidates.probs: wanted {len(ids) // 4} values like ids, got {len(probs)} bytes")
    if len(previous) != len(last):
        raise ValueError(f"candidates.previous: wanted {rows} tokens like candidates.tokens, got {len(previous)} bytes")
    return tokens, last, previous, ids, probs


def _truncate(drafter, stream: StreamSessions, session_id: int, fields, activity: Activity) -> None:
    _session(stream, session_id).truncate(fields.length)


def _draft_request(stream: StreamSessions, session_id: int, fields) -> tuple:
    """The request of `Drafter.draft_joined`."""
    session = _session(stream, session_id)
    return session, *_limits(fields), _proposal(fields.proposal) if fields.HasField("proposal") else None


def _limits(fields) -> tuple[int | None, float | None]:
    """max_nodes and min_prob of a DraftStep or DraftBatch, None where they are not set."""
    return (
        fields.max_nodes if fields.HasField("max_nodes") else None,
        fields.min_prob if fields.HasField("min_prob") else None,
    )


def _close(drafter, stream: StreamSessions, session_id: int, fields, activity: Activity) -> None:
    held = stream.remove(session_id)
    if held is not None:
        held.session.close()


_ACTIONS = {"open": _open, "truncate": _truncate, "close": _close}


def _session(stream: StreamSessions, session_id: int):
    """The drafter's session behind an id; being asked for, it is not idle. Raises StepError if there is none."""
    held = stream.sessions.get(session_id)
    if held is None:
        raise StepError(
            pb.SESSION_ERROR_CODE_UNKNOWN_SESSION,
            "not open on this stream: never opened, closed,"
            f" or idle for more than {stream.table.idle_seconds:g} seconds",
        )
    if held.session.closed:
        stream.remove(session_id)
        raise StepError(pb.SESSION_ERROR_CODE_UNKNOWN_SESSION, str(SessionClosedError("closed by the server")))
    held.last_used = stream.table.clock()
    return held.session


def _hidden(data: bytes, size: int) -> np.ndarray:
    """float32[m, size]; the drafter's session checks what is in it, and refuses all where size is 0."""
    hidden = unpack_float32(data, "hidden")
    if size and len(hidden) % size:
        raise ValueError(f"hidden: wanted a multiple of {size} numbers, got {len(hidden)}")
    return hidden.reshape(-1, size) if size else hidden


def _proposal(fields):
    """A DraftTree, or int32[n] where the proposal is a chain; the drafter's session checks it."""
    tokens = unpack_int32(fields.tokens, "proposal.tokens")
    if not fields.parents:
        return tokens
    return DraftTree(
        tokens,
        unpack_int32(fields.parents, "proposal.parents"),
        unpack_float32(fields.probs, "proposal.probs"),
        np.full(len(tokens), Source.CALLER, np.uint8),
    )
