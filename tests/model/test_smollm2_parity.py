"""SmolLM2-135M-Instruct, from its GGUF and from a folder: the logits and greedy tokens of transformers in float32.

transformers gets *our* prompt ids: its own GGUF tokenizer leaves out the digit split of this model's pre-tokenizer.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.attention.cpu import CpuAttention
from asyncllm.attention.reference import ReferenceAttention
from asyncllm.checkpoint import open_checkpoint
from asyncllm.kernels.base import Format
from asyncllm.layers.linear import TorchLinearMethod
from asyncllm.layers.linear_native import NativeLinearMethod
from asyncllm.models.base import CausalLM
from asyncllm.models.native import describe
from asyncllm.models.registry import build_model
from tests.support import models
from tests.support.flat import FlatDriver
from tests.support.kernels import native_kernels

pytestmark = pytest.mark.model

MakeDriver = Callable[..., FlatDriver]
CPU = torch.device("cpu")
NUM_TOKENS = 64
LOGIT_TOLERANCE = 3e-4
"""On logits of up to 40: float32 sums in another order; transformers itself is off float64 by 5e-5."""

CHAT = """\
<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
What is the capital of France?<|im_end|>
<|im_start|>assistant
"""
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    CHAT,
    "naïve café — 東京 🙂",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference(smollm2_folder: Path) -> Any:
    return models.reference(smollm2_folder)


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> CausalLM:
    return build_model(open_checkpoint(str(smollm2_gguf)), torch.float32, CPU)


@pytest.fixture(scope="module")
def native_model(smollm2_gguf: Path) -> CausalLM:
    method = NativeLinearMethod(native_kernels())
    return build_model(open_checkpoint(str(smollm2_gguf)), torch.float32, CPU, linear_method=method)


@pytest.fixture(scope="module", params=["reference", "cpu", "native"])
def make_driver(request: pytest.FixtureRequest) -> MakeDriver:
    if request.param == "native":
        return partial(FlatDriver, request.getfixturevalue("native_model"), kernels=native_kernels())
    backend_class = {"reference": ReferenceAttention, "cpu": CpuAttention}[request.param]
    return partial(FlatDriver, request.getfixturevalue("model"), backend_class=backend_class)


def test_the_native_model_keeps_the_blocks_of_the_file(native_model: CausalLM, smollm2_gguf: Path) -> None:
    spec = describe(native_model, block_size=16)
    projections = [(layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down) for layer in spec.layers]
    assert {part.format for layer in projections for part in layer if part is not None} == {Format.Q4_1}
    assert spec.head.format == Format.Q8_0
    assert spec.embedding is spec.head
    weights = [spec.head, *(part for layer in projections for part in layer if part is not None)]
    packed = sum(weight.data.numel() * weight.data.itemsize for weight in weights)
    assert packed < smollm2_gguf.stat().st_size < 100e6
    assert sum(parameter.numel() for parameter in native_model.parameters()) < 50_000  # the norms


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak is read from /proc")
def test_loading_never_holds_more_than_the_packed_model(smollm2_gguf: Path) -> None:
    native_kernels()
    code = f"""
import torch
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from asyncllm.checkpoint import open_checkpoint
from asyncllm.kernels.selector import make_kernels
from asyncllm.layers.linear_native import NativeLinearMethod
from asyncllm.models.llama import LlamaForCausalLM
from asyncllm.models.native import describe
from asyncllm.models.registry import build_model

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

method, checkpoint = NativeLinearMethod(make_kernels(2)), open_checkpoint({str(smollm2_gguf)!r})
before = peak()
model = build_model(checkpoint, torch.float32, torch.device("cpu"), linear_method=method)
print(peak() - before)
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(run.stdout) < 160e6  # 96 MB packed, and the part of the file that is in memory at a time


def test_the_gguf_and_the_folder_are_the_same_model(smollm2_gguf: Path, smollm2_folder: Path) -> None:
    method = TorchLinearMethod()
    from_folder = build_model(
        open_checkpoint(str(smollm2_folder)), torch.float32, CPU, linear_method=method
    ).state_dict()
    from_gguf = build_model(open_checkpoint(str(smollm2_gguf)), torch.float32, CPU, linear_method=method).state_dict()
    assert from_folder.keys() == from_gguf.keys()
    for name, tensor in from_gguf.items():
        assert torch.equal(from_folder[name], tensor), name


def test_the_gguf_says_what_the_folder_says(smollm2_gguf: Path, smollm2_folder: Path) -> None:
    ours, theirs = open_checkpoint(str(smollm2_gguf)), open_checkpoint(str(smollm2_folder))
    for name in ("architecture", "vocab_size", "max_position", "eos_token_ids", "bos_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    shared = ours.config.keys() & theirs.config.keys()
    assert {name: ours.config[name] for name in shared} == {name: theirs.config[name] for name in shared}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template"):
        assert ours.tokenizer_config[name] == theirs.tokenizer_config[name], name


@pytest.mark.parametrize("text", PROMPTS, ids=range(len(PROMPTS)))
def test_logits_of_a_prompt_equal_transformers(
    make_driver: MakeDriver, reference: Any, tokenizer: Any, text: str
) -> None:
    token_ids = tokenizer.encode(text).ids
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    found = make_driver().step({0: token_ids})[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("make_driver", ["reference", "native"], indirect=True)
def test_chunks_and_neighbours_change_no_bit(make_driver: MakeDriver, tokenizer: Any) -> None:
    token_ids, other = tokenizer.encode(CHAT).ids, tokenizer.encode(PROMPTS[1]).ids
    alone = make_driver().step({0: token_ids})[0]
    driver = make_driver()
    parts = [
        driver.step({0: token_ids[:7]})[0],
        driver.step({2: other, 0: token_ids[7:8]})[0],
        driver.step({0: token_ids[8:9]})[0],
        driver.step({1: other, 0: token_ids[9:]})[0],
    ]
    assert torch.equal(torch.cat(parts), alone)


@pytest.mark.parametrize("make_driver", ["cpu", "native"], indirect=True)
@pytest.mark.parametrize("text", PROMPTS, ids=range(len(PROMPTS)))
def test_greedy_tokens_are_the_most_likely_ones_by_transformers(
    make_driver: MakeDriver, smollm2_folder: Path, tokenizer: Any, text: str
) -> None:
    token_ids = tokenizer.encode(text).ids
    found = greedy(make_driver, token_ids, NUM_TOKENS)
    assert models.corrected(smollm2_folder, token_ids, found) == found


@pytest.mark.slow
@pytest.mark.parametrize("make_driver", ["cpu", "native"], indirect=True)
def test_greedy_tokens_equal_what_transformers_generates(
    make_driver: MakeDriver, smollm2_folder: Path, tokenizer: Any
) -> None:
    """Its own loop, with its own cache, on one prompt: a token of it takes 0.1 to 1 s."""
    token_ids = tokenizer.encode(CHAT).ids
    assert greedy(make_driver, token_ids, NUM_TOKENS) == models.greedy(smollm2_folder, token_ids, NUM_TOKENS)


def greedy(make_driver: MakeDriver, token_ids: list[int], num_tokens: int) -> list[int]:
    return make_driver(max_tokens=len(token_ids) + num_tokens).greedy(token_ids, num_tokens)
