"""What the corpus structures must answer, in plain Python over lists: slow, short, obviously right."""

from __future__ import annotations

from collections import Counter


def occurrences(documents: list[list[int]], needle: list[int]) -> list[int]:
    """End positions (index of the last token, documents laid end to end) of `needle`, ascending; [] for no tokens."""
    ends, start = [], 0
    for document in documents:
        for i in range(len(document) - len(needle) + 1):
            if needle and document[i : i + len(needle)] == needle:
                ends.append(start + i + len(needle) - 1)
        start += len(document)
    return ends


def longest_suffix(documents: list[list[int]], context: list[int], limit: int | None = None) -> list[int]:
    """The longest suffix of `context`, of at most `limit` tokens, that occurs in one document."""
    for start in range(len(context)):
        suffix = context[start:]
        if (limit is None or len(suffix) <= limit) and occurrences(documents, suffix):
            return suffix
    return []


def successors(documents: list[list[int]], needle: list[int]) -> list[tuple[int, int]]:
    """(token, count) of what follows `needle` inside a document: most frequent first, ties by token id."""
    counts: Counter[int] = Counter()
    for document in documents:
        for i in range(len(document) - len(needle)):
            if document[i : i + len(needle)] == needle:
                counts[document[i + len(needle)]] += 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def locate(documents: list[list[int]], position: int) -> tuple[int, int]:
    """(document, offset in it) of a position in the documents laid end to end."""
    for number, document in enumerate(documents):
        if position < len(document):
            return number, position
        position -= len(document)
    raise IndexError(position)


def suffix_array(documents: list[list[int]]) -> list[int]:
    """Positions in the order of the rest of their document from there; equal rests in order of position."""
    rests, start = [], 0
    for document in documents:
        rests += [(document[i:], start + i) for i in range(len(document))]
        start += len(document)
    return [position for _, position in sorted(rests)]


def fibonacci_word(length: int) -> list[int]:
    """0, 1, 0, 0, 1, ...: no run of equal tokens, and repeats everywhere."""
    shorter, word = [1], [0]
    while len(word) < length:
        shorter, word = word, word + shorter
    return word[:length]
