"""The size of trees follows measured costs: all nodes where they are free, none where they do not pay, and back again."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scripted_drafter import ScriptedDrafter, count_up, knows, tree_of
from test_decoding import adversary, reference
from tiny_models import random_prompts, tiny_llama, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel

from redraft.decoding import first_costs, tree_size
from redraft.decoding.generate import generate
from redraft.decoding.pruning import best_nodes, not_deeper
from redraft.decoding.stats import GenerationStats
from redraft.decoding.step_cost import StepCost, cost_of, sizes_to_try
from redraft.decoding.target_model import TargetModel
from redraft.decoding.tree_size import TreeSizer, Trust

FLAT = {0: 1.0, 3: 1.0, 7: 1.01, 15: 1.02, 31: 1.03}
STEEP = {0: 1.0, 3: 1.3, 7: 2.0, 15: 2.3, 31: 3.0}
REAL = {0: 1.0, 1: 1.12, 3: 1.04, 7: 1.18, 15: 1.56, 31: 2.52}  # SmolLM2 in bfloat16, packed


def chain_tree(n: int, p: float):
    return tree_of(list(range(n)), list(range(-1, n - 1)), [p ** (i + 1) for i in range(n)])


def measured(times: dict[int, float], rows: int = 1) -> StepCost:
    """The curve as it is before the first step."""
    cost = StepCost()
    cost.add_round(rows, 200, {rows + nodes: seconds for nodes, seconds in times.items()})
    return cost


def a_sizer(cost: StepCost) -> TreeSizer:
    return TreeSizer(cost, Trust())


class Clock:
    """Stands in for the time module: a step takes what the test says."""

    def __init__(self, monkeypatch, module=tree_size):
        self.now = 0.0
        monkeypatch.setattr(module, "time", self)

    def perf_counter(self):
        return self.now


def drive(
    sizer: TreeSizer,
    clock: Clock,
    times: dict[int, float],
    tree,
    accepted,
    steps: int,
    *,
    drafting: float = 0.0,
    rows: int = 1,
) -> list[int]:
    """Run steps in which all rows draft `tree`; `accepted(n)` of n nodes are accepted. Returns nodes per step, -1 = not asked."""
    sizes = sorted(times)
    used = []
    for _ in range(steps):
        if sizer.wants_draft():
            clock.now += drafting
            n = sum(map(len, sizer.cut([tree] * rows, 200)))
            used.append(n)
        else:
            sizer.plain(rows, 200)
            n = 0
            used.append(-1)
        clock.now += float(np.interp(n, sizes, [times[size] for size in sizes]))
        sizer.observe(accepted(n))
    return used


def test_all_nodes_are_verified_where_they_are_free(monkeypatch):
    sizer = a_sizer(measured(FLAT))
    used = drive(sizer, Clock(monkeypatch), FLAT, chain_tree(32, 0.8), lambda n: min(n, 3), 20)
    assert min(used) >= 15


def test_few_nodes_are_verified_where_they_are_dear(monkeypatch):
    sizer = a_sizer(measured(STEEP))
    used = drive(sizer, Clock(monkeypatch), STEEP, chain_tree(32, 0.5), lambda n: min(n, 1), 20)
    assert 1 <= max(used) <= 4


def test_already_the_first_step_has_the_right_size(monkeypatch):
    for times, few, most in ((FLAT, 15, 31), (STEEP, 0, 3)):
        sizer = a_sizer(measured(times))
        used = drive(sizer, Clock(monkeypatch), times, chain_tree(32, 0.7), lambda n: min(n, 2), 1)
        assert few <= used[0] <= most


def test_a_round_tries_the_sizes_while_text_is_written(monkeypatch):
    sizer = a_sizer(measured(FLAT))
    used = drive(sizer, Clock(monkeypatch), FLAT, chain_tree(32, 0.9), lambda n: min(n, 5), 530)
    assert used[512:519] == [0, 7, 15, 31, 3, 1, 1]  # the last was not measured before: once for its kernels
    assert min(used[:512] + used[519:]) >= 15


def test_a_round_leaves_out_what_cannot_pay(monkeypatch):
    times = {0: 1.0, 3: 1.1, 31: 30.0}
    sizer = a_sizer(measured(times))
    used = drive(sizer, Clock(monkeypatch), times, chain_tree(32, 0.9), lambda n: min(n, 2), 530)
    assert max(used) <= 3 and 0 in used[512:]


def test_a_step_is_judged_by_what_its_seconds_are_worth(monkeypatch):
    """Steps whose first node is certain do not leave out nodes that pay for themselves."""
    times = {0: 1.0, 31: 1.31}  # a node costs a hundredth of a step
    tree = tree_of(list(range(32)), [-1] * 32, [0.9] + [0.04] * 31)
    sizer = a_sizer(measured(times))
    used = drive(sizer, Clock(monkeypatch), times, tree, lambda n: float(0.9 + 0.04 * (n - 1)), 60)
    assert set(used[20:]) == {31}
    dear = {nodes: seconds + 0.03 * nodes for nodes, seconds in times.items()}
    sizer = a_sizer(measured(dear))
    used = drive(sizer, Clock(monkeypatch), dear, tree, lambda n: float(0.9 + 0.04 * (n - 1)), 60)
    assert set(used[20:]) <= {1, 3}


def test_where_the_optimum_is_flat_more_nodes_come_along(monkeypatch):
    """7 nodes are worth no more than 3 and cost 1.5 % of the step more; 11 cost 3 %."""
    times = {0: 1.0, 3: 1.95, 7: 1.98, 11: 2.01, 31: 9.0}
    tree = tree_of(list(range(31)), list(range(-1, 30)), [1.0] * 3 + [1e-6] * 28)
    used = drive(a_sizer(measured(times)), Clock(monkeypatch), times, tree, lambda n: min(n, 3), 40)
    assert set(used[1:]) == {7}


def test_a_good_tree_is_no_reason_to_leave_out_what_is_cheap(monkeypatch):
    """One step in eight has a tree, whose first nodes are certain: what the others cost is judged by all steps' rate."""
    clock = Clock(monkeypatch)
    times = {0: 1.0, 31: 1.31}
    tree = tree_of(list(range(31)), [-1, 0, 1] + [2] * 28, [1.0] * 3 + [0.027] * 28)
    sizer = a_sizer(measured(times))
    used = []
    for _ in range(20):
        drive(sizer, clock, times, tree_of([], []), lambda n: 0, 7)
        used += drive(sizer, clock, times, tree, lambda n: float(tree.probs[:n].sum()), 1)
    assert set(used[5:]) == {31}


