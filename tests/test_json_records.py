"""JSON records: which texts come out of each kind, and what is said about bad ones."""

from __future__ import annotations

import json

import pytest
from test_index_builders import lines, read, write

from redraft.index_builders.readers.documents import ReadOptions, Tally
from redraft.index_builders.readers.reading import read_documents
from redraft.index_builders.readers.sources import list_files

CHAT = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer"},
    {"role": "user", "content": "again?"},
    {"role": "assistant", "content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]},
    {"role": "assistant", "content": None, "tool_calls": []},
]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]


@pytest.mark.parametrize(
    ("record", "options", "texts"),
    [
        ({"text": "a"}, {}, ["a"]),
        ({"content": "b"}, {}, ["b"]),
        ({"body": "c", "text": "no"}, {"text_key": "body"}, ["c"]),
        ("bare", {}, ["bare"]),
        ({"messages": CHAT, "text": "rendered"}, {}, ["answer", "in parts"]),
        ({"messages": CHAT}, {"roles": ("user",)}, ["question", "again?"]),
        ({"conversations": SHAREGPT}, {}, ["hello"]),
        ({"conversations": SHAREGPT}, {"roles": ("human", "gpt")}, ["hi", "hello"]),
        ({"turns": SHAREGPT}, {"text_key": "turns", "roles": ("user", "assistant")}, ["hi", "hello"]),
        (CHAT[:2], {}, ["answer"]),
        ({"text": ""}, {}, []),
        ({"content": "no", "text": "yes"}, {}, ["yes"]),
        ({"conversations": SHAREGPT, "messages": CHAT[:2]}, {}, ["answer"]),
        ([{"role": "tool", "content": "no"}, {"role": "assistant", "from": "user", "content": "yes", "value": "no"}], {}, ["yes"]),
        ([{"role": "assistant", "content": ["no", {"type": "image", "text": 5}, {"text": "yes"}, 7]}], {}, ["yes"]),
        ({"text": "\u2028 no line break \x85"}, {}, ["\u2028 no line break \x85"]),
    ],
)
def test_json_records(tmp_path, record, options, texts):
    assert read(write(tmp_path / "a.jsonl", lines(record)), **options)[0] == texts
    assert read(write(tmp_path / "a.json", json.dumps([record])), **options)[0] == texts


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b'{"text": "cut', r"a\.jsonl:3: wanted one JSON value a line"),
        (b'{"h":1,"g":1,"f":1,"e":1,"d":1,"c":1,"b":1,"a":1,"i":1}', r"the record has a, b, c, d, e, f, g, h; "),
        (b"{}", r"a\.jsonl:3: no text: .*the record has nothing; "),
        (b"true", r"a\.jsonl:3: wanted a JSON object or string, got true or false"),
        (b'"\\ud800"', r"a\.jsonl:3: half a surrogate pair, \\ud800"),
        (b'[{"role": "assistant", "content": "\\udfff"}]', r"a\.jsonl:3: half a surrogate pair, \\udfff"),
        (b'{"title": "x", "n": 1}', r"a\.jsonl:3: no text: wanted .*text.*the record has n, title; .*--text-key"),
        (b"17", r"a\.jsonl:3: wanted a JSON object or string, got a number"),
        (b'{"text": 17}', r"a\.jsonl:3: wanted a string under 'text', got a number"),
        (b'{"text": null}', r"a\.jsonl:3: no text"),
        (b"null", r"a\.jsonl:3: wanted a JSON object or string, got null"),
        (b'{"text": "\xff"}', r"a\.jsonl:3: byte 33 is 0xff, which is not UTF-8 there"),
        (b'{"text": "\\ud800"}', r"a\.jsonl:3: half a surrogate pair, \\ud800"),
        (b'{"messages": ["hi"]}', r"a\.jsonl:3: wanted chat turns with a role"),
        (b'{"messages": [{"role": "assistant", "content": 5}]}', r"a\.jsonl:3: wanted a string as the assistant turn"),
        (b"[" * 100_000, r"a\.jsonl:3: wanted one JSON value a line"),
    ],
)
def test_bad_json_line_is_named_and_counted(tmp_path, bad, said):
    path = write(tmp_path / "a.jsonl", b'{"text": "first"}\n    \n' + bad + b'\n{"text": "last"}')
    with pytest.raises(ValueError, match=said + r".*a build tolerates some with --max-bad-records"):
        read(path)
    found, tally = read(path, max_bad_records=1)
    assert found == ["first", "last"] and tally.bad_records == 1
    write(path, bad + b"\n" + bad)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: .*one more than --max-bad-records 1"):
        read(path, max_bad_records=1)


