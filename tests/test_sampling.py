"""Sampling is lossless: seeded text is the same with and without drafts, and the law of a step is the target's own.

The statistical test runs the shipped rule and every wrong rule seen elsewhere on a toy target, and must tell them apart.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from scripted_drafter import ScriptedDrafter, knows, tree_of
from test_decoding import adversary, generate
from tiny_models import random_prompts, tiny_model
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from redraft.decoding.acceptance import accept
from redraft.decoding.sampling import gumbel, sample, warpers
from redraft.retrieval.draft_tree import DraftTree

torch.set_num_threads(1)

SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 8},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95},
]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sampled_text_is_the_plain_loops_text(name, settings):
    """Token for token, with the same seed, for random trees and for trees that know the text."""
    model = tiny_model(name)
    for i, prompt in enumerate(random_prompts(8, seed=11)):
        options = {"max_new_tokens": 24, "do_sample": True, "seed": i, **settings}
        plain = generate(model, prompt, **options).sequences
        for script in (adversary(plain[0].tolist(), i), knows(plain[0].tolist())):
            drafted = generate(model, prompt, ScriptedDrafter(script), **options)
            assert torch.equal(drafted.sequences, plain)
    assert drafted.stats.tokens_per_step > 2


def test_seeds_make_texts():
    model, prompt = tiny_model("llama"), random_prompts(1)[0]
    texts = [
        tuple(generate(model, prompt, max_new_tokens=16, do_sample=True, seed=seed).sequences[0].tolist())
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    result = generate(model, prompt, max_new_tokens=16, do_sample=True)
    again = generate(model, prompt, max_new_tokens=16, do_sample=True, seed=result.seed)
    assert torch.equal(result.sequences, again.sequences)


def test_a_row_draws_with_its_own_seed():
    """Row i of a batch is the text of seed + i alone, so equal prompts give different texts."""
    model, prompt = tiny_model("llama"), random_prompts(1)[0]
    options = {"max_new_tokens": 16, "do_sample": True, "eos_token_id": []}
    together = generate(model, prompt.repeat(3, 1), seed=5, **options).sequences
    for row in range(3):
        assert torch.equal(together[row], generate(model, prompt, seed=5 + row, **options).sequences[0])
    assert not torch.equal(together[0], together[1])


def test_noise_is_a_function_of_seed_position_and_token():
    assert np.array_equal(gumbel(3, 7, 10), gumbel(3, 7, 20)[:10])
    assert not np.array_equal(gumbel(3, 7, 10), gumbel(3, 8, 10))
    assert not np.array_equal(gumbel(4, 7, 10), gumbel(3, 7, 10))
    many = np.concatenate([gumbel(1, position, 1000) for position in range(200)])
    assert abs(many.mean() - np.euler_gamma) < 0.01
    assert abs(many.var() - np.pi**2 / 6) < 0.02
    assert np.array_equal(gumbel(-1, 0, 4), gumbel(2**64 - 1, 0, 4))


def test_filtered_tokens_are_never_drawn():
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]])
    processed = warpers(0.7, 3, None)(None, scores.clone())[0]
    assert {sample(processed, 0, position) for position in range(400)} == {0, 1, 2}
    assert len(warpers(1.0, 0, 1.0)) == 0


# ---------------------------------------------------------------------------------------------------------------
# A toy target over 4 tokens: what comes next depends on the whole path. Its raw logits are sharpened by a temperature
# and filtered to 3 tokens, so that processed and unprocessed distributions differ.

TOKENS, LENGTH, END = 4, 3, 3
_TABLE = {
    path: np.random.default_rng([17, len(path), *path]).normal(size=TOKENS)
    for n in range(LENGTH + 1)
    for path in itertools.product(range(TOKENS), repeat=n)
}
TREE = tree_of([0, 1, 2, 0, 1, 0, 2], [-1, -1, 0, 0, 1, 2, 2])
TWINS = tree_of([0, 0, 1, 1, 2, 2], [-1, -1, -1, 0, 0, 1])  # siblings twice: no valid tree, but seen in the wild


def raw(path) -> torch.Tensor:
    return torch.tensor(_TABLE[tuple(path)])


def processed(path) -> torch.Tensor:
    """Temperature, top-k and a penalty on what the path already holds."""
    return _processed(tuple(path))


@functools.cache
def _processed(path: tuple[int, ...]) -> torch.Tensor:
    logits = raw(path)
    for token in set(path):
        logits[token] -= 0.7
    return warpers(0.6, 3, None)(None, logits[None])[0]


def probabilities(scores: torch.Tensor) -> np.ndarray:
    return scores.softmax(-1).numpy()


def draw(random, scores) -> int:
    return int(random.choice(TOKENS, p=probabilities(scores)))


def path_to(tree: DraftTree, node: int) -> list[int]:
    return [] if node < 0 else [*path_to(tree, int(tree.parents[node])), int(tree.tokens[node])]


def children(tree: DraftTree, node: int) -> list[int]:
    return [i for i, parent in enumerate(tree.parents) if parent == node]


def shipped(trial: int, random) -> list[int]:
    """`accept` with the keyed noise, as `generate` uses it."""
    emitted: list[int] = []

    def choose(node: int) -> int:
        return sample(processed(emitted), trial, len(emitted))

    def is_last(token: int) -> bool:
        emitted.append(token)
        return token == END or len(emitted) == LENGTH

    return accept(TREE, choose, is_last)[1]


def sequential_rejection(trial: int, random) -> list[int]:
    """The equivalent rule of EAGLE with q = 1: accept a child with its probability, else renormalise without it."""
    emitted, node = [], -1
    while True:
        p = probabilities(processed(emitted))
        for child in children(TREE, node):
            token = int(TREE.tokens[child])
            if random.random() < p[token]:
                emitted.append(token)
                node = child
                break
            p[token] = 0
            p /= p.sum()
        else:
            return [*emitted, int(random.choice(TOKENS, p=p))]
        if token == END or len(emitted) == LENGTH:
            return emitted


def best_of_independent_rows(trial: int, random) -> list[int]:
    """REST, RACER, DReSD: every leaf's path draws for itself, and the row with the most matches wins."""
    best: list[int] = []
    for leaf in [i for i in range(len(TREE)) if not children(TREE, i)]:
        emitted = []
        for token in path_to(TREE, leaf):
            emitted.append(draw(random, processed(emitted)))
            if emitted[-1] != token:
                break
        else:
            emitted.append(draw(random, processed(emitted)))
        best = max(best, emitted, key=len)
    return best


