"""The copy pointer against its plain twin, on edited copies of texts in scattered blocks; and what it is for."""

from __future__ import annotations

import numpy as np
import pytest
from naive_memory import NaiveMemory
from naive_pointer import NaivePointer
from streams import edited, fibonacci, some_tokens

from redraft.retrieval import evidence as ev
from redraft.retrieval import prefix_trie as pt
from redraft.retrieval.memory import Memory
from redraft.retrieval.sources import copy_pointer

COLUMN = 3  # any place in a row of pointers; the tokens of the other must stay as they are


def scattered(texts):
    """A memory and its twin in which the blocks of several documents alternate."""
    memory, naive = Memory(10**6), NaiveMemory()
    for begin in range(0, max(map(len, texts)), 20):
        for name, text in enumerate(texts):
            for one in (memory, naive):
                one.append(name, np.array(text[begin : begin + 20], np.int32))
    return memory, naive


def text_positions(memory, document):
    """Positions of a document's tokens, in order, by walking it."""
    at = memory._documents[document].tail
    found = []
    while at >= 0:
        found.append(int(at))
        at = pt.preceding(memory.trie, at)
    return found[::-1]


class Pointer:
    """The kernel's pointer in one column of a row."""

    def __init__(self, memory):
        self.memory = memory
        self.row = np.full((1, 6), -7, np.int64)
        self.row[0, COLUMN : COLUMN + 3] = -1, 0, 0

    def seat_after(self, window):
        """Look up what ends in `window`, oldest token first, and seat the pointer there."""
        newest_first, path = np.full(8, -1, np.int32), np.zeros(8, np.int32)
        window = window[-8:]
        newest_first[: len(window)] = window[::-1]
        stored, length = pt.look_up(self.memory.trie, newest_first, len(window), path)
        copy_pointer.seat(self.memory.trie, self.row, 0, COLUMN, path, stored, length)

    def step(self, token):
        copy_pointer.step(self.memory.trie, self.row, 0, COLUMN, token)

    def proposed(self, ballot):
        ev.clear(ballot, ev.MAX_CANDIDATES, ev.MIN_BREADTH)
        slot, base = ev.MEMORY_POINTER, ev.MEMORY_POINTER_CELLS
        copy_pointer.add_pointed(ballot, self.memory.trie, self.row, 0, COLUMN, slot, base)
        if ballot.header[ev.N_CANDIDATES] == 0:
            return None
        assert ballot.header[ev.N_CANDIDATES] == 1 and ballot.named_by[0] == ev.BY_POINTER
        assert base <= ballot.cells[slot, 0] < base + ev._POINTER_CELLS and (ballot.cells[:, 0] > 0).sum() == 1
        return int(ballot.tokens[0])


def assert_same(pointer, naive, places, ballot):
    """`places`: position of each (document, index)."""
    at, run, history = (int(x) for x in pointer.row[0, COLUMN : COLUMN + 3])
    assert pointer.row[0, :COLUMN].tolist() == [-7] * 3
    assert pointer.proposed(ballot) == naive.proposed()
    if naive.at is None:
        assert at == -1
        return
    assert at == places[id(naive.text), naive.at]
    assert run == naive.run
    assert [int(bit) for bit in f"{history:08b}"] == naive.misses


def seat_twin(twin, naive, window):
    length = naive.longest(window)
    if length == 0:
        return
    time = naive.latest["plain", tuple(window[-length:])]
    document, at = naive.place_of(time)
    twin.seat(document.tokens, at, length)


@pytest.mark.parametrize("letters", [1, 2, 3, 4, 40])
@pytest.mark.parametrize("seed", range(3))
def test_edited_copies(letters, seed):
    rng = np.random.default_rng(10 * letters + seed)
    texts = [some_tokens(rng, letters, int(rng.integers(30, 110))) for _ in range(3)]
    memory, naive = scattered(texts)
    places = {
        (id(naive.documents[name].tokens), at): position
        for name in naive.documents
        for at, position in enumerate(text_positions(memory, name))
    }
    ballot = ev.new_ballot()
    pointer, twin, window = Pointer(memory), NaivePointer(), []
    seats = 0
    for text in (*texts, texts[0]):
        for token in edited(rng, text, letters):
            pointer.step(token)
            twin.step(token)
            assert_same(pointer, twin, places, ballot)
            window.append(token)
            lifted = twin.at is None
            pointer.seat_after(window)
            seat_twin(twin, naive, window[-8:])
            assert_same(pointer, twin, places, ballot)
            seats += lifted and twin.at is not None
    assert seats >= 1


