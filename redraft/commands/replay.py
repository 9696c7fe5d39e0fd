"""Force recorded outputs of real models through the drafter and measure: tokens per step, nodes, honesty, time.

TRACES is a trace file or a folder of them (gzip-compressed JSON lines with `prompt`, `output`, `continues`). Every
workload starts with a fresh drafter, empty memory and all; the first output token of an item is free. `tokens/step`
counts the bonus token; `no loops` leaves out the steps that start inside a repetition loop; `ECE` is the expected
calibration error of the probabilities over visited nodes; times are microseconds, per call for drafts (p50, p99) and
per token for commit, open and close.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

from redraft.index_builders.tokenizers import load_tokenizer
from redraft.replay.contenders import Ngram, Redraft
from redraft.replay.report import sources_table, workloads_table
from redraft.replay.run import Plan, macro, replay_files
from redraft.replay.tally import Tally
from redraft.replay.traces import RememberedTokenizer, trace_files
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import Source

__all__ = ["add_plan_arguments", "configure", "plan_of", "run"]


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what is replayed: shared with the comparison under benchmarks/."""
    parser.add_argument("traces", type=Path, metavar="TRACES", help="a trace file, or a folder of *.jsonl.gz")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, transformers folder or name, or GGUF file")
    parser.add_argument("--workloads", type=lambda text: text.split(","), metavar="A,B", help="only these files")
    parser.add_argument("--tokens", type=int, default=12_000, help="output tokens measured in each workload")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="output tokens learned from before measuring")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="output tokens left out before anything else")
    parser.add_argument("--index", action="append", default=[], metavar="DIR", help="draft from this index, too")
    parser.add_argument("--jobs", type=int, default=1, help="workloads replayed at the same time (disturbs the times)")


def plan_of(args: argparse.Namespace) -> Plan:
    """What `add_plan_arguments` was told. Raises ValueError for counts that make no sense."""
    for name, least in (("tokens", 1), ("warm", 0), ("skip", 0), ("jobs", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name}: wanted {least} or more, got {getattr(args, name)}")
    return Plan(args.tokens, args.warm, args.skip)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `redraft replay`."""
    add_plan_arguments(parser)
    parser.add_argument("--drafter", choices=("redraft", "ngram"), default="redraft", help="what drafts")
    parser.add_argument("--max-nodes", type=int, default=32, help="draft budget: most nodes in a tree")
    parser.add_argument("--min-prob", type=float, default=0.0, help="least path probability of a node worth drafting")
    parser.add_argument("--ablate", action="append", default=[], choices=Source.NAMES, help="leave out this source")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number measured to this file")


def run(args: argparse.Namespace) -> int:
    """Replay, print the tables, write the record."""
    plan = plan_of(args)
    files = trace_files(args.traces, args.workloads)
    tokenizer = RememberedTokenizer(args.tokenizer, load_tokenizer)
    config = DraftConfig(
        vocab_size=tokenizer.vocab_size, max_nodes=args.max_nodes, min_prob=args.min_prob,
        tokenizer_fingerprint=tokenizer.fingerprint, disabled=frozenset(args.ablate),
    )  # fmt: skip
    contender = Ngram(config) if args.drafter == "ngram" else Redraft(config, tuple(args.index))
    rows, total = {}, Tally()
    with tqdm(total=len(files) * (plan.tokens + plan.warm), unit="tok", disable=None, file=sys.stderr) as bar:
        for file, tally in replay_files(contender, files, tokenizer, plan, jobs=args.jobs, progress=bar.update):
            name = file.name.removesuffix(".jsonl.gz")
            rows[name] = tally.summary()
            total.add(tally)
            bar.set_postfix_str(f"{name} {tally.tokens_per_step:.3f}")
    mean, pooled = macro(list(rows.values())), total.summary()
    print(workloads_table(rows, mean))
    print()
    print(sources_table(pooled))
    if args.json:
        record = {"contender": contender.name, "plan": vars(plan), "macro": mean, "pooled": pooled, "workloads": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0
