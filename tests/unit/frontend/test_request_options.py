"""Options of a request that are settled in the caller's process: bad words, truncation, requested logprobs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncllm.errors import InvalidParameterError, PromptTooLongError
from asyncllm.frontend.input_processor import InputProcessor
from asyncllm.frontend.tokenizer import Tokenizer
from asyncllm.sampling_params import RepetitionDetectionParams, SamplingParams
from asyncllm.testing import EOS, IM_END
from asyncllm.wire.messages import EngineSampling
from tests.support.frontend import FrontEnd, engine_info, sentencepiece_json


@pytest.fixture
def processor(tmp_path: Path) -> InputProcessor:
    front = FrontEnd(tmp_path, add_bos=True)
    front.input.set_info(engine_info(max_model_len=100))
    return front.input


def sampling(processor: InputProcessor, **params: Any) -> EngineSampling:
    return processor.process("Hi", SamplingParams(**params)).requests[0].sampling


def refused(processor: InputProcessor, prompt: Any = "Hi", **params: Any) -> InvalidParameterError:
    with pytest.raises(InvalidParameterError) as caught:
        processor.process(prompt, SamplingParams(**params))
    return caught.value


# -------------------------------------------------------------------------------------------------- the bad words
@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["a"], [[97], [32, 97]]),
        (["ab", "c"], [[97, 98], [32, 97, 98], [99], [32, 99]]),
        ([" ab"], [[97, 98], [32, 97, 98]]),  # a space before it says nothing
        (["ab", " ab", "ab"], [[97, 98], [32, 97, 98]]),
        (["a b "], [[97, 32, 98, 32], [32, 97, 32, 98, 32]]),
        (["\n\n"], [[10, 10]]),  # white space alone is meant as it stands
        (["é"], [[0xC3, 0xA9], [32, 0xC3, 0xA9]]),
        ([], []),
        (None, []),
    ],
)
def test_bad_words_are_spelled_with_and_without_a_space(
    processor: InputProcessor, words: list[str] | None, ids: list[list[int]]
) -> None:
    """Never with the special tokens that a prompt gets."""
    assert sampling(processor, bad_words=words).bad_words == ids


def test_bad_words_by_a_sentencepiece_tokenizer(processor: InputProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(sentencepiece_json(), {})
    monkeypatch.setattr(processor, "_tokenizer", tokenizer)
    processor.set_info(engine_info(vocab_size=tokenizer.vocab_size))
    found = sampling(processor, bad_words=["a"]).bad_words
    assert [[tokenizer.token_string(token_id) for token_id in ids] for ids in found] == [["▁", "a"], ["▁", "▁", "a"]]


@pytest.mark.parametrize("word", ["", 5, None, "x" * 257, "a\ud800"])
def test_what_is_no_word_is_refused(word: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(bad_words=["ok", word])
    assert caught.value.parameter == "bad_words"
    assert caught.value.limit


@pytest.mark.parametrize("words", ["word", 5, {"a": 1}, ["a"] * 129])
def test_what_is_no_list_of_words_is_refused(words: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(bad_words=words)
    assert caught.value.parameter == "bad_words"


def test_a_word_without_tokens_is_refused(processor: InputProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: [])
    error = refused(processor, [1], bad_words=["lost"])
    assert (error.parameter, error.value, error.limit) == ("bad_words", "lost", "words of at least one token")


def test_a_word_beyond_the_models_vocabulary_is_refused(processor: InputProcessor) -> None:
    processor.set_info(engine_info(vocab_size=98))
    error = refused(processor, [1], bad_words=["a", "ab"])
    assert (error.parameter, error.value) == ("bad_words", "ab")
    assert "token 98; it must be words whose tokens are in 0 … 97" in str(error)


@pytest.mark.parametrize(
    ("params", "limit"),
    [
        ({"allowed_token_ids": [97, 98], "bad_words": ["a", "b"]}, "some token is no bad word"),
        ({"allowed_token_ids": [97, EOS, IM_END], "bad_words": ["a"], "min_tokens": 1}, "min_tokens (1) and is no bad"),
    ],
)
def test_bad_words_that_leave_no_token_to_draw_are_refused(
    processor: InputProcessor, params: dict[str, Any], limit: str
) -> None:
    error = refused(processor, **params)
    assert error.parameter == "allowed_token_ids"
    assert limit in str(error)
    processor.process("Hi", SamplingParams(**{**params, "bad_words": ["a!"]}))


# ------------------------------------------------------------------------------------------------- the truncation
@pytest.mark.parametrize("num_kept", [1, 2, 3, 50])
def test_the_last_tokens_of_a_prompt_are_kept(processor: InputProcessor, num_kept: int) -> None:
    params = SamplingParams(truncate_prompt_tokens=num_kept)
    whole = processor.process("abc").prompt_token_ids
    assert len(whole) == 4  # with its BOS, which is counted and cut like any other
    assert processor.process("abc", params).prompt_token_ids == whole[-num_kept:]
    assert processor.process(whole, params).prompt_token_ids == whole[-num_kept:]


def test_a_truncated_prompt_leaves_the_rest_of_the_context(processor: InputProcessor) -> None:
    request = processor.process(range(1, 200), SamplingParams(truncate_prompt_tokens=30)).requests[0]
    assert request.prompt_token_ids == list(range(170, 200))
    assert request.sampling.max_tokens == 70


@pytest.mark.parametrize(("max_tokens", "num_kept"), [(None, 99), (1, 99), (40, 60), (99, 1)])
def test_minus_one_keeps_what_leaves_max_tokens(
    processor: InputProcessor, max_tokens: int | None, num_kept: int
) -> None:
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=max_tokens)
    request = processor.process([3] * 150, params).requests[0]
    assert len(request.prompt_token_ids) == num_kept
    assert request.sampling.max_tokens == (max_tokens or 1)
    assert processor.process([3], params).prompt_token_ids == [3]


def test_minus_one_keeps_what_fits_the_kv_blocks(processor: InputProcessor) -> None:
    processor.set_info(engine_info(max_model_len=100, num_blocks=4, block_size=16))
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=10)
    assert len(processor.process([3] * 150, params).prompt_token_ids) == 54


def test_a_text_that_could_not_fit_is_cut_instead_of_refused(processor: InputProcessor) -> None:
    text = "x" * 5000
    with pytest.raises(PromptTooLongError):
        processor.process(text)
    assert processor.process(text, SamplingParams(truncate_prompt_tokens=-1)).prompt_token_ids == [120] * 99
    assert not processor.is_long(text)
    assert processor.is_long(text, truncates=True)  # it is encoded as a whole


@pytest.mark.parametrize("value", [0, -2, 1.5, True, "3"])
def test_a_truncation_to_nothing_is_refused(value: Any) -> None:
    with pytest.raises(InvalidParameterError, match="at least 1, or -1") as caught:
        SamplingParams(truncate_prompt_tokens=value)
    assert caught.value.parameter == "truncate_prompt_tokens"


def test_a_truncation_to_more_than_fits_is_refused(processor: InputProcessor) -> None:
    processor.process("Hi", SamplingParams(truncate_prompt_tokens=99))
    error = refused(processor, truncate_prompt_tokens=100)
    assert (error.parameter, error.value) == ("truncate_prompt_tokens", 100)
    assert "at most 99" in str(error)


def test_max_tokens_that_leave_no_prompt_are_refused(processor: InputProcessor) -> None:
    error = refused(processor, truncate_prompt_tokens=-1, max_tokens=100)
    assert (error.parameter, error.value) == ("max_tokens", 100)
    assert "at most 99 with truncate_prompt_tokens=-1" in str(error)


def test_ids_that_are_cut_are_not_looked_at_but_those_kept_are(processor: InputProcessor) -> None:
    params = SamplingParams(truncate_prompt_tokens=2)
    assert processor.process([9999, 1, 2], params).prompt_token_ids == [1, 2]
    with pytest.raises(InvalidParameterError, match=re.escape("prompt[1] is 9999")):
        processor.process([1, 2, 9999], params)


# ------------------------------------------------------------------------------------------ the requested logprobs
@pytest.mark.parametrize(("logprobs", "sent"), [(None, 0), (0, 0), (3, 3)])
def test_requested_ids_reach_the_engine(processor: InputProcessor, logprobs: int | None, sent: int) -> None:
    found = sampling(processor, logprobs=logprobs, logprob_token_ids=[9, 5])
    assert (found.logprobs, found.logprob_token_ids) == (sent, [9, 5])


@pytest.mark.parametrize("ids", [[], [-1], [1.5], 5, [1] * 129])
def test_requested_ids_that_are_none_are_refused(ids: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(logprob_token_ids=ids)
    assert caught.value.parameter == "logprob_token_ids"
    assert caught.value.limit


def test_requested_ids_beyond_the_vocabulary_are_refused(processor: InputProcessor) -> None:
    assert refused(processor, logprob_token_ids=[5, 260]).value == 260


# ----------------------------------------------------------------------------------------- the repetition detection
@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        ("max_pattern_size", 0, {}),
        ("max_pattern_size", 257, {}),
        ("max_pattern_size", "5", {}),
        ("min_pattern_size", 0, {}),
        ("min_pattern_size", 6, {"max_pattern_size": 5}),
        ("min_count", 1, {}),
        ("min_count", 1025, {}),
    ],
)
def test_a_repetition_out_of_range_is_refused(field: str, value: Any, others: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        RepetitionDetectionParams(**{"max_pattern_size": 9, "min_count": 3, **others, field: value})
    assert caught.value.parameter == field
    assert caught.value.limit


@pytest.mark.parametrize("value", [True, 5, {"max_pattern_size": 5, "min_count": 3}])
def test_another_thing_is_no_repetition(value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(repetition_detection=value)
    assert caught.value.parameter == "repetition_detection"


def test_a_repetition_reaches_the_engine(processor: InputProcessor) -> None:
    found = sampling(processor, repetition_detection=RepetitionDetectionParams(max_pattern_size=20, min_count=3)).rare
    assert found is not None
    assert found.repetition == (1, 20, 3)
    assert sampling(processor).rare is None
