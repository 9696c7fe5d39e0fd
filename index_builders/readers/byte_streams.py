"""Open a file for reading, unpacked: `.gz` and `.zst` by name, standard input as `-`.

A packed file that was cut short gives an error at its end. (zstandard's own stream reader does not notice.)
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from contextlib import contextmanager
from pathlib import Path

from redraft.index_builders.readers.documents import BadRecordError, Tally
from redraft.retrieval.errors import import_extra

__all__ = ["open_bytes"]

_CHUNK = 1 << 18


@contextmanager
def open_bytes(path: Path, tally: Tally):
    """A binary stream of the unpacked content; `tally` follows how far the file itself has been read.

    Raises BadRecordError for a damaged or cut gzip or zstandard stream, while it is read.
    """
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    with open(path, "rb") as file:
        raw = _Counted(file, tally)
        try:
            if path.suffix.lower() == ".gz":
                yield io.BufferedReader(gzip.GzipFile(fileobj=raw), _CHUNK)
            elif path.suffix.lower() == ".zst":
                yield io.BufferedReader(_ZstandardReader(raw, path), _CHUNK)
            else:
                yield io.BufferedReader(raw, _CHUNK)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadRecordError(str(path), f"damaged or cut gzip file ({error})") from error


class _Counted(io.RawIOBase):
    """A raw stream that tells the tally how many bytes went through it."""

    def __init__(self, file, tally: Tally) -> None:
        self._file = file
        self._tally = tally

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._file.readinto(buffer)
        self._tally.bytes_here += count
        return count


class _ZstandardReader(io.RawIOBase):
    """Unpacks any number of zstandard frames, one after the other."""

    def __init__(self, raw: io.RawIOBase, path: Path) -> None:
        self._zstandard = import_extra("zstandard", "zstd")
        self._raw = raw
        self._path = path
        self._frame = None  # None between frames
        self._packed = b""
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            self._packed = self._packed or self._raw.read(_CHUNK)
            if not self._packed:
                if self._frame is not None:
                    raise BadRecordError(str(self._path), "cut zstandard file: its last frame has no end")
                return 0
            self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._ready = self._frame.decompress(self._packed)
            except self._zstandard.ZstdError as error:
                raise BadRecordError(str(self._path), f"damaged zstandard file ({error})") from error
            self._packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
