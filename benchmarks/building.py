"""The builder from end to end at the size people have: text in, index out.

    python benchmarks/building.py FOLDER... --tokenizer T --record

The text is whatever `redraft index build` reads in the folders (source, documentation, data), in their order, until
there are enough tokens: --tokens of it become a suffix array, --automaton-tokens a suffix automaton. Every build is a
process of its own. Recorded are seconds, processor seconds (all threads) and tokens per second of each phase, the most
memory the process held (mapped pages of its files included), bytes on disk, and what share of the machine's processors
other work took meanwhile. Every index is verified: digests and ranges.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time

from machine import RECORDS, provenance
from suffix_array import memory

from redraft.index_builders.build import BuildOptions, build_index
from redraft.index_builders.progress import Progress
from redraft.index_builders.readers.documents import ReadOptions
from redraft.retrieval.index_directory import open_index
from redraft.retrieval.index_verification import verify_index


class _Measured(Progress):
    """Counts processor seconds beside the seconds."""

    def __init__(self) -> None:
        super().__init__(every=30)
        self.cpu: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, *arguments, **keywords):
        before = process_time()
        try:
            with super().phase(name, *arguments, **keywords) as report:
                yield report
        finally:
            self.cpu[name] = self.cpu.get(name, 0.0) + process_time() - before


def _busy() -> float:
    """Processor seconds that the whole machine has worked."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def build(sources: list[str], tokenizer: str, kind: str, tokens: int) -> dict:
    """Build in a temporary folder; what it took."""
    read = ReadOptions(max_bad_records=1_000_000)  # whatever lies there
    with tempfile.TemporaryDirectory() as folder:
        warm = Path(folder) / "warm.index"  # compiles the kernels
        build_index(sources, tokenizer, warm, BuildOptions(read, max_tokens=1000, kind=kind))
        progress, path = _Measured(), Path(folder) / "my.index"
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        start, cpu, busy = perf_counter(), process_time(), _busy()
        summary = build_index(sources, tokenizer, path, BuildOptions(read, max_tokens=tokens, kind=kind), progress)
        seconds, cpu = perf_counter() - start, process_time() - cpu
        others = _busy() - busy - cpu
        peak = memory("VmHWM")
        assert verify_index(path)["tokens"] == summary.tokens == tokens
        with open_index(path) as index:
            assert sum(map(len, index.documents())) == tokens
    phases = {
        name: {
            "seconds": round(spent, 2),
            "cpu_seconds": round(progress.cpu.get(name, 0.0), 2),
            "tokens_per_second": round(tokens / spent) if spent else None,
        }
        for name, spent in summary.seconds.items()
    }
    reading = ("tokenizing", "listing files, loading the tokenizer")
    after = [phase for name, phase in phases.items() if name not in reading]
    return {
        "kind": kind,
        "documents": summary.documents,
        "tokens": summary.tokens,
        "phases": phases,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "tokens_per_second": round(tokens / seconds),
        "after_tokenizing": {
            "tokens_per_second": round(tokens / sum(phase["seconds"] for phase in after)),
            "tokens_per_cpu_second": round(tokens / sum(phase["cpu_seconds"] for phase in after)),
        },
        "peak_gb": round(peak / 1e9, 2),
        "peak_bytes_per_token": round(peak / tokens, 1),
        "bytes_per_token": round(summary.index_bytes / tokens, 3),
        "processors_others_used": round(others / seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="folders with text")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, GGUF, or folder")
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of the suffix array")
    parser.add_argument("--automaton-tokens", type=int, default=20_000_000, help="of the suffix automaton")
    parser.add_argument("--record", action="store_true", help="write a dated record into benchmarks/record")
    args = parser.parse_args()
    record = provenance("tokenizers") | {"load_average": os.getloadavg(), "builds": []}
    for kind, tokens in (("suffix_automaton", args.automaton_tokens), ("suffix_array", args.tokens)):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            figures = pool.submit(build, args.sources, args.tokenizer, kind, tokens).result()
        record["builds"].append(figures)
        print(json.dumps(figures, indent=1), flush=True)
    record["load_average_after"] = os.getloadavg()
    if args.record:
        RECORDS.mkdir(exist_ok=True)
        (RECORDS / f"building-{record['date']}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
