"""What a decode step costs through the server: one round trip over a Unix socket, alone and in batches.

    python benchmarks/round_trip.py --record

The server runs in a process of its own. Recorded text (the standard library's source, cut into words) is forced through
drafter and client as a greedy target model would: go down the tree as far as it agrees with the text, commit what was
accepted and one bonus token with the target's top 8 at every node on the way, draft again. `step` is one
`DraftClient.step` of the whole batch, commit and draft together, from the caller's side; `in process` is the same batch
through a `Drafter` without any server, in the same run and on the same text. Every tree that came through the server
is compared with the in-process one.

`streams` is batch 1 by clients in processes of their own: over the plain stream that a Unix socket has, and over gRPC, which
a server on TCP loopback has; that one with gRPC as it comes and without gRPC's event engine (`GRPC_EXPERIMENTS`; `redraft
serve` always does without). Beside each stands what messages of that size take alone (`bare_stream.py`).

`bystander` is a single session's step while a client in another process opens sessions with very long prompts, one after the other:
reading them must not hold up anybody else. `start` is the time from the command to the first answer; `--cold` measures
it with an empty compiler cache as well, which takes minutes.

Wanted: batch 1 p50 below 400 us and p99 below 1500 us; batch 64 below 6 times batch 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
from bare_stream import round_trips
from machine import RECORDS, provenance

from redraft.client.draft_client import DraftClient
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import DraftTree
from redraft.retrieval.drafter import Drafter

VOCABULARY = 49_152
PROMPT, WIDTH = 500, 8
CONFIG = DraftConfig(vocab_size=VOCABULARY)
STEPS = 2000  # of a client of its own
NO_EVENT_ENGINE = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}


def source_words(wanted: int) -> np.ndarray:
    """int32[wanted]: the standard library's source, a number for every different word, blank or sign."""
    numbers: dict[str, int] = {}
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for word in re.findall(r"\w+|\s+|.", path.read_text(errors="replace")):
            tokens.append(numbers.setdefault(word, len(numbers) % VOCABULARY))
        if len(tokens) >= wanted:
            return np.array(tokens[:wanted], np.int32)
    raise RuntimeError(f"the standard library has only {len(tokens)} words, wanted {wanted}")


class Target:
    """A target model that writes a given text, one session of a batch."""

    def __init__(self, drafter, text: np.ndarray, seed: int, namespace: str) -> None:
        self.session = drafter.open(text[:PROMPT], namespace=namespace)
        self._text, self._position = text, PROMPT
        self._random = np.random.default_rng(seed)
        self._tree = DraftTree.empty()

    def verify(self, tree: DraftTree) -> tuple:
        """What the next step is given: (session, accepted and bonus tokens, candidates of the nodes on the way)."""
        nodes, parent = [], -1
        for token in self._text[self._position : -1]:
            children = np.flatnonzero((tree.parents == parent) & (tree.tokens == token))
            if not len(children):
                break
            parent = int(children[0])
            nodes.append(parent)
        start, self._position = self._position, self._position + len(nodes) + 1
        tokens = self._text[start : self._position]
        ids = self._random.integers(0, VOCABULARY, (len(tokens), WIDTH))
        ids[:, 0] = tokens
        probs = np.full((len(tokens), WIDTH), 0.1, np.float32)
        candidates = Candidates.checked(self._text[start - 1 : self._position - 1], [-1] * len(tokens), ids, probs)
        return self.session, tokens, candidates


