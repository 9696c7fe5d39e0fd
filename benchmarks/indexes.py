"""Corpus indexes in the drafter: what they add, what they cost, beside REST and the package `draftretriever`.

    python benchmarks/indexes.py TRACES --tokenizer T --corpora FOLDER... --record
    python benchmarks/indexes.py TRACES --tokenizer T --corpora FOLDER... --large-tokens 100000000 --kept TOKENS.npz

The corpora become an index of either kind, and the same documents one of `draftretriever`; `rest.py` says why that is not
REST, and drafts as REST does. Then:

    build     seconds, bytes on disk and peak memory, from token arrays to the finished index
    lookup    the last four tokens of a text: the most frequent successors (redraft), a search for 32 tokens
              (draftretriever); and what opening takes, of time and of memory that other processes do not share
    replay    recorded outputs, trees of 32 nodes: tokens per step and microseconds a draft, in three groups. "a corpus and
              nothing else": REST, draftretriever kept from learning, redraft with nothing but an index of either kind.
              "as shipped": draftretriever, which learns from the text it is asked with, and redraft with all its sources
              and an index. "without a corpus": redraft. Only within a group is like compared with like
    shards    a draft with the corpora in 1, 2, 4 and 8 indexes
    cold      the first 300 drafts with no page of the index in memory, for the corpora and for --large-tokens of Python
              source; the same drafts again when they are warm

draftretriever runs in a process of its own, as it can abort. Single structures at their largest (build, opening, memory shared by processes, drafts with 1M and 100M
tokens behind them) are measured by `automaton.py` and `suffix_array.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import perf_counter, perf_counter_ns, process_time, thread_time_ns

import numpy as np
from machine import RECORDS, provenance
from rest import Aded, Rest
from source_corpus import python_source
from suffix_array import forget_pages, memory, percentiles

from redraft.commands.replay import add_plan_arguments, plan_of
from redraft.index_builders.build import BuildOptions, build_index
from redraft.index_builders.tokenizers import load_tokenizer
from redraft.replay.contenders import Redraft
from redraft.replay.run import Plan, replay_file
from redraft.replay.tally import Tally
from redraft.replay.traces import RememberedTokenizer, load_workload, trace_files
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.edge_rows import EDGE_TOKEN
from redraft.retrieval.frozen_automaton import COUNT, EDGE_START, frozen_walk
from redraft.retrieval.index_directory import open_index, warm_lookups, write_array_index, write_automaton_index
from redraft.retrieval.suffix_array_cursor import find, successors
from redraft.retrieval.suffix_automaton import SuffixAutomaton

NODES = 32
CONTEXT = 4
KINDS = ("suffix_automaton", "suffix_array")
WORKLOADS = ["code_generation", "chat_single", "maths"]


# --- draftretriever --------------------------------------------------------------------------------------------------


def _build_aded(tokens: np.ndarray, ends: np.ndarray, path: str) -> dict:
    import draftretriever

    def write() -> None:
        writer = draftretriever.Writer(path, int(tokens.max()) + 1)
        for document in np.split(tokens, ends[:-1]):
            writer.add_entry(document.tolist())
        writer.finalize()

    return measured(write) | {"bytes_per_token": round(os.path.getsize(path) / len(tokens), 2)}


def measured(work) -> dict:
    """What a call took, of time and of memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start, cpu = memory("VmRSS"), perf_counter(), process_time()
    work()
    return {
        "seconds": round(perf_counter() - start, 2),
        "cpu_seconds": round(process_time() - cpu, 2),
        "peak_mb": round((memory("VmHWM") - before) / 1e6),
    }


def private() -> int:
    """Bytes that this process holds for itself; pages of a file are another process's as well if it opens the file."""
    return memory("Private_Dirty", "smaps_rollup")


def _search_aded(path: str, contexts: np.ndarray) -> dict:
    import draftretriever

    before, start = private(), perf_counter()
    reader = draftretriever.Reader(path)
    opened, times = perf_counter() - start, []
    for context in contexts.tolist():
        start = perf_counter_ns()
        reader.search(context, choices=NODES)
        times.append(perf_counter_ns() - start)
    return _lookup_figures(opened, times, before)


def _lookup_figures(opened: float, times: list[int], before: int) -> dict:
    return {"open_ms": round(opened * 1e3, 1), "private_mb": round((private() - before) / 1e6, 1), **percentiles(times)}


