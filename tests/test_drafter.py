"""The drafter: batches, namespaces that never mix, forgetting, sources left out, indexes, determinism, threads."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from bad_steps import refuses_what_is_no_step
from streams import edited, fibonacci, some_tokens
from test_index_directory import write as write_index
from test_session import same

from redraft.retrieval.candidates import Candidates
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.evidence import MAX_CORPORA

VOCAB = 50


def candidates_for(rng, low, high, m=4):
    ids = np.array([low + rng.permutation(high - low)[:8] for _ in range(m)])
    return Candidates.checked(
        rng.integers(low, high, m), rng.integers(low, high, m), ids, np.sort(rng.dirichlet(np.ones(8), m))[:, ::-1]
    )


# --- batches ---------------------------------------------------------------------------------------------------------
def test_a_step_is_commits_and_then_drafts():
    rng = np.random.default_rng(0)
    texts = [some_tokens(rng, 4, 60) for _ in range(3)]
    one, other = (Drafter(DraftConfig(vocab_size=VOCAB)) for _ in range(2))
    together, apart = ([drafter.open(text[:30]) for text in texts] for drafter in (one, other))
    for _ in range(12):
        tokens = [some_tokens(rng, 4, int(rng.integers(0, 4))) for _ in texts]
        candidates, proposal = candidates_for(rng, 0, VOCAB), DraftTree.chain([1, 2], [0.5, 0.25])
        order = rng.permutation(3)
        extras = [(), (candidates,), (None, None, proposal)]
        trees = one.step([(together[i], tokens[i], *extras[i]) for i in order])
        for i in order:
            apart[i].commit(tokens[i], candidates if i == 1 else None)
        wanted = [apart[i].draft(proposal=proposal if i == 2 else None) for i in order]
        assert len(trees) == 3 and all(map(same, trees, wanted))
    assert one.step([]) == []


def test_what_is_no_step_is_refused_before_anything_is_committed():
    drafter, other = Drafter(DraftConfig(vocab_size=VOCAB)), Drafter(DraftConfig(vocab_size=VOCAB))
    session = drafter.open([1, 2])
    refuses_what_is_no_step(drafter, session)
    with pytest.raises(ValueError, match="belongs to another drafter"):
        drafter.step([(session, [1]), (other.open([1]), [1])])
    assert session.length == 2


# --- namespaces ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prompt_tokens", [0, 2000])
def test_no_token_of_one_namespace_reaches_a_draft_of_another(prompt_tokens):
    """Namespaces with alphabets of their own, through every source there is without an index."""
    rng = np.random.default_rng(1)
    drafter = Drafter(DraftConfig(vocab_size=60, memory_tokens=2000, prompt_tokens=prompt_tokens))
    alphabets = {"one": range(20), "two": range(20, 40), "": range(40, 60)}
    seen = dict.fromkeys(alphabets, 0)
    texts = {name: [alphabet[int(x)] for x in rng.integers(0, 20, 120)] for name, alphabet in alphabets.items()}
    for _ in range(60):
        sessions = {}
        for name, alphabet in alphabets.items():
            prompt = texts[name][: int(rng.integers(0, 30))] if rng.random() < 0.8 else []
            sessions[name] = drafter.open(prompt, namespace=name)
            sessions[name].commit([] if rng.random() < 0.1 else texts[name][20 : int(rng.integers(21, 120))])
            sessions[name].commit([], candidates_for(rng, alphabet[0], alphabet[-1] + 1))
        for name, session in sessions.items():
            tree = session.draft(max_nodes=64)
            seen[name] += len(tree)
            assert set(tree.tokens.tolist()) <= set(alphabets[name])
            session.close()
            empty = drafter.open([], namespace=name)
            assert set(empty.draft(max_nodes=64).tokens.tolist()) <= set(alphabets[name])
            empty.close()
    assert min(seen.values()) > 1000


def test_one_namespace_learns_nothing_from_another():
    rng = np.random.default_rng(2)
    alone, beside = Drafter(DraftConfig(vocab_size=VOCAB)), Drafter(DraftConfig(vocab_size=VOCAB))
    trees = {id(alone): [], id(beside): []}
    for _ in range(10):
        prompt, text, noise = some_tokens(rng, 4, 30), some_tokens(rng, 4, 40), some_tokens(rng, 40, 60)
        candidates, foreign = candidates_for(rng, 0, 8), candidates_for(rng, 0, VOCAB)
        for drafter in (alone, beside):
            session = drafter.open(prompt, namespace="mine")
            if drafter is beside:
                with drafter.open(noise[:20], namespace="theirs") as other:
                    other.commit(noise[20:], foreign)
                    other.draft(proposal=[1, 2, 3])
            session.commit(text, candidates)
            trees[id(drafter)].append(session.draft())
            session.close()
    assert all(map(same, trees[id(alone)], trees[id(beside)]))


def test_a_forgotten_namespace_is_as_new():
    rng = np.random.default_rng(3)
    drafter, fresh = Drafter(DraftConfig(vocab_size=VOCAB)), Drafter(DraftConfig(vocab_size=VOCAB))
    for _ in range(5):
        with drafter.open(rng.integers(20, 50, 40)) as session:
            session.commit(rng.integers(20, 50, 60), candidates_for(rng, 20, 50))
    assert drafter.forget("default") and not drafter.forget("unheard of")
    for _ in range(5):
        prompt, text = some_tokens(rng, 4, 30), some_tokens(rng, 4, 40)
        trees = []
        for one in (drafter, fresh):
            with one.open(prompt) as session:
                session.commit(text)
                trees.append(session.draft(max_nodes=64))
        assert same(*trees)


def test_one_output_is_forgotten_and_the_others_are_not():
    rng = np.random.default_rng(4)
    drafter = Drafter(DraftConfig(vocab_size=1000))
    outputs, ids = [rng.integers(1000 * i // 5, 1000 * (i + 1) // 5, 120) for i in range(5)], []
    for output in outputs:
        with drafter.open(output[:2]) as session:
            session.commit(output[2:])
            ids.append(session.id)
    assert drafter.forget("default", ids[2]) and not drafter.forget("default", ids[2])
    for i, output in enumerate(outputs):
        with drafter.open(output[10:20]) as session:
            known = output[20] in session.draft().tokens
            assert known == (i != 2)
            if i == 2:
                assert not set(session.draft(max_nodes=512).tokens.tolist()) & (
                    set(output.tolist()) - set(output[10:20])
                )


def test_earlier_prompts_are_remembered_where_that_was_asked_for():
    rng = np.random.default_rng(5)
    silent, drafter = (Drafter(DraftConfig(vocab_size=1000, prompt_tokens=n)) for n in (0, 500))
    prompts = rng.permutation(1000).reshape(5, 200)
    ids = []
    for one in (silent, drafter):
        for prompt in prompts[:2]:
            with one.open(prompt) as session:
                session.commit(prompt[-2:])
                ids.append(session.id)

    def known(one, prompt, namespace="default"):
        with one.open(prompt[50:60], namespace=namespace) as session:
            return prompt[60] in session.draft(max_nodes=64).tokens

    assert not any(known(silent, prompt) for prompt in prompts)
    assert [known(drafter, prompt) for prompt in prompts] == [True, True, False, False, False]
    assert not any(known(drafter, prompt, "other") for prompt in prompts)
    assert drafter.forget("default", ids[2])
    assert [known(drafter, prompt) for prompt in prompts[:2]] == [False, True]
    for prompt in prompts[2:]:
        drafter.open(prompt).close()
    memory = drafter._namespaces["default"].prompts
    assert not known(drafter, prompts[1]) and known(drafter, prompts[4]) and 400 < memory.n_tokens <= 500
    assert drafter.forget("default") and not known(drafter, prompts[4]) and memory.n_tokens <= 10
    prompts_alone = Drafter(DraftConfig(vocab_size=1000, memory_tokens=0, prompt_tokens=2000))
    for prompt in prompts:
        prompts_alone.open(prompt).close()
    assert all(known(prompts_alone, prompt) for prompt in prompts)


def test_a_copy_out_of_a_memory_that_is_forgotten_meanwhile():
    """The session's pointer stands where the memory was; nothing of it may be drafted, and nothing may break."""
    rng = np.random.default_rng(5)
    drafter = Drafter(DraftConfig(vocab_size=1000))
    output = rng.permutation(1000)
    with drafter.open([]) as session:
        session.commit(np.concatenate([np.arange(1000), output]))
    session = drafter.open([])
    session.commit(output[900:920])
    assert Source.POINTER in session.draft().sources
    drafter.forget("default")
    for token in output[920:960]:
        tree = session.draft(max_nodes=64)
        assert set(tree.tokens.tolist()) <= set(session.tokens().tolist())
        session.commit([token])