def walk(random, tree, distribution, leaf_distribution=None, accepts=None) -> list[int]:
    """Sample and match with exchangeable parts, to build wrong rules from."""
    emitted, node = [], -1
    while True:
        scores = distribution(emitted)
        at_leaf = not children(tree, node)
        if at_leaf and leaf_distribution is not None:
            scores = leaf_distribution(emitted)
        token = draw(random, scores)
        if accepts is not None and not at_leaf:
            token = accepts(emitted, node, token)
        emitted.append(token)
        if token == END or len(emitted) == LENGTH:
            return emitted
        node = next((child for child in children(tree, node) if tree.tokens[child] == token), None)
        if node is None:
            return emitted


def bonus_from_raw_logits(trial: int, random) -> list[int]:
    """SAM-Decoding: temperature and filters are forgotten where the walk ends at a leaf."""
    return walk(random, TREE, processed, leaf_distribution=raw)


def typical_acceptance(trial: int, random) -> list[int]:
    """Medusa, NEST: a drafted child is taken when it is likely enough, without a draw."""

    def accepts(emitted, node, token):
        p = probabilities(processed(emitted))
        likely = [int(TREE.tokens[child]) for child in children(TREE, node) if p[TREE.tokens[child]] > 0.3]
        return likely[0] if likely else token

    return walk(random, TREE, processed, accepts=accepts)


def penalties_of_the_committed_text(trial: int, random) -> list[int]:
    """Penalties see only what was committed before the step, for every node of the tree."""
    return walk(random, TREE, lambda path: warpers(0.6, 3, None)(None, raw(path)[None])[0])


def twins_tried_twice(trial: int, random) -> list[int]:
    """Sequential rejection that neither removes duplicate siblings nor renormalises: a twin is a second chance."""
    emitted, node = [], -1
    while True:
        p = probabilities(processed(emitted))
        for child in children(TWINS, node):
            if random.random() < p[int(TWINS.tokens[child])]:
                emitted.append(int(TWINS.tokens[child]))
                node = child
                break
        else:
            return [*emitted, int(random.choice(TOKENS, p=p))]
        if emitted[-1] == END or len(emitted) == LENGTH:
            return emitted


def text_behind_the_end(trial: int, random) -> list[int]:
    """An end token inside the accepted path does not end the text."""
    tree = tree_of([0, 1, 2, END, END, END, 0, 0, 0], [-1, -1, -1, 0, 1, 2, 3, 4, 5])
    emitted, node = [], -1
    while True:
        token = draw(random, processed(emitted))
        emitted.append(token)
        node = next((child for child in children(tree, node) if tree.tokens[child] == token), None)
        if node is None or len(emitted) == LENGTH:
            return emitted


