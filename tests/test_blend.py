"""The blend against its plain twin: which tokens are candidates, the evidence for each, the probabilities, and what is
learned from the verified path, through sessions that live side by side."""

from __future__ import annotations

import itertools

import naive_blend
import numpy as np
import pytest
from engine_probe import Probe
from naive_blend import NaiveNamespace, NaiveSession, Place
from streams import edited, some_tokens

from redraft.retrieval import evidence as ev
from redraft.retrieval import model, session
from redraft.retrieval.best_first import EVERYTHING
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.dense_search import DenseSearch
from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.neighbours import CURSORS, LENGTH, put


def assert_same_evidence(found, ballot, scores):
    assert [token for token, *_ in found] == list(ballot)
    for token, named_by, cells, score, _ in found:
        assert named_by == ballot[token].named_by, token
        assert cells == ballot[token].cells, token
        assert score == pytest.approx(scores[token], rel=1e-4, abs=1e-6), token


def assert_same_model(learned, twin):
    cells, weights = np.array(twin.cells), np.array(twin.weights)
    np.testing.assert_allclose(learned.cells, cells, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(learned.weights, weights, rtol=1e-3, atol=1e-4)


def compare_places(engine, twin, rng, steps=3):
    """Compare at the end of the text and along one path that a draft could take."""
    probe = Probe(engine)
    place = Place(
        list(twin.place.text),
        [pointer.copy() for pointer in twin.place.pointers],
        twin.place.proposed,
        twin.place.neighbours,
    )
    for at in range(steps):
        for fitting in (2, 12, 40, EVERYTHING):
            ballot = twin.gather(place, fitting)
            assert_same_evidence(probe.evaluate(at, fitting), ballot, twin.score(ballot))
        if not ballot:
            return
        token = int(rng.choice(list(ballot)[:4]))
        probe.advance(at, at + 1, token)
        place = place.after(token, twin.proposal)


def random_proposal(rng, letters):
    """[(token, parent, prob)]: a tree over the letters, its probabilities falling on the way down."""
    nodes, edges = [], set()
    for _ in range(int(rng.integers(0, 7))):
        parent, token = int(rng.integers(-1, len(nodes))), int(rng.integers(0, letters))
        if (parent, token) not in edges:
            edges.add((parent, token))
            above = nodes[parent][2] if parent >= 0 else 1.0
            nodes.append((token, parent, float(np.float32(above * rng.random()))))
    return nodes


def as_tree(proposal):
    tokens, parents, probs = zip(*proposal) if proposal else ((), (), ())
    sources = np.full(len(proposal), Source.CALLER, np.uint8)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(probs, np.float32), sources)


def random_candidates(rng, letters):
    m, k = int(rng.integers(1, 4)), int(rng.choice([2, 8, 10]))
    probs = np.sort(rng.dirichlet(np.full(k, 0.4), m).astype(np.float32))[:, ::-1]
    ids = np.array([rng.permutation(max(letters, k))[:k] for _ in range(m)])
    return Candidates.checked(rng.integers(0, letters, m), rng.integers(-1, letters, m), ids, probs)


def find_neighbours(rng, engine, twin, letters):
    """What a search with the target's state might have found."""
    if engine._dense is None:
        engine._dense = DenseSearch(4)
        engine._describe()
    similarities = np.sort(rng.choice([0.1, 0.3, 0.45, 0.6, 0.7, 0.85, 0.95], int(rng.integers(0, 11))))[::-1]
    text = twin.place.text
    found = []
    for similarity in similarities.tolist():
        begin = int(rng.integers(0, len(text) + 1))
        tokens = (text[begin:] if rng.random() < 0.5 else some_tokens(rng, letters, 40))[:LENGTH]
        found.append((similarity, np.array(tokens, np.int32)))
    own, confidence = bool(rng.integers(0, 2)), float(rng.random())
    found = found[:CURSORS]
    continuations = np.full((len(found), LENGTH), -1, np.int32)
    for row, (_, tokens) in zip(continuations, found):
        row[: len(tokens)] = tokens
    nearness = np.array([similarity for similarity, _ in found], np.float32)
    columns = put(engine._dense.neighbours, own, nearness, continuations, confidence, engine.length)
    engine._follow_neighbours(own, columns)
    twin.find(own, [(similarity, tokens.tolist()) for similarity, tokens in found], confidence)


