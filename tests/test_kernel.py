"""Compiled kernels: what is compiled stays right when a source changes, a cache is found wherever one can be, and the
same code runs without the compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from redraft.retrieval import best_first, kernel
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.drafter import Drafter

CALLEE = "from toy.kernel import inner\n\n@inner\ndef answer():\n    return {}\n"
CALLER = """
from toy.kernel import kernel
from toy.callee import answer

@kernel
def ask():
    return answer()
"""


@pytest.fixture
def toy(tmp_path):
    """A package with a kernel that calls a part in another file, under the real `kernel.py`."""
    package = tmp_path / "toy"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(kernel.__file__, package / "kernel.py")
    (package / "callee.py").write_text(CALLEE.format(1))
    (package / "caller.py").write_text(CALLER)
    return package


def ask(toy, first="", **environment):
    """Run the kernel in a process of its own; returns what it prints."""
    code = f"{first}\nfrom toy.caller import ask\nprint(ask(), sum(ask.stats.cache_hits.values()))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment = {**kept, "PYTHONPATH": str(toy.parent), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def compiled(folder):
    return sorted(path.name for path in Path(folder).rglob("*.nbi"))


def test_a_kernel_is_compiled_once_and_again_when_what_it_calls_has_changed(toy):
    assert ask(toy) == ["1", "0"]
    assert ask(toy) == ["1", "1"]
    (toy / "callee.py").write_text(CALLEE.format(2))
    assert ask(toy) == ["2", "0"]
    assert ask(toy) == ["2", "1"]


def test_only_what_is_older_than_the_newest_source_is_dropped(tmp_path):
    def touch(name, time):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (time, time))
        return path

    touch("a.py", 100)
    touch("sources/b.py", 200)
    old = [touch("__pycache__/a.nbi", 150), touch("sources/__pycache__/b.nbi", 199)]
    young = [touch("__pycache__/c.nbi", 201), touch("sources/__pycache__/d.nbi", 300), touch("__pycache__/a.pyc", 1)]
    kernel._drop_stale_kernels(tmp_path)
    assert not any(path.exists() for path in old) and all(path.exists() for path in young)
    kernel._drop_stale_kernels(tmp_path / "nothing here")


def test_a_package_that_cannot_be_written_to_is_compiled_in_the_temporary_directory(toy, tmp_path):
    (toy / "__pycache__").touch()  # a file in place of the folder: not even root can write into it
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    nowhere = {"XDG_CACHE_HOME": "/dev/null/no", "HOME": "/dev/null/no", "TMPDIR": str(elsewhere)}
    assert ask(toy, **nowhere) == ["1", "0"]
    assert ask(toy, **nowhere) == ["1", "1"]
    assert len(compiled(elsewhere)) == 1


def test_with_no_writable_place_at_all_kernels_are_compiled_in_memory(toy, tmp_path):
    (toy / "__pycache__").touch()
    first = "import tempfile; tempfile.tempdir = '/dev/null/no'"
    nowhere = {"XDG_CACHE_HOME": "/dev/null/no", "HOME": "/dev/null/no"}
    for _ in range(2):
        assert ask(toy, first, **nowhere) == ["1", "0"]
    assert compiled(tmp_path) == []


def test_an_explicit_cache_directory_is_used(toy, tmp_path):
    chosen = tmp_path / "chosen"
    assert ask(toy, NUMBA_CACHE_DIR=str(chosen)) == ["1", "0"]
    assert len(compiled(chosen)) == 1 and compiled(toy) == []


def test_every_kernel_lets_other_threads_run():
    from numba.core.registry import CPUDispatcher

    modules = [module for name, module in sys.modules.items() if name.startswith("redraft.retrieval")]
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, CPUDispatcher)}
    assert len(kernels) > 20 or os.environ.get("NUMBA_DISABLE_JIT") == "1"
    for function in kernels:
        assert function.targetoptions["nogil"] and not function.targetoptions.get("parallel"), function
        # sums may be taken in any order and fused with products where a kernel says so; no value is taken for impossible
        assert set(function.targetoptions.get("fastmath") or ()) <= {"contract", "nsz", "reassoc"}, function


def test_each_entry_point_is_compiled_for_one_kind_of_call():
    """Whatever callers hand in: a second form would cost a minute of compiling in the middle of a request."""
    with Drafter() as drafter, drafter.open([1, 2, 3] * 5) as session:
        session.draft(max_nodes=np.int64(4), min_prob=0)
        session.draft(max_nodes=4, min_prob=np.float32(0.1), proposal=np.array([1, 2]))
        session.draft(min_prob=True)
        session.commit([1])
        session.commit(np.frombuffer(b"\1\0\0\0", np.int32), Candidates.checked([1], [0], [[1, 2]], [[0.5, 0.1]]))
    if os.environ.get("NUMBA_DISABLE_JIT") != "1":
        for function in (best_first.draft_tree, best_first.learn_tokens, best_first.follow_tokens):
            assert len(function.signatures) == 1, function


def test_the_same_code_runs_without_the_compiler():
    """The twins' comparisons again, in plain Python: what Numba might forgive (types, bounds) Python does not."""
    chosen = [
        "copy_pointer", "token_recycling", "bundle", "frozen_automaton", "suffix_automaton", "structured_texts",
        "regular_streams", "forgetting[0-2]", "random_life[2-", "side_by_side[0-4]", "left_out[memory]", "plain_heap[8-",
    ]  # fmt: skip
    modules = [
        "copy_pointer", "token_recycling", "bundle", "frozen_automaton", "suffix_automaton", "ngram", "prefix_trie",
        "memory", "blend", "best_first",
    ]  # fmt: skip
    files = [str(Path(__file__).parent / f"test_{module}.py") for module in modules]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", "-k", " or ".join(chosen)]
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert all(f"test_{module}.py" in done.stdout for module in modules)
