"""The commits, then the drafts, of a whole batch of sessions: one call of a kernel each, in place of one per session.

What a session's own `commit` and `draft` cost beside their kernels, checks and NumPy's small calls above all, is a
third of a step of many sessions. Here a batch's arrays are joined and checked in one pass, and a kernel goes from
session to session by a list of their bundles' places. The trees are the same, bit for bit, as session after session in
the order given, all commits before any draft. The kernel of commits comes back to Python where a session's arrays are
full, and where an output joins the memory, as the next session may find it there already.

Drafts only read what sessions share, so another thread may do half of them (`beside`).

Every session's error is its own: it is returned in place of a result, nothing of its request is taken in, and the
others go on. This file knows the inside of `Session`; one draft alone is better served by the session itself.
"""

from __future__ import annotations

import contextlib
import itertools
from concurrent.futures import Executor

import numpy as np

from redraft.retrieval import prefix_trie as pt
from redraft.retrieval.best_first import MAX_BUDGET, _workspace_at, draft_tree, learn_tokens
from redraft.retrieval.bundle import int64s
from redraft.retrieval.candidates import NO_LIMIT, Candidates, all_sound, joined
from redraft.retrieval.draft_tree import DraftTree
from redraft.retrieval.errors import RedraftError
from redraft.retrieval.kernel import kernel
from redraft.retrieval.knowledge import recycling_at
from redraft.retrieval.session import RECYCLED_ROWS, SHARE_LAG, SHARE_STEP, Session, _own_candidates, _workspace
from redraft.retrieval.token_recycling import learn_rows, new_table
from redraft.retrieval.tokens import as_count, as_probability, as_tokens

__all__ = ["apart", "commit_all", "commit_joined", "draft_all", "draft_joined"]

OWNERS = 4  # bundles listed per session: its own, its namespace's, the indexes', the caller's draft
# Columns of a commit: its tokens, its rows of candidates and their ids in the joined arrays, the length at which output
# joins the memory; and what the kernel says: the last token's position, tokens learned, position in the memory copied from.
BEGIN, END, ROW, ROWS, WIDTH, ID, SHARE_AT, TAIL, DONE, COPIED_FROM = range(10)
AT_ONCE = 16  # commits under one lock
WORTH_A_THREAD = 8  # drafts: the hop to another thread and back takes as long as one or two
_MISTAKES = (RedraftError, TypeError, ValueError)
_NO_IDS, _NO_PROBS, _NO_SOURCES = np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8)


# --- commits ---------------------------------------------------------------------------------------------------------
def commit_all(requests) -> list[Exception | None]:
    """Commit to many sessions of one drafter, in order. requests: (session, tokens, candidates, hidden) each.

    Returns for each what `Session.commit` would raise of the caller's mistakes, or None.
    """
    if len({request[0] for request in requests}) < len(requests) or any(hidden is not None for *_, hidden in requests):
        return _one_by_one(requests)
    if not requests:
        return []
    vocab_size = requests[0][0]._drafter.config.vocab_size
    sessions = [session for session, *_ in requests]
    commits = joined([request[1:3] for request in requests], vocab_size)
    if commits is not None:
        return _commit(sessions, *commits)
    # Something is wrong or has to be converted: look at each by itself.
    errors: list[Exception | None] = [None] * len(requests)
    sound = []
    for i, (_, tokens, candidates, _) in enumerate(requests):
        try:
            tokens = as_tokens(tokens, vocab_size)
            candidates = None if candidates is None else _own_candidates(candidates, vocab_size)
            sound.append((i, tokens, candidates))
        except _MISTAKES as error:
            errors[i] = error
    commits = joined([commit[1:] for commit in sound], vocab_size)
    for (i, *_), error in zip(sound, _commit([sessions[i] for i, *_ in sound], *commits)):
        errors[i] = error
    return errors


