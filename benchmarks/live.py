"""Speed with a real model, beside `model.generate` and its prompt lookup: one command for each table, with a dated record.

    OMP_NUM_THREADS=1 python benchmarks/live.py PROMPTS --model M --successors TABLE --table bfloat16 --record

PROMPTS are Spec-Bench's questions (JSON lines with `category` and `turns`). Tables:

    bfloat16, float32   greedy: generate, plain, lookup, redraft
    sampled             the same at temperature 0.7, without lookup
    sizes               adaptive trees beside always 3, 7, 15 and 31 nodes
    nodes               16 and 32 nodes a step: tokens per step, phases, the loop's own overhead
    adversarial         texts that mislead drafters, 200 tokens; PROMPTS is not read
    batch               8 prompts at a time

Options of `redraft bench live` override what a table says. The same script runs on a CUDA device where there is one (`--device`); its
record says which device it was. Exit code 1 where a text is not the reference's (in half precision: where it leaves it at more than a
near-tie).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from adversarial import adversarial_prompts
from machine import RECORDS, provenance

from redraft.commands.bench import add_live_arguments, run_live

BFLOAT16 = {"dtype": "bfloat16"}
TABLES = {
    "bfloat16": BFLOAT16,
    "float32": {"dtype": "float32"},
    "sampled": BFLOAT16 | {"temperature": 0.7, "only": ["generate", "plain", "redraft"]},
    "sizes": BFLOAT16 | {"only": ["plain", "redraft", "fixed-3", "fixed-7", "fixed-15", "fixed-31"]},
    "nodes": BFLOAT16 | {"only": ["generate", "fixed-16", "fixed-32"]},
    "adversarial": BFLOAT16 | {"new_tokens": 200, "only": ["generate", "plain", "redraft"]},
    "batch": BFLOAT16 | {"batch": 8, "per_task": 8, "only": ["generate", "plain", "redraft"]},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_live_arguments(parser)
    parser.add_argument("--table", choices=TABLES, default="bfloat16", help="what to measure (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write record/live-TABLE-DATE.json")
    table = parser.parse_args().table
    parser.set_defaults(**TABLES[table])
    args = parser.parse_args()
    measured = run_live(args, adversarial_prompts if table == "adversarial" else None)
    record = provenance("torch", "transformers") | {"table": table} | measured
    if args.record:
        for answer in record["answers"]:
            answer["phases"] = {name: round(seconds, 4) for name, seconds in answer["phases"].items()}
        path = Path(RECORDS) / f"live-{table}-{record['date']}.json"
        path.write_text(json.dumps(record) + "\n")
        print(f"recorded: {path}")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if measured["lossless"] else 1


if __name__ == "__main__":
    sys.exit(main())
