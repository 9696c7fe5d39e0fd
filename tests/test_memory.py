"""The memory against its plain twin: budget, order of forgetting, interleaved documents, frequent tokens."""

from __future__ import annotations

import naive_memory
import numpy as np
import pytest
from naive_memory import NaiveMemory
from streams import some_tokens
from trie_invariants import check_invariants

from redraft.retrieval import memory as memory_module
from redraft.retrieval import prefix_trie as pt
from redraft.retrieval.memory import Memory


def positions(memory, document):
    """Positions in the trie's text of a document's tokens, in order."""
    trie, found = memory.trie, []
    block = memory._documents[document].first_block
    while block >= 0:
        found += [at for at in range(block * pt.BLOCK, (block + 1) * pt.BLOCK) if trie.text[at] >= 0]
        block = int(trie.block_next[block])
    return found


def contents(trie):
    """{context: (total, [(successor, count)], position of the last successor or -1)} of every stored context."""
    found = {}
    for node in (int(entry) & (len(trie.slots) - 1) for entry in trie.slots if entry >= 0):
        tokens, at = [], node
        while at not in (pt.ROOT, pt.SKIP_ROOT):
            tokens.append(int(trie.nodes[at, pt.TOKEN]))
            at = int(trie.nodes[at, pt.PARENT])
        _, _, total, last, entry = (int(x) for x in trie.nodes[node])
        successors = [(int(trie.text[last]), 1)] if entry == pt.LEAF else []
        while entry >= 0:
            token, count, entry = (int(x) for x in trie.successors[entry])
            successors.append((token, count))
        found["plain" if at == pt.ROOT else "skip", tuple(tokens)] = total, successors, last
    return found


def assert_same(memory: Memory, naive: NaiveMemory):
    check_invariants(memory.trie)
    assert list(memory._documents) == list(naive.documents)
    assert memory.n_tokens == naive.n_tokens
    written = {-1: None}  # position -> time
    for name, document in naive.documents.items():
        places = positions(memory, name)
        assert [int(memory.trie.text[at]) for at in places] == document.tokens
        written.update(zip(places, document.times))
    stored = contents(memory.trie)
    for key, (total, successors, last) in stored.items():
        assert total == len(naive.seen[key]), key  # a KeyError: remembered what was forgotten
        assert successors == naive.successors(key), key
        assert written[last] == naive.latest[key], key
    for key in naive.seen.keys() - stored.keys():  # left out: only what lies behind a context that is a leaf
        kind, tokens = key
        suffix = next(tokens[-n:] for n in range(len(tokens) - 1, 0, -1) if (kind, tokens[-n:]) in stored)
        assert stored[kind, suffix][0] == len(naive.seen[key]) == 1, key
    assert [int(token) for token in memory.frequent if token >= 0] == naive.frequent


def test_the_twin_has_the_constants_of_the_memory():
    assert (naive_memory.MAX_CONTEXT, naive_memory.MAX_SUCCESSORS) == (pt.MAX_CONTEXT, pt.MAX_SUCCESSORS)
    assert (naive_memory.BLOCK, naive_memory.N_FREQUENT) == (pt.BLOCK, memory_module.N_FREQUENT)
    assert naive_memory.REFRESH_SHARE == memory_module._REFRESH_SHARE


@pytest.mark.parametrize("budget", [1, 40, 100, 333, 5000])
@pytest.mark.parametrize("letters", [1, 2, 3, 4])
def test_random_life(letters, budget):
    rng = np.random.default_rng(100 * letters + budget)
    memory, naive = Memory(budget), NaiveMemory(budget)
    for round_number in range(60):
        name, action = int(rng.integers(0, 6)), rng.random()
        if action < 0.7:
            tokens = some_tokens(rng, letters, int(rng.integers(0, 70)))
            memory.append(name, np.array(tokens, np.int32))
            naive.append(name, tokens)
        elif action < 0.85 and name in naive.documents:
            memory.touch(int(rng.choice(positions(memory, name))))
            naive.touch(name)
        elif action < 0.98:
            assert memory.forget(name) == naive.forget(name)
        else:
            memory.clear()
            naive.clear()
        assert memory.n_tokens <= budget
        assert all((name in memory) == (name in naive.documents) for name in range(6))
        if round_number % 3 == 0:
            assert_same(memory, naive)
    assert_same(memory, naive)


