"""Tokenized documents on disk, part by part, so that an interrupted build goes on where it stopped.

Tokenizing is the slow half of a build. Its result goes into a work folder beside the index:

    lock              held while a build runs
    plan.json         what is being built: sources, tokenizer, options
    part-00000.npy    int32: the tokens of the part's documents, one after the other
    part-00000.json   the marker, written last: where each document ends, and the counts after this part

A part without its marker does not exist. A marker repeats the counts of everything before it, so the last one is
the state to resume from. When the plan has changed the folder is emptied. It goes away when the index is complete, and
when a build fails before there is a part.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

__all__ = ["TokenParts", "read_json", "take_lock", "write_durably"]


class TokenParts:
    """The work folder of one build; a context manager that holds its lock.

    Attributes:
        state: counts stored with the newest marker; None before the first part.
    """

    def __init__(self, folder: Path, plan: dict | None) -> None:
        """Take over `folder`, keeping its parts if they belong to the same `plan` (a JSON value; None: never).

        Raises BlockingIOError when another build holds it.
        """
        self.folder = folder
        self.resumable = plan is not None
        self._markers: list[dict] = []
        self._lock = take_lock(folder)
        try:
            self._take_over(plan)
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def _take_over(self, plan: dict | None) -> None:
        found = read_json(self.folder / "plan.json")
        if plan is None or found != json.loads(json.dumps(plan)):
            for path in self.folder.glob("part-*"):
                path.unlink()
            write_durably(self.folder / "plan.json", json.dumps(plan).encode())
        while (marker := read_json(self._path(len(self._markers), ".json"))) is not None:
            self._markers.append(marker)

    def __enter__(self) -> TokenParts:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        """After an exception the folder stays if there is something in it to resume from."""
        if exception_type is not None and not (self._markers and self.resumable):
            self.remove()
        self._lock.close()

    def __len__(self) -> int:
        return len(self._markers)

    @property
    def state(self) -> dict | None:
        return self._markers[-1]["state"] if self._markers else None

    def add(self, documents: list[np.ndarray], state: dict) -> None:
        """Store `documents` (int32 arrays) as the next part, and the counts after it. On disk when this returns."""
        number = len(self._markers)
        tokens = np.concatenate([np.empty(0, np.int32), *documents])
        path = self._path(number, ".npy")
        with open(path, "wb") as file:
            np.save(file, tokens)
            file.flush()
            os.fsync(file.fileno())
        marker = {"ends": np.cumsum([len(document) for document in documents]).tolist(), "state": state}
        write_durably(self._path(number, ".json"), json.dumps(marker).encode())
        self._markers.append(marker)

    def documents(self) -> Iterator[np.ndarray]:
        """Every stored document, in order, as an int32 view of a mapped file."""
        for number, marker in enumerate(self._markers):
            tokens = np.load(self._path(number, ".npy"), mmap_mode="r")
            start = 0
            for end in marker["ends"]:
                yield tokens[start:end]
                start = end

    def remove(self) -> None:
        """Delete the folder, lock included."""
        shutil.rmtree(self.folder)

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"part-{number:05d}{suffix}"


def take_lock(folder: Path):
    """Make `folder` if need be and lock it for one build; returns the file whose closing ends the lock.

    Raises BlockingIOError when another build holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")  # noqa: SIM115 - kept open: the lock lives as long as the file
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise BlockingIOError(f"{folder} is in use: another build of the same index is running") from error
    return lock


def read_json(path: Path):
    """The value in a file, None if there is no such file or it was cut."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def write_durably(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, even after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
