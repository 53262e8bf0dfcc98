"""One engine without its process: steps, what is aborted in the middle of one, utilities, failures while starting."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from asyncllm.config import EngineConfig
from asyncllm.core.engine_core import UTILITIES, EngineCore
from asyncllm.errors import UsageError, UtilityError
from asyncllm.testing import ScriptedExecutor
from asyncllm.wire.messages import AbortRequests, EngineFinishReason, FinishRequests, ParkRequests
from tests.support.engines import add_outputs, request, scripted_config


def make_core(tmp_path: Path, **options: Any) -> EngineCore:
    return EngineCore(scripted_config(tmp_path, **options), lambda phase, fraction: None)


def run(core: EngineCore) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while core.has_work():
        outputs = core.step()
        assert outputs is not None
        add_outputs(tokens, outputs)
    return tokens


def test_b22_add_is_waiting_step_is_running_finish_empties_both(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1))
    assert (core.stats().num_waiting, core.stats().num_running) == (1, 0)
    core.step()
    assert (core.stats().num_waiting, core.stats().num_running) == (0, 1)
    assert len(run(core)[1]) == 3
    assert (core.stats().num_waiting, core.stats().num_running) == (0, 0)
    assert core.step() is None


def test_b65_what_a_step_returns_says_how_the_scheduler_stands_after_it(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=1))
    core.apply(request(2, max_tokens=2))
    outputs = core.step()
    assert outputs is not None
    assert outputs.stats is not None
    assert (outputs.stats.num_running, outputs.stats.num_generated_tokens) == (1, 2)


def test_what_is_aborted_after_the_forward_gets_no_token_of_it(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1))
    core.apply(request(2))
    outputs = core.step(lambda: core.apply(AbortRequests([1])))
    assert outputs is not None
    assert outputs.request_ids == [2]
    assert core.stats().num_running == 1


def test_what_is_added_after_the_forward_is_in_the_next_step(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=2))
    core.step(lambda: core.apply(request(2)))
    outputs = core.step()
    assert outputs is not None
    assert outputs.request_ids == [1, 2]


def test_soft_finish_and_park(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=100))
    core.step()
    core.apply(ParkRequests([1], True))
    assert not core.has_work()
    assert core.step() is None
    core.apply(ParkRequests([1], False))
    core.apply(FinishRequests([1]))
    outputs = core.step()
    assert outputs is not None
    assert [(row.request_id, row.reason) for row in outputs.finished] == [(1, EngineFinishReason.ABORT)]


def test_b19_whatever_a_scheduler_raises_for_a_request_answers_that_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(tmp_path)

    def refuse(message: object) -> None:
        raise KeyError("unforeseen")

    with monkeypatch.context() as patch:
        patch.setattr(core.scheduler, "add_request", refuse)
        core.apply(request(1))
    core.apply(request(2))
    assert core.has_work()
    outputs = core.step()
    assert outputs is not None
    row = outputs.finished[0]
    assert (row.request_id, row.reason) == (1, EngineFinishReason.ERROR)
    assert row.error is not None
    assert (row.error.kind, outputs.request_ids) == ("KeyError", [2])
    assert core.step() is not None
    assert not core.step().finished  # type: ignore[union-attr]


def test_b46_a_failed_start_shuts_down_the_executor_that_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr(ScriptedExecutor, "shutdown", lambda self: ended.append(self) or 1 / 0)
    with pytest.raises(RuntimeError, match="upside down"):
        EngineCore(scripted_config(tmp_path, {"fail_at_start": "upside down"}), lambda *_: None)
    monkeypatch.setattr("asyncllm.core.engine_core.Scheduler", None)
    with pytest.raises(TypeError):
        make_core(tmp_path)
    assert len(ended) == 2


def test_every_listed_utility_exists_and_nothing_else_can_be_called(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    for name in UTILITIES:
        assert callable(getattr(core, name))
    for name in ("shutdown", "step", "apply", "executor", "__class__"):
        with pytest.raises(UtilityError, match="no utility"):
            core.call(name, [])


def test_b34_drain_completes_when_the_last_request_has_ended(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    idle = core.call("drain", [])
    assert isinstance(idle, Future)
    assert idle.done()
    core.apply(request(1, max_tokens=2))
    drain = core.call("drain", [])
    core.step()
    assert not drain.done()
    core.step()
    assert drain.done()


def test_drain_completes_when_the_last_request_is_aborted(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1))
    drain = core.call("drain", [])
    core.apply(AbortRequests([1]))
    core.step()
    assert drain.done()


def test_shutdown_cancels_drains(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1))
    drain = core.call("drain", [])
    core.shutdown()
    core.shutdown()
    assert drain.cancelled()


def test_asleep_no_step_runs_and_requests_go_on_later(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=5))
    outputs = core.step()
    assert outputs is not None
    tokens: dict[int, list[int]] = {}
    add_outputs(tokens, outputs)
    core.call("sleep", [])
    core.apply(request(2, max_tokens=2))
    assert not core.has_work()
    assert core.step() is None
    stats = core.stats()
    assert stats.is_sleeping
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (0, 2, 1)
    core.call("sleep", [2])
    core.call("wake_up", [])
    core.call("wake_up", [])
    assert not core.stats().is_sleeping
    for request_id, more in run(core).items():
        tokens.setdefault(request_id, []).extend(more)
    other = make_core(tmp_path)
    other.apply(request(1, max_tokens=5))
    other.apply(request(2, max_tokens=2))
    assert tokens == run(other)
    core.scheduler.check_integrity()


def test_what_is_ended_while_it_sleeps_is_answered_then(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1, max_tokens=5))
    core.apply(request(2, max_tokens=5))
    core.step()
    core.sleep()
    core.apply(AbortRequests([1]))
    core.apply(FinishRequests([2]))
    outputs = core.step()
    assert outputs is not None
    assert [(row.request_id, row.reason) for row in outputs.finished] == [(2, EngineFinishReason.ABORT)]
    core.wake_up()
    assert core.step() is None


def test_a_pause_outlasts_the_sleep(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1))
    core.pause()
    core.sleep()
    core.wake_up()
    assert core.step() is None
    core.resume()
    assert len(run(core)[1]) == 4


@pytest.mark.parametrize("level", [0, 3, -1, True, "1", None, [1], 1.5])
def test_a_level_that_is_none_is_refused(tmp_path: Path, level: Any) -> None:
    core = make_core(tmp_path)
    with pytest.raises(UsageError, match=r"level is .*; sleep\(\) takes level 1 or 2"):
        core.call("sleep", [level])
    assert not core.stats().is_sleeping


def test_workers_that_cannot_sleep_or_wake_up_leave_the_engine_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(tmp_path)
    core.apply(request(1))
    core.step()

    def fail(method: str, args: Any = (), kwargs: Any = None) -> list[Any]:
        raise MemoryError(method)

    with monkeypatch.context() as patch:
        patch.setattr(core.executor, "collective_rpc", fail)
        with pytest.raises(MemoryError, match="sleep"):
            core.sleep()
    assert core.has_work()
    core.step()
    core.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(core.executor, "collective_rpc", fail)
        with pytest.raises(MemoryError, match="wake_up"):
            core.wake_up()
    assert core.stats().is_sleeping
    core.wake_up()
    assert run(core)[1]


def test_a_scheduler_with_running_requests_cannot_fall_asleep(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.apply(request(1))
    core.step()
    with pytest.raises(UsageError, match="hold slots"):
        core.scheduler.fall_asleep()


def test_profile_of_every_worker_in_one_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(tmp_path)
    calls: list[tuple[str, list[Any]]] = []

    def collective_rpc(method: str, args: Any = (), kwargs: Any = None) -> list[Any]:
        calls.append((method, list(args)))
        return ["a.json", "b.json"] if method == "stop_profile" else [None, None]

    monkeypatch.setattr(core.executor, "collective_rpc", collective_rpc)
    monkeypatch.chdir(tmp_path)
    core.start_profile()
    core.start_profile("here")
    assert calls == [("start_profile", [str(tmp_path / name)]) for name in ("asyncllm-profile", "here")]
    assert core.stop_profile() == ["a.json", "b.json"]


def test_info_joins_configuration_and_findings(tmp_path: Path) -> None:
    config: EngineConfig = scripted_config(tmp_path, block_size=8, num_blocks=32, max_num_batched_tokens=64)
    info = EngineCore(config, lambda *_: None).info
    assert (info.block_size, info.num_blocks, info.max_num_batched_tokens, info.device) == (8, 32, 64, "scripted")