def commit_joined(sessions, sizes, tokens, last, previous, ids, probs, hidden=None) -> list[Exception | None]:
    """`commit_all` for arrays that are joined already, a session's after the other's, as they come off the wire.

    sizes: (tokens, rows of candidates, ids of candidates) of each session, no session twice and at least one. tokens,
    and the arrays of `Candidates`, `last` being its tokens and `ids` and `probs` flat: int32 and float32, writable, not
    kept. hidden: None, or each session's states or None.
    """
    limit = sessions[0]._drafter.config.vocab_size or NO_LIMIT
    if hidden is None and all_sound(tokens, last, previous, ids, probs, limit):
        return _commit(sessions, sizes, tokens, last, previous, ids, probs)
    return commit_all(apart(sessions, sizes, tokens, last, previous, ids, probs, hidden))


def apart(sessions, sizes, tokens, last, previous, ids, probs, hidden=None) -> list[tuple]:
    """The requests of `commit_all`, from the arguments of `commit_joined`."""
    requests, begin, row, first = [], 0, 0, 0
    for session, (length, rows, numbers), states in zip(sessions, sizes, hidden or [None] * len(sessions)):
        candidates = None
        if rows:
            opinions, these = slice(row, row + rows), slice(first, first + numbers)
            table = ids[these].reshape(rows, -1), probs[these].reshape(rows, -1)
            candidates = Candidates(last[opinions], previous[opinions], *table)
        requests.append((session, tokens[begin : begin + length], candidates, states))
        begin, row, first = begin + length, row + rows, first + numbers
    return requests


def _one_by_one(requests) -> list[Exception | None]:
    errors: list[Exception | None] = []
    for session, *rest in requests:
        try:
            session.commit(*rest)
            errors.append(None)
        except _MISTAKES as error:
            errors.append(error)
    return errors


def _commit(sessions, sizes, *arrays) -> list[Exception | None]:
    """Take in arrays that are checked. Locks are held for `AT_ONCE` commits at a time, some half a millisecond, so that
    another session of the namespace waits no longer than that."""
    errors: list[Exception | None] = [None] * len(sessions)
    begin = row = first = 0
    for start in range(0, len(sessions), AT_ONCE):
        some = sessions[start : start + AT_ONCE]
        with _holding([session._lock for session in sorted(some, key=_id)]):
            ready, commits = [], []
            for i, session in enumerate(some, start):
                length, rows, numbers = sizes[i]
                end, width = begin + length, numbers // rows if rows else 0
                try:
                    session._ready()
                    share_at = session._remembered + SHARE_LAG + SHARE_STEP
                    commits.append((begin, end, row, rows, width, first, share_at, session._tail, 0, -1))
                    ready.append(session)
                except _MISTAKES as error:
                    errors[i] = error
                begin, row, first = end, row + rows, first + numbers
            if ready:
                columns = np.fromiter(itertools.chain.from_iterable(commits), np.int64).reshape(len(commits), -1)
                _learn(ready, columns, *arrays)
    return errors


def _learn(sessions: list[Session], commits, tokens, last, previous, ids, probs) -> None:
    """Take in commits that are checked. The sessions' locks are held."""
    namespaces = sorted({session._namespace for session in sessions}, key=_name)
    with _holding([namespace.lock for namespace in namespaces]):
        for session, rows in zip(sessions, commits[:, ROWS].tolist()):
            if session._dense is not None:
                session._dense.forget_key()
            if rows:
                session._namespace.ensure_recycling()
                if len(session._recycled.rows) == 0:
                    session._recycled = new_table(RECYCLED_ROWS)
                    session._describe()
        for namespace in namespaces:
            namespace.publish()
        owners, bundles = _owners(sessions, [session._proposal for session in sessions])
        _, workspace = _workspace()
        enabled, begin = sessions[0]._drafter.enabled, 0
        while begin < len(sessions):
            stop = learn_batch(owners, workspace, enabled, commits, begin, tokens, last, previous, ids, probs)
            for session, position in zip(sessions[begin:], commits[begin : stop + 1, COPIED_FROM].tolist()):
                if position >= 0:
                    session._namespace.memory.touch(position)
            if stop == len(sessions):
                break
            session, commit = sessions[stop], commits[stop]
            if commit[DONE] < commit[END] - commit[BEGIN]:
                session._trie = pt.grown(session._trie)
                session._describe()
                owners[2 * OWNERS * stop : 2 * OWNERS * stop + 2] = _places_of([session._bundle])
                begin = stop
            else:
                namespace = session._namespace
                shared = namespace.bundle
                session._remember(session.length - SHARE_LAG)
                if namespace.bundle is not shared:
                    owners, bundles = _owners(sessions, [session._proposal for session in sessions])
                begin = stop + 1
        for session, tail in zip(sessions, commits[:, TAIL].tolist()):
            session._tail = tail
    del bundles  # the arrays were in use until here


