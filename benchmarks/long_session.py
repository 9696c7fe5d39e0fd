"""A draft on a session of 30,000 tokens, beside SuffixDecoding's `speculate` on the same text in the same run.

    python benchmarks/long_session.py [TRACE --tokenizer tokenizer.json] --record

The text is the standard library's source, cut into words, and the first context of a recorded workload (TRACE) that is long
enough, if one is given; what follows the prompt is forced through all drafters step by step, as in a replay, and once more token by token, so that there is a draft at every place and not only where the last one
ended. They draft in turns, so that all meet the same machine, and each draft is timed by itself. Every
tree is checked, and each drafter has to find some of the text. Memories are empty at the beginning. SuffixDecoding drafts
up to 32 tokens as a tree, factor 16, once with its own least probability (0.1, so few nodes) and once with 0.001.

Wanted: our median no longer than SuffixDecoding's.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from machine import RECORDS, provenance
from peers import ARCTIC_BEST, Arctic
from round_trip import CONFIG, VOCABULARY, percentiles, source_words

from redraft.index_builders.tokenizers import load_tokenizer
from redraft.replay.contenders import Redraft
from redraft.replay.traces import RememberedTokenizer, load_workload

NODES = 32
CONTENDERS = (Redraft(CONFIG), Arctic("arctic, 0.1", factor=16.0, min_token_prob=0.1, tree=True), ARCTIC_BEST)


class Run:
    """One drafter's way through the text."""

    def __init__(self, contender, text: np.ndarray, prompt: int, by_token: bool) -> None:
        self._by_token = by_token
        self.name, self._text, self.position = contender.name, text, prompt
        self._drafter = contender.make()
        self._session = self._drafter.open(text[:prompt])
        self.microseconds, self.nodes, self.tokens = [], [], []

    def step(self) -> None:
        started = time.perf_counter()
        draft = self._session.draft(NODES)
        self.microseconds.append((time.perf_counter() - started) * 1e6)
        tree = (draft if self.name == "redraft" else draft.tree()).check(vocab_size=VOCABULARY, max_nodes=NODES)
        accepted, parent = 0, -1
        for token in self._text[self.position :]:
            children = np.flatnonzero((tree.parents == parent) & (tree.tokens == token))
            if not len(children):
                break
            accepted, parent = accepted + 1, int(children[0])
        written = 1 if self._by_token else accepted + 1
        self._session.commit(self._text[self.position : self.position + written])
        self.position += written
        self.nodes.append(len(tree))
        self.tokens.append(accepted + 1)

    def figures(self) -> dict:
        assert np.mean(self.tokens) > 1.2, f"{self.name} found next to nothing of the text"
        return {
            "draft_us": percentiles(np.array(self.microseconds[len(self.microseconds) // 10 :])),
            "nodes": round(float(np.mean(self.nodes)), 1),
            "tokens_per_step": round(float(np.mean(self.tokens)), 3),
        }


def recorded_text(trace: Path, tokenizer: str, wanted: int) -> np.ndarray:
    """int32: the first context of a workload that has so many tokens."""
    for item in load_workload(trace, RememberedTokenizer(tokenizer, load_tokenizer)).items(20 * wanted):
        if len(item.context) >= wanted:
            return np.array(item.context, np.int32)
    raise SystemExit(f"{trace}: wanted a context of {wanted} tokens or more, found none")


def measure(text: np.ndarray, prompt: int, steps: int, by_token: bool) -> dict:
    """Each drafter's figures over the same `steps` drafts, or as many as the text has for all."""
    runs = [Run(contender, text, prompt, by_token) for contender in CONTENDERS]
    for _ in range(steps):
        if max(run.position for run in runs) + NODES + 1 > len(text):
            break
        for run in runs:
            run.step()
    figures = {run.name: run.figures() for run in runs}
    ours = figures["redraft"]["draft_us"]["p50"]
    for each in figures.values():
        each["ours_over_theirs"] = round(ours / each["draft_us"]["p50"], 2)
    return {"steps": len(runs[0].microseconds), "drafters": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, help="a recorded workload with a long context (.jsonl.gz)")
    parser.add_argument("--tokenizer", help="its tokenizer: tokenizer.json, a folder or a GGUF file")
    parser.add_argument("--prompt", type=int, default=30_000, metavar="N", help="tokens of the session")
    parser.add_argument("--steps", type=int, default=3_000, metavar="N", help="most drafts of each drafter")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDS.name}/long_session-DATE.json")
    args = parser.parse_args()
    if args.prompt < 1 or args.steps < 10:
        parser.error(f"wanted a prompt of 1 token or more and 10 steps or more, got {args.prompt} and {args.steps}")
    if (args.trace is None) != (args.tokenizer is None):
        parser.error("a trace and its tokenizer go together, only one of them was given")
    texts = {"source words": source_words(args.prompt + (NODES + 1) * args.steps)}
    if args.trace is not None:
        texts[args.trace.name.partition(".")[0]] = recorded_text(args.trace, args.tokenizer, args.prompt + 1000)
    record = {**provenance("arctic-inference"), "prompt": args.prompt}
    record["texts"] = {
        f"{name}, {way}": measure(text, args.prompt, args.steps, way == "token by token")
        for name, text in texts.items()
        for way in ("step by step", "token by token")
    }
    for name, found in record["texts"].items():
        print(f"{name}, {found['steps']} drafts each")
        for drafter, figures in found["drafters"].items():
            print(f"  {drafter:12s}", ", ".join(f"{key} {value}" for key, value in figures.items()))
    if args.record:
        (RECORDS / f"long_session-{record['date']}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
