"""The errors that are redraft's own. Wrong arguments raise TypeError and ValueError as everywhere in Python."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["IndexFormatError", "MissingExtraError", "RedraftError", "SessionClosedError", "import_extra"]


class RedraftError(Exception):
    """Base of the errors below."""


class SessionClosedError(RedraftError):
    """A session was used after `close`."""


class IndexFormatError(RedraftError):
    """An index directory is missing, cut short, changed, of another version or made for another tokenizer."""


class MissingExtraError(RedraftError, ImportError):
    """An optional library is not installed; the text names the extra that brings it."""


def import_extra(module: str, extra: str) -> ModuleType:
    """Import an optional library where it is needed. Raises MissingExtraError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise MissingExtraError(
            f"this needs the Python package {module.partition('.')[0]!r}, which is not installed:"
            f" pip install 'redraft[{extra}]'"
        ) from error
