"""The size of trees follows measured costs: all nodes where they are free, none where they do not pay, and back again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scripted_drafter import ScriptedDrafter, count_up, knows, tree_of
from test_decoding import adversary, reference
from tiny_models import random_prompts, tiny_model

from redraft.decoding import tree_size
from redraft.decoding.generate import generate
from redraft.decoding.pruning import best_nodes, not_deeper
from redraft.decoding.tree_size import CostCurve, TreeSizer

FLAT = {0: 1.0, 2: 1.0, 8: 1.01, 16: 1.02, 32: 1.03}
STEEP = {0: 1.0, 2: 1.3, 8: 2.0, 16: 2.3, 32: 3.0}


def chain_tree(n: int, p: float):
    return tree_of(list(range(n)), list(range(-1, n - 1)), [p ** (i + 1) for i in range(n)])


def measured(times: dict[int, float], rows: int = 1, factor: float = 1.0) -> CostCurve:
    curve = CostCurve()
    for _ in range(3):
        for nodes, seconds in times.items():
            curve.observe(rows, 200, nodes, seconds * factor)
    return curve


class Clock:
    """Stands in for the time module: a step takes what the test says."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(tree_size, "time", self)

    def perf_counter(self):
        return self.now


def drive(sizer: TreeSizer, clock: Clock, times: dict[int, float], tree, accepted, steps: int) -> list[int]:
    """Run steps that all draft `tree`; `accepted(n)` of n nodes are accepted. Returns nodes per step, -1 = not asked."""
    sizes = sorted(times)
    used = []
    for _ in range(steps):
        if sizer.wants_draft():
            n = len(sizer.cut([tree], 200)[0])
            used.append(n)
        else:
            sizer.plain(1, 200)
            n = 0
            used.append(-1)
        clock.now += float(np.interp(n, sizes, [times[size] for size in sizes]))
        sizer.observe(accepted(n))
    return used


def test_all_nodes_are_verified_where_they_are_free(monkeypatch):
    sizer = TreeSizer(measured(FLAT))
    used = drive(sizer, Clock(monkeypatch), FLAT, chain_tree(32, 0.8), lambda n: min(n, 3), 20)
    assert min(used) >= 16


def test_few_nodes_are_verified_where_they_are_dear(monkeypatch):
    sizer = TreeSizer(measured(STEEP))
    used = drive(sizer, Clock(monkeypatch), STEEP, chain_tree(32, 0.5), lambda n: min(n, 1), 20)
    assert 1 <= max(used) <= 4


def test_the_first_steps_try_the_sizes(monkeypatch):
    sizer = TreeSizer(CostCurve())
    used = drive(sizer, Clock(monkeypatch), FLAT, chain_tree(32, 0.9), lambda n: min(n, 5), 14)
    assert used[:10] == [0, 0, 4, 4, 8, 8, 16, 16, 32, 32]
    assert used[-1] >= 16


def test_sizes_that_cannot_pay_are_not_tried(monkeypatch):
    sizer = TreeSizer(CostCurve())
    used = drive(sizer, Clock(monkeypatch), {0: 1.0, 32: 30.0}, chain_tree(32, 0.9), lambda n: min(n, 2), 30)
    assert max(used) <= 4


def test_useless_drafts_close_the_gate_and_cost_a_bounded_part(monkeypatch):
    """Nothing is ever accepted: the whole run stays within 3 % of plain decoding, from the very first step."""
    clock = Clock(monkeypatch)
    sizer = TreeSizer(measured(STEEP))
    used = drive(sizer, clock, STEEP, chain_tree(32, 0.9), lambda n: 0, 400)
    assert used.count(-1) > 300
    assert clock.now < 1.03 * 400


def test_drafting_comes_back_when_it_pays_again(monkeypatch):
    clock = Clock(monkeypatch)
    sizer = TreeSizer(measured(STEEP))
    drive(sizer, clock, STEEP, chain_tree(32, 0.9), lambda n: 0, 100)
    used = drive(sizer, clock, STEEP, chain_tree(32, 0.95), lambda n: n, 200)
    assert np.mean([n > 0 for n in used[150:]]) > 0.9


def test_an_empty_tree_is_no_reason_to_close_the_gate(monkeypatch):
    sizer = TreeSizer(measured(FLAT))
    used = drive(sizer, Clock(monkeypatch), FLAT, tree_of([], []), lambda n: 0, 30)
    assert -1 not in used


def test_the_curve_is_one_of_ratios():
    """A machine that becomes three times slower changes no decision."""
    curve = measured(STEEP)
    before = curve.seconds(1, 200, np.array([0, 8, 32]))
    for _ in range(20):
        for nodes, seconds in STEEP.items():
            curve.observe(1, 200, nodes, 3 * seconds)
    after = curve.seconds(1, 200, np.array([0, 8, 32]))
    np.testing.assert_allclose(after / after[0], before / before[0], rtol=0.1)
    np.testing.assert_allclose(before / before[0], [1, 2, 3], rtol=0.1)


def test_a_new_context_length_starts_from_its_neighbour():
    curve = measured(STEEP)
    curve.observe(1, 5000, 0, 2.0)
    estimate = curve.seconds(1, 5000, np.array([0, 8, 32]))
    np.testing.assert_allclose(estimate / estimate[0], [1, 2, 3], rtol=0.1)
    assert 8 not in curve.unexplored(1)
    assert curve.unexplored(8)[0] == 0


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_text_does_not_depend_on_the_size(name):
    model = tiny_model(name)
    for i, prompt in enumerate(random_prompts(20, seed=31)):
        expected = reference(model, prompt, 40)
        drafter = ScriptedDrafter(adversary(expected[0].tolist(), i))
        assert torch.equal(generate(model, prompt, drafter, max_new_tokens=40).sequences, expected)


def test_what_happened_behind_a_closed_gate_is_told_later():
    """The drafter misses nothing: the history is whole, and the rows of plain steps arrive too."""
    model = tiny_model("llama")
    prompt = random_prompts(1)[0]
    drafter = ScriptedDrafter(count_up)
    result = generate(model, prompt, drafter, max_new_tokens=200, eos_token_id=[])
    (session,) = drafter.sessions.values()
    assert session.history.tolist() == result.sequences[0].tolist()
    taught = sum(len(candidates.tokens) for candidates in session.candidates[1:])
    assert taught == result.stats.steps + result.stats.drafted
    nothing = ScriptedDrafter(knows(result.sequences[0].tolist()))
    result = generate(model, prompt, nothing, max_new_tokens=50, max_nodes=0, eos_token_id=[])
    assert result.stats.drafted == 0
    assert result.stats.gated_steps == result.stats.steps
    assert [entry[0] for entry in nothing.log] == ["open", "commit", "close"]


def test_cutting_a_tree_keeps_it_a_tree():
    random = np.random.default_rng(0)
    for _ in range(200):
        n = int(random.integers(1, 40))
        parents = [int(random.integers(-1, i)) if i else -1 for i in range(n)]
        tree = tree_of(list(range(n)), parents, random.random(n))
        for count in (0, 1, n // 2, n):
            cut = best_nodes(tree, count).check()
            assert len(cut) <= count
        monotone = tree_of(list(range(n)), parents)
        assert len(best_nodes(monotone, n // 2).check()) == n // 2
        depth = int(random.integers(0, 4))
        assert (not_deeper(tree, depth).check().depths() <= depth).all()
        assert len(not_deeper(tree, depth)) == int((tree.depths() <= depth).sum())
