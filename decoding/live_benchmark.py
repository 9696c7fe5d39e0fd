"""Measuring drafting with a real model: every prompt is answered by every contender in turn, in one process.

    generate  transformers' `model.generate`, greedy (sampled where a temperature is given)
    plain     redraft's own loop without drafts
    lookup    transformers' prompt lookup, `prompt_lookup_num_tokens=10`
    redraft   redraft's loop with one drafter for the whole run, which learns as it goes
    fixed-N   the same with a drafter of its own and always N nodes, to judge how `redraft` sizes its trees

Machines are noisy, so the contenders alternate prompt by prompt, in an order that rotates, and only ratios within a run mean
anything. With one torch thread the processor time of that thread is taken, which other processes disturb far less than
wall time; else wall time. Time per token counts, so that texts of different length (a near-tie
that half precision broke otherwise) compare.

What a model's first use costs (weights packed, costs of steps measured) is paid before and in no answer's time; a record has the
seconds.

Every text is checked against its reference: `generate` where greedy, `plain` with the same seed where sampled. In half
precision a text may leave its reference where the two best logits were closer than 0.5; the gap is measured and kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from redraft.decoding.first_costs import measure_costs
from redraft.decoding.generate import generate
from redraft.decoding.stats import GenerationStats
from redraft.decoding.step_cost import cost_of
from redraft.decoding.target_model import TargetModel
from redraft.replay.loops import in_loop

__all__ = [
    "CONTENDERS",
    "NEAR_TIE",
    "Answer",
    "Prompt",
    "Settings",
    "clock_name",
    "fixed_nodes",
    "learn_costs",
    "measure",
    "task_of",
    "task_rows",
]

CONTENDERS = ("generate", "plain", "lookup", "redraft")
NEAR_TIE = 0.5
_MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


@dataclass(frozen=True)
class Settings:
    """What a run is made with; `temperature` None is greedy, `max_nodes` None leaves it to the drafter."""

    new_tokens: int = 128
    temperature: float | None = None
    max_nodes: int | None = None
    adaptive: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Prompt:
    """One prompt or a left-padded batch of them: their task, ids int64[rows, n], mask int64[rows, n]."""

    task: str
    ids: torch.Tensor
    mask: torch.Tensor


@dataclass
class Answer:
    """What one contender made of one prompt or batch; steps are counted once per row that takes part.

    `gap` is that of the two best logits where a text left its reference (the widest, in a batch).
    """

    task: str
    contender: str
    tokens: int
    steps: int
    seconds: float
    rows: int = 1
    outside_tokens: int = 0  # tokens and steps that did not start in a repetition loop
    outside_steps: int = 0
    same: bool | None = None  # None: there was no reference
    gap: float | None = None
    drafted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_depth: dict[int, int] = field(default_factory=dict)
    gated_steps: int = 0
    phases: dict[str, float] = field(default_factory=dict)


def task_of(category: str) -> str:
    """Spec-Bench's six tasks: the eight categories of MT-bench count as one."""
    return "mt_bench" if category in _MT_BENCH else category


def fixed_nodes(contender: str) -> int | None:
    """The number of nodes of a `fixed-N` contender; None for other names."""
    name, _, number = contender.partition("-")
    return int(number) if name == "fixed" and number.isdecimal() else None


def clock_name() -> str:
    """Which clock is used: processor time of this thread, or wall time."""
    return "thread" if torch.get_num_threads() == 1 and not torch.cuda.is_available() else "wall"


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.thread_time() if clock_name() == "thread" else time.perf_counter()


def learn_costs(model) -> float:
    """Measure what steps cost, as the first call with a drafter would; returns the seconds that it took."""
    target, stats = TargetModel(model), GenerationStats()
    with target.decoding(stats), stats.timed("costs"):
        measure_costs(target, cost_of(model))
    return stats.seconds["costs"]


def measure(model, prompts: Iterable[Prompt], drafters: Mapping, settings: Settings, contenders=CONTENDERS):
    """Yield the list of answers to each prompt, one for each of `contenders`; `drafters` has those of them that draft."""
    for number, prompt in enumerate(prompts):
        order = [contenders[(i + number) % len(contenders)] for i in range(len(contenders))]
        texts, answers = {}, {}
        for name in order:
            texts[name], answers[name] = _answer(name, model, prompt, drafters.get(name), settings)
        greedy = settings.temperature is None
        reference = texts.get("generate" if greedy and "generate" in texts else "plain")
        for name, answer in answers.items():
            if reference is not None and (greedy or name in drafters):
                answer.same, answer.gap = _compare(model, prompt, reference, texts[name])
        yield [answers[name] for name in contenders]


def _answer(name: str, model, prompt: Prompt, drafter, settings: Settings) -> tuple[list[list[int]], Answer]:
    if name not in ("generate", "lookup"):
        return _own_answer(name, model, prompt, drafter, settings)
    sampled = settings.temperature is not None
    options = {"do_sample": True, "temperature": settings.temperature, "top_k": 0} if sampled else {"do_sample": False}
    if name == "lookup":
        options["prompt_lookup_num_tokens"] = 10
    torch.manual_seed(settings.seed)
    forwards = []
    hook = model.register_forward_hook(lambda *arguments: forwards.append(1))
    try:
        began = _now()
        written = model.generate(prompt.ids, attention_mask=prompt.mask, max_new_tokens=settings.new_tokens, **options)
        seconds = _now() - began
    finally:
        hook.remove()
    texts = [_up_to_end(row, model) for row in written[:, prompt.ids.shape[1] :].tolist()]
    steps = sum(len(text) - 1 for text in texts) if len(texts) > 1 else len(forwards) - 1
    return texts, Answer(prompt.task, name, sum(map(len, texts)), steps, seconds, len(texts))