@kernel(allocates=False)
def learn_batch(owners, workspace, enabled, commits, begin, tokens, last, previous, ids, probs):
    """Learn the commits from `begin` on; returns where Python is needed, or their number.

    Python is needed where `DONE` falls short of the tokens, as the session's trie is full, and after a commit that has
    brought a session to `SHARE_AT`.
    """
    for i in range(begin, len(commits)):
        commit = commits[i]
        session, namespace = int64s(owners, OWNERS * i), int64s(owners, OWNERS * i + 1)
        new = tokens[commit[BEGIN] : commit[END]]
        commit[TAIL], commit[DONE], length, commit[COPIED_FROM] = learn_tokens(
            session, namespace, int64s(owners, OWNERS * i + 2), workspace, int64s(owners, OWNERS * i + 3), enabled,
            commit[TAIL], new, commit[DONE],
        )  # fmt: skip
        if commit[DONE] < len(new):
            return i
        row, rows, width, first = commit[ROW], commit[ROWS], commit[WIDTH], commit[ID]
        if rows:
            opinions = (
                last[row : row + rows],
                previous[row : row + rows],
                ids[first : first + rows * width].reshape((rows, width)),
                probs[first : first + rows * width].reshape((rows, width)),
            )
            learn_rows(recycling_at(session, 7), opinions[0], opinions[1], opinions[2], opinions[3])
            learn_rows(recycling_at(namespace, 8), opinions[0], opinions[1], opinions[2], opinions[3])
        if length >= commit[SHARE_AT]:
            return i
    return len(commits)


# --- drafts ----------------------------------------------------------------------------------------------------------
def draft_all(requests, beside: Executor | None = None) -> list[DraftTree | Exception]:
    """A tree for each of many sessions of one drafter. requests: (session, max_nodes, min_prob, proposal) each.

    Returns the trees, or what `Session.draft` would raise of the caller's mistakes. `beside`: draft half of them there.
    """
    places, *arrays, origins = _draft(requests, beside, Session._origin)
    return [
        place if isinstance(place, Exception) else DraftTree(*[array[slice(*place)] for array in arrays], origin)
        for place, origin in zip(places, origins)
    ]


def draft_joined(requests, beside: Executor | None = None) -> tuple:
    """`draft_all` for who passes the trees on: (places, tokens, parents, probs, sources), the trees' arrays joined.

    places: (begin, end) of each tree in the arrays, or an exception. There may be unused room between trees.
    """
    if len(requests) == 1:
        session, *arguments = requests[0]
        try:
            tree = session.draft(*arguments)
        except _MISTAKES as error:
            return [error], _NO_IDS, _NO_IDS, _NO_PROBS, _NO_SOURCES
        return [(0, len(tree))], tree.tokens, tree.parents, tree.probs, tree.sources
    return _draft(requests, beside)[:5]


