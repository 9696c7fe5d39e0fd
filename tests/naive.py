"""The specification in plain Python: what each matcher must answer, as short as it can be said.

No numpy, no cleverness, no care for speed. The property tests compare every kernel with its twin here.
"""

from __future__ import annotations


def ngram_propose(tokens, max_tokens, max_match=8, min_match=1):
    """The longest suffix that occurs earlier (latest on ties), and what followed it; wraps at the text's end."""
    tokens = list(tokens)
    n = len(tokens)
    for length in range(min(max_match, n - 1), min_match - 1, -1):
        for start in range(n - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[n - length :]:
                text = list(tokens)
                for _ in range(max_tokens):
                    text.append(text[len(text) - (n - length - start)])
                return text[n:]
    return []
