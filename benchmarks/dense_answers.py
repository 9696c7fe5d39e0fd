"""Let a model answer prompts, and keep what a replay of dense retrieval needs: tokens, hidden states, runners-up.

    python benchmarks/dense_answers.py held prompts/spec_bench.jsonl.gz prompts/humaneval.jsonl.gz --model MODEL --per-task 12
    python benchmarks/dense_answers.py store prompts/*.jsonl.gz traces/*.jsonl.gz --model MODEL --skip held --max-tokens 300k

One file per batch: `part-00000.npz`, and `state-00000.npy` with the states after the final norm, float16[n, d]. Row j of
an answer's states is the one that its token j was chosen from. With --candidates also the prompt's states and the target's
8 likeliest tokens at every place, so that the answer can be replayed through a drafter without the model. A run that was
killed goes on with the batch it was in. `benchmarks/dense.py` reads these folders.

--skip leaves out what is nearly a held prompt, too: more than two in five of its passages of 50 letters stand in one.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from redraft.decoding.candidates import score
from redraft.decoding.live_benchmark import task_of
from redraft.decoding.loading import load_model
from redraft.decoding.stats import GenerationStats
from redraft.decoding.target_model import TargetModel
from redraft.retrieval.draft_tree import DraftTree


def main() -> None:
    args = _arguments()
    torch.manual_seed(args.seed)
    model, tokenizer = load_model(args.model, dtype=args.dtype)
    prompts = _prompts(args)
    args.output.mkdir(parents=True, exist_ok=True)
    written = 0
    with tqdm(total=len(prompts), unit="prompt") as bar:
        for number, first in enumerate(range(0, len(prompts), args.batch)):
            chosen = prompts[first : first + args.batch]
            file = args.output / f"part-{number:05d}.npz"
            if not file.exists():
                _write(file, _answers(model, tokenizer, chosen, args), chosen)
            with np.load(file) as part:
                written += int(part["output_lengths"].sum())
            bar.update(len(chosen))
            bar.set_postfix_str(f"{written:,} tokens written")
            if args.max_tokens and written >= args.max_tokens:
                break


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "prompts", type=Path, nargs="+", help="JSON lines with turns or prompt; the first turn is asked"
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, help="draw instead of taking the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--per-task", type=int, help="so many of each task, spread evenly, instead of all in random order"
    )
    parser.add_argument("--skip", type=Path, help="leave out the prompts that this folder answers")
    parser.add_argument("--only", type=Path, help="the prompts that this folder answers, and no others")
    parser.add_argument("--max-tokens", type=lambda text: int(text.replace("k", "000")), help="stop after so many")
    parser.add_argument("--longest-prompt", type=int, default=6000, help="characters; longer ones are left out")
    parser.add_argument("--candidates", action="store_true")
    return parser.parse_args()


def _prompts(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(task, name, text) of the prompts to be answered."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for path in args.prompts:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                record = json.loads(line)
                text = record["turns"][0] if "turns" in record else _question(record["prompt"])
                task = task_of(record.get("category", path.name.partition(".")[0]))
                if text is not None and len(text) <= args.longest_prompt:
                    found.setdefault(task, []).append((task, f"{path.name}:{number}", text))
    held: set[str] = set()
    for folder in filter(None, (args.skip, args.only)):
        for part in sorted(folder.glob("part-*.npz")):
            with np.load(part) as arrays:
                held |= set(arrays["texts"].tolist())
    if args.per_task:
        chosen = [prompts[:: max(len(prompts) // args.per_task, 1)][: args.per_task] for prompts in found.values()]
        return [prompt for prompts in chosen for prompt in prompts]
    prompts, seen = [], set()
    passages = {letters[at : at + 50] for letters in map(_letters, held) for at in range(max(len(letters) - 49, 1))}
    for prompt in (prompt for prompts in found.values() for prompt in prompts):
        wanted = prompt[2] in held if args.only else not _near(prompt[2], passages)
        if wanted and prompt[2] not in seen:
            seen.add(prompt[2])
            prompts.append(prompt)
    order = np.random.default_rng(args.seed).permutation(len(prompts))
    return [prompts[i] for i in order]


def _question(prompt: str) -> str | None:
    """What the user said, of a recorded prompt in ChatML; None if there is more than that in it."""
    _, begin, rest = prompt.partition("<|im_start|>user\n")
    if not begin:
        return None if "<|im_start|>" in prompt else prompt
    return None if "<|im_start|>user\n" in rest else rest.partition("<|im_end|>")[0]


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def _near(text: str, passages: set[str]) -> bool:
    letters = _letters(text)
    own = [letters[at : at + 50] for at in range(0, max(len(letters) - 49, 1), 10)]
    return sum(passage in passages for passage in own) > 0.4 * len(own)


def _answers(model, tokenizer, prompts, args) -> list[dict]:
    """Answer a batch; per prompt: prompt, output (int32), states, and with --candidates positions, ids, probs."""
    end = model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end])
    target, rows = TargetModel(model), []
    with target.decoding(GenerationStats()):
        cache = target.new_cache(len(prompts), 256 + args.new_tokens)
        roots = []
        for row, (_, _, text) in enumerate(prompts):
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"][0]
            wanted = np.arange(len(ids)) if args.candidates else np.array([len(ids) - 1])
            logits, hidden = target.prefill(cache, row, ids, wanted)
            scored = score(logits, hidden, target.head)
            roots.append(_choose(logits[-1], scored.ids[-1, 0], args.temperature))
            rows.append(
                {"prompt": ids.numpy().astype(np.int32), "output": [roots[-1]], "states": [hidden.half().numpy()],
                 "ids": [scored.ids], "probs": [scored.probs]}
            )  # fmt: skip
        running = list(range(len(prompts)))
        while True:
            going = [
                i
                for i, row in enumerate(running)
                if roots[i] not in ends and len(rows[row]["output"]) < args.new_tokens
            ]
            if not going:
                return rows
            if len(going) < len(running):
                running, roots = [running[i] for i in going], [roots[i] for i in going]
                cache.select_rows(going)
            logits, hidden = target.verify(cache, roots, [DraftTree.empty()] * len(roots))
            scored = score(logits, hidden, target.head)
            for i, row in enumerate(running):
                cache.keep(i, np.array([0]))
                roots[i] = _choose(logits[i], scored.ids[i, 0], args.temperature)
                rows[row]["output"].append(roots[i])
                rows[row]["states"].append(hidden[i : i + 1].half().numpy())
                rows[row]["ids"].append(scored.ids[i : i + 1])
                rows[row]["probs"].append(scored.probs[i : i + 1])


def _choose(logits: torch.Tensor, best: int, temperature: float | None) -> int:
    if temperature is None:
        return int(best)
    return int(torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1))


def _write(file: Path, rows: list[dict], prompts) -> None:
    arrays = {
        "tasks": np.array([task for task, _, _ in prompts]),
        "names": np.array([name for _, name, _ in prompts]),
        "texts": np.array([text for _, _, text in prompts]),
        "prompts": np.concatenate([row["prompt"] for row in rows]),
        "prompt_lengths": np.array([len(row["prompt"]) for row in rows]),
        "outputs": np.concatenate([np.array(row["output"], np.int32) for row in rows]),
        "output_lengths": np.array([len(row["output"]) for row in rows]),
        "state_lengths": np.array([sum(map(len, row["states"])) for row in rows]),
        "ids": np.concatenate([np.concatenate(row["ids"]) for row in rows]),
        "probs": np.concatenate([np.concatenate(row["probs"]) for row in rows]).astype(np.float16),
    }
    states = np.concatenate([np.concatenate(row["states"]) for row in rows])
    np.save(file.with_name(file.name.replace("part", "state")).with_suffix(".npy"), states)
    temporary = file.with_suffix(".tmp.npz")
    np.savez(temporary, **arrays)
    temporary.rename(file)


if __name__ == "__main__":
    main()
