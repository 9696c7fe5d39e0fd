"""Readers and tokenizers: what comes out of every kind of source, and what is said about sources that are wrong."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from redraft.index_builders import tokenizers
from redraft.index_builders.readers import text_files
from redraft.index_builders.readers.documents import ReadOptions, Tally
from redraft.index_builders.readers.reading import read_documents
from redraft.index_builders.readers.sources import list_files, signature
from redraft.index_builders.tokenizers import Tokenizer, load_tokenizer


def read(*sources, **options) -> tuple[list, Tally]:
    """The contents of all documents, and the counts."""
    options = ReadOptions(**options)
    tally = Tally()
    files = list_files([str(source) for source in sources], options)
    return [document.content for _, document in read_documents(files, options, tally)], tally


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*records) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_folder_is_walked_in_order_without_hidden_binary_and_foreign_files(tmp_path):
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "a/deep/code.py", "first")
    write(tmp_path / "c.md", "third")
    write(tmp_path / "Makefile", "all:")
    write(tmp_path / "empty.txt", "\n")
    write(tmp_path / ".hidden.txt", "no")
    write(tmp_path / ".git/config.txt", "no")
    write(tmp_path / "__pycache__/x.py", "no")
    write(tmp_path / "picture.png", "no")
    write(tmp_path / "latin.txt", "caf\xe9".encode("latin-1"))
    write(tmp_path / "binary.txt", b"abc\0def")
    write(tmp_path / "data.jsonl", lines({"text": "a record"}))
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.txt")
    found, tally = read(tmp_path)
    assert found == ["all:", "second", "third", "a record", "first"]
    assert (tally.skipped_files, tally.empty, tally.bad_records) == (2, 1, 0)
    assert read(tmp_path, exclude=("*.md", "deep", "Make*"))[0] == ["second", "a record"]


def test_indexes_and_work_folders_are_no_sources(tmp_path):
    write(tmp_path / "a.txt", "text")
    for file in ("document_ends.npy", "ids.npy", "map.npy"):  # of a corpus index, a successor table, a dense index
        for name in ("manifest.json", file):
            write(tmp_path / f"{file}.index" / name, "{}")
    for name in ("plan.json", "lock"):
        write(tmp_path / "my.index.work" / name, "{}")
    assert read(tmp_path)[0] == ["text"]
    with pytest.raises(ValueError, match="ids.npy.index: an index or the work folder of a build"):
        read(tmp_path / "ids.npy.index")


def test_named_file_is_text_whatever_its_suffix(tmp_path):
    assert read(write(tmp_path / "notes", "\ufeffwith a mark"))[0] == ["with a mark"]
    assert read(write(tmp_path / "page.txt.gz", gzip.compress(b"packed")))[0] == ["packed"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"ok\nbad \xff\n", r"x\.txt: byte 7 is 0xff"), (b"a\0b", r"x\.txt: binary file: NUL at byte 1")],
)
def test_named_file_that_is_not_text_is_an_error(tmp_path, content, said):
    path = write(tmp_path / "x.txt", content)
    with pytest.raises(ValueError, match=said):
        read(path)
    assert read(path, max_bad_records=1)[1].bad_records == 1


def test_large_file_is_cut_after_line_breaks_and_between_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_PIECE_BYTES", 16)
    text = "one line\nanother line\nlast"
    pieces, _ = read(write(tmp_path / "a.txt", text))
    assert len(pieces) > 1 and "".join(pieces) == text and all(piece.endswith("\n") for piece in pieces[:-1])
    for character in "aé…😀":
        for shift in range(4):
            text = "x" * shift + character * 40
            pieces, _ = read(write(tmp_path / "b.txt", text))
            assert "".join(pieces) == text
    with pytest.raises(ValueError, match=r"byte 40 is 0xff"):
        read(write(tmp_path / "c.txt", b"0123456789abcde\n" * 2 + b"01234567\xff"))


def test_globs_and_missing_sources(tmp_path):
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "sub/a.txt", "a")
    assert read(tmp_path / "**/*.txt")[0] == ["b", "a"]
    with pytest.raises(FileNotFoundError, match="no file matches"):
        read(tmp_path / "*.rst")
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such file or folder"):
        read(tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match=r"bare: no text in this folder \(0 files"):
        read(tmp_path / "bare")


def test_a_source_without_a_name_is_not_this_folder(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="empty text"):
        list_files([""], ReadOptions())


def test_name_with_pattern_characters_is_a_file_first(tmp_path):
    assert read(write(tmp_path / "a[1].txt", "yes"))[0] == ["yes"]


def test_packed_json_lines(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    content = lines(*({"text": f"document {i} " + "x" * (i % 70)} for i in range(5000))).encode()
    expected = read(write(tmp_path / "plain.jsonl", content))[0]
    assert len(expected) == 5000
    assert read(write(tmp_path / "a.jsonl.gz", gzip.compress(content)))[0] == expected
    half = content.index(b"\n", len(content) // 2) + 1
    frames = zstandard.compress(content[:half]) + zstandard.compress(content[half:])
    assert read(write(tmp_path / "a.jsonl.zst", frames))[0] == expected


@pytest.mark.parametrize("cut", [0.5, 0.999])
def test_cut_and_damaged_packed_files_are_errors(tmp_path, cut):
    zstandard = pytest.importorskip("zstandard")
    content = lines(*({"text": os.urandom(40).hex()} for _ in range(2000))).encode()
    for name, packed in (("a.jsonl.gz", gzip.compress(content)), ("a.jsonl.zst", zstandard.compress(content))):
        with pytest.raises(ValueError, match=f"{name}: .*cut"):
            read(write(tmp_path / name, packed[: int(len(packed) * cut)]), max_bad_records=0)
        damaged = bytearray(packed)
        damaged[:4] = b"\0\0\0\0"
        with pytest.raises(ValueError, match=f"{name}: damaged"):
            read(write(tmp_path / name, bytes(damaged)))


def test_parquet_and_saved_datasets(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"n": range(3000), "text": [f"row {i}" for i in range(3000)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    expected = [f"row {i}" for i in range(3000)]
    assert read(tmp_path / "a.parquet")[0] == expected
    assert read(tmp_path)[0] == expected
    with pytest.raises(ValueError, match=r"no column body among n, text"):
        read(tmp_path / "a.parquet", text_key="body")
    holes = pyarrow.table({"text": ["a", None, "c"]})
    pyarrow.parquet.write_table(holes, tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet: row 2: no text"):
        read(tmp_path / "b.parquet")
    turns = [{"role": role, "content": content} for role, content in (("user", "question"), ("assistant", "answer"))]
    chats = pyarrow.table({"messages": [turns, turns[:1]]})
    pyarrow.parquet.write_table(chats, tmp_path / "c.parquet")
    assert read(tmp_path / "c.parquet")[0] == ["answer"]
    with pytest.raises(ValueError, match=r"d\.parquet: damaged"):
        read(write(tmp_path / "d.parquet", b"PAR1 no"))

    for split in ("train", "test"):  # the layout that datasets.save_to_disk writes
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        for part in range(2):
            with pyarrow.ipc.new_stream(str(folder / f"data-{part}.arrow"), table.schema) as writer:
                writer.write_table(table.slice(part * 1500, 1500))
        files = [{"filename": f"data-{part}.arrow"} for part in range(2)]
        write(folder / "state.json", json.dumps({"_data_files": files}))
        write(folder / "dataset_info.json", "{}")
    write(tmp_path / "saved/dataset_dict.json", json.dumps({"splits": ["train", "test"]}))
    assert read(tmp_path / "saved/test")[0] == expected
    assert read(tmp_path / "saved")[0] == expected * 2


def test_token_arrays(tmp_path):
    np.save(tmp_path / "one.npy", np.arange(5, dtype=np.uint16))
    np.save(tmp_path / "rows.npy", np.arange(6, dtype=np.int64).reshape(2, 3))
    np.save(tmp_path / "floats.npy", np.zeros(3))
    assert [list(tokens) for tokens in read(tmp_path / "one.npy")[0]] == [[0, 1, 2, 3, 4]]
    assert [list(tokens) for tokens in read(tmp_path / "rows.npy")[0]] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match=r"wanted integer token ids .* got float64\(3,\)"):
        read(tmp_path / "floats.npy")
    with pytest.raises(ValueError, match=r"damaged or no NumPy array"):
        read(write(tmp_path / "cut.npy", (tmp_path / "one.npy").read_bytes()[:-3]))


def megatron(folder: Path, dtype_code: int, dtype, sequences: list[list[int]], bounds: list[int]) -> Path:
    data = b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences)
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    offsets = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(dtype).itemsize
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, dtype_code, len(sequences), len(bounds))
    write(folder / "m.idx", header + lengths.tobytes() + offsets.tobytes() + np.array(bounds, "<i8").tobytes())
    return write(folder / "m.bin", data)


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8")])
def test_megatron_pair(tmp_path, code, dtype):
    path = megatron(tmp_path, code, dtype, [[1, 2], [3], [4, 5, 6]], [0, 2, 2, 3])
    found, tally = read(path)
    assert [list(tokens) for tokens in found] == [[1, 2, 3], [4, 5, 6]] and tally.empty == 1
    write(path, path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"\.bin file is cut short"):
        read(path)


def test_signature_follows_content_and_order(tmp_path):
    paths = [str(write(tmp_path / name, "x")) for name in ("a.txt", "b.txt")]
    first = signature(list_files(paths, ReadOptions()))
    assert first == signature(list_files(paths, ReadOptions()))
    assert first != signature(list_files(paths[::-1], ReadOptions()))
    write(tmp_path / "a.txt", "xy")
    assert first != signature(list_files(paths, ReadOptions()))


def test_importing_the_builders_is_light():
    heavy = "torch", "transformers", "tokenizers", "pyarrow", "zstandard", "faiss"
    code = (
        "import sys, redraft.index_builders, redraft.index_builders.readers.reading, redraft.index_builders.tokenizers,"
        f" redraft.index_builders.build; print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Tokenizers


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def make_tokenizer(path: Path) -> Path:
    """A small byte-level BPE with one special token, and a post-processor that adds it."""
    library = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = library.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(json.__file__).read_text(), Path(subprocess.__file__).read_text()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return path


def test_tokenizer_json(tokenizer_file):
    tokenizer = load_tokenizer(tokenizer_file)
    text = "def main(argv):\n    return Ünïcode  😀 <s> 12"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and len(ids) > 8 and tokenizer.vocab_size == 600
    assert np.count_nonzero(ids == 0) == 1  # written out, not added
    assert tokenizer.decode(ids) == text
    assert [list(i) for i in tokenizer.encode_batch([text, "", "x"])] == [list(ids), [], list(tokenizer.encode("x"))]
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.name.endswith("/tokenizer.json")


def test_fingerprint_ignores_truncation_and_padding_but_not_the_vocabulary(tokenizer_file):
    library = pytest.importorskip("tokenizers")
    plain = load_tokenizer(tokenizer_file)
    backend = library.Tokenizer.from_file(str(tokenizer_file))
    backend.no_truncation()
    backend.no_padding()
    assert Tokenizer(backend, "again").fingerprint == plain.fingerprint
    backend.enable_truncation(3)
    assert Tokenizer(backend, "again").fingerprint == plain.fingerprint
    assert backend.truncation is not None, "the caller's tokenizer was changed"
    backend.add_tokens(["<extra>"])
    changed = Tokenizer(backend, "more")
    assert changed.fingerprint != plain.fingerprint and changed.vocab_size == 601


def test_long_texts_are_encoded_in_pieces_without_a_seam(tokenizer_file, monkeypatch):
    tokenizer = load_tokenizer(tokenizer_file)
    text = "\n".join(line.strip() for line in Path(subprocess.__file__).read_text().splitlines() if line.strip())
    whole = tokenizer.encode(text)
    monkeypatch.setattr(tokenizers, "_PIECE_CHARACTERS", 10_000)
    np.testing.assert_array_equal(tokenizer.encode(text), whole)
    assert tokenizer.decode(tokenizer.encode("x" * 25_000)) == "x" * 25_000


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("missing.json", FileNotFoundError, "no such file"),
        ("./missing", FileNotFoundError, "no such file"),
        ("notes.txt", ValueError, "wanted a tokenizer.json"),
    ],
)
def test_wrong_tokenizers(tmp_path, monkeypatch, name, error, said):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "notes.txt", "hello")
    with pytest.raises(error, match=said):
        load_tokenizer(name)


def test_gguf_and_folder_give_the_ids_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = Path(os.environ.get("REDRAFT_SMOLLM2", Path.home() / ".cache/redraft/models/smollm2-135m"))
    gguf = next(folder.glob("*.gguf"), None)
    if gguf is None:
        pytest.skip(f"no model in {folder}")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder), gguf_file=gguf.name)
    theirs.save_pretrained(tmp_path / "saved")
    ours = load_tokenizer(gguf)
    texts = [Path(subprocess.__file__).read_text(), "<|im_start|>user\nÄ 你好 12345\n\n  x<|im_end|>", "\t\n "]
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    for tokenizer in (ours, load_tokenizer(tmp_path / "saved"), load_tokenizer(tmp_path / "saved/tokenizer.json")):
        assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected
        assert tokenizer.fingerprint == ours.fingerprint and tokenizer.vocab_size == len(theirs)
    chat = [{"role": "user", "content": "hi"}]
    assert ours.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False)
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(tmp_path / "saved/tokenizer.json").render_chat(chat)
