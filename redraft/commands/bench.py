"""Measure drafting with a real model.

`redraft bench live` answers prompts with transformers' `generate`, with its prompt lookup, with redraft's loop without
drafts and with drafts, all in turn in one run, and prints speed ratios by task. Ratios within one run are what counts; with
OMP_NUM_THREADS=1 processor time is taken, which other processes disturb least.

PROMPTS is JSON lines (.gz or not) with `turns` (the first one is asked) and `category`, as Spec-Bench and MT-bench
have them; or with `prompt`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

__all__ = ["add_live_arguments", "configure", "run", "run_live"]


def configure(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    live = benches.add_parser(
        "live", help="speed, tokens per step and losslessness with a real model", description=__doc__
    )
    live.formatter_class = parser.formatter_class
    add_live_arguments(live)


def add_live_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `redraft bench live`, shared with benchmarks/live.py."""
    parser.add_argument("prompts", type=Path, metavar="PROMPTS", help="JSON lines with turns or prompt")
    parser.add_argument("--model", required=True, metavar="MODEL", help="a folder, a .gguf file, or a name on the hub")
    parser.add_argument("--per-task", type=int, default=10, metavar="N", help="prompts of each task")
    parser.add_argument("--tasks", type=lambda text: text.split(","), metavar="A,B", help="only these tasks")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="length of an answer at most")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="of the model"
    )
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="auto (the default), cpu, cuda, cuda:1 ...")
    parser.add_argument("--temperature", type=float, metavar="T", help="sample at this temperature instead of greedily")
    parser.add_argument("--index", action="append", default=[], metavar="DIR", help="draft from this index too")
    parser.add_argument("--successors", metavar="DIR", help="draft from this successor table of the model too")
    parser.add_argument("--dense", metavar="DIR", help="draft from this dense index of the model too")
    parser.add_argument("--max-nodes", type=int, default=32, metavar="N", help="draft budget: most nodes in a tree")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="prompts of a task decoded together")
    parser.add_argument("--fixed", action="store_true", help="verify every drafted node, whatever it costs")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), metavar="A,B", help="only these contenders (and fixed-N)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to this file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the result (.png, .svg)")


def run(args: argparse.Namespace) -> int:
    record = run_live(args)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if record["lossless"] else 1


def run_live(args: argparse.Namespace, prompts: Callable | None = None) -> dict:
    """Measure, print the table; returns the record. `prompts(tokenizer, device)` replaces those of the file."""
    from tqdm import tqdm

    from redraft.decoding.live_benchmark import (
        CONTENDERS,
        NEAR_TIE,
        Settings,
        clock_name,
        fixed_nodes,
        learn_costs,
        measure,
        task_rows,
    )
    from redraft.decoding.loading import load_model
    from redraft.retrieval.config import DraftConfig
    from redraft.retrieval.drafter import Drafter

    contenders = tuple(args.only or CONTENDERS)
    unknown = [name for name in contenders if name not in CONTENDERS and not fixed_nodes(name)]
    if unknown:
        raise ValueError(f"--only: wanted some of {', '.join(CONTENDERS)}, fixed-N, got {', '.join(unknown)}")
    if args.batch < 1:
        raise ValueError(f"--batch: wanted 1 or more, got {args.batch}")
    if args.batch > 1:  # transformers' prompt lookup takes single sequences only
        contenders = tuple(name for name in contenders if name != "lookup")
    model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device)
    if prompts is None:
        prompts = read_prompts(args.prompts, tokenizer, args.per_task, args.tasks, args.batch, model.device)
    else:
        prompts = prompts(tokenizer, model.device)
    settings = Settings(args.new_tokens, args.temperature, adaptive=not args.fixed)
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    answers = []
    with ExitStack() as drafters_open:
        drafters = {}
        for name in contenders:
            if name == "redraft" or fixed_nodes(name):
                config = DraftConfig(vocab_size=vocab_size, max_nodes=fixed_nodes(name) or args.max_nodes)
                drafter = Drafter(config, indexes=args.index, successors=args.successors, dense=args.dense)
                drafters[name] = drafters_open.enter_context(drafter)
                drafters[name].warmup()
        warm = Settings(16, args.temperature, adaptive=False)  # compile and touch everything once, unmeasured
        list(measure(model, prompts[:1], {}, warm, contenders))
        to_learn_costs = learn_costs(model)
        for group in tqdm(measure(model, prompts, drafters, settings, contenders), total=len(prompts), unit="prompt"):
            answers += group
    rows = task_rows(answers)
    print(_table(rows))
    redraft = [answer for answer in answers if answer.contender in drafters]
    parted = [answer.gap for answer in redraft if answer.same is False]
    by_source, by_depth = Counter(), Counter()
    phases = {name: _phases([answer for answer in redraft if answer.contender == name]) for name in drafters}
    for answer in redraft:
        by_source.update(answer.accepted_by_source)
        by_depth.update(answer.accepted_by_depth)
    for name, seconds in phases.items():
        by_phase = ", ".join(f"{phase} {1e3 * each:.1f}" for phase, each in seconds.items())
        print(f"{name}, milliseconds of wall time per step: {by_phase}")
    if redraft:
        compared = sum(answer.same is not None for answer in redraft)
        gaps = [round(gap, 3) for gap in parted]
        print(f"texts that leave the reference: {len(parted)} of {compared}, at gaps {gaps}")
    limit = NEAR_TIE if args.dtype in ("bfloat16", "float16") or str(model.dtype) != "torch.float32" else 0.0
    record = {
        "settings": asdict(settings)
        | {"dtype": str(model.dtype).removeprefix("torch."), "max_nodes": args.max_nodes, "batch": args.batch}
        | {"indexes": len(args.index), "successors": args.successors is not None, "dense": args.dense is not None},
        "device": str(model.device),
        "threads": _threads(),
        "clock": clock_name(),
        "seconds to learn costs": round(to_learn_costs, 3),
        "lossless": all(gap < limit for gap in parted) or args.temperature is not None and limit > 0,
        "gaps where texts part": parted,
        "tasks": rows,
        "phases per step": phases,
        "accepted by source": dict(by_source.most_common()),
        "accepted by depth": dict(sorted(by_depth.items())),
        "answers": [asdict(answer) for answer in answers],
    }
    if args.picture:
        draw(record, args.picture)
    return record