def test_a_batch_has_one_budget_for_its_best_nodes(monkeypatch):
    Clock(monkeypatch)
    costs = {0: 1.0, 8: 1.1, 16: 1.12, 24: 3.0, 56: 8.0}
    sizer = a_sizer(measured(costs, rows=8))
    trees = [chain_tree(32, 0.7)] + [chain_tree(32, 0.3)] * 6 + [tree_of([], [])]
    assert sizer.wants_draft()
    cut = [len(tree) for tree in sizer.cut(trees, 200)]
    assert sum(cut) == 16
    assert cut[0] > max(cut[1:]) and cut[-1] == 0 and min(cut[1:-1]) >= 1


@pytest.mark.parametrize("times", [FLAT, STEEP, REAL], ids=["flat", "steep", "real"])
@pytest.mark.parametrize("confidence", [0.999, 0.9, 0.5])
@pytest.mark.parametrize("drafting", [0.0, 0.05, 0.5])
def test_useless_drafts_cost_a_bounded_part(monkeypatch, times, confidence, drafting):
    """Nothing is ever accepted, however sure the drafter is of it: the stated bound, in each moment from the very first, and
    when the next round of measuring comes. What drafting takes may exceed it, for it is known when it is over; but nothing is
    verified then."""
    clock = Clock(monkeypatch)
    sizer = a_sizer(measured(times))
    tree = chain_tree(32, confidence)
    used = []
    for steps in range(1, 701):
        used += drive(sizer, clock, times, tree, lambda n: 0, 1, drafting=drafting)
        beyond = 0.0 if steps > 1 and used[-1] > 0 else drafting
        assert clock.now <= 1.01 * steps + 1.0 + beyond + 1e-9
    assert used.count(-1) > 200


