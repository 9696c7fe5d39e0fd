"""The suffix array at the size people have: build, bytes, memory, opening, lookups and drafts, beside
`draftretriever`.

    python benchmarks/suffix_array.py --tokens 100000000 --sources /usr/lib ~/.pyenv --record

The text is Python source in the tokens of --tokenizer. A lookup is one step of a draft: the cursor advances by a
token, for contexts of at most four tokens, and the eight most frequent successors are read. The index of 1M tokens is
a part of the large one, so that the two differ in size alone. `draftretriever` (`rest.py` says what it is) runs in a
process of its own, on as much of the text as --peer-tokens says.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, perf_counter_ns, process_time

import numpy as np
from automaton import STREAM_TOKENS, STREAMS
from machine import RECORDS, provenance
from source_corpus import python_source

from redraft.retrieval.config import DraftConfig
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.index_directory import open_index, write_array_index
from redraft.retrieval.kernel import kernel
from redraft.retrieval.suffix_array import N, Text, positions
from redraft.retrieval.suffix_array_cursor import EXACT_ROWS, SUCCESSORS, array_advance, array_successors, find
from redraft.retrieval.suffix_sorting import sort_suffixes

CONTEXT = 4


@kernel(allocates=False)
def _step(array, low, high, length, frequent, window, tokens, counts, rows):
    """One lookup, and the same for a whole text below: advance, then read the successors."""
    low, high, length, frequent = array_advance(array, low, high, length, frequent, window, CONTEXT)
    array_successors(array, low, high, length, frequent, tokens, counts, rows)
    return low, high, length, frequent


@kernel(allocates=False)
def _walk(array, text, window, tokens, counts, rows):
    low, high, length, frequent = np.int64(0), array.sizes[N], np.int64(0), np.int64(0)
    for i in range(text.shape[0]):
        for back in range(CONTEXT - 1, 0, -1):
            window[back] = window[back - 1]
        window[0] = text[i]
        low, high, length, frequent = array_advance(array, low, high, length, frequent, window, CONTEXT)
        array_successors(array, low, high, length, frequent, tokens, counts, rows)
    return low, high, length


def memory(field: str, file: str = "status") -> int:
    """Bytes, from a line of /proc/self/FILE."""
    for line in Path(f"/proc/self/{file}").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def build(path: Path, documents: list[np.ndarray]) -> dict:
    """Write the index; what it took."""
    tokens = np.concatenate(documents)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    n, before = len(tokens), memory("RssAnon")
    phases: dict[str, float] = {}
    start = perf_counter()

    def progress(what: str, done: int, total: int) -> None:
        phases[what] = perf_counter() - start

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    cpu = process_time()
    write_array_index(path, tokens, ends, tokenizer={}, options={}, sources=[], progress=progress)
    seconds, cpu = perf_counter() - start, process_time() - cpu
    return {
        "tokens": n,
        "documents": len(documents),
        "sort_seconds": round(phases["sorting"], 2),
        "build_seconds": round(seconds, 2),
        "build_tokens_per_second": round(n / seconds),
        "build_tokens_per_cpu_second": round(n / cpu),
        "peak_gb_with_mapped_output": round(memory("VmHWM") / 1e9, 2),
        "private_gb_before": round(before / 1e9, 2),
        "disk_bytes_per_token": round(sum(file.stat().st_size for file in path.iterdir()) / n, 3),
    }


def on_stream(make) -> dict:
    """Nanoseconds per token for a text of repeats, and for its first quarter: linear if they are alike."""
    figures = {}
    for name, n in (("quarter", STREAM_TOKENS // 4), ("whole", STREAM_TOKENS)):
        text, seconds = make(n), []
        for _ in range(3):
            start = perf_counter()
            order = sort_suffixes(text, np.array([n]))
            seconds.append(perf_counter() - start)
        assert np.bincount(order).max() == 1
        for row in range(0, n - 1, n // 50):
            assert text[order[row] :][:1000].tolist() <= text[order[row + 1] :][:1000].tolist()
        figures[f"{name}_ns_per_token"] = round(min(seconds) / n * 1e9)
    return figures


def percentiles(nanoseconds: list[int]) -> dict:
    ordered = sorted(nanoseconds)
    return {
        f"p{share}_us": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)] / 1e3, 2)
        for share in (50, 99)
    }


def buffers_of_a_lookup() -> list[np.ndarray]:
    """The window of a context, and what `array_successors` fills."""
    return [np.zeros(size, np.int32) for size in (SUCCESSORS, SUCCESSORS, SUCCESSORS, EXACT_ROWS)]


def steps(array, text: np.ndarray) -> list[int]:
    """Nanoseconds of each lookup along `text`, the call from Python included."""
    window, *buffers = buffers_of_a_lookup()
    cursor, times = (0, int(array.sizes[N]), 0, 0), []
    for token in text:
        window[1:] = window[:-1].copy()
        window[0] = token
        start = perf_counter_ns()
        cursor = _step(array, *cursor, window, *buffers)
        times.append(perf_counter_ns() - start)
    return times


def forget_pages(path: Path) -> None:
    """Have the system drop what it holds of the index's files in memory."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def lookups(path: Path, text: np.ndarray) -> dict:
    """Opening, the first lookups with nothing in memory, then warm ones."""
    forget_pages(path)
    before, start = memory("Private_Clean", "smaps_rollup") + memory("Private_Dirty", "smaps_rollup"), perf_counter()
    index = open_index(path)
    opened = perf_counter() - start
    private = memory("Private_Clean", "smaps_rollup") + memory("Private_Dirty", "smaps_rollup") - before
    with index:
        check(index.array, text)
        for part in index.array[:-1]:
            owner = part
            while not isinstance(owner, mmap.mmap):
                owner = owner.base
            owner.madvise(mmap.MADV_DONTNEED)
        forget_pages(path)  # what is mapped would stay
        figures = {
            "open_ms": round(opened * 1e3, 2),
            "open_private_mb": round(private / 1e6, 2),
            "cold": percentiles(steps(index.array, text[:500])),
        }
        arguments = index.array, text, *buffers_of_a_lookup()
        _walk(*arguments)
        start = perf_counter()
        _walk(*arguments)
        figures["us_per_step_in_kernel"] = round((perf_counter() - start) / len(text) * 1e6, 2)
        return figures | {"warm": percentiles(steps(index.array, text))}


