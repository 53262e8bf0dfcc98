"""The command line: ``python -m asyncllm chat MODEL``, ``generate MODEL PROMPT``, ``info MODEL``.

Answers go to stdout, everything else to stderr. Synchronous on purpose: Ctrl-C is then a plain KeyboardInterrupt, which
ends the answer that is being written, and at the prompt the program. Every error of this package is one line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from asyncllm.checkpoint import check_runnable, open_checkpoint
from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError, ConfigError, InvalidParameterError, UnsupportedModelError
from asyncllm.kernels.selector import describe_kernels
from asyncllm.llm_engine import LLMEngine
from asyncllm.outputs import Channel

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from asyncllm.checkpoint import Checkpoint
    from asyncllm.config import CacheConfig
    from asyncllm.outputs import Completion, TokenDelta, Usage
    from asyncllm.wire.messages import EngineInfo

__all__ = ["main"]

DIM, NORMAL = "\033[2m", "\033[0m"
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended, as shells count it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (default: those of the process) name, and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except AsyncLLMError as error:
        _tell(f"asyncllm: error: {error}")
        return 1
    except KeyboardInterrupt:
        _tell("")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the answer has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m asyncllm", description="Run a language model on this machine.")
    commands = parser.add_subparsers(required=True, metavar="chat | generate | info")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("model", help="Hugging Face folder, .gguf file, or id in the local Hugging Face cache")
    common.add_argument(
        "-o",
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine option, such as num_threads=4",
    )
    sampling = argparse.ArgumentParser(add_help=False)
    sampling.add_argument("--max-tokens", type=int, default=512, metavar="N", help="most tokens of an answer (512)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0: always the most likely token")
    sampling.add_argument("--top-p", type=float, metavar="P")
    sampling.add_argument("--top-k", type=int, metavar="K")
    sampling.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same answer")
    sampling.add_argument("--stats", action="store_true", help="after an answer, show what it cost: tokens and times")

    chat = commands.add_parser("chat", parents=[common, sampling], help="talk to the model in this terminal")
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    chat.add_argument("--tools", metavar="FILE", help="JSON list of functions; you type in what a call returns")
    chat.set_defaults(command=_chat)
    generate = commands.add_parser("generate", parents=[common, sampling], help="continue a text")
    generate.add_argument("prompt", help="the text; - reads it from stdin")
    generate.set_defaults(command=_generate)
    info = commands.add_parser("info", parents=[common], help="show what a checkpoint is and how it would be run")
    info.add_argument(
        "--start", action="store_true", help="start the engine, and show what it found and how long it took"
    )
    info.set_defaults(command=_info)
    return parser


# ------------------------------------------------------------------------------------------------------------- commands
def _chat(options: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 # pyright: ignore[reportUnusedImport] - line editing for input()
    messages: list[dict[str, Any]] = []
    if options.system:
        messages.append({"role": "system", "content": options.system})
    tools = _read_tools(options.tools)
    with _start(options) as engine:
        _tell("Ctrl-C stops an answer; at the prompt it leaves.")
        while True:
            try:
                asked = _ask(messages)
            except EOFError:
                _tell("")
                return 0
            if not asked:
                continue
            try:
                request_id = engine.add_chat_request([*messages, *asked], tools=tools, **_sampling(options))
            except AsyncLLMError as error:  # this question only: it may be too long
                _tell(f"error: {error}")
                continue
            messages += [*asked, _write(engine, request_id, options).to_message()]


def _read_tools(path: str | None) -> list[Any] | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=list[Any])
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidParameterError(
            f"--tools {path!r} is no JSON list of tools: {error}", parameter="tools", value=path
        ) from error


def _ask(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the next messages as typed in: a question, or a result for each call that waits for one; none if empty.

    :raises EOFError: the input is over.
    """
    calls: list[dict[str, Any]] = messages[-1].get("tool_calls", []) if messages else []
    if not calls:
        question = input("> " if sys.stdin.isatty() else "")
        return [{"role": "user", "content": question}] if question.strip() else []
    results: list[dict[str, Any]] = []
    for call in calls:
        name = call["function"]["name"]
        content = input(f"{name} returns> " if sys.stdin.isatty() else "")
        results.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})
    return results


