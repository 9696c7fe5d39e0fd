"""The specification of `retrieval/memory.py` in plain Python: documents as lists, and every context they hold."""

from __future__ import annotations

MAX_CONTEXT, MAX_SUCCESSORS, BLOCK = 8, 48, 32
N_FREQUENT, REFRESH_SHARE = 16, 16


class NaiveDocument:
    """Tokens, and the time at which each was written (unique, so it names the position)."""

    def __init__(self):
        self.tokens: list[int] = []
        self.times: list[int] = []

    def contexts(self, at):
        """(start, key) of every context that the token at place `at` follows."""
        for length in range(1, min(MAX_CONTEXT, at) + 1):
            yield at - length, ("plain", tuple(self.tokens[at - length : at]))
        if at >= 2:
            yield at - 2, ("skip", (self.tokens[at - 2],))


class NaiveMemory:
    """A token budget (None: no limit) over documents; the head of the one longest unused goes first."""

    def __init__(self, budget=None):
        self.budget = budget
        self.clear()

    def clear(self):
        self.clock = 0
        self.documents: dict[int, NaiveDocument] = {}  # longest unused first
        self.seen: dict[tuple, list[tuple[int, int]]] = {}  # context -> (time, successor), oldest first
        self.recent: dict[tuple, dict[int, int]] = {}  # context -> {successor: count}, most recently used last
        self.latest: dict[tuple, int | None] = {}  # context -> time of its last successor, None once that is forgotten
        self.changed = 0
        self.frequent: list[int] = []

    @property
    def n_tokens(self):
        return sum(len(document.tokens) for document in self.documents.values())

    def append(self, name, tokens):
        if self.budget == 0 or not len(tokens):
            return
        self.write(name, tokens)
        while self.budget is not None and self.n_tokens > self.budget:
            self.forget_head(next(iter(self.documents)))
        if self.changed * REFRESH_SHARE > self.n_tokens:
            self.refresh_frequent()

    def write(self, name, tokens):
        document = self.documents.pop(name, None) or NaiveDocument()
        self.documents[name] = document
        self.changed += len(tokens)
        for token in map(int, tokens):
            self.clock += 1
            document.tokens.append(token)
            document.times.append(self.clock)
            for _, key in document.contexts(len(document.tokens) - 1):
                self.seen.setdefault(key, []).append((self.clock, token))
                recent = self.recent.setdefault(key, {})
                recent[token] = recent.pop(token, 0) + 1
                if len(recent) > MAX_SUCCESSORS:
                    del recent[next(iter(recent))]
                self.latest[key] = self.clock

    def touch(self, name):
        self.documents[name] = self.documents.pop(name)

    def forget_head(self, name):
        """Forget the first 32 tokens: every context that begins in them."""
        document = self.documents[name]
        count = min(BLOCK, len(document.tokens))
        for at in range(min(count + MAX_CONTEXT, len(document.tokens))):
            for start, key in document.contexts(at):
                if start < count:
                    self._unsee(key, document.times[at], document.tokens[at])
        del document.tokens[:count], document.times[:count]
        self.changed += count
        if not document.tokens:
            del self.documents[name]

    def _unsee(self, key, time, token):
        self.seen[key].remove((time, token))
        if self.latest[key] == time:
            self.latest[key] = None
        recent = self.recent[key]
        if token in recent:  # it is not, if more than 48 others came after it
            recent[token] -= 1
            if recent[token] == 0:
                del recent[token]
        if not self.seen[key]:
            del self.seen[key], self.recent[key], self.latest[key]

    def forget(self, name):
        if name not in self.documents:
            return False
        while name in self.documents:
            self.forget_head(name)
        self.refresh_frequent()
        return True

    def refresh_frequent(self):
        self.changed = 0
        totals = [(-len(seen), key[1][0]) for key, seen in self.seen.items() if key[0] == "plain" and len(key[1]) == 1]
        self.frequent = [token for _, token in sorted(totals)[:N_FREQUENT]]

    def successors(self, key):
        """[(token, count)], most recently used first."""
        return list(self.recent.get(key, {}).items())[::-1]

    def longest(self, text):
        """Length of the longest suffix of `text`, at most 8, that has been followed by something."""
        for length in range(min(MAX_CONTEXT, len(text)), 0, -1):
            if ("plain", tuple(text[-length:])) in self.seen:
                return length
        return 0

    def place_of(self, time):
        """(document, index) of the token written at `time`."""
        for document in self.documents.values():
            if time in document.times:
                return document, document.times.index(time)
        raise KeyError(time)
