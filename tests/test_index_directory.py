"""Index directories: what is written is what is opened, and everything that can be wrong with one is named."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import naive_automaton as naive
import numpy as np
import pytest
from test_suffix_automaton import build

from redraft import __version__
from redraft.retrieval import frozen_automaton as frozen
from redraft.retrieval import index_writer
from redraft.retrieval.edge_rows import EDGE_TARGET, EDGE_TOKEN
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.frequent_contexts import (
    COUNT,
    DISTINCT,
    EDGE_START,
    LENGTH,
    LINK,
    LOW,
    SHORTER,
)
from redraft.retrieval.frozen_automaton import freeze, frozen_walk
from redraft.retrieval.index_directory import open_index, write_array_index, write_automaton_index
from redraft.retrieval.index_verification import verify_index
from redraft.retrieval.index_writer import IndexWriter
from redraft.retrieval.packed import pack, unpack
from redraft.retrieval.suffix_array import BUCKET_BITS, positions
from redraft.retrieval.suffix_array_build import build_suffix_array
from redraft.retrieval.suffix_array_cursor import find
from redraft.retrieval.suffix_automaton import SuffixAutomaton

TOKENIZER = {"fingerprint": "ab12", "name": "toy", "vocab_size": 50}
DOCUMENTS = [[1, 2, 3, 1, 2], [4], [], [1, 2, 3, 49, 0]]
TEXT = [token for document in DOCUMENTS for token in document]
COUNTS = {"documents": 4, "tokens": 11, "max_token": 49}


def write(path, documents=DOCUMENTS, *, kind="suffix_automaton", force=False, tokenizer=TOKENIZER, progress=None):
    rest = {
        "tokenizer": tokenizer,
        "options": {"max_tokens": None},
        "sources": [{"path": "a.txt", "documents": len(documents)}],
        "force": force,
        "progress": progress,
    }
    if kind == "suffix_automaton":
        write_automaton_index(path, build(documents, random.Random(0)), **rest)
    else:
        write_array_index(path, *flat(documents), **rest)
    return path


def flat(documents):
    tokens = np.array([token for document in documents for token in document], np.int32)
    return tokens, np.cumsum([len(document) for document in documents], dtype=np.int64)


@pytest.fixture
def index_path(tmp_path):
    return write(tmp_path / "my.index")


@pytest.fixture
def array_path(tmp_path):
    return write(tmp_path / "array.index", kind="suffix_array")


def edit_manifest(path, **changes):
    file = path / "manifest.json"
    manifest = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}))


# --- Writing and opening ---------------------------------------------------------------------------------------------


def test_round_trip(index_path):
    with open_index(index_path, tokenizer_fingerprint="ab12", vocab_size=50) as index:
        frozen = freeze(build(DOCUMENTS, random.Random(0)))
        assert index.automaton.states.tolist() == frozen.states.tolist()
        assert index.automaton.edges.tolist() == frozen.edges.tolist()
        assert index.tokens[:].tolist() == TEXT
        assert [document.tolist() for document in index.documents()] == DOCUMENTS
        assert index.document_ends.tolist() == [5, 6, 6, 11]
        assert frozen_walk(index.automaton, np.array([9, 1, 2, 3], np.int32), 32)[1] == 3
        manifest = index.manifest
    assert (manifest["kind"], manifest["documents"], manifest["tokens"]) == ("suffix_automaton", 4, 11)
    assert manifest["redraft_version"] == __version__ and manifest["tokenizer"] == TOKENIZER
    assert manifest["options"] == {"max_tokens": None} and manifest["sources"][0]["path"] == "a.txt"
    assert verify_index(index_path) == manifest


def test_round_trip_of_a_suffix_array(array_path):
    expected = build_suffix_array(*flat(DOCUMENTS))
    with open_index(array_path, tokenizer_fingerprint="ab12", vocab_size=50) as index:
        assert (index.kind, index.automaton) == ("suffix_array", None)
        assert [part.tolist() for part in index.array] == [part.tolist() for part in expected]
        assert index.document_ends.tolist() == [5, 6, 6, 11]
        assert [document.tolist() for document in index.documents()] == DOCUMENTS
        low, high, length, _ = find(index.array, [9, 1, 2, 3])
        assert length == 3
        assert [index.locate(position) for position in positions(index.array, low, high)] == [(0, 0), (3, 0)]
    assert verify_index(array_path)["documents"] == 4


@pytest.mark.parametrize("kind", ["suffix_automaton", "suffix_array"])
def test_opened_arrays_are_mapped_and_read_only(tmp_path, kind):
    with open_index(write(tmp_path / "my.index", kind=kind)) as index:
        for array in (index.document_ends, *((index.tokens, *index.automaton) if index.automaton else index.array[:-1])):
            assert isinstance(array.base, np.memmap) or isinstance(array.base.base, np.memmap)
            assert not array.flags.writeable


def test_locate(index_path):
    with open_index(index_path) as index:
        for position in range(11):
            assert index.locate(position) == naive.locate(DOCUMENTS, position)
        for outside in (-1, 11):
            with pytest.raises(IndexError, match="outside the 11 tokens"):
                index.locate(outside)


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_empty_index(tmp_path, documents):
    path = write(tmp_path / "empty.index", documents)
    with open_index(path, vocab_size=1) as index:
        assert frozen_walk(index.automaton, np.array([1], np.int32), 8) == (0, 0)
        assert index.manifest["documents"] == len(documents) and index.manifest["max_token"] == -1
    verify_index(path)
    array_path = write(tmp_path / "array.index", documents, kind="suffix_array")
    with open_index(array_path) as index:
        assert find(index.array, [1, 2]) == (0, 0, 0, 0)
    verify_index(array_path)


def test_a_closed_index_lets_go_of_the_files(index_path):
    index = open_index(index_path)
    assert str(index_path) in Path("/proc/self/maps").read_text()
    index.close()
    assert str(index_path) not in Path("/proc/self/maps").read_text()


def test_progress_reaches_its_total(tmp_path):
    calls = []
    path = write(tmp_path / "my.index", progress=lambda *call: calls.append(call))
    verify_index(path, lambda *call: calls.append(call))
    for what in ("freezing", "digests", "verifying"):
        done = [(done, total) for name, done, total in calls if name == what]
        assert done == sorted(done) and done[-1][0] == done[-1][1] > 0


def test_ids_must_lie_in_the_tokenizers_vocabulary(tmp_path):
    with pytest.raises(ValueError, match="token id 49, the tokenizer has 49 ids"):
        write(tmp_path / "my.index", tokenizer=TOKENIZER | {"vocab_size": 49})
    assert list(tmp_path.iterdir()) == []


def test_a_link_keeps_leading_to_the_index(tmp_path):
    (tmp_path / "disk").mkdir()
    write(tmp_path / "disk" / "v1.index")
    (tmp_path / "current").symlink_to(tmp_path / "disk" / "v1.index")
    write(tmp_path / "current", [[7, 7]], force=True)
    assert (tmp_path / "current").is_symlink()
    assert open_index(tmp_path / "current").tokens[:].tolist() == [7, 7]


# --- Replacing: the old index or the new one, never none -------------------------------------------------------------


def test_an_existing_output_is_refused(index_path):
    with pytest.raises(FileExistsError, match="exists already"):
        write(index_path, [[7]])
    assert open_index(index_path).tokens[:].tolist() == TEXT


@pytest.mark.parametrize("exchange", [True, False])
def test_force_replaces_under_an_open_index(index_path, monkeypatch, exchange):
    if not exchange:  # a file system without the swap
        monkeypatch.setattr(index_writer, "_exchange", lambda a, b: False)
    old = open_index(index_path)
    write(index_path, [[7, 8]], force=True)
    assert open_index(index_path).tokens[:].tolist() == [7, 8]
    assert old.tokens[:].tolist() == TEXT
    assert [entry.name for entry in index_path.parent.iterdir()] == ["my.index"]


def test_the_swap_never_leaves_the_name_free(index_path, monkeypatch):
    """A crash at any moment: the process ends before and after every system call that changes a name."""
    crash = (
        "import sys, os, random; sys.path.insert(0, 'tests'); import test_index_directory as t\n"
        "from redraft.retrieval import index_writer as w\n"
        "real = w._exchange\n"
        "def exchange(a, b):\n"
        "    if {when!r} == 'before': os._exit(9)\n"
        "    real(a, b)\n"
        "    os._exit(9)\n"
        "w._exchange = exchange\n"
        "t.write({path!r}, [[7, 8]], force=True)\n"
    )
    for when, wanted in (("before", TEXT), ("after", [7, 8])):
        script = crash.format(when=when, path=str(index_path))
        ended = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[1], check=False)
        assert ended.returncode == 9
        assert verify_index(index_path)["tokens"] == len(wanted)
        assert open_index(index_path).tokens[:].tolist() == wanted


def test_a_set_aside_index_is_named(index_path):
    index_path.rename(index_path.with_name("my.index.old-7"))
    with pytest.raises(IndexFormatError, match="its last version is at .*my.index.old-7"):
        open_index(index_path)


def test_force_replaces_only_indexes(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("x")
    for target in (tmp_path / "home", tmp_path / "home" / "thesis.txt"):
        with pytest.raises(FileExistsError, match="not an index directory"):
            write(target, force=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "x"
    (tmp_path / "new").mkdir()
    write(tmp_path / "new", force=True)
    verify_index(tmp_path / "new")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_an_interrupted_build_leaves_the_old_index(index_path, error):
    def interrupt(what, done, total):
        if what == "digests":
            raise error

    with pytest.raises(error):
        write(index_path, [[7]], force=True, progress=interrupt)
    with pytest.raises(error):
        write(index_path.with_name("other.index"), [[7]], progress=interrupt)
    assert [entry.name for entry in index_path.parent.iterdir()] == ["my.index"]
    verify_index(index_path)


def test_a_full_disk_is_an_error_and_leaves_the_old_index(index_path):
    """Files may not grow beyond 64 kB: as on a full disk, the error comes when room is asked for."""
    automaton = build([[token % 50 for token in range(40_000)]], random.Random(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        with pytest.raises(OSError):
            write_automaton_index(index_path, automaton, tokenizer=TOKENIZER, options={}, sources=[], force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert [entry.name for entry in index_path.parent.iterdir()] == ["my.index"]
    verify_index(index_path)


def test_leftovers_of_a_killed_build_do_no_harm(tmp_path):
    leftover = tmp_path / f"my.index.tmp-{os.getpid()}"
    leftover.mkdir()
    (leftover / "tokens.npy").write_bytes(b"half")
    verify_index(write(tmp_path / "my.index"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["my.index"]


def test_an_array_that_was_not_written_is_named(tmp_path):
    with (
        pytest.raises(ValueError, match="states.npy, edges.npy was not written"),
        IndexWriter(tmp_path / "my.index", kind="suffix_automaton") as writer,
    ):
        writer.write("tokens.npy", np.zeros(1, np.int32))
        writer.write("document_ends.npy", np.ones(1, np.int64))
        writer.publish(counts=COUNTS, tokenizer=TOKENIZER, options={}, sources=[])


# --- What can be wrong -----------------------------------------------------------------------------------------------


def test_missing_and_unfinished_directories(tmp_path):
    with pytest.raises(IndexFormatError, match="none.index: missing"):
        open_index(tmp_path / "none.index")
    with pytest.raises(IndexFormatError, match="without a manifest"):
        open_index(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(IndexFormatError, match="a file, not a directory"):
        open_index(tmp_path / "file")


@pytest.mark.parametrize(
    "text, message",
    [
        (b"{", "malformed JSON"),
        (b"", "malformed JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[]", "wanted a JSON object"),
        (b"{}", "wanted a JSON object"),
    ],
)
def test_malformed_manifest(index_path, text, message):
    (index_path / "manifest.json").write_bytes(text)
    with pytest.raises(IndexFormatError, match=message):
        open_index(index_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format_version": 2}, "format version 2, .* reads version 1 of this kind; upgrade redraft"),
        ({"format_version": "1"}, "format version '1'"),
        ({"kind": "b_tree"}, "kind 'b_tree', wanted one of suffix_automaton, suffix_array"),
        ({"kind": None}, '"kind" is None, wanted str'),
        ({"tokens": "11"}, "\"tokens\" is '11', wanted int"),
        ({"files": {}}, "lacks size and digest of tokens.npy"),
        ({"tokens": 12}, "tokens: found 11, wanted 12"),
        ({"documents": 3}, "documents: found 4, wanted 3"),
    ],
)
def test_manifest_that_says_something_else(index_path, changes, message):
    edit_manifest(index_path, **changes)
    with pytest.raises(IndexFormatError, match=message):
        open_index(index_path)


def test_another_tokenizer(index_path):
    with pytest.raises(IndexFormatError, match="built with tokenizer 'toy', fingerprint 'ab12'.*wanted.*'cd34'"):
        open_index(index_path, tokenizer_fingerprint="cd34")
    with pytest.raises(IndexFormatError, match="token id 49, wanted ids below the vocabulary size 49"):
        open_index(index_path, vocab_size=49)


@pytest.mark.parametrize(
    "kind, name",
    [("suffix_automaton", name) for name in ("tokens.npy", "document_ends.npy", "states.npy", "edges.npy")]
    + [("suffix_array", name) for name in ("text.npy", "suffixes.npy", "keys.npy", "buckets.npy")],
)
def test_damaged_files(tmp_path, kind, name):
    index_path = write(tmp_path / "my.index", kind=kind)
    file = index_path / name
    content = file.read_bytes()

    file.write_bytes(content[:-4])
    with pytest.raises(IndexFormatError, match=f"{name}: {len(content) - 4} bytes, the manifest wants {len(content)}"):
        open_index(index_path)

    flipped = bytearray(content)
    flipped[-6] ^= 4
    file.write_bytes(flipped)
    with pytest.raises(IndexFormatError, match=name if name != "document_ends.npy" else "sha256|end of"):
        verify_index(index_path)

    file.write_bytes(b"x" * len(content))
    with pytest.raises(IndexFormatError, match=f"{name}: not a .npy file"):
        open_index(index_path)

    file.unlink()
    with pytest.raises(IndexFormatError, match=f"{name}: missing"):
        open_index(index_path)


def test_a_file_of_another_type(index_path):
    np.save(index_path / "tokens.npy", np.zeros(11, np.int64))
    size = (index_path / "tokens.npy").stat().st_size
    manifest = json.loads((index_path / "manifest.json").read_text())
    manifest["files"]["tokens.npy"]["bytes"] = size
    edit_manifest(index_path, files=manifest["files"])
    with pytest.raises(IndexFormatError, match="int64.*wanted int32"):
        open_index(index_path)


@pytest.mark.parametrize(
    "name, place, value",
    [
        *[("document_ends", 0, -1), ("document_ends", 1, 3), ("tokens", 0, -1), ("tokens", 9, 48)],
        *[("states", (0, frozen.LINK), 0), ("states", (2, frozen.LINK), -1), ("states", (2, frozen.LINK), 99)],
        *[("states", (2, frozen.LINK), 2), ("states", (1, frozen.LINK), 5), ("states", (0, frozen.LENGTH), -1)],
        *[("states", (0, frozen.EDGE_START), 1), ("states", (1, frozen.EDGE_START), 9)],
        *[("states", (3, frozen.FIRST_END), -1), ("states", (3, frozen.FIRST_END), 11)],
        *[("edges", (0, EDGE_TARGET), -5), ("edges", (0, EDGE_TARGET), 9)],
        *[("edges", (0, EDGE_TOKEN), -1), ("edges", (0, EDGE_TOKEN), 50)],
    ],
)
def test_verify_refuses_numbers_that_lead_outside(tmp_path, name, place, value):
    """A faulty builder writes matching digests, too."""
    automaton = build(DOCUMENTS, random.Random(0))
    states, edges = freeze(automaton)
    arrays = {"tokens": automaton.tokens, "document_ends": automaton.document_ends, "states": states, "edges": edges}
    arrays = {key: array.copy() for key, array in arrays.items()}
    arrays[name][place] = value
    publish(tmp_path / "my.index", "suffix_automaton", arrays)
    with pytest.raises(IndexFormatError, match=f"{name}.npy: holds numbers outside"):
        verify_index(tmp_path / "my.index")


def publish(path, kind, arrays, counts=COUNTS):
    with IndexWriter(path, kind=kind) as writer:
        for key, array in arrays.items():
            writer.write(f"{key}.npy", array)
        writer.publish(counts=counts, tokenizer=TOKENIZER, options={}, sources=[])


LAST = None  # the longest context


@pytest.mark.parametrize(
    "name, place, value",
    [
        *[("suffixes", 3, 11), ("text", 2, 19), ("text", 5, 2), ("text", 11, 0), ("text", 0, 103), ("keys", 1, 63)],
        *[("contexts", (2, LENGTH), 9), ("contexts", (1, LINK), 1), ("contexts", (2, SHORTER), 2)],
        *[("contexts", (3, LINK), 999), ("contexts", (3, LOW), -1), ("contexts", (3, COUNT), 12)],
        *[("contexts", (LAST, LENGTH), 9), ("contexts", (0, LENGTH), -1), ("contexts", (3, COUNT), -1)],
        *[("contexts", (3, DISTINCT), -1), ("contexts", (0, EDGE_START), -1)],
        *[("contexts", (1, DISTINCT), 8), ("contexts", (1, EDGE_START), 0), ("contexts", (0, LENGTH), 1)],
        *[("context_edges", (0, EDGE_TOKEN), 50), ("context_edges", (0, EDGE_TARGET), 0x7000)],
        *[("context_edges", (3, EDGE_TARGET), -1), ("context_edges", (0, EDGE_TARGET), LAST)],
    ],
)
def test_verify_refuses_what_leads_outside(tmp_path, name, place, value):
    """A position beyond the text, a document's start too many or missing, no end of the text, an unknown id in text or keys;
    links in a circle or outside, rows and successors that are not there, edges to nowhere or to a longer context."""
    tokens, ends = flat(DOCUMENTS)
    array = build_suffix_array(tokens, ends, least_rows=1)
    parts = {key: part.copy() for key, part in array._asdict().items() if key != "sizes"}
    if name.startswith("context"):
        row, column = (int(np.argmax(array.contexts[:, LENGTH])) if number is LAST else number for number in place)
        parts[name][row, column] = int(np.argmax(array.contexts[:, LENGTH])) if value is LAST else value
    else:
        bits = int(array.sizes[{"text": 1, "suffixes": 2, "keys": 3}[name]])
        values = np.empty({"text": 12, "suffixes": 11, "keys": 5}[name], np.int64)
        unpack(parts[name], bits, 0, values)
        values[place] = value
        pack(values, bits, parts[name])
    publish(tmp_path / "my.index", "suffix_array", parts | {"document_ends": ends})
    with pytest.raises(IndexFormatError, match=f"{name}.npy: holds numbers outside"):
        verify_index(tmp_path / "my.index")


@pytest.mark.parametrize("place, value", [(1, 7), (2, 4)])
def test_verify_refuses_buckets_of_other_keys(tmp_path, place, value):
    """A search reads the keys between two bounds: these ascend, up to the number of keys."""
    tokens, ends = flat([[*range(40)] * 4])
    array = build_suffix_array(tokens, ends)
    bounds = np.empty(3, np.int64)
    parts = {key: part.copy() for key, part in array._asdict().items() if key != "sizes"}
    unpack(parts["buckets"], int(array.sizes[BUCKET_BITS]), 0, bounds)
    assert bounds.tolist() == [0, 4, 5]
    bounds[place] = value
    pack(bounds, int(array.sizes[BUCKET_BITS]), parts["buckets"])
    counts = {"documents": 1, "tokens": 160, "max_token": 39}
    publish(tmp_path / "my.index", "suffix_array", parts | {"document_ends": ends}, counts)
    with pytest.raises(IndexFormatError, match="buckets.npy: holds numbers outside"):
        verify_index(tmp_path / "my.index")


@pytest.mark.parametrize("version", [1, 2])
def test_a_suffix_array_of_an_earlier_version(array_path, version):
    edit_manifest(array_path, format_version=version)
    with pytest.raises(
        IndexFormatError, match=f"format version {version}, this redraft .* reads version 3 of this kind; rebuild"
    ):
        open_index(array_path)


def test_write_needs_only_what_it_says(tmp_path):
    write_automaton_index(tmp_path / "a", SuffixAutomaton(), tokenizer={}, options={}, sources=[])
    assert verify_index(tmp_path / "a")["tokenizer"] == {"fingerprint": None, "name": None, "vocab_size": None}