def live(rng, drafter, twin_namespace, letters, rounds, enabled=naive_blend.ALL_SOURCES):
    """Sessions come, write, hear what the twin hears, and go."""
    names, open_sessions, texts, learned = itertools.count(1), [], [], 0
    for _ in range(rounds):
        if len(open_sessions) < 2 or (len(open_sessions) < 4 and rng.random() < 0.2):
            prompt = edited(rng, texts[-1], letters) if texts and rng.random() < 0.5 else some_tokens(rng, letters, 20)
            prompt = prompt[: int(rng.integers(0, 40))]
            opened = drafter.open(prompt, namespace="n"), NaiveSession(twin_namespace, prompt, enabled, next(names))
            assert opened[0].id == opened[1].name
            open_sessions.append(opened)
        at = int(rng.integers(0, len(open_sessions)))
        engine, twin = open_sessions[at]
        proposal = random_proposal(rng, letters) if rng.random() < 0.5 else []
        if proposal or rng.random() < 0.5:  # otherwise the commit goes on with the proposal of before
            engine.draft(proposal=as_tree(proposal))
            twin.propose(proposal)
        if rng.random() < 0.3:
            find_neighbours(rng, engine, twin, letters)
        compare_places(engine, twin, rng)
        if texts and rng.random() < 0.5:  # goes on like an earlier text
            text = texts[int(rng.integers(0, len(texts)))]
            begin = int(rng.integers(0, len(text) + 1))
            tokens = edited(rng, text[begin : begin + 12], letters)
        else:
            tokens = some_tokens(rng, letters, int(rng.integers(0, 8)))
        candidates = random_candidates(rng, letters) if rng.random() < 0.4 else None
        engine.commit(tokens, candidates)
        rows = candidates and tuple(
            x.tolist() for x in (candidates.tokens, candidates.previous, candidates.ids, candidates.probs)
        )
        twin.commit(tokens, rows)
        learned += len(tokens)
        if rng.random() < 0.12:
            open_sessions.pop(at)
            texts.append(list(twin.place.text))
            engine.close()
            twin.close()
            forget_one(rng, drafter, twin_namespace, open_sessions)
    return learned


def forget_one(rng, drafter, twin_namespace, open_sessions):
    """Now and then, forget an output that nobody copies from."""
    memory = twin_namespace.memory
    copied = [id(twin.place.pointers[1].text) for _, twin in open_sessions if twin.place.pointers[1].at is not None]
    free = [name for name, document in memory.documents.items() if id(document.tokens) not in copied]
    if free and rng.random() < 0.3:
        name = int(rng.choice(free))
        assert drafter.forget("n", name) and memory.forget(name)
        twin_namespace.prompts.forget(name)


@pytest.mark.parametrize("letters", [1, 2, 4, 40])
@pytest.mark.parametrize("seed", range(2))
def test_sessions_side_by_side(letters, seed):
    rng = np.random.default_rng(50 + 10 * letters + seed)
    drafter, twin = Drafter(DraftConfig()), NaiveNamespace()
    learned = live(rng, drafter, twin, letters, rounds=70)
    assert learned > 200
    assert_same_model(drafter._namespaces["n"].model, twin)


@pytest.mark.parametrize("seed", range(2))
def test_sessions_that_learn_from_each_other_while_they_write(seed, monkeypatch):
    monkeypatch.setattr(session, "SHARE_LAG", 12)
    monkeypatch.setattr(session, "SHARE_STEP", 5)
    rng = np.random.default_rng(90 + seed)
    drafter, twin = Drafter(DraftConfig()), NaiveNamespace()
    live(rng, drafter, twin, 4, rounds=70)
    assert drafter._namespaces["n"].memory.n_tokens == twin.memory.n_tokens > 0
    assert_same_model(drafter._namespaces["n"].model, twin)


