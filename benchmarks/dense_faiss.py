"""How good, large and quick a dense index is: the part of `dense.py` that looks at FAISS alone."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from redraft.retrieval.dense_index import open_dense, write_dense
from redraft.retrieval.index_directory import open_index, write_array_index
from redraft.retrieval.state_map import StateMap, StateOrigin

__all__ = ["measure_index"]


def measure_index(store, asked, folder: Path, count: int = 200_000) -> dict:
    """Recall, size and time: of the store as it is, and of `count` keys made from it.

    store, asked: keys float32[n, d] and the tokens chosen there, int32[n].
    """
    keys, tokens = store
    chosen = np.linspace(0, len(asked[0]) - 1, min(1000, len(asked[0]))).astype(int)
    asked = asked[0][chosen], asked[1][chosen]
    generator = np.random.default_rng(0)
    found = {"real states": _index_figures(keys, tokens, asked, folder / "real")}
    # More keys than were recorded: each real one several times, moved a little along the differences between real ones.
    drawn = generator.integers(len(keys), size=count)
    away = keys[generator.integers(len(keys), size=count)] - keys[generator.integers(len(keys), size=count)]
    moved = keys[drawn] + 0.35 * away
    moved = (moved / np.linalg.norm(moved, axis=1, keepdims=True)).astype(np.float32)
    found[f"{count} keys made from them"] = _index_figures(moved, tokens[drawn], asked, folder / "made")
    return found


def _index_figures(keys: np.ndarray, tokens: np.ndarray, asked, path: Path) -> dict:
    described = {"fingerprint": None, "name": "SmolLM2", "vocab_size": None}
    text = np.concatenate([[0], tokens]).astype(np.int32)
    corpus, dense = path.with_suffix(".index"), path.with_suffix(".dense")
    write_array_index(corpus, text, np.array([len(text)]), tokenizer=described, options={}, sources=[])
    origin = StateOrigin("SmolLM2-135M-Instruct", "", "bfloat16", -1)
    nothing = StateMap(np.eye(keys.shape[1], dtype=np.float32), np.zeros(keys.shape[1]))
    with open_index(corpus) as opened:
        positions = np.arange(1, len(text), dtype=np.int32)
        options = write_dense(dense, opened, keys, positions, nothing, origin, options={})
    with open_dense(dense) as index:
        plain, restricted, recall, recall_of_token = [], [], [], []
        for key, token in zip(*asked):
            started = time.thread_time()
            places = index.nearest(key, 50)[1]
            plain.append(time.thread_time() - started)
            similarities = keys @ key
            recall.append((similarities[places - 1] >= np.partition(similarities, -50)[-50] - 1e-6).sum() / 50)
            started = time.thread_time()
            places = index.search(key, int(token), 16)[1]
            restricted.append(time.thread_time() - started)
            same = np.flatnonzero(tokens == token)
            if len(same):
                true = same[np.argsort(-(keys[same] @ key))[:8]] + 1
                recall_of_token.append(len(np.intersect1d(places[:8], true)) / len(true))
        size = (dense / "faiss.npy").stat().st_size + (dense / "positions.npy").stat().st_size
    return {
        "keys": len(keys), "factory": options["factory"], "nprobe": options["nprobe"],
        "recall at 50 of new states": round(float(np.mean(recall)), 4),
        "recall at 8 among the token's own": round(float(np.mean(recall_of_token)), 4),
        "bytes per key, positions included": round(size / len(keys), 2),
        "microseconds, 50 nearest, p50 and p99": _percentiles(plain),
        "microseconds, of one token, p50 and p99": _percentiles(restricted),
    }  # fmt: skip


def _percentiles(seconds) -> list[float]:
    return [round(1e6 * float(np.percentile(seconds, q)), 1) for q in (50, 99)]
