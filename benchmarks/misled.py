"""How much drafting can cost where it cannot help: texts that mislead drafters, 200 tokens each, beside our own plain loop.

    OMP_NUM_THREADS=1 python benchmarks/misled.py --model M [--successors TABLE] [--dtype bfloat16] [--record]

The prompts are those of `adversarial.py`, and the text is sampled, with the same seed for all contenders, so that all write
the same text and greedy loops, which any drafter guesses, do not come to its rescue:

    plain          the loop without drafts
    temperature 1  the real drafter, a new one for each prompt, which knows nothing of the text
    liar           a drafter that proposes a chain of 32 random tokens at every step and is 98 % sure of each

The model's costs are measured before (the record says how long that takes: once a model and process); what is known about how far
drafts can be trusted is forgotten before every answer. Two ratios of plain to drafted time: of all processor time as it is, and
with each step at the median of its size, whole steps from token to token and the prefill; machines that are shared disturb
single runs by more than what is to be shown. Exit code 1 where a text differs in
float32 (in half precision near-ties fall differently) or a ratio of medians is below 0.97.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter, defaultdict

import numpy as np
import torch
from adversarial import adversarial_prompts
from machine import RECORDS, provenance

from redraft.decoding import tree_size
from redraft.decoding.generate import generate
from redraft.decoding.live_benchmark import learn_costs
from redraft.decoding.loading import load_model
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import DraftTree
from redraft.retrieval.drafter import Drafter

NEW_TOKENS = 200
LOWEST = 0.97


class Liar:
    """The interface of a drafter, and of its sessions, as far as the loop uses it."""

    states = None

    def __init__(self, config: DraftConfig) -> None:
        self.config = config
        self._random = np.random.default_rng(0)

    def open(self, history, namespace: str) -> Liar:
        return self

    def step(self, requests) -> list[DraftTree]:
        n = self.config.max_nodes
        probs = 0.98 ** np.arange(1, n + 1)
        return [
            DraftTree(
                self._random.integers(0, self.config.vocab_size, n).astype(np.int32),
                np.arange(-1, n - 1).astype(np.int32),
                probs.astype(np.float32),
                np.zeros(n, np.uint8),
            )
            for _ in requests
        ]

    def commit(self, *told) -> None:
        pass

    def close(self) -> None:
        pass


def answer(model, ids: torch.Tensor, drafter, temperature: float, seed: int) -> dict:
    """The text, its processor time, and the times of its steps by number of nodes."""
    tree_size._trusts.pop(model, None)
    ends, nodes = [], []

    def note(step) -> None:
        ends.append(time.thread_time())
        nodes.append(len(step.tree))

    began = time.thread_time()
    result = generate(
        model, ids, drafter, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=temperature, seed=seed,
        eos_token_id=[], on_step=note,
    )  # fmt: skip
    seconds = time.thread_time() - began
    by_nodes = defaultdict(list)
    for n, start, end in zip(nodes[1:], ends, ends[1:]):
        by_nodes[n].append(end - start)
    stats = result.stats
    return {
        "text": result.sequences[0].tolist(), "seconds": seconds, "first": ends[0] - began, "by_nodes": by_nodes,
        "tokens per step": stats.tokens_per_step, "drafted": stats.drafted, "gated": stats.gated_steps,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a transformers folder, a .gguf file, or a name on the hub")
    parser.add_argument("--successors", metavar="DIR", help="draft from this successor table of the model too")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--kinds", type=lambda text: text.split(","), help="only these kinds of prompts")
    parser.add_argument("--repeats", type=int, default=1, help="answers to each prompt, with other seeds")
    parser.add_argument("--record", action="store_true", help="write record/misled-DTYPE-DATE.json")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, dtype=args.dtype)
    config = DraftConfig(vocab_size=int(model.get_output_embeddings().weight.shape[0]))
    prompts = [p for p in adversarial_prompts(tokenizer, model.device, 1) if not args.kinds or p.task in args.kinds]
    if not prompts:
        parser.error(f"--kinds: no prompts of {', '.join(args.kinds)}")
    with Drafter(config, successors=args.successors) as drafter:
        drafter.warmup()
    generate(model, prompts[0].ids, None, max_new_tokens=8)
    costs = learn_costs(model)
    print(f"costs learned in {costs:.2f} s; curve:", curve := _curve(model))
    rows = []
    for number in range(args.repeats):
        for prompt in prompts:
            rows += _compare(model, prompt, config, args.successors, number)
    same = all(row["same text"] for row in rows)
    if args.record:
        record = provenance("torch", "transformers") | {
            "dtype": args.dtype, "new tokens": NEW_TOKENS, "seconds to learn costs": costs, "curve": curve,
            "threads": torch.get_num_threads(), "successors": args.successors is not None, "rows": rows,
        }  # fmt: skip
        (RECORDS / f"misled-{args.dtype}-{record['date']}.json").write_text(json.dumps(record, indent=1) + "\n")
    return int((args.dtype == "float32" and not same) or min(row["by medians"] for row in rows) < LOWEST)


def _curve(model) -> dict[int, float]:
    entries = (1, 2, 4, 8, 16, 32)
    steps = tree_size.cost_of(model).seconds(1, 128, np.array(entries))
    return {size: round(float(each), 3) for size, each in zip(entries, steps)}


def _compare(model, prompt, config: DraftConfig, successors: str | None, seed: int) -> list[dict]:
    with Drafter(config, successors=successors) as fresh:
        contenders = {"plain": None, "temperature 1": fresh, "liar": Liar(config)}
        names = list(contenders)
        names = names[seed % 3 :] + names[: seed % 3]
        found = {name: answer(model, prompt.ids, contenders[name], 1.0, seed) for name in names}
    plain = found.pop("plain")
    by_nodes = defaultdict(list)
    for one in (plain, *found.values()):  # a size's median over all contenders: what differs is how often each is used
        for n, times in one["by_nodes"].items():
            by_nodes[n] += times
    medians = {n: statistics.median(times) for n, times in by_nodes.items()}

    def total(one: dict) -> float:
        return one["first"] + sum(medians[n] * len(times) for n, times in one["by_nodes"].items())

    rows = []
    for name, one in found.items():
        own = {
            who: 1e3 * statistics.median(each["by_nodes"][0])
            for who, each in (("plain", plain), (name, one))
            if each["by_nodes"][0]
        }
        row = {
            "prompt": prompt.task, "drafter": name, "seed": seed, "same text": one["text"] == plain["text"],
            "by medians": round(total(plain) / total(one), 4), "measured": round(plain["seconds"] / one["seconds"], 4),
            "tokens per step": round(one["tokens per step"], 3), "drafted": one["drafted"], "gated": one["gated"],
            "milliseconds of steps without nodes": {who: round(each, 2) for who, each in own.items()},
            "steps by nodes": dict(sorted(Counter({n: len(times) for n, times in one["by_nodes"].items()}).items())),
        }  # fmt: skip
        print(row, flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