@pytest.mark.parametrize("budget", [20, 500, 2500])
def test_a_document_larger_than_the_budget_keeps_its_end(budget):
    rng = np.random.default_rng(5)
    tokens = some_tokens(rng, 4, 3000)
    memory, naive = Memory(budget), NaiveMemory(budget)
    for one in (memory, naive):
        one.append(1, np.array(tokens[:90], np.int32))
        one.append(2, np.array(tokens, np.int32))
    assert_same(memory, naive)
    assert 1 not in memory
    kept = [int(memory.trie.text[at]) for at in positions(memory, 2)] if 2 in memory else []
    assert kept == tokens[len(tokens) - len(kept) :] and budget - pt.BLOCK < len(kept) <= budget


def test_a_budget_of_nothing_remembers_nothing():
    memory = Memory(0)
    memory.append(1, np.arange(100, dtype=np.int32))
    assert memory.n_tokens == 0 and 1 not in memory and not memory.forget(1)
    assert contents(memory.trie) == {} and (memory.frequent == -1).all()


def test_many_successors():
    """More successors of one context than are kept, a part of them forgotten again."""
    rng = np.random.default_rng(2)
    memory, naive = Memory(10_000), NaiveMemory(10_000)
    for name in range(4):
        tokens = [x for _ in range(40) for x in (7, int(rng.integers(10, 80)))]
        for one in (memory, naive):
            one.append(name, np.array(tokens, np.int32))
    assert_same(memory, naive)
    for one in (memory, naive):
        one.forget(0)
    assert_same(memory, naive)


def test_the_frequent_tokens_come_by_frequency_and_then_by_id():
    memory = Memory(1000)
    memory.append(1, np.array([t for t in range(20, 0, -1) for _ in range(3)] + [30] * 9 + [0], np.int32))
    assert memory.frequent.tolist() == [30, *range(1, 16)]
    memory.forget(1)
    assert (memory.frequent == -1).all()


def test_unused_documents_go_before_touched_ones():
    memory = Memory(96)
    for name in (1, 2, 3):
        memory.append(name, np.full(32, name, np.int32))
    memory.touch(positions(memory, 1)[5])
    memory.append(4, np.full(32, 4, np.int32))
    assert 2 not in memory and list(memory._documents) == [3, 1, 4]


def test_short_documents_without_end_take_no_more_room():
    rng = np.random.default_rng(3)
    memory = Memory(3000)
    lengths = rng.integers(1, 20, 20_000)
    tokens = (rng.random(lengths.sum()) ** 3 * 200).astype(np.int32)
    begins = np.concatenate([[0], np.cumsum(lengths)])
    sizes = []
    for document in range(20_000):
        memory.append(document, tokens[begins[document] : begins[document + 1]])
        if document % 5000 == 4999:
            sizes.append(memory.nbytes)
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3]
    assert len(memory._documents) == len(set(memory._owners.values())) and memory.n_tokens <= 3000
    check_invariants(memory.trie)


def test_readers_keep_the_arrays_they_hold():
    """A draft may go on with the arrays of before; no index in them may point beyond one of them."""
    rng = np.random.default_rng(4)
    memory = Memory(100_000)
    memory.append(0, rng.integers(0, 50, 500).astype(np.int32))
    for document in range(1, 60):
        old = memory.trie
        memory.append(document, rng.integers(0, 50, 300).astype(np.int32))
        if memory.trie is not old:  # grown: the old arrays are as they were when that happened, all of the old size
            assert not any(new is array for new, array in zip(memory.trie, old))
            assert old.nodes[:, pt.LAST].max() < len(old.text)
            assert max(int(entry) & (len(old.slots) - 1) for entry in old.slots if entry >= 0) < len(old.nodes)
            assert old.nodes[:, pt.FIRST].max() < len(old.successors)
