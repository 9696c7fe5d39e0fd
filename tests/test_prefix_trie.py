"""The context trie against its plain twin: growth, interleaved documents, forgetting, hostile streams."""

from __future__ import annotations

import numpy as np
import pytest
from naive_trie import NaiveContexts
from trie_invariants import check_invariants

from redraft.retrieval import context_table
from redraft.retrieval import prefix_trie as pt
from redraft.retrieval.forgetting import forget_block
from redraft.retrieval.kernel import kernel


@kernel
def find_key(trie, root, reversed_tokens):
    node, key = root, context_table.root_key(root)
    for token in reversed_tokens:
        key = context_table.child_key(key, token)
        node = context_table.find(trie, node, key, token)
        if node < 0:
            return node
    return node


@kernel
def look_up(trie, window, n_window):
    path = np.empty(8, np.int32)
    stored, length = pt.look_up(trie, window, n_window, path)
    return stored, length, path


class Documents:
    """A trie with documents by name, as memory and sessions keep them."""

    def __init__(self):
        self.trie = pt.create(64)
        self.tails, self.firsts = {}, {}

    def append(self, name, tokens):
        tokens = np.asarray(tokens, np.int32)
        done = 0
        while done < len(tokens):
            tail, done = pt.append_tokens(self.trie, self.tails.get(name, -1), tokens, done)
            if name not in self.tails and tail >= 0:
                first = tail
                while (before := block_before(self.trie, first)) >= 0:
                    first = before
                self.firsts[name] = first >> pt.BLOCK_BITS
            if tail >= 0:
                self.tails[name] = tail
            if done < len(tokens):
                self.trie = pt.grown(self.trie)

    def forget_block(self, name):
        first = forget_block(self.trie, self.firsts[name], np.empty(8, np.int32))
        if first < 0:
            del self.firsts[name], self.tails[name]
        else:
            self.firsts[name] = first


def block_before(trie, position):
    block = trie.block_previous[position >> pt.BLOCK_BITS]
    return int(block) << pt.BLOCK_BITS if block >= 0 else -1


def successors(trie, node):
    """[(token, count)] of a context, most recent first."""
    if trie.nodes[node, pt.FIRST] == pt.LEAF:
        return [(int(trie.text[trie.nodes[node, pt.LAST]]), 1)]
    found, entry = [], trie.nodes[node, pt.FIRST]
    while entry >= 0:
        token, count, entry = (int(x) for x in trie.successors[entry])
        found.append((token, count))
    return found


def assert_same(documents: Documents, naive: NaiveContexts, rng, exact_counts=True):
    trie = documents.trie
    check_invariants(trie)
    keys = {key for document in naive.documents.values() for at in range(len(document))
            for key in naive._contexts(document, at)}
    for key in keys:
        kind, tokens = key
        occurrences = naive.occurrences(key)
        root = pt.ROOT if kind == "plain" else pt.SKIP_ROOT
        path = tokens[::-1] if kind == "plain" else (tokens,)
        node = find_key(trie, root, np.array(path, np.int32))
        if node < 0:  # only contexts that occur once may be left out, and only behind a leaf
            assert len(occurrences) == 1 and kind == "plain", key
            continue
        assert trie.nodes[node, pt.TOTAL] == len(occurrences), key
        counts = [token for _, token in occurrences]
        if exact_counts:
            wanted = [(token, counts.count(token)) for token in naive.lists[key]]
            assert successors(trie, node) == wanted, key
        last = int(trie.nodes[node, pt.LAST])
        if last >= 0:
            assert trie.text[last] == occurrences[-1][1], key
    for document in list(naive.documents.values())[:6]:
        tokens = [token for _, token in document]
        for _ in range(6):
            at = int(rng.integers(0, len(tokens) + 1))
            context = tokens[max(0, at - 9) : at]
            if rng.random() < 0.3 and context:
                context[0] = int(rng.integers(0, 4))
            window = np.full(8, -1, np.int32)
            newest_first = context[::-1][:8]
            window[: len(newest_first)] = newest_first
            stored, length, path = look_up(trie, window, len(newest_first))
            assert length == naive.longest(context), context
            assert stored <= length


