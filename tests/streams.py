"""Token streams that are hard on text structures: few letters, id 0 included."""

from __future__ import annotations


def fibonacci(n):
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


def some_tokens(rng, letters, n):
    """n tokens, as a list: random, constant, periodic or Fibonacci."""
    kind = int(rng.integers(0, 5))
    if kind == 0:
        return [int(rng.integers(0, letters))] * n
    if kind == 1:
        period = [int(x) for x in rng.integers(0, letters, int(rng.integers(2, 6)))]
        return (period * n)[:n]
    if kind == 2 and letters > 1:
        return fibonacci(n)
    return [int(x) for x in rng.integers(0, letters, n)]


def edited(rng, text, letters, share=0.08):
    """A copy of `text` with tokens replaced, left out and put in."""
    copy = []
    for token in text:
        edit = rng.random() / share
        if edit < 1:
            copy.append(int(rng.integers(0, letters)))
        elif edit < 2:
            continue
        elif edit < 3:
            copy += [token, int(rng.integers(0, letters))]
        else:
            copy.append(token)
    return copy
