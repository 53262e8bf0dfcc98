"""A request's tokens depend on its prompt, parameters and seed: not on company, chunks or preemption."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncllm.wire.messages import EngineSampling
from tests.support.emulated_device import EmulatedRuntime
from tests.support.runner import POISON, VOCAB, Driver, make_runner
from tests.support.sampling import sampling

PROMPTS = [[5, 9, 2, 44, 17], [3], [8] * 21, list(range(10, 43)), [60, 61], [7, 7, 7, 1, 2, 3, 90, 4, 5]]
PARAMS = [
    sampling(),
    sampling(temperature=1.0, seed=1),
    sampling(temperature=0.8, top_k=20, seed=2),
    sampling(temperature=1.2, top_p=0.9, seed=3),
    sampling(repetition_penalty=1.3, frequency_penalty=0.2),
    sampling(temperature=1.0, min_p=0.02, seed=1, sample_index=1),
]
COUNT = 14
BACKENDS = ["reference", "cpu", pytest.param("device", marks=pytest.mark.triton)]


def alone(index: int, params: EngineSampling, *, backend: str = "reference") -> list[int]:
    driver = Driver(make_runner(backend=backend))
    driver.add(0, PROMPTS[index], params)
    return driver.generate(COUNT)[0]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Each request's tokens when it runs alone, its prompt in one step."""
    return [alone(index, params) for index, params in enumerate(PARAMS)]


def fill(driver: Driver) -> None:
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        driver.add(index, prompt, params)


def test_the_expected_tokens_are_worth_comparing(expected: list[list[int]]) -> None:
    assert all(len(set(tokens)) > 3 for tokens in expected)
    assert expected[1] != expected[5]


@pytest.mark.parametrize(
    ("backend", "chunk"),
    [
        *((backend, chunk) for backend in ("reference", "cpu") for chunk in (1000, 1, 3, 7, 16)),
        *(pytest.param("device", chunk, marks=pytest.mark.triton) for chunk in (1000, 3)),
    ],
)
def test_r48_batched_and_chunked_tokens_are_those_of_each_alone(
    backend: str, chunk: int, expected: list[list[int]]
) -> None:
    driver = Driver(make_runner(backend=backend))
    fill(driver)
    assert driver.generate(COUNT, chunk=chunk) == dict(enumerate(expected))


@pytest.mark.parametrize("backend", BACKENDS)
def test_r66_tokens_survive_preemption(backend: str, expected: list[list[int]]) -> None:
    driver = Driver(make_runner(backend=backend))
    fill(driver)
    driver.generate(3)
    for request_id in (2, 4, 1):
        driver.release(request_id)
    driver.step({0: 1, 3: 1, 5: 1})
    driver.step({4: 4, 0: 1, 2: 7})  # comes back in chunks, into other slots and blocks
    driver.release(2)  # and is preempted again in the middle of it
    assert driver.generate(COUNT, chunk=5) == dict(enumerate(expected))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_may_stand_in_any_order_and_leave_a_step_out(backend: str, expected: list[list[int]]) -> None:
    driver = Driver(make_runner(backend=backend))
    fill(driver)
    driver.step({3: 33, 0: 5, 5: 2})
    driver.step({5: 7, 3: 1})
    driver.step({0: 1, 1: 1, 3: 1, 5: 1})
    assert driver.generate(COUNT) == dict(enumerate(expected))


def test_a_prefix_hit_continues_from_the_blocks_of_another_request() -> None:
    driver = Driver(make_runner())
    first = driver.add(0, PROMPTS[3], sampling())
    driver.step({0: len(PROMPTS[3])})
    second = driver.add(1, PROMPTS[3], sampling())
    second.blocks, second.computed = first.blocks[:8], 32
    driver.step({1: 1, 0: 1})
    driver.step({1: 1, 0: 1})
    assert first.output[:2] == second.output


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_launched_step_can_be_followed_before_its_tokens_are_read(backend: str, expected: list[list[int]]) -> None:
    """The drawn token is appended on the device: the next step needs no host to know it."""
    runner = make_runner(backend=backend)
    driver = Driver(runner)
    driver.add(1, PROMPTS[1], PARAMS[1])
    steps = [driver.plan({1: 1}) for _ in range(COUNT)]
    pending = [runner.execute(step) for step in steps]
    assert [launched.result().token_ids[0] for launched in pending] == expected[1]


