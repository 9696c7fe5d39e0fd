"""`redraft bench live` with a dated record: speed on a real model, beside `model.generate` and its prompt lookup.

    OMP_NUM_THREADS=1 python benchmarks/live.py PROMPTS --model M --dtype bfloat16 --record --picture live.png

PROMPTS are Spec-Bench's questions (JSON lines with `category` and `turns`). The same script runs on a CUDA device where there is
one; its record says which device it was. Exit code 1 where a text is not the reference's (in half precision: where it
leaves it at more than a near-tie).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from machine import RECORDS, provenance

from redraft.commands.bench import add_live_arguments, run_live


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_live_arguments(parser)
    parser.add_argument("--record", nargs="?", const="", metavar="NAME", help="write record/live-NAME-DATE.json")
    args = parser.parse_args()
    measured = run_live(args)
    record = provenance("torch", "transformers") | measured
    if args.record is not None:
        for answer in record["answers"]:
            answer["phases"] = {name: round(seconds, 4) for name, seconds in answer["phases"].items()}
        name = "-".join(part for part in ("live", args.record, record["date"]) if part)
        path = Path(RECORDS) / f"{name}.json"
        path.write_text(json.dumps(record) + "\n")
        print(f"recorded: {path}")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if measured["lossless"] else 1


if __name__ == "__main__":
    sys.exit(main())
