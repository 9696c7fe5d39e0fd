"""Bundles: the arrays that a kernel makes from addresses are the arrays that were handed in."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.retrieval import bundle
from redraft.retrieval.bundle import Bundle
from redraft.retrieval.kernel import kernel

_int32_rows, _int64_rows, _float32_rows = bundle.int32_rows(3), bundle.int64_rows(2), bundle.float32_rows(4)


@kernel(allocates=False)
def read_all(addresses, shapes, sums):
    """Length, columns and a weighted sum of each array."""
    for i, row in enumerate((bundle.int32s(addresses, 0), bundle.int32s(addresses, 8))):
        shapes[i, 0] = len(row)
        for at in range(len(row)):
            sums[i] += (at + 1.0) * row[at]
    longs, floats = bundle.int64s(addresses, 1), bundle.float32s(addresses, 2)
    doubles, small = bundle.float64s(addresses, 3), bundle.uint8s(addresses, 4)
    shapes[2, 0], shapes[3, 0], shapes[4, 0], shapes[5, 0] = len(longs), len(floats), len(doubles), len(small)
    for at in range(len(longs)):
        sums[2] += (at + 1) * longs[at]
    for at in range(len(floats)):
        sums[3] += (at + 1) * floats[at]
    for at in range(len(doubles)):
        sums[4] += (at + 1) * doubles[at]
    for at in range(len(small)):
        sums[5] += (at + 1.0) * small[at]
    table, wide, rates = _int32_rows(addresses, 5), _int64_rows(addresses, 6), _float32_rows(addresses, 7)
    shapes[6, 0], shapes[6, 1] = table.shape
    shapes[7, 0], shapes[7, 1] = wide.shape
    shapes[8, 0], shapes[8, 1] = rates.shape
    for at in range(table.shape[0]):
        for column in range(3):
            sums[6] += (3 * at + column + 1) * table[at, column]
    for at in range(wide.shape[0]):
        for column in range(2):
            sums[7] += (2 * at + column + 1) * wide[at, column]
    for at in range(rates.shape[0]):
        for column in range(4):
            sums[8] += (4 * at + column + 1) * rates[at, column]


@kernel(allocates=False)
def write_through(addresses):
    bundle.int32s(addresses, 0)[1] = -5
    _int32_rows(addresses, 5)[1, 2] = 77
    _float32_rows(addresses, 7)[0, 3] = 0.5


def arrays(rng, n):
    return [
        rng.integers(-9, 9, n).astype(np.int32), rng.integers(-(2**40), 2**40, n), rng.random(n).astype(np.float32),
        rng.random(n), rng.integers(0, 255, n).astype(np.uint8), rng.integers(-9, 9, (n, 3)).astype(np.int32),
        rng.integers(-9, 9, (n, 2)), rng.random((n, 4)).astype(np.float32), rng.integers(0, 9, n).astype(np.int32),
    ]  # fmt: skip


ORDER = [0, 8, 1, 2, 3, 4, 5, 6, 7]  # in which `read_all` answers


@pytest.mark.parametrize("n", [0, 1, 2, 7, 100])
def test_arrays_come_back(n):
    handed_in = arrays(np.random.default_rng(n), n)
    for array in handed_in:
        array.flags.writeable = False  # as memory maps are
    bundled = Bundle(handed_in)
    shapes, sums = np.zeros((9, 2), np.int64), np.zeros(9)
    read_all(bundled.addresses, shapes, sums)
    for answer, i in enumerate(ORDER):
        array = handed_in[i]
        assert shapes[answer].tolist() == [n, array.shape[1] if array.ndim == 2 else 0]
        weights = np.arange(1, array.size + 1)
        assert sums[answer] == pytest.approx(float((weights * array.ravel().astype(float)).sum()), rel=1e-5)


def test_kernels_write_into_the_arrays_themselves():
    handed_in = arrays(np.random.default_rng(0), 3)
    bundled = Bundle(handed_in)
    write_through(bundled.addresses)
    assert handed_in[0][1] == -5 and handed_in[5][1, 2] == 77 and handed_in[7][0, 3] == np.float32(0.5)


def test_a_bundle_keeps_its_arrays_alive():
    bundled = Bundle(arrays(np.random.default_rng(1), 50))
    assert [len(array) for array in bundled.arrays] == bundled.addresses[1::2].tolist() == [50] * 9
    assert all(array.ctypes.data == address for array, address in zip(bundled.arrays, bundled.addresses[::2]))


def test_a_bundle_like_another_holds_the_new_arrays():
    rng = np.random.default_rng(2)
    former, other = arrays(rng, 20), arrays(rng, 30)
    for replaced in ([], [0], [3, 8], list(range(9))):
        new = [other[i] if i in replaced else array for i, array in enumerate(former)]
        known = Bundle(former)
        bundled = Bundle(new, known)
        assert bundled.addresses.tolist() == Bundle(new).addresses.tolist()
        assert known.addresses.tolist() == Bundle(former).addresses.tolist(), "a bundle is never changed"
        assert all(held is array for held, array in zip(bundled.arrays, new))
    with pytest.raises(ValueError, match="array 1 is not C-contiguous"):
        Bundle([former[0], np.arange(10)[::2], *former[2:]], Bundle(former))
    with pytest.raises(ValueError):
        Bundle(former[:-1], Bundle(former))


def test_what_a_bundle_cannot_hold():
    with pytest.raises(ValueError, match="array 1 is not C-contiguous"):
        Bundle([np.arange(4), np.arange(10)[::2]])
    with pytest.raises(ValueError, match="array 0 is not C-contiguous"):
        Bundle([np.zeros((3, 4)).T])
