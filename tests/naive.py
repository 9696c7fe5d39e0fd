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


def walk(tokens, parents, truth):
    """Which nodes of a draft tree lie on the path that the target takes, as a list of node numbers."""
    path, node = [], -1
    for token in truth:
        children = [i for i, parent in enumerate(parents) if parent == node and tokens[i] == token]
        if not children:
            break
        node = children[0]
        path.append(node)
    return path


def in_loop(text, longest_period=48, repeats=4):
    """For every position of a text, whether it lies in a stretch that is one period, `repeats` times or more."""
    marked = [False] * len(text)
    for period in range(1, longest_period + 1):
        for start in range(len(text) - repeats * period + 1):
            stretch = text[start : start + repeats * period]
            if stretch == stretch[:period] * repeats:
                marked[start : start + repeats * period] = [True] * (repeats * period)
    return marked
