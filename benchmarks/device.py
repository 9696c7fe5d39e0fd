"""Equality and speed on whatever device there is: the first CUDA device, else the CPU. One script, one record.

    python benchmarks/device.py PROMPTS --model M [--successors TABLE] [--per-task 2] [--record]

In float32, greedy and sampled answers must equal the reference token for token (`equality.py`, in process); then the table
of `live.py` in bfloat16, in which texts may leave the reference at near-ties. PROMPTS as there. Exit code 1 where a text is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from equality import compare
from machine import RECORDS, provenance

from redraft.commands.bench import add_live_arguments, read_prompts, run_live
from redraft.decoding.loading import load_model
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.drafter import Drafter


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_live_arguments(parser)
    parser.add_argument("--record", action="store_true", help="write record/device-KIND-DATE.json")
    parser.set_defaults(per_task=2, dtype="bfloat16")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, dtype="float32", device=args.device)
    prompts = read_prompts(args.prompts, tokenizer, 1, args.tasks, 1, model.device)
    with Drafter(DraftConfig(vocab_size=model.config.vocab_size)) as drafter:
        found = compare(model, [prompt.ids for prompt in prompts], {"in process": drafter}, args.new_tokens // 2)
    for name, row in found.items():
        print(f"float32, {name:20} {row['equal']} of {row['of']} equal, {row['tokens_per_step']:.2f} tokens per step")
    kind = model.device.type
    name = torch.cuda.get_device_name(model.device) if kind == "cuda" else "CPU"
    del model
    measured = run_live(args)
    if args.record:
        del measured["answers"]
        record = provenance("torch", "transformers") | {"device name": name, "equality in float32": found} | measured
        (RECORDS / f"device-{kind}-{record['date']}.json").write_text(json.dumps(record, indent=1) + "\n")
    return int(any(row["equal"] != row["of"] for row in found.values()) or not measured["lossless"])


if __name__ == "__main__":
    sys.exit(main())
