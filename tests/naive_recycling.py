"""The specification of `retrieval/token_recycling.py` in plain Python: a dict that gives up its oldest key."""

from __future__ import annotations

WIDTH = 8


class NaiveRecycling:
    """Rows by (previous, token), previous = -1 for rows by token alone; a row learned again keeps its age."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.rows: dict[tuple[int, int], tuple[list[int], list[float]]] = {}

    def learn(self, tokens, previous, ids, probs):
        for token, before, row_ids, row_probs in zip(tokens, previous, ids, probs):
            for key in [(-1, token)] + ([(before, token)] if before >= 0 else []):
                if self.capacity == 0:
                    continue
                if key not in self.rows and len(self.rows) == self.capacity:
                    del self.rows[next(iter(self.rows))]
                self.rows[key] = list(row_ids)[:WIDTH], list(row_probs)[:WIDTH]

    def find(self, previous, token):
        """(ids, probs), most likely first, or None."""
        return self.rows.get((previous, token))
