"""Token by token into text that can be shown at once: a character is held back until all its bytes are there."""

from __future__ import annotations

__all__ = ["TextStream"]

_WINDOW = 64  # tokens decoded together at most; enough for any character and for the spaces between words


class TextStream:
    """Turns tokens, one after the other, into the text that each of them completes.

    Args:
        tokenizer: a transformers tokenizer.
        context: tokens before the first one, which decide whether that begins with a space.
    """

    def __init__(self, tokenizer, context=()) -> None:
        self._tokenizer = tokenizer
        self._tokens = [int(token) for token in context][-_WINDOW:]
        self._shown = self._decode()

    def _decode(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=True)

    def push(self, token: int) -> str:
        """The text that `token` adds; empty while a character is incomplete."""
        self._tokens.append(int(token))
        text = self._decode()
        if text.endswith("\ufffd"):
            return ""
        new = text[len(self._shown) :]
        if len(self._tokens) > 2 * _WINDOW:
            self._tokens = self._tokens[-_WINDOW:]
            text = self._decode()
        self._shown = text
        return new
