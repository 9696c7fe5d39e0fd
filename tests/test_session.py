"""Sessions: what they refuse, what they never do halfway, going back, and the end."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from streams import edited, some_tokens

from redraft.retrieval import best_first
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.errors import SessionClosedError
from redraft.retrieval.session import PROMPT_TAIL, SHARE_LAG, SHARE_STEP

VOCAB = 50
GOOD_ROWS = [1, 2], [-1, 1], [[3, 4], [5, 6]], [[0.5, 0.2], [0.9, 0.1]]


def begun(seed=0, letters=4, **settings):
    """A drafter with a memory, and a session in it that has written something."""
    rng = np.random.default_rng(seed)
    drafter = Drafter(DraftConfig(vocab_size=VOCAB, **settings))
    text = some_tokens(rng, letters, 200)
    with drafter.open(text[:30]) as earlier:
        earlier.commit(edited(rng, text[30:], letters), Candidates.checked(*GOOD_ROWS))
    session = drafter.open(text[:50])
    session.commit(edited(rng, text[50:80], letters), Candidates.checked(*GOOD_ROWS))
    return drafter, session


def same(tree, other):
    return all(
        getattr(tree, name).tolist() == getattr(other, name).tolist()
        for name in ("tokens", "parents", "probs", "sources")
    )


def state(drafter, session):
    """Everything that a session and its namespace know, as a digest, and a draft."""
    namespace = drafter._namespaces[session.namespace]
    digest = hashlib.sha256()
    arrays = (
        *session._trie, *session._state, *session._recycled, *namespace.memory.trie, *namespace.recycled,
        *namespace.model, namespace.memory.frequent,
    )  # fmt: skip
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest(), session.length, session.tokens().tolist(), drafter.n_sessions


def test_tokens_in_any_layout_are_taken_by_the_kernels_that_there_are():
    """An array of another layout is another type to the compiler: a commit of one would wait a minute for it."""
    drafter, session = begun()
    compiled = len(getattr(best_first.learn_tokens, "signatures", ()))
    tokens = np.array([1, 2, 3], np.int32)
    shifted = np.frombuffer(bytearray(b"." + tokens.tobytes()), np.int32, offset=1)
    fixed = tokens.copy()
    fixed.flags.writeable = False
    layouts = shifted, fixed, np.array([1, 0, 2, 0, 3], np.int32)[::2], tokens.astype(">i4"), tokens.astype(np.int64), [1, 2, 3]
    assert not shifted.flags.aligned
    before = session.length
    for layout in layouts:
        session.commit(layout)
        drafter.step([(session, layout), (session, layout)])
    assert session.tokens()[before:].tolist() == [1, 2, 3] * (3 * len(layouts))
    assert len(getattr(best_first.learn_tokens, "signatures", ())) == compiled


# --- what is refused -------------------------------------------------------------------------------------------------
BAD_TOKENS = [
    ([-1], ValueError, r"token id -1 at position 0 is negative"),
    ([1, 2, -7], ValueError, "position 2"),
    ([3, VOCAB], ValueError, "token id 50 at position 1 is too large, the vocabulary has 50 ids"),
    ([2**40], ValueError, "too large"),
    ([2**70], TypeError, "integer"),
    ([1.0, 2.0], TypeError, "float64"),
    (np.array([1.5], np.float32), TypeError, "float32"),
    ([True, False], TypeError, "bool"),
    ([[1, 2], [3, 4]], ValueError, r"one-dimensional .* shape \(2, 2\)"),
    (np.empty((0, 3), np.int32), ValueError, "one-dimensional"),
    (7, ValueError, "one-dimensional"),
    ("text", ValueError, "one-dimensional"),
    (["1"], TypeError, "integer"),
    (None, ValueError, "one-dimensional"),
    ([1, None], TypeError, "integer"),
]


@pytest.mark.parametrize(("tokens", "error", "said"), BAD_TOKENS)
def test_bad_tokens_are_named_and_change_nothing(tokens, error, said):
    drafter, session = begun()
    before = state(drafter, session)
    with pytest.raises(error, match=f"prompt_ids: .*{said}"):
        drafter.open(tokens)
    with pytest.raises(error, match=f"tokens: .*{said}"):
        session.commit(tokens, Candidates.checked(*GOOD_ROWS))
    with pytest.raises(error, match=f"tokens: .*{said}"):
        drafter.step([(session, tokens)])
    if tokens is not None:  # no proposal is a proposal
        with pytest.raises(error, match=f"proposal: .*{said}"):
            session.draft(proposal=tokens)
    assert state(drafter, session) == before


BAD_CALLS = [
    (lambda s: s.commit([1], hidden=np.zeros(4, np.float32)), ValueError, "hidden: .* no dense index"),
    (lambda s: s.commit([1], candidates=GOOD_ROWS), TypeError, "candidates: wanted .* got tuple"),
    (
        lambda s: s.commit([1], candidates=Candidates.checked([1], [0], [[VOCAB]], [[0.1]])),
        ValueError,
        "candidates.ids",
    ),
    (lambda s: s.commit([1], Candidates.checked([VOCAB], [0], [[1]], [[0.1]])), ValueError, "candidates.tokens"),
    (lambda s: s.commit([1], Candidates.checked([1], [VOCAB], [[1]], [[0.1]])), ValueError, "candidates.previous"),
    (lambda s: s.draft(max_nodes=-1), ValueError, r"max_nodes: wanted 0\.\.512, got -1"),
    (lambda s: s.draft(max_nodes=513), ValueError, r"max_nodes: wanted 0\.\.512, got 513"),
    (lambda s: s.draft(max_nodes=3.5), TypeError, "max_nodes: wanted a whole number .* got 3.5"),
    (lambda s: s.draft(max_nodes="8"), TypeError, "max_nodes"),
    (lambda s: s.draft(min_prob=-0.1), ValueError, "min_prob"),
    (lambda s: s.draft(min_prob=1.01), ValueError, "min_prob"),
    (lambda s: s.draft(min_prob=float("nan")), ValueError, "min_prob"),
    (lambda s: s.draft(min_prob="0.5"), TypeError, "min_prob"),
    (lambda s: s.draft(proposal=DraftTree.chain([1, VOCAB])), ValueError, "vocabulary"),
    (lambda s: s.draft(proposal=DraftTree.chain([1, 2], [0.5, 1.5])), ValueError, "probs"),
    (
        lambda s: s.draft(
            proposal=DraftTree(
                np.array([1, 2], np.int32), np.array([1, 0], np.int32), np.ones(2, np.float32), np.zeros(2, np.uint8)
            )
        ),
        ValueError,
        "parent",
    ),
    (lambda s: s.truncate(-1), ValueError, "length"),
    (lambda s: s.truncate(s.length + 1), ValueError, "length"),
    (lambda s: s.truncate(2.0), TypeError, "length"),
]


@pytest.mark.parametrize(("call", "error", "said"), BAD_CALLS)
def test_bad_calls_are_named_and_change_nothing(call, error, said):
    drafter, session = begun()
    proposal = DraftTree.chain([1, 2, 3], [0.9, 0.5, 0.1])
    tree = session.draft(proposal=proposal)
    before = state(drafter, session)
    with pytest.raises(error, match=said):
        call(session)
    assert state(drafter, session) == before
    assert same(session.draft(proposal=proposal), tree)


@pytest.mark.parametrize("namespace", [None, 7, b"bytes", ["list"]])
def test_a_namespace_has_a_name(namespace):
    drafter = Drafter()
    with pytest.raises(TypeError, match="namespace: wanted a string"):
        drafter.open([1], namespace=namespace)
    assert drafter.n_sessions == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"vocab_size": 0}, {"vocab_size": 2**31}, {"max_nodes": 0}, {"max_nodes": 513}, {"min_prob": 1.0},
        {"min_prob": -0.1}, {"min_prob": float("nan")}, {"prompt_tokens": -1}, {"memory_tokens": -1}, {"memory_tokens": 2**31},
        {"disabled": frozenset({"sessoin"})}, {"disabled": "memory"},
    ],
)  # fmt: skip
def test_settings_that_cannot_be(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        DraftConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"vocab_size": "60"}, {"max_nodes": 2.5}, {"prompt_tokens": None}, {"dense_keys": True}, {"min_prob": "0.5"}],
)
def test_settings_of_another_type_are_refused(settings):
    with pytest.raises(TypeError, match=rf"{next(iter(settings))}: wanted .*, got {next(iter(settings.values()))!r}"):
        DraftConfig(**settings)


def test_a_closed_session_says_so():
    drafter, session = begun()
    length = session.length
    session.close()
    session.close()
    assert session.closed and session.length == length
    calls = (
        session.draft, lambda: session.commit([1]), lambda: session.truncate(1), lambda: session.commit([]),
        lambda: drafter.step([(session, [1])]),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(SessionClosedError, match=f"session {session.id} is closed"):
            call()


# --- what is taken ---------------------------------------------------------------------------------------------------
def memmapped(path, tokens):
    np.save(path, np.array(tokens, np.int32))
    return np.load(path, mmap_mode="r")


def test_whatever_holds_the_same_ids_gives_the_same_trees(tmp_path):
    rng = np.random.default_rng(1)
    prompt, written = some_tokens(rng, 4, 90), some_tokens(rng, 4, 40)
    read_only = np.frombuffer(np.array(prompt, "<i4").tobytes(), np.int32)
    assert not read_only.flags.writeable
    kinds = [
        lambda x: x, tuple, np.array, lambda x: np.array(x, np.int64), lambda x: np.array(x, np.uint64),
        lambda x: np.array(x, np.uint8), lambda x: np.frombuffer(np.array(x, "<i4").tobytes(), np.int32),
        lambda x: np.repeat(np.array(x, np.int32), 2)[::2], lambda x: memmapped(tmp_path / "ids.npy", x),
        lambda x: np.array(x, ">i4"),
    ]  # fmt: skip
    expected = None
    for kind in kinds:
        session = Drafter(DraftConfig(vocab_size=4)).open(kind(prompt))
        session.commit(kind(written))
        assert session.tokens().tolist() == prompt + written
        tree = session.draft(proposal=kind([1, 2, 3]))
        expected = expected or tree
        assert same(tree, expected)


def test_without_a_vocabulary_every_int32_is_a_token():
    most = 2**31 - 1
    session = Drafter().open([0, most, 5, 0, most])
    assert session.draft().tokens[0] == 5
    session.commit([most])
    with pytest.raises(ValueError, match="int32"):
        session.commit([2**31])


def test_nothing_is_kept_by_reference():
    drafter = Drafter()
    prompt, written = np.array([1, 2, 3, 1, 2], np.int32), np.array([3, 1, 2], np.int32)
    proposal = DraftTree.chain(np.array([8, 9], np.int32))
    candidates = Candidates.checked(*(np.array(rows) for rows in GOOD_ROWS))
    session = drafter.open(prompt)
    session.draft(proposal=proposal)
    session.commit(written, candidates)
    before = state(drafter, session)
    arrays = (prompt, written, proposal.tokens, proposal.probs, candidates.tokens, candidates.ids, candidates.probs)
    for array in arrays:
        array[:] = 0
    assert state(drafter, session) == before
    tokens = session.tokens()
    tokens[:] = 0
    assert state(drafter, session) == before


def test_a_proposal_is_learned_from_as_it_was_when_it_was_drafted_from():
    learned = []
    for changed in (False, True):
        drafter, session = begun()
        proposal = DraftTree.chain([1, 2, 3], [0.9, 0.5, 0.1])
        session.draft(proposal=proposal)
        if changed:
            proposal.tokens[:], proposal.parents[:], proposal.probs[:] = [9, 8, 7], -1, 0.3
        session.commit([1, 2, 0])
        learned.append(state(drafter, session))
    assert learned[0] == learned[1]


def test_short_texts():
    for prompt in ([], [3], [3, 3], [0]):
        drafter = Drafter(DraftConfig(vocab_size=4))
        with drafter.open(prompt) as session:
            assert session.length == len(prompt) and session.tokens().tolist() == prompt
            assert (len(session.draft()) > 0) == (prompt == [3, 3])  # where a token has a successor
            session.commit([])
            assert session.length == len(prompt)
            for token in (0, 1, 0, 1, 0):
                session.commit([token])
                session.draft().check(vocab_size=4)
            assert session.draft().tokens[0] == 1
            assert session.tokens().tolist() == [*prompt, 0, 1, 0, 1, 0]


def test_defaults_come_from_the_config():
    _, session = begun(max_nodes=5)
    assert len(session.draft()) == 5
    _, session = begun(min_prob=0.2)
    tree = session.draft()
    assert tree.probs.min() >= np.float32(0.2) and len(session.draft(min_prob=0)) > len(tree)


# --- going back ------------------------------------------------------------------------------------------------------
def with_the_tables_of(session):
    """A drafter that has learned what the session's namespace has learned of its sources, and remembers nothing."""
    drafter = Drafter(session._drafter.config)
    for copied, array in zip(drafter._namespace(session.namespace).model, session._namespace.model):
        copied[:] = array
    return drafter


