"""Merging indexes: which documents, in which order, and what the manifest says of them; what is refused, and when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from redraft.index_builders import structures
from redraft.index_builders.merge import merge_indexes
from redraft.index_builders.progress import Progress, memory_in_use
from redraft.index_builders.structures import AUTOMATON_TOKENS, check_output, choose_kind, in_turn, write_index
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.index_directory import index_folders, open_index


def make(path: Path, documents: list[list[int]], fingerprint="ab12", kind="suffix_array", **record) -> str:
    """An index as a build would write it."""
    arrays = [np.array(document, np.int32) for document in documents]
    tokens = sum(map(len, documents))
    rest = {"options": {}, "sources": [], "force": False} | record
    rest["tokenizer"] = {"fingerprint": fingerprint, "name": "toy", "vocab_size": 100}
    write_index(path, arrays, tokens, kind, Progress(quiet=True), **rest)
    return str(path)


def documents(path) -> list[list[int]]:
    with open_index(path) as index:
        return [document.tolist() for document in index.documents()]


@pytest.mark.parametrize("kind", structures.KINDS)
def test_documents_come_from_each_in_turn_and_once(tmp_path, kind):
    """The indexes end one after the other; one has a copy of another's document, one of its own."""
    parts = [[[1], [2, 2], [3]], [[4]], [[5], [1], [6, 7], [5], [8]]]
    paths = [make(tmp_path / f"{i}.index", part, kind=kind) for i, part in enumerate(parts)]
    counts = merge_indexes(paths, tmp_path / "m.index", kind=kind)
    assert documents(tmp_path / "m.index") == [[1], [4], [5], [2, 2], [3], [6, 7], [8]]
    assert counts == {"documents": 7, "tokens": 9, "duplicates": 2}
    with open_index(tmp_path / "m.index") as index:
        assert index.kind == kind and (index.manifest["documents"], index.manifest["tokens"]) == (7, 9)


def test_many_short_documents_are_no_copies_of_each_other(tmp_path):
    parts = [[[a, b] for a in range(30)] for b in range(30)]
    paths = [make(tmp_path / f"{i:02}.index", part) for i, part in enumerate(parts)]
    assert merge_indexes(paths, tmp_path / "m.index") == {"documents": 900, "tokens": 1800, "duplicates": 0}


def test_long_documents_come_through_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(structures, "_APPENDED_AT_ONCE", 4)
    for n in range(1, 13):
        path = make(tmp_path / f"{n}.index", [list(range(n)), [7]], kind="suffix_automaton")
        assert documents(path) == [list(range(n)), [7]]


def test_in_turn_goes_on_until_all_have_ended():
    sequences = [[], list("ab"), list("c"), list("defg")]
    assert list(in_turn(sequences)) == ["a", "c", "d", "b", "e", "f", "g"]


def test_sources_are_summed_by_name(tmp_path):
    def source(name: str, documents: int, tokens: int) -> dict:
        return {"source": name, "documents": documents, "tokens": tokens}

    a = make(tmp_path / "a.index", [[1]], sources=[source("x", 1, 10), source("y", 2, 20)])
    b = make(tmp_path / "b.index", [[2]], sources=[source("z", 3, 30), source("x", 4, 40)])
    merge_indexes([a, b], tmp_path / "m.index")
    with open_index(tmp_path / "m.index") as index:
        assert index.manifest["sources"] == [source("x", 5, 50), source("y", 2, 20), source("z", 3, 30)]


@pytest.mark.parametrize(
    ("shards", "merged"),
    [
        ([[1, 2], [2, 2]], {"shard": [1, 1], "same": 1}),  # all shards in order: the whole build
        ([[2, 2], [1, 2]], {"same": 1}),
        ([[1, 3], [2, 3]], {"same": 1}),
        ([[1, 3], [1, 3]], {"shard": [1, 3], "same": 1}),
    ],
)
def test_options_are_those_that_all_have(tmp_path, shards, merged):
    paths = [
        make(tmp_path / f"{i}.index", [[i]], options={"shard": shard, "same": 1, "other": i, f"only{i}": 1})
        for i, shard in enumerate(shards)
    ]
    merge_indexes(paths, tmp_path / "m.index")
    with open_index(tmp_path / "m.index") as index:
        assert index.manifest["options"] == merged


