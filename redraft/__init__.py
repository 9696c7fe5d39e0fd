"""Redraft drafts tokens for large language models without a draft model: same text, fewer forward passes.

The public names of the package. Each is imported when it is first used, so that `import redraft` stays light and
brings in neither torch nor transformers, faiss or pyarrow.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "Candidates": "redraft.retrieval.candidates",
    "DraftClient": "redraft.client.draft_client",
    "DraftConfig": "redraft.retrieval.config",
    "DraftTree": "redraft.retrieval.draft_tree",
    "Drafter": "redraft.retrieval.drafter",
    "IndexFormatError": "redraft.retrieval.errors",
    "MissingExtraError": "redraft.retrieval.errors",
    "RedraftError": "redraft.retrieval.errors",
    "Session": "redraft.retrieval.session",
    "SessionClosedError": "redraft.retrieval.errors",
    "generate": "redraft.decoding.generate",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'redraft' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
