"""`redraft generate`: the same text plainly, with drafts in process and through a server; figures on standard error."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import pytest
import torch
from tiny_models import save_with_tokenizer, tiny_llama

from redraft.cli import main
from redraft.decoding.generate import generate
from redraft.decoding.text_stream import TextStream

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_with_tokenizer(tiny_llama(), tmp_path_factory.mktemp("tiny"))


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["generate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_text_is_the_same_plainly_and_drafted(model_folder, capsys):
    options = ["--model", model_folder, "abcabcabc", "--max-new-tokens", "40"]
    code, plain, figures = run(capsys, *options, "--plain")
    assert code == 0
    assert re.search(r"40 tokens in .* 39 steps, 1\.00 tokens per step", figures)
    assert len(plain.rstrip("\n")) > 20
    code, drafted, figures = run(capsys, *options)
    assert (code, drafted) == (0, plain)
    assert "time: prefill" in figures


def test_drafted_tokens_are_coloured(model_folder, capsys, monkeypatch):
    monkeypatch.setattr("redraft.decoding.generate.generate", functools.partial(generate, adaptive=False))  # no clock
    options = ["--model", model_folder, "ababababab", "--max-new-tokens", "400"]
    _, plain, _ = run(capsys, *options, "--plain")
    _, coloured, figures = run(capsys, *options, "--show-drafts")
    accepted = int(re.search(r"accepted (\d+) of \d+ drafted", figures).group(1))
    assert coloured.count("\033[38;5;") == accepted > 0 and "colours:" in figures
    assert re.sub(r"\033\[[0-9;]*m", "", coloured) == plain


def test_sampling_repeats_with_its_seed(model_folder, capsys):
    options = ["--model", model_folder, "abc", "--max-new-tokens", "20", "--temperature", "0.9", "--top-k", "20"]
    _, first, figures = run(capsys, *options, "--plain")
    seed = re.search(r"seed (\d+)", figures).group(1)
    assert run(capsys, *options, "--seed", seed)[1] == first


def test_the_prompt_may_come_from_standard_input(model_folder):
    command = [sys.executable, "-m", "redraft", "generate", "--model", str(model_folder), "-", "--plain"]
    done = subprocess.run([*command, "--max-new-tokens", "5"], input="abc", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "5 tokens in" in done.stderr


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--model", "/nowhere/model", "abc"], "no such file or folder"),
        (["--model", "MODEL", ""], "the prompt is empty"),
        (["--model", "MODEL", "abc", "--max-new-tokens", "0"], "max_new_tokens"),
        (["--model", "MODEL", "abc", "--server", "unix:/nowhere/redraft.sock"], "no draft server"),
        (["--model", "MODEL", "abc", "--index", "/nowhere/my.index"], "/nowhere/my.index"),
    ],
)
def test_failures_end_with_1_and_say_why(model_folder, capsys, monkeypatch, arguments, text):
    monkeypatch.setattr("redraft.client.draft_client._REQUIRE_SECONDS", 0.5)
    code, _, figures = run(capsys, *(model_folder if word == "MODEL" else word for word in arguments))
    assert code == 1
    assert text in figures


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "MODEL", "abc", "--seed", "3"],
        ["--model", "MODEL", "abc", "--plain", "--server", "unix:/x.sock"],
        ["--model", "MODEL"],
        ["abc"],
    ],
)
def test_wrong_usage_ends_with_2(arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["generate", *arguments])
    assert exit_.value.code == 2


def test_characters_are_shown_when_they_are_complete():
    class Bytes:
        """A tokenizer whose tokens are the bytes of UTF-8."""

        def decode(self, tokens, skip_special_tokens=False):
            return bytes(tokens).decode("utf-8", errors="replace")

    text = "naïve 日本語 🙂 " * 30
    stream = TextStream(Bytes(), b"before ")
    pieces = [stream.push(token) for token in text.encode()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