def apart(function, *arguments):
    """Call in a process of its own, which may abort: then RuntimeError."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


# --- Ours -------------------------------------------------------------------------------------------------------------


def _build_ours(tokens: np.ndarray, ends: np.ndarray, path: str, kind: str, tokenizer: dict) -> dict:
    """Write an index of `kind`; a throw-away one before compiles the kernels."""
    with tempfile.TemporaryDirectory() as folder:
        _write(tokens[: ends[0]], ends[:1], Path(folder) / "small", kind, tokenizer)
    done = measured(lambda: _write(tokens, ends, path, kind, tokenizer))
    return done | {"bytes_per_token": round(size_of(path) / len(tokens), 2)}


def _write(tokens, ends, path, kind: str, tokenizer: dict) -> None:
    about = {"tokenizer": tokenizer, "options": {}, "sources": []}
    if kind == "suffix_array":
        write_array_index(path, tokens, ends, **about)
        return
    automaton = SuffixAutomaton()
    for document in np.split(tokens, ends[:-1]):
        automaton.append(document)
        automaton.end_document()
    write_automaton_index(path, automaton, **about)


def size_of(path) -> int:
    return sum(file.stat().st_size for file in Path(path).iterdir())


def look_up(index, contexts: np.ndarray) -> tuple[list[int], list]:
    """Nanoseconds and answers, (occurrences, most frequent successors) each, of lookups made from Python."""
    times, answers = [], []
    for context in contexts:
        start = perf_counter_ns()
        if index.automaton is not None:
            states, edges = index.automaton
            state, _ = frozen_walk(index.automaton, context, CONTEXT)
            begin, end = int(states[state, EDGE_START]), int(states[state + 1, EDGE_START])
            answer = int(states[state, COUNT]), edges[begin : min(end, begin + 8), EDGE_TOKEN]
        else:
            cursor = find(index.array, context, CONTEXT)
            answer = cursor[1] - cursor[0], successors(index.array, *cursor)[0]
        times.append(perf_counter_ns() - start)
        answers.append((answer[0], answer[1].tolist()))
    return times, answers


def _look_up_ours(path: str, contexts: np.ndarray) -> tuple[dict, list]:
    warm_lookups()
    with open_index(path) as index:
        look_up(index, contexts)
    before, start = private(), perf_counter()
    with open_index(path) as index:
        opened = perf_counter() - start
        times, answers = look_up(index, contexts)
        return _lookup_figures(opened, times, before), answers


def lookups(paths: dict[str, str], aded: str, contexts: np.ndarray) -> dict:
    """Warm lookups of the same contexts; both of our structures must answer alike."""
    figures, answers = {}, []
    for kind in KINDS:
        figures[kind], found = apart(_look_up_ours, paths[kind], contexts)
        answers.append(found)
    for (count, tokens), (same_count, same_tokens) in zip(*answers):
        assert count == same_count
        assert tokens == same_tokens, "both count exactly, and must name the same successors"
    return figures | {"draftretriever": apart(_search_aded, aded, contexts)}


def drafts(indexes: list[str], texts: list[np.ndarray], rounds: int, clock=thread_time_ns) -> list[dict]:
    """Microseconds of a draft, round by round; every round is a fresh drafter over the same texts."""
    figures = []
    for _ in range(rounds):
        times = []
        with Drafter(DraftConfig(), indexes=indexes) as drafter:
            for text in texts:
                with drafter.open(text[:200]) as session:
                    for token in text[200:300]:
                        start = clock()
                        tree = session.draft(NODES)
                        times.append(clock() - start)
                        session.commit([token])
                        assert len(tree) <= NODES
        figures.append(percentiles(times))
    return figures


def cold_and_warm(path: str, texts: list[np.ndarray]) -> dict:
    """Drafts with no page of the index in memory, and with all that they touch.

    Time is what passes, as a processor does nothing while it waits for a page; and for warm drafts the thread's own.
    """
    drafts([path], texts, 1)  # everything else is warm
    gc.collect()  # a file that is mapped keeps its pages
    forget_pages(Path(path))
    faults = [getrusage(RUSAGE_SELF).ru_majflt]
    (cold,) = drafts([path], texts, 1, perf_counter_ns)
    faults.append(getrusage(RUSAGE_SELF).ru_majflt)
    (warm,) = drafts([path], texts, 1, perf_counter_ns)
    faults.append(getrusage(RUSAGE_SELF).ru_majflt)
    cold["page_faults_with_reading"], warm["page_faults_with_reading"] = np.diff(faults).tolist()
    assert cold["page_faults_with_reading"] > 0, "the pages were in memory all the time"
    return {"bytes": size_of(path), "cold": cold, "warm": warm, "warm_cpu": drafts([path], texts, 1)[0]}


# --- What is measured -------------------------------------------------------------------------------------------------


def replay(groups: dict[str, list], files: list[Path], tokenizer, plan: Plan) -> dict:
    """{workload: {group: {contender: figures}}}; every contender must have emitted the same tokens."""
    results: dict[str, dict] = {}
    for file in files:
        workload = file.name.removesuffix(".jsonl.gz")
        tallies: dict[str, Tally] = {}
        for contender in (contender for group in groups.values() for contender in group):
            if isinstance(contender, Aded):
                tallies[contender.name] = apart(replay_file, contender, file, tokenizer, plan)
            else:
                tallies[contender.name] = replay_file(contender, file, tokenizer, plan)
        assert len({tally.emitted for tally in tallies.values()}) == 1, f"{workload}: not the same tokens"
        results[workload] = {name: {} for name in groups}
        for name, contender in ((name, contender) for name, group in groups.items() for contender in group):
            summary = tallies[contender.name].summary()
            figures = {key: round(summary[key], 3) for key in ("tokens_per_step", "nodes_per_step")}
            figures |= {f"draft_{part}_us": round(summary["draft_us"][part], 1) for part in ("p50", "p99")}
            results[workload][name][contender.name] = figures
            print(f"{workload:16} {contender.name:28} {figures}", flush=True)
    return results


def split(tokens: np.ndarray, ends: np.ndarray, parts: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The documents dealt out to `parts` corpora."""
    documents = np.split(tokens, ends[:-1])
    dealt = [documents[part::parts] for part in range(parts)]
    return [(np.concatenate(own), np.cumsum([len(document) for document in own], dtype=np.int64)) for own in dealt]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_plan_arguments(parser)
    parser.add_argument("--corpora", nargs="+", required=True, help="what the index is built from")
    parser.add_argument("--large-tokens", type=int, default=10_000_000, help="size of the large index, read cold")
    parser.add_argument("--kept", type=Path, metavar="FILE.npz", help="keep the large index's tokens for the next run")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDS.name}/indexes-DATE.json")
    args = parser.parse_args()
    plan, tokenizer = plan_of(args), RememberedTokenizer(args.tokenizer, load_tokenizer)
    files = trace_files(args.traces, args.workloads or WORKLOADS)
    record = provenance("draftretriever") | {"plan": vars(plan), "load_average": os.getloadavg()[0]}
    about = {"fingerprint": tokenizer.fingerprint, "name": "benchmark", "vocab_size": tokenizer.vocab_size}

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        build_index(args.corpora, args.tokenizer, folder / "corpora", BuildOptions())
        with open_index(folder / "corpora") as index:
            tokens, ends = np.array(index.tokens), np.array(index.document_ends)
        record["corpora"] = {"documents": len(ends), "tokens": len(tokens)}
        paths = {kind: str(folder / kind) for kind in KINDS}
        aded = str(folder / "draftretriever.idx")
        record["build"] = {kind: apart(_build_ours, tokens, ends, paths[kind], kind, about) for kind in KINDS}
        record["build"]["draftretriever"] = apart(_build_aded, tokens, ends, aded)
        print(json.dumps(record["build"]), flush=True)

        held_out = [item.output for file in files for item in load_workload(file, tokenizer).items(12_000)]
        texts = [text for text in held_out if len(text) >= 300]
        contexts = np.concatenate(
            [np.lib.stride_tricks.sliding_window_view(text[:300], CONTEXT)[::5] for text in texts]
        )
        contexts = np.ascontiguousarray(contexts[:2000])
        record["lookup"] = lookups(paths, aded, contexts)
        print(json.dumps(record["lookup"]), flush=True)

        config = DraftConfig(
            vocab_size=tokenizer.vocab_size, max_nodes=NODES, tokenizer_fingerprint=tokenizer.fingerprint
        )
        alone = replace(config, disabled=frozenset(Source.NAMES) - {"corpus"})
        groups = {
            "a corpus and nothing else": [
                Rest(paths["suffix_array"]),
                Aded(aded, frozen=True),
                *(Redraft(alone, (paths[kind],), f"redraft, {kind} alone") for kind in KINDS),
            ],
            "as shipped": [Aded(aded), *(Redraft(config, (paths[kind],), f"redraft + {kind}") for kind in KINDS)],
            "without a corpus": [Redraft(config)],
        }
        record["replay"] = replay(groups, files, tokenizer, plan)

        record["shards"] = {}
        for parts in (1, 2, 4, 8):
            for part, corpus in enumerate(split(tokens, ends, parts)):
                _write(*corpus, folder / f"in-{parts}" / f"{part}.index", "suffix_automaton", about)
            record["shards"][parts] = drafts([str(folder / f"in-{parts}")], texts[:20], 3)[-1]
        print(json.dumps(record["shards"]), flush=True)

        record["pages"] = {f"corpora, {kind}": cold_and_warm(paths[kind], texts[:3]) for kind in KINDS}
        documents = python_source(args.tokenizer, args.large_tokens, kept=args.kept)
        large, ends = np.concatenate(documents), np.cumsum([len(document) for document in documents], dtype=np.int64)
        del documents
        _write(large, ends, folder / "large", "suffix_array", about)
        record["pages"][f"{len(large):,} tokens, suffix_array"] = cold_and_warm(str(folder / "large"), texts[:3])
        print(json.dumps(record["pages"]), flush=True)
    if args.record:
        RECORDS.mkdir(exist_ok=True)
        (RECORDS / f"indexes-{record['date']}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
