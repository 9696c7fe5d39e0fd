"""SA-IS: all suffixes of all documents in order, in linear time.

G. Nong, S. Zhang, W. H. Chan, "Two efficient algorithms for linear time suffix array construction" (2011). A suffix is
of type S if it is smaller than the next suffix of the text, else of type L; an S suffix after an L suffix is an LMS
suffix ("leftmost S"). At most every second suffix is one, and from the LMS suffixes in order the order of all others
follows in two scans ("induced sorting"). The same scans, started from unsorted LMS suffixes, order the pieces of text
between LMS positions; equal pieces get equal names, and if names repeat, the text of names, at most half as long, is
sorted the same way first.

Deviations from the paper: no sentinel ends the text (what would be compared with it counts as smaller), and the types
are not stored: during the scans they follow from the bucket pointers. The text of names and its array live inside the
array that is being filled, so that beyond text and result only a byte per token and the bucket pointers are needed.

Every document gets an end mark of its own, smaller than all tokens and in the order of the documents. So no comparison
reaches over the end of a document, a suffix comes before its continuations, and equal ones are in order of position.

Cost: O(n) time on any text, and about 13 bytes per token in all, text, result and marks included. Prefix doubling
takes O(n log n) and meets its worst case in text full of repeats; sorting by comparison is quadratic there.
libdivsufsort (PyPI: pydivsufsort 0.0.20) sorts the same 9.1M tokens of source in the same time (1.3 s of one core
each), but sorts bytes, four to a token: 512M tokens at most, more memory, and no end marks for documents.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from redraft.retrieval.kernel import inner, kernel

__all__ = ["sort_suffixes"]


@kernel(allocates=False)
def _count(text, buckets):
    for i in range(text.shape[0]):
        buckets[text[i]] += 1


@kernel(allocates=False)
def _bucket_bounds(counts, buckets, ends):
    """buckets[c] = start of bucket c, or one past its end if `ends`."""
    total = 0
    for c in range(counts.shape[0]):
        if ends:
            total += counts[c]
            buckets[c] = total
        else:
            buckets[c] = total
            total += counts[c]


@kernel(allocates=False)
def _mark_lms(text, is_lms):
    """Set is_lms where an S suffix follows an L suffix; returns how many there are."""
    n = text.shape[0]
    found = 0
    next_is_s = False  # the last suffix is of type L
    for i in range(n - 2, -1, -1):
        is_s = text[i] < text[i + 1] or (text[i] == text[i + 1] and next_is_s)
        if next_is_s and not is_s:
            is_lms[i + 1] = 1
            found += 1
        next_is_s = is_s
    return found


@kernel(allocates=False)
def _place_unsorted(text, is_lms, ends, array):
    """Every LMS position at the end of its token's bucket, in any order."""
    array[:] = -1
    for i in range(text.shape[0]):
        if is_lms[i]:
            ends[text[i]] -= 1
            array[ends[text[i]]] = i


@kernel(allocates=False)
def _place_sorted(text, n_lms, ends, array):
    """The LMS positions array[:n_lms], in order, to the ends of their buckets."""
    array[n_lms:] = -1
    for i in range(n_lms - 1, -1, -1):
        position = array[i]
        array[i] = -1
        ends[text[position]] -= 1
        array[ends[text[position]]] = position


@kernel(allocates=False)
def _induce_l(text, starts, array):
    """Left to right: the L suffixes, each put down when the smaller suffix behind it is met."""
    n = text.shape[0]
    array[starts[text[n - 1]]] = n - 1
    starts[text[n - 1]] += 1
    for i in range(n):
        before = array[i] - 1
        if before >= 0 and text[before] >= text[before + 1]:
            token = text[before]
            array[starts[token]] = before
            starts[token] += 1


@kernel(allocates=False)
def _induce_s(text, ends, array):
    """Right to left: the S suffixes, each put down when the larger suffix behind it is met.

    A suffix stands right of its bucket's pointer exactly when it is of type S itself, which decides between equal
    tokens.
    """
    for i in range(text.shape[0] - 1, -1, -1):
        before = array[i] - 1
        if before < 0:
            continue
        token, behind = text[before], text[before + 1]
        if token < behind or (token == behind and i >= ends[token]):
            ends[token] -= 1
            array[ends[token]] = before


@inner
def _same_piece(text, is_lms, a, b):
    """Whether the text from LMS position a to the next LMS position equals that from b."""
    n = text.shape[0]
    offset = 0
    while True:
        if a + offset == n or b + offset == n or text[a + offset] != text[b + offset]:
            return False
        if offset > 0 and (is_lms[a + offset] or is_lms[b + offset]):
            return is_lms[a + offset] == is_lms[b + offset]
        offset += 1