def run_batch(drafter, texts: list[np.ndarray], steps: int) -> tuple[np.ndarray, list[DraftTree]]:
    """Decode a batch with an empty memory; returns microseconds of each step and all trees."""
    targets = [Target(drafter, text, seed, f"batch of {len(texts)}") for seed, text in enumerate(texts)]
    trees = [DraftTree.empty()] * len(targets)
    microseconds, all_trees = [], []
    for _ in range(steps):
        batch = [target.verify(tree) for target, tree in zip(targets, trees)]
        started = time.perf_counter()
        trees = drafter.step(batch)
        microseconds.append((time.perf_counter() - started) * 1e6)
        all_trees += trees
    for target in targets:
        target.session.close()
    return np.array(microseconds[min(20, steps // 10) :]), all_trees


def same(one: DraftTree, other: DraftTree) -> bool:
    names = ("tokens", "parents", "probs", "sources")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def percentiles(microseconds: np.ndarray) -> dict:
    return {f"p{q}": round(float(np.percentile(microseconds, q)), 1) for q in (5, 50, 90, 99)}


def measure_batches(client: DraftClient, text: np.ndarray, sizes: list[int], tokens: int) -> dict:
    """Steps through the server and in process, for every batch size, on the same texts in the same order."""
    figures = {}
    with Drafter(CONFIG) as drafter:
        drafter.warmup()
        for size in sizes:
            steps = max(50, min(3000, tokens // size))
            starts = [PROMPT + 1000 * row for row in range(size)]
            texts = [text[start : start + PROMPT + 40 * steps] for start in starts]
            before = client.stats.served
            through_server, trees = run_batch(client, texts, steps)
            in_process, expected = run_batch(drafter, texts, steps)
            assert client.stats.served - before == len(trees), f"drafted without the server: {client.stats.fallbacks}"
            assert all(map(same, trees, expected)), "the server's trees differ from those in process"
            figures[size] = {
                "steps": steps,
                "nodes": round(float(np.mean([len(tree) for tree in trees])), 1),
                "step": percentiles(through_server),
                "in_process": percentiles(in_process),
            }
    return figures


def be_a_client(address: str) -> None:
    """The client in a process of its own: its steps alone, and bare messages over the same kind of stream."""
    kind = "plain" if address.startswith("unix:") else "grpc"
    with DraftClient(address, CONFIG, timeout=5.0, open_timeout=30.0, require=True) as client:
        steps, trees = run_batch(client, [source_words(PROMPT + 40 * STEPS)], STEPS)
        assert client.stats.served == len(trees), f"drafted without the server: {client.stats.fallbacks}"
    print(json.dumps({"step": percentiles(steps), "bare": percentiles(round_trips(kind, STEPS))}))


def measure_streams(address: str) -> dict:
    """What `be_a_client` finds over each kind of stream."""
    figures = {"plain": ask_client(address)}
    with Server("127.0.0.1:0") as server:
        figures["grpc"] = ask_client(server.address)
        figures["grpc, no event engine"] = ask_client(server.address, **NO_EVENT_ENGINE)
    return figures


def ask_client(address: str, **environment: str) -> dict:
    command = [sys.executable, __file__, "--client", address]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, **environment})
    return json.loads(done.stdout)


def open_sessions(address: str, prompt: int) -> None:
    """The other client: opens 4 million tokens' worth of sessions and says how many milliseconds one took."""
    text, seconds = source_words(2 * prompt), []
    with DraftClient(address, CONFIG, timeout=60.0, open_timeout=60.0, require=True) as client:
        print("opening", flush=True)
        for row in range(4_000_000 // prompt):
            tokens = text[row : row + prompt]
            started = time.perf_counter()
            with client.open(tokens) as session:
                session.draft()
            seconds.append(time.perf_counter() - started)
    print(1000 * float(np.median(seconds)))


def measure_bystander(address: str, text: np.ndarray, prompt: int) -> dict:
    """A session's steps, undisturbed and while another process opens sessions with `prompt` tokens."""
    figures = {"prompt": prompt}
    with DraftClient(address, CONFIG, timeout=5.0, require=True) as client:
        quiet, _ = run_batch(client, [text[: PROMPT + 20_000]], 400)
        figures["undisturbed"] = percentiles(quiet)
        opener = subprocess.Popen(
            [sys.executable, __file__, "--open", address, str(prompt)], stdout=subprocess.PIPE, text=True
        )
        assert opener.stdout.readline() == "opening\n"
        disturbed = [quiet[:0]]
        while opener.poll() is None:
            disturbed.append(run_batch(client, [text[: PROMPT + 20_000]], 50)[0])
        milliseconds = float(opener.stdout.read())
        figures["disturbed"] = percentiles(np.concatenate(disturbed))
        figures["open_milliseconds"] = round(milliseconds, 1)
    return figures


class Server:
    """`redraft serve` in a process of its own; `start` is the seconds it took, `address` where it listens."""

    def __init__(self, address: str, **environment: str) -> None:
        command = [sys.executable, "-m", "redraft", "serve", "--listen", address, "--vocab-size", str(VOCABULARY)]
        started = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
        line = self._process.stdout.readline()
        self.start = time.perf_counter() - started
        assert "is ready" in line, f"the server did not start: {line!r}"
        self.address = line.split()[4]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error) -> None:
        self._process.terminate()
        assert self._process.wait(30) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], metavar="N", help="batch sizes")
    parser.add_argument("--tokens", type=int, default=20_000, metavar="N", help="steps times sessions, about")
    parser.add_argument("--cold", action="store_true", help="also start a server with an empty compiler cache")
    parser.add_argument("--open", nargs=2, metavar=("ADDRESS", "TOKENS"), help="be the client that opens long sessions")
    parser.add_argument("--client", metavar="ADDRESS", help="be the client in a process of its own")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDS.name}/round_trip-DATE.json")
    args = parser.parse_args()
    if args.client:
        be_a_client(args.client)
        return
    if args.open:
        open_sessions(args.open[0], int(args.open[1]))
        return

    record = provenance("grpcio", "protobuf")
    text = source_words(400_000)
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/redraft.sock"
        start = {}
        if args.cold:
            with Server(address, NUMBA_CACHE_DIR=f"{folder}/cache") as server:
                start["cold"] = round(server.start, 1)
        with Server(address):
            pass  # whatever was not compiled yet is now
        with Server(address) as server:
            start["warm"] = round(server.start, 2)
            with DraftClient(address, CONFIG, timeout=5.0, open_timeout=30.0, require=True) as client:
                record["batches"] = measure_batches(client, text, args.batches, args.tokens)
            record["streams"] = measure_streams(address)
            record["bystander"] = [measure_bystander(address, text, prompt) for prompt in (30_000, 128_000)]
        record["start_seconds"] = start
    show(record)
    if args.record:
        RECORDS.mkdir(exist_ok=True)
        (RECORDS / f"round_trip-{record['date']}.json").write_text(json.dumps(record, indent=1) + "\n")


