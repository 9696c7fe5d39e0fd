"""The replay: what it reads, how it walks, what it counts, and the command around it."""

from __future__ import annotations

import gzip
import json

import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.cli import main
from redraft.replay.contenders import Ngram
from redraft.replay.loops import in_loop
from redraft.replay.replay import replay_items
from redraft.replay.run import Plan, macro, replay_file, replay_files
from redraft.replay.tally import BINS, Tally, expected_calibration_error, reliability
from redraft.replay.traces import Item, RememberedTokenizer, load_workload, trace_files
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import DraftTree, Source


class Letters:
    """A tokenizer of single characters that counts how often it was asked."""

    vocab_size = 128
    fingerprint = "letters" * 8

    def __init__(self) -> None:
        self.calls = 0

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        self.calls += 1
        return [np.array([ord(letter) for letter in text], np.int32) for text in texts]


LINES = [
    {"prompt": "ab", "output": "cde", "continues": False},
    {"prompt": "f", "output": "gh", "continues": True},
    {"prompt": "ij", "output": "", "continues": True},
    {"prompt": "k", "output": "lmnop", "continues": True},
    {"prompt": "q", "output": "rst", "continues": False},
]


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_trace(tmp_path / "traces" / "short.jsonl.gz", LINES)


def write_trace(file, lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))
    return file


def texts(items) -> list[tuple[str, str]]:
    return [("".join(map(chr, item.context)), "".join(map(chr, item.output))) for item in items]


class TestTraces:
    def test_contexts_grow_along_a_conversation(self, trace):
        workload = load_workload(trace, Letters())
        assert workload.name == "short"
        assert texts(workload.items(100)) == [
            ("ab", "cde"),
            ("abcdef", "gh"),
            ("abcdefghijk", "lmnop"),
            ("q", "rst"),
        ]

    def test_the_last_item_is_cut(self, trace):
        workload = load_workload(trace, Letters())
        assert texts(workload.items(4)) == [("ab", "cde"), ("abcdef", "g")]
        assert texts(workload.items(3)) == [("ab", "cde")]

    def test_skip_leaves_out_whole_lines_but_not_their_text(self, trace):
        workload = load_workload(trace, Letters())
        assert texts(workload.items(6, skip=4)) == [("abcdefghijk", "lmnop"), ("q", "r")]

    def test_warm_and_measured_items_lie_side_by_side(self, trace):
        workload = load_workload(trace, Letters())
        whole = texts(workload.items(100))
        assert texts(workload.items(3)) + texts(workload.items(100, skip=3)) == whole

    def test_ids_are_cached_by_file_and_tokenizer(self, trace):
        first, again, other = Letters(), Letters(), Letters()
        other.fingerprint = "other" * 8
        load_workload(trace, first)
        workload = load_workload(trace, again)
        assert (first.calls, again.calls) == (1, 0)
        assert texts(workload.items(3)) == [("ab", "cde")]
        load_workload(trace, other)
        assert other.calls == 1
        write_trace(trace, LINES[:1])
        assert texts(load_workload(trace, again).items(100)) == [("ab", "cde")]
        assert again.calls == 1

    def test_bad_lines_are_named(self, tmp_path):
        for content, complaint in (("", "empty"), ('{"prompt": "a"}', "line 1: not a trace"), ("[1", "line 1")):
            file = tmp_path / "bad.jsonl.gz"
            file.write_bytes(gzip.compress(content.encode()))
            with pytest.raises(ValueError, match=complaint):
                load_workload(file, Letters(), cache=tmp_path)

    def test_what_is_no_gzip_or_cut_short_is_named(self, trace, tmp_path):
        for content in (b"text", trace.read_bytes()[:-9], trace.read_bytes()[:12] + b"\xff" * 9):
            file = tmp_path / "bad.jsonl.gz"
            file.write_bytes(content)
            with pytest.raises(ValueError, match="bad.jsonl.gz: wanted gzip"):
                load_workload(file, Letters(), cache=tmp_path)

    def test_files_by_name(self, trace, tmp_path):
        other = write_trace(trace.parent / "another.jsonl.gz", LINES)
        assert trace_files(trace.parent) == [other, trace]
        assert trace_files(trace.parent, ["short"]) == [trace]
        assert trace_files(trace) == [trace]
        with pytest.raises(ValueError, match="no workload tall.*another, short"):
            trace_files(trace.parent, ["short", "tall"])
        for nowhere in (tmp_path / "missing", tmp_path / "cache"):
            with pytest.raises(FileNotFoundError, match="no trace files"):
                trace_files(nowhere)

    def test_tokenizer_is_loaded_once_for_its_fingerprint(self, tmp_path):
        loaded = []

        def load(spec):
            loaded.append(spec)
            return Letters()

        spec = tmp_path / "tokenizer.json"
        spec.write_text("{}")
        for _ in range(2):
            tokenizer = RememberedTokenizer(str(spec), load, cache=tmp_path)
            assert (tokenizer.fingerprint, tokenizer.vocab_size) == (Letters.fingerprint, 128)
        assert loaded == [str(spec)]
        assert tokenizer.encode_batch(["a"])[0].tolist() == [97]
        spec.write_text("{ }")  # another file: asked again
        RememberedTokenizer(str(spec), load, cache=tmp_path)
        assert len(loaded) == 3


