"""Parquet files and the arrow files of `datasets.save_to_disk`: each row is a record, read column by column.

Only the column that holds the text is read, in batches, so a file larger than memory is no trouble.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redraft.index_builders.readers.documents import BadRecordError, Document, ReadOptions, Tally
from redraft.index_builders.readers.json_records import TEXT_KEYS, documents_of_record
from redraft.index_builders.readers.sources import SourceFile
from redraft.retrieval.errors import import_extra

__all__ = ["read_arrow", "read_parquet"]

_ROWS = 1024


def read_parquet(file: SourceFile, options: ReadOptions, tally: Tally) -> Iterator[Document]:
    """Documents of a parquet file, row by row."""
    import_extra("pyarrow", "parquet")
    parquet = import_extra("pyarrow.parquet", "parquet")
    with _arrow_errors(file), parquet.ParquetFile(file.path) as table:
        column = _column(table.schema_arrow.names, options, file)
        rows, total = 0, max(1, table.metadata.num_rows)
        for batch in table.iter_batches(_ROWS, columns=[column]):
            yield from _documents(batch.column(column).to_pylist(), rows, column, file, options, tally)
            rows += len(batch)
            tally.bytes_here = file.size * rows // total


def read_arrow(file: SourceFile, options: ReadOptions, tally: Tally) -> Iterator[Document]:
    """Documents of an arrow stream file, row by row."""
    pyarrow = import_extra("pyarrow", "parquet")
    with _arrow_errors(file), pyarrow.memory_map(str(file.path)) as source:
        stream = pyarrow.ipc.open_stream(source)
        column = _column(stream.schema.names, options, file)
        rows = 0
        for batch in stream:
            for start in range(0, len(batch), _ROWS):
                values = batch.column(column).slice(start, _ROWS).to_pylist()
                yield from _documents(values, rows + start, column, file, options, tally)
            rows += len(batch)
            tally.bytes_here = source.tell()


def _column(names: list[str], options: ReadOptions, file: SourceFile) -> str:
    wanted = TEXT_KEYS if options.text_key is None else (options.text_key,)
    for name in wanted:
        if name in names:
            return name
    raise ValueError(f"{file.path}: no column {' or '.join(wanted)} among {', '.join(names)}; choose with --text-key")


def _documents(values: list, first_row: int, column: str, file, options, tally) -> Iterator[Document]:
    for row, value in enumerate(values, first_row + 1):
        yield from documents_of_record({column: value}, options, tally, f"{file.path}: row {row}")


@contextmanager
def _arrow_errors(file: SourceFile):
    """Name the file in what pyarrow raises."""
    pyarrow = import_extra("pyarrow", "parquet")
    try:
        yield
    except pyarrow.ArrowException as error:
        raise BadRecordError(str(file.path), f"damaged or not what its name says ({error})") from error
