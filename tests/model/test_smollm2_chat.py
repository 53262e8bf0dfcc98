"""SmolLM2-135M-Instruct calls a tool when it is shown how: real tokens, in which markers fall as they please."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncLLM, Channel, FinishReason
from tests.support.scripted import assert_settled
from tests.unit.frontend.test_public_templates import WEATHER, call, result, source, user

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"]),
]


def shown(city: str, weather: str) -> list[dict[str, Any]]:
    return [
        user(f"What is the weather in {city}?"),
        {"role": "assistant", "content": "", "tool_calls": [call({"city": city})]},
        result(json.dumps({"weather": weather})),
        {"role": "assistant", "content": f"In {city}: {weather}."},
    ]


async def test_a_call_its_result_and_the_answer(smollm2_gguf: Path) -> None:
    messages = [*shown("Rome", "sun"), *shown("Oslo", "snow"), user("What is the weather in Paris?")]
    options: dict[str, Any] = {"tools": [WEATHER], "temperature": 0.0, "max_tokens": 64}
    async with AsyncLLM(str(smollm2_gguf), chat_template=source("hermes")) as llm:
        async with llm.chat(messages, **options) as stream:
            deltas = [delta async for delta in stream]
            done = await stream.completion()
        (tool_call,) = done.tool_calls
        assert (tool_call.name, tool_call.arguments) == ("get_weather", {"city": "Paris"})
        assert done.finish_reason is FinishReason.TOOL_CALLS
        assert done.content == ""
        assert "".join(delta.text for delta in deltas) == done.text
        assert [token_id for delta in deltas for token_id in delta.token_ids] == done.token_ids
        told = [delta.tool_call for delta in deltas if delta.tool_call is not None]
        assert told[0].name == "get_weather"
        assert "".join(one.arguments for one in told) == tool_call.text
        assert len([one for one in told if one.arguments]) > 1, "the arguments came in pieces"
        assert {delta.channel for delta in deltas if delta.text} == {Channel.MARKUP, Channel.TOOL_CALL}

        plain = await llm.chat(messages, **options, tool_parser="none").completion()
        assert (plain.token_ids, plain.text, plain.content) == (done.token_ids, done.text, done.text)

        messages += [done.to_message(), result('{"weather": "rain"}', tool_call.id)]
        answer = await llm.chat(messages, **options).completion()
        assert "rain" in answer.content
        assert answer.finish_reason is FinishReason.STOP
        await assert_settled(llm)
