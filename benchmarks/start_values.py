"""Learn the start values of a new namespace's tables from answers of a real model: `retrieval/start_values.npz`.

    OMP_NUM_THREADS=1 python benchmarks/start_values.py PROMPTS --model M --successors TABLE

Answers six prompts of each task of Spec-Bench, which the live benchmarks never ask, with 32 nodes a step, beginning with
the rough values by formula. What the namespace has then learned of evidence is kept: how far each cell and each kind of
evidence can be trusted. What it has learned of tokens (track records, weights by the last tokens, memory) is not, and
neither is what all candidates share (weights by situation, ages): a caller's draft or an index, which were not there,
would be disbelieved for it. To be run again whenever the layout in `retrieval/evidence.py` changes; takes some five
minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np

import redraft
from redraft.commands.bench import read_prompts
from redraft.decoding.loading import load_model
from redraft.retrieval import evidence as ev
from redraft.retrieval import model as tables

PLACES = range(41, 47)  # of each task's prompts; the live benchmarks take every eighth of eighty
MOST_TRIALS = 20  # what was learned elsewhere does not weigh more than this
START_VALUES = Path(tables.__file__).with_name("start_values.npz")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="Spec-Bench's questions: JSON lines with `category` and `turns`")
    parser.add_argument("--model", required=True)
    parser.add_argument("--successors", required=True, help="the model's successor table")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, dtype="bfloat16", device="cpu")
    drafter = redraft.Drafter(redraft.DraftConfig(vocab_size=len(tokenizer)), successors=args.successors)
    learned = drafter._namespace("default").model
    for table, begin in zip(learned, tables.formula_model(), strict=True):
        table[:] = begin
    seen = Counter()
    for prompt in read_prompts(args.prompts, tokenizer, 80, None, 1, "cpu"):
        place = seen[prompt.task]
        seen[prompt.task] += 1
        if place in PLACES:
            answer = redraft.generate(model, prompt.ids, drafter, max_new_tokens=128, max_nodes=32, adaptive=False)
            print(f"{prompt.task}: {answer.stats.tokens_per_step:.2f} tokens per step", flush=True)
    save(learned)
    print(f"written: {START_VALUES} ({START_VALUES.stat().st_size:,} bytes)")
    return 0


def save(learned: tables.Model) -> None:
    begin = tables.formula_model()
    of_evidence = learned.cells[: ev.TRACK_RECORD_CELLS]
    changed = (of_evidence != begin.cells[: ev.TRACK_RECORD_CELLS]).any(axis=1)
    changed[ev.AGE_CELLS : ev.RECYCLED_PAIR_CELLS] = False
    touched = np.flatnonzero(changed)
    np.savez_compressed(
        START_VALUES,
        n_cells=np.int32(ev.TRACK_RECORD_CELLS),
        cells=touched.astype(np.int32),
        rates=of_evidence[touched, tables.RATE].astype(np.float16),
        trials=np.minimum(of_evidence[touched, tables.TRIALS], MOST_TRIALS).astype(np.float16),
        biases=of_evidence[touched, tables.BIAS].astype(np.float16),
        weights=learned.weights[: ev.N_SETS].astype(np.float16),
    )


if __name__ == "__main__":
    sys.exit(main())
