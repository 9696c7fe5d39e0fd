"""`redraft index inspect`, `verify` and `stats`: of one index, of several, of a directory of shards."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from test_index_builders import lines, make_tokenizer, write
from test_index_command import redraft

from redraft.index_builders.stats import MATCH_LENGTHS
from redraft.retrieval.index_directory import open_index, write_array_index

KINDS = ("suffix_automaton", "suffix_array", "suffix_array")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder with whole.index and three shards of it, of both kinds, in shards/; tokenizer)."""
    folder = tmp_path_factory.mktemp("reports")
    tokenizer = make_tokenizer(folder / "tokenizer.json")
    rng = random.Random(4)
    words = [f"word{i}" for i in range(12)]
    passages = [" ".join(rng.choices(words, k=9)) for _ in range(6)]
    texts = [" ".join(rng.choices(passages + words, k=rng.randint(1, 5))) for _ in range(60)]
    corpus = write(folder / "corpus.jsonl", lines(*({"text": text} for text in dict.fromkeys(texts))))

    from redraft import cli

    build = ["index", "build", str(corpus), "--tokenizer", str(tokenizer), "--quiet"]
    assert cli.main([*build, "-o", str(folder / "whole.index")]) == 0
    for number, kind in enumerate(KINDS, 1):
        output = str(folder / "shards" / f"{number}.index")
        assert cli.main([*build, "--kind", kind, "--shard", f"{number}/3", "-o", output]) == 0
    return folder, tokenizer


def shares(documents: list[list[int]]) -> dict:
    """What `stats` measures, in plain Python: every document against all others."""
    found = {
        "documents": len(documents),
        "positions": sum(len(d) - 1 for d in documents),
        "matched": {},
        "continued": {},
    }
    for length in MATCH_LENGTHS:
        matched = continued = 0
        for own, document in enumerate(documents):
            others = [other for number, other in enumerate(documents) if number != own]
            for end in range(length, len(document)):
                for long in (False, True):
                    wanted = document[end - length : end + long]
                    hit = any(
                        other[i : i + len(wanted)] == wanted
                        for other in others
                        for i in range(len(other) - len(wanted) + 1)
                    )
                    matched, continued = matched + (hit and not long), continued + (hit and long)
        found["matched"][str(length)] = matched / found["positions"]
        found["continued"][str(length)] = continued / max(1, matched)
    return found


def test_stats_of_shards_are_those_of_the_whole(made, capsys):
    """Every document is sampled; the shards are of both kinds."""
    folder, _ = made
    with open_index(folder / "whole.index") as index:
        documents = [document.tolist() for document in index.documents()]
    everything = ("--sample", "1G", "--json")
    whole = json.loads(redraft(capsys, "index", "stats", folder / "whole.index", *everything)[1])
    assert whole["matches"] == shares(documents)
    assert whole["matches"]["matched"]["8"] > 0.1, "the corpus repeats itself"
    for given in ([folder / "shards"], sorted((folder / "shards").iterdir())):
        parts = json.loads(redraft(capsys, "index", "stats", *given, *everything)[1])
        assert parts["matches"] == whole["matches"]
        assert (parts["documents"], parts["tokens"]) == (whole["documents"], whole["tokens"])
        assert sum(part["tokens"] for part in parts["parts"]) == whole["tokens"] and len(parts["parts"]) == 3


def test_stats_measures_a_text_on_all_shards(made, capsys):
    folder, tokenizer = made
    text = write(folder / "held_out.txt", (folder / "corpus.jsonl").read_text().splitlines()[1][:60])
    words = ("--on", text, "--tokenizer", tokenizer, "--json")
    alone = json.loads(redraft(capsys, "index", "stats", folder / "whole.index", *words)[1])
    assert json.loads(redraft(capsys, "index", "stats", folder / "shards", *words)[1])["matches"] == alone["matches"]
    code, out, _ = redraft(capsys, "index", "stats", folder / "shards", "--on", text, "--tokenizer", tokenizer)
    assert code == 0 and out.count(".index: ") == 3 and "3 indexes: " in out
    assert redraft(capsys, "index", "stats", folder / "shards", "--on", text)[0] == 2


