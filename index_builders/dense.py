"""A dense index of a corpus index: run the target model over the documents, keep a key for every token.

What is stored well is what the target itself would write: build the corpus from recorded answers of the model, as whole
chats (`redraft index build --chat-template`), rather than from other people's text (DReSD calls it in-distribution).

    1. Documents are cut into windows of `window` tokens, each beginning with a quarter of the one before, whose states are
       not taken again; so every state sees that much context at least, and a batch has a bounded length.
    2. A sample of the windows, spread evenly, is run first. Its states are kept as they are until there are enough of them
       for the map (mean, deviation and principal axes, in float64); then they are projected.
    3. The other windows are run and projected on the way: 256 bytes a token, not 4 d.
    4. The keys go into FAISS.

Work goes to `OUTPUT.work` batch by batch, so a build that was killed goes on with the batch that it was in.
"""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from redraft.decoding.states import StateTap, state_width, states_of
from redraft.index_builders.progress import Progress
from redraft.index_builders.token_parts import read_json, take_lock, write_durably
from redraft.retrieval.dense_index import new_faiss, write_dense
from redraft.retrieval.index_directory import CorpusIndex
from redraft.retrieval.state_map import Moments, StateMap

__all__ = ["DenseOptions", "build_dense"]


@dataclass(frozen=True)
class DenseOptions:
    """Settings of a build.

    Attributes:
        layer: whose states (`redraft.decoding.states`); dimension: of the keys.
        factory: FAISS factory string; None chooses by size.
        max_tokens: run over so many tokens at most, in documents spread evenly; None = all.
        window: tokens the model sees at once; batch: tokens in one forward.
        sample: tokens that the map is computed from.
    """

    layer: int = -1
    dimension: int = 64
    factory: str | None = None
    max_tokens: int | None = None
    window: int = 1024
    batch: int = 4096
    sample: int = 100_000

    def __post_init__(self) -> None:
        for name in ("dimension", "batch", "sample"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: wanted 1 or more, got {getattr(self, name)}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens: wanted 1 or more, got {self.max_tokens}")
        if self.window < 8:
            raise ValueError(f"window: wanted 8 tokens or more, got {self.window}")


def build_dense(
    corpus: CorpusIndex, model, output: str | Path, *, name: str, options: DenseOptions, force: bool, progress: Progress
) -> dict:
    """Build the dense index `output` of `corpus` with `model`; returns what was recorded of it.

    name: how the model was named, for people to read. Raises FileExistsError for an output that is not to be replaced,
    ValueError for a corpus or options that give no index; what was there before stays. An interrupted build resumes.
    """
    output = Path(output)
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    if corpus.manifest["max_token"] >= vocab_size:
        raise ValueError(
            f"{corpus.path}: holds token id {corpus.manifest['max_token']}, model {name!r} has {vocab_size} ids: was the"
            " corpus built with the model's tokenizer?"
        )
    if options.factory is not None:
        new_faiss(options.dimension, options.factory)  # refused now, not when the model has run
    origin = states_of(model, options.layer, name)
    batches, n_sample = _plan(corpus, options)
    plan = {
        "corpus": corpus.tokens_sha256,
        "origin": origin,
        "options": [options.max_tokens, options.window, options.batch, options.sample, options.dimension],
    }
    with _Work(output.with_name(output.name + ".work"), plan) as work:
        _run(model, corpus, batches, n_sample, options, work, progress)
        keys, positions = work.keys()
        recorded = {"window": options.window, "max_tokens": options.max_tokens, "variance_kept": work.variance_kept}
        with progress.stages() as report:
            options_written = write_dense(
                output, corpus, keys, positions, work.map, origin,
                options=recorded, factory=options.factory, force=force, progress=report,
            )  # fmt: skip
        work.remove()
    return options_written | {"vectors": len(keys)}


def _windows(corpus: CorpusIndex, options: DenseOptions) -> list[tuple[int, int, int]]:
    """(begin, first position whose state is taken, end) of each window."""
    overlap, windows = options.window // 4, []
    begin = 0
    for end in corpus.document_ends.tolist():
        at = begin
        while at < end - 1:
            seen = max(at - overlap, begin)
            stop = min(seen + options.window, end)
            windows.append((seen, at, stop))
            at = (
                stop - 1 if stop < end else end
            )  # the state at the last token of a window has no token chosen from it yet
        begin = end
    return windows


def _plan(corpus: CorpusIndex, options: DenseOptions) -> tuple[list[list[tuple[int, int, int]]], int]:
    """Batches of windows, and how many of them are the sample."""
    windows = _windows(corpus, options)
    if not windows:
        raise ValueError(f"{corpus.path}: no document has two tokens, so there is no state to store")
    order = np.random.default_rng(0).permutation(len(windows))
    sizes = np.array([windows[i][2] - windows[i][1] for i in order])
    if options.max_tokens is not None:
        order = order[: max(int(np.searchsorted(np.cumsum(sizes), options.max_tokens, side="right")), 1)]
    n_sample = min(int(np.searchsorted(np.cumsum(sizes[: len(order)]), options.sample)) + 1, len(order))
    parts = order[:n_sample], order[n_sample:]
    batches: list[list[tuple[int, int, int]]] = []
    counts = []
    for part in parts:
        by_length = sorted((windows[i] for i in part), key=lambda window: window[2] - window[0])
        batch: list[tuple[int, int, int]] = []
        for window in by_length:
            if batch and (len(batch) + 1) * (window[2] - window[0]) > options.batch:
                batches.append(batch)
                batch = []
            batch.append(window)
        if batch:
            batches.append(batch)
        counts.append(len(batches))
    return batches, counts[0]


def _run(model, corpus, batches, n_sample: int, options: DenseOptions, work: _Work, progress: Progress) -> None:
    """Run what is not done yet; leaves `work` with a map and the keys of all batches."""
    total = sum(end - first for batch in batches for _, first, end in batch)
    with (
        progress.phase("states", total, " tokens") as report,
        torch.inference_mode(),
        StateTap(model, options.layer) as tap,
    ):
        done = 0
        for number, batch in enumerate(batches):
            if number == n_sample and work.map is None:
                work.make_map(n_sample, state_width(model), options.dimension)
            if not work.has(number):
                states, positions = _states(model, corpus.tokens, batch, tap)
                if work.map is None:
                    work.add(number, states=states, positions=positions)
                else:
                    work.add(number, keys=work.map.project(states), positions=positions)
            done += sum(end - first for _, first, end in batch)
            report(done, tokens=done)
        if work.map is None:
            work.make_map(n_sample, state_width(model), options.dimension)


def _states(model, tokens: np.ndarray, batch, tap: StateTap) -> tuple[np.ndarray, np.ndarray]:
    """States float32[n, d] of a batch of windows, and the positions int32[n] of the tokens chosen from them."""
    longest = max(end - begin for begin, _, end in batch)
    ids = np.zeros((len(batch), longest), np.int64)
    mask = np.zeros_like(ids)
    for row, (begin, _, end) in enumerate(batch):
        ids[row, : end - begin] = tokens[begin:end]
        mask[row, : end - begin] = 1
    device = model.device
    model.base_model(
        input_ids=torch.from_numpy(ids).to(device), attention_mask=torch.from_numpy(mask).to(device), use_cache=False
    )
    states = tap.states.float().cpu().numpy()
    taken = [states[row, first - begin : end - 1 - begin] for row, (begin, first, end) in enumerate(batch)]
    positions = [np.arange(first + 1, end, dtype=np.int32) for _, first, end in batch]
    return np.concatenate(taken), np.concatenate(positions)


class _Work:
    """The work folder of a build, locked while it is used.

        plan.json        what is being built; when it has changed the folder is emptied
        part-00000.npz   of one batch: positions, and its states, or its keys once there is a map
        map.npz          the map, and the share of the variance that it keeps

    Attributes:
        map: StateMap, once the sample is complete; variance_kept: by it.
    """

    def __init__(self, folder: Path, plan: dict) -> None:
        self.folder = folder
        self.map: StateMap | None = None
        self.variance_kept = 0.0
        self._lock = take_lock(folder)
        if read_json(folder / "plan.json") != json.loads(json.dumps(plan)):
            for path in folder.glob("*.npz"):
                path.unlink()
            write_durably(folder / "plan.json", json.dumps(plan).encode())
        if (folder / "map.npz").exists():
            with np.load(folder / "map.npz") as found:
                self.map, self.variance_kept = StateMap(found["matrix"], found["offset"]), float(found["kept"])

    def __enter__(self) -> _Work:
        return self

    def __exit__(self, *exception) -> None:
        self._lock.close()

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.npz"

    def has(self, number: int) -> bool:
        return self._path(number).exists()

    def add(self, number: int, **arrays: np.ndarray) -> None:
        self._save(self._path(number), **arrays)

    def _save(self, path: Path, **arrays) -> None:
        content = io.BytesIO()
        np.savez(content, **arrays)
        write_durably(path, content.getvalue())

    def make_map(self, batches: int, width: int, dimension: int) -> None:
        """Compute the map from the states of the first `batches` parts, and put their keys in place of the states."""
        moments = Moments(width)
        for number in range(batches):
            with np.load(self._path(number)) as part:
                moments.add(part["states"])
        self.map, self.variance_kept = moments.map(dimension)
        for number in range(batches):
            with np.load(self._path(number)) as part:
                states, positions = part["states"], part["positions"]
            # the states stay until the map is written: a build killed between the two computes the same map again
            self.add(number, states=states, keys=self.map.project(states), positions=positions)
        self._save(
            self.folder / "map.npz", matrix=self.map.matrix, offset=self.map.offset, kept=np.float64(self.variance_kept)
        )

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys float32[n, d] and positions int32[n] of all parts, by position."""
        parts = []
        for path in sorted(self.folder.glob("part-*.npz")):
            with np.load(path) as part:
                parts.append((part["keys"], part["positions"]))
        keys, positions = (np.concatenate(arrays) for arrays in zip(*parts))
        order = np.argsort(positions, kind="stable")
        return keys[order], positions[order]

    def remove(self) -> None:
        """Delete the folder, lock included."""
        shutil.rmtree(self.folder)