def check(array, text: np.ndarray) -> None:
    """A few intervals against a scan of the corpus."""
    rng, n = random.Random(0), int(array.sizes[N])
    tokens = Text(array)[:]
    for _ in range(5):
        context = text[(at := rng.randrange(len(text) - CONTEXT)) : at + CONTEXT]
        low, high, length, _ = find(array, context, CONTEXT)
        if length:
            suffix = context[len(context) - length :]
            hits = np.ones(n - length + 1, bool)
            for i, token in enumerate(suffix):
                hits &= tokens[i : n - length + 1 + i] == token
            # The scan also meets places that reach over a document's end, which the array must not.
            assert 0 <= hits.sum() - (high - low) <= hits.sum() // 100 + 2
            assert hits[positions(array, low, high)].all()


def drafts(paths: dict[str, Path], text: np.ndarray) -> dict:
    """Microseconds of a draft of 32 nodes with each index, all pages warm, the indexes in turn; and without any."""
    times: dict[str, list[int]] = {name: [] for name in paths}
    for attempt in range(3):
        for name, path in paths.items():
            with (
                Drafter(DraftConfig(), indexes=[path] if path else []) as drafter,
                drafter.open(text[:2000]) as session,
            ):
                for token in text[2000:3000]:
                    start = perf_counter_ns()
                    tree = session.draft()
                    if attempt:  # the first time brings the pages in
                        times[name].append(perf_counter_ns() - start)
                    session.commit([token])
                assert 0 < len(tree) <= 32
    return {name: percentiles(spent) for name, spent in times.items()}


