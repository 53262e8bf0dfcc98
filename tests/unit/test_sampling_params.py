"""SamplingParams: what is refused when it is made, by name, value and limit."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from asyncllm import AsyncLLM
from asyncllm.errors import InvalidParameterError, UnknownParameterError
from asyncllm.sampling_params import RepetitionDetectionParams, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 257),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", 65),
        ("prompt_logprobs", -1),
        ("stop", 7),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("allowed_token_ids", []),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 0.5}),
        ("ignore_eos", 1),
        ("detokenize", "no"),
        ("spaces_between_special_tokens", 1),
        ("truncate_prompt_tokens", 0),
        ("bad_words", [""]),
        ("logprob_token_ids", [-1]),
    ],
)
def test_a_bad_value_is_named_with_its_limit(field: str, value: object) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.parameter == field
    assert caught.value.limit
    assert field in str(caught.value)


@pytest.mark.parametrize("stop", ["", [""], ["ok", ""], [3]])
def test_r41_an_empty_stop_string_is_refused(stop: object) -> None:
    with pytest.raises(InvalidParameterError, match="non-empty strings"):
        SamplingParams(stop=stop)  # type: ignore[arg-type]


def test_values_at_the_limits_are_taken() -> None:
    SamplingParams(
        n=256, temperature=0, top_p=1, top_k=0, min_p=1, seed=2**64 - 1, max_tokens=1, min_tokens=1, logprobs=0
    )


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    with pytest.raises(InvalidParameterError, match=r"at most max_tokens \(2\)"):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_a_bias_out_of_range_names_its_token() -> None:
    with pytest.raises(InvalidParameterError, match=r"logit_bias\[5\]"):
        SamplingParams(logit_bias={5: 101.0})


def test_stop_strings_need_detokenizing() -> None:
    with pytest.raises(InvalidParameterError, match="detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match=r"there is no sampling parameter 'best_of'$"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no sampling parameter"):
        RepetitionDetectionParams(max_pattern_size=3, min_count=2, n=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "meant"), [("max_new_tokens", "max_tokens"), ("temprature", "temperature"), ("topk", "top_k")]
)
def test_a_mistyped_field_names_the_one_that_is_meant(wrong: str, meant: str) -> None:
    given: Any = {wrong: 3}
    for call in (lambda: SamplingParams(**given), lambda: AsyncLLM("nowhere").stream("x", **given)):
        with pytest.raises(UnknownParameterError, match=f"{wrong!r}; did you mean {meant!r}") as caught:
            call()
        assert isinstance(caught.value, InvalidParameterError)
        assert isinstance(caught.value, TypeError)
        assert caught.value.parameter == wrong


def test_the_object_is_frozen_and_its_fields_are_not_rewritten() -> None:
    params = SamplingParams(stop="x", temperature=0)
    assert params.stop == "x"
    assert params.stop_strings == ["x"]
    with pytest.raises(AttributeError):
        params.n = 2  # type: ignore[misc]


HUGE = 10**5000
"""Python refuses to print it."""


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


UNPRINTABLE: dict[str, Any] = {
    "huge": HUGE,
    "list": [HUGE],
    "dict": {HUGE: 1.0},
    "bias": {1: HUGE},
    "object": Unprintable(),
    "surrogate": "\ud800",
    "none": [None],
}


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
@pytest.mark.parametrize("kind", UNPRINTABLE)
def test_no_value_breaks_the_check_of_a_field(name: str, kind: str) -> None:
    """Each is accepted or refused by the one typed error, which can be printed and sent."""
    caught: InvalidParameterError | None = None
    try:
        SamplingParams(**{name: UNPRINTABLE[kind]})
    except InvalidParameterError as error:
        caught = error
    if caught is not None:
        assert (caught.parameter or "").startswith(name)
        msgspec.msgpack.encode(caught.to_info())
