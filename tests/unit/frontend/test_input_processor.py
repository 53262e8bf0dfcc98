"""Everything that can be wrong with a request is said in the caller's process, by parameter, value and limit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from asyncllm.checkpoint import open_checkpoint
from asyncllm.config import EngineConfig
from asyncllm.errors import CheckpointError, InvalidParameterError, PromptTooLongError, RequestTooLargeError
from asyncllm.frontend.chat import ChatOptions
from asyncllm.frontend.input_processor import InputProcessor
from asyncllm.frontend.tokenizer import Tokenizer
from asyncllm.sampling_params import SamplingParams
from asyncllm.testing import EOS, write_tiny_checkpoint
from asyncllm.wire.codec import make_encoder
from asyncllm.wire.messages import EngineSampling
from tests.support.frontend import engine_info


def make(
    folder: Path, *, info: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, **checkpoint: Any
) -> InputProcessor:
    opened = open_checkpoint(str(write_tiny_checkpoint(folder, **checkpoint)))
    config = EngineConfig.from_options(str(folder), **(engine or {}))
    processor = InputProcessor(config, opened, Tokenizer.from_checkpoint(opened))
    if info is not None:
        processor.set_info(engine_info(**info))
    return processor


@pytest.fixture
def processor(tmp_path: Path) -> InputProcessor:
    return make(tmp_path, info={"max_model_len": 100})


def sampling(processor: InputProcessor, prompt: Any = "Hi", **params: Any) -> EngineSampling:
    return processor.process(prompt, SamplingParams(**params)).requests[0].sampling


# ---------------------------------------------------------------------------------------------------- the prompt
def test_text_becomes_ids_and_ids_stay(processor: InputProcessor) -> None:
    assert processor.process("Hi").prompt_token_ids == [72, 105]
    assert processor.process([72, 105]).prompt_token_ids == [72, 105]


@pytest.mark.parametrize("prompt", [(1, 2), range(1, 3), np.array([1, 2]), [np.int64(1), np.int32(2)]])
def test_any_sequence_of_integers_is_a_prompt(processor: InputProcessor, prompt: Any) -> None:
    ids = processor.process(prompt).prompt_token_ids
    assert ids == [1, 2]
    assert {type(token_id) for token_id in ids} == {int}


def test_the_callers_list_is_not_kept(processor: InputProcessor) -> None:
    ids = [1, 2]
    processed = processor.process(ids)
    ids.append(3)
    assert processed.prompt_token_ids == [1, 2]


def test_special_tokens_are_added_to_texts_only(tmp_path: Path) -> None:
    processor = make(tmp_path, add_bos=True)
    assert processor.process("a").prompt_token_ids == [257, 97]
    assert processor.process("a", add_special_tokens=False).prompt_token_ids == [97]
    assert processor.process([97]).prompt_token_ids == [97]


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_r53_empty_prompt_is_refused(processor: InputProcessor, prompt: Any) -> None:
    with pytest.raises(InvalidParameterError, match="prompt") as caught:
        processor.process(prompt)
    assert caught.value.parameter == "prompt"


@pytest.mark.parametrize("bad", [-1, 260, 2**62, 2**63, 2**64])
def test_r52_prompt_id_outside_the_vocabulary_is_named(processor: InputProcessor, bad: int) -> None:
    with pytest.raises(
        InvalidParameterError, match=re.escape(f"prompt[1] is {bad}; it must be a token id in 0 … 259")
    ) as caught:
        processor.process([5, bad])
    assert (caught.value.parameter, caught.value.value) == ("prompt[1]", bad)


@pytest.mark.parametrize(
    ("bad", "parameter"), [([1, "2"], "prompt[1]"), ([1.5], "prompt[0]"), ([True], "prompt[0]"), ([None], "prompt[0]")]
)
def test_prompt_ids_have_to_be_integers(processor: InputProcessor, bad: Any, parameter: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        processor.process(bad)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("bad", [None, 5, b"bytes", {"prompt": "x"}, object()])
def test_prompt_of_another_type_is_refused(processor: InputProcessor, bad: Any) -> None:
    with pytest.raises(InvalidParameterError, match="a text or token ids"):
        processor.process(bad)


def test_r54_longest_prompt_leaves_one_token(processor: InputProcessor) -> None:
    assert sampling(processor, [1] * 99, max_tokens=1).max_tokens == 1
    for length in (100, 101):
        with pytest.raises(
            PromptTooLongError, match=f"{length} tokens; the longest prompt has 99.*shorten it"
        ) as caught:
            processor.process([1] * length, SamplingParams(max_tokens=1))
        assert (caught.value.value, caught.value.limit) == (length, 99)


def test_r55_limits_of_the_engine_replace_those_of_the_checkpoint(tmp_path: Path) -> None:
    processor = make(tmp_path)
    processor.process([1] * 150)
    processor.set_info(engine_info(max_model_len=100))
    with pytest.raises(PromptTooLongError, match="max_model_len 100"):
        processor.process([1] * 150)


def test_option_max_model_len_counts_before_the_engine_is_ready(tmp_path: Path) -> None:
    with pytest.raises(PromptTooLongError):
        make(tmp_path, engine={"max_model_len": 10}).process([1] * 10)


def test_r62_prompt_larger_than_the_pool_is_refused_with_sizes(tmp_path: Path) -> None:
    processor = make(tmp_path, info={"num_blocks": 49, "block_size": 16})
    with pytest.raises(RequestTooLargeError, match=r"1002 tokens.*63 KV blocks of 16 tokens, the engine has 49"):
        processor.process([1] * 1002)
    processor.process([1] * (49 * 16 - 1))
    with pytest.raises(RequestTooLargeError):
        processor.process([1] * (49 * 16))


def test_r72_a_text_that_cannot_fit_is_refused_without_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = make(tmp_path, info={"max_model_len": 2048}, pieces=["x" * 100])
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("encoded"))
    text = "word " * 1_000_000
    with pytest.raises(PromptTooLongError, match="5000000 characters, which are at least 50000 tokens"):
        processor.process(text)
    assert not processor.is_long(text)  # refusing it takes no thread


def test_is_long(processor: InputProcessor, tmp_path: Path) -> None:
    roomy = make(tmp_path / "roomy", info={"max_model_len": 100_000})
    assert roomy.is_long("x" * 4_000)
    assert not roomy.is_long("x" * 3_999)
    assert roomy.is_long(range(60_000))
    assert not roomy.is_long(object())
    assert not processor.is_long([1] * 100)
    assert not processor.has_long_params(SamplingParams(bad_words=["x" * 200] * 9))
    assert processor.has_long_params(SamplingParams(bad_words=["x" * 200] * 10))


# ------------------------------------------------------------------------------------------------- the arguments
@pytest.mark.parametrize("bad", [uuid4(), 5, b"x", 1.5])
def test_b26_request_id_has_to_be_a_string(processor: InputProcessor, bad: Any) -> None:
    with pytest.raises(TypeError, match="request_id"):
        processor.process("Hi", request_id=bad)


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ({"request_id": ""}, "request_id"),
        ({"params": {"n": 1}}, "params"),
        ({"priority": 2**63}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
)
def test_arguments_are_checked(processor: InputProcessor, arguments: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        processor.process("Hi", **arguments)
    assert caught.value.parameter == parameter


def test_ids_are_made_up_and_never_used_twice(processor: InputProcessor) -> None:
    made = [processor.process("Hi", SamplingParams(n=2)) for _ in range(5)]
    assert len({request.request_id for request in made}) == 5
    engine_ids = [engine_id for request in made for engine_id in request.engine_ids]
    assert len(set(engine_ids)) == 10
    assert processor.process("Hi", request_id="mine").request_id == "mine"


def test_priority_and_salt_reach_the_engine(processor: InputProcessor) -> None:
    request = processor.process("Hi", priority=-3, cache_salt="tenant").requests[0]
    assert (request.priority, request.cache_salt) == (-3, "tenant")


# ------------------------------------------------------------------------------------------------- the parameters
@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"stop_token_ids": [3, 265], "min_tokens": 1}, "stop_token_ids"),  # R50
        ({"logit_bias": {10**6: -100}}, "logit_bias[1000000]"),  # R51
        ({"allowed_token_ids": [260]}, "allowed_token_ids"),
    ],
)
def test_r50_r51_ids_beyond_the_vocabulary_are_refused(
    processor: InputProcessor, params: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(InvalidParameterError, match="0 … 259") as caught:
        processor.process("Hi", SamplingParams(**params))
    assert caught.value.parameter == parameter


def test_r56_max_tokens_reaches_to_the_end_of_the_context(processor: InputProcessor) -> None:
    assert sampling(processor).max_tokens == 98
    assert sampling(processor, max_tokens=98).max_tokens == 98
    assert sampling(processor, max_tokens=5000, min_tokens=4000).max_tokens == 98
    assert sampling(processor, max_tokens=5000, min_tokens=4000).min_tokens == 98


def test_open_fields_take_the_models_defaults_then_neutral_ones(tmp_path: Path) -> None:
    neutral = sampling(make(tmp_path / "a"))
    assert (neutral.temperature, neutral.top_k, neutral.top_p, neutral.min_p, neutral.repetition_penalty) == (
        1,
        0,
        1,
        0,
        1,
    )
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    processor = make(tmp_path / "b", generation_config={**defaults, "max_new_tokens": 3})
    of_model = sampling(processor)
    assert (of_model.temperature, of_model.top_k, of_model.top_p, of_model.min_p) == (0.6, 20, 0.9, 0.1)
    assert of_model.repetition_penalty == 1.1
    assert of_model.max_tokens > 3
    given = sampling(processor, temperature=0.0, top_k=0, top_p=1.0)
    assert (given.temperature, given.top_k, given.top_p, given.min_p) == (0.0, 0, 1.0, 0.1)


def test_bad_generation_config_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*top_p"):
        make(tmp_path, generation_config={"top_p": 7})


def test_seeds(processor: InputProcessor) -> None:
    assert sampling(processor, seed=2**64 - 1).seed == 2**64 - 1
    assert sampling(processor).seed != sampling(processor).seed
    assert sampling(processor, temperature=0.0).seed == 0
    make_encoder()(processor.process("Hi", SamplingParams(seed=2**64 - 1)).requests[0])  # fits the wire


def test_r59_n_samples_are_n_requests(processor: InputProcessor) -> None:
    requests = processor.process("Hi", SamplingParams(n=3, prompt_logprobs=1)).requests
    assert [request.sampling.sample_index for request in requests] == [0, 1, 2]
    assert len({request.sampling.seed for request in requests}) == 1
    assert [request.sampling.prompt_logprobs for request in requests] == [1, -1, -1]


def test_r49_ignore_eos_and_stop_ids_are_told_apart(processor: InputProcessor) -> None:
    found = sampling(processor, ignore_eos=True, stop_token_ids=[7, 5])
    assert (found.ignore_eos, found.stop_token_ids) == (True, [7, 5])


def test_all_fields_reach_the_engine(processor: InputProcessor) -> None:
    found = sampling(
        processor,
        temperature=1,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={5: 3},
        allowed_token_ids=[5, 6],
        logprobs=0,
        prompt_logprobs=2,
        min_tokens=2,
    )
    assert (found.presence_penalty, found.frequency_penalty, found.logit_bias) == (1.0, -1.0, {5: 3.0})
    assert (found.allowed_token_ids, found.logprobs, found.prompt_logprobs, found.min_tokens) == ([5, 6], 0, 2, 2)
    assert type(found.temperature) is float
    assert sampling(processor).logprobs == -1


def test_long_chats_belong_in_a_thread(processor: InputProcessor) -> None:
    assert not processor.is_long_chat([{"role": "user", "content": "Hi"}])
    assert processor.is_long_chat([{"role": "user", "content": [{"type": "text", "text": "x" * 4_000}]}])
    assert not processor.is_long_chat(None)


def test_chat(processor: InputProcessor) -> None:
    prompt = processor.chat.make_prompt([{"role": "user", "content": "Hi"}], ChatOptions())
    assert prompt.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.output is None
    ids = processor.process(prompt.text, add_special_tokens=False).prompt_token_ids
    assert ids[0] == 258


@pytest.mark.parametrize(
    ("prompt", "remedy"),
    [
        ([{"role": "user", "content": "x"}], "for messages use chat()"),
        (["a", "b"], "one prompt per call: asyncio.gather"),
    ],
)
def test_a_prompt_of_messages_or_of_several_texts_names_the_call_for_it(
    processor: InputProcessor, prompt: Any, remedy: str
) -> None:
    with pytest.raises(InvalidParameterError, match=re.escape(remedy)) as caught:
        processor.process(prompt)
    assert caught.value.parameter == "prompt[0]"


def test_a_prompt_id_that_cannot_be_printed_is_refused(processor: InputProcessor) -> None:
    with pytest.raises(InvalidParameterError, match=re.escape("prompt[0] is <int>")):
        processor.process([10**5000])


def test_half_a_surrogate_pair_is_no_cache_salt(processor: InputProcessor) -> None:
    with pytest.raises(InvalidParameterError, match="cache_salt is"):
        processor.process([1], cache_salt="a\ud800")


def test_more_top_k_than_there_are_tokens_keeps_all(processor: InputProcessor) -> None:
    (request,) = processor.process([1], SamplingParams(top_k=10**30)).requests
    assert request.sampling.top_k == 260


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"allowed_token_ids": [7, 8], "stop_token_ids": [8, 7]}, "allowed_token_ids"),
        ({"allowed_token_ids": [EOS]}, "allowed_token_ids"),
        ({"stop_token_ids": list(range(260))}, "stop_token_ids"),
    ],
)
def test_min_tokens_that_leave_no_token_to_draw_are_refused(
    processor: InputProcessor, params: dict[str, Any], parameter: str
) -> None:
    """The engine would ban every token of the first steps and find no finite logit."""
    processor.process("Hi", SamplingParams(**params))
    with pytest.raises(InvalidParameterError, match="min_tokens") as caught:
        processor.process("Hi", SamplingParams(**params, min_tokens=1))
    assert caught.value.parameter == parameter


def test_an_end_of_sequence_that_is_ignored_may_be_all_that_is_allowed(processor: InputProcessor) -> None:
    processor.process("Hi", SamplingParams(allowed_token_ids=[EOS], min_tokens=1, ignore_eos=True))
