"""The flash-attn adapter on the packages' contract: the numbers of the reference, and every refusal before a call."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import LLM, SamplingParams
from asyncllm.attention.base import AttentionSpec, StepLimits
from asyncllm.attention.flash_attn import FlashAttention
from asyncllm.attention.selector import choose_backend
from asyncllm.errors import ConfigError
from asyncllm.wire.messages import EngineInfo, EngineSampling
from tests.support import flash_attn_contract as contract
from tests.support.attention import PagedRows, exact, make_spec
from tests.support.emulated_device import EmulatedRuntime
from tests.support.runner import GRAPH_SIZES, VOCAB, Driver, make_runner

BF16 = torch.bfloat16
GREEDY = EngineSampling(max_tokens=99, temperature=0.0)
VERSION_TO_SIZE = {"2": 256, "3": 16, "4": 32}
LIMITS = StepLimits(max_num_seqs=8, max_num_batched_tokens=600, max_model_len=5000)


@pytest.fixture(params=list(VERSION_TO_SIZE))
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    with contract.installed(request.param):
        yield request.param


def prompt(length: int, seed: int) -> list[int]:
    return [(7 * place * place + 11 * place + 13 * seed) % (VOCAB - 2) + 1 for place in range(length)]


# ---------------------------------------------------------------------------------------------------- whole steps
def drivers(version: str, **options: Any) -> tuple[Driver, Driver]:
    """Return the adapter under the runner of a GPU, and the reference, with the same blocks."""
    size = VERSION_TO_SIZE[version]
    options = {"num_blocks": 64, "block_size": size, "max_model_len": 500, "dtype": BF16, **options}
    pair = [make_runner(backend=name, **options) for name in ("flash_attn", "reference")]
    return Driver(pair[0], num_blocks=64, block_size=size), Driver(pair[1], num_blocks=64, block_size=size)


@pytest.mark.parametrize("window", [None, 6])
def test_the_runner_draws_the_same_tokens_as_on_the_reference(version: str, window: int | None) -> None:
    """Prefill whole and in chunks, mixed steps with decode rows before and after, graphs and a larger decode step."""
    outputs: list[list[list[int]]] = []
    for driver in drivers(version, window=window):
        for request_id, length in enumerate((1, 40, 7, 19, 3)):
            driver.add(request_id, prompt(length, request_id), GREEDY)
        driver.step({0: 1, 1: 17})
        driver.step({1: 1, 2: 7, 0: 1})  # a row with one token between others
        driver.step({1: 22, 2: 1, 3: 18, 0: 1, 4: 3})
        driver.step({0: 1, 3: 1})
        driver.generate(6)
        outputs.append([request.output for request in driver.requests.values()])
        if isinstance(driver.runner.runtime, EmulatedRuntime):
            assert driver.runner.runtime.num_replays > 0
            assert driver.runner.graphs.sizes == GRAPH_SIZES
    assert outputs[0] == outputs[1]


def test_blocks_of_a_common_prefix_are_read_and_a_preempted_request_comes_back(version: str) -> None:
    outputs: list[list[int]] = []
    for driver in drivers(version):
        size, common = driver.block_size, prompt(driver.block_size + 9, 5)
        first = driver.add(0, common, GREEDY)
        driver.generate(3)
        second = driver.add(1, [*common[:size], 4, 9, 2], GREEDY)
        second.blocks, second.computed = first.blocks[:1], size
        driver.generate(5)
        second.blocks = second.blocks[1:]  # the first one is not its own
        driver.release(1)
        driver.generate(7)
        outputs.append([*first.output, *second.output])
    assert outputs[0] == outputs[1]


def test_without_triton_torch_stores_keys_and_values(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.attention.flash_attn._triton_kv_write", lambda device: None)
    outputs: list[dict[int, list[int]]] = []
    for driver in drivers(version):
        for request_id, length in enumerate((5, 21, 2)):
            driver.add(request_id, prompt(length, request_id), GREEDY)
        outputs.append(driver.generate(5, chunk=9))
    assert outputs[0] == outputs[1]


# -------------------------------------------------------------------------------------------------- single steps
@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_attention_of_rows_in_pieces(version: str, dtype: torch.dtype, window: int | None) -> None:
    size = VERSION_TO_SIZE[version]
    spec = make_spec(heads=6, kv_heads=2, head_dim=16, block_size=size, dtype=dtype)
    rows = PagedRows(spec, [301, 3, 17, 30], limits=LIMITS)
    backend = FlashAttention(spec)
    [cache] = backend.allocate(rows.num_blocks)
    cache.fill_(torch.nan)  # what is past the end of a row is never looked at
    steps = [
        [(0, 0, 280), (1, 0, 1)],
        [(1, 1, 2), (0, 280, 300), (2, 0, 16), (3, 0, 1)],
        [(1, 2, 3), (2, 16, 17), (3, 1, 30)],
        [(0, 300, 301)],
    ]
    for parts in steps:
        padding = 3 if all(end - begin == 1 for _, begin, end in parts) else 0
        for (row, begin, end), got in zip(
            parts, rows.run(backend, cache, parts, window=window, padding=padding), strict=True
        ):
            assert (got.double() - exact(rows, row, window=window)[begin:end]).abs().max() < 4e-2


def test_keys_are_never_cut_by_how_many_rows_there_are(version: str) -> None:
    rows = PagedRows(make_spec(dtype=BF16, block_size=VERSION_TO_SIZE[version]), [5, 9, 4], limits=LIMITS)
    backend = FlashAttention(rows.spec)
    [cache] = backend.allocate(rows.num_blocks)
    decode = [(row, n - 1, n) for row, n in enumerate(rows.seq_lens)]
    rows.run(backend, cache, [(row, 0, n - 1) for row, n in enumerate(rows.seq_lens)])
    contract.CALLS.clear()
    rows.run(backend, cache, decode)
    rows.run(backend, cache, decode[:1])
    parts = {numbers["num_splits"] for _, numbers in contract.CALLS}
    assert parts == {2 if version == "2" else 1}  # of 2048 tokens of max_model_len


def test_a_row_has_the_same_bits_in_a_mixed_step_as_in_a_decode_step(version: str) -> None:
    rows = PagedRows(make_spec(dtype=BF16, block_size=VERSION_TO_SIZE[version]), [21, 30], limits=LIMITS)
    backend = FlashAttention(rows.spec)
    [cache] = backend.allocate(rows.num_blocks)
    rows.run(backend, cache, [(0, 0, 20)])
    contract.CALLS.clear()
    [alone] = rows.run(backend, cache, [(0, 20, 21)])
    [call] = contract.CALLS
    _, mixed = rows.run(backend, cache, [(1, 0, 30), (0, 20, 21)])
    assert call in contract.CALLS[1:]  # the very same call for it
    assert torch.equal(alone, mixed)


# ----------------------------------------------------------------------------------------------------- the choice
def flash_spec(**changes: Any) -> AttentionSpec:
    return replace(make_spec(heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=BF16), **changes)


@pytest.mark.parametrize(
    ("versions", "capability", "spec", "reason"),
    [
        (["2"], None, {}, "it needs a CUDA device, not 'cpu'"),
        (["2"], (7, 5), {"block_size": 256}, "flash-attn 2: it needs 8.0 or newer"),
        (["2"], (8, 0), {}, "flash-attn 2: block_size is 16; it must be a multiple of 256"),
        (["3"], (8, 0), {}, r"flash-attn 3: it needs 9\.0 \(Hopper\), not 8\.0"),
        (["3"], (9, 0), {"block_size": 64}, "flash-attn 3: block_size is 64; below 64"),
        (["4"], (8, 9), {}, "flash-attn 4: with paged keys and values it needs 9.0"),
        (["4"], (12, 0), {}, "flash-attn 4: .* not 12.0"),
        (["4"], (10, 0), {"head_dim": 256}, "flash-attn 4: the head dim is 256; on 10.0 it takes 128"),
        (["4"], (9, 0), {"block_size": 128}, "flash-attn 4: block_size is 128"),
        (["2", "3", "4"], (9, 0), {"dtype": torch.float32}, "dtype is 'float32'; it computes in bfloat16 or float16"),
        (["2", "3", "4"], (9, 0), {"kv_cache_dtype": "float16"}, "kv_cache_dtype is 'float16'"),
        (["2", "3", "4"], (9, 0), {"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8'"),
        (["2", "3", "4"], (9, 0), {"head_dim": 84}, "the head dim is 84; it takes multiples of 8 up to 256"),
        (["2", "3", "4"], (9, 0), {"head_dim": 264}, "the head dim is 264"),
        (["2", "3", "4"], (9, 0), {"num_heads": 3}, "3 query heads are not a multiple of 2"),
        ([], (9, 0), {"block_size": 256}, "flash-attn 2: flash-attn is not installed"),
        ([], (9, 0), {}, "flash-attn 4: flash-attn-4 is not installed"),
        (["4"], (8, 0), {"block_size": 256}, "flash-attn 2: flash_attn has no flash_attn_varlen_func"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    versions: list[str], capability: tuple[int, int] | None, spec: dict[str, Any], reason: str
) -> None:
    with contract.installed(*versions, capability=capability), pytest.raises(ConfigError, match=reason) as caught:
        choose_backend("flash_attn", flash_spec(**spec), ())
    assert caught.value.parameter == "attention_backend"


def test_a_package_that_cannot_be_imported_is_refused_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEi")

    with contract.installed(capability=(8, 0)):
        monkeypatch.setattr(importlib, "import_module", fail)
        reason = FlashAttention.why_not(flash_spec(block_size=256))
    assert reason is not None
    assert "flash_attn cannot be imported: undefined symbol" in reason


def test_an_old_version_is_refused() -> None:
    def old(
        q: Any, k: Any, v: Any, page_table: Any = None, seqused_k: Any = None, max_seqlen_q: Any = None
    ) -> None: ...

    with contract.installed("4"):
        importlib.import_module("flash_attn.cute").flash_attn_varlen_func = old
        reason = FlashAttention.why_not(flash_spec())
    assert reason is not None
    assert "flash_attn.cute.flash_attn_varlen_func is too old: it does not take 'num_splits'" in reason


@pytest.mark.parametrize(
    ("versions", "capability", "block_size", "package"),
    [
        ("2", (8, 0), 256, "flash-attn 2"),
        ("2", (9, 0), 256, "flash-attn 2"),
        ("23", (9, 0), 16, "flash-attn 3"),
        ("234", (9, 0), 16, "flash-attn 3"),
        ("24", (10, 0), 16, "flash-attn 4"),
        ("24", (12, 0), 256, "flash-attn 2"),
    ],
)
def test_who_asks_for_no_block_size_gets_the_one_that_the_package_wants(
    versions: str, capability: tuple[int, int], block_size: int, package: str
) -> None:
    with contract.installed(*versions, capability=capability):
        backend = choose_backend("flash_attn", flash_spec(), (), any_block_size=True)
        assert isinstance(backend, FlashAttention)
        assert (backend.spec.block_size, backend.package) == (block_size, package)


def test_a_block_size_that_was_asked_for_decides_between_the_packages() -> None:
    with contract.installed("2", "3"):
        backend = choose_backend("flash_attn", flash_spec(block_size=512), ())
        assert isinstance(backend, FlashAttention)
        assert (backend.spec.block_size, backend.package) == (512, "flash-attn 2")


def test_others_keep_the_block_size_that_nobody_asked_for() -> None:
    assert choose_backend("cpu", make_spec(block_size=16), (), any_block_size=True).spec.block_size == 16


# ------------------------------------------------------------------------------------------------------ whole engines
def generate(model: Path, **options: Any) -> tuple[EngineInfo, list[list[int]]]:
    prompts = [prompt(length, length) for length in (290, 5, 30)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    options |= {"dtype": "bfloat16", "device": "cpu", "num_threads": 1, "max_num_seqs": 4, "max_model_len": 400}
    with LLM(model, in_process=True, num_blocks=12, max_num_batched_tokens=100, **options) as llm:
        completions = [*llm.generate(prompts, params), *llm.generate(prompts[:1], params)]
        assert completions[-1].usage.cached_tokens == 256
        return llm.info, [list(completion.token_ids) for completion in completions]


def test_an_engine_has_blocks_of_256_for_version_2_and_the_tokens_of_the_reference(tiny_llama: Path) -> None:
    with contract.installed("2"):
        info, found = generate(tiny_llama, attention_backend="flash_attn")
    assert (info.attention_backend, info.block_size, info.num_blocks) == ("flash_attn", 256, 12)
    info, expected = generate(tiny_llama, attention_backend="reference", block_size=256)
    assert (info.attention_backend, info.block_size) == ("reference", 256)
    assert found == expected


def test_an_engine_with_a_block_size_that_the_package_cannot_read_does_not_start(tiny_llama: Path) -> None:
    with contract.installed("2"), pytest.raises(ConfigError, match="block_size is 16; it must be a multiple of 256"):
        LLM(tiny_llama, in_process=True, dtype="bfloat16", device="cpu", attention_backend="flash_attn", block_size=16)


# ---------------------------------------------------------------------------------------- the contract is the packages'
def parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(name, parameter.default) for name, parameter in inspect.signature(function).parameters.items()]


@pytest.mark.parametrize("version", list(VERSION_TO_SIZE))
def test_the_stubs_have_the_signatures_of_the_contract(version: str) -> None:
    module, functions = contract.VERSION_TO_FUNCTIONS[version]
    stub = Path(__file__).parents[3] / "typings" / module.replace(".", "/") / "__init__.pyi"
    found = {node.name: node.args for node in ast.parse(stub.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert set(found) == set(functions)
    for name, function in functions.items():
        args = found[name].args
        defaults = [ast.literal_eval(node) for node in found[name].defaults]
        required = [inspect.Parameter.empty] * (len(args) - len(defaults))
        assert [*zip([arg.arg for arg in args], [*required, *defaults], strict=True)] == parameters(function)


@pytest.mark.parametrize("version", list(VERSION_TO_SIZE))
def test_an_installed_package_has_the_signatures_of_the_contract(version: str) -> None:
    name, functions = contract.VERSION_TO_FUNCTIONS[version]
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed: {error}")
    for function_name, function in functions.items():
        if not hasattr(module, function_name):
            pytest.skip(f"{name} is here without {function_name}")
        assert parameters(getattr(module, function_name)) == parameters(function)


CALL: dict[str, Any] = {
    "q": torch.zeros(2, 1, 4, 8, dtype=BF16),
    "k_cache": torch.zeros(3, 256, 2, 8, dtype=BF16),
    "v_cache": torch.zeros(3, 256, 2, 8, dtype=BF16),
    "cache_seqlens": torch.ones(2, dtype=torch.int32),
    "table": torch.zeros(2, 2, dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"q": CALL["q"].float()}, "only support fp16 and bf16"),
        ({"k_cache": CALL["k_cache"].half()}, "query and key must have the same dtype"),
        ({"v_cache": CALL["v_cache"].half()}, "query and value must have the same dtype"),
        ({"cache_seqlens": CALL["cache_seqlens"].long()}, "must have dtype int32"),
        ({"cache_seqlens": torch.ones(4, dtype=torch.int32)[::2]}, "must be contiguous"),
        ({"cache_seqlens": CALL["cache_seqlens"][:1]}, "must have shape"),
        ({"table": CALL["table"].long()}, "must have dtype torch.int32"),
        ({"table": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]}, "must have contiguous last dimension"),
        ({"table": CALL["table"].to("meta")}, "must be on CUDA"),
        ({"q": torch.zeros(2, 1, 3, 8, dtype=BF16)}, "must divide number of heads"),
        ({"q": torch.zeros(2, 1, 4, 264, dtype=BF16)}, "head dimension at most 256"),
        ({"q": torch.zeros(2, 1, 4, 16, dtype=BF16)}, "must have shape"),
    ],
)
@pytest.mark.parametrize("version", ["2", "3"])
def test_the_contract_refuses_what_the_packages_refuse(version: str, changes: dict[str, Any], error: str) -> None:
    given = CALL | changes
    table = given.pop("table")
    if version == "2":
        function, given["block_table"] = contract.flash_attn_with_kvcache_2, table
    else:
        function, given["page_table"] = contract.flash_attn_with_kvcache_3, table
    with pytest.raises(RuntimeError, match=error):
        function(**given, causal=True)


def test_the_contract_refuses_small_pages_in_version_2() -> None:
    pages = torch.zeros(3, 128, 2, 8, dtype=BF16)
    lens, table = CALL["cache_seqlens"], CALL["table"]
    with pytest.raises(RuntimeError, match="divisible by 256"):
        contract.flash_attn_with_kvcache_2(CALL["q"], pages, pages, cache_seqlens=lens, block_table=table, causal=True)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    query = CALL["q"][:, 0]
    with pytest.raises(RuntimeError, match="divisible by 256"):
        contract.flash_attn_varlen_func(query, pages, pages, starts, starts, 1, 1, causal=True, block_table=table)


def test_the_contract_of_version_4_has_pages_or_sums_of_keys_and_no_parts() -> None:
    query, pages, lens = CALL["q"], CALL["k_cache"], CALL["cache_seqlens"]
    more: dict[str, Any] = {"seqused_k": lens, "page_table": CALL["table"], "causal": True}
    with pytest.raises(AssertionError, match="page_table is not supported with cu_seqlens_k"):
        contract.flash_attn_varlen_func_4(query, pages, pages, cu_seqlens_k=lens, **more)
    with pytest.raises(AssertionError, match="SplitKV not supported"):
        contract.flash_attn_varlen_func_4(query, pages, pages, num_splits=2, **more)
