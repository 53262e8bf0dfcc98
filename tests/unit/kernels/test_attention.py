"""Paged attention: equal to torch, and the same bit for bit however a prompt was cut and whatever shares the step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from asyncllm.kernels import library
from asyncllm.kernels.base import Batch, Format, KvShape
from asyncllm.kernels.native import NativeKernels
from asyncllm.kernels.reference import TorchKernels
from tests.unit.kernels.batches import batch_over, last_tokens, make_batch

ROWS = [(700, 700), (300, 300), (17, 17)]


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    format: Format
    window: int | None = None

    @property
    def shape(self) -> KvShape:
        return KvShape(
            num_kv_heads=self.kv_heads, head_dim=self.head_dim, block_size=self.block_size, format=self.format
        )

    def __str__(self) -> str:
        window = f"-w{self.window}" if self.window else ""
        return f"{self.heads}h{self.kv_heads}-d{self.head_dim}-s{self.block_size}-{self.format.name}{window}"


CASES = [
    Case(9, 3, 64, 16, Format.F32),
    Case(4, 4, 80, 32, Format.F32, window=100),
    Case(16, 2, 72, 16, Format.BF16),
    Case(8, 1, 40, 16, Format.F16, window=300),
    Case(6, 2, 96, 16, Format.I8),
    Case(4, 1, 256, 16, Format.I8, window=512),
    Case(4, 1, 256, 16, Format.F32),
    Case(3, 3, 128, 64, Format.F32, window=1),
    Case(70, 1, 8, 16, Format.F32),
    Case(2, 1, 7, 48, Format.I8),
    Case(6, 2, 20, 8, Format.BF16),  # blocks with holes
    Case(3, 1, 16, 1, Format.F32, window=30),
    Case(2, 2, 24, 5, Format.I8),
    Case(4, 2, 16, 40, Format.F16),
]
PLAIN = [case for case in CASES if case.format is Format.F32][:2]


class Filled:
    """A cache that holds all tokens of ROWS, and the queries of all of them."""

    def __init__(self, kernels: NativeKernels | TorchKernels, case: Case) -> None:
        self.kernels, self.case = kernels, case
        self.batch, num_blocks = make_batch(ROWS, case.block_size)
        tokens = len(self.batch.positions)
        generator = torch.Generator().manual_seed(0)
        self.query, self.key, self.value = (
            torch.randn(tokens, heads, case.head_dim, generator=generator)
            for heads in (case.heads, case.kv_heads, case.kv_heads)
        )
        self.cache = kernels.allocate_kv(case.shape, num_blocks)
        kernels.rotate_and_write(case.shape, self.cache, self.batch, None, self.key, self.value)

    def attend(self, batch: Batch, query: torch.Tensor) -> torch.Tensor:
        case = self.case
        return self.kernels.attention(case.shape, self.cache, batch, query, scale=0.3, window=case.window)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_whole_prompts_equal_torch(kernels: NativeKernels, reference: TorchKernels, case: Case) -> None:
    native, torch_ = Filled(kernels, case), Filled(reference, case)
    expected = torch_.attend(torch_.batch, torch_.query)
    torch.testing.assert_close(native.attend(native.batch, native.query), expected, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_does_not_depend_on_chunks_neighbours_or_threads(
    kernels: NativeKernels, alone: NativeKernels, case: Case
) -> None:
    filled = Filled(kernels, case)
    whole = filled.attend(filled.batch, filled.query)
    steps = [
        [(0, 699, 700), (1, 299, 300), (2, 16, 17)],  # a decode step of all
        [(0, 255, 256)],
        [(0, 256, 257)],
        [(0, 470, 520)],  # a chunk across the border of 512
        [(0, 312, 512), (1, 170, 200)],
        [(0, 0, 1), (1, 270, 300), (2, 3, 4)],
    ]
    for step in steps:
        batch = batch_over([(last - first, last) for _, first, last in step], filled.batch.block_table, case.block_size)
        places = last_tokens(filled.batch, step)
        for each in (kernels, alone):
            filled.kernels = each
            assert torch.equal(filled.attend(batch, filled.query[places]), whole[places]), step


def test_every_build_with_fused_multiply_add_gives_the_same_bits() -> None:
    builds = [NativeKernels(2, isa) for isa in library.usable() if isa != "generic"]
    if len(builds) < 2:
        pytest.skip("needs two builds with fused multiply-add that run here")
    for case in CASES:
        first, *others = [filled.attend(filled.batch, filled.query) for filled in (Filled(b, case) for b in builds)]
        assert all(torch.equal(first, other) for other in others), case


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]], ids=str)
def test_chunks_of_every_size_give_the_same_bits(kernels: NativeKernels, case: Case) -> None:
    filled = Filled(kernels, case)
    whole = filled.attend(filled.batch, filled.query)[:300]
    for size in (1, 2, 5, 16, 33, 128):
        parts: list[torch.Tensor] = []
        for first, last in itertools.pairwise([*range(0, 300, size), 300]):
            batch = batch_over([(last - first, last)], filled.batch.block_table, case.block_size)
            parts.append(filled.attend(batch, filled.query[first:last]))
        assert torch.equal(torch.cat(parts), whole), size


def test_what_lies_behind_a_row_is_never_seen(kernels: NativeKernels) -> None:
    case = CASES[0]
    filled = Filled(kernels, case)
    batch = batch_over([(1, 20)], filled.batch.block_table[1:2], case.block_size)
    query = filled.query[:1]
    expected = filled.attend(batch, query)
    beyond = batch_over([(280, 300)], filled.batch.block_table[1:2], case.block_size)
    poison = torch.full((280, case.kv_heads, case.head_dim), float("nan"))
    kernels.rotate_and_write(case.shape, filled.cache, beyond, None, poison, poison)
    assert torch.equal(filled.attend(batch, query), expected)


def test_a_broken_row_stays_alone(kernels: NativeKernels) -> None:
    filled = Filled(kernels, CASES[0])
    expected = filled.attend(filled.batch, filled.query)
    filled.query[10, 0, 0] = float("nan")
    found = filled.attend(filled.batch, filled.query)
    assert found[10].isnan().any()
    kept = torch.arange(len(found)) != 10
    assert torch.equal(found[kept], expected[kept])


def test_huge_scores_do_not_overflow(kernels: NativeKernels, reference: TorchKernels) -> None:
    results: list[torch.Tensor] = []
    for each in (kernels, reference):
        filled = Filled(each, CASES[0])
        results.append(filled.attend(filled.batch, filled.query * 1000))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stored_as", [Format.F32, Format.BF16, Format.F16], ids=lambda f: f.name)
def test_keys_and_values_come_back_as_written(kernels: NativeKernels, stored_as: Format) -> None:
    filled = Filled(kernels, Case(4, 2, 24, 32, stored_as))
    key, value = kernels.read_kv(filled.case.shape, filled.cache, torch.from_numpy(filled.batch.slot_mapping))
    assert torch.equal(key, filled.key.to(stored_as.dtype).float())
    assert torch.equal(value, filled.value.to(stored_as.dtype).float())


def test_a_negative_slot_is_not_written(kernels: NativeKernels) -> None:
    filled = Filled(kernels, CASES[0])
    before = filled.cache.clone()
    batch = filled.batch._replace(slot_mapping=filled.batch.slot_mapping * 0 - 1)
    kernels.rotate_and_write(filled.case.shape, filled.cache, batch, None, filled.key + 1, filled.value + 1)
    assert torch.equal(filled.cache, before)
