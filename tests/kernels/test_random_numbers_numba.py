"""The counter-based random numbers inside numba kernels are those of the definition."""

import numpy
import pytest
import torch

from khot.kernels.random_numbers.philox import random_words, uniform

numba = pytest.importorskip("numba")

SEEDS = (0, 0x123456789ABCDEF, 2**63 - 2)


def compiled_blocks():
    """A kernel that writes four words and two uniform numbers for every place."""
    from khot.kernels.cpu import random_numbers as philox

    @numba.njit(error_model="numpy")
    def blocks(seed, words, numbers):
        draws, rows, places = words.shape[1:]
        for d in range(draws):
            for r in range(rows):
                for p in range(places):
                    found = philox.random_words(seed[0], d, r, p)
                    for i in range(4):
                        words[i, d, r, p] = found[i]
                    numbers[0, d, r, p] = philox.uniform(found[0], found[1])
                    numbers[1, d, r, p] = philox.uniform(found[2], found[3])

    return blocks


def test_numbers_are_those_of_the_definition():
    blocks = compiled_blocks()
    shape = (3, 4, 5)
    for value in SEEDS:
        seed = torch.tensor([value])
        words, numbers = numpy.zeros((4, *shape), dtype=numpy.int64), numpy.zeros((2, *shape))
        blocks(seed.numpy(), words, numbers)
        expected = random_words(seed, *shape)
        assert all(torch.equal(torch.from_numpy(a), b) for a, b in zip(words, expected, strict=True))
        assert torch.equal(torch.from_numpy(numbers[0]), uniform(expected[0], expected[1]))
        assert torch.equal(torch.from_numpy(numbers[1]), uniform(expected[2], expected[3]))
