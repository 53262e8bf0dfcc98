"""Drawing in Triton's interpreter: what the sampler does in torch, which its own tests hold to the distributions.

The interpreter takes a tenth of a second or more for each row, so rows are few and each of its own kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.kernels.base import SAMPLING_DTYPE
from asyncllm.sampling.device_draw import DeviceDraw
from asyncllm.sampling.rng import uniforms
from tests.support.runner import Driver, make_runner
from tests.support.sampling import sample, sampling
from tests.unit.kernels.test_drawing import FIELDS

pytest.importorskip("triton")

from asyncllm.kernels.triton import sample as kernels
from asyncllm.kernels.triton.fused import TritonFusedKernels

pytestmark = pytest.mark.triton

TEMPERATURES = (1.0, 0.3, 7.0)


def device_draw() -> DeviceDraw:
    return DeviceDraw(TritonFusedKernels(), lambda array: torch.from_numpy(array.copy()))


@pytest.fixture
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of a thousand takes several tiles and is copied when 256 tokens are left."""
    monkeypatch.setattr(kernels, "LANES", 64)


def logits_of(vocab_size: int, num_rows: int, spread: float) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread


def assert_drawn_as_in_torch(logits: torch.Tensor, params: list[Any]) -> torch.Tensor:
    positions = [i * 7919 for i in range(len(params))]
    expected = sample(logits, params, positions=positions)
    got = sample(logits, params, positions=positions, device_draw=device_draw())
    assert torch.equal(got.best_logits, expected.best_logits)
    assert got.token_ids.dtype == torch.int64
    assert torch.equal(got.token_ids, expected.token_ids)
    return got.token_ids


@pytest.mark.parametrize(("vocab_size", "spread"), [(1, 1.0), (50, 2.0), (257, 4.0)])
def test_the_tokens_are_those_of_torch(vocab_size: int, spread: float) -> None:
    params = [sampling(temperature=TEMPERATURES[i % 3], seed=i, **fields) for i, fields in enumerate(FIELDS)]
    assert_drawn_as_in_torch(logits_of(vocab_size, len(params), spread), params)


@pytest.mark.usefixtures("short_passes")
@pytest.mark.parametrize(("vocab_size", "spread"), [(1000, 0.01), (1037, 4.0), (700, 12.0)])
def test_the_tokens_of_a_large_vocabulary_are_those_of_torch(vocab_size: int, spread: float) -> None:
    """With hardly any spread the filters cut among too many tokens to be copied, with much among few."""
    params = [sampling(temperature=1.0, seed=i + 5, **fields) for i, fields in enumerate(FIELDS)]
    assert_drawn_as_in_torch(logits_of(vocab_size, len(params), spread), params)


@pytest.mark.usefixtures("short_passes")
@pytest.mark.parametrize("vocab_size", [10, 600])
def test_equal_logits_are_ordered_by_id(vocab_size: int) -> None:
    """Each value stands many times, so that every filter cuts, and every draw falls, among equals."""
    fields = [{"top_k": 4}, {"top_p": 0.7}, {"top_k": 6, "top_p": 0.9}, {"min_p": 0.7}, {"top_k": 5, "min_p": 0.7}]
    params = [sampling(temperature=1.0, seed=i, **each) for i, each in enumerate(fields * 2)]
    values = torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, -1.0, -0.0, 0.5, 1.0, 0.0])
    assert_drawn_as_in_torch(values.repeat(vocab_size // 10).expand(len(params), -1), params)


def test_both_zeros_are_one_logit() -> None:
    logits = torch.tensor([[-3.0, 0.0, -0.0, 0.0, -0.0, -5.0]]).expand(12, -1)
    params = [sampling(temperature=1.0, seed=i, top_k=4) for i in range(12)]
    assert set(assert_drawn_as_in_torch(logits, params).tolist()) == {1, 2, 3, 4}


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.3}], ids=str)
def test_a_token_of_probability_zero_is_never_drawn(fields: dict[str, Any]) -> None:
    logits = torch.full((10, 70), -torch.inf)
    logits[:, 3], logits[:, 69] = 0.0, 1.0
    params = [sampling(temperature=1.0, seed=i, **fields) for i in range(10)]
    assert set(assert_drawn_as_in_torch(logits, params).tolist()) == {3, 69}


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_the_ends_of_the_interval_are_drawn(fields: dict[str, Any]) -> None:
    logits = logits_of(40, 1, 2.0)
    columns = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | fields
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    parameters = [torch.tensor([value] * 2, dtype=dtype) for value, dtype in zip(columns.values(), dtypes, strict=True)]
    numbers = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    first, last = kernels.draw_tokens(logits.expand(2, -1), *parameters, numbers)[0].tolist()
    ranking = logits[0].argsort(descending=True).tolist()
    if not fields:
        assert (first, last) == (0, 39)
    elif "top_k" in fields:
        assert (first, last) == (ranking[0], ranking[2])
    else:
        kept = int((logits[0].softmax(0).sort(descending=True).values.cumsum(0) < 0.5).sum()) + 1
        assert (first, last) == (ranking[0], ranking[kept - 1])