# --- sources left out ------------------------------------------------------------------------------------------------
def rich_trees(disabled, index):
    """Trees of a scene in which every source has something to say."""
    rng = np.random.default_rng(6)
    drafter = Drafter(DraftConfig(vocab_size=VOCAB, disabled=frozenset(disabled)), indexes=[index])
    text, trees = rng.integers(0, VOCAB, 300).tolist(), []
    for _ in range(6):
        with drafter.open(text[:40]) as session:
            for token in edited(rng, text[40:100], VOCAB):
                proposal = DraftTree.chain(rng.integers(0, VOCAB, 3), [0.8, 0.6, 0.4])
                trees.append(session.draft(max_nodes=64, proposal=proposal).check(vocab_size=VOCAB, max_nodes=64))
                session.commit([token], candidates_for(rng, 0, VOCAB))
    return trees


SPEAKING = ("session", "memory", "corpus", "pointer", "recycling", "skip", "frequent", "caller")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    rng = np.random.default_rng(7)
    documents = [rng.integers(0, VOCAB, 80).tolist() for _ in range(5)]
    return write_index(tmp_path_factory.mktemp("drafter") / "my.index", documents)


def sources_of(trees):
    return {Source.NAMES[source] for tree in trees for source in tree.sources.tolist()}


def test_every_source_speaks_and_a_disabled_one_is_silent(index):
    assert sources_of(rich_trees((), index)) == set(SPEAKING)
    for name in SPEAKING:
        assert name not in sources_of(rich_trees([name], index)), name


