"""The `redraft` command itself: what it does when whoever reads its output has seen enough."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from test_corpus_source import write

from redraft import cli


def run(*words, closed: bool) -> subprocess.CompletedProcess:
    """`redraft WORDS`, its output into a pipe; `closed`: that nobody reads."""
    reading, writing = os.pipe()
    if closed:
        os.close(reading)
    try:
        return subprocess.run(
            [sys.executable, "-m", "redraft", *map(str, words)],
            check=False,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writing)
        if not closed:
            os.close(reading)


@pytest.mark.parametrize("words", [("index", "inspect", "INDEX"), ("index", "inspect", "INDEX", "--json"), ("--help",)])
def test_a_closed_pipe_ends_it_quietly(words, tmp_path):
    """As the signal ends other tools: 141 in a shell, and nothing on standard error."""
    index = write(tmp_path / "i", [[1, 2]], "suffix_automaton")
    words = [index if word == "INDEX" else word for word in words]
    done = run(*words, closed=True)
    assert done.stderr == "" and done.returncode == (0 if "--help" in words else 141)  # argparse takes it for printed
    done = run(*words, closed=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failure_stays_a_failure(tmp_path):
    done = run("index", "inspect", tmp_path / "missing", closed=True)
    assert done.returncode == 1 and "missing" in done.stderr


def test_ctrl_c_while_a_command_is_imported(monkeypatch, capsys):
    """That takes seconds where torch is among what it needs."""

    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["index", "inspect", "x"]) == 130 and capsys.readouterr().err == "redraft: interrupted\n"
