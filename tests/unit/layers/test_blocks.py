"""Linear, norms, embeddings, activations and the attention layer: equal to transformers and torch, block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from asyncllm.errors import UnsupportedModelError
from asyncllm.kernels.fused import NAME_TO_ACTIVATION, apply_gated
from asyncllm.layers.activation import get_activation
from asyncllm.layers.attention import Attention
from asyncllm.layers.embedding import Embedding, LearnedPositions
from asyncllm.layers.linear import Linear, TorchLinearMethod, prepare_linear_layers
from asyncllm.layers.linear_onednn import OneDNNLinearMethod, default_linear_method
from asyncllm.layers.norm import LayerNorm, RMSNorm

WHERE: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


# ------------------------------------------------------------------------------------------------------------- linear
def test_several_projections_are_one_matrix() -> None:
    layer = Linear(8, (6, 2, 4), bias=True, **WHERE)
    parts = [nn.Linear(8, size) for size in (6, 2, 4)]
    destinations = layer.destinations("q", "k", "v")
    assert list(destinations) == ["q.weight", "k.weight", "v.weight", "q.bias", "k.bias", "v.bias"]
    for name, part in zip("qkv", parts, strict=True):
        destinations[f"{name}.weight"].copy_(part.weight.detach())
        destinations[f"{name}.bias"].copy_(part.bias.detach())
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), torch.cat([part(x) for part in parts], -1).detach())


def test_no_bias_no_destination() -> None:
    assert list(Linear(8, 4, bias=False, **WHERE).destinations("o")) == ["o.weight"]


def test_another_linear_method_drops_in() -> None:
    class Doubled(TorchLinearMethod):
        def prepare(self, layer: Linear) -> None:
            layer.weight.mul_(2)

    doubled = Doubled()
    sizes = ((4, 4), (4, 2))
    model = nn.Sequential(*(Linear(*size, bias=False, method=doubled, **WHERE) for size in sizes))
    for module in model:
        module.weight.copy_(torch.randn_like(module.weight))
    x = torch.randn(3, 4)
    before = model(x)
    prepare_linear_layers(model)
    torch.testing.assert_close(model(x), before * 4)


@pytest.fixture
def packed_pair() -> tuple[Linear, Linear]:
    """The same layer as loaded, and packed by oneDNN; 1536 is a width where a single row takes other code there."""
    methods = (TorchLinearMethod(), OneDNNLinearMethod())
    plain, packed = (Linear(1536, 40, bias=True, method=method, **WHERE) for method in methods)
    for name, tensor in plain.destinations("x").items():
        packed.destinations("x")[name].copy_(tensor.normal_())
    prepare_linear_layers(packed)
    return plain, packed


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
def test_packed_weights_give_the_same_numbers(packed_pair: tuple[Linear, Linear], rows: int) -> None:
    plain, packed = packed_pair
    x = torch.randn(rows, 1536)
    torch.testing.assert_close(packed(x), plain(x), rtol=1e-4, atol=1e-4)
    assert packed(x).shape == (rows, 40)


def test_packed_weights_replace_the_loaded_ones(packed_pair: tuple[Linear, Linear]) -> None:
    assert [sum("weight" in name for name in layer.state_dict()) for layer in packed_pair] == [1, 0]


def test_a_row_of_a_packed_layer_does_not_depend_on_its_neighbours(packed_pair: tuple[Linear, Linear]) -> None:
    packed = packed_pair[1]
    x = torch.randn(130, 1536)
    whole = packed(x)
    for rows in (1, 2, 3, 4, 5, 8, 17, 64, 129):
        assert torch.equal(packed(x[:rows]), whole[:rows]), rows
        assert torch.equal(packed(x[-rows:]), whole[-rows:]), rows


def test_the_default_method_is_packed_only_for_float32_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert isinstance(default_linear_method(torch.float32, cpu), OneDNNLinearMethod)
    assert isinstance(default_linear_method(torch.bfloat16, cpu), TorchLinearMethod)
    assert "float32 on a CPU" in str(OneDNNLinearMethod.why_not(torch.float32, torch.device("meta")))


# -------------------------------------------------------------------------------------------------------------- norms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    reference = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    reference.weight.data.normal_()
    norm = RMSNorm(48, 1e-5, dtype=dtype, device=torch.device("cpu"))
    norm.destinations("n")["n.weight"].copy_(reference.weight.detach())
    x = torch.randn(5, 48).to(dtype)
    assert torch.equal(norm(x), reference(x).detach())


def test_rms_norm_of_a_row_does_not_depend_on_its_neighbours() -> None:
    norm = RMSNorm(48, 1e-5, **WHERE)
    norm.weight.normal_()
    x = torch.randn(33, 48)
    assert torch.equal(norm(x), torch.cat([norm(row[None]) for row in x]))


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_equals_torch(affine: bool) -> None:
    reference = nn.LayerNorm(48, elementwise_affine=affine)
    norm = LayerNorm(48, affine=affine, **WHERE)
    assert set(norm.destinations("n")) == ({"n.weight", "n.bias"} if affine else set())
    if affine:
        for name, parameter in reference.named_parameters():
            norm.destinations("n")[f"n.{name}"].copy_(parameter.data.normal_())
    x = torch.randn(5, 48)
    assert torch.equal(norm(x), reference(x).detach())


# --------------------------------------------------------------------------------------------- embeddings, activations
def test_embedding_gives_rows_that_may_be_changed() -> None:
    table = Embedding(5, 3, **WHERE)
    table.weight.copy_(torch.arange(15.0).view(5, 3))
    rows = table(torch.tensor([4, 0, 4]))
    rows.zero_()
    assert table.weight[4].tolist() == [12.0, 13.0, 14.0]


def test_learned_positions_skip_the_first_rows() -> None:
    table = LearnedPositions(4, 1, offset=2, **WHERE)
    table.weight.copy_(torch.arange(6.0).view(6, 1))
    assert table(torch.tensor([0, 3])).tolist() == [[2.0], [5.0]]


@pytest.mark.parametrize("name", sorted(NAME_TO_ACTIVATION))
def test_activations_are_those_of_transformers(name: str) -> None:
    x = torch.linspace(-6, 6, 101)
    torch.testing.assert_close(get_activation(name)(x), ACT2FN[name](x))


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'xielu'.*known are gelu") as caught:
        get_activation("xielu")
    assert caught.value.feature == "activation xielu"


@pytest.mark.parametrize("size", [96, 1000, 40_000])
def test_a_gated_row_does_not_depend_on_its_neighbours(size: int) -> None:
    gate_up = torch.randn(70, 2 * size)
    silu = get_activation("silu")
    whole = apply_gated(silu, gate_up, size)
    torch.testing.assert_close(whole, silu(gate_up[:, :size]) * gate_up[:, size:])
    for start, rows in ((0, 1), (3, 1), (5, 33), (0, 41)):
        assert torch.equal(apply_gated(silu, gate_up[start : start + rows], size), whole[start : start + rows])


# ---------------------------------------------------------------------------------------------------------- attention
def test_attention_writes_before_it_reads_and_uses_its_own_cache() -> None:
    calls: list[tuple[str, Any]] = []

    class Backend:
        def write_kv(self, key: Any, value: Any, cache: Any, plan: Any) -> None:
            calls.append(("write", (key, value, cache, plan)))

        def forward(self, query: Any, cache: Any, plan: Any, *, scale: float, window: int | None) -> str:
            calls.append(("read", (query, cache, plan, scale, window)))
            return "out"

    context: Any = type("Context", (), {"backend": Backend(), "plan": "plan", "kv_caches": ["zero", "one"]})()
    q, k, v = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert Attention(1, scale=0.5, window=7)(q, k, v, context) == "out"
    assert calls == [("write", (k, v, "one", "plan")), ("read", (q, "one", "plan", 0.5, 7))]
