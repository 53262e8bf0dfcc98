"""Every stream that has ended tells what it cost, however it ended; against a scripted engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from asyncllm import AsyncLLM, LLMEngine, Usage
from asyncllm.errors import EngineDeadError, RequestFailedError
from asyncllm.testing import SCRIPTED_EXECUTOR, write_tiny_checkpoint
from tests.support.scripted import ENDLESS, LETTERS, letters_llm, set_script

pytestmark = pytest.mark.anyio


def check_times(usage: Usage | None) -> Usage:
    """Assert that all times of a request that got a token are known and fit into each other."""
    assert usage is not None
    assert usage.queue_time_s is not None
    assert usage.prefill_time_s is not None
    assert usage.time_to_first_token_s is not None
    assert usage.total_time_s is not None
    assert 0 <= usage.queue_time_s < usage.queue_time_s + usage.prefill_time_s
    assert usage.queue_time_s + usage.prefill_time_s <= usage.time_to_first_token_s <= usage.total_time_s
    return usage


async def test_a_stream_that_ends_by_itself(llm: AsyncLLM) -> None:
    await set_script(llm, step_ms=5)
    stream = llm.stream([65] * 20, max_tokens=4)
    assert stream.usage is None
    await anext(stream)
    assert stream.usage is None
    completion = await stream.completion()
    usage = check_times(stream.usage)
    assert usage is completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.accepted_draft_tokens) == (20, 4, 0)
    assert usage.prefill_time_s is not None
    assert usage.prefill_time_s >= 0.005


async def test_a_cancelled_stream_tells_at_once(llm: AsyncLLM) -> None:
    await set_script(llm, step_ms=1)
    await llm.generate([65] * 40, max_tokens=1)
    stream = llm.stream([65] * 40, **ENDLESS)
    for _ in range(3):
        await anext(stream)
    stream.cancel()
    usage = check_times(stream.usage)
    assert (usage.prompt_tokens, usage.cached_tokens) == (40, 32)
    assert usage.completion_tokens >= 3
    assert (await stream.completion()).usage is usage
    assert stream.usage is usage


async def test_a_stream_left_by_break_and_one_whose_scope_is_cancelled(llm: AsyncLLM) -> None:
    await set_script(llm, step_ms=1)
    async with llm.stream("prompt", **ENDLESS) as left:
        async for _ in left:
            break
    assert check_times(left.usage).completion_tokens >= 1
    stream = llm.stream("prompt", **ENDLESS)
    with anyio.CancelScope() as scope:
        async for _ in stream:
            scope.cancel()
    assert check_times(stream.usage).completion_tokens >= 1


async def test_a_stream_cancelled_in_the_queue_has_no_times_of_the_engine() -> None:
    async with letters_llm({"step_ms": 1}, max_num_seqs=1) as llm:
        running = llm.stream("prompt", **ENDLESS)
        await anext(running)
        queued = llm.stream("prompt", **ENDLESS)
        await llm.stats()  # the engine has it
        queued.cancel()
        usage = queued.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (6, 0)
        assert (usage.queue_time_s, usage.prefill_time_s, usage.time_to_first_token_s) == (None, None, None)
        assert usage.total_time_s is not None
        assert usage.total_time_s > 0
        waited = llm.stream("prompt", max_tokens=2)
        await anyio.sleep(0.02)  # the time that is to be seen
        running.cancel()
        await waited.completion()
        assert (check_times(waited.usage).queue_time_s or 0) >= 0.015


async def test_a_stream_that_was_never_sent(llm: AsyncLLM) -> None:
    for end in ("cancel", "finish"):
        stream = llm.stream("x" * 5000, **ENDLESS)  # long: it is sent by its first reader
        getattr(stream, end)()
        assert stream.usage == Usage(prompt_tokens=0, completion_tokens=0)


async def test_preemptions_are_known_when_the_stream_is_cancelled() -> None:
    async with letters_llm({"step_ms": 1}, policy="priority", max_num_seqs=1) as llm:
        background = llm.stream("background", priority=5, **ENDLESS)
        await anext(background)
        urgent = llm.stream("urgent", priority=0, **ENDLESS)
        await anext(urgent)
        background.cancel()
        assert check_times(background.usage).num_preemptions == 1
        urgent.cancel()
        assert check_times(urgent.usage).num_preemptions == 0


async def test_times_of_several_samples_are_those_of_the_first(llm: AsyncLLM) -> None:
    usage = check_times((await llm.generate("prompt", n=3, max_tokens=4)).usage)
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, 12)


async def test_a_stream_that_the_engine_failed(llm: AsyncLLM) -> None:
    await set_script(llm, fail_request=["bad", 3])
    stream = llm.stream("bad", max_tokens=10)
    with pytest.raises(RequestFailedError):
        await stream.completion()
    usage = check_times(stream.usage)
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 3)


async def test_streams_of_an_engine_that_died() -> None:
    async with letters_llm({"step_ms": 1}) as llm:
        stream = llm.stream("prompt", **ENDLESS)
        await anext(stream)
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await stream.completion()
        assert check_times(stream.usage).completion_tokens >= 1


def test_the_synchronous_engine_tells_it_of_failed_requests_too(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    script = {"tokens": LETTERS, "fail_request": ["bad", 2]}
    with LLMEngine(folder, executor=SCRIPTED_EXECUTOR, executor_options=script, in_process=True) as engine:
        asked = [engine.add_request(text, max_tokens=5) for text in ("good", "bad")]
        ended = {}
        while engine.has_unfinished_requests():
            ended.update({output.request_id: output for output in engine.step() if output.finished})
        good, bad = (ended[request_id] for request_id in asked)
        assert good.completion is not None
        assert good.usage is good.completion.usage
        assert isinstance(bad.error, RequestFailedError)
        assert [check_times(output.usage).completion_tokens for output in (good, bad)] == [5, 2]
