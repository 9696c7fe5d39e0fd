"""Redraft and its peers side by side on recorded outputs: one table, one dated JSON record, one picture.

    python benchmarks/replay.py TRACES --tokenizer T --peers --record --picture replay.png

Every workload is replayed by every contender in turn, so that whatever else the machine does falls on all alike.
Times are to be read as ratios within one run. The contenders:

    redraft              32 nodes, empty memory, no index
    redraft + index      the same with the indexes given by --index
    redraft 64           64 nodes
    redraft lean         16 nodes
    ngram                n-gram lookup, 10 tokens (redraft.retrieval.ngram)
    arctic default       arctic-inference as it comes: a chain, factor 1, min_token_prob 0.1      (--peers)
    arctic best          its best setting on these traces: a tree, factor 16, min_token_prob 0.001 (--peers)

and, for the picture (--curve), the same drafters from small trees to large ones: tokens per step against mean nodes
per step, with redraft's size set by a threshold on path probability and Arctic's by its factor.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from machine import RECORDS, provenance
from peers import ARCTIC_BEST, ARCTIC_DEFAULT
from tqdm import tqdm

from redraft.commands.replay import add_plan_arguments, plan_of
from redraft.index_builders.tokenizers import load_tokenizer
from redraft.replay.contenders import Contender, Ngram, Redraft
from redraft.replay.report import sources_table, table, workloads_table
from redraft.replay.run import Plan, macro, replay_file
from redraft.replay.tally import Tally
from redraft.replay.traces import RememberedTokenizer, trace_files
from redraft.retrieval.config import DraftConfig

# Least path probability of a node, for the curves; the most nodes are 64 there.
_THRESHOLDS = (0.4, 0.2, 0.16, 0.12, 0.07, 0.04, 0.02, 0.01, 0.005)
_CURVE_NODES = 64
# Arctic's trees grow with the factor; at every size this gives it more tokens than raising min_token_prob or
# lowering max_spec_tokens does.
_ARCTIC_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_CURVE_AT = (1.5, 2.6, 5, 7.5, 12, 20, 30)


def contenders(config: DraftConfig, indexes: tuple[str, ...], peers: bool) -> list[Contender]:
    """The contenders of the tables."""
    chosen = [Redraft(config)]
    if indexes:
        chosen.append(Redraft(config, indexes, "redraft + index"))
    chosen.append(Redraft(replace(config, max_nodes=64), name="redraft 64"))
    if indexes:
        chosen.append(Redraft(replace(config, max_nodes=64), indexes, "redraft 64 + index"))
    chosen += [Redraft(replace(config, max_nodes=16), name="redraft lean"), Ngram(config)]
    return chosen + ([ARCTIC_DEFAULT, ARCTIC_BEST] if peers else [])


def curve(config: DraftConfig, indexes: tuple[str, ...], peers: bool) -> list[Contender]:
    """The same drafters from small trees to large ones; the name is `family @ setting`."""
    points: list[Contender] = []
    for threshold in _THRESHOLDS:
        wide = replace(config, max_nodes=_CURVE_NODES, min_prob=threshold)
        points.append(Redraft(wide, name=f"redraft @ {threshold}"))
        if indexes:
            points.append(Redraft(wide, indexes, f"redraft + index @ {threshold}"))
    if peers:
        points += [
            replace(ARCTIC_BEST, name=f"arctic @ {factor}", factor=factor, max_tokens=_CURVE_NODES)
            for factor in _ARCTIC_FACTORS
        ]
    return points


def measure(chosen: list[Contender], files: list[Path], tokenizer, plan: Plan) -> dict[str, dict]:
    """Replay every file by every contender in turn: for each name its macro means, pooled and per-workload numbers."""
    tallies: dict[str, dict[str, Tally]] = {contender.name: {} for contender in chosen}
    with tqdm(total=len(files) * len(chosen) * (plan.tokens + plan.warm), unit="tok", disable=None) as bar:
        for file in files:
            workload = file.name.removesuffix(".jsonl.gz")
            for contender in chosen:
                bar.set_postfix_str(f"{workload}, {contender.name}")
                tallies[contender.name][workload] = replay_file(contender, file, tokenizer, plan, bar.update)
            emitted = {tallies[name][workload].emitted for name in tallies}
            assert len(emitted) == 1, f"{workload}: the contenders did not replay the same tokens: {emitted}"
    results = {}
    for name, by_workload in tallies.items():
        total = Tally()
        for tally in by_workload.values():
            total.add(tally)
        rows = {workload: tally.summary() for workload, tally in by_workload.items()}
        results[name] = {"macro": macro(list(rows.values())), "pooled": total.summary(), "workloads": rows}
    return results


def interpolate(results: dict[str, dict], family: str, nodes: float) -> float | None:
    """Tokens per step of a family's curve at `nodes` mean nodes; None outside the curve."""
    points = sorted(
        (result["macro"]["nodes_per_step"], result["macro"]["tokens_per_step"])
        for name, result in results.items()
        if name.partition(" @ ")[0] == family
    )
    for (left, low), (right, high) in pairwise(points):
        if left <= nodes <= right:
            return low + (high - low) * (nodes - left) / (right - left)
    return None


