"""Where dense retrieval pays: recorded answers of a model, forced through the drafter with the model's own hidden states.

    python benchmarks/dense.py HELD --own STORE --again AGAIN --built others.index.dense --successors TABLE --record

HELD, STORE and AGAIN are folders of `benchmarks/dense_answers.py`. HELD (with --candidates) is replayed; the others become
stores: the model's answers to other prompts, cut to growing sizes, and its answers to the same prompts drawn again at a
temperature (the same matter in other words). --built are dense indexes made by `redraft index build-dense`, of other
people's text. Every variant has the same store, as text for the sparse sources (a corpus index) and as states for the
dense one. One replay is one session after the other in one namespace, 32 nodes, greedy.

Between steps the drafter learns the target's runners-up at accepted places only: those of rejected nodes were not recorded,
which costs Token Recycling some of its worth and is the same for all variants. Differences are per prompt, paired; their
interval is a bootstrap over prompts. The benchmark checks that what a replay emits is the recorded text.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from dense_faiss import measure_index
from machine import RECORDS, provenance

from redraft.decoding.candidates import prefill_positions
from redraft.replay.loops import in_loop
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.dense_index import open_dense, write_dense
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.index_directory import open_index, write_array_index
from redraft.retrieval.state_map import Moments, StateMap, StateOrigin

VOCABULARY = 49152
ALL = frozenset(Source.NAMES)
NO_DENSE = frozenset({"dense", "rerank"})
# variant: (sources left out, whether the store's states are open, whether its text is)
VARIANTS = {
    "sparse": (NO_DENSE, False, True),
    "sparse + rerank": (frozenset({"dense"}), False, True),
    "sparse + dense": (frozenset({"rerank"}), True, True),
    "sparse + dense + rerank": (frozenset(), True, True),
    "corpus alone": (ALL - {"corpus"}, False, True),
    "dense alone": (ALL - {"dense"}, True, False),
    "dense + rerank alone": (ALL - NO_DENSE, True, False),
    "corpus + dense alone": (ALL - {"corpus", "dense"}, True, True),
    "recycling alone": (ALL - {"recycling"}, False, True),
    "recycling + session alone": (ALL - {"recycling", "session", "pointer"}, False, True),
    "recycling + dense + rerank": (ALL - {"recycling"} - NO_DENSE, True, False),
}
WITHOUT_STORE = ("sparse", "sparse + rerank", "dense + rerank alone", *list(VARIANTS)[-3:])
WITHOUT_STATES = ("sparse", "corpus alone", "recycling alone", "recycling + session alone")


class Answer(NamedTuple):
    """prompt, output: int32; states: float32[n, d], row j - len(output) chose token j of the output (and of the prompt, where
    those are kept); ids, probs: the target's runners-up, one row per state."""

    task: str
    name: str
    prompt: np.ndarray
    output: np.ndarray
    states: np.ndarray
    ids: np.ndarray
    probs: np.ndarray


