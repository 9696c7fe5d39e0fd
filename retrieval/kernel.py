"""The two decorators under every compiled function of this package.

``@kernel`` (entry points) and ``@inner`` (their parts) are ``numba.njit`` with the choices that hold everywhere here: ``nogil`` (other sessions go on while one
is served), ``cache`` (compiled once per machine, not once per process), NumPy's division rules, no ``fastmath``.

Numba decides at import where its cache lives and fails there when neither the package's folder nor the home
directory can be written (a read-only container, say). Such a process gets a cache in the temporary directory, and
compiles again when that is wiped; where not even that can be written it compiles in memory.

Numba also takes a cached kernel for good while the file that defines it is unchanged, even when a kernel that it calls
in another file has changed. So on import everything compiled before the newest source of this folder is dropped.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numba

__all__ = ["inner", "kernel"]


def _writable(folder: Path) -> bool:
    """Whether a file can be made in `folder`, making the folder itself first if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _cache_available() -> bool:
    """Whether compiled code can be kept on disk; points Numba at the temporary directory where it must be."""
    if numba.config.CACHE_DIR:
        return _writable(Path(numba.config.CACHE_DIR))
    beside_source = Path(__file__).resolve().parent / "__pycache__"
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"
    if _writable(beside_source) or _writable(user_cache):
        return True
    fallback = Path(tempfile.gettempdir()) / f"redraft-numba-{os.getuid()}"
    if not _writable(fallback):
        return False
    numba.config.CACHE_DIR = str(fallback)
    return True


def _drop_stale_kernels(folder: Path) -> None:
    """Delete compiled kernels older than the newest source in `folder` (see the module's head)."""
    sources = list(folder.glob("*.py")) + list(folder.glob("*/*.py"))
    newest = max((source.stat().st_mtime for source in sources), default=0.0)
    for index in [*folder.glob("__pycache__/*.nbi"), *folder.glob("*/__pycache__/*.nbi")]:
        try:
            if index.stat().st_mtime < newest:
                index.unlink(missing_ok=True)
        except OSError:
            continue  # another process is at it, or the folder is read-only: then nobody edits it either


_CACHE = _cache_available()
_drop_stale_kernels(Path(__file__).resolve().parent)


def kernel(function):
    """Compile an entry point: a function that Python calls. Kept on disk between processes."""
    return numba.njit(nogil=True, cache=_CACHE, error_model="numpy")(function)


def inner(function):
    """Compile a part of kernels, called by other compiled code: never kept on disk by itself.

    A kernel that finds such a part already compiled on disk could only call it, not inline it, and a call that
    passes a tuple of arrays costs more than most parts do (measured: 13 times on `prefix_trie.insert`).
    """
    return numba.njit(nogil=True, error_model="numpy")(function)
