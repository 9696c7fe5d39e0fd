"""Indexes that come, change and go while sessions draft: in process, and behind a real server."""

from __future__ import annotations

import gc
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from scripted_drafter import VOCAB_SIZE
from serving import ServerProcess, until
from test_client import PATIENT
from test_corpus_source import CONFIG, KINDS, V, check_tree, many_documents, some_context, walk, write

from redraft.client.draft_client import DraftClient
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.evidence import MAX_CORPORA
from redraft.retrieval.knowledge import CURSOR


def mapped(path, process: int | str = "self") -> int:
    """How many mappings of files under `path` a process has; those of a version that was replaced count, too."""
    return sum(str(path) in line for line in Path(f"/proc/{process}/maps").read_text().splitlines())


# --- Sessions that live across a change -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_sessions_move_at_their_next_step(seed, tmp_path):
    """Indexes are loaded, replaced and unloaded between steps; cursors and trees are those of a session opened now."""
    rng = random.Random(seed)
    names, opened = [str(tmp_path / name) for name in "abc"], {}
    with Drafter(CONFIG) as drafter:
        text = [0, V - 1]
        session = drafter.open(text)
        for _ in range(16):
            name = rng.choice(names)
            if name in opened and rng.random() < 0.4:
                drafter.unload_index(name)
                del opened[name]
            else:
                documents = many_documents(rng)
                drafter.load_index(write(name, documents, rng.choice(KINDS), force=True))
                opened[name] = documents
            assert drafter.index_paths == list(opened)
            if rng.random() < 0.5:  # the next step is a commit, a truncation or a draft
                tokens = some_context(rng, rng.choice([*opened.values(), [[0]]]))
                session.commit(tokens)
                text = text + tokens
            elif rng.random() < 0.3:
                text = text[: rng.randint(1, len(text))]
                session.truncate(len(text))
            tree = session.draft(max_nodes=256)
            check_tree(tree, list(opened.values()), text, complete=True)
            fresh = drafter.open(text)
            matches = [at._state.cursors[0].reshape(-1, CURSOR)[: len(opened), :4] for at in (session, fresh)]
            assert np.array_equal(*matches)
            assert np.array_equal(tree.tokens, fresh.draft(max_nodes=256).tokens)
            fresh.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_old_version_is_unmapped_when_nobody_uses_it(kind, tmp_path):
    path, other = tmp_path / "i", tmp_path / "other"
    write(path, [[1, 2, 3]], kind)
    write(other, [[1, 4]], kind)
    drafter = Drafter(CONFIG, indexes=[path])
    files = mapped(path)
    assert files >= 4
    session, idle = drafter.open([1]), drafter.open([1])
    tree = session.draft()
    write(path, [[1, 3]], kind, force=True)
    drafter.load_index(path)
    assert mapped(path) == 2 * files  # both sessions stand in the old version
    assert session.draft().tokens.tolist() == [3]
    idle.commit([1])
    gc.collect()
    assert mapped(path) == 2 * files  # and the tree could still be asked for its provenance
    del tree
    gc.collect()
    assert mapped(path) == files
    drafter.load_index(other)
    drafter.unload_index(path)
    assert session.draft().tokens.tolist() == [4]
    idle.close()
    gc.collect()
    assert mapped(path) == 0 and mapped(other) == files
    drafter.close()
    gc.collect()
    assert mapped(other) == 0