def one_noise_for_all_positions(trial: int, random) -> list[int]:
    """Keyed noise without the position in the key: the draws of one step depend on each other."""
    emitted: list[int] = []

    def is_last(token: int) -> bool:
        emitted.append(token)
        return token == END or len(emitted) == LENGTH

    return accept(TREE, lambda node: sample(processed(emitted), trial, 0), is_last)[1]


RIGHT = [shipped, sequential_rejection]
WRONG = [
    best_of_independent_rows,
    bonus_from_raw_logits,
    typical_acceptance,
    penalties_of_the_committed_text,
    twins_tried_twice,
    text_behind_the_end,
    one_noise_for_all_positions,
]


def law() -> dict[tuple[int, ...], float]:
    """The exact probability of every text of at most LENGTH tokens, cut behind the first END."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for path, probability in texts.items():
            if path and path[-1] == END:
                longer[path] = probability
                continue
            for token, p in enumerate(probabilities(processed(path))):
                if p > 0:
                    longer[(*path, token)] = probability * p
        texts = longer
    return texts


def chi_square(rule, trials: int) -> tuple[float, float]:
    """(statistic, its limit at p = 1e-6) of the texts that begin with one step of `rule` and go on plainly."""
    expected = law()
    random = np.random.default_rng(1)
    seen: Counter[tuple[int, ...]] = Counter()
    for trial in range(trials):
        text = list(rule(trial, random))
        while END not in text and len(text) < LENGTH:
            text.append(draw(random, processed(text)))
        seen[tuple(text)] += 1
    if set(seen) - set(expected):
        return np.inf, 0.0  # a text that the target cannot write
    statistic = sum((seen[text] - trials * p) ** 2 / (trials * p) for text, p in expected.items())
    freedom = len(expected) - 1
    spread = 2 / (9 * freedom)
    return statistic, freedom * (1 - spread + 4.75 * spread**0.5) ** 3  # Wilson and Hilferty's approximation


@pytest.mark.parametrize("rule", RIGHT, ids=lambda rule: rule.__name__)
def test_lossless_rules_have_the_targets_law(rule):
    statistic, limit = chi_square(rule, 6000)
    assert statistic < limit


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.__name__)
def test_wrong_rules_are_caught(rule):
    statistic, limit = chi_square(rule, 6000)
    assert statistic > limit


def test_tokens_per_step_are_one_plus_the_path_probabilities():
    """E[emitted] = 1 + the sum over nodes of the probability of their path, the most that any lossless rule can do."""
    expected = 1.0
    for node in range(len(TREE)):
        path = path_to(TREE, node)
        if len(path) < LENGTH:  # a node at the last place is emitted by its parent anyway
            p = [probabilities(processed(path[:i]))[token] for i, token in enumerate(path)]
            expected += float(np.prod(p)) if END not in path else 0.0
    emitted = [len(shipped(trial, None)) for trial in range(6000)]
    assert abs(np.mean(emitted) - expected) < 4 * np.std(emitted) / len(emitted) ** 0.5


def test_penalties_follow_each_nodes_own_path():
    """A repetition penalty gives the text that plain decoding with it gives, greedy and sampled."""
    model = tiny_model("llama")
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.8)])
    for i, prompt in enumerate(random_prompts(8, seed=21)):
        for options in ({}, {"do_sample": True, "seed": i, "temperature": 0.7}):
            plain = generate(model, prompt, max_new_tokens=24, logits_processor=processors, **options).sequences
            drafter = ScriptedDrafter(knows(plain[0].tolist()))
            drafted = generate(model, prompt, drafter, max_new_tokens=24, logits_processor=processors, **options)
            assert torch.equal(drafted.sequences, plain)
            if not options:
                theirs = model.generate(prompt, do_sample=False, max_new_tokens=24, repetition_penalty=1.8)
                assert torch.equal(plain, theirs)


def test_processors_that_know_rows_see_each_row_as_its_own():
    def only_ten_and_row(ids, scores):
        for row, own in enumerate(scores):
            own[torch.arange(len(own)) != 10 + row] = -torch.inf
        return scores

    prompt = random_prompts(1)[0]
    options = {"max_new_tokens": 5, "logits_processor": LogitsProcessorList([only_ten_and_row])}
    written = generate(tiny_model("llama"), prompt.repeat(3, 1), ScriptedDrafter(), **options).sequences
    assert written[:, prompt.shape[1] :].tolist() == [[10 + row] * 5 for row in range(3)]
