"""Hard inputs: streams that make suffix structures walk, a very long context, a thousand sessions, two threads.

    python benchmarks/streams.py --record

A draft has to arrive in time whatever the text is: a model stuck in a loop must not stall the others. Each stream is
replayed twice through one drafter (32k tokens of context, then 8k of output, step by step), so that the second
session also meets a memory full of the same stuff. `x ordinary` compares with the median on ordinary text in the
same run: draft p99 should stay below 5. Ordinary text is a made-up language here, a first-order chain over Zipf-distributed words
with copied passages; --traces takes recorded outputs instead.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from time import perf_counter, thread_time_ns

import numpy as np
from machine import RECORDS, provenance
from numba import njit

from redraft.index_builders.tokenizers import load_tokenizer
from redraft.replay.contenders import Contender, Ngram, Redraft
from redraft.replay.replay import replay_items
from redraft.replay.report import table
from redraft.replay.run import Plan, replay_file
from redraft.replay.tally import Tally
from redraft.replay.traces import Item, RememberedTokenizer, trace_files
from redraft.retrieval.batch import draft_all
from redraft.retrieval.config import DraftConfig

VOCABULARY = 49_152
CONTEXT, OUTPUT = 32_768, 8_192


def constant(n: int) -> np.ndarray:
    """The same token for ever."""
    return np.full(n, 7, np.int32)


def constant_with_breaks(n: int) -> np.ndarray:
    """A run of one token, broken every ninth by a token that never came before."""
    stream = constant(n)
    stream[8::9] = 100 + np.arange(len(stream[8::9])) % (VOCABULARY - 100)
    return stream


def periodic(n: int, period: int) -> np.ndarray:
    """`period` different tokens, repeated."""
    return (np.arange(n) % period).astype(np.int32)


def fibonacci(n: int) -> np.ndarray:
    """The Fibonacci word over two letters: as repetitive as a text without a period can be."""
    text, following = [0], [0, 1]
    while len(text) < n:
        text, following = following, following + text
    return np.array(text[:n], np.int32)


def uniform(n: int, letters: int, seed: int = 1) -> np.ndarray:
    """Random tokens, all equally likely."""
    return np.random.default_rng(seed).integers(0, letters, n, dtype=np.int32)


def zipf(n: int, seed: int = 2) -> np.ndarray:
    """Random tokens as frequent as words are, without any order."""
    weights = 1 / np.arange(1, VOCABULARY + 1)
    return np.random.default_rng(seed).choice(VOCABULARY, n, p=weights / weights.sum()).astype(np.int32)


def ordinary(n: int, seed: int = 3) -> np.ndarray:
    """Like text: each word has a few usual successors, and passages are copied now and then."""
    random = np.random.default_rng(seed)
    language = np.random.default_rng(0)  # the same for every seed: texts have words and phrases in common
    words = 8_000
    successors = language.zipf(1.3, (words, 16)) % words
    usual = random.zipf(1.6, n)
    stream = np.empty(n, np.int32)
    stream[0] = 1
    for i in range(1, n):
        stream[i] = successors[stream[i - 1], usual[i]] if usual[i] < 16 else usual[i] % words
    for start in random.integers(n // 8, n - 80, n // 400):
        origin = random.integers(0, start - 64)
        stream[start : start + 64] = stream[origin : origin + 64]
    return stream


STREAMS = {
    "constant": constant(CONTEXT + OUTPUT),
    "constant with breaks": constant_with_breaks(CONTEXT + OUTPUT),
    "period 2": periodic(CONTEXT + OUTPUT, 2),
    "period 7": periodic(CONTEXT + OUTPUT, 7),
    "period 100": periodic(CONTEXT + OUTPUT, 100),
    "fibonacci": fibonacci(CONTEXT + OUTPUT),
    "random": uniform(CONTEXT + OUTPUT, VOCABULARY),
    "random, 2 letters": uniform(CONTEXT + OUTPUT, 2),
    "zipf": zipf(CONTEXT + OUTPUT),
}


def replay_stream(contender: Contender, stream: np.ndarray, context: int, *, times: int = 2) -> Tally:
    """The stream's first `context` tokens as prompt, the rest as output, `times` sessions one after the other."""
    with contender.make() as drafter:
        return replay_items(drafter, [Item(stream[:context], stream[context:])] * times)


def many_sessions(contender: Contender, sessions: int = 1_000, steps: int = 20) -> Tally:
    """Sessions open at once that take turns, as in a server: each step meets cold caches."""
    texts = [ordinary(600, seed) for seed in range(sessions)]
    tally = Tally()
    with contender.make() as drafter:
        opened = []
        for text in texts:
            started = thread_time_ns()
            opened.append(drafter.open(text[:512]))
            tally.open_ns.append(thread_time_ns() - started)
            tally.open_tokens.append(512)
        positions = [512] * sessions
        for _ in range(steps):
            for number, session in enumerate(opened):
                text, position = texts[number], positions[number]
                started = thread_time_ns()
                tree = session.draft()
                tally.draft_ns.append(thread_time_ns() - started)
                end = min(position + tally.walk(tree, text[position:]) + 1, len(text))
                tally.steps += 1
                tally.emitted += end - position
                started = thread_time_ns()
                session.commit(text[position:end])
                tally.commit_ns.append(thread_time_ns() - started)
                tally.commit_tokens.append(end - position)
                positions[number] = end
    return tally


