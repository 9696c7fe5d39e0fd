"""How good, large and quick a dense index is, beside FAISS searching the same lists: the part of `dense.py` that looks at the
index alone."""

from __future__ import annotations

import time
from pathlib import Path

import faiss
import numpy as np

from redraft.retrieval.dense_index import open_dense, write_dense
from redraft.retrieval.index_directory import open_index, write_array_index
from redraft.retrieval.state_map import StateMap, StateOrigin

__all__ = ["measure_index"]


def measure_index(store, asked, folder: Path, count: int = 200_000) -> dict:
    """Recall, size and time of the store as it is, and of `count` keys: its first, or where it has fewer, made from it.

    store, asked: keys float32[n, d] and the tokens chosen there, int32[n].
    """
    keys, tokens = store
    chosen = np.linspace(0, len(asked[0]) - 1, min(1000, len(asked[0]))).astype(int)
    asked = asked[0][chosen], asked[1][chosen]
    found = {"real states": _index_figures(keys, tokens, asked, folder / "real")}
    if len(keys) > count:
        return found | {
            f"the first {count} of them": _index_figures(keys[:count], tokens[:count], asked, folder / "first")
        }
    # Each real key several times, moved a little along the differences between real ones.
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(keys), size=count)
    away = keys[generator.integers(len(keys), size=count)] - keys[generator.integers(len(keys), size=count)]
    moved = keys[drawn] + 0.35 * away
    moved = (moved / np.linalg.norm(moved, axis=1, keepdims=True)).astype(np.float32)
    return found | {f"{count} keys made from them": _index_figures(moved, tokens[drawn], asked, folder / "made")}


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
    theirs = faiss.deserialize_index(np.load(dense / "faiss.npy"))
    faiss.omp_set_num_threads(1)
    with open_dense(dense) as index:
        of_row = text[index.positions]
        known = [(key, int(token)) for key, token in zip(*asked) if (of_row == token).any()]
        ways = {
            "50 nearest": lambda key, token: index.nearest(key, 50),
            "50 nearest, by FAISS": lambda key, token: theirs.search(key[None], 50),
            "of one token": lambda key, token: index.search(key, token, 16),
            "of one token, by FAISS with a selector": lambda key, token: _restricted(theirs, of_row, key, token),
        }
        times = {way: _percentiles(_times(search, known)) for way, search in ways.items()}
        cold = {
            f"{way}, caches cold": _percentiles(_times(search, known[:200], cold=True)) for way, search in ways.items()
        }
        recall, recall_of_token = [], []
        for key, token in known:
            similarities = keys @ key
            found = similarities[index.nearest(key, 50)[1] - 1]
            recall.append((found >= np.partition(similarities, -50)[-50] - 1e-6).sum() / 50)
            same = np.flatnonzero(tokens == token)
            true = same[np.argsort(-similarities[same])[:8]] + 1
            recall_of_token.append(len(np.intersect1d(index.search(key, token, 8)[1], true)) / len(true))
        size = (dense / "faiss.npy").stat().st_size + (dense / "positions.npy").stat().st_size
        in_memory = index.positions.nbytes + (index._lists.nbytes if index._lists else keys.nbytes)
    return {
        "keys": len(keys), "factory": options["factory"], "nprobe": options["nprobe"],
        "recall at 50 of new states": round(float(np.mean(recall)), 4),
        "recall at 8 among the token's own": round(float(np.mean(recall_of_token)), 4),
        "bytes per key, positions included": round(size / len(keys), 2),
        "bytes per key in memory": round(in_memory / len(keys), 2),
        "microseconds, p50 and p99": times | cold,
    }  # fmt: skip


def _restricted(theirs, of_row: np.ndarray, key: np.ndarray, token: int):
    low, high = of_row.searchsorted([token, token + 1]).tolist()
    selector = faiss.IDSelectorRange(low, high, True)
    if not isinstance(theirs, faiss.IndexIVF):
        return theirs.search(key[None], 16, params=faiss.SearchParameters(sel=selector))
    probes = min(2 * theirs.nprobe, theirs.nlist)
    return theirs.search(key[None], 16, params=faiss.SearchParametersIVF(sel=selector, nprobe=probes))


def _times(search, known, *, cold: bool = False) -> list[float]:
    """Seconds of each search, one after the other; cold: as after a forward of a model, which leaves nothing in the caches."""
    seconds = []
    weights = np.zeros(16 << 20, np.float32)
    for key, token in known:
        if cold:
            weights += 1
        started = time.thread_time()
        search(key, token)
        seconds.append(time.thread_time() - started)
    return seconds


def _percentiles(seconds) -> list[float]:
    return [round(1e6 * float(np.percentile(seconds, q)), 1) for q in (50, 99)]
