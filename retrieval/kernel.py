"""The one decorator under every compiled function of this package.

``@kernel`` is ``numba.njit`` with the choices that hold everywhere here: ``nogil`` (other sessions go on while one
is served), ``cache`` (compiled once per machine, not once per process), NumPy's division rules, no ``fastmath``.

Numba decides at import where its cache lives and fails there when neither the package's folder nor the home
directory can be written (a read-only container, say). Such a process gets a cache in the temporary directory, and
compiles again when that is wiped; where not even that can be written it compiles in memory.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numba

__all__ = ["kernel"]


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


_CACHE = _cache_available()


def kernel(function=None, *, inline: str = "never"):
    """Compile `function` with the settings of this package; use it as ``@kernel`` or ``@kernel(inline="always")``."""
    compile_ = numba.njit(nogil=True, cache=_CACHE, error_model="numpy", inline=inline)
    return compile_ if function is None else compile_(function)
