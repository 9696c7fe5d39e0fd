"""Whole numbers packed bit by bit: arrays of an index take no more bits a value than the largest value needs.

Value i of an array of b-bit values (b from 1 to 32) stands in bits i b to i b + b - 1 of a sequence of uint32 words, the
lowest bit of a word first. It lies in two neighbouring words at most, so reading one is two loads from the same place
(nearly always the same cache line), a shift and a mask: under a nanosecond, where a cache line saved is worth many.
There is one word more than the values need, so that the second load never leaves the array.

Nothing is unpacked at open: the words are mapped from the file and read in place. 27 bits address 100 million tokens,
16 name any of SmolLM2's 49,152 ids, 18 any of Qwen's 152,000; int32 would take 32 for each. Codes of variable length
would be smaller still but cannot be read in the middle.
"""

from __future__ import annotations

import numpy as np

from redraft.retrieval.kernel import inner, kernel

__all__ = ["bits_for", "gather", "n_words", "pack", "packed_at", "unpack"]


def bits_for(largest: int) -> int:
    """How many bits a value up to `largest` takes, at least one."""
    return max(1, int(largest).bit_length())


def n_words(n: int, bits: int) -> int:
    """How many uint32 words `n` values of `bits` bits are packed into."""
    return -(-n * bits // 32) + 1


@inner
def packed_at(words, i, bits):
    """Value i, as int64."""
    bit = np.int64(i) * bits
    word = np.uint64(bit >> 5)  # unsigned: a signed index is checked for counting from the end
    pair = np.int64(words[word]) | (np.int64(words[word + np.uint64(1)]) << 32)  # 31 + 32 bits at most are looked at
    return (pair >> (bit & 31)) & ((np.int64(1) << bits) - 1)


@kernel(allocates=False)
def pack(values, bits, words):
    """Fill `words` (uint32[n_words(n, bits)]) with `values` (whole numbers, 0 to 2^bits - 1)."""
    pending, filled, word = np.int64(0), np.int64(0), np.int64(0)
    for i in range(values.shape[0]):
        pending |= np.int64(values[i]) << filled
        filled += bits
        if filled >= 32:
            words[word] = np.uint32(pending & 0xFFFFFFFF)
            pending >>= 32
            filled -= 32
            word += 1
    words[word] = np.uint32(pending)
    words[word + 1 :] = np.uint32(0)


@kernel(allocates=False)
def unpack(words, bits, first, values):
    """Fill `values` (int64[n]) with the values from `first` on."""
    for i in range(values.shape[0]):
        values[i] = packed_at(words, first + i, bits)


@kernel(allocates=False)
def gather(words, bits, places, values):
    """Fill `values` (int64[n]) with the values at `places` (int64[n])."""
    for i in range(values.shape[0]):
        values[i] = packed_at(words, places[i], bits)