@pytest.mark.usefixtures("short_passes")
def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = torch.zeros(4, 1030)
    logits[0, 1029] = logits[1, 517] = logits[1, 1020] = 1.0
    logits[3] = -torch.inf
    logits[3, 700] = -1e30
    got = sample(logits, [sampling()] * 4, device_draw=device_draw())
    assert got.token_ids.tolist() == [1029, 517, 0, 700]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_greatest_logit_is_told(temperature: float) -> None:
    logits = torch.randn(4, 100)
    logits[0, 30] = logits[0, 77] = torch.nan
    logits[1, 99] = torch.inf
    logits[2] = -torch.inf
    got = sample(logits, [sampling(temperature=temperature)] * 4, device_draw=device_draw())
    assert torch.isfinite(got.best_logits).tolist() == [False, False, False, True]
    assert got.token_ids[:3].tolist() == [30, 99, 0]


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    logits = logits_of(301, 6, 3.0)
    params = [sampling(temperature=0.8, seed=i, **FIELDS[2 * i]) for i in range(6)]
    together = sample(logits, params, device_draw=device_draw()).token_ids
    single = [sample(logits[i : i + 1], params[i : i + 1], device_draw=device_draw()).token_ids for i in range(6)]
    assert torch.equal(torch.cat(single), together)


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.8}], ids=str)
def test_tokens_have_their_probabilities(fields: dict[str, Any]) -> None:
    """Numbers at even distances: the share of a token differs from its probability by no more than one of them."""
    count = 40
    logits = logits_of(8, 1, 1.0)
    params = sampling(temperature=1.3, **fields)
    parameters = [
        torch.full((count,), value, dtype=dtype)
        for value, dtype in (
            (params.temperature, torch.float32),
            (params.top_k, torch.int32),
            (params.top_p, torch.float32),
            (params.min_p, torch.float32),
        )
    ]
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, _ = kernels.draw_tokens(logits.expand(count, -1), *parameters, numbers)
    probabilities = (logits[0].double() / 1.3).softmax(0)
    ranked = probabilities.argsort(descending=True)
    before = probabilities[ranked].cumsum(0) - probabilities[ranked]
    kept = ranked[: params.top_k or 8]
    if params.top_p < 1:
        kept = ranked[before < params.top_p]
    expected = torch.zeros(8, dtype=torch.float64)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    found = torch.bincount(tokens, minlength=8) / count
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1.01 / count)
    assert set(tokens.tolist()) <= set(kept.tolist())


def test_parameters_are_uploaded_only_when_they_change() -> None:
    uploads: list[Any] = []

    def upload(array: Any) -> torch.Tensor:
        uploads.append(array)
        return torch.from_numpy(array.copy())

    draw = DeviceDraw(TritonFusedKernels(), upload)
    parameters = np.zeros(2, SAMPLING_DTYPE)
    numbers = torch.from_numpy(uniforms([1, 2], [0, 0], [0, 0]))
    for parameters_of_step in (parameters, parameters, parameters.copy()):
        draw(torch.randn(2, 9), parameters_of_step, numbers)
    assert len(uploads) == 2


def test_a_runner_draws_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way of the parameters and the numbers to the device, with a greedy row among the others."""
    found: list[dict[int, list[int]]] = []
    for kind in ("torch", "triton"):
        monkeypatch.setenv("ASYNCLLM_FUSED_KERNELS", kind)
        driver = Driver(make_runner())
        for request_id, fields in enumerate(({"top_k": 9}, {"temperature": 0.0}, {"top_p": 0.8, "min_p": 0.01}, {})):
            driver.add(request_id, [3, 5, 7 + request_id], sampling(**{"temperature": 1.0, "seed": 11, **fields}))
        found.append(driver.generate(3))
    assert found[0] == found[1]
