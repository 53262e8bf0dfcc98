"""Gemma 3 270M from its GGUF and from a bfloat16 folder: the greedy tokens of transformers in float32, all of them.

One prompt is longer than the sliding window of 512 tokens, and one reaches beyond it while tokens are generated.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import LLM, Completion, SamplingParams
from asyncllm.attention.cpu import CpuAttention
from asyncllm.checkpoint import open_checkpoint
from asyncllm.checkpoint.gguf import GGUFFile
from asyncllm.frontend.detokenizer import make_detokenizer
from asyncllm.frontend.tokenizer import Tokenizer
from asyncllm.kernels.base import Format
from asyncllm.layers.linear_native import NativeLinearMethod, packed_parts
from asyncllm.models.gemma3 import Gemma3ForCausalLM
from asyncllm.models.llama import LlamaDecoderLayer
from asyncllm.models.registry import build_model
from tests.support import gemma3, models
from tests.support.flat import FlatDriver
from tests.support.kernels import native_kernels

pytestmark = pytest.mark.slow

MakeDriver = Callable[..., FlatDriver]
CPU = torch.device("cpu")
NUM_TOKENS = 64
MAX_LEN = 832
LICENCE = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8")
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    "naïve café — 東京 🙂",
    LICENCE[:2200],
    LICENCE[:3600],
]


@pytest.fixture(scope="module", autouse=True)
def references() -> Iterator[None]:
    """Let go of the references in the end: they take 1.1 GB each."""
    yield
    gemma3.reference.cache_clear()
    models.reference.cache_clear()


@pytest.fixture(scope="module")
def tokenizer(gemma3_gguf: Path) -> Tokenizer:
    return Tokenizer.from_path(gemma3_gguf)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    found = [tokenizer.encode(text) for text in TEXTS]
    assert 512 - NUM_TOKENS < len(found[-2]) < 512 < len(found[-1]) < MAX_LEN - NUM_TOKENS
    return found


def build(path: Path, *, native: bool) -> Gemma3ForCausalLM:
    method = NativeLinearMethod(native_kernels()) if native else None
    model = build_model(open_checkpoint(str(path)), torch.float32, CPU, max_position=MAX_LEN, linear_method=method)
    assert isinstance(model, Gemma3ForCausalLM)
    return model


@pytest.fixture(scope="module")
def native_model(gemma3_gguf: Path) -> Gemma3ForCausalLM:
    return build(gemma3_gguf, native=True)


@pytest.fixture
def make_driver(native_model: Gemma3ForCausalLM) -> MakeDriver:
    return partial(FlatDriver, native_model, kernels=native_kernels(), max_tokens=MAX_LEN, max_rows=len(TEXTS))


@pytest.fixture(scope="module")
def expected(gemma3_gguf: Path, prompts: list[list[int]], native_model: Gemma3ForCausalLM) -> list[list[int]]:
    """The greedy tokens after each prompt: those of the native model, corrected by transformers."""
    kernels = native_kernels()
    driver = FlatDriver(native_model, kernels=kernels, max_tokens=MAX_LEN, max_rows=len(TEXTS))
    found = driver.greedy_all(dict(enumerate(prompts)), NUM_TOKENS)
    reference = gemma3.reference(gemma3_gguf)
    return [gemma3.corrected(reference, prompt, found[row]) for row, prompt in enumerate(prompts)]


def test_matrices_stay_in_the_blocks_of_the_file(native_model: Gemma3ForCausalLM, gemma3_gguf: Path) -> None:
    types = {name: tensor.type_name for name, tensor in GGUFFile(gemma3_gguf).tensors.items()}
    for index, layer in enumerate(native_model.layers):
        assert isinstance(layer, LlamaDecoderLayer)
        q, k, v = packed_parts(layer.self_attn.qkv_proj)
        gate, up = packed_parts(layer.mlp.gate_up_proj)
        (o,), (down,) = packed_parts(layer.self_attn.o_proj), packed_parts(layer.mlp.down_proj)
        parts = {"attn_q": q, "attn_k": k, "attn_v": v, "attn_output": o, "ffn_gate": gate, "ffn_up": up}
        for name, part in {**parts, "ffn_down": down}.items():
            kind = types[f"blk.{index}.{name}.weight"]
            assert part.format.name == (kind if kind in Format.__members__ else "F32"), name
    assert packed_parts(native_model.lm_head)[0] is packed_parts(native_model.embed_tokens)[0]


def test_greedy_tokens_of_all_prompts_together(expected: list[list[int]]) -> None:
    assert [len(tokens) for tokens in expected] == [NUM_TOKENS] * len(TEXTS)


@pytest.mark.parametrize("row", [0, 5])
def test_a_prompt_alone(make_driver: MakeDriver, prompts: list[list[int]], expected: list[list[int]], row: int) -> None:
    assert make_driver().greedy(prompts[row], NUM_TOKENS) == expected[row]


def test_chunks_and_neighbours_change_no_bit(make_driver: MakeDriver, prompts: list[list[int]]) -> None:
    long, other = prompts[5], prompts[1]
    alone = make_driver().step({0: long}, last_only=True)[0]
    driver = make_driver()
    driver.step({0: long[:7]}, last_only=True)
    driver.step({2: other, 0: long[7:301]}, last_only=True)
    driver.step({0: long[301:302], 2: [5]}, last_only=True)
    assert torch.equal(driver.step({1: other, 0: long[302:]}, last_only=True)[0], alone)


def test_the_folder_in_bfloat16(gemma3_folder: Path, prompts: list[list[int]]) -> None:
    model = build(gemma3_folder, native=True)
    assert packed_parts(model.lm_head)[0].format is Format.BF16
    driver = FlatDriver(model, kernels=native_kernels(), max_tokens=MAX_LEN, max_rows=len(TEXTS))
    found = driver.greedy_all(dict(enumerate(prompts)), NUM_TOKENS)
    reference = models.reference(gemma3_folder)
    for row, prompt in enumerate(prompts):
        assert found[row] == gemma3.corrected(reference, prompt, found[row])


def test_on_torch(gemma3_gguf: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    model = build(gemma3_gguf, native=False)
    driver = FlatDriver(model, backend_class=CpuAttention, max_tokens=MAX_LEN, max_rows=len(TEXTS))
    found = driver.greedy_all(dict(enumerate(prompts)), 12)
    assert [found[row] for row in range(len(TEXTS))] == [tokens[:12] for tokens in expected]


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def check(completions: list[Completion], prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert [completion.prompt_token_ids for completion in completions] == prompts
    assert [completion.token_ids for completion in completions] == expected


def test_the_engine_together_then_with_cached_prefixes(
    gemma3_gguf: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with LLM(gemma3_gguf, in_process=True, max_model_len=MAX_LEN, num_blocks=256, max_num_batched_tokens=200) as llm:
        check(llm.generate(TEXTS, GREEDY), prompts, expected)
        again = llm.generate(TEXTS, GREEDY)
        check(again, prompts, expected)
        assert again[5].usage.cached_tokens > 512


def test_the_engine_under_preemption(gemma3_gguf: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    with LLM(gemma3_gguf, in_process=True, max_model_len=MAX_LEN, num_blocks=72, max_num_batched_tokens=333) as llm:
        check(llm.generate(TEXTS, GREEDY), prompts, expected)
        assert llm.stats().num_preemptions > 0


# ------------------------------------------------------------------------------------------------------------- the text
CORPUS = [
    "Hello, world! It's  a   test\twith\ttabs.\r\n\r\nAnd\n\n\nlines\n",
    " leading and trailing ",
    " " * 3 + "x" + " " * 31 + "y" + " " * 40 + "\n" * 33 + "z",
    "3.14159 1234567890 ١٢٣ ½ x² 1e-10",
    "naïve café Ångström Straße İstanbul e\u0301 ﬁ",
    "東京は日本の首都です。 中文，한국어 ไทย हिन्दी العربية עברית",
    "🙂👩‍👩‍👧🏳️‍🌈🇩🇪 \u200b\u200d\ufeff",
    "def f(x):\n    return x  + 1\n\n\n\tif x>=2: pass  # ünïcode",
    "<bos>text<eos> <start_of_turn>user\nhi<end_of_turn>\n<unused7>[multimodal]<table><td>",
    "\x00\x01\x1f\x7f\x80\ud7ff\ue000\U00010348\U0001d49e 𒀀 \U000e0041",
    "▁ ▁▁ a▁b",
    "<0x41><0xE2>",
    "",
    LICENCE,
]


@pytest.fixture(scope="module")
def library(gemma3_folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(gemma3_folder / "tokenizer.json"))


@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_ids_and_text_are_those_of_the_library(tokenizer: Tokenizer, library: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids
    assert ids[0] == tokenizer.bos_token_id
    for skip in (False, True):
        assert tokenizer.decode(ids, skip) == library.decode(ids, skip)
    assert tokenizer.decode(ids[1:], False) == text.replace("▁", " ")


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the memory in use is read from /proc")
def test_the_memory_that_building_the_tokenizer_took_is_given_back(gemma3_gguf: Path) -> None:
    code = f"""
from pathlib import Path
from asyncllm.frontend.tokenizer import Tokenizer

tokenizer = Tokenizer.from_path({str(gemma3_gguf)!r})
print(int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10)
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(run.stdout) < 200e6  # 120 MB are in use, 350 MB were


def test_streamed_text_is_what_the_library_decodes_at_once(tokenizer: Tokenizer, library: Any) -> None:
    """Characters that are no token of the vocabulary come byte by byte, and are held until they are whole."""
    text = "".join(f"{text}\n" for text in CORPUS)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert sum(map(tokenizer.is_byte_token, ids)) > 10
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [piece for token_id in ids if (piece := detokenizer.push(token_id)) is not None]
    pieces.append(detokenizer.close())
    assert [token_id for _, held in pieces for token_id in held] == ids
    assert "".join(piece for piece, _ in pieces) == library.decode(ids, skip_special_tokens=False)
    assert not any("\ufffd" in piece for piece, _ in pieces)