def test_with_every_source_disabled_there_is_nothing_to_draft(index):
    assert all(len(tree) == 0 for tree in rich_trees(Source.NAMES, index))


@pytest.mark.parametrize("name", ["session", "memory", "corpus", "recycling", "skip", "caller"])
def test_each_source_alone(index, name):
    assert sources_of(rich_trees(set(Source.NAMES) - {name}, index)) == {name}


# --- indexes ---------------------------------------------------------------------------------------------------------
def test_indexes_come_and_go_under_an_open_session(index, tmp_path):
    rng = np.random.default_rng(7)
    document = rng.integers(0, VOCAB, 80).tolist()  # the first of the index
    drafter = Drafter(DraftConfig(vocab_size=VOCAB))
    session = drafter.open(document[10:14])
    assert Source.CORPUS not in session.draft().sources and drafter.index_paths == []
    drafter.load_index(index)
    tree = session.draft()
    assert tree.tokens[0] == document[14] and tree.sources[0] == Source.CORPUS
    assert same(tree, Drafter(drafter.config, indexes=[index]).open(document[10:14]).draft())
    assert drafter.index_paths == [str(index)]
    drafter.load_index(index)  # anew
    assert drafter.index_paths == [str(index)] and same(session.draft(), tree)
    drafter.unload_index(index)
    assert Source.CORPUS not in session.draft().sources
    with pytest.raises(KeyError, match="no index"):
        drafter.unload_index(index)
    others = [write_index(tmp_path / f"{i}.index", [[1, 2, 3]]) for i in range(MAX_CORPORA + 1)]
    for path in others[:-1]:
        drafter.load_index(path)
    with pytest.raises(ValueError, match=f"at most {MAX_CORPORA}"):
        drafter.load_index(others[-1])
    assert len(drafter.index_paths) == MAX_CORPORA