def test_stats_of_nothing_is_no_table_of_zeros(made, tmp_path, capsys):
    folder, tokenizer = made
    stats = ("index", "stats", folder / "whole.index")
    empty = write(tmp_path / "empty.jsonl", "")
    for more in (("--sample", "0"), ("--on", empty, "--tokenizer", tokenizer, "--json")):
        code, out, err = redraft(capsys, *stats, *more)
        assert (code, out) == (1, "") and "nothing to measure on" in err and "0 documents" in err


def test_inspect_says_what_each_holds_and_all(made, capsys):
    folder, _ = made
    with open_index(folder / "whole.index") as index:
        all_of_them = f"{index.manifest['documents']:,} documents, {len(index.tokens):,} tokens"
    code, out, _ = redraft(capsys, "index", "inspect", folder / "shards")
    assert code == 0 and out.startswith(f"3 indexes: {all_of_them}\n")
    assert [line.split(": ")[0].strip() for line in out.splitlines()[-3:]] == [
        str(folder / "shards" / f"{i}.index") for i in (1, 2, 3)
    ]
    said = json.loads(redraft(capsys, "index", "inspect", folder / "shards", "--json")[1])
    assert said["indexes"] == 3 and [part["kind"] for part in said["parts"]] == list(KINDS)
    code, out, _ = redraft(capsys, "index", "inspect", folder / "whole.index", folder / "shards")
    assert out.startswith("4 indexes: ")


def test_different_tokenizers_are_named(made, tmp_path, capsys):
    folder, _ = made
    other = {"tokenizer": {"fingerprint": "cd34", "name": "other", "vocab_size": 9}, "options": {}, "sources": []}
    write_array_index(tmp_path / "other.index", np.arange(4, dtype=np.int32), np.array([4]), **other)
    code, out, _ = redraft(capsys, "index", "inspect", folder / "whole.index", tmp_path / "other.index")
    assert code == 0 and "cannot be opened together" in out and "cd34" in out
    code, _, err = redraft(capsys, "index", "stats", folder / "whole.index", tmp_path / "other.index")
    assert code == 1 and "do not mean the same" in err


def test_one_named_twice_is_one(made, capsys):
    """Otherwise every text of it would stand in another index, too."""
    folder, _ = made
    everything = ("--sample", "1G", "--json")
    once = redraft(capsys, "index", "stats", folder / "shards", *everything)[1]
    assert redraft(capsys, "index", "stats", folder / "shards", folder / "shards" / "2.index", *everything)[1] == once
    code, out, _ = redraft(capsys, "index", "verify", folder / "whole.index", folder / "shards" / ".." / "whole.index")
    assert code == 0 and out.count("intact") == 1


def test_merge_takes_a_directory_of_shards(made, tmp_path, capsys):
    folder, _ = made
    for name, given in (("one", [folder / "shards"]), ("each", sorted((folder / "shards").iterdir()))):
        assert redraft(capsys, "index", "merge", *given, "-o", tmp_path / name, "--kind", "suffix_array")[0] == 0
    paths = tmp_path / "one", tmp_path / "each", folder / "whole.index"
    with open_index(paths[0]) as one, open_index(paths[1]) as each, open_index(paths[2]) as whole:
        texts = [[document.tolist() for document in index.documents()] for index in (one, whole)]
        assert texts[0] == texts[1]
        assert one.manifest["files"] == each.manifest["files"]


def test_verify_goes_on_after_a_damaged_shard(made, capsys):
    folder, _ = made
    code, out, _ = redraft(capsys, "index", "verify", folder / "shards")
    assert code == 0 and out.count("intact, ") == 3 and "3 indexes, 0 damaged" in out
    file = folder / "shards" / "2.index" / "suffixes.npy"
    sound = file.read_bytes()
    file.write_bytes(sound[:-6] + b"\x55" + sound[-5:])
    try:
        code, out, _ = redraft(capsys, "index", "verify", folder / "shards")
    finally:
        file.write_bytes(sound)
    assert code == 1 and "DAMAGED" in out and "2.index" in out and "sha256" in out
    assert out.count("intact, ") == 2 and "3 indexes, 1 damaged" in out


def test_a_directory_that_holds_something_else(tmp_path, capsys):
    for action in ("inspect", "verify", "stats", "merge"):
        output = ("-o", tmp_path / "new.index") if action == "merge" else ()
        code, _, err = redraft(capsys, "index", action, tmp_path, *output)
        assert code == 1 and "not an index" in err