def seated(text, at, match=8):
    """A pointer at place `at` of a text of one document, seated by the tokens before it."""
    memory = Memory(10**6)
    memory.append(0, np.array(text, np.int32))
    pointer = Pointer(memory)
    pointer.seat_after(text[at - match : at])
    return pointer


DISTINCT = [int(token) for token in np.random.default_rng(0).permutation(1000)[:200]]


@pytest.mark.parametrize("at", [8, 30, 31, 32, 33, 63, 64, 100])
def test_a_copy_goes_on_over_edits(at):
    ballot = ev.new_ballot()
    pointer = seated(DISTINCT, at)
    assert pointer.proposed(ballot) == DISTINCT[at]
    pointer.step(2000)  # another word here
    assert pointer.proposed(ballot) == DISTINCT[at + 1]
    pointer.step(DISTINCT[at + 4])  # three left out
    for after in range(at + 5, at + 13):
        assert pointer.proposed(ballot) == DISTINCT[after]
        pointer.step(DISTINCT[after])
    pointer.step(2001)  # one put in: the pointer goes a token too far, and comes back
    pointer.step(DISTINCT[at + 13])
    assert pointer.proposed(ballot) == DISTINCT[at + 14]


def test_it_is_lifted_off_after_too_many_misses():
    ballot = ev.new_ballot()
    pointer = seated(DISTINCT, 20)
    for _ in range(copy_pointer.MAX_MISSES - 1):
        pointer.step(2000)
        assert pointer.proposed(ballot) is not None
    pointer.step(2000)
    assert pointer.proposed(ballot) is None


def test_old_misses_are_forgiven():
    ballot = ev.new_ballot()
    pointer = seated(DISTINCT, 20)
    at = 20
    for _ in range(12):
        pointer.step(2000)
        for after in range(at + 1, at + 8):
            pointer.step(DISTINCT[after])
        at += 8
        assert pointer.proposed(ballot) == DISTINCT[at]


def test_it_ends_with_the_text():
    ballot = ev.new_ballot()
    for length in (64, 70):  # the last block full, and not
        text = DISTINCT[:length]
        pointer = seated(text, length - 2)
        pointer.step(text[length - 2])
        assert pointer.proposed(ballot) == text[length - 1]
        pointer.step(text[length - 1])
        assert pointer.proposed(ballot) is None


def test_short_matches_do_not_seat_it():
    ballot = ev.new_ballot()
    for match in range(1, 9):
        pointer = seated(DISTINCT, 50, match)
        assert (pointer.proposed(ballot) is not None) == (match >= copy_pointer.SEAT_LENGTH)


def test_it_stays_where_it_sits_while_it_is_right():
    text = fibonacci(90)
    pointer = seated(text, 40)
    at = pointer.row[0, COLUMN]
    pointer.seat_after(text[20:28])
    assert pointer.row[0, COLUMN] == at


def test_a_forgotten_memory_lifts_it_off():
    """A pointer may stand far behind the end of the memory that has begun since."""
    ballot = ev.new_ballot()
    pointer = seated(list(range(2000)), 1990)
    pointer.memory.clear()
    assert pointer.proposed(ballot) is None
    pointer.step(5)
    assert pointer.row[0, COLUMN] == -1


def test_forgotten_text_is_not_proposed():
    ballot = ev.new_ballot()
    pointer = seated(DISTINCT, 40)
    pointer.memory.forget(0)
    assert pointer.proposed(ballot) is None
    pointer.step(DISTINCT[40])
    assert pointer.proposed(ballot) is None