def test_a_curve_that_is_a_little_wrong_is_no_reason_to_lose_for_ever(monkeypatch):
    """Three nodes seem to cost less than none, and cost 4 % more."""
    clock = Clock(monkeypatch)
    sizer = a_sizer(measured(REAL | {3: 0.99}))
    used = drive(sizer, clock, REAL, chain_tree(32, 0.98), lambda n: 0, 400)
    assert used.count(-1) > 200
    assert clock.now <= 1.01 * 400 + 1.0


def test_what_was_gained_may_be_lost_again_but_no_more(monkeypatch):
    clock = Clock(monkeypatch)
    sizer = a_sizer(measured(REAL))
    drive(sizer, clock, REAL, chain_tree(32, 0.9), lambda n: min(n, 3), 50)
    tokens = 50 + 150
    drive(sizer, clock, REAL, chain_tree(32, 0.9), lambda n: 0, 300)
    assert clock.now <= 1.01 * (tokens + 300) + 1.0


def test_a_batch_has_gained_the_steps_that_it_is_spared(monkeypatch):
    """One token for one of eight sequences is an eighth of a step."""
    clock = Clock(monkeypatch)
    times = {0: 1.0, 24: 1.05}
    sizer = a_sizer(measured(times, rows=8))
    spared = 0.0
    for steps in range(1, 101):
        (nodes,) = drive(sizer, clock, times, chain_tree(3, 0.999), lambda n: min(n, 1), 1, drafting=0.5, rows=8)
        spared += (nodes > 0) / 8
        assert clock.now <= 1.01 * (steps + spared) + 1.0 + 0.5
    assert spared > 0


def test_drafts_that_are_worth_less_than_they_take_are_not_asked_for(monkeypatch):
    """The ledger would bear 0.04 steps a step for long; how long they take is known from the second step on."""
    times = {0: 1.0, 3: 1.0}
    sizer = a_sizer(measured(times))
    tree = chain_tree(3, 0.42)
    used = drive(sizer, Clock(monkeypatch), times, tree, lambda n: 0.8 * float(tree.probs[:n].sum()), 40, drafting=0.5)
    assert [step for step, nodes in enumerate(used) if nodes >= 0] == [0, 1, 2, 3, 4, 13, 30]


def test_a_drafter_slower_than_the_target_is_left_alone(monkeypatch):
    """Its drafts are good, but a step without it would be over earlier."""
    clock = Clock(monkeypatch)
    sizer = a_sizer(measured(REAL))
    used = drive(sizer, clock, REAL, chain_tree(8, 0.8), lambda n: min(n, 2), 300, drafting=5.0)
    assert used.count(-1) > 250
    sizer = a_sizer(measured(REAL))
    used = drive(sizer, clock, REAL, chain_tree(8, 0.8), lambda n: min(n, 2), 300, drafting=0.5)
    assert used.count(-1) == 0


def test_a_single_stall_is_not_what_drafts_cost(monkeypatch):
    """Kernels that are compiled: a thousand steps' time, and drafting goes on soon after."""
    clock = Clock(monkeypatch)
    sizer = a_sizer(measured(REAL))
    drive(sizer, clock, REAL, chain_tree(16, 0.9), lambda n: 0, 1)
    drive(sizer, clock, REAL, chain_tree(16, 0.9), lambda n: min(n, 1), 1, drafting=1000.0)
    used = drive(sizer, clock, REAL, chain_tree(16, 0.9), lambda n: min(n, 3), 300)
    assert used.count(-1) < 260 and used[-1] > 0