def show(record: dict) -> None:
    names = ("batch", "nodes", "p5 us", "p50 us", "p90 us", "p99 us", "in process p50", "x batch 1")
    print("  ".join(f"{name:>9}" for name in names))
    first = next(iter(record["batches"].values()))["step"]["p50"]
    for size, figures in record["batches"].items():
        step = figures["step"]
        row = (size, figures["nodes"], *step.values(), figures["in_process"]["p50"], round(step["p50"] / first, 1))
        print("  ".join(f"{value:>{max(9, len(name))}}" for name, value in zip(names, row)))
    for name, figures in record["streams"].items():
        step, bare = figures["step"], figures["bare"]
        print(f"batch 1, {name}: p50 {step['p50']} us, p99 {step['p99']} us; bare messages {bare['p50']}, {bare['p99']}")
    for figures in record["bystander"]:
        quiet, disturbed = figures["undisturbed"], figures["disturbed"]
        print(
            f"bystander of {figures['prompt']} token prompts ({figures['open_milliseconds']} ms each):"
            f" p50 {quiet['p50']} -> {disturbed['p50']} us, p99 {quiet['p99']} -> {disturbed['p99']} us"
        )
    print("start, seconds:", ", ".join(f"{kind} {seconds}" for kind, seconds in record["start_seconds"].items()))


if __name__ == "__main__":
    main()
