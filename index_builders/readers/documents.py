"""What a reader hands on, what it is told, and what it keeps count of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

__all__ = ["BadRecordError", "Document", "ReadOptions", "Tally"]

_WARNINGS = 20


@dataclass(frozen=True)
class Document:
    """One text, or one run of token ids, that drafts may not cross the end of.

    Attributes:
        content: str, or int32[n] from a source that is tokenized already.
        where: file and line (or row) it came from.
    """

    content: str | np.ndarray
    where: str


class BadRecordError(ValueError):
    """A record that cannot be used: where it is and what is wrong with it."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


@dataclass(frozen=True)
class ReadOptions:
    """How to read sources.

    Attributes:
        text_key: key or column that holds the text; None looks for messages, conversations, text and content.
        roles: whose turns of a chat are documents.
        max_bad_records: how many records may be unusable before the build fails.
        exclude: patterns (`*.min.js`, `vendor`) of file and folder names to leave out of folders.
        stdin_format: what `-` reads, "jsonl" or "text".
        render_chat: writes a whole chat out as one text, instead of single turns; raises ValueError.
    """

    text_key: str | None = None
    roles: tuple[str, ...] = ("assistant",)
    max_bad_records: int = 0
    exclude: tuple[str, ...] = ()
    stdin_format: str = "jsonl"
    render_chat: Callable[[list[dict]], str] | None = None


@dataclass
class Tally:
    """Counts of one reading, from the first file to the last.

    Attributes:
        bad_records: records that could not be used; the first `_WARNINGS` of them are handed to `warn`.
        skipped_files: files in folders that are binary or not UTF-8.
        empty: records and files without any text.
        bytes_before: size of the files that are done; `bytes_here`: how far the current one is read.
    """

    max_bad_records: int = 0
    warn: Callable[[str], None] = lambda text: None
    bad_records: int = 0
    skipped_files: int = 0
    empty: int = 0
    bytes_before: int = 0
    bytes_here: int = field(default=0, repr=False)

    @property
    def bytes_read(self) -> int:
        return self.bytes_before + self.bytes_here

    def bad(self, error: BadRecordError) -> None:
        """Count a bad record; raises ValueError once there are more than `max_bad_records`."""
        self.bad_records += 1
        if self.bad_records <= self.max_bad_records:
            if self.bad_records <= _WARNINGS:
                self.warn(str(error))
            elif self.bad_records == _WARNINGS + 1:
                self.warn("more bad records: they are only counted from here on")
            return
        allowed = (
            "a build tolerates some with --max-bad-records"
            if self.max_bad_records == 0
            else f"this is one more than --max-bad-records {self.max_bad_records}"
        )
        raise ValueError(f"{error} ({allowed})") from error
