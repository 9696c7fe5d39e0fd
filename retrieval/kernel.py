"""The two decorators under every compiled function of this package.

``@kernel`` (entry points) and ``@inner`` (their parts) are ``numba.njit`` with the choices that hold everywhere here: ``nogil`` (other sessions go on while one
is served), ``cache`` (compiled once per machine, not once per process), NumPy's division rules, no ``fastmath`` (but for
the inner product of `inverted_lists`, which may add in any order).

Numba decides at import where its cache lives and fails there when neither the package's folder nor the home
directory can be written (a read-only container, say). Such a process gets a cache in the temporary directory, and
compiles again when that is wiped; where not even that can be written it compiles in memory.

Numba also takes a cached kernel for good while the file that defines it is unchanged, even when a kernel that it calls
in another file has changed. So on import everything compiled before the newest source of this folder is dropped.
"""

from __future__ import annotations

import functools
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


def _no_counting() -> dict:
    """The option that leaves out reference counting; it is not public, so a Numba without it compiles without it."""
    try:
        numba.njit(_nrt=False)(_no_counting)
    except Exception:  # noqa: BLE001 - whatever a future Numba says to an option it does not know
        return {}
    return {"_nrt": False}


_CACHE = _cache_available()
_NO_COUNTING = _no_counting()
_drop_stale_kernels(Path(__file__).resolve().parent)


def kernel(function=None, *, allocates: bool = True):
    """Compile an entry point: a function that Python calls. Kept on disk between processes.

    ``@kernel(allocates=False)`` is for kernels that make no array of their own (views are fine; buffers are handed
    in). Numba then leaves out reference counting, whose atomic instructions at every access to an array in a tuple
    otherwise cost more than the work (measured: 850 ns a token against 43 in `prefix_trie.insert`).
    """
    if function is None:
        return functools.partial(kernel, allocates=allocates)
    return numba.njit(nogil=True, cache=_CACHE, error_model="numpy", **({} if allocates else _NO_COUNTING))(function)


def inner(function=None, *, inline: bool = True):
    """Compile a part of kernels, called by compiled code only: inlined, never kept on disk by itself.

    A part found compiled on disk could only be called, not inlined, and a call that passes a tuple of arrays costs
    more than most parts do: seven words an array. A part allocates nothing. ``@inner(inline=False)`` has LLVM inline it
    rather than Numba: for larger parts, which Numba would type and lower anew at every call.
    """
    if function is None:
        return functools.partial(inner, inline=inline)
    how = {"inline": "always"} if inline else {"forceinline": True}
    return numba.njit(nogil=True, error_model="numpy", **how, **_NO_COUNTING)(function)
