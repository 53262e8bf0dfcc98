from __future__ import annotations

import numpy as np
import pytest

from asyncllm.sampling import rng
from asyncllm.sampling.rng import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # kat_vectors of Random123, philox 4x32 10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == answer


def test_many_rows_get_what_each_gets_alone() -> None:
    seeds = np.array([0, 1, 7, 2**63 + 5, 2**64 - 1] * 20, np.uint64)
    samples, positions = np.arange(100) % 7, np.arange(100) * 2**27  # positions past 32 bits too
    together = uniforms(seeds, samples, positions)
    assert len(seeds) >= rng.VECTOR_MIN
    alone = [uniforms(seeds[i : i + 1], samples[i : i + 1], positions[i : i + 1])[0] for i in range(100)]
    assert together.tolist() == alone


def test_seed_sample_and_position_each_change_the_number() -> None:
    base, *others = uniforms([1, 2, 1, 1], [0, 0, 1, 0], [0, 0, 0, 1])
    assert len({base, *others}) == 4
    assert uniforms([1], [0], [0])[0] == base


def test_numbers_are_uniform() -> None:
    count = 100_000
    numbers = uniforms(np.full(count, 42, np.uint64), np.zeros(count, np.int64), np.arange(count))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    cells = np.histogram(numbers, bins=100, range=(0, 1))[0]
    chi_square = ((cells - count / 100) ** 2 / (count / 100)).sum()
    assert chi_square < 148.2  # 99 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01
