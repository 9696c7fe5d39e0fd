"""JSON records: one value a line (`.jsonl`), or one array of records (a `.json` file that the user names).

A record is a string, or an object with `text` or `content`, or a chat: OpenAI `messages` (role, content), ShareGPT
`conversations` (from, value), or a bare list of such turns. Of a chat each turn of the wanted roles is a document of
its own; by default the assistant's, because that is what a model will write again.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator

from redraft.index_builders.readers.byte_streams import open_bytes
from redraft.index_builders.readers.documents import BadRecordError, Document, ReadOptions, Tally
from redraft.index_builders.readers.sources import SourceFile

__all__ = ["TEXT_KEYS", "documents_of_record", "read_json_array", "read_json_lines"]

CHAT_KEYS = ("messages", "conversations")
TEXT_KEYS = (*CHAT_KEYS, "text", "content")

_ROLES = {"gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "human": "user"}


def read_json_lines(file: SourceFile, options: ReadOptions, tally: Tally) -> Iterator[Document]:
    """Documents of a file with one JSON value a line; blank lines are skipped, bad ones counted in `tally`."""
    offset = 0
    with open_bytes(file.path, tally) as stream:
        for number, line in enumerate(stream, 1):
            if number == 1 and line.startswith(codecs.BOM_UTF8):
                line, offset = line.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
            begin, offset, where = offset, offset + len(line), f"{file.path}:{number}"
            if not line.strip():
                continue
            try:
                record = _parse_line(line, begin, where)
            except BadRecordError as error:
                tally.bad(error)
            else:
                yield from documents_of_record(record, options, tally, where)


def read_json_array(file: SourceFile, options: ReadOptions, tally: Tally) -> Iterator[Document]:
    """Documents of a `.json` file that holds an array of records. It is parsed whole."""
    with open_bytes(file.path, tally) as stream:
        content = stream.read()
    try:
        records = json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadRecordError(
            str(file.path), f"not valid JSON ({error}); one record a line belongs in a .jsonl file"
        ) from error
    if not isinstance(records, list):
        raise BadRecordError(str(file.path), f"wanted an array of records, got {_kind(records)}")
    for number, record in enumerate(records, 1):
        yield from documents_of_record(record, options, tally, f"{file.path}: record {number}")


def documents_of_record(record, options: ReadOptions, tally: Tally, where: str) -> Iterator[Document]:
    """Documents of one record; a bad one, and empty texts, are counted in `tally`."""
    try:
        texts = _texts_of_record(record, options, where)
    except BadRecordError as error:
        tally.bad(error)
        return
    for text in texts:
        if text.strip():
            yield Document(text, where)
        else:
            tally.empty += 1


def _texts_of_record(record, options: ReadOptions, where: str) -> list[str]:
    """The texts of one record. Raises BadRecordError where there is none or it is of another kind."""
    if isinstance(record, str):
        return [_encodable(record, where)]
    if isinstance(record, list):
        return _texts_of_chat(record, options, where)
    if not isinstance(record, dict):
        raise BadRecordError(where, f"wanted a JSON object or string, got {_kind(record)}")
    wanted = TEXT_KEYS if options.text_key is None else (options.text_key,)
    key = next((key for key in wanted if record.get(key) is not None), None)
    if key is None:
        present = ", ".join(sorted(map(str, record))[:8]) or "nothing"
        hint = "; name the right one with --text-key" if options.text_key is None else ""
        raise BadRecordError(where, f"no text: wanted {' or '.join(wanted)}, the record has {present}{hint}")
    value = record[key]
    if isinstance(value, list):
        return _texts_of_chat(value, options, where)
    if not isinstance(value, str):
        raise BadRecordError(where, f"wanted a string under {key!r}, got {_kind(value)}")
    return [_encodable(value, where)]


def _parse_line(line: bytes, offset: int, where: str):
    """The value of one line, which begins at byte `offset` of the file."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadRecordError(
            where, f"byte {offset + error.start} is 0x{line[error.start]:02x}, which is not UTF-8 there"
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadRecordError(where, f"wanted one JSON value a line ({error})") from error


def _texts_of_chat(turns: list, options: ReadOptions, where: str) -> list[str]:
    """The turns of the wanted roles, or the whole chat as one text where `options.render_chat` is given."""
    messages = [_message(turn, where) for turn in turns]
    if options.render_chat is not None:
        chat = [{"role": _ROLES.get(role, role), "content": content} for role, content in messages]
        try:
            return [_encodable(options.render_chat(chat), where)]
        except ValueError as error:
            raise BadRecordError(where, str(error)) from error
    wanted = set(options.roles)
    return [_encodable(content, where) for role, content in messages if {role, _ROLES.get(role, role)} & wanted]


def _message(turn, where: str) -> tuple[str, str]:
    """(role, content) of one turn. A turn that is only a tool call has no content of its own."""
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    if not isinstance(role, str):
        raise BadRecordError(where, f"wanted chat turns with a role (or from), got {_kind(turn)}")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):  # parts of several kinds: text, pictures, ...
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if content is not None and not isinstance(content, str):
        raise BadRecordError(where, f"wanted a string as the {role} turn's content, got {_kind(content)}")
    return role, content or ""


def _encodable(text: str, where: str) -> str:
    """`text` itself; JSON can write half a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecordError(where, f"half a surrogate pair, \\u{ord(text[error.start]):04x}, in the text") from error
    return text


def _kind(value) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
