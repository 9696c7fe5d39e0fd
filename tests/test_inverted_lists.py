"""Inverted lists: the kernel finds what FAISS finds in the same lists, and of one token what comparing with all of it finds."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
from test_dense_index import clustered_keys, corpus, write  # noqa: F401 - a fixture

from redraft.retrieval import inverted_lists
from redraft.retrieval.dense_index import open_dense
from redraft.retrieval.inverted_lists import InvertedLists

COUNT = 3000


def lists_of(keys, starts, *, around=True, probes=5):
    index = faiss.index_factory(keys.shape[1], "IVF16,SQ8", faiss.METRIC_INNER_PRODUCT)
    index.by_residual = around
    index.train(keys)
    index.add(keys)
    index.nprobe = probes
    assert InvertedLists.fits(faiss, index)
    return index, InvertedLists(faiss, index, starts)


@pytest.mark.parametrize(("dimension", "around"), [(16, True), (16, False), (64, True), (7, True)])
def test_what_faiss_finds(dimension, around):
    index, lists = lists_of(clustered_keys(COUNT, dimension), np.array([0]), around=around)
    for key in clustered_keys(40, dimension, seed=5):
        for count in (1, 20):
            wanted, rows = index.search(key[None], count)
            similarities, found = lists.search(key, count)
            assert np.allclose(similarities, wanted[0], atol=2e-6)
            assert len(np.setdiff1d(found, rows[0])) <= (wanted[0] <= wanted[0, -1] + 2e-6).sum() - 1  # equal ones
    assert len(lists.search(key, COUNT)[0]) == (index.search(key[None], COUNT)[1] >= 0).sum()


@pytest.mark.parametrize("all_of", [COUNT, 0])
def test_of_one_token_what_comparing_with_all_of_it_finds(monkeypatch, all_of):
    """Once by comparing everywhere, once through the lists (all of them here, so that nothing may be missed)."""
    monkeypatch.setattr(inverted_lists, "ALL_OF", all_of)
    keys = clustered_keys(COUNT)
    starts = np.concatenate([[0], np.sort(np.random.default_rng(2).choice(np.arange(1, COUNT), 12, replace=False))])
    index, lists = lists_of(keys, starts, probes=16)
    stored = index.reconstruct_n(0, COUNT) if index.make_direct_map() is None else None
    for key in clustered_keys(10, seed=5):
        for low, end in zip(starts.tolist(), [*starts[1:].tolist(), COUNT]):
            similarities, found = lists.search(key, 10, (low, end))
            true = np.sort(stored[low:end] @ key)[::-1][:10]
            assert np.allclose(similarities, true, atol=2e-6) and len(similarities) == min(10, end - low)
            assert np.allclose(stored[found] @ key, similarities, atol=2e-6)
            assert ((found >= low) & (found < end)).all() and len(set(found.tolist())) == len(found)


def test_a_frequent_token_is_looked_for_in_the_nearest_lists_only(monkeypatch):
    monkeypatch.setattr(inverted_lists, "ALL_OF", 0)
    index, lists = lists_of(clustered_keys(COUNT), np.array([0, 1000]), probes=2)
    key = clustered_keys(1, seed=5)[0]
    near = index.quantizer.search(key[None], 2)[1][0]
    held = np.concatenate(
        [faiss.rev_swig_ptr(index.invlists.get_ids(int(i)), index.invlists.list_size(int(i))) for i in near]
    )
    found = lists.search(key, COUNT, (1000, COUNT))[1]
    assert sorted(found.tolist()) == sorted(held[held >= 1000].tolist())


@pytest.mark.parametrize(
    ("factory", "metric", "fits"),
    [
        ("IVF16,SQ8", faiss.METRIC_INNER_PRODUCT, True),
        ("IVF16,SQ8", faiss.METRIC_L2, False),
        ("IVF16,SQ6", faiss.METRIC_INNER_PRODUCT, False),
        ("IVF16,SQfp16", faiss.METRIC_INNER_PRODUCT, False),
        ("IVF16,Flat", faiss.METRIC_INNER_PRODUCT, False),
        ("IVF16_HNSW8,SQ8", faiss.METRIC_INNER_PRODUCT, False),
        ("PCA8,IVF16,SQ8", faiss.METRIC_INNER_PRODUCT, False),
        ("Flat", faiss.METRIC_INNER_PRODUCT, False),
    ],
)
def test_what_is_not_lists_of_8_bits_is_left_to_faiss(factory, metric, fits):
    assert InvertedLists.fits(faiss, faiss.index_factory(16, factory, metric)) == fits


def test_lists_that_hold_a_key_twice_are_refused():
    keys = clustered_keys(COUNT)
    index, _ = lists_of(keys, np.array([0]))
    ids = faiss.rev_swig_ptr(index.invlists.get_ids(0), index.invlists.list_size(0))
    ids[0] = ids[1]
    with pytest.raises(ValueError, match="do not hold each of 3000 keys once"):
        InvertedLists(faiss, index, np.array([0]))


@pytest.mark.parametrize("factory", ["IVF16,SQ8", "Flat"])
def test_a_key_of_another_length_is_refused(corpus, tmp_path, factory):  # noqa: F811
    with open_dense(write(tmp_path / "my.dense", corpus, clustered_keys(COUNT), factory=factory)) as index:
        for key in (np.zeros(15), np.zeros(17), np.zeros((1, 16)), np.float32(1)):
            with pytest.raises(ValueError, match=r"key: wanted shape \[16\]"):
                index.search(key, 3)
            with pytest.raises(ValueError, match=r"key: wanted shape \[16\]"):
                index.nearest(key, 3)
