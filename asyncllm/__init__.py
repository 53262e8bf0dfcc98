"""Run large language models inside your own asyncio or trio application.

Public names are resolved on first use, so that ``import asyncllm`` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncllm.async_llm import AsyncLLM, run
    from asyncllm.config import EngineConfig
    from asyncllm.errors import *  # noqa: F403
    from asyncllm.llm import LLM
    from asyncllm.llm_engine import LLMEngine
    from asyncllm.outputs import Completion, FinishReason, Logprob, TokenDelta, TokenLogprobs, Usage
    from asyncllm.sampling_params import SamplingParams
    from asyncllm.token_stream import TokenStream
