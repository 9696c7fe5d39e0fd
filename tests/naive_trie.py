"""The specification of `retrieval/prefix_trie.py` in plain Python: every occurrence, listed."""

from __future__ import annotations

MAX_CONTEXT, MAX_SUCCESSORS, BLOCK = 8, 48, 32


class NaiveContexts:
    """Documents as lists of (time, token); answers by looking at every place of every document."""

    def __init__(self):
        self.documents: dict[object, list[tuple[int, int]]] = {}
        self.clock = 0
        self.lists: dict[tuple, list[int]] = {}  # most recently used first, at most 48

    def append(self, name, tokens):
        for token in tokens:
            document = self.documents.setdefault(name, [])
            self.clock += 1
            document.append((self.clock, int(token)))
            for key in self._contexts(document, len(document) - 1):
                recent = self.lists.setdefault(key, [])
                if token in recent:
                    recent.remove(token)
                recent.insert(0, int(token))
                self._dropped(key, recent)

    def _dropped(self, key, recent):
        while len(recent) > MAX_SUCCESSORS:
            recent.pop()

    @staticmethod
    def _contexts(document, at):
        """Keys of the contexts that end before place `at`: ('plain', tokens) and ('skip', token)."""
        for length in range(1, min(MAX_CONTEXT, at) + 1):
            yield ("plain", tuple(token for _, token in document[at - length : at]))
        if at >= 2:
            yield ("skip", document[at - 2][1])

    def forget_head(self, name, count):
        document = self.documents[name]
        del document[:count]
        if not document:
            del self.documents[name]
        for key in list(self.lists):
            present = {token for _, token in self.occurrences(key)}
            self.lists[key] = [token for token in self.lists[key] if token in present]
            if not self.lists[key]:
                del self.lists[key]

    def occurrences(self, key):
        """(time, successor) of every occurrence of the context, oldest first."""
        found = []
        for document in self.documents.values():
            for at in range(len(document)):
                if key in self._contexts(document, at):
                    found.append(document[at])
        return sorted(found)

    def longest(self, context):
        """Length of the longest suffix of `context` (at most 8) that occurs with a successor."""
        for length in range(min(MAX_CONTEXT, len(context)), 0, -1):
            if self.occurrences(("plain", tuple(context[-length:]))):
                return length
        return 0
