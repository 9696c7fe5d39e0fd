"""The package as a whole: what an import costs, what is public, and that every file is one module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import redraft

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "faiss", "pyarrow", "tokenizers", "ray", "matplotlib")


def run_python(code: str, **environment) -> str:
    """Run `code` in a process of its own, away from the repository, and return what it prints."""
    env = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd="/", timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_brings_in_nothing_heavy():
    loaded = run_python("import redraft, sys; redraft.Drafter; redraft.DraftClient; print(*sys.modules)").split()
    assert not set(HEAVY) & set(loaded)


def test_every_public_name_is_there():
    for name in redraft.__all__:
        assert getattr(redraft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = redraft.nothing


def test_no_file_is_loaded_under_two_names():
    code = """
import collections, sys
import redraft
for name in redraft.__all__: getattr(redraft, name)
import redraft.cli, redraft.server, redraft.index_builders, redraft.replay.run
files = collections.defaultdict(set)
for name, module in list(sys.modules.items()):
    if getattr(module, "__file__", None) and not name.startswith("__"):
        files[module.__file__].add(module.__name__)
print([names for names in files.values() if len(names) > 1 and any("redraft" in n for n in names)])
"""
    assert run_python(code) == "[]"


def test_pyproject_lists_every_folder_of_the_package():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and later")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = {project["package-dir"].get(name, name.replace(".", "/")) for name in project["packages"]}
    outside = {"tests", "benchmarks", ".venv", "build"}
    there = {
        str(init.parent.relative_to(ROOT))
        for init in ROOT.rglob("__init__.py")
        if init.relative_to(ROOT).parts[0] not in outside
    }
    assert there == listed


def test_a_read_only_install_without_a_home_works(tmp_path):
    """Numba finds no place for its cache beside the source or at home: the temporary folder serves."""
    code = f"""
import os, sys, pathlib, tempfile
import numba
real_open = tempfile.TemporaryFile
def guarded(*a, **k):
    if not str(k.get("dir", "")).startswith({str(tmp_path)!r}):
        raise OSError(30, "read-only file system")
    return real_open(*a, **k)
tempfile.TemporaryFile = guarded
import redraft
from redraft.retrieval import kernel
print(numba.config.CACHE_DIR)
from redraft.retrieval.ngram import propose
print(len(propose([1, 2, 1, 2], 3)))
"""
    printed = run_python(code, TMPDIR=str(tmp_path), HOME="/nonexistent", XDG_CACHE_HOME="").splitlines()
    assert printed[0].startswith(str(tmp_path)) and printed[1] == "3"