def read_prompts(path: Path, tokenizer, per_task: int, tasks: list[str] | None, batch: int, device) -> list:
    """`per_task` prompts of each task, spread evenly over it, in batches, tasks taking turns; in the chat template."""
    from redraft.decoding.live_benchmark import Prompt, task_of

    opener = gzip.open if path.suffix == ".gz" else open
    by_task: dict[str, list[str]] = {}
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                text = record["turns"][0] if "turns" in record else record["prompt"]
            except (ValueError, KeyError, IndexError) as error:
                raise ValueError(f"{path}, line {number}: wanted JSON with turns or prompt ({error!r})") from error
            by_task.setdefault(task_of(record.get("category", path.name.partition(".")[0])), []).append(text)
    if tasks:
        missing = set(tasks) - set(by_task)
        if missing:
            raise ValueError(f"--tasks: {', '.join(sorted(missing))} not in {path}; it has {', '.join(by_task)}")
        by_task = {task: by_task[task] for task in tasks}
    chosen = {task: texts[:: max(len(texts) // per_task, 1)][:per_task] for task, texts in by_task.items()}
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    prompts = []
    for place in range(0, max(map(len, chosen.values()), default=0), batch):
        for task, texts in chosen.items():
            chats = [[{"role": "user", "content": text}] for text in texts[place : place + batch]]
            if chats:
                encoded = tokenizer.apply_chat_template(
                    chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
                )
                prompts.append(Prompt(task, encoded["input_ids"].to(device), encoded["attention_mask"].to(device)))
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def _phases(answers: list) -> dict[str, float]:
    """Seconds of each phase per step (of a sequence), the prefill's too."""
    total = Counter()
    for answer in answers:
        total.update(answer.phases)
    steps = sum(answer.steps for answer in answers)
    return {phase: seconds / max(steps, 1) for phase, seconds in total.items()}


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _table(rows: dict[str, dict]) -> str:
    columns = list(rows["macro"])
    columns.remove("prompts")
    width = max(map(len, rows))
    lines = [f"{i}: {name}" for i, name in enumerate(columns, 1)]
    lines.append(" " * width + "  prompts" + "".join(f"{i:>8}" for i in range(1, len(columns) + 1)))
    for task, row in rows.items():
        cells = "".join(f"{row[name]:8.2f}" if name in row else " " * 8 for name in columns)
        lines.append(f"{task:{width}}  {row['prompts']:7}{cells}")
    return "\n".join(lines)


def draw(record: dict, file: Path) -> None:
    """Speed-up by task, and accepted tokens by source and by depth."""
    from redraft.retrieval.errors import import_extra

    matplotlib = import_extra("matplotlib", "dev")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.5), layout="constrained", width_ratios=(2, 1, 1))
    tasks = list(record["tasks"])
    shown = {"lookup / generate": "#6b7280", "redraft / generate": "#c2410c"}
    for number, (name, colour) in enumerate(shown.items()):
        values = [record["tasks"][task].get(name, 0.0) for task in tasks]
        bars = left.bar([place + 0.4 * number for place in range(len(tasks))], values, 0.4, color=colour, label=name)
        left.bar_label(bars, fmt="%.2f", fontsize=7)
    left.axhline(1.0, color="#999999", linestyle=":")
    left.set_xticks([place + 0.2 for place in range(len(tasks))], tasks, fontsize=8)
    left.set(ylabel="tokens per second, ratio", title="Speed against model.generate")
    left.legend(fontsize=8)
    for axes, key, label in (
        (middle, "accepted by source", "source"),
        (right, "accepted by depth", "depth in the tree"),
    ):
        counts = record[key]
        axes.bar(list(map(str, counts)), list(counts.values()), color="#c2410c")
        axes.tick_params(axis="x", labelrotation=60 if key.endswith("source") else 0, labelsize=8)
        axes.set(xlabel=label, title="Accepted tokens")
    settings = record["settings"]
    figure.suptitle(
        f"{settings['dtype']} on {record['device']}, {record['threads']} threads", fontsize=9, color="#555555"
    )
    figure.savefig(file, dpi=110)
    print(f"drawn: {file}", file=sys.stderr)
