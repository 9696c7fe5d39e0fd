"""Is the text the target's own? A real model's greedy answers, plainly and drafted, in process and through a server.

    python benchmarks/equality.py PROMPTS --model M [--count 20] [--new-tokens 64] [--record]

PROMPTS is a file of gzip-compressed JSON lines with `turns` (Spec-Bench's form); the prompts are spread evenly over it. In
float32 every answer must equal `model.generate(do_sample=False)` token for token, with 16 nodes a step, and sampled
answers (temperature 0.7, top-k 40, top-p 0.95) must equal our own plain sampling with the same seed. Exit code 1 if
one does not.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from machine import RECORDS, provenance
from tqdm import tqdm

from redraft.client.draft_client import DraftClient
from redraft.decoding.generate import generate
from redraft.decoding.loading import load_model
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.drafter import Drafter

SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.95}


def read_prompts(file: Path, count: int, tokenizer) -> list[torch.Tensor]:
    """int64[1, n] each: `count` first turns in the model's chat template, spread evenly over the file."""
    with gzip.open(file, "rt") as lines:
        turns = [json.loads(line)["turns"][0] for line in lines]
    chosen = [turns[i * len(turns) // count] for i in range(count)]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": turn}], tokenize=False, add_generation_prompt=True)
        for turn in chosen
    ]
    return [tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"] for text in texts]


def compare(model, prompts: list[torch.Tensor], drafters: dict[str, object], new_tokens: int) -> dict[str, dict]:
    """For each drafter: how many answers equal the reference's, and tokens per step; greedy and sampled."""
    found = {
        f"{kind}, {name}": {"equal": 0, "of": 0, "tokens_per_step": 0.0}
        for kind in ("greedy", "sampled")
        for name in drafters
    }
    for number, prompt in enumerate(tqdm(prompts, desc="prompts")):
        greedy = model.generate(prompt, do_sample=False, max_new_tokens=new_tokens)
        sampled = generate(model, prompt, None, max_new_tokens=new_tokens, seed=number, **SAMPLED).sequences
        for name, drafter in drafters.items():
            for kind, reference, options in (("greedy", greedy, {}), ("sampled", sampled, SAMPLED | {"seed": number})):
                result = generate(
                    model, prompt, drafter, max_new_tokens=new_tokens, max_nodes=16, adaptive=False, **options
                )
                row = found[f"{kind}, {name}"]
                row["of"] += 1
                row["equal"] += int(torch.equal(result.sequences, reference))
                row["tokens_per_step"] += result.stats.tokens_per_step / len(prompts)
    return found


def with_server(model, work: Callable[[DraftClient], dict]) -> dict:
    """Do `work` with a client of a server in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/redraft.sock"
        server = subprocess.Popen([sys.executable, "-m", "redraft", "serve", "--listen", address])
        try:
            with DraftClient(address, config=DraftConfig(vocab_size=model.config.vocab_size), timeout=1.0) as client:
                if not client.wait_until_ready(300):
                    raise SystemExit("the server did not become ready")
                return work(client)
        finally:
            server.terminate()
            server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, metavar="PROMPTS")
    parser.add_argument("--model", required=True, help="a transformers folder, a .gguf file, or a name on the hub")
    parser.add_argument("--count", type=int, default=20, help="prompts (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="length of an answer (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDS.name}/equality-DATE.json")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, dtype="float32")
    prompts = read_prompts(args.prompts, args.count, tokenizer)
    inside = Drafter(DraftConfig(vocab_size=model.config.vocab_size))
    found = with_server(
        model, lambda client: compare(model, prompts, {"in process": inside, "server": client}, args.new_tokens)
    )
    for name, row in found.items():
        print(f"{name:22} {row['equal']} of {row['of']} equal, {row['tokens_per_step']:.2f} tokens per step")
    if args.record:
        record = provenance("torch", "transformers") | {
            "device": str(model.device),
            "new_tokens": args.new_tokens,
            "found": found,
        }
        (RECORDS / f"equality-{record['date']}.json").write_text(json.dumps(record, indent=1) + "\n")
    return int(any(row["equal"] != row["of"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
