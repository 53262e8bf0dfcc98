"""Chats on a scripted engine: channels, calls and messages as an application gets them, on every event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncllm import LLM, AsyncLLM, Channel, FinishReason, InvalidParameterError, LLMEngine
from asyncllm.testing import scripted_llm, scripted_options, write_tiny_checkpoint
from tests.support.scripted import assert_settled
from tests.unit.frontend.test_public_templates import WEATHER, source

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
REPLIES = {
    "Weather?": f"<think>\nI need the weather.\n</think>\n\nOne moment.\n{CALL}",
    "<tool_response>": "<think>\n\n</think>\n\n3 degrees.",
    "Forced list?": '[{"name": "get_weather", "arguments": {"city": "Bern"}}]',
    "Forced one?": '{"city": "Bern"}',
    "Plain?": "<think>hm</think>Yes",
}
CHECKPOINT = {"chat_template": source("qwen3")}
ASK = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
async def module_llm(anyio_backend: Any) -> AsyncIterator[AsyncLLM]:
    async with scripted_llm(REPLIES, checkpoint=CHECKPOINT) as llm:
        yield llm


@pytest.fixture
async def llm(module_llm: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    yield module_llm
    await assert_settled(module_llm)


async def test_an_agent_goes_round(llm: AsyncLLM) -> None:
    """Reasoning, content and a call; its result; the answer. The template is Qwen 3's shape, all else is automatic."""
    messages: list[dict[str, Any]] = list(ASK)
    text = dict.fromkeys(Channel, "")
    async with llm.chat(messages, tools=[WEATHER]) as stream:
        async for delta in stream:
            text[delta.channel] += delta.text
        done = await stream.completion()
    assert text[Channel.REASONING] == done.reasoning == "I need the weather."
    assert text[Channel.CONTENT] == done.content == "One moment."
    assert done.finish_reason is FinishReason.TOOL_CALLS
    (call,) = done.tool_calls
    assert (call.name, call.arguments) == ("get_weather", {"city": "Zürich"})
    assert done.text == REPLIES["Weather?"]

    messages += [done.to_message(), {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    answer = await llm.chat(messages, tools=[WEATHER]).completion()
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("3 degrees.", None, FinishReason.STOP)


async def test_demanded_calls(llm: AsyncLLM) -> None:
    for text, choice in (("Forced list?", "required"), ("Forced one?", "get_weather")):
        done = await llm.chat([{"role": "user", "content": text}], tools=[WEATHER], tool_choice=choice).completion()
        assert [(call.name, call.arguments) for call in done.tool_calls] == [("get_weather", {"city": "Bern"})]
        assert done.finish_reason is FinishReason.TOOL_CALLS
        assert done.content == ""


async def test_tool_choice_none_and_parsers_off(llm: AsyncLLM) -> None:
    done = await llm.chat(ASK, tools=[WEATHER], tool_choice="none").completion()
    assert (done.tool_calls, done.finish_reason) == ([], FinishReason.STOP)
    assert done.content == f"One moment.\n{CALL}"
    raw = await llm.chat(ASK, tools=[WEATHER], tool_parser="none", reasoning_parser="none").completion()
    assert raw.content == raw.text == REPLIES["Weather?"]


async def test_a_template_of_the_request_is_compiled_off_the_loop(llm: AsyncLLM) -> None:
    template = source("qwen3") + "{{ 'Plain' + mark }}"
    stream = llm.chat(ASK, chat_template=template, chat_template_kwargs={"mark": "?"})
    assert "pending" in repr(stream)  # it is not on its way yet
    done = await stream.completion()
    assert (done.reasoning, done.content) == ("hm", "Yes")
    again = llm.chat(ASK, chat_template=template, chat_template_kwargs={"mark": "?"})
    assert "running" in repr(again)
    assert (await again.completion()).content == "Yes"


async def test_what_was_delivered_of_a_cancelled_stream(llm: AsyncLLM) -> None:
    stream = llm.chat(ASK, tools=[WEATHER])
    seen = ""
    async for delta in stream:
        seen += delta.text
        if delta.content:
            stream.cancel()
    done = await stream.completion()
    assert done.text == seen
    assert done.reasoning == "I need the weather."
    assert done.content == "O"
    assert done.tool_calls == []
    assert done.finish_reason is FinishReason.ABORT


async def test_what_was_not_read_is_no_part_of_it(llm: AsyncLLM) -> None:
    stream = llm.chat(ASK, tools=[WEATHER])
    async for delta in stream:
        if delta.reasoning:
            break
    await llm.drain()
    stream.cancel()  # all has arrived, nothing of it was read
    done = await stream.completion()
    assert (done.reasoning, done.content, done.tool_calls) == ("I", "", [])
    assert done.text == "<think>\nI"


async def test_a_refusal_is_raised_where_the_chat_is_made(llm: AsyncLLM) -> None:
    with pytest.raises(InvalidParameterError, match="tool_choice"):
        llm.chat(ASK, tool_choice="required")


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"])
async def test_the_synchronous_faces_take_the_same(tmp_path: Any) -> None:
    options = scripted_options(REPLIES)
    folder = str(write_tiny_checkpoint(tmp_path, **CHECKPOINT))
    with LLM(folder, in_process=True, **options) as llm:
        first, second = llm.chat([ASK, [{"role": "user", "content": "Plain?"}]], tools=[WEATHER])
    assert [call.name for call in first.tool_calls] == ["get_weather"]
    assert second.content == "Yes"
    with LLMEngine(folder, in_process=True, **options) as engine:
        engine.add_chat_request(ASK, tools=[WEATHER], tool_choice="auto")
        outputs = [output for _ in range(500) if engine.has_unfinished_requests() for output in engine.step()]
    assert outputs[-1].completion is not None
    assert outputs[-1].completion.tool_calls[0].arguments == {"city": "Zürich"}
