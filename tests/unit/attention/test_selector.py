from __future__ import annotations

import pytest

from asyncllm.attention.selector import NAME_TO_BACKEND, choose_backend, why_others_were_not
from asyncllm.errors import ConfigError
from asyncllm.platforms import Platform
from asyncllm.platforms.cpu import CpuPlatform
from asyncllm.platforms.cuda import CudaPlatform
from tests.support.attention import make_spec


def test_auto_takes_the_first_that_can_serve() -> None:
    assert choose_backend("auto", make_spec(), ("cpu", "reference")).name == "cpu"
    assert choose_backend("auto", make_spec(), ("reference", "cpu")).name == "reference"


def test_a_named_backend_is_taken() -> None:
    assert choose_backend("reference", make_spec(), ("cpu",)).name == "reference"


def test_auto_passes_over_a_backend_that_cannot_and_says_why_if_none_can() -> None:
    spec = make_spec(heads=3, kv_heads=2)
    with pytest.raises(ConfigError, match="3 query heads are not a multiple of 2"):
        choose_backend("auto", spec, ("cpu",))


def test_a_named_backend_that_cannot_is_refused() -> None:
    with pytest.raises(ConfigError, match="'cpu' cannot serve this model: cpu: 3 query heads"):
        choose_backend("cpu", make_spec(heads=3, kv_heads=2), ("cpu", "reference"))


def test_why_the_others_were_not_taken() -> None:
    order = ("native", "cpu", "reference")
    native = {"native": "the native kernels are not in use"}
    assert why_others_were_not("cpu", "auto", make_spec(), order) == native | {"reference": "cpu comes first"}
    asked = "attention_backend='reference' was asked for"
    assert why_others_were_not("reference", "reference", make_spec(), order) == native | {"cpu": asked}


@pytest.mark.parametrize("name", ["auto", "cpu", "reference"])
def test_int8_keys_and_values_are_refused_in_torch_with_what_helps(name: str) -> None:
    with pytest.raises(ConfigError, match=r"needs the native kernels .*; torch stores float32, bfloat16 or float16"):
        choose_backend(name, make_spec(kv_cache_dtype="int8"), ("native", "cpu", "reference"))


@pytest.mark.parametrize("platform", [CpuPlatform, CudaPlatform])
def test_the_backends_that_a_platform_tries_are_known(platform: type[Platform]) -> None:
    assert set(platform.attention_backends) <= set(NAME_TO_BACKEND)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'auto', 'cpu', 'flash_attn', 'native', 'reference', 'triton'") as caught:
        choose_backend("cuda", make_spec(), ("cpu",))
    assert caught.value.parameter == "attention_backend"
    assert caught.value.value == "cuda"