@pytest.mark.parametrize("seed", range(6))
def test_truncated_is_as_if_the_rest_had_never_been(seed):
    rng = np.random.default_rng(seed)
    session = Drafter(DraftConfig(vocab_size=VOCAB)).open(some_tokens(rng, 3, int(rng.integers(0, 80))))
    for _ in range(8):
        session.commit(some_tokens(rng, 3, int(rng.integers(0, 50))))
        text, length = session.tokens().tolist(), int(rng.integers(0, session.length + 1))
        session.truncate(length)
        assert session.tokens().tolist() == text[:length] and session.length == length
        other = with_the_tables_of(session).open(text[:length])
        assert same(session.draft(), other.draft())
        tokens = some_tokens(rng, 3, 20)
        for one in (session, other):
            one.commit(tokens)
        assert same(session.draft(), other.draft())


def test_what_was_cut_off_is_not_remembered():
    drafter = Drafter(DraftConfig(vocab_size=VOCAB))
    session = drafter.open([0, 1, 2, 3])
    session.commit([40, 41, 42, 43] * 10)
    session.truncate(4)
    session.commit([10, 11, 12] * 10)
    session.close()
    tree = drafter.open([10, 11]).draft(max_nodes=512)
    assert 12 in tree.tokens and not set(tree.tokens.tolist()) & {40, 41, 42, 43}
    session = drafter.open([20] * 30 + [21, 22, 23, 24, 25])
    session.truncate(3)  # into the prompt
    session.close()
    assert not {21, 22, 23, 24, 25} & set(drafter.open([20]).draft(max_nodes=512).tokens.tolist())