def cold_drafts(path: Path, text: np.ndarray) -> dict:
    """The first 500 drafts of a drafter that has just opened the index, with nothing of it in memory; three times over."""
    times, opened = [], []
    for _ in range(3):
        forget_pages(path)
        start = perf_counter()
        with Drafter(DraftConfig(), indexes=[path]) as drafter:
            opened.append(perf_counter() - start)
            with drafter.open(text[:2000]) as session:
                for token in text[2000:2500]:
                    start = perf_counter_ns()
                    session.draft()
                    times.append(perf_counter_ns() - start)
                    session.commit([token])
    figures = {"open_ms": round(statistics.median(opened) * 1e3, 2), "sum_ms": round(sum(times) / 3e6, 1)}
    return figures | percentiles(times)


def sharing(path: Path) -> dict:
    """Two processes that walk the same index: what the second holds alone."""
    script = (
        "import sys, numpy as np; sys.path.insert(0, 'benchmarks'); import suffix_array as b\n"
        "from redraft.retrieval.index_directory import open_index\n"
        f"index = open_index({str(path)!r}); text = index.tokens[:100_000]\n"
        "b.steps(index.array, text[:100]); before = b.memory('Private_Dirty', 'smaps_rollup')\n"
        "b.steps(index.array, text)\n"
        "mapped = [0, 0]\n"
        "own = False\n"
        "for line in open('/proc/self/smaps'):\n"
        f"    own = line.rstrip().split(' ')[-1].startswith({str(path)!r}) if '-' in line.split()[0] else own\n"
        "    mapped[0] += int(line.split()[1]) * 1024 if own and line.startswith('Rss:') else 0\n"
        "    mapped[1] += int(line.split()[1]) * 1024 if own and line.startswith('Private_') else 0\n"
        "print(mapped[0], mapped[1])\n"
    )
    with open_index(path) as index:
        steps(index.array, index.tokens[:100_000])
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=RECORDS.parents[1], capture_output=True, text=True, check=True
        )
    resident, alone = map(int, done.stdout.split())
    return {"second_process_mapped_mb": round(resident / 1e6, 1), "of_that_not_shared_mb": round(alone / 1e6, 1)}


PEER = """
import json, os, resource, sys, time
import draftretriever
import numpy as np

tokens, ends, queries = (np.load(file) for file in sys.argv[1:4])
path, vocabulary = sys.argv[4], int(sys.argv[5])
start, begin = time.perf_counter(), 0
writer = draftretriever.Writer(path, vocabulary)
for end in ends:
    writer.add_entry(tokens[begin:end].tolist())
    begin = end
writer.finalize()
built, start = time.perf_counter() - start, time.perf_counter()
reader = draftretriever.Reader(path)
opened, times = time.perf_counter() - start, []
for query in queries:
    query = query.tolist()
    start = time.perf_counter_ns()
    reader.search(query, choices=64)
    times.append(time.perf_counter_ns() - start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"build": built, "open": opened, "bytes": os.path.getsize(path), "times": times, "peak": peak}))
"""


