"""The fused operations in Triton's interpreter against their twins in torch.

Where only elementwise products and sums are rounded, results are equal. A sum of squares or an exponential may differ
by a unit in the last place of float32, after which a number may be rounded to its neighbour in 16 bits: one unit there.
"""

from __future__ import annotations

import pytest
import torch

from asyncllm.kernels.fused import FusedKernels, HeadNorms, Rotation

pytest.importorskip("triton")

from asyncllm.kernels.triton.fused import TritonFusedKernels

pytestmark = pytest.mark.triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TWIN, KERNELS = FusedKernels(), TritonFusedKernels()
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_neighbours(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that numbers are equal within a unit in the last place (float32: four), and nearly all are equal."""
    units = 4 if expected.dtype == torch.float32 else 1
    torch.testing.assert_close(found, expected, rtol=units * torch.finfo(expected.dtype).eps, atol=1e-7)
    if expected.dtype != torch.float32:
        assert (found != expected).float().mean() < 0.01


# --------------------------------------------------------------------------------------------------------------- norms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 48, 576])
@pytest.mark.parametrize("wide", [False, True])
def test_norms_equal_torch(dtype: torch.dtype, size: int, wide: bool) -> None:
    weight = random(size, dtype=torch.float32 if wide else dtype, seed=1)
    x = random(5, size + 3, dtype=dtype)[:, :size]
    assert_neighbours(KERNELS.rms_norm(x, weight, EPS), TWIN.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_a_norm_adds_to_the_residual_stream_in_place(dtype: torch.dtype, wide: bool) -> None:
    weight = random(80, dtype=torch.float32 if wide else dtype, seed=1)
    update = random(7, 96, dtype=dtype, seed=2)[:, :80]
    streams = [random(7, 90, dtype=dtype) for _ in range(2)]
    found, expected = (
        kernels.add_rms_norm(stream[:, :80], update, weight, EPS)
        for kernels, stream in zip((KERNELS, TWIN), streams, strict=True)
    )
    assert_neighbours(found, expected)
    assert torch.equal(*streams)


def test_a_normalised_row_does_not_depend_on_its_neighbours() -> None:
    x, weight = random(9, 100), random(100, seed=1)
    assert torch.equal(
        KERNELS.rms_norm(x, weight, EPS), torch.cat([KERNELS.rms_norm(row[None], weight, EPS) for row in x])
    )


# --------------------------------------------------------------------------------------------------------- activations
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [40, 1500])
def test_gates_equal_torch(dtype: torch.dtype, name: str, size: int) -> None:
    gate_up = random(3, 2 * size + 5, dtype=dtype)[:, : 2 * size] * 3
    found, expected = KERNELS.gate(gate_up, name), TWIN.gate(gate_up, name)
    if dtype == torch.float32:  # torch's tanh form loses digits where the gate nearly closes
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)
    else:
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_a_gate_closes_and_opens_far_from_zero() -> None:
    gate = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4]])
    for name in ("silu", "gelu_pytorch_tanh"):
        found = KERNELS.gate(torch.cat((gate, torch.ones_like(gate)), 1), name)
        torch.testing.assert_close(found, torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e4]]), rtol=0, atol=1e-30)


@pytest.mark.parametrize("name", ["relu", "gelu", "quick_gelu"])
def test_other_activations_are_left_to_torch(name: str) -> None:
    gate_up = random(3, 64)
    assert torch.equal(KERNELS.gate(gate_up, name), TWIN.gate(gate_up, name))


# --------------------------------------------------------------------------------------------------------------- heads
class Case:
    """Five tokens with heads, their rotation, and slots of which one is padding."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        width = num_heads + 2 * num_kv_heads
        self.heads = random(5, width * head_dim + 8, dtype=dtype)[:, : width * head_dim].view(5, width, head_dim)
        angles = random(5, head_dim // 2, seed=1)
        rows = torch.stack((angles.cos(), angles.sin()), 1).to(dtype)
        self.rotation = Rotation(rows[:, None, :1], torch.cat((-rows[:, None, 1:], rows[:, None, 1:]), 2))
        self.slots = torch.tensor([13, 4, -1, 27, 5])
        self.shape = (2, 7, 4, num_kv_heads, head_dim)

    def run(
        self, kernels: FusedKernels, norms: HeadNorms | None = None, kv_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the query and the cache, whose heads lie apart from each other."""
        cache = torch.full(
            (*self.shape[:3], self.shape[3] + 1, self.shape[4]), -7.0, dtype=kv_dtype or self.heads.dtype
        )
        query = kernels.rotate_and_write(self.heads, self.rotation, cache[:, :, :, :-1], self.slots, norms)
        return query, cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 2, 16), (3, 1, 20), (9, 3, 64), (40, 8, 80)], ids=str)
def test_heads_are_rotated_and_stored_as_torch_does(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    case = Case(*shape, dtype)
    before = case.heads.clone()
    found, expected = case.run(KERNELS), case.run(TWIN)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(case.heads, before)
    assert (found[1][:, :, :, -1] == -7).all()


def test_a_token_without_a_slot_is_not_stored() -> None:
    for kernels in (KERNELS, TWIN):
        _, cache = Case(4, 2, 16, torch.float32).run(kernels)
        untouched = (cache == -7).all(4).all(3).all(0).flatten()
        assert torch.nonzero(~untouched).flatten().tolist() == [4, 5, 13, 27]


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16])
def test_a_cache_may_have_a_smaller_dtype(kv_dtype: torch.dtype) -> None:
    case = Case(4, 2, 16, torch.float32)
    assert torch.equal(case.run(KERNELS, kv_dtype=kv_dtype)[1], case.run(TWIN, kv_dtype=kv_dtype)[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_query_and_key_heads_are_normalised_before_they_are_rotated(dtype: torch.dtype, wide: bool) -> None:
    case = Case(6, 2, 20, dtype)
    weights = [random(20, dtype=torch.float32 if wide else dtype, seed=seed) for seed in (3, 4)]
    norms = HeadNorms(weights[0], weights[1], EPS)
    found, expected = case.run(KERNELS, norms), case.run(TWIN, norms)
    unit = torch.finfo(dtype).eps
    for ours, theirs in zip(found, expected, strict=True):  # products near each other are subtracted: absolute units
        torch.testing.assert_close(ours, theirs, rtol=4 * unit, atol=4 * unit)
        assert dtype == torch.float32 or (ours != theirs).float().mean() < 0.02
    assert torch.equal(found[1][1], expected[1][1])  # values


# ----------------------------------------------------------------------------------------------------------- operators
def test_operators_say_what_they_write() -> None:
    schemas = {
        name: getattr(torch.ops.asyncllm, name).default._schema
        for name in ("rms_norm", "gate", "add_rms_norm", "rotate_and_write")
    }
    written = {name: [a.name for a in schema.arguments if a.alias_info is not None] for name, schema in schemas.items()}
    assert written == {"rms_norm": [], "gate": [], "add_rms_norm": ["hidden"], "rotate_and_write": ["cache"]}


def test_operators_give_shapes_on_fake_tensors() -> None:
    case = Case(6, 2, 20, torch.float32)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert KERNELS.rms_norm(torch.empty(3, 8), torch.empty(8), EPS).shape == (3, 8)
        assert KERNELS.gate(torch.empty(3, 8), "silu").shape == (3, 4)
        assert case.run(KERNELS)[0].shape == (5, 6, 20)


def test_inputs_whose_rows_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match="rows are contiguous"):
        KERNELS.rms_norm(random(8, 3).T, random(8), EPS)
    case = Case(4, 2, 16, torch.float32)
    case.heads = case.heads.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="heads of a token"):
        case.run(KERNELS)