def test_a_closed_gate_is_probed_at_growing_distances(monkeypatch):
    clock = Clock(monkeypatch)
    cheap = {0: 1.0, 3: 1.02, 31: 4.0}
    sizer = a_sizer(measured(cheap))
    used = drive(sizer, clock, cheap, chain_tree(32, 0.02), lambda n: 0, 400)
    asked = [step for step, nodes in enumerate(used) if nodes >= 0]
    assert asked == [0, 1, 2, 3, 12, 29, 62, 127, 192, 257, 322, 387]
    assert {used[step] for step in asked[:4]} == {0} and {used[step] for step in asked[4:]} == {3}


def test_drafting_comes_back_when_it_pays_again(monkeypatch):
    clock = Clock(monkeypatch)
    sizer = a_sizer(measured(STEEP))
    drive(sizer, clock, STEEP, chain_tree(32, 0.9), lambda n: 0, 100)
    used = drive(sizer, clock, STEEP, chain_tree(32, 0.95), lambda n: n, 200)
    assert np.mean([n > 0 for n in used[150:]]) > 0.9


def test_an_empty_tree_is_no_reason_to_close_the_gate(monkeypatch):
    sizer = a_sizer(measured(FLAT))
    used = drive(sizer, Clock(monkeypatch), FLAT, tree_of([], []), lambda n: 0, 300, drafting=0.005)
    assert -1 not in used
    used = drive(sizer, Clock(monkeypatch), FLAT, tree_of([], []), lambda n: 0, 300, drafting=0.5)
    assert used.count(-1) > 200  # but one that takes long is


def round_of(cost: StepCost, seconds: dict[int, float]) -> None:
    """A round with text, when it is time for one."""
    while cost.tried(1, 200) is None:
        cost.observe(1, 200, 8, 1.0)
    for nodes, each in seconds.items():
        cost.observe(1, 200, 1 + nodes, each)
    cost.end_round(1, 200)


def test_the_curve_is_one_of_ratios():
    """A machine that becomes slower from round to round changes no decision."""
    cost = measured(STEEP)
    for load in (1.0, 3.0, 0.2, 9.0):
        round_of(cost, {nodes: seconds * load for nodes, seconds in STEEP.items()})
    np.testing.assert_allclose(cost.seconds(1, 200, np.array([1, 8, 32])), [1, 2, 3])
    assert cost.tried(1, 200) is None


def test_first_forwards_of_a_shape_and_disturbed_ones_do_not_count():
    cost = StepCost()
    for disturbed in ((), (31,), (7,), (3,)):
        if not disturbed:
            round_of(cost, dict.fromkeys(STEEP, 10.0))
        round_of(cost, {nodes: seconds * (1 + (nodes in disturbed)) for nodes, seconds in STEEP.items()})
    np.testing.assert_allclose(cost.seconds(1, 200, np.array([1, 4, 32])), [1, 1.3, 3])


def test_rounds_come_back_and_follow_a_machine_that_has_changed():
    cost = measured(STEEP)
    for _ in range(4):
        round_of(cost, STEEP)
    for _ in range(3):  # of the last five rounds the median counts
        steps = 0
        while cost.tried(1, 200) is None:
            cost.observe(1, 200, 8, 1.0)
            steps += 1
        assert steps == 512
        for nodes, seconds in FLAT.items():
            cost.observe(1, 200, 1 + nodes, seconds)
        cost.end_round(1, 200)
    np.testing.assert_allclose(cost.seconds(1, 200, np.array([1, 8, 32])), [1, 1.01, 1.03])


def test_a_new_context_length_and_batch_start_from_their_neighbours():
    cost = measured(STEEP)
    np.testing.assert_allclose(cost.seconds(1, 5000, np.array([1, 8, 32, 64])), [1, 2, 3, 4.4])
    np.testing.assert_allclose(cost.seconds(8, 200, np.array([8, 32])), [1, 1.5])
    assert sizes_to_try(1)[:5] == [1, 8, 16, 32, 4] and sizes_to_try(8)[:4] == [8, 16, 24, 32]
    for _ in range(128):
        for rows, context in ((1, 5000), (8, 200), (2, 200), (3, 200), (2, 5000)):
            assert cost.tried(rows, context) is None
            cost.observe(rows, context, rows, 1.0)
    assert cost.tried(1, 5000) == [] and cost.tried(8, 200) == []
    assert cost.tried(2, 200) is None and cost.tried(3, 200) == []
    assert cost.tried(2, 5000) == []  # a single sequence was measured elsewhere only