@pytest.mark.parametrize("seed", range(2))
def test_earlier_prompts_where_they_are_remembered(seed):
    rng = np.random.default_rng(120 + seed)
    drafter, twin = Drafter(DraftConfig(prompt_tokens=96)), NaiveNamespace(None, 96)
    live(rng, drafter, twin, 4, rounds=70)
    assert drafter._namespaces["n"].prompts.n_tokens == twin.prompts.n_tokens > 0
    assert_same_model(drafter._namespaces["n"].model, twin)


@pytest.mark.parametrize("name", ["session", "memory", "pointer", "recycling", "skip", "frequent", "caller"])
def test_with_a_source_left_out(name):
    rng = np.random.default_rng(7)
    drafter, twin = Drafter(DraftConfig(disabled=frozenset({name}))), NaiveNamespace()
    assert live(rng, drafter, twin, 4, 30, naive_blend.ALL_SOURCES & ~(1 << Source.NAMES.index(name))) > 50
    assert_same_model(drafter._namespaces["n"].model, twin)


def test_in_a_long_copy_only_the_sessions_own_text_is_asked():
    """Until the copy is left: then all that speaks is heard again."""
    rng = np.random.default_rng(12)
    passage = rng.permutation(1000)[:150].tolist()
    drafter, twin_namespace = Drafter(DraftConfig()), NaiveNamespace()
    for earlier in (drafter.open([], "n"), NaiveSession(twin_namespace, [])):
        earlier.commit([*passage, 2000] * 2)  # so that the memory knows it as well
        earlier.close()
    engine, twin = drafter.open([*passage, 2000, 2001], "n"), NaiveSession(twin_namespace, [*passage, 2000, 2001])

    def slots_after(tokens):
        engine.commit(tokens)
        twin.commit(tokens)
        found, ballot = Probe(engine).evaluate(), twin.gather(twin.place)
        assert_same_evidence(found, ballot, twin.score(ballot))
        return {slot for _, _, cells, *_ in found for slot in cells}

    assert {ev.SESSION_POINTER, ev.MEMORY_FIRST, ev.AGE, ev.TRACK_RECORD} < slots_after(passage[:6])
    assert {ev.SESSION_POINTER, ev.MEMORY_FIRST, ev.AGE, ev.TRACK_RECORD} < slots_after(passage[6:19])
    assert slots_after(passage[19:60]) == {ev.SESSION_FIRST, ev.SESSION_POINTER}
    assert {ev.SESSION_POINTER, ev.MEMORY_FIRST, ev.AGE, ev.TRACK_RECORD} < slots_after([2002, *passage[61:65]])
    assert_same_model(drafter._namespaces["n"].model, twin_namespace)


def test_short_copies_do_not_silence_a_memory_that_knows_what_breaks_them():
    """Eight times the same token, then one that is new, and so on: the second time the memory knows all of it."""
    text = np.full(8199, 3, np.int32)
    text[8::9] = 100 + np.arange(911)
    drafter = Drafter(DraftConfig())
    with drafter.open(text[:90]) as session:
        session.commit(text[90:])
    with drafter.open(text[:90]) as session:
        steps, at = 0, 90
        while at < len(text):
            tree, parent, begun = session.draft(), -1, at
            while at < len(text) - 1:
                children = np.flatnonzero((tree.parents == parent) & (tree.tokens == text[at]))
                if not len(children):
                    break
                parent, at = int(children[0]), at + 1
            at += 1
            session.commit(text[begun:at])
            steps += 1
    assert (len(text) - 90) / steps > 30


def test_more_candidates_than_there_is_room_for():
    """The first come stay; whoever comes later is left out."""
    rng = np.random.default_rng(8)
    drafter, twin_namespace = Drafter(DraftConfig()), NaiveNamespace()
    prompt = [x for token in rng.permutation(60).tolist() for x in (100, token)] * 2
    engine, twin = drafter.open(prompt, "n"), NaiveSession(twin_namespace, prompt)
    ids = np.arange(200, 208)[None]
    rows = [100], [-1], ids, np.full((1, 8), 0.1)
    for token in (100, 5, 100):
        candidates = Candidates.checked(*rows)
        engine.commit([token], candidates)
        twin.commit([token], (rows[0], rows[1], ids.tolist(), rows[3].tolist()))
    twin.propose([(token, -1, float(np.float32(0.02))) for token in range(300, 300 + ev.FEWER_CANDIDATES - 4)])
    engine.draft(proposal=as_tree(twin.proposal))
    found = Probe(engine).evaluate()
    assert len(found) == ev.FEWER_CANDIDATES
    compare_places(engine, twin, rng)