# --- determinism -----------------------------------------------------------------------------------------------------
def digest_of_a_life() -> str:
    """A digest of all trees of a few sessions that live side by side in two namespaces, some of it forgotten."""
    rng, digest = np.random.default_rng(8), hashlib.sha256()
    drafter = Drafter(DraftConfig(vocab_size=VOCAB, memory_tokens=600))
    texts = [fibonacci(60), *(some_tokens(rng, 4, 60) for _ in range(3))]
    for round_number in range(12):
        sessions = [drafter.open(text[:20], namespace=f"n{i % 2}") for i, text in enumerate(texts)]
        for at in range(20, 60, 4):
            items = [
                (session, edited(rng, text[at : at + 4], 4), candidates_for(rng, 0, 8), None, text[at + 4 : at + 8])
                for session, text in zip(sessions, texts)
            ]
            for tree in drafter.step(items):
                for array in (tree.tokens, tree.parents, tree.probs, tree.sources):
                    digest.update(array.tobytes())
        for session in sessions:
            session.close()
        if round_number % 5 == 4:
            drafter.forget("n1")
        drafter.forget("n0", sessions[0].id)
    return digest.hexdigest()


def test_the_same_calls_give_the_same_trees_in_every_run_and_process():
    here = digest_of_a_life()
    assert digest_of_a_life() == here
    for seed in ("0", "1"):
        code = "import test_drafter; print(test_drafter.digest_of_a_life())"
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        there = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert there.stdout.strip() == here


# --- many ------------------------------------------------------------------------------------------------------------
def test_threads():
    """Eight threads on eight sessions of one namespace, whose memory grows, evicts and is forgotten meanwhile."""
    drafter = Drafter(DraftConfig(vocab_size=VOCAB, memory_tokens=20_000))
    stop, failures, steps = time.monotonic() + 2.0, [], [0] * 8

    def live(number):
        rng = np.random.default_rng(number)
        try:
            while time.monotonic() < stop:
                text = some_tokens(rng, VOCAB, int(rng.integers(10, 600)))
                with drafter.open(text[: len(text) // 3], namespace="shared") as session:
                    for at in range(len(text) // 3, len(text), 7):
                        session.commit(text[at : at + 7], candidates_for(rng, 0, VOCAB) if at % 5 == 0 else None)
                        session.draft(proposal=[1, 2] if at % 3 else None).check(vocab_size=VOCAB, max_nodes=32)
                        steps[number] += 1
                    assert session.tokens().tolist() == text
                if number == 0 and rng.random() < 0.2:
                    drafter.forget("shared")
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=live, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and min(steps) > 10
    assert drafter.n_sessions == 0
    assert drafter._namespaces["shared"].memory.n_tokens <= 20_000


def test_a_thousand_sessions_open_at_once():
    rng = np.random.default_rng(9)
    drafter = Drafter(DraftConfig(vocab_size=VOCAB))
    texts = [some_tokens(rng, 6, 40) for _ in range(1000)]
    sessions = [drafter.open(text[:20]) for text in texts]
    assert len({session.id for session in sessions}) == drafter.n_sessions == 1000
    for at in (20, 30):
        trees = drafter.step([(session, text[at : at + 10]) for session, text in zip(sessions, texts)])
        assert len(trees) == 1000
        for tree in trees:
            tree.check(vocab_size=VOCAB, max_nodes=32)
    for session, text in zip(sessions, texts):
        assert session.tokens().tolist() == text
    drafter.close()
    assert drafter.n_sessions == 0