@pytest.mark.parametrize("length", [3, 28, 30])
def test_what_is_written_after_going_back_into_the_prompt_is_remembered_whole(length):
    drafter = Drafter(DraftConfig(vocab_size=VOCAB))
    session = drafter.open(range(30))
    session.truncate(length)
    session.commit([40, 41, 42, 43, 44, 45])
    session.close()
    # the output, after the last four tokens of what is left of the prompt
    assert drafter._namespaces["default"].memory.n_tokens == 6 + min(length, PROMPT_TAIL)


def test_what_was_cut_off_leaves_the_memory_that_it_had_joined():
    drafter = Drafter(DraftConfig(vocab_size=1000))
    session, text = drafter.open([0, 1, 2, 3]), np.arange(500, 990)
    memory = drafter._namespaces["default"].memory
    for length in (4, 100):
        session.commit(text)
        assert memory.n_tokens == 4 + len(text) - SHARE_LAG
        session.truncate(length)
        assert memory.n_tokens == 0
    session.close()
    assert memory.n_tokens == 100
    known = set(drafter.open([599 - 5]).draft(max_nodes=512).tokens.tolist())
    assert known and max(known) < 500 + 96


# --- the end ---------------------------------------------------------------------------------------------------------
def test_an_output_is_remembered_once_and_a_prompt_is_not():
    drafter = Drafter(DraftConfig(vocab_size=VOCAB))
    with drafter.open([1] * 20 + [30, 31, 32, 33, 34]) as session:
        session.commit([5, 6, 7, 8])
    session.close()
    memory = drafter._namespaces["default"].memory
    assert memory.n_tokens == 8  # the output, after the last 4 tokens of the prompt
    tree = drafter.open([5, 6]).draft()
    assert Source.MEMORY in tree.sources and tree.tokens[0] == 7
    assert drafter.n_sessions == 1


def test_sessions_learn_from_each_other_as_they_go():
    drafter = Drafter(DraftConfig(vocab_size=1000))
    writer, reader = drafter.open([1, 2]), drafter.open([3, 4])
    text = np.random.default_rng(1).permutation(1000)[: SHARE_LAG + SHARE_STEP]
    writer.commit(text)
    reader.commit(text[:5])
    tree = reader.draft()
    assert tree.tokens[0] == text[5] and Source.MEMORY in tree.sources
    reader.commit(text[5 : SHARE_STEP + 2])  # up to what is not shared yet
    assert text[SHARE_STEP + 2] not in reader.draft(max_nodes=512).tokens


def test_a_drafter_that_closes_closes_its_sessions():
    with Drafter() as drafter:
        sessions = [drafter.open([1, 2, 3]) for _ in range(3)]
    assert all(session.closed for session in sessions) and drafter.n_sessions == 0
