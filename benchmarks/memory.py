"""Bounded memory: a long stream of requests through a small memory. What does it cost in tokens, does it stay small?

    python benchmarks/memory.py TRACES --tokenizer T --record

Two runs in one process:

1. All workloads interleaved through one drafter, 60k output tokens of each (the next item comes from the workload
   that has had the smallest share of its tokens so far), with a memory of 200k tokens and, for comparison, without a
   limit. Tokens per step is the mean over the workloads of their second halves; resident memory is read on the way.
2. 100,000 short requests of made-up text through a memory of 200k tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from machine import RECORDS, provenance
from tqdm import tqdm

from redraft.index_builders.tokenizers import load_tokenizer
from redraft.replay.contenders import Contender, Redraft
from redraft.replay.replay import replay_item
from redraft.replay.report import table
from redraft.replay.tally import Tally
from redraft.replay.traces import Item, RememberedTokenizer, Workload, load_workload, trace_files
from redraft.retrieval.config import DraftConfig

BUDGET = 200_000
UNLIMITED = 2**30
_READINGS = 10  # of resident memory, over each run


def resident_megabytes() -> float:
    """Resident memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def interleaved(workloads: list[Workload], tokens: int) -> Iterator[tuple[str, Item, bool]]:
    """Items of all workloads as one stream: the workload's name, the item, whether it lies in the second half."""
    queues = {workload.name: list(workload.items(tokens)) for workload in workloads}
    totals = {name: sum(len(item.output) for item in items) for name, items in queues.items()}
    done = dict.fromkeys(queues, 0)
    upcoming = dict.fromkeys(queues, 0)
    while True:
        waiting = [name for name in queues if upcoming[name] < len(queues[name])]
        if not waiting:
            return
        name = min(waiting, key=lambda name: done[name] / totals[name])
        item = queues[name][upcoming[name]]
        yield name, item, 2 * done[name] >= totals[name]
        upcoming[name] += 1
        done[name] += len(item.output)


def long_stream(contender: Contender, workloads: list[Workload], tokens: int) -> dict:
    """Replay the interleaved stream: tokens per step over the second halves, resident memory on the way."""
    stream = list(interleaved(workloads, tokens))
    total = sum(len(item.output) for _, item, _ in stream)
    emitted, steps = Counter(), Counter()
    end = Tally()  # the last tenth, for its times: kept for all steps they would be what grows
    done, readings = 0, []
    with contender.make() as drafter, tqdm(total=total, unit="tok", desc=contender.name, disable=None) as bar:
        for name, item, late in stream:
            tally = Tally()
            replay_item(drafter, item, tally)
            if late:
                emitted[name] += tally.emitted
                steps[name] += tally.steps
            if done * _READINGS >= total * (_READINGS - 1):
                end.add(tally)
            done += len(item.output)
            bar.update(len(item.output))
            if done * _READINGS >= total * (len(readings) + 1):
                gc.collect()
                readings.append([done, round(resident_megabytes(), 1)])
    by_workload = {name: emitted[name] / steps[name] for name in emitted}
    numbers = end.summary()
    return {
        "output_tokens": total,
        "tokens_per_step_second_half": sum(by_workload.values()) / len(by_workload),
        "workloads": by_workload,
        "resident_megabytes": readings,
        **{key: numbers[key] for key in ("draft_us", "commit_us_per_token", "close_us_per_token")},
    }


def short_requests(contender: Contender, requests: int) -> dict:
    """Open, draft, commit, close, with 8 tokens of prompt and 12 of output that nobody wrote before."""
    random = np.random.default_rng(4)
    readings = []
    with contender.make() as drafter:
        for request in tqdm(range(1, requests + 1), unit="req", desc="short requests", disable=None):
            text = random.zipf(1.2, 20) % contender.config.vocab_size
            with drafter.open(text[:8]) as session:
                for start in (8, 12, 16):
                    session.draft()
                    session.commit(text[start : start + 4])
            if request * _READINGS % requests < _READINGS:
                gc.collect()
                readings.append([request, round(resident_megabytes(), 1)])
    return {"requests": requests, "resident_megabytes": readings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, metavar="TRACES", help="a folder of *.jsonl.gz")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, transformers folder or name, or GGUF file")
    parser.add_argument("--tokens", type=int, default=60_000, help="output tokens of each workload")
    parser.add_argument("--requests", type=int, default=100_000, help="short requests")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDS.name}/memory-DATE.json")
    args = parser.parse_args()
    tokenizer = RememberedTokenizer(args.tokenizer, load_tokenizer)
    workloads = [load_workload(file, tokenizer) for file in trace_files(args.traces)]
    bounded = Redraft(DraftConfig(vocab_size=tokenizer.vocab_size, memory_tokens=BUDGET), name=f"{BUDGET} tokens")
    unlimited = Redraft(replace(bounded.config, memory_tokens=UNLIMITED), name="unlimited")
    record = provenance() | {"budget": BUDGET}
    record["short_requests"] = short_requests(bounded, args.requests)
    record["long_stream"] = {c.name: long_stream(c, workloads, args.tokens) for c in (bounded, unlimited)}
    print(table(("memory", "tokens/step, second halves", "draft p50", "p99", "commit/token", "close/token"), [
        [name, f"{run['tokens_per_step_second_half']:.3f}", f"{run['draft_us']['p50']:.1f}",
         f"{run['draft_us']['p99']:.1f}", f"{run['commit_us_per_token']['mean']:.2f}",
         f"{run['close_us_per_token']['mean']:.2f}"]
        for name, run in record["long_stream"].items()
    ]))  # fmt: skip
    for name, run in {"short requests": record["short_requests"], **record["long_stream"]}.items():
        print(f"\nresident MB, {name}: " + ", ".join(f"{mb:.0f} at {at:,}" for at, mb in run["resident_megabytes"]))
    if args.record:
        RECORDS.mkdir(exist_ok=True)
        (RECORDS / f"memory-{record['date']}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