def _generate(options: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with _start(options) as engine:
        completion = _write(engine, engine.add_request(prompt, **_sampling(options)), options)
    return INTERRUPTED if completion.finish_reason == "abort" else 0


def _info(options: argparse.Namespace) -> int:
    config = EngineConfig.from_options(options.model, **_engine_options(options))
    quantization = config.model.quantization
    checkpoint = open_checkpoint(options.model)
    _table(
        "checkpoint",
        {
            "path": checkpoint.path,
            "format": checkpoint.format,
            "architecture": checkpoint.architecture,
            "weights": _weights(checkpoint),
            "vocabulary": checkpoint.vocab_size,
            "context": checkpoint.max_position,
            "end of sequence": ", ".join(map(str, checkpoint.eos_token_ids)) or "none",
            "chat template": "yes" if checkpoint.tokenizer_config.get("chat_template") else "no",
        },
    )
    if config.parallel.runs_own_models:
        try:
            check_runnable(checkpoint)
        except UnsupportedModelError as error:
            _tell(f"cannot run: {error}")
            return 1
    if options.start:
        with _start(options) as engine:
            _show_engine(engine.info)
    else:
        _table(
            "engine",
            {
                "device": config.device.device,
                "arithmetic": config.model.dtype,
                "attention": config.device.attention_backend,
                "CUDA graphs": "off" if config.device.enforce_eager else "on a GPU",
                "kernels": describe_kernels() + (f", quantization {quantization}" if quantization else ""),
                "context": config.model.max_model_len or checkpoint.max_position,
                "KV block": f"{_tokens_per_block(config.cache)}, {config.cache.kv_cache_dtype}",
                "running at once": config.scheduler.max_num_seqs,
                "tokens per step": config.scheduler.max_num_batched_tokens,
                "steps overlap": _yes_no(config.scheduler.async_scheduling),
                "prompt lookup": _lookup(config.scheduler.prompt_lookup_num_tokens),
            },
        )
        _tell("auto is decided when the engine starts: info --start tells what is taken, and why")
    return 0


def _tokens_per_block(cache: CacheConfig) -> str:
    return "as the attention backend wants" if cache.block_size is None else f"{cache.block_size} tokens"


def _weights(checkpoint: Checkpoint) -> str:
    """Return how the weights are stored: the dtype, or the tensor types of a GGUF file by their share of its bytes."""
    if checkpoint.gguf is None:
        return checkpoint.dtype or "not said"
    sizes = Counter[str]()
    for tensor in checkpoint.gguf.tensors.values():
        sizes[tensor.type_name] += tensor.num_bytes
    shares = {name: num_bytes / sizes.total() for name, num_bytes in sizes.most_common()}
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def _yes_no(value: bool | str) -> str:
    return value if isinstance(value, str) else "yes" if value else "no"


def _lookup(num_tokens: int) -> str:
    return f"{num_tokens} tokens" if num_tokens else "for requests that ask"


def _show_engine(info: EngineInfo) -> None:
    sizes = info.graph_sizes
    _table(
        "engine",
        {
            "device": info.device + (f" ({info.device_reason})" if info.device_reason else ""),
            "arithmetic": info.dtype,
            "attention": info.attention_backend,
            **{f"  not {name}": reason for name, reason in info.other_backends.items()},
            "kernels": info.kernels,
            "CUDA graphs": f"of {len(sizes)} sizes, up to {max(sizes)} rows" if sizes else "none",
            "context": info.max_model_len,
            "KV blocks": f"{info.num_blocks} of {info.block_size} tokens, {info.kv_cache_bytes / 2**20:.0f} MiB"
            + (f" of {info.kv_cache_dtype}" if info.kv_cache_dtype else ""),
            "running at once": info.max_num_seqs,
            "tokens per step": info.max_num_batched_tokens,
            "steps overlap": _yes_no(info.async_scheduling),
            "prompt lookup": _lookup(info.prompt_lookup_num_tokens)
            + f", in steps of up to {info.prompt_lookup_step_tokens} tokens",
        },
    )
    if info.memory_plan:
        _table("memory, MiB", {name: f"{num_bytes / 2**20:.0f}" for name, num_bytes in info.memory_plan.items()})
    _table("start-up, seconds", {name: f"{seconds:.2f}" for name, seconds in info.phase_to_seconds.items()})


# ----------------------------------------------------------------------------------------------------------- the engine
def _start(options: argparse.Namespace) -> LLMEngine:
    begun = time.perf_counter()
    with _progress_line() as show:
        engine = LLMEngine(options.model, on_progress=show, **_engine_options(options))
    seconds = {
        name: s for name, s in engine.info.phase_to_seconds.items() if s >= 0.1 and name not in ("engine", "total")
    }
    phases = ", ".join(f"{name} {s:.1f}" for name, s in seconds.items())
    _tell(f"ready in {time.perf_counter() - begun:.1f} s" + (f" ({phases})" if phases else ""))
    return engine


class _ProgressLine:
    """Shows the phase of the start-up: in place on a terminal, else a line per phase."""

    def __init__(self) -> None:
        self._in_place = sys.stderr.isatty()
        self._phase = ""

    def __call__(self, phase: str, fraction: float | None) -> None:
        if self._in_place:
            done = "" if fraction is None else f" {fraction:.0%}"
            sys.stderr.write(f"\r\033[Kstarting: {phase}{done}")
            sys.stderr.flush()
        elif phase != self._phase:
            _tell(f"starting: {phase}")
        self._phase = phase

    def clear(self) -> None:
        if self._in_place:
            sys.stderr.write("\r\033[K")


@contextlib.contextmanager
def _progress_line() -> Generator[_ProgressLine]:
    line = _ProgressLine()
    try:
        yield line
    finally:
        line.clear()


def _write(engine: LLMEngine, request_id: str, options: argparse.Namespace) -> Completion:
    """Write the answer as it comes and the speed after it, or all of its usage; KeyboardInterrupt ends the answer."""
    while engine.has_unfinished_requests():
        try:
            completion = _write_step(engine)
        except KeyboardInterrupt:
            engine.abort_request(request_id)  # a second one, from here on, is not caught
            completion = None
        if completion is not None:
            _tell(_speed(completion))
            if options.stats:
                _table("usage", _usage(completion.usage), sys.stderr)
            return completion
    raise KeyboardInterrupt  # it came between the last step and the writing of it


def _write_step(engine: LLMEngine) -> Completion | None:
    for output in engine.step():
        for delta in output.deltas:
            _write_delta(delta)
        if output.completion is not None:
            sys.stdout.write("\n")
        sys.stdout.flush()
        if output.error is not None:
            raise output.error
        if output.completion is not None:
            return output.completion
    return None


def _write_delta(delta: TokenDelta) -> None:
    """Write content to stdout as it comes, a tool call once it is whole, reasoning to stderr and dimmed there."""
    told = delta.tool_call
    if delta.channel is Channel.CONTENT:
        sys.stdout.write(delta.text)
    elif delta.channel is Channel.REASONING:
        sys.stdout.flush()
        sys.stderr.write(f"{DIM}{delta.text}{NORMAL}" if sys.stderr.isatty() else delta.text)
        sys.stderr.flush()
    if told is not None and told.call is not None:
        arguments = ", ".join(f"{name}={_json(value)}" for name, value in told.call.arguments.items())
        sys.stdout.write(f"\n→ {told.call.name}({arguments})")
    elif told is not None and told.invalid is not None:
        sys.stdout.write(f"\n→ {told.invalid.text}")
        _tell(f"a call that cannot be read: {told.invalid.error}")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _speed(completion: Completion) -> str:
    usage = completion.usage
    text = f"[{usage.completion_tokens} tokens"
    if usage.time_to_first_token_s is not None and usage.total_time_s is not None:
        decoding_s = usage.total_time_s - usage.time_to_first_token_s
        if usage.completion_tokens > 1 and decoding_s > 0:
            text += f", {(usage.completion_tokens - 1) / decoding_s:.1f} tokens/s"
        text += f", first after {usage.time_to_first_token_s:.2f} s"
    return f"{text}, {completion.finish_reason}]"


def _usage(usage: Usage) -> dict[str, Any]:
    """Return every field of ``usage`` in words; what is not known is left out."""
    seconds = {
        "queue": usage.queue_time_s,
        "prefill": usage.prefill_time_s,
        "first token": usage.time_to_first_token_s,
        "total": usage.total_time_s,
    }
    return {
        "prompt": f"{usage.prompt_tokens} tokens, {usage.cached_tokens} of them cached",
        "generated": f"{usage.completion_tokens} tokens, {usage.accepted_draft_tokens} of them drafted",
        **({"drafts": f"{usage.proposed_draft_tokens} proposed"} if usage.proposed_draft_tokens else {}),
        "preemptions": usage.num_preemptions,
        **{name: f"{value * 1e3:.1f} ms" for name, value in seconds.items() if value is not None},
    }


# ------------------------------------------------------------------------------------------------------------- plumbing
def _sampling(options: argparse.Namespace) -> Any:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _engine_options(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in options.option:
        name, has_value, value = text.partition("=")
        if not has_value:
            raise ConfigError(f"-o {text}: write NAME=VALUE, such as num_threads=4", parameter=name)
        try:
            found[name] = msgspec.json.decode(value)  # 4, 0.5, true, null, {...}
        except msgspec.DecodeError:
            found[name] = value
    return found


def _table(title: str, rows: dict[str, Any], file: TextIO | None = None) -> None:
    """Print ``rows`` below ``title``, to stdout or ``file``."""
    width = max(map(len, rows))
    print(title, file=file)
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value}", file=file)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