def main() -> None:
    args = _arguments()
    held = load(args.held)
    with Drafter(DraftConfig()) as drafter:
        drafter.warmup()
    folders = {folder.name: load(folder) for folder in args.own}
    own = [answer for answers in folders.values() for answer in answers]
    again = [answer for folder in args.again for answer in load(folder)]
    moments = Moments(held[0].states.shape[1])
    for answer in own:
        moments.add(answer.states)
    state_map, kept = moments.map(64)
    print(
        f"{len(held)} answers held, {tokens_of(held)} tokens; own answers {tokens_of(own)} tokens;"
        f" drawn again {tokens_of(again)}; {kept:.0%} of the variance kept"
    )
    first = next(iter(folders.values()))
    stores = {"nothing": []} | {f"own {size}": cut(first, size) for size in args.sizes if size < tokens_of(first)}
    stores |= {f"own: {name}": answers for name, answers in folders.items()}
    stores |= {"drawn again": again, "everything": again + own}
    record = provenance("faiss-cpu") | {
        "prompts": len(held), "tokens": int(sum(len(a.output) for a in held)), "variance kept": round(kept, 4),
        "stores": {name: tokens_of(store) for name, store in stores.items()}, "results": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        record["index"] = measure_index(keys_and_tokens(own, state_map), keys_and_tokens(held, state_map), Path(folder))
        print(json.dumps(record["index"], indent=1), flush=True)
        for name, store in stores.items():
            paths = build(Path(folder) / name.replace(" ", "-"), store, state_map) if store else (None, None)
            record["results"][name] = compare(name, held, state_map, paths, args)
        for dense in args.built:
            with open_dense(dense) as index:
                name, paths = dense.name, (index.corpus.path, dense)
                record["stores"][name] = len(index.corpus.tokens)
                record["results"][name] = compare(name, held, index.map, paths, args)
    if args.model:
        record["live, milliseconds per step"] = live(args, args.built[0])
        print(json.dumps(record["live, milliseconds per step"], indent=1))
    if args.record:
        (RECORDS / f"dense-{record['date']}.json").write_text(json.dumps(record, indent=1) + "\n")


def compare(name: str, held, state_map: StateMap, paths, args) -> dict:
    """Replay all variants that make sense with this store; print and return the summary."""
    wanted = list(VARIANTS) if paths[0] is not None else WITHOUT_STORE
    if name not in ("nothing", "everything"):
        wanted = wanted[:-3]
    results = {variant: replay(held, state_map, paths, variant, args.successors) for variant in wanted}
    summary = summarise(results)
    show(name, summary)
    return summary


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("held", type=Path)
    parser.add_argument("--own", type=Path, nargs="+", required=True)
    parser.add_argument("--again", type=Path, nargs="*", default=[])
    parser.add_argument("--successors", type=Path)
    parser.add_argument("--sizes", type=int, nargs="*", default=[20_000, 50_000, 100_000, 200_000])
    parser.add_argument("--built", type=Path, nargs="*", default=[], help="dense indexes")
    parser.add_argument("--model", help="also run the real loop, with and without the first of --built")
    parser.add_argument("--prompts", type=Path, help="for that: JSON lines with turns")
    parser.add_argument("--record", action="store_true", help="write the dated record")
    return parser.parse_args()


def load(folder: Path) -> list[Answer]:
    """The answers of a folder, in the order in which they were asked for."""
    answers = []
    for file in sorted(folder.glob("part-*.npz")):
        with np.load(file) as part:
            arrays = dict(part)
        states = np.load(file.with_name(file.name.replace("part", "state")).with_suffix(".npy"))
        ends = [np.cumsum(arrays[name]) for name in ("prompt_lengths", "output_lengths", "state_lengths")]
        for i, (prompt_end, output_end, state_end) in enumerate(zip(*ends)):
            rows = slice(state_end - arrays["state_lengths"][i], state_end)
            answers.append(
                Answer(
                    str(arrays["tasks"][i]),
                    str(arrays["names"][i]),
                    arrays["prompts"][prompt_end - arrays["prompt_lengths"][i] : prompt_end],
                    arrays["outputs"][output_end - arrays["output_lengths"][i] : output_end],
                    states[rows].astype(np.float32),
                    arrays["ids"][rows],
                    arrays["probs"][rows].astype(np.float32),
                )
            )
    return answers


def tokens_of(answers) -> int:
    return int(sum(len(answer.output) for answer in answers))


def cut(answers, size: int) -> list[Answer]:
    """The first answers that make up `size` tokens."""
    ends = np.cumsum([len(answer.output) for answer in answers])
    return answers[: int(np.searchsorted(ends, size)) + 1]


def build(path: Path, store, state_map: StateMap) -> tuple[Path, Path]:
    """A corpus index of the store's outputs, and a dense index of their states."""
    corpus, dense = path.with_suffix(".index"), path.with_suffix(".dense")
    lengths = np.array([len(answer.output) for answer in store])
    described = {"fingerprint": None, "name": "SmolLM2", "vocab_size": VOCABULARY}
    tokens = np.concatenate([answer.output for answer in store])
    write_array_index(corpus, tokens, np.cumsum(lengths), tokenizer=described, options={}, sources=[])
    starts = np.cumsum(lengths) - lengths
    keys = np.concatenate([state_map.project(answer.states[-len(answer.output) :])[1:] for answer in store])
    positions = np.concatenate([np.arange(1, n, dtype=np.int32) + start for n, start in zip(lengths, starts)])
    origin = StateOrigin("SmolLM2-135M-Instruct", "", "bfloat16", -1)
    with open_index(corpus) as opened:
        write_dense(dense, opened, keys, positions, state_map, origin, options={})
    return corpus, dense


def replay(held, state_map: StateMap, paths, variant: str, successors) -> list[dict]:
    """Force the held answers through a fresh drafter; per answer what it took."""
    disabled, dense, text = VARIANTS[variant]
    corpus_path, dense_path = paths
    config = DraftConfig(vocab_size=VOCABULARY, disabled=disabled)
    rows = []
    with Drafter(config, indexes=[corpus_path] if text and corpus_path else [], successors=successors) as drafter:
        if dense and dense_path:
            drafter.load_dense(dense_path)
        elif variant not in WITHOUT_STATES:
            drafter.dense = _NoStore(state_map)
        for answer in held:
            rows.append(replay_answer(drafter, answer, state_map if variant not in WITHOUT_STATES else None))
    return rows


class _NoStore:
    """A dense index without keys: sessions' own states are searched, and what earlier answers left in the dense memory."""

    def __init__(self, state_map: StateMap) -> None:
        self.map, self.corpus = (
            state_map,
            SimpleNamespace(tokens=np.empty(0, np.int32), document_ends=np.empty(0, np.int64)),
        )

    def search(self, key, token, count) -> tuple[np.ndarray, np.ndarray]:
        return np.empty(0, np.float32), np.empty(0, np.int32)


def replay_answer(drafter, answer: Answer, state_map: StateMap | None) -> dict:
    history = np.concatenate([answer.prompt, answer.output]).astype(np.int32)
    begin = len(answer.prompt)
    keys = state_map.project(answer.states) if state_map else None
    looping = in_loop(answer.output)
    steps = outside_steps = outside_tokens = accepted_dense = asked = 0
    seconds, emitted = 0.0, []
    session = drafter.open(answer.prompt)
    places = prefill_positions(answer.prompt, 256)
    at, end = begin, begin + 1
    while True:
        if at > begin:
            places = np.arange(at - 1, end - 1)
        taught = Candidates(
            history[places],
            np.where(places > 0, history[places - 1], -1).astype(np.int32),
            answer.ids[places],
            answer.probs[places],
        )
        states = None if keys is None else keys[: end - 1] if at == begin else keys[at - 1 : end - 1]
        started = time.thread_time()
        session.commit(history[at:end], taught, states)
        emitted += history[at:end].tolist()
        if end == len(history):
            break
        tree = session.draft()
        seconds += time.thread_time() - started
        at, path = end, []
        children = {(int(p), int(t)): i for i, (p, t) in enumerate(zip(tree.parents, tree.tokens))}
        node = -1
        while end < len(history):
            node = children.get((node, int(history[end])))
            end += 1
            if node is None:
                break
            path.append(node)
        steps += 1
        if not looping[at - begin]:
            outside_steps += 1
            outside_tokens += end - at
        accepted_dense += int((tree.sources[path] == Source.DENSE).sum()) if path else 0
    asked = session._dense.asked if session._dense else 0
    session.close()
    assert emitted == answer.output.tolist(), "a replay must emit the recorded text"
    return {
        "task": answer.task, "tokens": len(answer.output) - 1, "steps": steps, "outside tokens": outside_tokens,
        "outside steps": outside_steps, "accepted dense": accepted_dense, "asked": asked, "seconds": seconds,
    }  # fmt: skip


def summarise(results: dict[str, list[dict]]) -> dict:
    """Tokens per step outside loops by task and overall, and paired differences to sparse."""
    summary = {}
    for variant, rows in results.items():
        steps = sum(row["steps"] for row in rows)
        entry = {
            "tokens per step": ratio(rows, "tokens", "steps"),
            "outside loops": ratio(rows, "outside tokens", "outside steps"),
            "by task": {task: ratio(group, "outside tokens", "outside steps") for task, group in by_task(rows).items()},
            "accepted from the dense source": round(sum(row["accepted dense"] for row in rows) / steps, 4),
            "asked, share of steps": round(sum(row["asked"] for row in rows) / steps, 4),
            "microseconds per step": round(1e6 * sum(row["seconds"] for row in rows) / steps, 1),
        }
        base = results.get("sparse")
        if base and variant.startswith("sparse +"):
            entry["to sparse"] = paired(base, rows)
            tasks = by_task(base)
            entry["to sparse by task"] = {task: paired(tasks[task], group) for task, group in by_task(rows).items()}
        summary[variant] = entry
    return summary


def by_task(rows) -> dict[str, list[dict]]:
    groups = defaultdict(list)
    for row in rows:
        groups[row["task"]].append(row)
    return groups


def ratio(rows, above: str, below: str) -> float:
    return round(sum(row[above] for row in rows) / max(sum(row[below] for row in rows), 1), 3)


def paired(base, rows, rounds: int = 2000) -> list[float]:
    """Difference of tokens per step outside loops, and its 95 % interval."""
    columns = np.array(
        [
            [a["outside tokens"], a["outside steps"], b["outside tokens"], b["outside steps"]]
            for a, b in zip(base, rows)
        ],
        float,
    )
    drawn = np.random.default_rng(0).integers(len(columns), size=(rounds, len(columns)))
    sums = columns[drawn].sum(axis=1)
    differences = sums[:, 2] / np.maximum(sums[:, 3], 1) - sums[:, 0] / np.maximum(sums[:, 1], 1)
    total = columns.sum(axis=0)
    middle = total[2] / max(total[3], 1) - total[0] / max(total[1], 1)
    return [round(float(x), 3) for x in (middle, *np.percentile(differences, [2.5, 97.5]))]


def keys_and_tokens(answers, state_map: StateMap) -> tuple[np.ndarray, np.ndarray]:
    """The keys of all outputs, and the tokens that were chosen there."""
    keys = np.concatenate([state_map.project(answer.states[-len(answer.output) :]) for answer in answers])
    return keys, np.concatenate([answer.output for answer in answers])


def live(args, dense_path: Path) -> dict:
    """The real loop with and without the dense index on a few prompts, in turn: milliseconds per step by phase."""
    from redraft.commands.bench import read_prompts
    from redraft.decoding.generate import generate
    from redraft.decoding.live_benchmark import NEAR_TIE, _compare
    from redraft.decoding.loading import load_model

    model, tokenizer = load_model(args.model, dtype="bfloat16")
    prompts = read_prompts(args.prompts, tokenizer, 1, None, 1, model.device)
    config = DraftConfig(vocab_size=VOCABULARY)
    with open_dense(dense_path) as index:
        corpus = index.corpus.path
    found: dict[str, dict] = {}
    with (
        Drafter(config, indexes=[corpus], successors=args.successors) as sparse,
        Drafter(config, indexes=[corpus], successors=args.successors, dense=dense_path) as dense,
    ):
        totals = {"sparse": [0, 0, defaultdict(float), sparse], "with dense": [0, 0, defaultdict(float), dense]}
        for prompt in prompts:
            texts = []
            for entry in totals.values():
                result = generate(model, prompt.ids, entry[3], max_new_tokens=64, max_nodes=16, adaptive=False)
                entry[0] += result.stats.new_tokens - result.stats.first_tokens
                entry[1] += result.stats.steps
                for phase, seconds in result.stats.seconds.items():
                    entry[2][phase] += seconds
                texts.append([result.sequences[0, prompt.ids.shape[1] :].tolist()])
            same, gap = _compare(model, prompt, *texts)
            assert same or gap < NEAR_TIE, f"texts part where the best logits are {gap} apart"
            found.setdefault("gaps of the logits where texts part", []).append(None if same else round(gap, 4))
        for name, (tokens, steps, seconds, _) in totals.items():
            found[name] = {"tokens per step": round(tokens / steps, 3)} | {
                phase: round(1e3 * spent / steps, 3) for phase, spent in seconds.items() if phase != "prefill"
            }
    return found


def show(name: str, summary: dict) -> None:
    print(f"\n{name}\n{'':26}{'tau':>6}{'no loops':>9}{'asked':>7}{'dense':>7}{'us':>7}  to sparse, 95 %")
    for variant, entry in summary.items():
        difference = entry.get("to sparse")
        print(f"{variant:26}{entry['tokens per step']:6.2f}{entry['outside loops']:9.3f}"
              f"{entry['asked, share of steps']:7.2f}{entry['accepted from the dense source']:7.2f}"
              f"{entry['microseconds per step']:7.0f}  {difference or ''}")  # fmt: skip
    tasks = list(next(iter(summary.values()))["by task"])
    print(" " * 26 + "".join(f"{task[:9]:>10}" for task in tasks))
    for variant, entry in summary.items():
        print(f"{variant:26}" + "".join(f"{entry['by task'][task]:10.3f}" for task in tasks), flush=True)


if __name__ == "__main__":
    main()
