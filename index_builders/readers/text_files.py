"""Text and source files: each file is one document.

A file that is larger than `_PIECE_BYTES` becomes several documents, cut after line breaks, so that a dump of many
gigabytes streams through. Text is UTF-8; a NUL byte marks a binary file.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from redraft.index_builders.readers.byte_streams import open_bytes
from redraft.index_builders.readers.documents import BadRecordError, Document, ReadOptions, Tally
from redraft.index_builders.readers.sources import SourceFile

__all__ = ["read_text"]

_PIECE_BYTES = 32 << 20


def read_text(file: SourceFile, options: ReadOptions, tally: Tally) -> Iterator[Document]:
    """The documents of one text file. Raises BadRecordError that names file and byte for anything but UTF-8 text."""
    where, offset, rest, number = str(file.path), 0, b"", 0
    with open_bytes(file.path, tally) as stream:
        while True:
            block = rest + stream.read(_PIECE_BYTES - len(rest))
            at_end = len(block) < _PIECE_BYTES
            end = len(block) if at_end else _cut(block)
            text = _decode(block[:end], offset, where)
            number += 1
            if text.strip():
                yield Document(text, where if at_end and number == 1 else f"{where} (piece {number})")
            elif number == 1 and at_end:
                tally.empty += 1
            if at_end:
                return
            offset, rest = offset + end, block[end:]


def _cut(block: bytes) -> int:
    """Where to end a piece: after its last line break, or else between two characters."""
    end = block.rfind(b"\n") + 1
    if end == 0:
        end = len(block)
        while end > len(block) - 4 and block[end - 1] & 0xC0 == 0x80:  # back over a character's continuation bytes
            end -= 1
        end -= block[end - 1] >= 0xC0
    return end


def _decode(block: bytes, offset: int, where: str) -> str:
    if b"\0" in block:
        raise BadRecordError(where, f"binary file: NUL at byte {offset + block.index(0)}; wanted UTF-8 text")
    try:
        if offset == 0 and block.startswith(codecs.BOM_UTF8):
            return block[len(codecs.BOM_UTF8) :].decode()
        return block.decode()
    except UnicodeDecodeError as error:
        raise BadRecordError(
            where, f"byte {offset + error.start} is 0x{error.object[error.start]:02x}, which is not UTF-8 there"
        ) from error