@pytest.mark.parametrize("letters", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_interleaved_documents_and_forgetting(letters, seed):
    rng = np.random.default_rng(seed)
    documents, naive = Documents(), NaiveContexts()
    for _ in range(14):
        name = int(rng.integers(0, 4))
        tokens = rng.integers(0, letters, int(rng.integers(1, 40)))
        documents.append(name, tokens)
        naive.append(name, tokens)
        if rng.random() < 0.35:
            victim = list(documents.firsts)[int(rng.integers(0, len(documents.firsts)))]
            documents.forget_block(victim)
            naive.forget_head(victim, pt.BLOCK)
    assert_same(documents, naive, rng)
    for name in list(documents.firsts):
        while name in documents.firsts:
            documents.forget_block(name)
    check_invariants(documents.trie)
    assert documents.trie.header[pt.LIVE_NODES] == 0 and documents.trie.header[pt.LIVE_SUCCESSORS] == 0


def fibonacci(n):
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


@pytest.mark.parametrize("tokens", [[0] * 90, [0, 1] * 45, [2, 0, 1, 0] * 20, fibonacci(90), [], [5], [0, 0]])
def test_regular_streams(tokens):
    documents, naive = Documents(), NaiveContexts()
    documents.append("a", tokens)
    naive.append("a", tokens)
    assert_same(documents, naive, np.random.default_rng(0))


def test_long_successor_lists_drop_their_oldest():
    rng = np.random.default_rng(1)
    documents, naive = Documents(), NaiveContexts()
    tokens = [x for i in range(70) for x in (7, int(rng.integers(0, 60)))]
    documents.append("a", tokens)
    naive.append("a", tokens)
    node = find_key(documents.trie, pt.ROOT, np.array([7], np.int32))
    assert [token for token, _ in successors(documents.trie, node)] == naive.lists[("plain", (7,))]
    check_invariants(documents.trie)


def test_work_per_token_does_not_depend_on_the_text():
    for tokens in (np.zeros(200_000, np.int32), np.arange(200_000, dtype=np.int32) % 7):
        documents = Documents()
        documents.append("a", tokens)
        assert documents.trie.header[pt.LIVE_NODES] < 200


def test_a_trie_grows_seldom_and_keeps_little_idle():
    """Every growth is a copy and a new description of the arrays; what is not used yet is memory all the same."""
    tokens = (np.random.default_rng(3).zipf(1.3, 6000) % 3000).astype(np.int32)
    trie, tail, growths = pt.create(100), -1, 0
    for end in range(3, len(tokens) + 1, 3):
        done = 0
        while True:
            tail, done = pt.append_tokens(trie, tail, tokens[end - 3 : end], done)
            if done == 3:
                break
            trie, growths = pt.grown(trie), growths + 1
        if end > 1500:
            used = 20 * trie.header[pt.LIVE_NODES] + 12 * trie.header[pt.LIVE_SUCCESSORS] + 4 * end
            assert sum(array.nbytes for array in trie) - trie.slots.nbytes < 1.3 * used
            assert len(trie.slots) < 4 * trie.header[pt.LIVE_NODES]
    assert growths < 32


@kernel
def add_leaf(trie, parent, key, token):
    pt._new_leaf(trie, parent, key, token, 0)


@pytest.mark.parametrize(("first", "second"), [(106759, 42186), (114944, 12186), (133727, 948)])
def test_contexts_of_the_same_hash_are_told_apart(first, second):
    """Contexts of two tokens whose 31 bits are all those of token 0 alone: the table keeps what is above its size."""
    root = context_table.root_key(pt.ROOT)
    zero, above = context_table.child_key(root, 0), context_table.child_key(root, first)
    below = context_table.child_key(above, second)
    assert context_table.hashed(zero) == context_table.hashed(below)
    trie = pt.create(64)
    add_leaf(trie, pt.ROOT, zero, 0)
    add_leaf(trie, pt.ROOT, above, first)
    node = find_key(trie, pt.ROOT, np.array([0]))
    assert node >= 2 and find_key(trie, pt.ROOT, np.array([first, second])) == -1
    parent = find_key(trie, pt.ROOT, np.array([first]))
    add_leaf(trie, parent, below, second)
    assert find_key(trie, pt.ROOT, np.array([0])) == node
    assert find_key(trie, pt.ROOT, np.array([first, second])) not in (-1, node, parent)
