"""Structured output over the whole engine: scripted draws under real grammars, on every event loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from asyncllm import LLM, AsyncLLMError, InvalidParameterError
from asyncllm.testing import scripted_llm, scripted_options, write_tiny_checkpoint
from tests.support.scripted import assert_settled

pytestmark = pytest.mark.usefixtures("no_leaks")

REPLIES = {"Who?": '{"name": "Ann", "age": 3} and more', "Stray": "zzzzzzzzzz"}


class Person(msgspec.Struct):
    name: str
    age: int


@pytest.mark.anyio
async def test_text_and_object_come_together() -> None:
    async with scripted_llm(REPLIES) as llm:
        done = await llm.generate("Who?", schema=Person)
        assert (done.text, done.parsed) == ('{"name": "Ann", "age": 3}', Person("Ann", 3))
        assert (done.finish_reason, done.stop_reason, done.parse_error) == ("stop", None, None)
        async with llm.chat([{"role": "user", "content": "Who?"}], schema=Person) as stream:
            pieces = [str(token) async for token in stream]
            assert (await stream.completion()).parsed == Person("Ann", 3)
        assert "".join(pieces) == '{"name": "Ann", "age": 3}'
        await assert_settled(llm)


@pytest.mark.anyio
async def test_what_does_not_fit_is_never_drawn() -> None:
    async with scripted_llm(REPLIES) as llm:
        found: dict[str, Any] = {
            "regex": (await llm.generate("Stray", regex="[xz]{2}|b")).text,
            "choice": (await llm.generate("Stray", choice=["zoo", "yes"])).text,
            "grammar": (await llm.generate("Stray", grammar='root ::= "z" "a" | "b"')).text,
        }
        assert found == {"regex": "zz", "choice": "zoo", "grammar": "za"}


@pytest.mark.anyio
async def test_an_output_that_is_cut_off_has_no_object() -> None:
    async with scripted_llm(REPLIES) as llm:
        done = await llm.generate("Who?", schema=Person, max_tokens=5)
        assert (done.text, done.parsed, done.finish_reason) == ('{"nam', None, "length")
        assert done.parse_error is not None
        assert "cut off" in done.parse_error


@pytest.mark.anyio
async def test_a_bad_grammar_is_an_error_of_that_request_alone() -> None:
    async with scripted_llm(REPLIES) as llm:
        texts: list[str] = []
        errors: list[AsyncLLMError] = []

        async def ask(**options: Any) -> None:
            try:
                texts.append((await llm.generate("Who?", **options)).text)
            except AsyncLLMError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for options in ({"regex": "("}, {"schema": Person}, {"max_tokens": 3}, {"schema": {"not": {}}}):
                tasks.start_soon(lambda options: ask(**options), options)
        assert sorted(texts) == ['{"n', '{"name": "Ann", "age": 3}']
        assert sorted(str(getattr(error, "parameter", "")) for error in errors) == ["regex", "schema"]
        assert all(isinstance(error, InvalidParameterError) for error in errors)
        await assert_settled(llm)


@pytest.mark.anyio
async def test_a_request_may_be_cancelled_at_any_time() -> None:
    """While its grammar is compiled, and while it runs."""
    async with scripted_llm(REPLIES, script={"tokens": [ord("z")]}) as llm:
        for num_read in range(3):
            async with llm.stream("Endless", regex=f"z{{{num_read + 100},}}", max_tokens=5000) as stream:
                for _ in range(num_read):
                    await stream.__anext__()
            await assert_settled(llm)
        aborted = llm.stream("Endless", regex="z+y", request_id="a")
        await llm.abort("a")
        assert (await aborted.completion()).finish_reason == "abort"
        await assert_settled(llm)


@pytest.mark.anyio
async def test_a_tool_call_that_is_demanded_comes_whatever_the_model_would_say() -> None:
    parameters = {"type": "object", "properties": {"city": {"const": "Oslo"}}, "required": ["city"]}
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {**parameters, "additionalProperties": False}},
    }
    async with scripted_llm(REPLIES) as llm:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            stream = llm.chat([{"role": "user", "content": "Stray"}], tools=[tool], tool_choice=choice, max_tokens=200)
            done = await stream.completion()
            assert done.tool_calls
            assert {(call.name, call.arguments["city"]) for call in done.tool_calls} == {("weather", "Oslo")}


@pytest.mark.anyio
async def test_samples_have_objects_of_their_own() -> None:
    replies = ['{"name": "Ann", "age": 3}', '{"name": "Bob", "age": 4}']
    async with scripted_llm({"Who?": replies}) as llm:
        done = await llm.generate("Who?", schema=Person, n=2)
        assert [sample.parsed for sample in done.samples] == [Person("Ann", 3), Person("Bob", 4)]


@pytest.mark.anyio
async def test_drain_waits_for_requests_whose_grammar_is_compiled() -> None:
    async with scripted_llm(REPLIES) as llm:
        await llm.start()
        stream = llm.stream("Who?", schema=Person)
        assert await llm.drain()
        assert (await stream.completion()).parsed == Person("Ann", 3)


@pytest.mark.parametrize("in_process", [True, False])
def test_without_an_event_loop(in_process: bool, tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path)
    with LLM(model, in_process=in_process, **scripted_options(REPLIES)) as llm:
        first, second = llm.generate(["Who?", "Who?"], schema=Person)
        assert first.parsed == second.parsed == Person("Ann", 3)
        [error] = llm.generate("Who?", regex="(", return_errors=True)
        assert isinstance(error, InvalidParameterError)
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_the_callers_process_never_loads_the_library(tmp_path: Path) -> None:
    """What compiles and follows grammars is in the engine's process, so nothing of it is on an event loop."""
    import subprocess
    import sys

    model = write_tiny_checkpoint(tmp_path)
    code = (
        "import sys, asyncllm\n"
        "async def main():\n"
        f"    async with asyncllm.AsyncLLM({str(model)!r}, executor='asyncllm.testing.ScriptedExecutor') as llm:\n"
        "        print((await llm.generate('{}', json_object=True)).text, 'llguidance' in sys.modules)\n"
        "asyncllm.run(main)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["{}", "False"]
