"""Inverted lists of 8-bit numbers, searched by token first: what FAISS has built, scanned by a kernel of our own.

FAISS builds `IVF...,SQ8` well and searches it for any neighbour. A draft wants the neighbours at which one token was chosen, and
there its lists are the long way round: the places of a token lie in all of them. So what FAISS has trained is taken out of it
once, when the index is opened: the codes in the order of the lists, and the places of each token in them (int32, a
permutation). A token that was chosen up to `ALL_OF` times is compared everywhere, which is exact and needs no list; a more
frequent one only in the lists nearest to the key, each of which has the token's places side by side. Either takes
5 to 60 microseconds among 200 000 keys on one thread, where FAISS with a selector takes several hundred.

A code c stands for centre + low + (c + 1/2) / 255 * step, by dimension. So an inner product is that of the key with the
list's centre, plus one constant of the key, plus a product of the codes with the key scaled once: one conversion and one
multiplication a number, which the compiler turns into vectors of 16.

In memory: d bytes a key, 4 for its row and 4 for its token's order, and the centres; FAISS keeps 8 for the row. Searches of
several threads are safe, nothing ever changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from redraft.retrieval.kernel import inner, kernel

__all__ = ["ALL_OF", "InvertedLists"]

ALL_OF = 8192  # places of one token that are compared without asking which list they are in
_LEAST = np.float32(-np.inf)


class _Lists(NamedTuple):
    """centres: float32[lists, d]; ends: int64[lists + 1], of list i the codes ends[i]..ends[i + 1] - 1; codes: uint8[n, d];
    low, step: float32[d], of a code; around: whether codes are distances from the list's centre."""

    centres: np.ndarray
    ends: np.ndarray
    codes: np.ndarray
    low: np.ndarray
    step: np.ndarray
    around: bool


