"""The synchronous faces, against a scripted engine in a process of its own and in this one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncllm import LLM, FinishReason, LLMEngine, SamplingParams
from asyncllm.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidParameterError,
    RequestFailedError,
    UsageError,
    UtilityError,
)
from asyncllm.testing import scripted_options, write_tiny_checkpoint
from tests.support.scripted import ENDLESS, LETTERS

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(params=[False, True], ids=["process", "in_process"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {"model": write_tiny_checkpoint(tmp_path), "in_process": request.param, **scripted_options(tokens=LETTERS)}


@pytest.fixture
def llm(options: dict[str, Any]) -> Iterator[LLM]:
    with LLM(**options) as llm:
        yield llm


@pytest.fixture
def engine(options: dict[str, Any]) -> Iterator[LLMEngine]:
    with LLMEngine(**options) as engine:
        yield engine


def settled(engine: LLM | LLMEngine) -> bool:
    stats = engine.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == engine.info.num_blocks


# ------------------------------------------------------------------------------------------------------------------ LLM
def test_completions_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [30, 1, 12]
    done = llm.generate(["a", "b", [99]], [SamplingParams(max_tokens=count) for count in lengths])
    assert [len(completion.token_ids) for completion in done] == lengths
    assert [completion.prompt_token_ids for completion in done] == [[97], [98], [99]]
    assert settled(llm)


@pytest.mark.parametrize("prompts", ["one prompt", [1, 2, 3], ["one prompt"], [[1, 2, 3]], (1, 2, 3)])
def test_a_single_prompt_gives_a_list_of_one(llm: LLM, prompts: Any) -> None:
    assert [completion.text for completion in llm.generate(prompts, max_tokens=3)] == ["abc"]


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_chat_with_one_conversation_and_with_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(conversation, max_tokens=3)
    assert bytes(token for token in one.prompt_token_ids if token < 256) == b"user\nhello\nassistant\n"
    many = llm.chat([conversation, conversation], max_tokens=4)
    assert [completion.text for completion in many] == ["abcd", "abcd"]


def test_the_progress_bar_shows_and_leaves_no_thread(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], max_tokens=3, progress=True)
    assert "2/2" in capsys.readouterr().err
    llm.generate(["a", "b"], max_tokens=3)
    llm.generate(["a", "b"], max_tokens=3, progress=False)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_refused_request_sends_nothing_of_its_call(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError):
        llm.generate(["fine", ""])
    with pytest.raises(InvalidParameterError, match="params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(InvalidParameterError, match="prompts"):
        llm.generate(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not both"):
        llm.generate(["a"], [SamplingParams()], max_tokens=3)
    assert llm.stats().num_prefill_tokens == 0


def test_the_first_failure_ends_the_call_and_aborts_the_rest(llm: LLM) -> None:
    llm.collective_rpc("set_script", {"tokens": LETTERS, "fail_request": ["bad", 2]})
    with pytest.raises(RequestFailedError):
        llm.generate(["fine", "bad"], **ENDLESS)
    assert settled(llm)


def test_failures_can_be_returned_instead(llm: LLM) -> None:
    llm.collective_rpc("set_script", {"tokens": LETTERS, "fail_request": ["bad", 2]})
    fine, bad = llm.generate(["fine", "bad"], max_tokens=5, return_errors=True)
    assert fine.text == "abcde"
    assert isinstance(bad, RequestFailedError)


def test_r75_threads_share_one_engine(llm: LLM) -> None:
    results: dict[int, list[str]] = {}

    def work(number: int) -> None:
        prompts = [f"thread {number} prompt {i}" for i in range(10)]
        results[number] = [completion.text for completion in llm.generate(prompts, max_tokens=10 + number)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    alphabet = bytes(LETTERS).decode()
    assert results == {number: [alphabet[: 10 + number]] * 10 for number in range(8)}
    assert settled(llm)


def test_r75_requests_of_threads_are_computed_together(llm: LLM) -> None:
    llm.collective_rpc("set_script", {"tokens": LETTERS, "step_ms": 2})
    threads = [threading.Thread(target=llm.generate, args=("prompt",), kwargs={"max_tokens": 50}) for _ in range(4)]
    for thread in threads:
        thread.start()
    while llm.stats().num_running < 4:  # a call from a fifth thread, between the steps of the others
        time.sleep(0.001)
    for thread in threads:
        thread.join(20)
    assert llm.stats().num_steps < 4 * 50


def test_ctrl_c_aborts_what_was_asked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm._session.step
    num_steps = 0

    def interrupted() -> None:
        nonlocal num_steps
        step()
        num_steps += 1
        if num_steps == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(llm._session, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], **ENDLESS)
    assert settled(llm)
    assert llm.generate("a", max_tokens=3)[0].text == "abc"


def test_calls_into_the_engine(llm: LLM) -> None:
    assert llm.collective_rpc("echo", 1, a=2) == [{"args": [1], "kwargs": {"a": 2}}]
    assert llm.reset_prefix_cache()
    llm.start_profile()
    assert llm.stop_profile() == []
    with pytest.raises(UtilityError, match="on purpose"):
        llm.collective_rpc("fail", "on purpose")


def test_while_it_sleeps_calls_of_threads_wait_and_then_get_the_same_tokens(llm: LLM) -> None:
    llm.collective_rpc("set_script", {"tokens": LETTERS, "step_ms": 2})
    done: list[Any] = []

    def generate() -> None:
        done.extend(llm.generate(["a", "b"], max_tokens=400))

    threads = [threading.Thread(target=generate)]
    threads[0].start()
    while llm.stats().num_generated_tokens < 6:
        time.sleep(0.001)
    llm.sleep()
    llm.sleep()
    threads.append(threading.Thread(target=generate))
    threads[1].start()
    while llm.stats().num_waiting < 4:
        time.sleep(0.001)
    num_steps = llm.stats().num_steps
    assert llm.stats().is_sleeping
    llm.sleep(2)
    assert llm.stats().num_steps == num_steps
    assert not done
    llm.wake_up()
    llm.wake_up()
    for thread in threads:
        thread.join(20)
    assert [completion.token_ids for completion in done] == [[97 + i % len(LETTERS) for i in range(400)]] * 4
    assert settled(llm)
    assert not llm.stats().is_sleeping


def test_without_another_thread_nothing_could_wake_it_up(llm: LLM) -> None:
    llm.sleep()
    with pytest.raises(UsageError, match=r"call wake_up\(\) first"):
        llm.generate("a", max_tokens=3)
    assert settled(llm)
    with pytest.raises(UsageError, match=r"level is 3; sleep\(\) takes level 1 or 2"):
        llm.sleep(3)
    llm.wake_up()
    assert llm.generate("a", max_tokens=3)[0].text == "abc"


def test_the_thread_of_an_engine_in_this_process_is_not_another_that_could_wake_it_up(tiny_llama: Path) -> None:
    with LLM(tiny_llama, in_process=True, async_scheduling=True, num_threads=1, num_blocks=32) as llm:
        llm.sleep()
        with pytest.raises(UsageError, match=r"call wake_up\(\) first"):
            llm.generate("a", max_tokens=3)


def test_it_can_be_closed_while_it_sleeps_and_a_thread_waits(llm: LLM) -> None:
    done: list[Any] = []
    llm.sleep()
    thread = threading.Thread(target=lambda: done.extend(llm.generate("a", max_tokens=3)))
    thread.start()
    while not llm.stats().num_waiting:
        time.sleep(0.001)
    llm.close()
    thread.join(10)
    assert done[0].finish_reason is FinishReason.ABORT


def test_the_death_of_the_engine_is_raised(llm: LLM) -> None:
    llm.collective_rpc("set_script", {"tokens": LETTERS, "fail_at_step": 3})
    with pytest.raises(EngineDeadError) as caught:
        llm.generate(["a", "b"], **ENDLESS)
    assert "step 3" in str(caught.value.__cause__)
    for refused in (lambda: llm.generate("a"), llm.stats):
        with pytest.raises(EngineDeadError):
            refused()


def test_a_closed_one_refuses(llm: LLM) -> None:
    llm.close()
    llm.close()
    for refused in (lambda: llm.generate("a"), llm.stats):
        with pytest.raises(UsageError, match="closed"):
            refused()


def test_closing_ends_calls_of_other_threads_with_what_they_have(llm: LLM) -> None:
    llm.collective_rpc("set_script", {"tokens": LETTERS, "step_ms": 2})
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.extend(llm.generate("a", **ENDLESS)))
    thread.start()
    while llm.stats().num_generated_tokens < 3:
        time.sleep(0.001)
    llm.close()
    thread.join(10)
    assert done[0].finish_reason is FinishReason.ABORT
    assert done[0].token_ids


# ------------------------------------------------------------------------------------------------------------ LLMEngine
def test_each_step_returns_what_it_changed(engine: LLMEngine) -> None:
    assert engine.step() == []
    first = engine.add_request("prompt", max_tokens=3, request_id="first")
    second = engine.add_request([1, 2], SamplingParams(max_tokens=2, n=2))
    assert first == "first"
    texts: dict[str, list[str]] = {first: [""], second: ["", ""]}
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            for delta in output.deltas:
                texts[output.request_id][delta.index] += delta.text
            if output.finished:
                assert output.request_id not in finished
                finished[output.request_id] = output.completion
    assert texts == {first: ["abc"], second: ["ab", "ab"]}
    # Not by the order of their ends: an engine process may be through with the first before the second arrives.
    assert {request_id: str(completion) for request_id, completion in finished.items()} == {first: "abc", second: "ab"}
    assert settled(engine)


def test_chat_requests(engine: LLMEngine) -> None:
    engine.add_chat_request([{"role": "user", "content": "hello"}], max_tokens=3, request_id="x")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].completion is not None
    assert outputs[-1].completion.text == "abc"


def test_an_aborted_request_is_returned_with_what_it_has(engine: LLMEngine) -> None:
    engine.add_request("prompt", request_id="x", **ENDLESS)
    for _ in range(3):
        engine.step()
    engine.abort_request(["x", "unknown"])
    (output,) = engine.step()
    assert output.completion is not None
    assert output.completion.finish_reason is FinishReason.ABORT
    assert output.completion.text.startswith("abc")
    assert not engine.has_unfinished_requests()
    assert settled(engine)
    assert engine.add_request("prompt", request_id="x", max_tokens=1) == "x"
    engine.abort_request("x")


def test_r57_a_live_request_id_is_refused(engine: LLMEngine) -> None:
    engine.add_request("prompt", request_id="x", max_tokens=5)
    with pytest.raises(DuplicateRequestError):
        engine.add_request("prompt", request_id="x")
    while engine.has_unfinished_requests():
        engine.step()


def test_a_failing_request_is_returned_with_its_error(engine: LLMEngine) -> None:
    engine.collective_rpc("set_script", {"tokens": LETTERS, "fail_request": ["bad", 0]})
    engine.add_request("bad", max_tokens=5)
    (output,) = engine.step()
    assert isinstance(output.error, RequestFailedError)
    assert output.finished
    assert [delta.finish_reason for delta in output.deltas] == [FinishReason.ERROR]


def test_death_is_told_to_each_request_then_raised(engine: LLMEngine) -> None:
    engine.collective_rpc("set_script", {"tokens": LETTERS, "fail_at_step": 2})
    engine.add_request("prompt", request_id="x", **ENDLESS)
    outputs = []
    with pytest.raises(EngineDeadError):
        while True:
            outputs += engine.step()
    assert [type(output.error) for output in outputs if output.finished] == [EngineDeadError]
    assert "".join(delta.text for output in outputs for delta in output.deltas) == "a"


def test_no_step_comes_while_it_sleeps_and_what_came_before_is_returned_first(engine: LLMEngine) -> None:
    engine.add_request("prompt", request_id="x", **ENDLESS)
    texts = [delta.text for output in engine.step() for delta in output.deltas]
    engine.sleep()
    with pytest.raises(UsageError, match=r"no step comes before wake_up\(\)"):
        while True:
            texts += [delta.text for output in engine.step() for delta in output.deltas]
    num_texts = len(texts)
    engine.abort_request(engine.add_request("prompt"))
    assert engine.step()
    assert engine.stats().is_sleeping
    engine.wake_up()
    while len(texts) < num_texts + 10:
        texts += [delta.text for output in engine.step() for delta in output.deltas]
    engine.abort_request("x")
    alphabet = bytes(LETTERS).decode()
    assert "".join(texts) == (alphabet * len(texts))[: len(texts)]
    while engine.has_unfinished_requests():
        engine.step()
    engine.sleep(2)
    assert engine.step() == []


def test_what_is_refused_while_it_sleeps_is_answered_at_once(engine: LLMEngine) -> None:
    engine.sleep()
    engine.abort_request("unknown")
    engine.add_request("prompt", max_tokens=3, request_id="x")
    engine._session.client.finish_requests([1])
    outputs: list[Any] = []
    while not outputs:  # an engine process answers when it comes to it
        with contextlib.suppress(UsageError):
            outputs = engine.step()
    (output,) = outputs
    assert output.completion is not None
    assert output.completion.finish_reason is FinishReason.ABORT


def test_calls_of_the_engine(engine: LLMEngine) -> None:
    assert engine.reset_prefix_cache()
    assert engine.collective_rpc("echo", 1) == [[1]]
    engine.close()
    engine.close()
    with pytest.raises(UsageError):
        engine.step()
