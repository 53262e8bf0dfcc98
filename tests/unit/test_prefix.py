"""Pinned prefixes on a scripted engine: what is sent, what is refused, and that nothing stays behind."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from asyncllm import AsyncLLM
from asyncllm.errors import EngineDeadError, InvalidParameterError, UsageError
from tests.support.scripted import ENDLESS, assert_settled, letters_llm, set_script

pytestmark = pytest.mark.anyio

TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor -%}
{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="module")
async def module_llm(anyio_backend: Any) -> AsyncIterator[AsyncLLM]:
    async with letters_llm(chat_template=TEMPLATE) as llm:
        yield llm


@pytest.fixture
async def llm(module_llm: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    await set_script(module_llm)
    yield module_llm
    await assert_settled(module_llm)
    assert (await module_llm.stats()).num_pinned_blocks == 0


async def test_a_conversation_goes_on_from_messages(llm: AsyncLLM) -> None:
    system = {"role": "system", "content": "Be kind to all who ask, and be brief."}
    question = {"role": "user", "content": "Hello"}
    async with llm.prefix([system]) as p:
        done = await p.chat([question], max_tokens=3).completion()
        assert done.prompt_token_ids == (await llm.chat([system, question], max_tokens=1).completion()).prompt_token_ids
        assert (p.num_hits, p.num_requests) == (1, 1)
        assert done.usage.cached_tokens == p.num_tokens == len(f"<system>{system['content']}</>")
        with pytest.raises(InvalidParameterError, match="the prefix is messages"):
            p.stream("x")


async def test_what_goes_after_what(llm: AsyncLLM) -> None:
    async with llm.prefix("text") as p, llm.prefix([1, 2, 3]) as q:
        assert (await p.generate("more", max_tokens=1)).prompt_token_ids == list(b"textmore")
        assert (await p.generate([7], max_tokens=1)).prompt_token_ids == [*b"text", 7]
        assert (await q.generate([7], max_tokens=1)).prompt_token_ids == [1, 2, 3, 7]
        with pytest.raises(InvalidParameterError, match="the prefix is token ids"):
            q.stream("text")
        with pytest.raises(InvalidParameterError, match="the prefix is a prompt"):
            q.chat([{"role": "user", "content": "x"}])


async def test_a_request_that_runs_is_counted_and_outlives_the_prefix(llm: AsyncLLM) -> None:
    async with llm.prefix("text") as p:
        stream = p.stream("more", **ENDLESS)
        await anext(stream)
        assert (p.num_hits, p.num_requests) == (1, 1)
    await anext(stream)
    stream.cancel()
    assert (p.num_hits, p.num_requests) == (1, 1)


async def test_many_requests_are_counted_without_being_kept(llm: AsyncLLM) -> None:
    async with llm.prefix("text") as p:
        for _ in range(150):
            await p.generate("x", max_tokens=1)
        assert (p.num_hits, p.num_requests, p.num_hit_tokens) == (150, 150, 600)


async def test_tokens_that_reach_over_the_border_are_no_miss(llm: AsyncLLM) -> None:
    async with llm.prefix("text") as p:
        await p.generate("", max_tokens=1)  # its last token is computed whatever is known
        assert (p.num_hits, p.num_hit_tokens) == (1, 3)


async def test_an_error_in_the_block_lets_go(llm: AsyncLLM) -> None:
    with pytest.raises(ZeroDivisionError):
        async with llm.prefix("text"):
            raise ZeroDivisionError
    with pytest.raises(InvalidParameterError):
        async with llm.prefix(""):
            raise AssertionError("there is nothing to pin")


async def test_one_that_is_dropped_lets_go(llm: AsyncLLM) -> None:
    await llm.prefix("text").__aenter__()
    gc.collect()


async def test_other_salts_do_not_meet(llm: AsyncLLM) -> None:
    async with llm.prefix("some text", cache_salt="a") as p:
        assert (await p.generate("x", max_tokens=1)).usage.cached_tokens == 9
        assert (await llm.generate("some textx", max_tokens=1, cache_salt="b")).usage.cached_tokens == 0


async def test_the_engines_death(anyio_backend: Any) -> None:
    async with letters_llm({"exit_at_step": 3}) as llm:
        with pytest.raises(EngineDeadError):
            async with llm.prefix("text") as p:
                await p.generate("x", **ENDLESS)
        with pytest.raises(UsageError, match="not pinned"):
            p.stream("x")


async def test_it_starts_the_engine_and_a_closed_one_says_so(anyio_backend: Any, module_llm: AsyncLLM) -> None:
    llm = AsyncLLM(module_llm.config)
    async with llm.prefix("text") as p:
        assert (await p.generate("x", max_tokens=2)).text == "ab"
        await llm.aclose()
        with pytest.raises(UsageError, match="closed"):
            p.stream("x")
    with anyio.fail_after(5), pytest.raises(UsageError, match="closed"):
        await llm.prefix("text").__aenter__()


async def test_structured_output_does_not_go_on_in_the_middle(llm: AsyncLLM) -> None:
    from asyncllm import SamplingParams

    async with llm.stream("prompt", **ENDLESS) as stream:
        await anext(stream)
        request = stream.inbox.request
        assert request is not None
        request.params = SamplingParams(regex="[a-z]+")
        with pytest.raises(InvalidParameterError, match="must have regex=None"):
            stream.fork()
        [branch] = stream.fork(regex=None, max_tokens=2)
        assert len((await branch.completion()).token_ids) == 2


async def test_a_branch_of_a_running_stream_computes_one_token(llm: AsyncLLM) -> None:
    await set_script(llm, step_ms=3)  # so that the source runs for longer than the test
    before = (await llm.stats()).num_prefill_tokens
    async with llm.stream(list(range(40)), **ENDLESS) as stream:
        for _ in range(3):
            await anext(stream)
        branches = stream.fork(4, max_tokens=2)
    done = [await branch.completion() for branch in branches]
    assert [one.usage.cached_tokens for one in done] == [42] * 4
    assert (await llm.stats()).num_prefill_tokens - before == 40 + 4
