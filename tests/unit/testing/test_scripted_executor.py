"""The executor without a model: it plays its script whatever the schedule, and refuses what would corrupt a worker."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from asyncllm.config import EngineConfig
from asyncllm.executor.base import Executor
from asyncllm.testing import EOS, IM_END, ScriptedExecutor, ScriptError, scripted_options, write_tiny_checkpoint
from asyncllm.wire.messages import EngineSampling
from asyncllm.wire.step import ModelRunnerOutput, NewRequest, SchedulerOutput


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path)


def started(folder: Path, **script: Any) -> ScriptedExecutor:
    config = EngineConfig.from_options(str(folder), block_size=4, num_blocks=64, **scripted_options(**script))
    executor = Executor.get_class(config)(config, lambda phase, fraction: None)
    assert isinstance(executor, ScriptedExecutor)
    executor.start()
    return executor


def new(prompt: str, slot: int = 0, *, output: str = "", computed: int = 0, **sampling: Any) -> NewRequest:
    ids = list((prompt + output).encode())
    blocks = list(range(1, 30))
    return NewRequest(
        slot, 100 + slot, ids, len(prompt.encode()), computed, blocks, EngineSampling(max_tokens=99, **sampling)
    )


def run(executor: ScriptedExecutor, rows: dict[int, int], **fields: Any) -> ModelRunnerOutput:
    """Run one step of slot → number of tokens."""
    step = SchedulerOutput(1, list(rows), list(rows.values()), sum(rows.values()), **fields)
    return executor.execute_model(step).result()


def play(executor: ScriptedExecutor, request: NewRequest, count: int) -> list[int]:
    """Return the first ``count`` tokens of a request alone."""
    tokens = run(executor, {request.slot: len(request.token_ids)}, new_requests=[request]).token_ids
    while len(tokens) < count:
        tokens += run(executor, {request.slot: 1}).token_ids
    return tokens


def test_the_start_reports_the_checkpoint_and_the_options(folder: Path) -> None:
    config = EngineConfig.from_options(str(folder), num_blocks=10, block_size=4, **scripted_options())
    phases: list[str] = []
    info = ScriptedExecutor(config, lambda phase, fraction: phases.append(phase)).start()
    assert (info.vocab_size, info.eos_token_ids, info.num_blocks) == (260, (EOS, IM_END), 10)
    assert info.max_model_len == 40  # what the blocks hold
    assert phases == ["load_model"]


def test_without_a_script_the_prompt_is_echoed(folder: Path) -> None:
    assert play(started(folder), new("abc"), 5) == [97, 98, 99, EOS, EOS]


def test_tokens_are_emitted_in_a_circle(folder: Path) -> None:
    assert play(started(folder, tokens=[7, 8]), new("abc"), 5) == [7, 8, 7, 8, 7]


def test_the_key_that_ends_last_in_the_prompt_wins(folder: Path) -> None:
    executor = started(folder, replies={"first": "1", "second": "2", "a second": "3", "": "0"})
    assert play(executor, new("first, then second", 0), 2) == [ord("2"), EOS]
    assert play(executor, new("second, then first", 1), 1) == [ord("1")]
    assert play(executor, new("this is a second", 2), 1) == [ord("3")]
    assert play(executor, new("neither", 3), 1) == [ord("0")]


def test_scripts_by_token_ids(folder: Path) -> None:
    executor = started(folder, scripts=[[[98], [1, 2]], [[120, 121], "hi"]])
    assert play(executor, new("abc", 0), 3) == [1, 2, EOS]
    assert play(executor, new("xyz", 1), 3) == [*b"hi", EOS]


def test_each_sample_has_its_own_reply(folder: Path) -> None:
    executor = started(folder, replies={"a": ["one", "two"]})
    assert play(executor, new("a", 0, sample_index=1), 4) == [*b"two", EOS]
    assert play(executor, new("a", 1, sample_index=2), 4) == [*b"one", EOS]


def test_the_draw_depends_on_the_position_alone(folder: Path) -> None:
    executor = started(folder, tokens=list(range(10)))
    request = new("abcdefgh")
    chunks = [run(executor, {0: 3}, new_requests=[request]), run(executor, {0: 4}), run(executor, {0: 1})]
    assert [output.token_ids for output in chunks] == [[-1], [-1], [0]]
    assert run(executor, {0: 1}).token_ids == [1]
    resumed = new("abcdefgh", 5, output="xy", computed=4)  # as after a preemption, with a prefix found in the cache
    assert run(executor, {5: 6}, new_requests=[resumed], freed_slots=[0]).token_ids == [2]
    assert executor.rows() == {5: 105}


def test_logprobs_name_the_drawn_token_first(folder: Path) -> None:
    executor = started(folder, tokens=[259])
    output = run(executor, {0: 3}, new_requests=[new("abc", logprobs=2, prompt_logprobs=1)])
    rows = output.logprobs[0]
    assert (rows.width, rows.token_ids, rows.ranks) == (3, [259, 259, 0], [1, 1, 2])
    assert rows.logprobs[1] > rows.logprobs[2]
    assert output.prompt_logprobs[0].token_ids == [98, 98, 99, 99]  # positions 1 … of the prompt


def test_prompt_logprobs_of_a_chunked_prompt(folder: Path) -> None:
    executor = started(folder)
    request = new("abcdef", prompt_logprobs=0)
    chunks = [run(executor, {0: 4}, new_requests=[request]), run(executor, {0: 2}), run(executor, {0: 1})]
    found = [output.prompt_logprobs[0].token_ids if output.prompt_logprobs else [] for output in chunks]
    assert found == [[98, 99, 100, 101], [102], []]


def test_a_failing_request_fails_at_its_position_alone(folder: Path) -> None:
    executor = started(folder, tokens=[7], fail_request=["bad", 1])
    run(executor, {0: 3, 1: 4}, new_requests=[new("bad", 0), new("good", 1)])
    output = run(executor, {0: 1, 1: 1})
    assert output.token_ids == [-1, 7]
    assert list(output.failed) == [0]


def test_failing_at_a_step_and_at_the_start(folder: Path) -> None:
    executor = started(folder, fail_at_step=2)
    run(executor, {0: 1}, new_requests=[new("a")])
    with pytest.raises(RuntimeError, match="step 2"):
        run(executor, {0: 1})
    with pytest.raises(RuntimeError, match="no such luck"):
        started(folder, fail_at_start="no such luck")


def test_a_step_takes_its_time(folder: Path) -> None:
    executor = started(folder, step_ms=20)
    began = time.monotonic()
    run(executor, {0: 1}, new_requests=[new("a")])
    assert time.monotonic() - began >= 0.02


def test_calls_by_name(folder: Path) -> None:
    executor = started(folder)
    run(executor, {0: 1}, new_requests=[new("a")])
    assert executor.collective_rpc("echo", [1], {"b": 2}) == [{"args": [1], "kwargs": {"b": 2}}]
    ((step,),) = executor.collective_rpc("history")
    assert (step["request_ids"], step["num_scheduled_tokens"], step["token_ids"]) == ([100], [1], [97])
    executor.collective_rpc("set_script", [{"tokens": [5]}])
    executor.collective_rpc("clear_history")
    assert executor.history() == []
    assert play(executor, new("a", 1), 1) == [5]
    with pytest.raises(AttributeError, match="history"):
        executor.collective_rpc("shutdown_all")
    executor.shutdown()
    executor.shutdown()
    assert executor.rows() == {}


def test_an_unknown_script_option_is_refused(folder: Path) -> None:
    with pytest.raises(ScriptError, match="reply"):
        started(folder, reply="x")


# ------------------------------------------------------------------------------- steps that would corrupt a worker
def wrong_steps(executor: ScriptedExecutor) -> dict[str, Any]:
    request = new("abcdef")
    return {
        "frees an empty slot": lambda: run(executor, {}, freed_slots=[3]),
        "runs an empty slot": lambda: run(executor, {3: 1}),
        "gives away a slot that is held": lambda: run(executor, {0: 6}, new_requests=[request]),
        "computes more than is known": lambda: run(executor, {0: 2}),
        "computes nothing": lambda: run(executor, {0: 0}),
        "writes past the blocks": lambda: run(
            executor, {1: 6}, new_requests=[NewRequest(1, 7, [1] * 6, 6, 0, [1], EngineSampling(max_tokens=1))]
        ),
        "admits what is computed": lambda: run(executor, {1: 1}, new_requests=[new("abcd", 1, computed=4)]),
    }


@pytest.mark.parametrize("name", sorted(wrong_steps(None)))  # type: ignore[arg-type]
def test_a_step_against_the_protocol_is_refused(folder: Path, name: str) -> None:
    executor = started(folder)
    run(executor, {0: 6}, new_requests=[new("abcdef")])
    with pytest.raises(ScriptError):
        wrong_steps(executor)[name]()
