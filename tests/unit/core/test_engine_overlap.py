"""The engine with two steps out: order of launches and results, what is told in between, pause, drain, shutdown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm.config import EngineConfig
from asyncllm.core.engine_core import EngineCore
from asyncllm.executor.base import PendingStep
from asyncllm.platforms import cpu
from asyncllm.testing import ScriptedExecutor
from asyncllm.wire.messages import AbortRequests, EngineCoreOutputs, FinishRequests, ParkRequests
from asyncllm.wire.step import ModelRunnerOutput, SchedulerOutput
from tests.support.engines import add_outputs, request, scripted_config


class Late:
    """A step that notes when its result is asked for."""

    def __init__(self, pending: PendingStep, note: Callable[[str], None], step_id: int) -> None:
        self._pending = pending
        self._note = note
        self._step_id = step_id

    def result(self) -> ModelRunnerOutput:
        self._note(f"result {self._step_id}")
        return self._pending.result()


class Noting(ScriptedExecutor):
    """A scripted executor that notes what is asked of it, in order."""

    def start(self) -> Any:
        self.notes: list[str] = []
        self.error: Exception | None = None
        return super().start()

    def execute_model(self, scheduler_output: SchedulerOutput) -> PendingStep:
        self.notes.append(f"launch {scheduler_output.step_id}")
        if self.error is not None:
            raise self.error
        return Late(super().execute_model(scheduler_output), self.notes.append, scheduler_output.step_id)

    def shutdown(self) -> None:
        self.notes.append("shutdown")
        super().shutdown()


def make_core(tmp_path: Path, *, overlap: bool = True, **options: Any) -> EngineCore:
    options |= {"executor": f"{__name__}.Noting", "async_scheduling": overlap}
    return EngineCore(scripted_config(tmp_path, **options), lambda phase, fraction: None)


def notes(core: EngineCore) -> list[str]:
    assert isinstance(core.executor, Noting)
    return core.executor.notes


def step(core: EngineCore) -> EngineCoreOutputs:
    outputs = core.step()
    assert outputs is not None
    return outputs


def run(core: EngineCore) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while core.has_work():
        add_outputs(tokens, step(core))
    assert core.step() is None
    assert core.stats().num_free_blocks == core.info.num_blocks
    return tokens


def test_the_next_step_is_launched_before_the_result_of_the_one_before_is_asked_for(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=4))
    assert run(core) == {1: [1, 2, 3, 1]}
    launched = ["launch 0", "launch 1", "result 0", "launch 2", "result 1", "launch 3", "result 2", "result 3"]
    assert notes(core) == launched


def test_without_overlap_each_step_ends_before_the_next(tmp_path: Path) -> None:
    core = make_core(tmp_path, overlap=False)
    core.apply(request(1, max_tokens=2))
    assert run(core) == {1: [1, 2]}
    assert notes(core) == ["launch 0", "result 0", "launch 1", "result 1"]


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("num_blocks", [None, 6], ids=["roomy", "preempting"])
def test_tokens_do_not_depend_on_how_late_results_come(tmp_path: Path, depth: int, num_blocks: int | None) -> None:
    core = make_core(tmp_path, num_blocks=num_blocks, block_size=4, max_num_batched_tokens=5)
    core.max_steps_out = depth
    for number in range(4):
        core.apply(request(number, max_tokens=9 + 2 * number))
    assert run(core) == {number: ([1, 2, 3] * 5)[: 9 + 2 * number] for number in range(4)}
    assert (core.stats().num_preemptions > 0) == (num_blocks is not None)


@pytest.mark.parametrize("message", [AbortRequests([1]), FinishRequests([1])], ids=["abort", "finish"])
def test_what_ends_while_two_steps_are_out_gets_no_token_of_either(tmp_path: Path, message: Any) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=9))
    core.apply(request(2, max_tokens=3))
    outputs = core.step(lambda: core.apply(message))
    assert outputs is not None
    assert outputs.request_ids == [2]
    assert run(core) == {2: [2, 3]}
    assert core.stats().num_dropped_tokens == 2


def test_there_is_work_until_the_last_step_has_ended(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=9))
    step(core)
    core.apply(AbortRequests([1]))
    assert core.has_work()
    assert step(core).request_ids == []
    assert not core.has_work()
    assert core.step() is None


def test_pause_is_answered_when_no_step_is_out(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    assert core.call("pause", []).done()
    core.resume()
    core.apply(request(1, max_tokens=9))
    step(core)
    pause = core.call("pause", [])
    assert not pause.done()
    assert step(core).token_ids == [2]
    assert pause.done()
    assert core.step() is None
    core.resume()
    assert run(core) == {1: [3, 1, 2, 3, 1, 2, 3]}


def test_drain_is_answered_when_no_step_is_out(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=9))
    step(core)
    drain = core.call("drain", [])
    core.apply(AbortRequests([1]))
    assert not drain.done()
    assert not core.call("drain", []).done()
    step(core)
    assert drain.done()


def test_a_parked_request_gets_what_is_out_and_then_nothing(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=5))
    step(core)
    core.apply(ParkRequests([1], True))
    assert step(core).token_ids == [2]
    assert core.step() is None
    core.apply(ParkRequests([1], False))
    assert run(core) == {1: [3, 1, 2]}


def test_reset_while_steps_are_out(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=6))
    tokens: dict[int, list[int]] = {}
    add_outputs(tokens, step(core))
    assert not core.reset_prefix_cache()
    assert core.reset_prefix_cache(reset_running=True)
    while core.has_work():
        add_outputs(tokens, step(core))
    assert tokens == {1: [1, 2, 3, 1, 2, 3]}
    assert core.stats().num_preemptions == 1


def test_shutdown_waits_for_the_steps_that_are_out_and_cancels_who_waits(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=9))
    step(core)
    pause = core.call("pause", [])
    core.shutdown()
    core.shutdown()
    assert pause.cancelled()
    assert notes(core)[-3:] == ["result 1", "shutdown", "shutdown"]


def test_a_launch_that_fails_is_the_end_and_the_tokens_of_the_step_before_it_come_first(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=9))
    step(core)
    assert isinstance(core.executor, Noting)
    core.executor.error = RuntimeError("out of order")
    assert step(core).token_ids == [2]
    with pytest.raises(RuntimeError, match="out of order"):
        core.step()
    core.shutdown()
    assert notes(core)[-3:] == ["launch 2", "result 1", "shutdown"]


def test_sleep_ends_the_steps_that_are_out_and_their_tokens_come_first(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=6))
    tokens: dict[int, list[int]] = {}
    add_outputs(tokens, step(core))
    core.sleep()
    add_outputs(tokens, step(core))
    assert tokens == {1: [1, 2]}
    assert core.step() is None
    core.wake_up()
    while core.has_work():
        add_outputs(tokens, step(core))
    assert tokens == {1: [1, 2, 3, 1, 2, 3]}


def test_a_step_that_fails_while_a_utility_waits_for_it_is_still_the_engines_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=9))
    step(core)

    def fail(self: Late) -> ModelRunnerOutput:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Late, "result", fail)
    for work in (core.sleep, core.step):
        with pytest.raises(RuntimeError, match="the device is gone"):
            work()


@pytest.mark.parametrize(("option", "is_asynchronous", "expected"), [
    (True, False, True), (False, True, False), ("auto", False, False), ("auto", True, True),
])  # fmt: skip
def test_auto_is_what_the_platform_is(
    option: bool | str, is_asynchronous: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncllm.executor.uniproc import UniProcExecutor

    monkeypatch.setattr(cpu.CpuPlatform, "is_asynchronous", is_asynchronous)
    config = EngineConfig.from_options("m", async_scheduling=option, device="cpu")
    assert UniProcExecutor(config, lambda *_: None).overlaps_steps() == expected


def test_info_says_whether_steps_overlap(tmp_path: Path) -> None:
    found = [make_core(tmp_path, overlap=overlap).info.async_scheduling for overlap in (False, True)]
    assert found == [False, True]