def beside_draftretriever(folder: Path, documents: list[np.ndarray], text: np.ndarray) -> dict:
    """Build and search the same documents with both. Its search returns a whole draft of up to 64 tokens."""
    tokens = np.concatenate(documents)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    queries = np.lib.stride_tricks.sliding_window_view(text, CONTEXT)[:2000]
    for name, values in (("tokens", tokens), ("ends", ends), ("queries", queries)):
        np.save(folder / f"{name}.npy", values)
    arguments = [str(folder / name) for name in ("tokens.npy", "ends.npy", "queries.npy", "draftretriever.idx")]
    done = subprocess.run(
        [sys.executable, "-c", PEER, *arguments, str(int(tokens.max()) + 1)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"tokens": len(tokens), "draftretriever_failed": done.stderr.strip().splitlines()[-1:]}
    theirs = json.loads(done.stdout)
    start = perf_counter()
    write_array_index(folder / "ours", tokens, ends, tokenizer={}, options={}, sources=[])
    built = perf_counter() - start
    with open_index(folder / "ours") as index:
        ours = steps(index.array, text[:2000])
        ours = steps(index.array, text[:2000])
    size = sum(file.stat().st_size for file in (folder / "ours").iterdir())
    return {
        "tokens": len(tokens),
        "redraft": {
            "build_seconds": round(built, 2),
            "bytes_per_token": round(size / len(tokens), 2),
            "lookup_us_p50": round(statistics.median(ours) / 1e3, 2),
        },
        "draftretriever": {
            "build_seconds": round(theirs["build"], 2),
            "bytes_per_token": round(theirs["bytes"] / len(tokens), 2),
            "open_seconds": round(theirs["open"], 2),
            "peak_gb": round(theirs["peak"] / 1e9, 2),
            "lookup_us_p50": round(statistics.median(theirs["times"]) / 1e3, 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = os.environ.get("REDRAFT_SMOLLM2", Path.home() / ".cache/redraft/models/smollm2-135m")
    parser.add_argument(
        "--tokenizer", default=Path(model) / "SmolLM2-135M-Instruct.Q4_1.gguf", help="tokenizer.json, GGUF, or folder"
    )
    parser.add_argument(
        "--sources", type=Path, nargs="+", help="folders with Python files (default: this interpreter's)"
    )
    parser.add_argument("--tokens", type=int, default=10_000_000, help="size of the large index")
    parser.add_argument("--peer-tokens", type=int, default=2_000_000, help="size of the index beside draftretriever")
    parser.add_argument("--kept", type=Path, metavar="FILE.npz", help="keep the tokens here for the next run")
    parser.add_argument("--record", action="store_true", help="write a dated record into benchmarks/record")
    args = parser.parse_args()

    start = perf_counter()
    documents = python_source(args.tokenizer, args.tokens + 20_000, args.sources, args.kept)
    print(f"tokenized in {perf_counter() - start:.0f} s", file=sys.stderr)
    random.Random(0).shuffle(documents)
    held_out = documents.pop()
    while len(held_out) < 20_000:
        held_out = np.concatenate([held_out, documents.pop()])
    held_out = held_out[:20_000]
    part = _first(documents, 1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        build(folder / "warm-up.index", documents[:20])  # compiles
        record = provenance("draftretriever") | {"tokenizer": Path(args.tokenizer).name}
        record["load_average"] = os.getloadavg()[0]
        record["streams"] = {name: on_stream(make) for name, make in STREAMS.items()}
        record["build"] = build(folder / "large.index", documents)
        build(folder / "small.index", part)
        record["small"] = {"tokens": sum(map(len, part))} | lookups(folder / "small.index", held_out)
        record["large"] = lookups(folder / "large.index", held_out)
        indexes = {"without": None, "small": folder / "small.index", "large": folder / "large.index"}
        record["draft"] = drafts(indexes, held_out)
        record["draft_cold"] = {name: cold_drafts(path, held_out) for name, path in indexes.items() if path}
        record["shared"] = sharing(folder / "large.index")
        record["beside_draftretriever"] = beside_draftretriever(folder, _first(documents, args.peer_tokens), held_out)
    print(json.dumps(record, indent=1))
    if args.record:
        file = RECORDS / f"suffix_array-{record['date']}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n")


def _first(documents: list[np.ndarray], wanted: int) -> list[np.ndarray]:
    """The first documents, as many as hold `wanted` tokens."""
    ends = np.cumsum([len(document) for document in documents])
    return documents[: int(np.searchsorted(ends, wanted)) + 1]


if __name__ == "__main__":
    main()