def curves_table(results: dict[str, dict]) -> str:
    """Tokens per step at the same mean number of nodes, a line for each curve."""
    families = sorted({name.partition(" @ ")[0] for name in results if " @ " in name}, reverse=True)
    rows = []
    for family in families:
        values = [interpolate(results, family, nodes) for nodes in _CURVE_AT]
        rows.append([family, *("-" if value is None else f"{value:.3f}" for value in values)])
    return table(("tokens per step at mean nodes", *map(str, _CURVE_AT)), rows)


def comparison(results: dict[str, dict]) -> str:
    """Tokens per step, workload by workload, a column for each contender; nodes and times below."""
    names = list(results)
    rows = [
        [workload, *(f"{results[name]['workloads'][workload]['tokens_per_step']:.3f}" for name in names)]
        for workload in results[names[0]]["workloads"]
    ]
    means = [results[name]["macro"] for name in names]
    rows.append(["macro mean", *(f"{mean['tokens_per_step']:.3f}" for mean in means)])
    rows.append(["  outside loops", *(f"{mean['tokens_per_step_outside_loops']:.3f}" for mean in means)])
    rows.append(["nodes per step", *(f"{mean['nodes_per_step']:.1f}" for mean in means)])
    rows.append(["calibration error", *(f"{mean['calibration_error']:.3f}" for mean in means)])
    for label, group, part in (
        ("draft p50 us", "draft_us", "p50"), ("draft p99 us", "draft_us", "p99"),
        ("commit us/token", "commit_us_per_token", "mean"), ("open us/token", "open_us_per_token", "mean"),
        ("close us/token", "close_us_per_token", "mean"),
    ):  # fmt: skip
        rows.append([label, *(f"{mean[group][part]:.2f}" for mean in means)])
    return table(("tokens per step", *names), rows)


def slim(results: dict[str, dict]) -> dict[str, dict]:
    """What a record needs: no reliability tables of single workloads, macro means only for the points of curves."""
    drop = ("reliability", "sources", "close_us", "open_us")
    kept = {}
    for name, result in results.items():
        rows = {w: {k: v for k, v in row.items() if k not in drop} for w, row in result["workloads"].items()}
        kept[name] = {"macro": result["macro"]} if " @ " in name else result | {"workloads": rows}
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_plan_arguments(parser)
    parser.add_argument("--peers", action="store_true", help="replay arctic-inference in the same run")
    parser.add_argument("--curve", action="store_true", help="replay all with smaller and larger trees, too")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDS.name}/replay-DATE.json")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the results (needs matplotlib)")
    args = parser.parse_args()
    plan = plan_of(args)
    tokenizer = RememberedTokenizer(args.tokenizer, load_tokenizer)
    files = trace_files(args.traces, args.workloads)
    config = DraftConfig(vocab_size=tokenizer.vocab_size, tokenizer_fingerprint=tokenizer.fingerprint)
    indexes = tuple(args.index)
    chosen = contenders(config, indexes, args.peers)
    points = curve(config, indexes, args.peers) if args.curve else []
    results = measure(chosen + points, files, tokenizer, plan)
    tables = {contender.name: results[contender.name] for contender in chosen}
    print(comparison(tables))
    main_result = tables["redraft"]
    if points:
        print("\n" + curves_table(results))
    print("\n" + workloads_table(main_result["workloads"], main_result["macro"]))
    print("\n" + sources_table(main_result["pooled"]))
    record = provenance("arctic-inference") if args.peers else provenance()
    record |= {"plan": vars(plan), "indexes": [Path(index).name for index in indexes], "results": slim(results)}
    if args.record:
        RECORDS.mkdir(exist_ok=True)
        name = f"replay-{record['date']}.json" if not plan.warm else f"replay-warm-{record['date']}.json"
        (RECORDS / name).write_text(json.dumps(record, indent=1) + "\n")
    if args.picture:
        from picture import draw

        draw(record, args.picture)


if __name__ == "__main__":
    main()
