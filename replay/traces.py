"""Recorded model outputs, tokenized once: the texts that a replay forces through a drafter.

A trace file is gzip-compressed JSON lines with `prompt`, `output` and `continues` (see the data's README): a line
that continues another has that line's context and output as the beginning of its own context. Each prompt and each
output is tokenized by itself and the ids are strung together, as an engine does that keeps the ids of what it wrote.

Loading a tokenizer and tokenizing takes many seconds and reading ids takes milliseconds, so the ids are kept in a
cache folder: one file per trace file and tokenizer, named by the digests of both.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

__all__ = ["Item", "RememberedTokenizer", "Workload", "cache_folder", "load_workload", "trace_files"]

_SUFFIX = ".jsonl.gz"
_CHUNK = 512  # texts tokenized at a time: keeps the tokenizer's threads busy and its copies small


@dataclass(frozen=True)
class Item:
    """One recorded response: `context` int32[m] is all that the model saw, `output` int32[n] what it wrote."""

    context: np.ndarray
    output: np.ndarray


@dataclass(frozen=True)
class Workload:
    """One trace file as token ids.

    Attributes:
        name: the file's name without its ending.
        tokens: int32[N], prompts and outputs alternating, in file order.
        bounds: int64[2 * lines + 1], where each of them starts in `tokens`, and N.
        continues: bool[lines], whether a line's prompt goes on from the line before.
    """

    name: str
    tokens: np.ndarray
    bounds: np.ndarray
    continues: np.ndarray

    def items(self, output_tokens: int, *, skip: int = 0) -> Iterator[Item]:
        """The first lines until they hold `output_tokens` tokens of output, the last one cut to fit.

        Lines are left out first until they hold `skip` tokens of output (whole lines: the next item starts afresh).
        Lines without output tokens are left out.
        """
        start = 0  # of the conversation's text in `tokens`: turns that continue lie side by side
        skipped = taken = 0
        for line in range(len(self.continues)):
            prompt, output, end = (int(b) for b in self.bounds[2 * line : 2 * line + 3])
            if not self.continues[line]:
                start = prompt
            if skipped < skip:
                skipped += end - output
                continue
            if taken == output_tokens:
                return
            end = min(end, output + output_tokens - taken)
            if end > output:
                taken += end - output
                yield Item(self.tokens[start:output], self.tokens[output:end])


def cache_folder() -> Path:
    """Where tokenized traces are kept: `$XDG_CACHE_HOME/redraft/traces` or `~/.cache/redraft/traces`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redraft" / "traces"


def trace_files(traces: Path, names: list[str] | None = None) -> list[Path]:
    """The trace files of a folder (or the one file given), sorted by name; `names` picks workloads.

    Raises FileNotFoundError where there are none and ValueError for a name that is not there.
    """
    files = sorted(traces.glob(f"*{_SUFFIX}")) if traces.is_dir() else [traces]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"no trace files (*{_SUFFIX}) in {traces}")
    if not names:
        return files
    by_name = {_name(file): file for file in files}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ValueError(f"no workload {', '.join(unknown)} in {traces}; it has {', '.join(by_name)}")
    return [by_name[name] for name in names]


def load_workload(file: Path, tokenizer, *, cache: Path | None = None) -> Workload:
    """Read one trace file as token ids, from the cache where they are there already.

    `tokenizer` has `encode_batch(texts) -> list of int32 arrays` and `fingerprint`. Raises ValueError for a line that
    is no trace, naming file and line.
    """
    packed = file.read_bytes()
    key = hashlib.sha256(packed).hexdigest()[:16] + "-" + tokenizer.fingerprint[:16]
    stored = (cache or cache_folder()) / f"{_name(file)}-{key}.npz"
    if stored.is_file():
        with np.load(stored) as arrays:
            return Workload(_name(file), arrays["tokens"], arrays["bounds"], arrays["continues"])
    workload = _tokenize(file, packed, tokenizer)
    stored.parent.mkdir(parents=True, exist_ok=True)
    partial = stored.with_suffix(f".{os.getpid()}.npz")
    np.savez(partial, tokens=workload.tokens, bounds=workload.bounds, continues=workload.continues)
    partial.replace(stored)
    return workload


class RememberedTokenizer:
    """A tokenizer that is loaded only when there is something to encode.

    Its fingerprint and vocabulary size are kept in the cache folder, under the path, size and time of its file.
    `load(spec)` returns the tokenizer proper: `encode_batch`, `fingerprint`, `vocab_size`.
    """

    def __init__(self, spec: str, load: Callable, *, cache: Path | None = None) -> None:
        self._spec, self._load = spec, load
        path = Path(spec).expanduser()
        card = None
        if path.is_file():
            status = path.stat()
            key = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
            card = (cache or cache_folder()) / f"tokenizer-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if card is not None and card.is_file():
            known = json.loads(card.read_text())
        else:
            known = {"fingerprint": self._loaded.fingerprint, "vocab_size": self._loaded.vocab_size}
            if card is not None:
                card.parent.mkdir(parents=True, exist_ok=True)
                card.write_text(json.dumps(known))
        self.fingerprint, self.vocab_size = known["fingerprint"], known["vocab_size"]

    @cached_property
    def _loaded(self):
        return self._load(self._spec)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One int32 array of ids for each text."""
        return self._loaded.encode_batch(texts)


def _tokenize(file: Path, packed: bytes, tokenizer) -> Workload:
    texts: list[str] = []
    continues: list[bool] = []
    try:
        lines = gzip.decompress(packed).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: wanted gzip-compressed JSON lines: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            texts += (record["prompt"], record["output"])
            continues.append(bool(record["continues"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}, line {number}: not a trace: {error!r}") from error
    if not texts:
        raise ValueError(f"{file}: wanted at least one line, the file is empty")
    pieces: list[np.ndarray] = []
    for first in range(0, len(texts), _CHUNK):
        pieces += tokenizer.encode_batch(texts[first : first + _CHUNK])
    bounds = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(piece) for piece in pieces], out=bounds[1:])
    return Workload(_name(file), np.concatenate(pieces).astype(np.int32), bounds, np.array(continues, bool))


def _name(file: Path) -> str:
    return file.name.removesuffix(_SUFFIX)
