"""What a target's candidates may look like, and what is said of those that may not."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.retrieval.candidates import Candidates

GOOD = {"tokens": [1, 0], "previous": [-1, 3], "ids": [[1, 2], [0, 9]], "probs": [[0.5, 0.25], [1.0, 0.0]]}


def checked(vocab_size=10, **changes):
    return Candidates.checked(**{**GOOD, **changes}, vocab_size=vocab_size)


def test_anything_array_like_will_do():
    for kind in (list, np.array, lambda values: np.array(values, np.float64 if "." in str(values) else np.int64)):
        candidates = Candidates.checked(*(kind(values) for values in GOOD.values()), vocab_size=10)
        assert candidates.tokens.tolist() == [1, 0] and candidates.previous.tolist() == [-1, 3]
        assert candidates.ids.tolist() == [[1, 2], [0, 9]]
        assert candidates.tokens.dtype == candidates.previous.dtype == candidates.ids.dtype == np.int32
        assert candidates.probs.dtype == np.float32


def test_no_positions_are_positions_too():
    empty = Candidates.checked([], [], np.empty((0, 8), np.int32), np.empty((0, 8), np.float32))
    assert empty.tokens.shape == (0,) and empty.ids.shape == (0, 8)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"tokens": [1, -1]}, ValueError, "candidates.tokens: token id -1"),
        ({"tokens": [1, 10]}, ValueError, "candidates.tokens: token id 10"),
        ({"tokens": [1.0, 2.0]}, TypeError, "candidates.tokens"),
        ({"previous": [-2, 0]}, ValueError, "candidates.previous"),
        ({"previous": [10, 0]}, ValueError, "candidates.previous: token id 10"),
        ({"previous": [1]}, ValueError, r"candidates.previous: wanted shape \(2,\)"),
        ({"ids": [1, 2]}, ValueError, r"candidates.ids: wanted shape \(2, k\)"),
        ({"ids": [[1, 2]]}, ValueError, r"candidates.ids: wanted shape \(2, k\)"),
        ({"ids": [[1, 2], [3, 10]]}, ValueError, "candidates.ids: token id 10"),
        ({"ids": [[1, 2], [3, -1]]}, ValueError, "candidates.ids: token id -1"),
        ({"ids": [[0.5, 2], [3, 1]]}, TypeError, "candidates.ids"),
        ({"probs": [[0.5], [0.5]]}, ValueError, r"candidates.probs: wanted shape \(2, 2\)"),
        ({"probs": [[0.5, np.nan], [0.5, 0.1]]}, ValueError, "candidates.probs"),
        ({"probs": [[0.5, -0.1], [0.5, 0.1]]}, ValueError, "candidates.probs"),
        ({"probs": [[0.5, 1.5], [0.5, 0.1]]}, ValueError, "candidates.probs"),
    ],
)
def test_what_is_refused(changes, error, said):
    with pytest.raises(error, match=said):
        checked(**changes)
    unchecked = [np.asarray(value) for value in {**GOOD, **changes}.values()]
    with pytest.raises(error, match=said):  # as integers of the machine's own size
        Candidates(*unchecked).copied(10)
    narrow = [array.astype({"i": np.int32, "f": np.float32}[array.dtype.kind]) for array in unchecked]
    with pytest.raises(error, match=said):
        Candidates(*narrow).copied(10)


def test_a_copy_is_its_own_and_writable():
    frozen = checked()
    for array in (frozen.tokens, frozen.previous, frozen.ids, frozen.probs):
        array.setflags(write=False)
    wide = Candidates(*(np.asarray(value) for value in GOOD.values()))
    turned = Candidates(frozen.tokens, frozen.previous, np.asfortranarray(frozen.ids), np.asfortranarray(frozen.probs))
    for candidates in (frozen, wide, turned):
        copy = candidates.copied(10)
        assert copy.ids.tolist() == GOOD["ids"] and copy.probs.tolist() == GOOD["probs"]
        assert copy.tokens.tolist() == GOOD["tokens"] and copy.previous.tolist() == GOOD["previous"]
        for array in (copy.tokens, copy.previous, copy.ids, copy.probs):
            assert array.flags.writeable and array.flags.c_contiguous
            array[:] = 0
    assert frozen.ids.tolist() == GOOD["ids"]


def test_previous_tokens_are_whole_numbers_too():
    with pytest.raises(TypeError, match="candidates.previous"):
        checked(previous=[0.5, 1.0])


def test_without_a_vocabulary_every_int32_is_an_id():
    assert checked(None, ids=[[1, 2**31 - 1], [0, 1]]).ids.max() == 2**31 - 1
    with pytest.raises(ValueError, match="int32"):
        checked(None, ids=[[1, 2**31], [0, 1]])