@kernel(allocates=False)
def _name_pieces(text, is_lms, n_lms, array):
    """Turn the sorted pieces into a text of names at the end of `array`; returns how many names there are.

    A position's name is kept at half the position meanwhile: LMS positions are at least two apart.
    """
    n = text.shape[0]
    sorted_end = 0
    for i in range(n):
        if array[i] > 0 and is_lms[array[i]]:
            array[sorted_end] = array[i]
            sorted_end += 1
    array[n_lms:] = -1
    names, last = 0, -1
    for i in range(n_lms):
        position = array[i]
        if last < 0 or not _same_piece(text, is_lms, last, position):
            names += 1
        last = position
        array[n_lms + (position >> 1)] = names - 1
    target = n - 1
    for i in range(n - 1, n_lms - 1, -1):
        if array[i] >= 0:
            array[target] = array[i]
            target -= 1
    return names


@kernel(allocates=False)
def _order_by_name(names, array):
    """The names are all different: they are the order."""
    for i in range(names.shape[0]):
        array[names[i]] = i


@kernel(allocates=False)
def _back_to_positions(is_lms, n_lms, array):
    """array[:n_lms] holds numbers of LMS suffixes (first, second, ... in the text): turn them into positions."""
    n = is_lms.shape[0]
    target = n - n_lms
    for i in range(n):
        if is_lms[i]:
            array[target] = i
            target += 1
    for i in range(n_lms):
        array[i] = array[n - n_lms + array[i]]


def _sort(text: np.ndarray, n_values: int, array: np.ndarray, report: Callable[[int], None]) -> None:
    """Fill array[:n] with the positions of `text` (int32[n], values below n_values) in the order of their suffixes."""
    n = len(text)
    if n == 0:
        return
    counts, bounds = np.zeros(n_values, np.int32), np.empty(n_values, np.int32)
    _count(text, counts)
    is_lms = np.zeros(n, np.uint8)
    n_lms = _mark_lms(text, is_lms)
    if n_lms > 1:
        _bucket_bounds(counts, bounds, True)
        _place_unsorted(text, is_lms, bounds, array)
        _induce(text, counts, bounds, array)
        report(n)
        n_names = _name_pieces(text, is_lms, n_lms, array)
        names = array[n - n_lms :]
        if n_names < n_lms:
            _sort(names, n_names, array[:n_lms], report)
        else:
            _order_by_name(names, array)
        _back_to_positions(is_lms, n_lms, array)
    elif n_lms == 1:
        array[0] = int(is_lms.argmax())
    _bucket_bounds(counts, bounds, True)
    _place_sorted(text, n_lms, bounds, array)
    _induce(text, counts, bounds, array)
    report(n)


def _induce(text: np.ndarray, counts: np.ndarray, bounds: np.ndarray, array: np.ndarray) -> None:
    _bucket_bounds(counts, bounds, False)
    _induce_l(text, bounds, array)
    _bucket_bounds(counts, bounds, True)
    _induce_s(text, bounds, array)


@kernel(allocates=False)
def _with_end_marks(tokens, document_ends, marked):
    """Documents one after the other, document d ended by the value d, tokens moved up by the number of documents."""
    n_documents = document_ends.shape[0]
    source, target = 0, 0
    for document in range(n_documents):
        while source < document_ends[document]:
            marked[target] = tokens[source] + n_documents
            source += 1
            target += 1
        marked[target] = document
        target += 1


@kernel(allocates=False)
def _without_end_marks(marked, n_documents, array):
    """Turn the positions in `array` into positions among the tokens alone. `marked` is overwritten."""
    before = 0
    for i in range(marked.shape[0]):
        if marked[i] < n_documents:
            before += 1
        else:
            marked[i] = i - before
    for i in range(n_documents, array.shape[0]):
        array[i] = marked[array[i]]


def sort_suffixes(
    tokens: np.ndarray,
    document_ends: np.ndarray,
    progress: Callable[[str, int, int], None] | None = None,
) -> np.ndarray:
    """int32[n]: the positions of `tokens` in the order of what follows them in their document.

    tokens: int32[n]; document_ends: int64[documents], the last one n. Raises ValueError for more than 2,147,483,647
    tokens and documents together.
    """
    n, n_documents = len(tokens), len(document_ends)
    if n + n_documents > 2**31 - 1:
        raise ValueError(f"a suffix array holds at most {2**31 - 1} tokens and documents, got {n} and {n_documents}")
    if n == 0:
        return np.empty(0, np.int32)
    n_ids = int(tokens.max()) + 1
    if n_ids > max(4 * n, 1 << 20) or n_ids + n_documents > 2**31 - 1:  # too many buckets: number the ids that occur
        present, tokens = np.unique(tokens, return_inverse=True)
        tokens, n_ids = tokens.astype(np.int32), len(present)
    marked = np.empty(n + n_documents, np.int32)
    _with_end_marks(tokens, document_ends, marked)
    array = np.empty(len(marked), np.int32)
    done, total = 0, 4 * len(marked)  # two rounds of scans, over at most n + n/2 + n/4 + ... values

    def report(scanned: int) -> None:
        nonlocal done
        done += scanned
        if progress is not None:
            progress("sorting", done, total)

    _sort(marked, n_ids + n_documents, array, report)
    _without_end_marks(marked, n_documents, array)
    if progress is not None:
        progress("sorting", total, total)
    return array[n_documents:]  # the end marks come first
