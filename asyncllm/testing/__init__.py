"""Test your own application without a model, without torch and without waiting.

:class:`ScriptedExecutor` stands where the model would: it honours the whole protocol between scheduler and worker
(slots, chunked prefill, preemption, logprobs), and answers with tokens that the test wrote down.
:func:`write_tiny_checkpoint` writes the folder that the front end needs (a config and a byte-level tokenizer, no
    weights),
and :func:`scripted_llm` puts both together::

    async with scripted_llm({"capital of France": "Paris."}) as llm:
        assert str(await llm.generate("What is the capital of France?")) == "Paris."

Everything else is the real thing: engine process, sockets, scheduler, KV blocks, detokenizer, streams.
"""

from __future__ import annotations

from asyncllm.testing.harness import SCRIPTED_EXECUTOR, scripted_llm, scripted_options
from asyncllm.testing.scripted_executor import ScriptedExecutor, ScriptError
from asyncllm.testing.tiny_checkpoint import BOS, EOS, IM_END, IM_START, TINY_VOCAB_SIZE, write_tiny_checkpoint

__all__ = [
    "BOS",
    "EOS",
    "IM_END",
    "IM_START",
    "SCRIPTED_EXECUTOR",
    "TINY_VOCAB_SIZE",
    "ScriptError",
    "ScriptedExecutor",
    "scripted_llm",
    "scripted_options",
    "write_tiny_checkpoint",
]
