"""Corpora that are token ids already: NumPy arrays and the `.bin`/`.idx` pairs of Megatron.

They must have been made with the tokenizer that the index is built for; only the range of the ids can be checked.
Arrays are mapped, not loaded.

A Megatron `.idx` file: magic, version and dtype code, the numbers of sequences and of document bounds, then an int32
length and an int64 byte offset (into `.bin`) per sequence, then the bounds: document i is sequences bounds[i] up to
bounds[i + 1].
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

import numpy as np

from redraft.index_builders.readers.documents import BadRecordError, Document, ReadOptions, Tally
from redraft.index_builders.readers.sources import SourceFile

__all__ = ["read_megatron", "read_npy"]

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document bounds
_MEGATRON_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def read_npy(file: SourceFile, options: ReadOptions, tally: Tally) -> Iterator[Document]:
    """A one-dimensional array is one document, a two-dimensional one has a document per row."""
    try:
        array = np.load(file.path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise BadRecordError(str(file.path), f"damaged or no NumPy array of numbers ({error})") from error
    if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
        raise BadRecordError(
            str(file.path), f"wanted integer token ids of shape (n,) or (documents, n), got {array.dtype}{array.shape}"
        )
    for number, row in enumerate(np.atleast_2d(array), 1):
        if len(row):
            yield Document(row, str(file.path) if array.ndim == 1 else f"{file.path}: row {number}")
        else:
            tally.empty += 1
        tally.bytes_here += row.nbytes


def read_megatron(file: SourceFile, options: ReadOptions, tally: Tally) -> Iterator[Document]:
    """The documents of a Megatron pair; either of its two files names it."""
    where = str(file.path)
    content = file.path.with_suffix(".idx").read_bytes()
    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        raise BadRecordError(where, "its .idx file does not start as Megatron's do (MMIDIDX)")
    _, version, code, sequences, bounds = _HEADER.unpack_from(content)
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise BadRecordError(where, f"wanted version 1 and an integer dtype, got version {version}, dtype code {code}")
    if len(content) < _HEADER.size + 12 * sequences + 8 * bounds:
        raise BadRecordError(where, f"its .idx file is cut short at {len(content)} bytes")
    lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size)
    offsets = np.frombuffer(content, "<i8", sequences, _HEADER.size + 4 * sequences)
    ends = np.frombuffer(content, "<i8", bounds, _HEADER.size + 12 * sequences)
    dtype = np.dtype(_MEGATRON_DTYPES[code]).newbyteorder("<")
    data = np.memmap(file.path.with_suffix(".bin"), np.uint8, "r") if sequences else np.empty(0, np.uint8)
    if sequences and int((offsets + lengths.astype(np.int64) * dtype.itemsize).max()) > len(data):
        raise BadRecordError(where, f"its .bin file is cut short at {len(data)} bytes")
    for number, (first, end) in enumerate(itertools.pairwise(ends), 1):
        parts = [
            data[offsets[i] : offsets[i] + int(lengths[i]) * dtype.itemsize].view(dtype) for i in range(first, end)
        ]
        tokens = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
        if len(tokens):
            yield Document(tokens, f"{where}: document {number}")
        else:
            tally.empty += 1
        tally.bytes_here += tokens.nbytes