def _own_answer(name: str, model, prompt: Prompt, drafter, settings: Settings) -> tuple[list[list[int]], Answer]:
    rows = range(len(prompt.ids))
    starts: list[list[int]] = [[] for _ in rows]
    texts: list[list[int]] = [[] for _ in rows]

    def note(step) -> None:
        starts[step.row].append(len(texts[step.row]))
        texts[step.row].extend(step.tokens)

    sampling = {"do_sample": True, "temperature": settings.temperature, "seed": settings.seed}
    fixed = fixed_nodes(name)
    began = _now()
    result = generate(
        model,
        prompt.ids,
        drafter,
        attention_mask=prompt.mask,
        max_new_tokens=settings.new_tokens,
        max_nodes=settings.max_nodes if fixed is None else fixed,
        adaptive=settings.adaptive and fixed is None,
        on_step=note,
        **(sampling if settings.temperature is not None else {}),
    )
    seconds, stats = _now() - began, result.stats
    answer = Answer(prompt.task, name, sum(map(len, texts)), stats.steps, seconds, len(texts))
    for text, begins in zip(texts, starts):
        looping = in_loop(np.array(text, np.int32))
        for start, end in zip(begins[1:], [*begins[2:], len(text)]):
            if not looping[start]:
                answer.outside_steps += 1
                answer.outside_tokens += end - start
    answer.drafted, answer.gated_steps, answer.phases = stats.drafted, stats.gated_steps, dict(stats.seconds)
    answer.accepted_by_source, answer.accepted_by_depth = dict(stats.accepted_by_source), dict(stats.accepted_by_depth)
    return texts, answer


def _up_to_end(text: list[int], model) -> list[int]:
    """`text` up to its first end token, which is kept; padding behind it is not."""
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    end = next((place for place, token in enumerate(text) if token in ends), len(text) - 1)
    return text[: end + 1]


def _compare(model, prompt: Prompt, reference: list[list[int]], texts: list[list[int]]) -> tuple[bool, float | None]:
    """Whether all rows are the same, and else the widest gap of the two best logits where one parts."""
    gaps = []
    for row, (expected, text) in enumerate(zip(reference, texts)):
        if text == expected:
            continue
        parting = next((i for i, (a, b) in enumerate(zip(expected, text)) if a != b), min(len(expected), len(text)))
        written = torch.tensor(expected[:parting], dtype=torch.long, device=prompt.ids.device)
        ids = torch.cat([prompt.ids[row][prompt.mask[row].bool()], written])
        with torch.inference_mode():
            best = model(ids[None], logits_to_keep=1).logits[0, -1].float().topk(2).values
        gaps.append(float(best[0] - best[1]))
    return not gaps, max(gaps, default=None)


def task_rows(answers: list[Answer]) -> dict[str, dict]:
    """For each task, and `macro` for the mean over tasks: speed ratios to `generate` and `plain`, tokens per step."""
    rows = {}
    for task in dict.fromkeys(answer.task for answer in answers):
        rows[task] = _row([answer for answer in answers if answer.task == task])
    numbers = [name for name in next(iter(rows.values())) if name != "prompts"]
    rows["macro"] = {name: float(np.mean([row[name] for row in rows.values() if name in row])) for name in numbers}
    rows["macro"]["prompts"] = sum(row["prompts"] for row in rows.values() if "prompts" in row)
    return rows


def _row(answers: list[Answer]) -> dict:
    by_name = {
        name: [answer for answer in answers if answer.contender == name]
        for name in dict.fromkeys(answer.contender for answer in answers)
    }
    per_token = {
        name: sum(answer.seconds for answer in group) / max(sum(answer.tokens for answer in group), 1)
        for name, group in by_name.items()
    }
    row: dict = {"prompts": len(next(iter(by_name.values())))}
    for base in ("generate", "plain"):
        for name in by_name:
            if base in per_token and name != base:
                row[f"{name} / {base}"] = per_token[base] / per_token[name]
    if "lookup" in per_token and "redraft" in per_token:
        row["redraft / lookup"] = per_token["lookup"] / per_token["redraft"]
    for name, group in by_name.items():
        if name not in ("generate", "plain"):
            steps = max(sum(a.steps for a in group), 1)
            row[f"{name} tokens/step"] = sum(a.tokens - a.rows for a in group) / steps
        if name == "redraft" or fixed_nodes(name):
            row[f"{name} tokens/step outside loops"] = sum(a.outside_tokens for a in group) / max(
                sum(a.outside_steps for a in group), 1
            )
            row[f"{name} nodes/step"] = sum(a.drafted for a in group) / steps
            compared = [a.same for a in group if a.same is not None]
            if compared:
                row[f"{name} same text"] = sum(compared) / len(compared)
            row[f"{name} overhead"] = _overhead(group)
    if "redraft" in by_name:
        group = by_name["redraft"]
        row["gated share"] = sum(a.gated_steps for a in group) / max(sum(a.steps for a in group), 1)
    return row


def _overhead(answers: list[Answer]) -> float:
    """The share of decoding that is neither forward nor head."""
    decoding = sum(sum(answer.phases.values()) - answer.phases["prefill"] - answer.phases["costs"] for answer in answers)
    model = sum(answer.phases[phase] for answer in answers for phase in ("forward", "head"))
    return 1 - model / decoding if decoding else 0.0
