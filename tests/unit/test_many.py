"""``map`` and ``as_completed`` on a scripted engine: what is taken when, and how it ends."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asyncllm import AsyncLLM
from asyncllm.errors import EngineDeadError, InvalidParameterError, PromptTooLongError, RequestFailedError, UsageError
from tests.support.scripted import ENDLESS, assert_settled, letters_llm, set_script

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def module_llm(anyio_backend: Any) -> AsyncIterator[AsyncLLM]:
    async with letters_llm(max_num_seqs=8) as llm:
        yield llm


@pytest.fixture
async def llm(module_llm: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    await set_script(module_llm)
    yield module_llm
    await assert_settled(module_llm)


class Counted:
    """Prompts that count how many were taken."""

    def __init__(self, prompts: list[str]) -> None:
        self._prompts = prompts
        self.num_taken = 0

    def __iter__(self) -> Iterator[str]:
        for prompt in self._prompts:
            self.num_taken += 1
            yield prompt


async def test_prompts_are_taken_as_there_is_room(llm: AsyncLLM) -> None:
    prompts = Counted([f"prompt {i}" for i in range(100)])
    num_yielded = 0
    async with llm.as_completed(prompts, max_tokens=3, max_in_flight=4) as completions:
        async for _ in completions:
            num_yielded += 1
            assert prompts.num_taken <= num_yielded + 4 * 4
            assert llm.num_unfinished <= 4
            await anyio.lowlevel.checkpoint()
    assert num_yielded == prompts.num_taken == 100


async def test_a_reader_that_rests_holds_the_prompts_up(llm: AsyncLLM) -> None:
    prompts = Counted([f"prompt {i}" for i in range(100)])
    async with llm.map(prompts, max_tokens=1, max_in_flight=2) as completions:
        await anext(completions)
        for _ in range(100):
            await llm.stats()  # the turns of the loop in which the feeder would go on
        assert prompts.num_taken == 9  # the one that was yielded, and four times two that wait


async def test_order_of_map_whatever_ends_first(llm: AsyncLLM) -> None:
    await set_script(llm, replies={"long": "x" * 60})
    prompts = ["a long one", *(f"short {i}" for i in range(10))]
    ids = [done.prompt_token_ids async for done in llm.map(prompts, max_tokens=40, max_in_flight=3)]
    assert [bytes(one).decode() for one in ids] == prompts


async def test_as_completed_yields_what_ends_first(llm: AsyncLLM) -> None:
    await set_script(llm, replies={"long": "x" * 60, "short": "y"}, step_ms=1)
    found = [number async for number, _ in llm.as_completed(["a long one", "a short one"], max_tokens=70)]
    assert found == [1, 0]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_prompts_may_come_from_anything(llm: AsyncLLM, kind: str) -> None:
    async def later() -> AsyncIterator[str]:
        for i in range(5):
            await anyio.sleep(0.001)
            yield f"prompt {i}"

    prompts = later() if kind == "async" else (f"prompt {i}" for i in range(5))
    texts = [done.text async for done in llm.map(prompts, max_tokens=3)]
    assert texts == ["abc"] * 5


async def test_what_is_done_is_yielded_while_prompts_are_slow_to_come(llm: AsyncLLM) -> None:
    go_on = anyio.Event()

    async def slow() -> AsyncIterator[str]:
        yield "first"
        await go_on.wait()
        yield "second"

    async for number, _ in llm.as_completed(slow(), max_tokens=3):
        assert number == 0 or go_on.is_set()
        go_on.set()


async def test_token_ids_and_none_at_all(llm: AsyncLLM) -> None:
    assert [done.text async for done in llm.map([[1, 2], [3]], max_tokens=2)] == ["ab", "ab"]
    assert [done async for done in llm.map([])] == []


async def test_a_refused_prompt_ends_the_rest_after_what_was_done(llm: AsyncLLM) -> None:
    def prompts() -> Iterator[Any]:
        yield "first"
        yield 7
        raise AssertionError("taken after the error")

    texts: list[str] = []
    with pytest.raises(InvalidParameterError):
        async for done in llm.map(prompts(), max_tokens=3, max_in_flight=1):
            texts += [done.text]
    assert texts == ["abc"]


async def test_a_failed_request_aborts_the_others(llm: AsyncLLM) -> None:
    await set_script(llm, fail_request=["bad", 2])
    with pytest.raises(RequestFailedError):
        async for _ in llm.as_completed(["good", "bad", "good"], **ENDLESS):
            raise AssertionError("nothing ends before the failure")
    await assert_settled(llm)


async def test_an_error_of_the_iterable_is_raised(llm: AsyncLLM) -> None:
    def prompts() -> Iterator[str]:
        yield "first"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async for _ in llm.map(prompts(), **ENDLESS):
            pass


async def test_leaving_the_loop_aborts_the_rest(llm: AsyncLLM) -> None:
    await set_script(llm, replies={"short": "y"})
    async for number, _ in llm.as_completed(["long", "short", "long"], **{**ENDLESS, "ignore_eos": False}):
        assert number == 1
        break
    gc.collect()
    await assert_settled(llm)


async def test_a_generator_of_prompts_is_closed_where_it_was_left(llm: AsyncLLM) -> None:
    closed = anyio.Event()

    async def endless() -> AsyncIterator[str]:
        try:
            while True:
                yield "prompt"
        finally:
            closed.set()

    async with llm.map(endless(), max_tokens=1, max_in_flight=2) as completions:
        await anext(completions)
    with anyio.fail_after(5):
        await closed.wait()
    with pytest.raises(StopAsyncIteration):
        await anext(completions)


async def test_a_bar_is_shown(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    async for _ in llm.map(["a", "b"], max_tokens=3, progress=True):
        pass
    assert "2/2" in shown.getvalue()
    assert "tokens/s" in shown.getvalue()


async def test_one_task_reads_it(llm: AsyncLLM) -> None:
    await set_script(llm, step_ms=20)  # or nobody would ever be blocked while tokens come
    async with llm.map(["a"], **ENDLESS) as completions, anyio.create_task_group() as group:

        async def read() -> None:
            with pytest.raises(StopAsyncIteration):
                await anext(completions)

        group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(UsageError, match="another task"):
            await anext(completions)


async def test_arguments_are_checked_at_once(llm: AsyncLLM) -> None:
    with pytest.raises(InvalidParameterError, match="max_in_flight is 0"):
        llm.map(["a"], max_in_flight=0)
    with pytest.raises(InvalidParameterError, match="prompts is a str"):
        llm.map("a")
    with pytest.raises(PromptTooLongError):
        async for _ in llm.map(["x" * 20_000]):
            pass


async def test_the_engines_death_is_raised(anyio_backend: Any) -> None:
    async with letters_llm({"exit_at_step": 3}) as llm:
        with pytest.raises(EngineDeadError):
            async for _ in llm.map(["a", "b"], **ENDLESS):
                pass


async def test_it_starts_the_engine(anyio_backend: Any, module_llm: AsyncLLM) -> None:
    llm = AsyncLLM(module_llm.config)
    assert [done.text async for done in llm.map(["a"], max_tokens=2)] == ["ab"]
    await llm.aclose()
    with pytest.raises(UsageError, match="closed"):
        async for _ in llm.map(["a"]):
            pass