class Scripted:
    """A drafter, its sessions and its log: drafts `ahead` tokens of the truth it was given, or a tree of its own."""

    def __init__(self, truth, ahead: int = 0, tree: DraftTree | None = None) -> None:
        self.truth, self.ahead, self.tree = list(truth), ahead, tree
        self.context, self.committed, self.closed = None, [], 0

    def open(self, prompt):
        self.context = prompt.tolist()
        return self

    def draft(self, max_nodes=None, min_prob=None):
        if self.tree is not None:
            return self.tree
        done = len(self.committed)
        return DraftTree.chain(self.truth[done : done + self.ahead], source=Source.SESSION)

    def commit(self, tokens):
        self.committed += tokens.tolist()

    def close(self):
        self.closed += 1


def item(output, context=(9, 9)) -> Item:
    return Item(np.array(context, np.int32), np.array(output, np.int32))


class TestWalk:
    @pytest.mark.parametrize(
        ("ahead", "steps", "nodes"), [(0, 10, 0), (1, 5, 10 // 2), (4, 2, 8), (10, 1, 10), (99, 1, 10)]
    )
    def test_a_drafter_that_knows(self, ahead, steps, nodes):
        """11 tokens, the first one free: each step takes what was drafted and the bonus token."""
        output = list(range(11))
        drafter = Scripted(output, ahead)
        tally = replay_items(drafter, [item(output)])
        assert (tally.steps, tally.emitted, tally.nodes, tally.accepted) == (steps, 10, nodes, nodes)
        assert tally.tokens_per_step == 10 / steps
        assert drafter.context == [9, 9]
        assert drafter.committed == output
        assert drafter.closed == 1

    def test_a_drafter_that_is_wrong_costs_nothing(self):
        tally = replay_items(Scripted([7] * 6, 3), [item([1, 2, 3, 4, 5, 6])])
        assert (tally.tokens_per_step, tally.accepted, tally.nodes) == (1.0, 0, 5 * 3 - 3)

    def test_an_output_of_one_token_takes_no_step(self):
        tally = replay_items(Scripted([1], 3), [item([1])])
        assert (tally.items, tally.steps, tally.emitted) == (1, 0, 0)
        assert tally.summary()["tokens_per_step"] is None

    @settings(max_examples=400, deadline=None)
    @given(st.data())
    def test_agrees_with_the_specification(self, data):
        tokens, parents = [], []
        for _ in range(data.draw(st.integers(0, 14))):
            parent, token = data.draw(st.integers(-1, len(tokens) - 1)), data.draw(st.integers(0, 2))
            if (parent, token) not in zip(parents, tokens):  # siblings differ
                tokens.append(token)
                parents.append(parent)
        truth = data.draw(st.lists(st.integers(0, 2), max_size=6))
        n = len(tokens)
        tree = DraftTree(
            np.array(tokens, np.int32).reshape(n),
            np.array(parents, np.int32).reshape(n),
            np.full(n, 0.5, np.float32),
            np.arange(n, dtype=np.uint8) % len(Source.NAMES),
        )
        tally = Tally()
        path = naive.walk(tokens, parents, truth)
        assert tally.walk(tree, np.array(truth, np.int32)) == len(path)
        drafted = [sum(1 for i in range(n) if i % len(Source.NAMES) == s) for s in range(len(Source.NAMES))]
        accepted = [sum(1 for i in path if i % len(Source.NAMES) == s) for s in range(len(Source.NAMES))]
        assert tally.by_source.tolist() == [list(pair) for pair in zip(drafted, accepted)]
        depths = tree.depths()
        visited = [i for i in range(n) if (parents[i] == -1 or parents[i] in path) and depths[i] <= len(truth)]
        assert tally.visited[:, :, 0].sum() == len(visited)
        assert tally.visited[:, :, 2].sum() == len(path)
        assert tally.paths[:, :, 0].sum() == (depths <= len(truth)).sum()

    @pytest.mark.parametrize(
        ("parents", "tokens", "probs", "sources", "complaint"),
        [
            ([-1, 1], [1, 2], [1, 1], [0, 0], "earlier node"),
            ([-1, -1], [1, 1], [1, 1], [0, 0], "siblings"),
            ([-1], [1], [np.nan], [0], "finite"),
            ([-1], [1], [1], [200], f"sources must be below {len(Source.NAMES)}, got 200"),
        ],
    )
    def test_a_tree_that_is_none_is_refused(self, parents, tokens, probs, sources, complaint):
        tree = DraftTree(
            np.array(tokens, np.int32), np.array(parents, np.int32),
            np.array(probs, np.float32), np.array(sources, np.uint8),
        )  # fmt: skip
        with pytest.raises(ValueError, match=complaint):
            replay_items(Scripted([], tree=tree), [item([1, 2, 3])])

    def test_foreign_drafts_are_converted(self):
        class Foreign:
            def tree(self):
                return DraftTree.chain([2, 3])

        tally = replay_items(Scripted([], tree=Foreign()), [item([1, 2, 3, 4])])
        assert (tally.steps, tally.accepted) == (1, 2)


class TestCounting:
    def test_probabilities_are_judged_given_the_parent(self):
        tree = DraftTree(
            np.array([1, 2, 5], np.int32), np.array([-1, 0, 0], np.int32),
            np.array([0.5, 0.3, 0.1], np.float32), np.array([0, 1, 1], np.uint8),
        )  # fmt: skip
        tally = Tally()
        tally.walk(tree, np.array([1, 2, 3], np.int32))
        bins = [(s, int(b), tally.visited[s, b].tolist()) for s in (0, 1) for b in tally.visited[s, :, 0].nonzero()[0]]
        assert [(s, b) for s, b, _ in bins] == [(0, BINS // 2), (1, BINS // 5), (1, 3 * BINS // 5)]
        assert [row[2] for _, _, row in bins] == [1, 0, 1]
        np.testing.assert_allclose([row[1] for _, _, row in bins], [0.5, 0.2, 0.6], atol=1e-6)
        tally = Tally()
        tally.walk(tree, np.array([9], np.int32))  # nothing accepted: the children are never asked about
        assert tally.visited[:, :, 0].sum() == 1

    def test_calibration_error(self):
        table = np.zeros((BINS, 3))
        assert expected_calibration_error(table) is None
        table[2] = 10, 2.0, 2  # kept
        table[9] = 30, 15.0, 9  # promised .5, kept .3
        assert expected_calibration_error(table) == pytest.approx(0.2 * 30 / 40)
        assert reliability(table) == [
            {"nodes": 10, "promised": 0.2, "accepted": 0.2},
            {"nodes": 30, "promised": 0.5, "accepted": 0.3},
        ]

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, 1), max_size=50), st.integers(1, 6), st.integers(2, 4))
    def test_loops(self, text, longest_period, repeats):
        got = in_loop(np.array(text, np.int32), longest_period=longest_period, repeats=repeats)
        assert got.tolist() == naive.in_loop(text, longest_period, repeats)

    def test_loops_are_counted_apart(self):
        output = [1, 2, 3, *[4, 5] * 4, 6, 7]
        tally = replay_items(Scripted(output, 1), [item(output)])
        assert tally.loop_emitted == 8
        assert tally.summary()["tokens_per_step_outside_loops"] == 2.0

    def test_tallies_add_up(self):
        output = list(range(9))
        one, two = (replay_items(Scripted(output, ahead), [item(output)]) for ahead in (1, 3))
        both = Tally()
        both.add(one)
        both.add(two)
        assert (both.steps, both.emitted) == (one.steps + two.steps, 16)
        assert both.summary()["commit_us_per_token"]["mean"] > 0
        assert len(both.draft_ns) == both.steps

    def test_macro_mean_counts_workloads_alike(self):
        output = list(range(41))
        rows = [replay_items(Scripted(output, ahead), [item(output)]).summary() for ahead in (0, 3)]
        assert macro(rows)["tokens_per_step"] == (1 + 4) / 2


class TestCommand:
    @pytest.fixture
    def arguments(self, trace, tmp_path):
        tokenizers = pytest.importorskip("tokenizers")
        words = ["the", "model", "writes", "a", "text", "that", "repeats", "itself", "and", "more"]
        model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="the")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        line = {"prompt": "the model writes a text", "output": "that repeats itself and more " * 30, "continues": False}
        for name in ("one", "two"):
            write_trace(trace.parent / f"{name}.jsonl.gz", [line] * 3)
        trace.unlink()
        return ["replay", str(trace.parent), "--tokenizer", str(tmp_path / "tokenizer.json"), "--drafter", "ngram"]

    def test_table_and_record(self, arguments, tmp_path, capsys):
        record = tmp_path / "record.json"
        assert main([*arguments, "--tokens", "200", "--json", str(record)]) == 0
        printed = capsys.readouterr().out
        for word in ("one", "two", "macro mean", "ngram", "tokens/step"):
            assert word in printed
        numbers = json.loads(record.read_text())
        assert set(numbers["workloads"]) == {"one", "two"}
        assert numbers["macro"]["tokens_per_step"] > 5
        assert numbers["workloads"]["one"]["emitted"] == 198  # two items, the first token of each free

    def test_several_jobs_count_the_same(self, arguments, tmp_path):
        taus = []
        for jobs in ("1", "2"):
            record = tmp_path / f"{jobs}.json"
            assert main([*arguments, "--tokens", "200", "--jobs", jobs, "--json", str(record)]) == 0
            taus.append(json.loads(record.read_text())["macro"]["tokens_per_step"])
        assert taus[0] == taus[1]

    def test_settings_reach_the_drafter(self, arguments, tmp_path):
        def nodes(*more):
            record = tmp_path / "record.json"
            assert main([*arguments, "--tokens", "200", "--json", str(record), *more]) == 0
            return json.loads(record.read_text())["macro"]["nodes_per_step"]

        assert nodes("--max-nodes", "3") <= 3 < nodes()
        assert nodes("--min-prob", "0.5") < nodes()

    @pytest.mark.parametrize(
        ("more", "complaint"),
        [
            (["--workloads", "three"], "no workload three"),
            (["--tokens", "0"], "--tokens: wanted 1 or more, got 0"),
            (["--max-nodes", "0"], "max_nodes: wanted 1..512, got 0"),
        ],
    )
    def test_wrong_arguments(self, arguments, more, complaint, capsys):
        assert main([*arguments, *more]) == 1
        assert complaint in capsys.readouterr().err

    def test_warm_measures_what_follows(self, trace):
        lines = [{"prompt": "x", "output": letters * 4, "continues": False} for letters in ("abcdefgh", "zyxwvuts")]
        write_trace(trace, lines)
        contender = Ngram(DraftConfig())
        warm = replay_file(contender, trace, Letters(), Plan(tokens=32, warm=32))
        cold = replay_file(contender, trace, Letters(), Plan(tokens=32, skip=32))
        assert (warm.items, warm.emitted, warm.steps) == (1, 31, cold.steps)
        ((file, tally),) = replay_files(contender, [trace], Letters(), Plan(tokens=32), progress=lambda n: None)
        assert (file, tally.emitted) == (trace, 31)
