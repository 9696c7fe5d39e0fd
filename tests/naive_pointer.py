"""The specification of `retrieval/sources/copy_pointer.py` in plain Python: a finger on a list of tokens."""

from __future__ import annotations

from redraft.retrieval.sources.copy_pointer import AHEAD, BACK, MAX_MISSES, SEAT_LENGTH


class NaivePointer:
    """Lies on place `at` of `text` (None: lifted off) and proposes the token there."""

    def __init__(self):
        self.text, self.at, self.run, self.misses = None, None, 0, [0] * 8

    def copy(self):
        other = NaivePointer()
        other.text, other.at, other.run, other.misses = self.text, self.at, self.run, list(self.misses)
        return other

    def seat(self, text, at, length):
        if self.at is None and length >= SEAT_LENGTH and at is not None:
            self.text, self.at, self.run, self.misses = text, at, 0, [0] * 8

    def proposed(self):
        return None if self.at is None else self.text[self.at]

    def step(self, token):
        if self.at is None:
            return
        hit = self.text[self.at] == token
        self.misses = [*self.misses[1:], int(not hit)]
        self.run = self.run + 1 if hit else 0
        if not hit:
            if sum(self.misses) >= MAX_MISSES:
                self.at = None
                return
            self.at = self._recovered(token)
        self.at = self.at + 1 if self.at + 1 < len(self.text) else None

    def _recovered(self, token):
        """Where `token` stands near by: nearest first, ahead before back; else here."""
        for distance in range(1, AHEAD + 1):
            if self.at + distance < len(self.text) and self.text[self.at + distance] == token:
                return self.at + distance
            if distance <= BACK and self.at >= distance and self.text[self.at - distance] == token:
                return self.at - distance
        return self.at