def _draft(requests, beside: Executor | None, origin_of=lambda session: None) -> tuple:
    """The answer of `draft_joined`, and what `origin_of` each session says at the time of the draft."""
    places: list[tuple[int, int] | Exception] = [(0, 0)] * len(requests)
    origins = [None] * len(requests)
    with _holding([session._lock for session in sorted({request[0] for request in requests}, key=_id)]):
        batch = []
        for i, (session, max_nodes, min_prob, proposal) in enumerate(requests):
            config = session._drafter.config
            try:
                budget = config.max_nodes if max_nodes is None else as_count(max_nodes, MAX_BUDGET, "max_nodes")
                floor = config.min_prob if min_prob is None else as_probability(min_prob, "min_prob")
                session._ready()
                session._propose(proposal)
            except _MISTAKES as error:
                places[i] = error
                continue
            if budget:
                if session._dense is not None and session._dense.waiting:
                    session._search()
                batch.append((i, session, budget, floor, session._proposal))
                origins[i] = origin_of(session)
        if not batch:
            return places, _NO_IDS, _NO_IDS, _NO_PROBS, _NO_SOURCES, origins
        numbers, sessions, budgets, floors, proposals = zip(*batch)
        starts, sizes, trees = _drafted(sessions, budgets, floors, proposals, beside)
    for i, start, size in zip(numbers, starts, sizes):
        places[i] = start, start + size
    return places, *trees, origins


def _drafted(sessions, budgets, floors, proposals, beside: Executor | None) -> tuple:
    """Where each session's tree begins, its number of nodes, and the arrays of all trees. The sessions' locks are held."""
    owners, bundles = _owners(sessions, proposals)
    ends = np.cumsum(budgets)
    room = int(ends[-1])
    trees = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.float32), np.empty(room, np.uint8)
    sizes, starts, budgets = np.empty(len(sessions), np.int64), ends - budgets, np.array(budgets, np.int64)
    enabled, floors = sessions[0]._drafter.enabled, np.array(floors, np.float64)

    def draft(begin: int, end: int) -> None:
        _, workspace = _workspace()
        draft_batch(owners, workspace, enabled, begin, end, budgets, floors, starts, sizes, *trees)

    if beside is None or len(sessions) < WORTH_A_THREAD:
        draft(0, len(sessions))
    else:
        middle = len(sessions) // 2
        other_half = beside.submit(draft, middle, len(sessions))
        draft(0, middle)
        if other_half.cancel():  # that thread has not come to it
            draft(middle, len(sessions))
        else:
            other_half.result()
    del bundles  # the arrays were in use until here
    return starts.tolist(), sizes.tolist(), trees


@kernel(allocates=False)
def draft_batch(
    owners, workspace, enabled, begin, end, budgets, floors, starts, sizes, tokens, parents, probs, sources
):  # fmt: skip
    """Draft for sessions begin..end-1; tree i goes to `tokens` etc. from `starts[i]` on, its number of nodes to `sizes`."""
    work = _workspace_at(workspace)
    for i in range(begin, end):
        n = draft_tree(
            int64s(owners, OWNERS * i), int64s(owners, OWNERS * i + 1), int64s(owners, OWNERS * i + 2), workspace,
            int64s(owners, OWNERS * i + 3), enabled, budgets[i], floors[i],
        )  # fmt: skip
        sizes[i] = n
        start = starts[i]
        for node in range(n):
            tokens[start + node], parents[start + node] = work.tokens[node], work.parents[node]
            probs[start + node], sources[start + node] = work.probs[node], work.sources[node]


# --- both ------------------------------------------------------------------------------------------------------------
def _owners(sessions, proposals) -> tuple[np.ndarray, list]:
    """Places of the bundles of all sessions, `OWNERS` each, as `int64s` takes them; and the bundles, to be held on to."""
    bundles = []
    for session, proposal in zip(sessions, proposals):
        bundles += session._bundle, session._namespace.bundle, session._indexes.bundle, proposal
    return _places_of(bundles), bundles


def _places_of(bundles) -> np.ndarray:
    return np.frombuffer(bytearray(b"".join([bundle.place for bundle in bundles])), np.int64)


@contextlib.contextmanager
def _holding(locks):
    """With all `locks`, taken in the order given: everybody who takes several takes them in that order."""
    held = []
    try:
        for lock in locks:
            lock.acquire()
            held.append(lock)
        yield
    finally:
        for lock in held:
            lock.release()


def _id(session: Session) -> int:
    return session.id


def _name(namespace) -> str:
    return namespace.name