class InvertedLists:
    """The keys of a trained FAISS index of the kind `IVF...,SQ8`, by inner product.

    Attributes:
        rows: int32[n], of each code, which key it is; probes: lists that a search visits.
    """

    def __init__(self, faiss, index, starts: np.ndarray) -> None:
        """starts: int64[m], ascending from 0: the rows from one to the next belong to one token.

        Raises ValueError where the lists do not hold every row once.
        """
        lists = index.invlists
        sizes = np.array([lists.list_size(i) for i in range(index.nlist)])
        ends = np.concatenate([[0], np.cumsum(sizes)])
        codes = _aligned(index.ntotal, index.d)
        self.rows = np.empty(index.ntotal, np.int32)
        for number, size in enumerate(sizes.tolist()):
            if size:
                place = slice(ends[number], ends[number + 1])
                content = faiss.rev_swig_ptr(lists.get_codes(number), size * index.d)
                codes[place] = content.reshape(size, index.d)
                self.rows[place] = faiss.rev_swig_ptr(lists.get_ids(number), size)
        if not np.array_equal(np.sort(self.rows), np.arange(index.ntotal)):
            raise ValueError(f"its lists do not hold each of {index.ntotal} keys once")
        trained = faiss.vector_to_array(index.sq.trained).reshape(2, index.d)
        step = (trained[1] / np.float32(255)).astype(np.float32)
        self._lists = _Lists(
            index.quantizer.reconstruct_n(0, index.nlist), ends, codes, trained[0] + step / 2, step, index.by_residual
        )
        self.probes = min(index.nprobe, index.nlist)
        owners = np.searchsorted(starts, self.rows, side="right").astype(np.int32)
        self._by_token = np.argsort(owners, kind="stable").astype(np.int32)
        self.search(np.zeros(index.d, np.float32), 1)  # compile now, not in a session's first step
        self.search(np.zeros(index.d, np.float32), 1, (0, 1))

    @property
    def nbytes(self) -> int:
        """Memory that the lists take."""
        arrays = self._lists.centres, self._lists.ends, self._lists.codes, self.rows, self._by_token
        return sum(array.nbytes for array in arrays)

    @staticmethod
    def fits(faiss, index) -> bool:
        """Whether this class can search `index`."""
        return (
            isinstance(index, faiss.IndexIVFScalarQuantizer)
            and index.sq.qtype == faiss.ScalarQuantizer.QT_8bit
            and index.metric_type == faiss.METRIC_INNER_PRODUCT
            and isinstance(faiss.downcast_index(index.quantizer), faiss.IndexFlat)
        )

    def search(self, key: np.ndarray, count: int, rows: tuple[int, int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(similarities float32[m], rows int32[m]) nearest to `key` (float32[d]), nearest first; m <= count.

        rows: (first, end), one token's as `starts` has them; without it the nearest of all rows.
        """
        similarities, found = np.empty(count, np.float32), np.empty(count, np.int32)
        if rows is None:
            filled = _search(self._lists, key, self.probes, similarities, found)
        else:
            places = self._by_token[rows[0] : rows[1]]
            if len(places) <= ALL_OF:
                filled = _search_places(self._lists, places, key, similarities, found)
            else:
                filled = _search_runs(self._lists, places, key, self.probes, similarities, found)
        return similarities[:filled], self.rows[found[:filled]]


def _aligned(count: int, dimension: int) -> np.ndarray:
    """uint8[count, dimension] that begins at a cache line, so that a key of 64 numbers lies in one and not in two."""
    content = np.empty(count * dimension + 63, np.uint8)
    begin = -content.ctypes.data % 64
    return content[begin : begin + count * dimension].reshape(count, dimension)


@inner
def _keep(similarities, found, filled, similarity, place):
    """Put a place among the nearest so far, nearest first; returns how many there are."""
    at = min(filled, len(found) - 1)
    while at > 0 and similarities[at - 1] < similarity:
        similarities[at], found[at] = similarities[at - 1], found[at - 1]
        at -= 1
    similarities[at], found[at] = similarity, place
    return min(filled + 1, len(found))


@numba.njit(fastmath={"contract", "nsz", "reassoc"}, nogil=True, error_model="numpy", forceinline=True)
def _dot(left, right):
    """The inner product of two arrays of one length, in any order of adding, which is what makes vectors possible."""
    total = np.float32(0.0)
    for i in range(len(right)):
        total += np.float32(left[i]) * right[i]
    return total


@inner(inline=False)
def _prepare(lists, key, scaled, near):
    """Scale the key for codes; fill near: float32[lists], the key's product with each centre. Returns the key's constant."""
    for i in range(len(key)):
        scaled[i] = key[i] * lists.step[i]
    for number in range(len(near)):
        near[number] = _dot(lists.centres[number], key)
    return _dot(lists.low, key)


@inner(inline=False)
def _scan(lists, first, end, scaled, base, similarities, found, filled):
    """Compare the codes first..end-1, which lie side by side."""
    least = similarities[filled - 1] if filled == len(found) else _LEAST
    for place in range(first, end):
        similarity = base + _dot(lists.codes[place], scaled)
        if similarity > least:
            filled = _keep(similarities, found, filled, similarity, place)
            if filled == len(found):
                least = similarities[filled - 1]
    return filled


@kernel
def _search(lists, key, probes, similarities, found):
    scaled, near = np.empty(len(key), np.float32), np.empty(len(lists.centres), np.float32)
    best, numbers = np.empty(probes, np.float32), np.empty(probes, np.int32)
    constant, filled = _prepare(lists, key, scaled, near), 0
    _nearest_lists(near, best, numbers)
    for number in numbers:
        base = constant + near[number] if lists.around else constant
        filled = _scan(
            lists, lists.ends[number], lists.ends[number + 1], scaled, base, similarities, found, filled
        )  # fmt: skip
    return filled


@kernel
def _search_runs(lists, places, key, probes, similarities, found):
    """Compare those of `places` (ascending) that lie in the nearest lists."""
    scaled, near = np.empty(len(key), np.float32), np.empty(len(lists.centres), np.float32)
    best, numbers = np.empty(probes, np.float32), np.empty(probes, np.int32)
    constant, filled = _prepare(lists, key, scaled, near), 0
    _nearest_lists(near, best, numbers)
    for number in numbers:
        base = constant + near[number] if lists.around else constant
        first = np.searchsorted(places, lists.ends[number])
        end = first
        while end < len(places) and places[end] < lists.ends[number + 1]:
            end += 1
        if end > first:  # rows of one token are in order in a list, so their codes lie side by side
            filled = _scan(
                lists, places[first], places[first] + end - first, scaled, base, similarities, found, filled
            )  # fmt: skip
    return filled


@kernel
def _search_places(lists, places, key, similarities, found):
    """Compare all `places` (ascending)."""
    scaled, near = np.empty(len(key), np.float32), np.empty(len(lists.centres), np.float32)
    constant, filled, number, base, least = _prepare(lists, key, scaled, near), 0, -1, _LEAST, _LEAST
    for place in places:
        while number < 0 or place >= lists.ends[number + 1]:
            number += 1
            base = constant + near[number] if lists.around else constant
        similarity = base + _dot(lists.codes[place], scaled)
        if similarity > least:
            filled = _keep(similarities, found, filled, similarity, place)
            if filled == len(found):
                least = similarities[filled - 1]
    return filled


@inner(inline=False)
def _nearest_lists(near, best, numbers):
    """Fill `numbers` with the lists that are to be visited, nearest first, so that what lies in the last is seldom near enough."""
    filled = 0
    for number in range(len(near)):
        if filled < len(best) or near[number] > best[filled - 1]:
            filled = _keep(best, numbers, filled, near[number], number)
