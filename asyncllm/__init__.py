"""Run large language models inside your own asyncio or trio application.

    async with AsyncLLM("path/to/model") as llm:
        async for token in llm.stream("The capital of France is", max_tokens=32):
            print(token, end="")

Public names are resolved on first use, so that ``import asyncllm`` loads next to nothing, and never torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncllm import errors as errors
    from asyncllm.async_llm import AsyncLLM, run
    from asyncllm.config import EngineConfig
    from asyncllm.errors import (
        AsyncLLMError,
        ChatTemplateError,
        CheckpointError,
        ConfigError,
        DuplicateRequestError,
        EngineDeadError,
        EngineError,
        EngineStartError,
        EngineStartTimeoutError,
        InsufficientMemoryError,
        InvalidParameterError,
        MissingDependencyError,
        ModelError,
        ModelNotFoundError,
        PromptTooLongError,
        RequestError,
        RequestFailedError,
        RequestTooLargeError,
        UnknownParameterError,
        UnsupportedModelError,
        UsageError,
        UtilityError,
    )
    from asyncllm.llm import LLM
    from asyncllm.llm_engine import LLMEngine, RequestOutput
    from asyncllm.outputs import (
        Channel,
        Completion,
        FinishReason,
        InvalidToolCall,
        Logprob,
        TokenDelta,
        TokenLogprobs,
        ToolCall,
        ToolCallDelta,
        Usage,
    )
    from asyncllm.prefix import Prefix
    from asyncllm.sampling_params import RepetitionDetectionParams, SamplingParams
    from asyncllm.token_stream import Branches, TokenStream

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMError",
    "Branches",
    "Channel",
    "ChatTemplateError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DuplicateRequestError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineStartError",
    "EngineStartTimeoutError",
    "FinishReason",
    "InsufficientMemoryError",
    "InvalidParameterError",
    "InvalidToolCall",
    "LLMEngine",
    "Logprob",
    "MissingDependencyError",
    "ModelError",
    "ModelNotFoundError",
    "Prefix",
    "PromptTooLongError",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestFailedError",
    "RequestOutput",
    "RequestTooLargeError",
    "SamplingParams",
    "TokenDelta",
    "TokenLogprobs",
    "TokenStream",
    "ToolCall",
    "ToolCallDelta",
    "UnknownParameterError",
    "UnsupportedModelError",
    "Usage",
    "UsageError",
    "UtilityError",
    "run",
]

_MODULE_TO_NAMES = {
    "async_llm": ("AsyncLLM", "run"),
    "config": ("EngineConfig",),
    "llm": ("LLM",),
    "llm_engine": ("LLMEngine", "RequestOutput"),
    "outputs": (
        "Channel",
        "Completion",
        "FinishReason",
        "InvalidToolCall",
        "Logprob",
        "TokenDelta",
        "TokenLogprobs",
        "ToolCall",
        "ToolCallDelta",
        "Usage",
    ),
    "prefix": ("Prefix",),
    "sampling_params": ("RepetitionDetectionParams", "SamplingParams"),
    "token_stream": ("Branches", "TokenStream"),
}
_NAME_TO_MODULE = {name: module for module, names in _MODULE_TO_NAMES.items() for name in names}

logging.getLogger("asyncllm").addHandler(logging.NullHandler())  # silent unless the application asks


def __getattr__(name: str) -> Any:
    if name == "errors":  # `except asyncllm.errors.RequestError` without an import of the module
        return importlib.import_module("asyncllm.errors")
    if name not in __all__:
        raise AttributeError(f"module 'asyncllm' has no attribute {name!r}")
    module = importlib.import_module("asyncllm." + _NAME_TO_MODULE.get(name, "errors"))
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "errors"})
