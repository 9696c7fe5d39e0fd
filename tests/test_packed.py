"""Packed numbers against Python's own whole numbers: every width, both ends of every range."""

from __future__ import annotations

import random

import numpy as np
import pytest

from redraft.retrieval.packed import bits_for, gather, n_words, pack, unpack


@pytest.mark.parametrize("bits", range(1, 33))
def test_numbers_come_back_in_the_stated_layout(bits):
    rng = random.Random(bits)
    for n in (0, 1, 2, 31, 32, 33, 100):
        numbers = [rng.choice([0, 1, (1 << bits) - 1, rng.getrandbits(bits)]) & ((1 << bits) - 1) for _ in range(n)]
        words = np.full(n_words(n, bits), 0xFFFFFFFF, np.uint32)
        pack(np.array(numbers, np.int64), bits, words)
        everything = sum(number << i * bits for i, number in enumerate(numbers))
        assert words.tolist() == [everything >> 32 * word & 0xFFFFFFFF for word in range(len(words))]
        for first in range(0, n, 7):
            found = np.zeros(n - first, np.int64)
            unpack(words, bits, first, found)
            assert found.tolist() == numbers[first:]
        places = np.array(rng.choices(range(n), k=9), np.int64) if n else np.empty(0, np.int64)
        found = np.zeros(len(places), np.int64)
        gather(words, bits, places, found)
        assert found.tolist() == [numbers[place] for place in places]


@pytest.mark.parametrize("largest, bits", [(-1, 1), (0, 1), (1, 1), (2, 2), (255, 8), (256, 9), (2**32 - 1, 32)])
def test_width_of_the_largest(largest, bits):
    assert bits_for(largest) == bits
