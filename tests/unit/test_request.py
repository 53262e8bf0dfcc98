"""What the facades share: keywords equal to the sampling parameters, and how options become a configuration."""

from __future__ import annotations

import gc
import inspect
import typing
from pathlib import Path
from unittest.mock import Mock

import pytest

from asyncllm._request import ChatRequest, PromptRequest, SamplingOptions, make_config, make_params
from asyncllm.async_llm import AsyncLLM, run
from asyncllm.config import EngineConfig
from asyncllm.errors import ConfigError, InvalidParameterError, UsageError
from asyncllm.llm import LLM
from asyncllm.llm_engine import LLMEngine
from asyncllm.sampling_params import SamplingParams


def test_the_keywords_are_the_sampling_parameters() -> None:
    expected = typing.get_type_hints(SamplingParams)
    assert typing.get_type_hints(SamplingOptions) == {name: expected[name] for name in SamplingParams.__struct_fields__}


@pytest.mark.parametrize(
    "method",
    [AsyncLLM.stream, AsyncLLM.generate, AsyncLLM.chat, LLM.generate, LLM.chat, LLMEngine.add_request],
)
def test_every_facade_takes_them(method: object) -> None:
    parameters = inspect.signature(method).parameters  # type: ignore[arg-type]
    assert parameters["sampling"].annotation == "Unpack[SamplingOptions]"


def test_run_takes_a_function_where_no_loop_runs() -> None:
    async def main() -> int:
        return 3

    async def nested() -> None:
        with pytest.raises(UsageError, match=r"a loop is running here .*write `await main\(\)`"):
            run(main)

    with pytest.raises(UsageError, match="pass the function, not its call"):
        run(main())  # type: ignore[arg-type] # and no "never awaited", which would be an error here
    gc.collect()
    assert run(main) == 3
    run(nested)


def test_params_come_as_an_object_or_as_keywords() -> None:
    params = SamplingParams(max_tokens=3)
    assert make_params(params, {}) is params
    assert make_params(None, {"max_tokens": 3}) == params
    with pytest.raises(TypeError, match="not both"):
        make_params(params, {"max_tokens": 3})
    with pytest.raises(InvalidParameterError):
        make_params(None, {"max_tokens": 0})


def test_a_configuration_comes_as_an_object_or_as_options() -> None:
    config = make_config(Path("some") / "model", {"max_num_seqs": 3})
    assert config == EngineConfig.from_options("some/model", max_num_seqs=3)
    assert make_config(config, {}) is config
    with pytest.raises(ConfigError, match="max_num_seqs"):
        make_config(config, {"max_num_seqs": 3})


def test_a_chat_that_needs_its_template_compiled_is_long() -> None:
    inputs = Mock()
    inputs.is_long_chat.return_value = inputs.has_long_params.return_value = False
    request = ChatRequest(messages=[{"role": "user", "content": "x"}], params=SamplingParams())
    inputs.chat.is_ready.return_value = False
    assert request.is_long(inputs)
    inputs.chat.is_ready.return_value = True
    assert not request.is_long(inputs)


def test_a_prompt_that_is_cut_is_long_whatever_its_length() -> None:
    """Its text is encoded as a whole, where a text too long for the model would be refused at once."""
    inputs = Mock()
    for num_kept, truncates in ((None, False), (-1, True), (5, True)):
        PromptRequest(prompt="x", params=SamplingParams(truncate_prompt_tokens=num_kept)).is_long(inputs)
        inputs.is_long.assert_called_with("x", truncates=truncates)