def test_only_one_tokenizer(tmp_path):
    """Fingerprints count, names do not; of the last one, too."""
    paths = [make(tmp_path / f"{i}.index", [[i]], "ab12" if i < 2 else "cd34") for i in range(3)]
    with pytest.raises(IndexFormatError, match=r"2\.index was built with tokenizer 'toy' \(cd34\), .*0\.index with 'toy'"):
        merge_indexes(paths, tmp_path / "m.index")
    with pytest.raises(IndexFormatError, match=r"2\.index was built with tokenizer 'toy' \(cd34\), .*1\.index with 'toy'"):
        merge_indexes(paths[1:], tmp_path / "m.index")
    assert not (tmp_path / "m.index").exists()


def test_an_output_is_looked_at_before_anything_is_read(tmp_path):
    output = Path(make(tmp_path / "m.index", [[1]]))
    with pytest.raises(FileExistsError, match="exists already"):
        merge_indexes([str(tmp_path / "missing.index")], output)
    merge_indexes([str(output), make(tmp_path / "b.index", [[2]])], output, force=True)  # one of its own parts
    assert documents(output) == [[1], [2]]


def test_what_is_no_index_is_not_replaced(tmp_path):
    (tmp_path / "notes").mkdir()
    check_output(tmp_path / "new.index", force=False)
    check_output(tmp_path / "notes", force=True)  # an empty folder may become one
    (tmp_path / "notes" / "note.txt").write_text("mine")
    for path in (tmp_path / "notes", tmp_path / "notes" / "note.txt"):
        with pytest.raises(FileExistsError, match="exists already: choose another name"):
            check_output(path, force=False)
        with pytest.raises(FileExistsError, match="is not an index directory and is not replaced"):
            check_output(path, force=True)
    for path in ("m.index", "deep/m.index"):
        with pytest.raises(NotADirectoryError, match=r"m\.index: .*note\.txt is a file, wanted a folder"):
            check_output(tmp_path / "notes" / "note.txt" / path, force=True)


def test_kinds_by_size_and_by_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(structures, "memory_in_use", lambda: 1000)
    assert choose_kind(None, AUTOMATON_TOKENS, None) == "suffix_automaton"
    assert choose_kind(None, AUTOMATON_TOKENS + 1, None) == "suffix_array"
    assert choose_kind("suffix_automaton", AUTOMATON_TOKENS + 1, None) == "suffix_automaton"
    assert choose_kind("suffix_array", 1, None) == "suffix_array"
    automaton, array = 1000 + 145 * 10, 1000 + 24 * 10
    for limit, kind in ((automaton, "suffix_automaton"), (automaton - 1, "suffix_array"), (array, "suffix_array")):
        assert choose_kind(None, 10, limit) == kind
    for limit, kind in ((array - 1, None), (automaton - 1, "suffix_automaton"), (array - 1, "suffix_array")):
        with pytest.raises(ValueError, match=r"of 10 tokens takes .* to build, the limit is"):
            choose_kind(kind, 10, limit)


def test_a_merge_keeps_to_its_limit(tmp_path):
    path = make(tmp_path / "a.index", [[1]])
    with pytest.raises(ValueError, match="the limit is 1 kB"):
        merge_indexes([path], tmp_path / "m.index", memory_limit=1000)
    merge_indexes([path], tmp_path / "m.index", memory_limit=memory_in_use() + 100_000_000)


def test_folders_of_indexes(tmp_path):
    """In order of number, hidden ones left out, none twice; an index with a folder in it is one."""
    for name in ("part-10", "part-2", "part-1", ".hidden", "b", "a"):
        make(tmp_path / "all" / name, [[1]])
    names = [folder.name for folder in index_folders(tmp_path / "all")]
    assert names == ["a", "b", "part-1", "part-2", "part-10"]
    assert merge_indexes([str(tmp_path / "all")], tmp_path / "m.index")["documents"] == 1
    (tmp_path / "again").symlink_to(tmp_path / "all" / "b")
    assert [path.name for path in index_folders(tmp_path / "again", tmp_path / "all", tmp_path / "all" / "a")] == [
        "again", "a", "part-1", "part-2", "part-10",
    ]  # fmt: skip
    (tmp_path / "all" / "a" / "inner").mkdir()
    assert index_folders(tmp_path / "all" / "a") == [tmp_path / "all" / "a"]
    assert index_folders(tmp_path / "all" / "a" / "inner") == [tmp_path / "all" / "a" / "inner"]
    for left in ("part-3.work", "part-3.tmp-17", "part-3.old-2"):
        (tmp_path / "all" / left).mkdir()
        with pytest.raises(IndexFormatError, match=f"{left}: left behind by a build"):
            index_folders(tmp_path / "all")
        (tmp_path / "all" / left).rmdir()
