"""The model's own successor table: what the model says of each token, written whole or not at all, and drafted from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from serving import ServerProcess
from test_index_directory import edit_manifest
from test_index_directory import write as write_corpus
from tiny_models import VOCAB_SIZE, save_with_tokenizer, tiny_llama
from transformers import AutoTokenizer

from redraft.cli import main
from redraft.client.draft_client import DraftClient
from redraft.index_builders.tokenizers import Tokenizer
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.index_directory import open_index
from redraft.retrieval.index_files import read_manifest
from redraft.retrieval.index_verification import verify_index
from redraft.retrieval.successor_table import open_successors

torch.set_num_threads(1)
CONFIG = DraftConfig(vocab_size=VOCAB_SIZE)


def build(model_folder, output, *more) -> int:
    return main(["index", "build-successors", "--model", str(model_folder), "-o", str(output), *more])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return save_with_tokenizer(tiny_llama(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def built(model_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "tiny.successors"
    assert build(model_folder, path, "--batch", "24") == 0
    return path


@pytest.fixture
def table(built, tmp_path):
    """A copy that may be damaged."""
    path = tmp_path / "tiny.successors"
    path.mkdir()
    for file in built.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def naive_table(context: list[int]) -> tuple[list[list[int]], list[list[float]]]:
    """The specification: one forward for each token, all probabilities sorted."""
    ids, probs = [], []
    for token in range(VOCAB_SIZE):
        with torch.no_grad():
            row = tiny_llama()(torch.tensor([[*context, token]])).logits[0, -1].softmax(-1).tolist()
        best = sorted(range(VOCAB_SIZE), key=lambda successor: (-row[successor], successor))[:8]
        ids.append(best)
        probs.append([row[successor] for successor in best])
    return ids, probs


def test_the_table_is_what_the_model_says_after_a_comma(built, model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    table = open_successors(built)
    context = table.manifest["options"]["context"]
    assert context == tokenizer(",")["input_ids"] and tokenizer.decode(context) == ","
    ids, probs = naive_table(context)
    assert table.ids.dtype == np.int32 and table.probs.dtype == np.float32
    assert table.ids.tolist() == ids
    assert np.allclose(table.probs, probs, rtol=2e-3)  # stored with 11 bits


def test_the_manifest_tells_whose_table_it_is(built, model_folder):
    manifest = read_manifest(built)
    tokenizer = Tokenizer.from_transformers(AutoTokenizer.from_pretrained(model_folder))
    assert (manifest["kind"], manifest["rows"]) == ("successors", VOCAB_SIZE)
    assert manifest["tokenizer"]["fingerprint"] == tokenizer.fingerprint
    options = manifest["options"]
    assert (options["model"], options["dtype"]) == (model_folder.name, "float32")
    assert len(options["weights_sha256"]) == 64
    assert sorted(file.name for file in built.iterdir()) == ["ids.npy", "manifest.json", "probs.npy"]


def test_two_builds_are_the_same_bytes_and_other_weights_another_digest(built, model_folder, tmp_path):
    assert build(model_folder, tmp_path / "again", "--batch", "64") == 0
    for name in ("ids.npy", "probs.npy"):
        assert (tmp_path / "again" / name).read_bytes() == (built / name).read_bytes()
    assert read_manifest(tmp_path / "again")["options"] == read_manifest(built)["options"]
    other = save_with_tokenizer(tiny_llama(seed=1), tmp_path / "other")
    assert build(other, tmp_path / "other.successors") == 0
    digests = [read_manifest(path)["options"]["weights_sha256"] for path in (built, tmp_path / "other.successors")]
    assert digests[0] != digests[1]


# --- Drafting from it ------------------------------------------------------------------------------------------------


def first_tokens(tree) -> list[int]:
    return tree.tokens[tree.parents == -1].tolist()


def test_an_empty_session_proposes_what_the_table_says(built):
    table = open_successors(built)
    with Drafter(CONFIG, successors=built) as drafter:
        for token in range(VOCAB_SIZE):
            with drafter.open([token]) as session:
                tree = session.draft(max_nodes=24).check(vocab_size=VOCAB_SIZE)
            row = table.ids[token].tolist()
            roots = first_tokens(tree)
            assert roots and set(roots) <= set(row)
            assert row[0] in roots
            assert set(tree.sources.tolist()) == {Source.RECYCLING}
            for node, parent in enumerate(tree.parents.tolist()):  # and below the first level, each row is its parent's
                if parent >= 0:
                    assert tree.tokens[node] in table.ids[tree.tokens[parent]]
            drafter.forget("default")


def test_without_a_table_an_empty_session_proposes_nothing():
    with Drafter(CONFIG) as drafter, drafter.open([5]) as session:
        assert len(session.draft()) == 0


def test_what_the_target_said_in_this_session_comes_before_the_table(built):
    table = open_successors(built)
    with Drafter(CONFIG, successors=built) as drafter, drafter.open([5]) as session:
        said = next(token for token in range(VOCAB_SIZE) if token not in table.ids[9])
        session.commit([9], Candidates.checked([9], [5], [[said]], [[0.99]]))
        tree = session.draft(max_nodes=16)
        roots = tree.parents == -1
        assert tree.tokens[roots][np.argmax(tree.probs[roots])] == said


def test_a_table_is_loaded_under_open_sessions(built):
    with Drafter(CONFIG) as drafter, drafter.open([5]) as session:
        assert len(session.draft()) == 0
        drafter.load_successors(built)
        assert len(session.draft()) > 0
        session.commit([7])
        assert set(first_tokens(session.draft())) <= set(open_successors(built).ids[7].tolist())


def test_a_table_stays_when_indexes_come_and_go(built, tmp_path):
    table = open_successors(built)
    fingerprint = table.manifest["tokenizer"]["fingerprint"]
    tokenizer = {"fingerprint": fingerprint, "name": "toy", "vocab_size": VOCAB_SIZE}
    corpus = write_corpus(tmp_path / "my.index", tokenizer=tokenizer)
    with Drafter(CONFIG, indexes=[corpus], successors=built) as drafter:
        with drafter.open([1, 2]) as session:
            sources = set(session.draft(max_nodes=32).sources.tolist())
        assert sources >= {Source.CORPUS, Source.RECYCLING}
        drafter.unload_index(corpus)
        drafter.forget("default")
        with drafter.open([60]) as session:
            assert len(session.draft()) > 0


def test_recycling_switched_off_switches_the_table_off(built):
    config = DraftConfig(vocab_size=VOCAB_SIZE, disabled=frozenset({"recycling"}))
    with Drafter(config, successors=built) as drafter, drafter.open([5]) as session:
        assert len(session.draft()) == 0


def test_the_server_drafts_from_it(built, tmp_path):
    listen = f"unix:{tmp_path}/s"
    more = ("--vocab-size", str(VOCAB_SIZE), "--successors", str(built))
    with ServerProcess(listen, *more) as server:
        assert "successor table" in server.output
        with Drafter(CONFIG, successors=built) as local, local.open([5]) as session:
            wanted = session.draft(max_nodes=16)
        with DraftClient(listen, CONFIG, require=True) as client, client.open([5]) as session:
            got = session.draft(max_nodes=16)
    assert got.tokens.tolist() == wanted.tokens.tolist()


def test_generate_drafts_from_it_and_writes_the_same(built, model_folder, capsys):
    options = ["generate", "--model", str(model_folder), "xyz", "--max-new-tokens", "24"]
    assert main([*options, "--plain"]) == 0
    plain = capsys.readouterr().out
    assert main([*options, "--successors", str(built)]) == 0
    assert capsys.readouterr().out == plain
    with pytest.raises(SystemExit) as ended:
        main([*options, "--plain", "--successors", str(built)])
    assert ended.value.code == 2 and "--successors" in capsys.readouterr().err


# --- What can be wrong -----------------------------------------------------------------------------------------------


def test_another_vocabulary_or_tokenizer_is_refused(built):
    for config, message in (
        (DraftConfig(vocab_size=VOCAB_SIZE - 1), f"model of {VOCAB_SIZE} token ids, wanted the vocabulary size 63"),
        (DraftConfig(vocab_size=VOCAB_SIZE + 1), f"model of {VOCAB_SIZE} token ids, wanted the vocabulary size 65"),
        (DraftConfig(vocab_size=VOCAB_SIZE, tokenizer_fingerprint="cd34"), "wanted fingerprint 'cd34'"),
    ):
        with pytest.raises(IndexFormatError, match=message):
            Drafter(config, successors=built)
    with Drafter() as drafter:  # any vocabulary
        drafter.load_successors(built)


def test_an_index_and_a_table_of_two_tokenizers_are_refused(built, tmp_path):
    corpus = write_corpus(tmp_path / "my.index")
    with Drafter(CONFIG, successors=built) as drafter, pytest.raises(IndexFormatError, match="beside it"):
        drafter.load_index(corpus)
    with Drafter(CONFIG, indexes=[corpus]) as drafter, pytest.raises(IndexFormatError, match="beside it"):
        drafter.load_successors(built)


def test_a_table_is_no_index_and_an_index_no_table(built, tmp_path):
    with pytest.raises(IndexFormatError, match="successor table, wanted an index of a corpus"):
        open_index(built)
    with pytest.raises(IndexFormatError, match="kind 'suffix_automaton', wanted 'successors'"):
        open_successors(write_corpus(tmp_path / "my.index"))
    with pytest.raises(IndexFormatError, match="missing"):
        open_successors(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["ids.npy", "probs.npy"])
def test_damaged_files(table, name):
    file = table / name
    content = file.read_bytes()
    assert verify_index(table)["rows"] == VOCAB_SIZE

    file.write_bytes(content[:-4])
    with pytest.raises(IndexFormatError, match=f"{name}: {len(content) - 4} bytes, the manifest wants {len(content)}"):
        open_successors(table)

    flipped = bytearray(content)
    flipped[-4] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(IndexFormatError, match=f"{name}: sha256"):
        verify_index(table)

    file.unlink()
    with pytest.raises(IndexFormatError, match=f"{name}: missing"):
        open_successors(table)


def test_numbers_that_cannot_be_are_refused(table):
    for name, value, message in (
        ("ids.npy", VOCAB_SIZE, "outside the vocabulary"),
        ("ids.npy", -1, "outside the vocabulary"),
        ("probs.npy", 1.5, "no probabilities"),
        ("probs.npy", np.nan, "no probabilities"),
    ):
        array = np.load(table / name)
        good = array.copy()
        array[3, 2] = value
        np.save(table / name, array)
        with pytest.raises(IndexFormatError, match=message):
            open_successors(table)
        np.save(table / name, good)
    edit_manifest(table, rows=VOCAB_SIZE + 1)
    with pytest.raises(IndexFormatError, match="64 rows, wanted 65"):
        open_successors(table)


# --- The command -----------------------------------------------------------------------------------------------------


def test_inspect_and_verify(built, capsys):
    assert main(["index", "inspect", str(built)]) == 0
    out = capsys.readouterr().out
    assert "successors of 64 tokens" in out and "52.0 bytes per token" in out and "dtype float32" in out
    assert main(["index", "inspect", "--json", str(built)]) == 0
    assert json.loads(capsys.readouterr().out) == read_manifest(built)
    assert main(["index", "verify", str(built)]) == 0
    assert "intact, successors of 64 tokens" in capsys.readouterr().out


def test_what_is_there_is_replaced_only_when_told_to(table, model_folder, capsys):
    before = (table / "manifest.json").read_bytes()
    assert build(model_folder, table) == 1
    assert "exists already" in capsys.readouterr().err
    assert (table / "manifest.json").read_bytes() == before
    assert build(model_folder, table, "--force") == 0
    assert verify_index(table)["rows"] == VOCAB_SIZE
    assert [path.name for path in table.parent.iterdir()] == [table.name]


def test_interrupted_it_leaves_what_was_there(table, model_folder):
    """Ctrl-C in the middle of the vocabulary, to a process of its own."""
    slow = (
        "import sys, time\n"
        "from redraft.decoding import target_model\n"
        "verify = target_model.TargetModel.verify\n"
        "def slowly(*arguments):\n"
        "    time.sleep(0.5)\n"
        "    return verify(*arguments)\n"
        "target_model.TargetModel.verify = slowly\n"
        "from redraft.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    before = {file.name: file.read_bytes() for file in table.iterdir()}
    words = ["index", "build-successors", "--model", str(model_folder), "-o", str(table), "--force", "--batch", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", slow, *words], stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    try:
        deadline = time.monotonic() + 60
        while not list(table.parent.glob("*.tmp-*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted" in err
    assert [path.name for path in table.parent.iterdir()] == [table.name]
    assert {file.name: file.read_bytes() for file in table.iterdir()} == before