@pytest.mark.triton
def test_a_device_gets_one_copy_a_step_and_replays_its_decode_steps(expected: list[list[int]]) -> None:
    runner = make_runner(backend="device")
    runtime = runner.runtime
    assert isinstance(runtime, EmulatedRuntime)
    driver = Driver(runner)
    for index in range(3):
        driver.add(index, PROMPTS[index], PARAMS[index])
    driver.step({0: 5, 1: 1, 2: 21})
    copies, uploads, replays = runtime.num_copies, runtime.num_uploads, runtime.num_replays
    assert driver.generate(COUNT) == dict(enumerate(expected[:3]))
    num_steps = COUNT - 1
    assert runtime.num_copies - copies == num_steps
    assert runtime.num_replays - replays == num_steps
    assert runtime.num_uploads == uploads  # nobody came or went


def test_a_step_in_which_no_row_draws() -> None:
    driver = Driver(make_runner())
    driver.add(0, PROMPTS[3], sampling())
    assert driver.step({0: 10}).token_ids == [-1]


def test_r58_padding_rows_of_the_head_are_never_drawn() -> None:
    driver = Driver(make_runner())
    for request_id, params in enumerate(
        [sampling(), sampling(temperature=1.0, seed=1), sampling(temperature=5.0, top_k=99, seed=2)]
    ):
        driver.add(request_id, [1, 2, 3], params)
    drawn = [token for tokens in driver.generate(30).values() for token in tokens]
    assert max(drawn) < VOCAB


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("params", [sampling(logprobs=2), sampling(temperature=1.0, seed=4)], ids=["greedy", "random"])
def test_a_row_that_is_not_finite_fails_alone(backend: str, params: EngineSampling, expected: list[list[int]]) -> None:
    driver = Driver(make_runner(backend=backend))
    driver.add(0, PROMPTS[0], PARAMS[0])
    driver.add(1, [POISON, 3, 4], params)
    driver.add(2, PROMPTS[2], PARAMS[2])
    output = driver.step({0: 5, 1: 3, 2: 21})
    failed = driver.requests[1]
    assert output.failed == {failed.slot: "its logits are not finite"}
    assert output.token_ids[1] == -1
    assert not output.logprobs
    assert [output.token_ids[0], output.token_ids[2]] == [expected[0][0], expected[2][0]]
    driver.release(1)
    del driver.requests[1]
    driver.add(3, PROMPTS[3], PARAMS[3])  # takes the blocks that held numbers that were not finite
    assert driver.generate(COUNT) == {i: expected[i] for i in (0, 2, 3)}


@pytest.mark.parametrize(
    ("backend", "chunk"),
    [
        *(("reference", chunk) for chunk in (1000, 1, 4, 5)),
        pytest.param("device", 1, marks=pytest.mark.triton),  # as many new tokens as rows: no reason to replay a graph
    ],
)
def test_r60_prompt_logprobs_cover_every_prompt_position_once_in_order(backend: str, chunk: int) -> None:
    def rows(chunk: int) -> tuple[list[int], list[float], list[int]]:
        driver = Driver(make_runner(backend=backend))
        driver.add(0, PROMPTS[0], sampling())
        request = driver.add(1, PROMPTS[3], sampling(prompt_logprobs=3))
        driver.generate(2, chunk=chunk)
        assert all(part.width == 4 for part in request.prompt_logprobs)
        return (
            [token for part in request.prompt_logprobs for token in part.token_ids],
            [value for part in request.prompt_logprobs for value in part.logprobs],
            [rank for part in request.prompt_logprobs for rank in part.ranks],
        )

    ids, values, ranks = rows(chunk)
    whole_ids, whole_values, whole_ranks = rows(1000)
    assert ids[::4] == PROMPTS[3][1:]  # the prompt's own tokens, from its second on
    assert (ids, ranks) == (whole_ids, whole_ranks)
    assert values == pytest.approx(whole_values, abs=1e-5)


def test_r60_prompt_logprobs_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens() -> list[int]:
        driver = Driver(make_runner())
        request = driver.add(0, PROMPTS[3], sampling(prompt_logprobs=0))
        driver.generate(1)
        return request.prompt_logprobs[0].token_ids

    whole = tokens()
    monkeypatch.setattr("asyncllm.worker.model_runner.PROMPT_LOGPROB_ELEMENTS", 5 * VOCAB)
    assert tokens() == whole == PROMPTS[3][1:]