def test_threads_draft_while_indexes_change(tmp_path):
    """Every tree is one that the old or the new version gives."""
    versions = [[[0, 1, 2, 3, 4]], [[0, 5, 6, 7, 8]]]
    path = write(tmp_path / "i", versions[0], "suffix_automaton")
    stop, wrong, drafts = threading.Event(), [], [0]

    def draft(session) -> None:
        while not stop.is_set():
            tokens = session.draft(max_nodes=4).tokens.tolist()
            drafts[0] += 1
            if tokens not in [document[1 : 1 + len(tokens)] for (document,) in versions]:
                wrong.append(tokens)
            session.commit([0])

    with Drafter(CONFIG, indexes=[path]) as drafter:
        threads = [threading.Thread(target=draft, args=(drafter.open([0]),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(20):
            write(path, versions[turn % 2], KINDS[turn // 2 % 2], force=True)
            drafter.load_index(path)
            if turn % 5 == 0:
                drafter.unload_index(path)
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong and drafts[0] > 20
    gc.collect()
    assert mapped(path) == 0


# --- What is refused --------------------------------------------------------------------------------------------------


def test_an_index_of_another_tokenizer_or_vocabulary_is_refused(tmp_path):
    path = write(tmp_path / "i", [[1, V - 1]], "suffix_array")
    other = write(tmp_path / "other", [[1, 2]], "suffix_array", fingerprint="cd34")
    unknown = write(tmp_path / "unknown", [[1, 2]], "suffix_automaton", fingerprint=None)
    with pytest.raises(IndexFormatError, match="wanted ids below the vocabulary size 49"):
        Drafter(DraftConfig(vocab_size=V - 1), indexes=[path])
    with pytest.raises(IndexFormatError, match="wanted fingerprint 'cd34'"):
        Drafter(DraftConfig(tokenizer_fingerprint="cd34"), indexes=[path])
    with Drafter(DraftConfig(), indexes=[path, unknown]) as drafter:
        with pytest.raises(IndexFormatError, match="beside it"):  # nobody said which is right, but both cannot be
            drafter.load_index(other)
        assert drafter.index_paths == [str(path), str(unknown)]
        write(path, [[1, 2]], "suffix_array", fingerprint="cd34", force=True)
        drafter.load_index(path)  # a new version may have a new tokenizer
        drafter.load_index(other)


def test_a_failed_load_changes_nothing(tmp_path):
    path = write(tmp_path / "i", [[1, 2, 3]], "suffix_automaton")
    with Drafter(CONFIG, indexes=[path]) as drafter:
        session = drafter.open([1])
        shutil.rmtree(path)
        with pytest.raises(IndexFormatError, match="missing"):
            drafter.load_index(path)
        assert drafter.index_paths == [str(path)] and session.draft().tokens.tolist() == [2, 3]
        with pytest.raises(KeyError, match="no index x is open"):
            drafter.unload_index("x")


# --- Directories of shards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_of_shards_opens_as_one(kind, tmp_path):
    rng = random.Random(4)
    corpora = [many_documents(rng) for _ in range(MAX_CORPORA)]
    for i, documents in enumerate(corpora):
        write(tmp_path / "shards" / f"part-{i + 3}.index", documents, kind)
    shards = str(tmp_path / "shards")
    with Drafter(CONFIG, indexes=[shards]) as drafter:
        assert drafter.index_paths == [shards]
        assert [index.path.name for index in drafter.indexes.indexes] == [
            f"part-{i + 3}.index"
            for i in range(MAX_CORPORA)  # part-10 after part-9
        ]
        walk(drafter, rng, corpora)
        shutil.rmtree(tmp_path / "shards" / "part-3.index")
        drafter.load_index(shards)
        walk(drafter, rng, corpora[1:])
        drafter.load_index(write(tmp_path / "one", [[1, 2]], kind))
        with pytest.raises(ValueError, match=f"1 more with {MAX_CORPORA} open"):
            drafter.load_index(write(tmp_path / "two", [[1, 2]], kind))
        drafter.unload_index(shards)
        walk(drafter, rng, [[[1, 2]]])


def test_what_is_wrong_with_a_directory_of_shards(tmp_path):
    shards = tmp_path / "shards"
    for i in range(2):
        write(shards / f"part-{i}.index", [[1, 2]], "suffix_automaton")
    (shards / ".snapshot").mkdir()  # hidden folders are no shards
    (shards / "notes.txt").write_text("neither are files")
    Drafter(CONFIG, indexes=[shards]).close()

    def refused(pattern: str) -> None:
        with pytest.raises((IndexFormatError, ValueError), match=pattern):
            Drafter(CONFIG, indexes=[shards])

    for name in ("part-2.index.work", "part-2.index.tmp-17", "part-1.index.old-4"):
        (shards / name).mkdir()
        refused(f"{name}: left behind by a build")
        (shards / name).rmdir()
    (shards / "part-2.index").mkdir()
    refused(r"part-2\.index: a directory without a manifest")
    (shards / "part-2.index").rmdir()
    write(shards / "part-2.index", [[1, 2]], "suffix_array", fingerprint="cd34")
    refused("beside it .*part-")
    shutil.rmtree(shards / "part-2.index")
    for i in range(MAX_CORPORA):
        write(shards / f"part-1{i}.index", [[1, 2]], "suffix_automaton")
    refused(f"{MAX_CORPORA + 2} more with 0 open, at most {MAX_CORPORA} indexes")
    shutil.rmtree(shards)
    shards.mkdir()
    refused("or a directory of such")


# --- Behind a server --------------------------------------------------------------------------------------------------


def test_a_server_swaps_indexes_under_its_sessions(tmp_path):
    """One process serves: a new version at the same path, another path, shards; the old is unmapped, nothing compiled."""
    old, new = [[0, 1, 2, 3, 4]], [[0, 5, 6, 7, 8]]
    path, shards = tmp_path / "i", tmp_path / "shards"
    write(path, old, "suffix_automaton")
    write(shards / "part-1", new, "suffix_array")
    write(shards / "part-2", [[3, 9, 9, 9]], "suffix_automaton")
    listen = f"unix:{tmp_path}/s"
    with ServerProcess(listen, watch=True) as server, DraftClient(listen, **PATIENT) as client:
        sessions = [client.open([9, 0]) for _ in range(3)]
        stop, trees, bad = threading.Event(), [], []

        def draft() -> None:
            """Each session writes what its index says, again and again."""
            while not stop.is_set():
                for session, tree in zip(sessions, client.step([(session, []) for session in sessions])):
                    trees.append(tree)
                    try:
                        tree.check(vocab_size=VOCAB_SIZE)
                    except ValueError as error:
                        bad.append(error)
                    session.commit(tree.best_path()[:2])
                    session.truncate(2)

        def corpus_roots() -> set[int]:
            """What the indexes name as the next token, in the latest trees of all sessions."""
            return {
                int(tree.tokens[node])
                for tree in trees[-3:]
                for node in np.flatnonzero((tree.sources == Source.CORPUS) & (tree.parents < 0))
            }

        thread = threading.Thread(target=draft)
        thread.start()
        try:
            client.load_index(path)
            until(lambda: 1 in corpus_roots())
            assert mapped(path, server.process.pid) == 4
            write(path, new, "suffix_array", force=True)
            client.load_index(path)
            until(lambda: 5 in corpus_roots())
            until(lambda: mapped(path, server.process.pid) == 7)  # the files of an array
            client.load_index(shards)
            client.unload_index(path)
            until(lambda: mapped(path, server.process.pid) == 0)
            assert client.index_paths == [str(shards)]
            client.unload_index(shards)
            until(lambda: not corpus_roots())
        finally:
            stop.set()
            thread.join()
        assert not bad and not client.stats.fallbacks
        assert server.terminate() == 0
    assert "compiled after ready: none\n" in server.lines, server.output


def test_serve_opens_a_directory_of_shards(tmp_path):
    for i in range(3):
        write(tmp_path / "shards" / str(i), [[i, 10 + i]], KINDS[i % 2])
    listen = f"unix:{tmp_path}/s"
    arguments = ("--index", str(tmp_path / "shards"), "--vocab-size", str(V))
    with ServerProcess(listen, *arguments) as server, DraftClient(listen, CONFIG, **PATIENT) as client:
        assert client.index_paths == [str(tmp_path / "shards")]
        for i in range(3):
            assert client.open([i]).draft().tokens.tolist() == [10 + i]
        assert server.terminate() == 0
