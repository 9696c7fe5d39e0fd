"""Workloads by contenders: each workload with a fresh drafter, as one result row each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from redraft.replay.contenders import Contender
from redraft.replay.replay import replay_item, replay_items
from redraft.replay.tally import Tally
from redraft.replay.traces import Item, load_workload

__all__ = ["Plan", "macro", "replay_file", "replay_files"]


@dataclass(frozen=True)
class Plan:
    """What part of each workload is replayed, and with what tree sizes.

    Attributes:
        tokens: output tokens measured in each workload; the first items that hold them, the last one cut.
        warm: output tokens that go through the drafter before, not measured; the measured items follow them.
        skip: output tokens left out altogether before: with skip=n a cold run measures what warm=n measures.
        max_nodes, min_prob: handed to `draft`; None leaves them to the drafter's configuration.
    """

    tokens: int = 12_000
    warm: int = 0
    skip: int = 0
    max_nodes: int | None = None
    min_prob: float | None = None


def replay_file(
    contender: Contender, file: Path, tokenizer, plan: Plan, progress: Callable[[int], object] = lambda tokens: None
) -> Tally:
    """Replay one trace file through a fresh drafter of the contender's kind."""
    workload = load_workload(file, tokenizer)
    sizes = {"max_nodes": plan.max_nodes, "min_prob": plan.min_prob, "progress": progress}
    _load_kernels(contender)
    with contender.make() as drafter:
        if plan.warm:
            replay_items(drafter, workload.items(plan.warm, skip=plan.skip), **sizes)
        return replay_items(drafter, workload.items(plan.tokens, skip=plan.skip + plan.warm), **sizes)


def replay_files(
    contender: Contender, files: list[Path], tokenizer, plan: Plan, *, jobs: int = 1, progress: Callable = print
) -> Iterator[tuple[Path, Tally]]:
    """Replay each file, `jobs` at a time in processes of their own; results come in the order of `files`.

    `progress(tokens)` is told the output tokens replayed; with several jobs, once a file is done.
    """
    if jobs == 1:
        for file in files:
            yield file, replay_file(contender, file, tokenizer, plan, progress)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(replay_file, contender, file, tokenizer, plan) for file in files]
        for file, result in zip(files, running):
            yield file, result.result()
            progress(plan.tokens + plan.warm)


def macro(rows: list[dict]) -> dict:
    """The mean over workloads of every number in their summaries (None where no workload has it)."""
    keys = ["tokens_per_step", "tokens_per_step_outside_loops", "share_in_loops", "nodes_per_step", "accepted_share",
            "calibration_error", "path_calibration_error"]  # fmt: skip
    mean = {key: _mean([row[key] for row in rows]) for key in keys}
    for group in ("draft_us", "commit_us_per_token", "open_us_per_token", "close_us_per_token"):
        mean[group] = {part: _mean([row[group][part] for row in rows]) for part in ("p50", "p99", "mean")}
    return mean


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _load_kernels(contender: Contender) -> None:
    """Compile or load every kernel on a throw-away drafter, so that no measured call pays for it."""
    text = np.arange(96, dtype=np.int32) % 7
    with contender.make() as drafter:
        for _ in range(2):
            replay_item(drafter, Item(text[:64], text[64:]), Tally())
