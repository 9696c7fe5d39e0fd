"""The suffix automaton: how fast it builds beside Arctic's suffix tree, on which streams, in how many bytes.

    python benchmarks/automaton.py --tokens 20000000 --record

The text is Python source (the standard library's, then the installed packages') in the tokens of --tokenizer. Times of
the two structures are taken in turn within one run, and medians are compared. Every structure is asked for answers
that are known before its time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
from machine import RECORDS, provenance
from source_corpus import python_source

from redraft.retrieval.errors import import_extra
from redraft.retrieval.frozen_automaton import COUNT, frozen_advance, frozen_walk
from redraft.retrieval.index_directory import open_index, write_automaton_index
from redraft.retrieval.suffix_automaton import SuffixAutomaton

PEER_TOKENS = 200_000
STREAM_TOKENS = 1_000_000
CONTEXT = 64


def build(documents: list[np.ndarray]) -> SuffixAutomaton:
    automaton = SuffixAutomaton(capacity_hint=sum(map(len, documents)))
    for document in documents:
        automaton.append(document)
        automaton.end_document()
    return automaton


def beside_arctic(text: np.ndarray, rounds: int) -> dict:
    """Tokens per second, each structure built from `text` as one sequence, in turn."""
    cache_class = import_extra("arctic_inference.suffix_decoding", "dev").SuffixDecodingCache
    ours, theirs = [], []
    for _ in range(rounds):
        start = perf_counter()
        automaton = SuffixAutomaton()
        automaton.append(text)
        ours.append(perf_counter() - start)
        assert automaton.longest_match(text[-CONTEXT:])[1] == CONTEXT

        cache = cache_class(max_tree_depth=64)
        start = perf_counter()
        cache.start_request(0, text)
        theirs.append(perf_counter() - start)
        assert len(cache.speculate(0, text[-CONTEXT - 8 : -8], max_spec_tokens=4).token_ids) > 0
    ours_rate, theirs_rate = (len(text) / statistics.median(times) for times in (ours, theirs))
    return {
        "tokens": len(text),
        "redraft_tokens_per_second": round(ours_rate),
        "arctic_tokens_per_second": round(theirs_rate),
        "ratio": round(ours_rate / theirs_rate, 2),
        "bytes_per_token": round(automaton.nbytes / len(text), 1),
    }


def fibonacci(n: int) -> np.ndarray:
    shorter, word = np.array([1], np.int32), np.array([0], np.int32)
    while len(word) < n:
        shorter, word = word, np.concatenate([word, shorter])
    return word[:n]


STREAMS = {
    "constant": lambda n: np.zeros(n, np.int32),
    "period 2": lambda n: (np.arange(n) % 2).astype(np.int32),
    "period 997": lambda n: (np.arange(n) % 997).astype(np.int32),
    "fibonacci": fibonacci,
    "random, 2 ids": lambda n: np.random.default_rng(0).integers(0, 2, n, np.int32),
    "constant, then another": lambda n: np.append(np.zeros(n - 1, np.int32), np.int32(1)),
}


def on_stream(make) -> dict:
    """Nanoseconds per token and states and edges per token; the time for a quarter of the stream shows linearity."""
    figures = {}
    for name, n in (("quarter", STREAM_TOKENS // 4), ("whole", STREAM_TOKENS)):
        text = make(n)
        seconds = []
        for _ in range(3):
            start = perf_counter()
            automaton = SuffixAutomaton()
            automaton.append(text)
            automaton.totals()
            seconds.append(perf_counter() - start)
        figures[f"{name}_ns_per_token"] = round(min(seconds) / n * 1e9)
        state, length = automaton.longest_match(text)
        assert (length, automaton.count(state), automaton.first_end(state)) == (n, 1, n - 1)
        state, _ = automaton.longest_match(text[:1])
        assert automaton.count(state) == int((text == text[0]).sum())
    figures["states_per_token"] = round(automaton.n_states / n, 3)
    figures["edges_per_token"] = round(automaton.n_edges / n, 3)
    return figures


def _resident(field: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def as_index(documents: list[np.ndarray], held_out: np.ndarray) -> dict:
    """Build, freeze, write and query an index of `documents`."""
    resident = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start, cpu = perf_counter(), process_time()
    automaton = build(documents)
    appended = perf_counter()
    n = automaton.n_tokens
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.index"
        write_automaton_index(path, automaton, tokenizer={}, options={}, sources=[])
        written, cpu = perf_counter(), process_time() - cpu
        figures = {
            "tokens": n,
            "documents": automaton.n_documents,
            "append_seconds": round(appended - start, 2),
            "freeze_and_write_seconds": round(written - appended, 2),
            "append_tokens_per_second": round(n / (appended - start)),
            "build_tokens_per_second": round(n / (written - start)),
            "build_tokens_per_cpu_second": round(n / cpu),
            "online_bytes_per_token": round(automaton.nbytes / n, 1),
            "disk_bytes_per_token": round(sum(file.stat().st_size for file in path.iterdir()) / n, 2),
            "peak_memory_bytes_per_token": round((_resident("VmHWM") - resident) / n, 1),
        }
        start = perf_counter()
        index = open_index(path)
        figures["open_ms"] = round((perf_counter() - start) * 1e3, 2)
        with index:
            return figures | lookups(index.automaton, automaton, documents, held_out)


def lookups(frozen, automaton: SuffixAutomaton, documents: list[np.ndarray], held_out: np.ndarray) -> dict:
    """Nanoseconds per step in the mapped automaton, on text it holds and on text it does not."""
    held_in = documents[len(documents) // 2]
    for context in (held_in[:CONTEXT], held_out[:CONTEXT], held_out[7:11]):
        state, length = frozen_walk(frozen, context, 1 << 30)
        same_state, same_length = automaton.longest_match(context)
        assert (state, length) == (same_state, same_length)
        assert frozen.states[state, COUNT] == automaton.count(same_state)
    figures = {}
    for name, text in (("held_in", held_in), ("held_out", held_out)):
        for limit in (4, 1 << 30):
            frozen_walk(frozen, text, limit)
            start = perf_counter()
            frozen_walk(frozen, text, limit)
            label = "unbounded" if limit > CONTEXT else f"up_to_{limit}"
            figures[f"walk_{name}_{label}_ns_per_token"] = round((perf_counter() - start) / len(text) * 1e9)
    state, length, lengths = 0, 0, []
    for token in held_out.tolist():
        state, length = frozen_advance(frozen, state, length, token, 1 << 30)
        lengths.append(length)
    figures["held_out_mean_match"] = round(statistics.mean(lengths), 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = os.environ.get("REDRAFT_SMOLLM2", Path.home() / ".cache/redraft/models/smollm2-135m")
    parser.add_argument(
        "--tokenizer", default=Path(model) / "SmolLM2-135M-Instruct.Q4_1.gguf", help="tokenizer.json, GGUF, or folder"
    )
    parser.add_argument("--tokens", type=int, default=5_000_000, help="size of the index")
    parser.add_argument("--rounds", type=int, default=7, help="rounds against the peer")
    parser.add_argument("--kept", type=Path, metavar="FILE.npz", help="keep the tokens here for the next run")
    parser.add_argument("--record", action="store_true", help="write a dated record into benchmarks/record")
    args = parser.parse_args()

    documents = python_source(args.tokenizer, args.tokens + 200_000, kept=args.kept)
    text = np.concatenate(documents[: len(documents) // 2])[:PEER_TOKENS]
    random.Random(0).shuffle(documents)  # neighbours in a folder are copies of each other more often
    held_out, size = [], 0
    while size < 100_000:
        held_out.append(documents.pop())
        size += len(held_out[-1])
    build(documents[:20])  # compiles
    figures = {
        "beside_arctic": beside_arctic(text, args.rounds),
        "streams": {name: on_stream(make) for name, make in STREAMS.items()},
        "index": as_index(documents, np.concatenate(held_out)),
    }
    setting = {"tokenizer": Path(args.tokenizer).name, "load_average": os.getloadavg()[0]}
    record = provenance("arctic-inference") | setting | figures
    print(json.dumps(record, indent=1))
    if args.record:
        file = RECORDS / f"automaton-{record['date']}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
