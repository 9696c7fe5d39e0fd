"""`redraft index` as a user meets it: real processes, real files, real signals."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_index_builders import lines, make_tokenizer, write

from redraft import cli
from redraft.index_builders.progress import memory_in_use
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.index_directory import open_index
from redraft.retrieval.index_verification import verify_index


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    return str(make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


def redraft(capsys, *words) -> tuple[int, str, str]:
    """Run the command in this process: (exit code, stdout, stderr)."""
    capsys.readouterr()
    try:
        code = cli.main([str(word) for word in words])
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    return code, out, err


def start(*words, part_tokens: int = 3000, **options) -> subprocess.Popen:
    """Run the command in a process of its own, with parts small enough for a build of a second to have some."""
    code = (
        "import sys\nfrom redraft.index_builders import tokenizing\nfrom redraft import cli\n"
        f"tokenizing._PART_TOKENS = {part_tokens}\ntokenizing._BATCH_CHARACTERS = {2 * part_tokens}\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)


def finish(process: subprocess.Popen, seconds: float = 60) -> tuple[int, str]:
    _, err = process.communicate(timeout=seconds)
    return process.returncode, err


def content(index: Path) -> dict:
    """All of an index that must be the same when it is built again."""
    manifest = json.loads((index / "manifest.json").read_text())
    manifest.pop("created")
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in index.iterdir()
        if path.name != "manifest.json"
    }
    return {"manifest": manifest, "files": files}


def documents(index: Path) -> list[list[int]]:
    with open_index(index) as opened:
        return [document.tolist() for document in opened.documents()]


@pytest.fixture
def corpus(tmp_path) -> Path:
    """80 records that repeat one another in part, and one exact copy."""
    rng = random.Random(1)
    words = [f"word{i}" for i in range(60)]
    records = [{"text": " ".join(rng.choices(words, k=rng.randint(1, 400)))} for _ in range(80)]
    return write(tmp_path / "corpus.jsonl", lines(*records, records[3]))


def test_build_inspect_verify(tmp_path, capsys, corpus, tokenizer):
    index = tmp_path / "my.index"
    code, _, err = redraft(capsys, "index", "build", corpus, "--tokenizer", tokenizer, "-o", index)
    assert code == 0, err
    assert "80 documents" in err and "1 exact duplicates" in err and "bytes per token" in err
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("my.index")] == ["my.index"]

    from redraft.index_builders.tokenizers import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()][:80]
    assert documents(index) == [loaded.encode(text).tolist() for text in texts]
    with open_index(index, tokenizer_fingerprint=loaded.fingerprint, vocab_size=loaded.vocab_size) as opened:
        assert opened.manifest["sources"][0]["documents"] == 80
    with pytest.raises(IndexFormatError, match="fingerprint"):
        open_index(index, tokenizer_fingerprint="0" * 64)

    code, out, _ = redraft(capsys, "index", "inspect", index)
    assert code == 0 and "80 documents" in out and loaded.fingerprint in out and str(corpus) in out
    code, out, _ = redraft(capsys, "index", "inspect", index, "--json")
    assert json.loads(out) == json.loads((index / "manifest.json").read_text())
    code, out, _ = redraft(capsys, "index", "verify", index)
    assert code == 0 and "intact" in out


def test_verify_finds_a_flipped_byte(tmp_path, capsys, corpus, tokenizer):
    index = tmp_path / "my.index"
    assert redraft(capsys, "index", "build", corpus, "--tokenizer", tokenizer, "-o", index, "--quiet") == (0, "", "")
    with open(index / "tokens.npy", "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x01")
    code, _, err = redraft(capsys, "index", "verify", index)
    assert code == 1 and "tokens.npy" in err and "sha256" in err


def test_output_that_exists_needs_force(tmp_path, capsys, corpus, tokenizer):
    index = tmp_path / "my.index"
    build = ("index", "build", corpus, "--tokenizer", tokenizer, "-o", index)
    assert redraft(capsys, *build, "--max-tokens", "100")[0] == 0
    old = content(index)
    code, _, err = redraft(capsys, *build)
    assert code == 1 and "exists already" in err and "--force" in err
    assert content(index) == old and old["manifest"]["tokens"] == 100
    assert redraft(capsys, *build, "--force")[0] == 0
    assert content(index)["manifest"]["documents"] == 80
    other = write(tmp_path / "precious/data.txt", "keep me").parent
    code, _, err = redraft(capsys, "index", "build", corpus, "--tokenizer", tokenizer, "-o", other, "--force")
    assert code == 1 and "not an index" in err and (other / "data.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    "words",
    [
        ["index"],
        ["index", "build"],
        ["index", "build", "x", "-o", "y"],
        ["index", "build", "x", "--tokenizer", "t", "-o", "y", "--shard", "3/2"],
        ["index", "build", "x", "--tokenizer", "t", "-o", "y", "--shard", "0/2"],
        ["index", "build", "x", "--tokenizer", "t", "-o", "y", "--max-tokens", "-5"],
        ["index", "build", "x", "--tokenizer", "t", "-o", "y", "--max-tokens", "many"],
        ["index", "explode"],
    ],
)
def test_wrong_usage_is_exit_code_2(capsys, words):
    code, _, err = redraft(capsys, *words)
    assert code == 2 and "usage:" in err


@pytest.mark.parametrize(
    ("content_", "said"),
    [
        (None, "no such file or folder"),
        (b"", "nothing to index: 1 files gave 0 empty"),
        (b"\n\n", "nothing to index"),
        (b'{"text": ""}\n', "1 empty"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "assistant"),
        (b'{"text": "fine"}\n{"text": broken}\n', r"c.jsonl:2: wanted one JSON value a line"),
        (b'{"text": "\xff\xfe"}\n', "c.jsonl:1: byte 10 is 0xff"),
    ],
)
def test_bad_corpora(tmp_path, capsys, tokenizer, content_, said):
    source, index = tmp_path / "c.jsonl", tmp_path / "my.index"
    if content_ is not None:
        write(source, content_)
    code, _, err = redraft(capsys, "index", "build", source, "--tokenizer", tokenizer, "-o", index)
    assert code == 1 and said in err
    assert not [path for path in tmp_path.iterdir() if path != source]


def test_bad_records_are_named_and_counted(tmp_path, capsys, tokenizer):
    source, index = write(tmp_path / "c.jsonl", '{"text": "fine"}\n{"text": broken}\n'), tmp_path / "my.index"
    build = ("index", "build", source, "--tokenizer", tokenizer, "-o", index)
    code, _, err = redraft(capsys, *build, "--max-bad-records", "1")
    assert code == 0 and "c.jsonl:2: wanted" in err and "1 bad records" in err and "1 documents" in err
    code, _, err = redraft(capsys, *build, "--max-bad-records", "1", "--quiet", "--force")
    assert code == 0 and err.startswith("warning: ") and err.count("\n") == 1


def test_token_ids_are_checked_against_the_vocabulary(tmp_path, capsys, tokenizer):
    np.save(tmp_path / "a.npy", np.array([5, 599, 600, 7]))
    build = ("index", "build", tmp_path / "a.npy", "--tokenizer", tokenizer, "-o", tmp_path / "my.index")
    code, _, err = redraft(capsys, *build)
    assert code == 1 and "a.npy: token id 600 at position 2 is too large, the vocabulary has 600 ids" in err
    np.save(tmp_path / "a.npy", np.array([[5, 599], [0, 7]]))
    assert redraft(capsys, *build)[0] == 0
    assert documents(tmp_path / "my.index") == [[5, 599], [0, 7]]


def test_max_tokens_is_exact(tmp_path, capsys, corpus, tokenizer):
    index = tmp_path / "my.index"
    build = ("index", "build", corpus, "--tokenizer", tokenizer, "-o", index, "--force")
    assert redraft(capsys, *build)[0] == 0
    whole = documents(index)
    assert redraft(capsys, *build, "--max-tokens", "1k")[0] == 0
    part = documents(index)
    assert sum(map(len, part)) == 1000 and part[:-1] == whole[: len(part) - 1]
    assert part[-1] == whole[len(part) - 1][: len(part[-1])]


def test_standard_input(tmp_path, corpus, tokenizer):
    build = ["index", "build", "-", "--tokenizer", tokenizer, "-o"]
    with open(corpus) as stdin:
        code, err = finish(start(*build, tmp_path / "a.index", stdin=stdin))
    assert code == 0, err
    assert finish(start("index", "build", corpus, *build[3:], tmp_path / "b.index"))[0] == 0
    assert content(tmp_path / "a.index")["files"] == content(tmp_path / "b.index")["files"]
    with open(write(tmp_path / "plain.txt", "some plain\ntext")) as stdin:
        code, err = finish(start(*build, tmp_path / "c.index", stdin=stdin))
    assert code == 1 and "-:1: wanted one JSON value a line" in err
    with open(tmp_path / "plain.txt") as stdin:
        code, err = finish(start(*build, tmp_path / "c.index", "--stdin-format", "text", stdin=stdin))
    assert code == 0 and "1 documents" in err


def test_ctrl_c_leaves_the_old_index_and_no_other(tmp_path, corpus, tokenizer):
    index = tmp_path / "my.index"
    build = ["index", "build", "-", "--tokenizer", tokenizer, "-o", index, "--force"]
    with open(corpus) as stdin:
        assert finish(start(*build, stdin=stdin))[0] == 0
    old = content(index)
    process = start(*build, stdin=subprocess.PIPE)
    process.stdin.write(lines({"text": "new text"}))
    process.stdin.flush()
    wait_for(lambda: (tmp_path / "my.index.work/plan.json").exists())
    process.send_signal(signal.SIGINT)
    code, err = finish(process)
    assert code == 130 and "interrupted" in err and "Traceback" not in err
    assert content(index) == old and verify_index(index)
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl", "my.index"}


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_two_builds_of_one_index_do_not_mix(tmp_path, corpus, tokenizer):
    build = ["index", "build", "--tokenizer", tokenizer, "-o", tmp_path / "my.index"]
    first = start(*build, "-", stdin=subprocess.PIPE)
    wait_for(lambda: (tmp_path / "my.index.work/plan.json").exists())
    code, err = finish(start(*build, corpus))
    assert code == 1 and "another build of the same index is running" in err
    first.stdin.write(corpus.read_text())
    code, err = finish(first)
    assert code == 0, err


def test_full_disk_is_an_error_and_the_old_index_stays(tmp_path, corpus, tokenizer):
    """A limit on the size of files stands for the full disk: both are an OSError in the middle of a write."""
    index = tmp_path / "my.index"
    build = ["index", "build", corpus, "--tokenizer", tokenizer, "-o", index]
    assert finish(start(*build, "--max-tokens", "50"))[0] == 0
    old = content(index)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    code, err = finish(start(*build, "--force", preexec_fn=limit))
    assert code == 1 and "File too large" in err and "Traceback" not in err
    assert content(index) == old
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl", "my.index", "my.index.work"}
    code, err = finish(start(*build, "--force"))
    assert code == 0 and "resuming after 80 documents" in err
    assert content(index) != old and not (tmp_path / "my.index.work").exists()


def test_killed_builds_resume_and_end_in_the_same_bytes(tmp_path, corpus, tokenizer):
    undisturbed, index, work = tmp_path / "a.index", tmp_path / "b.index", tmp_path / "b.index.work"
    build = ["index", "build", corpus, "--tokenizer", tokenizer, "--force", "-o"]
    assert finish(start(*build, undisturbed))[0] == 0
    rng, killed = random.Random(2), 0
    for more_parts in rng.choices((0, 0, 1, 2, 3), k=20):  # at a random moment after so many more of the parts are there
        wanted = len(list(work.glob("part-*.json"))) + more_parts
        process = start(*build, index)
        wait_for(lambda: process.poll() is not None or len(list(work.glob("part-*.json"))) >= wanted)  # noqa: B023
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, 0.1))
        process.kill()
        killed += finish(process)[0] == -signal.SIGKILL
        if index.exists():  # a kill never leaves half an index under the name
            assert content(index) == content(undisturbed)
    code, err = finish(start(*build, index))
    assert code == 0, err
    assert content(index) == content(undisturbed)
    assert killed >= 10, killed
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl", "a.index", "b.index"}


def test_resume_goes_on_after_the_last_whole_part(tmp_path, corpus, tokenizer):
    """Killed at a known place: in the middle of the fourth part."""
    build = ["index", "build", "--tokenizer", tokenizer, "-o"]
    code = (
        "import os, sys\nfrom redraft import cli\nfrom redraft.index_builders import token_parts, tokenizing\n"
        "tokenizing._PART_TOKENS, tokenizing._BATCH_CHARACTERS = 3000, 6000\n"
        "write = token_parts.write_durably\n"
        "def killed(path, content):\n    os.kill(os.getpid(), 9) if '3.json' in path.name else write(path, content)\n"
        "token_parts.write_durably = killed\ncli.main(sys.argv[1:])"
    )
    words = [str(word) for word in (*build, tmp_path / "a.index", corpus)]
    assert subprocess.run([sys.executable, "-c", code, *words], check=False).returncode == -signal.SIGKILL
    work = tmp_path / "a.index.work"
    assert sorted(path.name for path in work.glob("*.json")) == [
        "part-00000.json", "part-00001.json", "part-00002.json", "plan.json",
    ]  # fmt: skip
    code, err = finish(start(*words))
    assert code == 0 and "resuming after" in err and not work.exists()
    assert finish(start(*build, tmp_path / "b.index", corpus))[0] == 0
    assert content(tmp_path / "a.index") == content(tmp_path / "b.index")
    assert content(tmp_path / "a.index")["manifest"]["documents"] == 80


def test_a_build_killed_while_it_writes_is_cleared_away(tmp_path, corpus, tokenizer):
    build = ["index", "build", "--tokenizer", tokenizer, "-o", tmp_path / "a.index", corpus]
    code = (
        "import os, sys\nfrom redraft import cli\nfrom redraft.retrieval.index_writer import IndexWriter\n"
        "IndexWriter.publish = lambda *_, **__: os.kill(os.getpid(), 9)\ncli.main(sys.argv[1:])"
    )
    words = [sys.executable, "-c", code, *map(str, build)]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob("a.index.tmp-*")]
    code, err = finish(start(*build))
    assert code == 0 and "resuming after 80 documents" in err
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl", "a.index"}


def test_a_changed_corpus_is_not_resumed(tmp_path, corpus, tokenizer):
    work = tmp_path / "my.index.work"
    build = ["index", "build", corpus, "--tokenizer", tokenizer, "-o", tmp_path / "my.index"]
    process = start(*build)
    wait_for(lambda: (work / "part-00001.json").exists())
    process.kill()
    finish(process)
    write(corpus, lines({"text": "something else"}))
    code, err = finish(start(*build))
    assert code == 0 and "resuming" not in err and "1 documents" in err


def test_shards_share_out_every_document_once(tmp_path, capsys, corpus, tokenizer):
    build = ("index", "build", corpus, "--tokenizer", tokenizer, "--quiet", "-o")
    assert redraft(capsys, *build, tmp_path / "all.index")[0] == 0
    shards = []
    for number in (1, 2, 3):
        assert redraft(capsys, *build, tmp_path / f"{number}.index", "--shard", f"{number}/3")[0] == 0
        shards.append(documents(tmp_path / f"{number}.index"))
    whole = documents(tmp_path / "all.index")
    assert shards == [whole[0::3], whole[1::3], whole[2::3]]
    merge = ("index", "merge", *(tmp_path / f"{number}.index" for number in (1, 2, 3)), "-o", tmp_path / "merged.index")
    code, _, err = redraft(capsys, *merge)
    assert code == 0, err
    assert content(tmp_path / "merged.index") == content(tmp_path / "all.index")
    code, _, err = redraft(capsys, *merge)
    assert code == 1 and "exists already" in err
    code, _, err = redraft(capsys, *build, tmp_path / "none.index", "--shard", "99/100")
    assert code == 1 and "80 documents, none for shard 99/100" in err


def test_merge_drops_copies_and_refuses_other_tokenizers(tmp_path, capsys, corpus, tokenizer):
    build = ("index", "build", corpus, "--quiet", "-o")
    assert redraft(capsys, *build, tmp_path / "a.index", "--tokenizer", tokenizer)[0] == 0
    more = write(tmp_path / "more.jsonl", corpus.read_text() + lines("new"))
    merge = ("index", "merge", tmp_path / "a.index", tmp_path / "b.index", "-o", tmp_path / "c.index")
    words = ("index", "build", more, "--quiet", "--tokenizer", tokenizer, "-o", tmp_path / "b.index")
    assert redraft(capsys, *words)[0] == 0
    code, _, err = redraft(capsys, *merge, "--memory-limit", "1k")
    assert code == 1 and "the limit is 1 kB" in err
    code, _, err = redraft(capsys, *merge)
    assert code == 0 and "81 documents" in err and "80 exact duplicates" in err
    assert sorted(documents(tmp_path / "c.index")) == sorted(documents(tmp_path / "b.index"))
    assert [source["documents"] for source in content(tmp_path / "c.index")["manifest"]["sources"]] == [80, 81]

    changed = json.loads(Path(tokenizer).read_text())
    changed["decoder"] = None
    other = write(tmp_path / "other/tokenizer.json", json.dumps(changed))
    assert redraft(capsys, *build, tmp_path / "b.index", "--force", "--tokenizer", other)[0] == 0
    code, _, err = redraft(capsys, *merge, "--force")
    assert code == 1 and "their token ids do not mean the same" in err
    assert verify_index(tmp_path / "c.index")["documents"] == 81


def test_memory_limit_chooses_the_kind_or_stops_early(tmp_path, capsys, tokenizer):
    np.save(tmp_path / "a.npy", np.arange(2_000_000) % 599)
    build = ("index", "build", tmp_path / "a.npy", "--tokenizer", tokenizer, "-o", tmp_path / "my.index", "--force")

    def build_within(megabytes: int, *more: str) -> tuple[int, str]:
        limit = memory_in_use() + megabytes * 1_000_000  # 48 MB would do for an array, 290 MB for an automaton
        code, _, err = redraft(capsys, *build, "--memory-limit", limit, *more)
        return code, err

    for megabytes, more in ((20, ()), (180, ("--kind", "suffix_automaton"))):
        code, err = build_within(megabytes, *more)
        assert code == 1 and "--memory-limit is" in err and "--shard 1/" in err and "2,000,000 tokens" in err
        assert not (tmp_path / "my.index").exists()
    for megabytes in (-100, 1):  # no part of a corpus takes less
        code, err = build_within(megabytes)
        assert code == 1 and "--memory-limit is" in err and "are in use before the first token" in err and "shard" not in err
    for megabytes, kind in ((180, "suffix_array"), (2000, "suffix_automaton")):
        code, err = build_within(megabytes)
        assert code == 0 and content(tmp_path / "my.index")["manifest"]["kind"] == kind


def test_both_kinds_hold_the_same_documents(tmp_path, capsys, corpus, tokenizer):
    for kind in ("suffix_automaton", "suffix_array"):
        build = ("index", "build", corpus, "--tokenizer", tokenizer, "-o", tmp_path / kind, "--kind", kind)
        code, _, err = redraft(capsys, *build)
        assert code == 0 and "80 documents" in err
        assert redraft(capsys, "index", "verify", tmp_path / kind)[0] == 0
        assert kind.replace("_", " ") in redraft(capsys, "index", "inspect", tmp_path / kind)[1]
    assert documents(tmp_path / "suffix_automaton") == documents(tmp_path / "suffix_array")
    both = ("index", "merge", tmp_path / "suffix_automaton", tmp_path / "suffix_array", "-o", tmp_path / "merged")
    assert redraft(capsys, *both, "--kind", "suffix_array")[0] == 0
    assert content(tmp_path / "merged")["files"] == content(tmp_path / "suffix_array")["files"]


def occurs_elsewhere(document: list[int], others: list[list[int]], end: int, length: int) -> bool:
    wanted = document[end + 1 - length : end + 1]
    return len(wanted) == length and any(
        other[i : i + length] == wanted for other in others for i in range(len(other) - length + 1)
    )


@pytest.mark.parametrize("kind", ["suffix_automaton", "suffix_array"])
def test_stats_count_what_stands_in_other_documents(tmp_path, capsys, tokenizer, kind):
    rng = np.random.default_rng(3)
    np.save(tmp_path / "a.npy", rng.integers(0, 3, (6, 40)))
    index = tmp_path / "my.index"
    build = ("index", "build", tmp_path / "a.npy", "--tokenizer", tokenizer, "--kind", kind, "--quiet", "-o", index)
    assert redraft(capsys, *build)[0] == 0
    code, out, _ = redraft(capsys, "index", "stats", index, "--json")
    found = json.loads(out)["matches"]
    texts = documents(index)
    assert (code, found["documents"], found["positions"]) == (0, 6, 6 * 39)
    for length in (2, 4, 8, 16):
        here = [
            (number, end)
            for number in range(6)
            for end in range(39)
            if occurs_elsewhere(texts[number], texts[:number] + texts[number + 1 :], end, length)
        ]
        longer = [
            occurs_elsewhere(texts[number], texts[:number] + texts[number + 1 :], end + 1, length + 1)
            for number, end in here
        ]
        assert found["matched"][str(length)] == pytest.approx(len(here) / (6 * 39))
        assert found["continued"][str(length)] == pytest.approx(sum(longer) / max(1, len(here)))
    assert 0 < found["matched"]["4"] < 1, "a sample that says nothing"
    code, out, _ = redraft(capsys, "index", "stats", index)
    assert code == 0 and "and the next one, too" in out


def test_stats_on_given_text(tmp_path, capsys, corpus, tokenizer):
    index = tmp_path / "my.index"
    assert redraft(capsys, "index", "build", corpus, "--tokenizer", tokenizer, "--quiet", "-o", index)[0] == 0
    stats = ("index", "stats", index, "--json", "--on")
    code, out, _ = redraft(capsys, *stats, corpus, "--tokenizer", tokenizer)
    assert code == 0 and set(json.loads(out)["matches"]["continued"].values()) == {1.0}
    unknown = write(tmp_path / "unknown.txt", "\u4e00\u4e8c\u4e09" * 30)
    code, out, _ = redraft(capsys, *stats, unknown, "--tokenizer", tokenizer)
    assert code == 0 and json.loads(out)["matches"]["matched"]["4"] == 0
    code, _, err = redraft(capsys, *stats, corpus)
    assert code == 2 and "need --tokenizer" in err


@pytest.mark.parametrize("kind", ["suffix_automaton", "suffix_array"])
def test_stats_say_what_an_index_adds(tmp_path, capsys, monkeypatch, tokenizer, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = [random.Random(seed).randbytes(150).hex() for seed in range(8)]  # nothing but the index can know them
    corpus = write(tmp_path / "corpus.jsonl", lines(*texts))
    index, traces = tmp_path / "my.index", tmp_path / "known.jsonl.gz"
    build = ("index", "build", corpus, "--tokenizer", tokenizer, "--quiet", "-o", index, "--kind", kind)
    assert redraft(capsys, *build)[0] == 0
    records = ({"prompt": "x", "output": text, "continues": False} for text in texts)
    traces.write_bytes(gzip.compress(lines(*records).encode()))
    stats = ("index", "stats", index, "--traces", traces, "--tokenizer", tokenizer)
    code, out, err = redraft(capsys, *stats, "--json")
    assert code == 0, err
    step = json.loads(out)["tokens_per_step"]["known"]
    assert step["with"] > 2 * step["without"] > 2
    assert f"{step['with']:.2f} with it" in redraft(capsys, *stats)[1]


def test_ray_tokenizes_and_the_index_is_the_same(tmp_path, corpus, tokenizer, monkeypatch):
    ray = pytest.importorskip("ray")
    from redraft.index_builders.build import BuildOptions
    from redraft.index_builders.ray_shards import _tokenize_shard

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        build = ["index", "build", "corpus.jsonl", "--tokenizer", tokenizer]
        assert finish(start(*build, "-o", "plain.index", cwd=tmp_path))[0] == 0
        # One of three shards is there already, as an interrupted build would leave it.
        _tokenize_shard([str(corpus)], tokenizer, BuildOptions(shard=(2, 3)), str(tmp_path / "ray.index.work/2-of-3"))
        on_ray = [*build, "-o", "ray.index", "--ray-tasks", "3", "--ray", ray.get_runtime_context().gcs_address]
        code, err = finish(start(*on_ray, cwd=tmp_path), seconds=120)
        assert code == 0 and "from an interrupted build" in err and "1 exact duplicates" in err
        assert content(tmp_path / "ray.index") == content(tmp_path / "plain.index")
        write(corpus, corpus.read_text() + "{broken\n")
        code, err = finish(start(*on_ray, "--force", cwd=tmp_path), seconds=120)
        assert code == 1 and "corpus.jsonl:82: wanted one JSON value a line" in err and "Traceback" not in err
        assert content(tmp_path / "ray.index") == content(tmp_path / "plain.index")
    finally:
        ray.shutdown()


def test_what_ray_cannot_do_is_wrong_usage(capsys):
    words = ("index", "build", "--tokenizer", "t", "-o", "y", "--ray", "local")
    for more in (["-"], ["x", "--max-tokens", "5"], ["x", "--shard", "1/2"]):
        code, _, err = redraft(capsys, *words, *more)
        assert code == 2 and "together with --ray" in err
    code, _, err = redraft(capsys, "index", "build", "x", "--tokenizer", "t", "-o", "y", "--ray-tasks", "3")
    assert code == 2 and "--ray-tasks needs --ray" in err
