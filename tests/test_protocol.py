"""The wire: packing, the checks of what came over it, and stubs that agree with the .proto file."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_drafter import BROKEN, VOCAB_SIZE, tree_of

from redraft.client.replies import compile_checks, read_tree_batch
from redraft.client.replies import read_trees as read_trees_of_reply
from redraft.retrieval.draft_tree import DraftTree
from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import pack_float32, pack_int32, unpack_float32, unpack_int32

PROTO = Path(__file__).resolve().parent.parent / "proto" / "redraft" / "v1"


def read_trees(messages, asked, vocab_size, budget=32):
    """As messages and as a batch, with the kernel and without it: the answer is the same."""
    compile_checks()
    asked = dict.fromkeys(asked)
    trees = read_trees_of_reply(messages, asked, budget, vocab_size, compiled=True)
    answers = [read_trees_of_reply(messages, asked, budget, vocab_size, compiled=False)]
    if all(len(m.tokens) == len(m.parents) == len(m.probs) == 4 * len(m.sources) for m in messages):
        batch = batch_of(messages)
        answers += [read_tree_batch(batch, asked, budget, vocab_size, compiled=compiled) for compiled in (True, False)]
    for others in answers:
        assert trees.keys() == others.keys()
        for number, tree in others.items():
            assert [array.tolist() for array in arrays_of(tree)] == [
                array.tolist() for array in arrays_of(trees[number])
            ]
            tree.tokens[:] = 0  # the caller may write to what it gets
    return trees


def arrays_of(tree) -> list:
    return [getattr(tree, name) for name in ("tokens", "parents", "probs", "sources")]


def batch_of(messages) -> pb.TreeBatch:
    """The same trees in columns."""
    return pb.TreeBatch(
        session_ids=[message.session_id for message in messages],
        sizes=[len(message.sources) for message in messages],
        **{
            name: b"".join(getattr(message, name) for message in messages)
            for name in ("tokens", "parents", "probs", "sources")
        },
    )


def message_of(tree: DraftTree, session_id: int = 1) -> pb.DraftTree:
    return pb.DraftTree(
        session_id=session_id,
        tokens=pack_int32(tree.tokens),
        parents=pack_int32(tree.parents),
        probs=pack_float32(tree.probs),
        sources=tree.sources.tobytes(),
    )


def tree_from_lists(tokens, parents, probs) -> DraftTree:
    return DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(probs, np.float32),
        np.zeros(len(tokens), np.uint8),
    )


@pytest.mark.parametrize("values", [[], [0], [1, -1, 2**31 - 1, -(2**31)]])
def test_int32_round_trip(values):
    assert unpack_int32(pack_int32(np.array(values, np.int32)), "x").tolist() == values


def test_packing_is_little_endian_and_row_by_row():
    assert pack_int32([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert pack_int32(np.array([[1, 2], [3, 4]]).T) == pack_int32([1, 3, 2, 4])
    assert unpack_float32(b"\0\0\x80\x3f", "x").tolist() == [1.0]


@pytest.mark.parametrize("unpack", [unpack_int32, unpack_float32])
def test_half_a_value_is_refused_by_name(unpack):
    with pytest.raises(ValueError, match=r"prompt: wanted a multiple of 4 bytes.*got 7 bytes"):
        unpack(b"\0" * 7, "prompt")


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_tree_is_left_out_and_its_neighbours_are_kept(kind):
    good = tree_of([1, 2, 3], [-1, 0, 0])
    messages = [message_of(good, 1), message_of(tree_from_lists(*BROKEN[kind]), 2), message_of(good, 3)]
    trees = read_trees(messages, [1, 2, 3], VOCAB_SIZE)
    assert sorted(trees) == [1, 3]
    assert trees[3].tokens.tolist() == [1, 2, 3] and trees[3].parents.tolist() == [-1, 0, 0]


@pytest.mark.parametrize("field", ["tokens", "parents", "probs", "sources"])
def test_arrays_of_unequal_length_are_left_out(field):
    message = message_of(tree_of([1, 2, 3], [-1, 0, 0]))
    setattr(message, field, getattr(message, field) + b"\0" * 4)
    assert read_trees([message], [1], VOCAB_SIZE) == {}
    setattr(message, field, getattr(message, field)[:-3])
    assert read_trees([message], [1], VOCAB_SIZE) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"session_ids": [1, 2]},
        {"session_ids": [1, 2, 3, 4]},
        {"sizes": [3, 3]},
        {"sizes": [3, 3, 4]},
        {"sizes": [3, 3, 2]},
        {"sizes": [3, 3, 2**32 - 1]},
        {"sizes": []},
        {"tokens": b"\0" * 40},
        {"parents": b"\xff" * 35},
        {"probs": b""},
        {"sources": b"\0" * 8},
    ],
)
def test_columns_that_do_not_fit_each_other_bring_no_tree(change):
    messages = [message_of(tree_of([1, 2, 3], [-1, 0, 0]), number) for number in (1, 2, 3)]
    sound = {name.name: value for name, value in batch_of(messages).ListFields()}
    compile_checks()
    for compiled in (True, False):
        found = read_tree_batch(pb.TreeBatch(**sound), dict.fromkeys([1, 2, 3]), 32, VOCAB_SIZE, compiled=compiled)
        assert list(found) == [1, 2, 3]
        broken = pb.TreeBatch(**{**sound, **change})
        assert read_tree_batch(broken, dict.fromkeys([1, 2, 3]), 32, VOCAB_SIZE, compiled=compiled) == {}


def test_trees_nobody_asked_for_and_second_trees_are_left_out():
    messages = [message_of(tree_of([1], [-1]), 1), message_of(tree_of([2], [-1]), 1), message_of(tree_of([3], [-1]), 9)]
    assert {key: tree.tokens.tolist() for key, tree in read_trees(messages, [1], 64).items()} == {1: [1]}
    assert {key: tree.tokens.tolist() for key, tree in read_trees(messages[:2], [1], 64).items()} == {1: [1]}


def test_the_caller_may_write_to_what_it_gets():
    tree = read_trees([message_of(tree_of([1, 2], [-1, 0]))], [1], 64)[1]
    tree.tokens[0] = 5
    assert tree.tokens.tolist() == [5, 2]


# Few values, so that twins, cycles and numbers just out of range come up often.
_TREES = st.integers(0, 5).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(-1, 4), min_size=n, max_size=n),
        st.lists(st.integers(-2, n), min_size=n, max_size=n),
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, -0.5, float("nan")]), min_size=n, max_size=n),
    )
)
_SOUND_TREES = st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3)), max_size=5).map(
    lambda nodes: ([t for t, _ in nodes], [min(p, i - 1) for i, (_, p) in enumerate(nodes)], [0.5] * len(nodes))
)


@settings(max_examples=400, deadline=None)
@given(st.lists(_TREES | _SOUND_TREES, max_size=4), st.integers(1, 5))
def test_checking_a_batch_agrees_with_checking_each_tree(lists, budget):
    trees = [tree_from_lists(*one) for one in lists]
    expected = {}
    for number, tree in enumerate(trees):
        try:
            expected[number] = tree.check(vocab_size=4, max_nodes=budget)
        except ValueError:
            pass
    messages = [message_of(tree, number) for number, tree in enumerate(trees)]
    found = read_trees(messages, range(len(trees)), 4, budget)
    assert found.keys() == expected.keys()
    for number, tree in found.items():
        for name in ("tokens", "parents", "probs", "sources"):
            assert np.array_equal(getattr(tree, name), getattr(expected[number], name))


def test_every_message_and_field_is_documented():
    lines = (PROTO / "drafting.proto").read_text().splitlines()
    declares = re.compile(r"^\s*(message|enum|service|rpc|oneof)\b|^\s*(optional |repeated )?[\w.]+ \w+ = \d+;")
    bare = [line for before, line in itertools.pairwise(lines) if declares.match(line) and "//" not in before]
    assert bare == []


def test_stubs_say_what_the_proto_file_says():
    text = (PROTO / "drafting.proto").read_text()
    file = pb.DESCRIPTOR
    assert set(re.findall(r"^message (\w+)", text, re.MULTILINE)) == set(file.message_types_by_name)
    assert set(re.findall(r"^service (\w+)", text, re.MULTILINE)) == set(file.services_by_name)
    numbered = {(name, int(number)) for name, number in re.findall(r"(\w+) = (\d+);", text)}
    generated = {(f.name, f.number) for m in file.message_types_by_name.values() for f in m.fields}
    generated |= {(v.name, v.number) for e in file.enum_types_by_name.values() for v in e.values}
    assert generated == numbered
    assert "1.71.2" in (PROTO / "drafting_pb2_grpc.py").read_text()  # old on purpose, see proto/generate


def test_stubs_import_without_a_warning_and_lightly():
    code = (
        "import sys; from redraft.v1 import drafting_pb2_grpc;"
        "print(sorted({'torch', 'transformers', 'faiss', 'pyarrow', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