def two_over_one(works: list[Callable]) -> float:
    """Time of two threads doing one work each over the time of one thread doing the first; 1 = no hindrance at all."""

    def seconds(works: list[Callable]) -> float:
        threads = [Thread(target=work) for work in works]
        started = perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return perf_counter() - started

    rounds = [(seconds(works[:1]), seconds(works)) for _ in range(5)]
    return float(np.median([both / one for one, both in rounds]))


def two_threads(contender: Contender, drafts: int = 4_000) -> float:
    """Two threads drafting for two sessions."""
    with contender.make() as drafter:
        sessions = [drafter.open(ordinary(CONTEXT, seed)) for seed in (1, 2)]

        def draft_often(session) -> None:
            for _ in range(drafts):
                session.draft()

        return two_over_one([partial(draft_often, session) for session in sessions])


def two_threads_of_batches(contender: Redraft, drafts: int = 500, batch: int = 8) -> float:
    """Two threads drafting for `batch` sessions each, in one call: the interpreter's lock changes hands that much less often."""
    with contender.make() as drafter:
        sessions = [drafter.open(ordinary(CONTEXT, seed)) for seed in range(2 * batch)]

        def draft_often(sessions) -> None:
            requests = [(session, None, None, None) for session in sessions]
            for _ in range(drafts):
                draft_all(requests)

        return two_over_one([partial(draft_often, sessions[:batch]), partial(draft_often, sessions[batch:])])


@njit(nogil=True)
def spin(turns):
    """Arithmetic that touches no memory and no lock: two threads hinder each other here only where the processor does."""
    x = 1
    for _ in range(turns):
        x = (x * 1103515245 + 12345) & 0x7FFFFFFF
    return x


def processor_itself() -> float:
    """Two threads of plain arithmetic: where two processors are one core's two threads, this is nearly 2."""
    spin(1)
    return two_over_one([partial(spin, 100_000_000)] * 2)


def row(name: str, summary: dict, ordinary_p50: float) -> list[str]:
    """One line of the table."""
    draft = summary["draft_us"]
    numbers = [summary["tokens_per_step"], draft["p50"], draft["p99"], draft["p99"] / ordinary_p50]
    rates = [summary[f"{call}_us_per_token"]["mean"] for call in ("commit", "open", "close")]
    return [name, *(f"{number:.2f}" for number in numbers), *("-" if r is None else f"{r:.2f}" for r in rates)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", choices=("redraft", "ngram"), default="redraft", help="what drafts")
    parser.add_argument("--traces", type=Path, metavar="TRACES", help="recorded outputs as the ordinary text")
    parser.add_argument("--tokenizer", help="for --traces: tokenizer.json, transformers folder or name, or GGUF file")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDS.name}/streams-DATE.json")
    args = parser.parse_args()
    if args.traces and not args.tokenizer:
        parser.error("--traces needs --tokenizer")
    config = DraftConfig(vocab_size=VOCABULARY)
    contender: Contender = Ngram(config) if args.drafter == "ngram" else Redraft(config)
    replay_stream(contender, ordinary(2_000), 1_000)  # loads the kernels
    tallies = {"ordinary": replay_stream(contender, ordinary(CONTEXT + OUTPUT), CONTEXT)}
    if args.traces:
        tokenizer = RememberedTokenizer(args.tokenizer, load_tokenizer)
        recorded = Tally()
        for file in trace_files(args.traces):
            recorded.add(replay_file(contender, file, tokenizer, Plan(tokens=2_000)))
        tallies["recorded outputs"] = recorded
    tallies |= {name: replay_stream(contender, stream, CONTEXT) for name, stream in STREAMS.items()}
    tallies["128k of context"] = replay_stream(contender, ordinary(131_072 + OUTPUT), 131_072)
    tallies["1000 sessions"] = many_sessions(contender)
    summaries = {name: tally.summary() for name, tally in tallies.items()}
    ordinary_p50 = summaries["recorded outputs" if args.traces else "ordinary"]["draft_us"]["p50"]
    header = ("stream", "tokens/step", "draft p50", "p99", "x ordinary", "commit/token", "open/token", "close/token")
    print(table(header, [row(name, summary, ordinary_p50) for name, summary in summaries.items()]))
    ratio, limit = two_threads(contender), processor_itself()
    print(f"\ntwo threads for two sessions take {ratio:.2f} times as long as one thread for one; plain arithmetic {limit:.2f}")
    batches = two_threads_of_batches(contender) if isinstance(contender, Redraft) else None
    if batches:
        print(f"two threads for eight sessions each in one call: {batches:.2f} times as long as one thread")
    if args.record:
        keep = ("tokens_per_step", "draft_us", "commit_us_per_token", "open_us_per_token", "close_us_per_token")
        streams = {name: {key: summary[key] for key in keep} for name, summary in summaries.items()}
        record = provenance() | {"streams": streams, "two_threads_over_one": ratio, "arithmetic_alone": limit}
        record["two_threads_of_batches_over_one"] = batches
        RECORDS.mkdir(exist_ok=True)
        (RECORDS / f"streams-{record['date']}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
