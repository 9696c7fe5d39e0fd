"""Files in, documents out: one stream over all sources, whatever each file's format is.

Readers stream: no more than a piece of a file (or a `.json` array) is held at a time. What cannot be used is an error
that names file and line; `Tally` counts what the user allowed to be dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

from redraft.index_builders.readers.documents import BadRecordError, Document, ReadOptions, Tally
from redraft.index_builders.readers.json_records import read_json_array, read_json_lines
from redraft.index_builders.readers.sources import SourceFile
from redraft.index_builders.readers.table_files import read_arrow, read_parquet
from redraft.index_builders.readers.text_files import read_text
from redraft.index_builders.readers.token_files import read_megatron, read_npy

__all__ = ["read_documents"]

_READERS = {
    "text": read_text,
    "jsonl": read_json_lines,
    "json": read_json_array,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "npy": read_npy,
    "megatron": read_megatron,
}


def read_documents(files: list[SourceFile], options: ReadOptions, tally: Tally) -> Iterator[tuple[int, Document]]:
    """(source number, document) for every document of `files`, in order.

    A text file found in a folder that is binary or not UTF-8 is skipped and counted. A file that the user named, or
    that holds records, counts as a bad record. Raises ValueError at the first bad record beyond
    `options.max_bad_records`.
    """
    tally.max_bad_records = options.max_bad_records
    for file in files:
        try:
            for document in _READERS[file.format](file, options, tally):
                yield file.source, document
        except BadRecordError as error:
            if file.format == "text" and not file.named:
                tally.skipped_files += 1
            else:
                tally.bad(error)
        tally.bytes_before += file.size
        tally.bytes_here = 0