def test_probabilities_of_a_place_sum_to_less_than_one():
    rng = np.random.default_rng(9)
    drafter = Drafter(DraftConfig())
    with drafter.open(some_tokens(rng, 4, 300)) as session:
        for _ in range(50):
            session.commit(some_tokens(rng, 4, 3))
            scores = [score for _, _, _, score, _ in Probe(session).evaluate()]
            assert all(0 < score < 1 for score in scores) and sum(scores) < 1


def test_what_happens_every_time_becomes_certain():
    """A loop of five tokens, with an untrained model: the drafts say at last what is bound to come."""
    drafter = Drafter(DraftConfig())
    session = drafter.open([3, 0, 4, 1, 2] * 4)
    for _ in range(60):
        session.commit([3, 0, 4, 1, 2])
    tree = session.draft(max_nodes=5)
    assert tree.best_path().tolist() == [3, 0, 4, 1, 2]
    assert tree.probs[-1] > 0.9


def test_a_caller_who_is_always_wrong_is_not_believed_any_more():
    drafter = Drafter(DraftConfig())
    rng = np.random.default_rng(10)
    session = drafter.open(rng.integers(0, 1000, 50))
    before = None
    for _ in range(60):
        tree = session.draft(proposal=DraftTree.chain([7, 7], [0.9, 0.8]))
        prob = float(tree.probs[tree.tokens.tolist().index(7)]) if 7 in tree.tokens else 0.0
        before = prob if before is None else before
        session.commit([int(rng.integers(0, 1000))])
    assert before > 0.1 and prob < 0.05


# --- the layout of evidence ------------------------------------------------------------------------------------------
def test_cells_of_different_kinds_never_meet():
    """Every situation has a cell inside the range of its kind, and different situations different cells."""
    lengths, counts, totals = (1, 2, 3, 4, 6, 8), (1, 2, 3, 7, 12, 48), (1, 2, 4, 8, 20, 100)
    first = {
        ev.first_cell(ev.SESSION_FIRST_CELLS, order, length, count, total, ev.recency(rank, distance))
        for order in range(ev.N_ORDERS) for length in lengths for count in counts for total in totals
        for rank in (0, 1, 2, 15) for distance in (0, 1, 100, 5000) if count <= total
    }  # fmt: skip
    assert min(first) >= ev.SESSION_FIRST_CELLS and max(first) < ev.SESSION_FIRST_CELLS + ev._FIRST_CELLS
    after = {
        ev.next_cell(ev.MEMORY_NEXT_CELLS, length, count, total)
        for length in lengths for count in counts for total in totals if count <= total
    }  # fmt: skip
    assert min(after) >= ev.MEMORY_NEXT_CELLS and max(after) < ev.MEMORY_NEXT_CELLS + ev._NEXT_CELLS
    absent = {
        ev.absent_cell(ev.CORPUS_ABSENT_CELLS, length, total, distinct)
        for length in lengths for total in totals for distinct in (1, 2, 3, 8, 16)
    }  # fmt: skip
    assert min(absent) >= ev.CORPUS_ABSENT_CELLS and max(absent) < ev.CORPUS_ABSENT_CELLS + ev._ABSENT_CELLS
    assert len(absent) == 6 * 6 * 5
    assert ev.N_CELLS == len(model.new_model().cells) and len(ev.SLOT_SOURCE) == ev.AGE


def test_cell_zero_weighs_nothing_for_ever():
    rng = np.random.default_rng(11)
    drafter = Drafter(DraftConfig())
    session = drafter.open(some_tokens(rng, 4, 50))
    session.commit(some_tokens(rng, 4, 200))
    assert drafter._namespaces["default"].model.cells[0, model.STRENGTH] == 0
    assert drafter._namespaces["default"].model.cells[0, model.BIAS] == 0