def test_whole_chats_are_rendered_with_normal_roles(tmp_path):
    def render(chat):
        if len(chat) > 4:
            raise ValueError("too long a chat")
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in chat)

    path = write(tmp_path / "a.jsonl", lines({"conversations": SHAREGPT}, {"text": "plain"}, {"messages": CHAT}))
    found, tally = read(path, render_chat=render, max_bad_records=1)
    assert found == ["<user>hi<assistant>hello", "plain"] and tally.bad_records == 1
    with pytest.raises(ValueError, match=r"a\.jsonl:3: too long a chat"):
        read(path, render_chat=render)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: half a surrogate pair"):
        read(path, render_chat=lambda chat: "\ud800")


def test_warnings_end_after_some(tmp_path):
    said = []
    options = ReadOptions(max_bad_records=100)
    files = list_files([str(write(tmp_path / "a.jsonl", "bad\n" * 90))], options)
    tally = Tally(warn=said.append)
    assert list(read_documents(files, options, tally)) == [] and tally.bad_records == 90
    assert len(said) == 21 and "a.jsonl:20:" in said[19] and "only counted" in said[20]


def test_json_file_must_be_an_array(tmp_path):
    with pytest.raises(ValueError, match=r"wanted an array of records, got an object"):
        read(write(tmp_path / "a.json", "{}"))
    with pytest.raises(ValueError, match=r"belongs in a \.jsonl file"):
        read(write(tmp_path / "a.json", '{"text": "a"}\n{"text": "b"}'))
    with pytest.raises(ValueError, match=r"a\.json: not valid JSON .*utf-8"):
        read(write(tmp_path / "a.json", b'[{"text": "\xff"}]'))
    with pytest.raises(ValueError, match=r"a\.json: record 2: wanted a JSON object or string, got null"):
        read(write(tmp_path / "a.json", '["a", null]'))


def test_texts_of_spaces_are_counted_as_empty(tmp_path):
    found, tally = read(write(tmp_path / "a.jsonl", lines({"text": " \n"}, "", {"text": "a"}, {"messages": CHAT[3:]})))
    assert found == ["a", "in parts"] and tally.empty == 3


def test_a_byte_order_mark_belongs_to_no_record_but_to_the_offsets(tmp_path):
    mark = b"\xef\xbb\xbf"
    assert read(write(tmp_path / "a.jsonl", mark + b'"first"\n"second"'))[0] == ["first", "second"]
    with pytest.raises(ValueError, match=r"a\.jsonl:2: byte 12 is 0xff"):
        read(write(tmp_path / "a.jsonl", mark + b'"first"\n"\xff"'))
    with pytest.raises(ValueError, match=r"a\.jsonl:2: wanted one JSON value a line"):
        read(write(tmp_path / "a.jsonl", b'"first"\n' + mark + b'"second"'))


def test_the_hint_is_given_where_it_helps(tmp_path):
    path = write(tmp_path / "a.jsonl", lines({"title": "x"}))
    with pytest.raises(ValueError, match="the record has title; name the right one with --text-key"):
        read(path)
    with pytest.raises(ValueError, match=r"no text: wanted body, the record has title \("):
        read(path, text_key="body")