def test_of_several_curves_the_nearest_stands_in():
    cost = StepCost()
    for context, most in ((100_000, 9.0), (200, 2.0), (5000, 4.0)):
        cost.add_round(1, context, {1: 1.0, 32: most})
    for context, most in ((200, 2.0), (500, 2.0), (5000, 4.0), (10_000, 4.0), (60_000, 9.0)):
        assert cost.seconds(1, context, np.array([32])) == [most]


def test_a_round_without_a_tree_is_not_over():
    cost = measured(STEEP)
    while cost.tried(1, 200) is None:
        cost.observe(1, 200, 8, 1.0)
    cost.observe(1, 200, 1, 1.0)
    cost.end_round(1, 200)
    assert cost.tried(1, 200) == [1]


def test_short_trees_are_measured_too(monkeypatch):
    """A drafter that never gives more than five nodes."""
    times = {0: 1.0, 5: 1.1}
    sizer = a_sizer(measured({0: 1.0, 31: 1.6}))
    used = drive(sizer, Clock(monkeypatch), times, chain_tree(5, 0.9), lambda n: min(n, 4), 540)
    assert used[512:518] == [0, 5, 3, 3, 1, 1] and set(used[520:]) == {5}


def test_the_first_costs_of_a_model_are_measured_once():
    model = tiny_llama(seed=71)  # one that no other test has measured
    prompt = random_prompts(1)[0]
    drafter = ScriptedDrafter(count_up)
    assert generate(model, prompt, None, max_new_tokens=5).stats.seconds["costs"] == 0
    assert generate(model, prompt, drafter, max_new_tokens=5, adaptive=False).stats.seconds["costs"] == 0
    assert generate(model, prompt, drafter, max_new_tokens=5, max_nodes=0).stats.seconds["costs"] == 0
    first = generate(model, prompt, drafter, max_new_tokens=5).stats
    assert first.seconds["costs"] > 0 and first.decode_seconds < sum(first.seconds.values()) - first.seconds["costs"]
    assert cost_of(model).knows(1, 128, 32) and cost_of(model).measured
    known = cost_of(model).seconds(1, 128, np.array([1, 2, 4, 8, 16, 32]))
    assert known[0] == 1 and 0.3 < known.min() and known.max() < 60 and len(set(known)) == 6
    assert generate(model, prompt, drafter, max_new_tokens=5).stats.seconds["costs"] == 0


@pytest.mark.parametrize(("unit", "passes"), [(0.001, 4), (0.02, 2)])
def test_first_costs_are_the_shortest_of_some_passes(monkeypatch, unit, passes):
    """Three passes after that which makes kernels, or what a second has room for. The last of four is disturbed."""
    calls = Counter()

    class Timed(TargetModel):
        def verify(self, cache, roots, trees):
            entries = 1 + len(trees[0])
            slow = {0: 50, 3: 1 + (entries == 8)}.get(calls[entries], 1)
            calls[entries] += 1
            clock.now += unit * slow * (1 + 0.1 * entries)
            return super().verify(cache, roots, trees)

    clock = Clock(monkeypatch, first_costs)
    target, cost = Timed(tiny_llama()), StepCost()
    with target.decoding(GenerationStats()):
        calls.clear()  # the trial's
        first_costs.measure_costs(target, cost)
    assert set(calls.values()) == {passes} and len(calls) == 6
    np.testing.assert_allclose(cost.seconds(1, 128, np.array([1, 8, 32])), [1, 1.8 / 1.1, 4.2 / 1.1])


def test_first_costs_of_a_model_with_few_positions():
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config).eval()
    stats = generate(model, random_prompts(1)[0], ScriptedDrafter(count_up), max_new_tokens=5).stats
    assert stats.seconds["costs"] > 0


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