@pytest.mark.triton
@pytest.mark.parametrize("num_top", [0, 2])
def test_prompt_logprobs_are_those_of_a_request_whose_slot_another_has_by_now(num_top: int) -> None:
    """Its chunk is out while it is preempted: the copy to the host may be made after the other's prompt came."""
    driver = Driver(make_runner(backend="device"))
    driver.add(0, PROMPTS[3], sampling(prompt_logprobs=num_top))
    chunk = driver.runner.execute(driver.plan({0: 20}))
    slot = driver.requests[0].slot
    assert slot is not None
    driver.release(0)
    driver.add(1, PROMPTS[2], sampling())
    driver.step({1: len(PROMPTS[2])})
    assert driver.requests[1].slot == slot
    rows = chunk.result().prompt_logprobs[slot]
    assert rows.token_ids[:: 1 + num_top] == PROMPTS[3][1:21]


def test_prompt_logprobs_are_not_reported_again_after_a_preemption_with_output() -> None:
    driver = Driver(make_runner())
    request = driver.add(0, PROMPTS[0], sampling(prompt_logprobs=0))
    driver.generate(2)
    driver.release(0)
    driver.generate(4)
    assert len(request.prompt_logprobs) == 1


def test_r61_output_logprobs_come_with_each_token_under_chunked_prefill() -> None:
    driver = Driver(make_runner())
    driver.add(0, PROMPTS[2], sampling(temperature=1.0, seed=3))
    request = driver.add(1, PROMPTS[3], sampling(logprobs=2))
    driver.generate(5, chunk=7)
    assert [rows.token_ids[0] for rows in request.logprobs] == request.output
    assert [rows.token_ids[1] for rows in request.logprobs] == request.output  # greedy: the most likely one
    assert all(rows.width == 3 and rows.ranks == [1, 1, 2] for rows in request.logprobs)


def test_case58_min_tokens_holds_in_a_batch(expected: list[list[int]]) -> None:
    end = expected[0][0]
    driver = Driver(make_runner(eos_token_ids=(end,)))
    driver.add(0, PROMPTS[0], sampling(min_tokens=3))
    driver.add(1, PROMPTS[0], sampling())
    tokens = driver.generate(6)
    assert tokens[1][0] == end
    assert end not in tokens[0][:3]


def test_the_step_reads_nothing_back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between launch and result no number is taken from a tensor (rule 15); numpy's argmax stands in for a kernel."""
    driver = Driver(make_runner(backend="cpu"))
    for request_id, prompt in enumerate(PROMPTS):
        driver.add(request_id, prompt, sampling(temperature=request_id % 2, seed=5, repetition_penalty=1.1))
    driver.generate(2)
    step = driver.plan(dict.fromkeys(range(len(PROMPTS)), 1))

    def refuse(*_: object) -> None:
        raise AssertionError("the host read a device value inside the step")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero"):
            patch.setattr(torch.Tensor, name, refuse)
        pending = driver.runner.execute(step)
    assert all(token >= 0 for token in pending.result().token_ids)


def free_of(tokens: list[int], words: list[list[int]]) -> bool:
    return not any(tokens[i : i + len(word)] == word for word in words for i in range(len(tokens)))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_bad_words_hold_through_batches_chunks_and_preemption(backend: str) -> None:
    """Words are taken from what each request would say without them: of one, two and three tokens."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.8, "top_k": 20, "seed": 2}]
    params: list[EngineSampling] = []
    for index, kind in enumerate(kinds):
        plain = alone(index, sampling(**kind), backend=backend)
        words = [[plain[1]], plain[3:5], plain[7:10]]
        params.append(sampling(bad_words=words, **kind))
        assert not free_of(plain, words)
    expected = {index: alone(index, one, backend=backend) for index, one in enumerate(params)}
    assert all(free_of(expected[index], one.bad_words) for index, one in enumerate(params))
    driver = Driver(make_runner(backend=backend))
    for index, one in enumerate(params):
        driver.add(index, PROMPTS[index], one)
    driver.add(3, PROMPTS[3], sampling())
    driver.generate(4, chunk=3)
    driver.release(0)
    driver.release(2)
    driver.step({1: 1, 3: 1})
    driver.step({2: 5, 1: 1})  # comes back in chunks, into another slot
    found = driver.generate(COUNT, chunk=4)
    assert {index: found[index] for index in expected} == expected


def test_requested_logprobs_come_with_every_token_and_go_with_their_request() -> None:
    driver = Driver(make_runner())
    first = driver.add(0, PROMPTS[0], sampling(logprobs=0, logprob_token_ids=[9, 4]))
    driver.add(1, PROMPTS[1], sampling(logprobs=1))
    driver.generate(3)
    assert [rows.token_ids for rows in first.logprobs] == [[token, 9, 4] for token in first.output]
    driver.release(0)
    del driver.requests[0]
    second = driver.add(2, PROMPTS[2], sampling(logprobs=0))  # takes the slot
    driver.generate(5)
    assert [rows.width for rows in second.logprobs] == [1] * 5
