"""An executor without a model: it plays the worker's part of every step and draws the tokens that a script names.

No torch. Invariant: the token at output position i of a request depends only on its prompt, its sample index and i,
never on batch, chunking, preemption or cache hits - as with a real model, so that any difference between two runs is
the engine's fault. It checks what the scheduler sends it, and raises :class:`ScriptError` where a real worker would
corrupt memory.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from asyncllm.checkpoint import open_checkpoint
from asyncllm.executor.base import Executor, ExecutorInfo, PendingStep, ReportProgress
from asyncllm.testing.tiny_checkpoint import EOS
from asyncllm.wire.messages import EngineSampling, LogprobRows
from asyncllm.wire.step import ModelRunnerOutput, NewRequest, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncllm.config import EngineConfig

__all__ = ["ScriptError", "ScriptedExecutor"]

DEFAULT_NUM_BLOCKS = 4096
HISTORY_LENGTH = 2_000


class ScriptError(RuntimeError):
    """A step contradicts the protocol between scheduler and worker, or a script cannot be played."""


class _Row:
    """One slot of the persistent batch."""

    __slots__ = ("blocks", "computed", "drafts", "known", "num_prompt", "prompt", "reply", "request_id", "sampling")

    def __init__(self, new: NewRequest, reply: list[int]) -> None:
        self.request_id = new.request_id
        self.prompt = new.token_ids[: new.num_prompt_tokens]
        self.num_prompt = new.num_prompt_tokens
        self.known = len(new.token_ids)
        self.computed = new.num_computed_tokens
        self.blocks = list(new.block_ids)
        self.sampling = new.sampling
        self.reply = reply
        self.drafts: Sequence[int] = ()  # in the step that runs


class _Step:
    """A launched step; ``result`` returns once its time is over and the gate is open."""

    __slots__ = ("gate_path", "output", "ready_at")

    def __init__(self, output: ModelRunnerOutput, ready_at: float, gate_path: str | None) -> None:
        self.output = output
        self.ready_at = ready_at
        self.gate_path = gate_path

    def result(self) -> ModelRunnerOutput:
        while self.gate_path is not None and os.path.exists(self.gate_path):
            time.sleep(0.001)
        left = self.ready_at - time.monotonic()
        if left > 0:
            time.sleep(left)
        return self.output


class ScriptedExecutor(Executor):
    """Answers from a script; ``AsyncLLM(path, executor="asyncllm.testing.ScriptedExecutor", executor_options={...})``.

    What is drawn (the first that applies):

    ``replies``: ``{key: reply}``
        ``key`` (text, as UTF-8 bytes) is looked for in the prompt's ids; of several, the one that ends last wins, of
        those the longest - so with a chat history the last message decides. ``reply``: a text, a list of token ids,
        or a list of texts, one per sample of n. The end-of-sequence id follows, again and again if the request
        ignores it.
    ``scripts``: ``[[prompt_ids, reply], ...]``
        The same with keys of token ids: ``[[[72], [1, 2, 3]]]`` answers each prompt that contains id 72.
    ``tokens``: ``[ids]``
        Emitted in a circle, for ever.
    otherwise
        The prompt is echoed, then the end-of-sequence id.

    Under a grammar (``schema``, ``regex`` …) a token that may not come next is replaced by the lowest id that may.

    How it goes:

    ``step_ms``, ``start_ms``: a step, or the start, takes this long. ``gate_path``: no step ends while this file
    exists. ``fail_at_start``: the start raises a RuntimeError with this text. ``fail_at_step``: step number k (from
    1) raises. ``exit_at_step``: the process ends in step k without a word. ``fail_request``: ``[prompt_ids or text,
    position]``: a request whose prompt contains this has no finite logits at that output position.

    Through ``llm.collective_rpc``: ``history`` (one dict per step, the last 2,000), ``clear_history``, ``set_script``
    (new options from now on: ``await llm.collective_rpc("set_script", {"step_ms": 50})``), ``rows`` (requests that hold
    a slot), ``echo`` (its arguments), ``fail`` (raises RuntimeError with its argument), ``sleep_ms``. ``sleep`` and
    ``wake_up`` play a worker that forgets its KV blocks; use ``llm.sleep()`` and ``llm.wake_up()``.
    """

    def __init__(self, config: EngineConfig, report: ReportProgress) -> None:
        super().__init__(config, report)
        self._rows: dict[int, _Row] = {}
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_LENGTH)
        self._num_steps = 0
        self._sleep_level = 0
        self._busy_until = 0.0  # steps run one after the other
        self._eos = EOS
        self._vocab_size = 0
        self.set_script(config.parallel.executor_options)

    # ------------------------------------------------------------------------------------------- the Executor's part
    def overlaps_steps(self) -> bool:
        """Return the option ``async_scheduling``; ``auto`` is off, on whatever machine this runs."""
        return self.config.scheduler.async_scheduling is True

    def start(self) -> ExecutorInfo:
        """Return the sizes from ``config.json`` and the options; no device is touched."""
        started = time.monotonic()
        self.report("load_model", None)
        checkpoint = open_checkpoint(self.config.model.model)
        if self._start_ms:
            time.sleep(self._start_ms / 1e3)
        if self._fail_at_start is not None:
            raise RuntimeError(self._fail_at_start)
        eos_token_ids = checkpoint.eos_token_ids
        self._eos = eos_token_ids[0] if eos_token_ids else EOS
        self._vocab_size = checkpoint.vocab_size
        num_blocks = self.config.cache.num_blocks or DEFAULT_NUM_BLOCKS
        max_model_len = self.config.model.max_model_len or checkpoint.max_position
        return ExecutorInfo(
            max_model_len=min(max_model_len, num_blocks * self.config.cache.tokens_per_block),
            vocab_size=self._vocab_size,
            eos_token_ids=eos_token_ids,
            block_size=self.config.cache.tokens_per_block,
            num_blocks=num_blocks,
            kv_cache_bytes=0,
            device="scripted",
            dtype="none",
            attention_backend="none",
            phase_to_seconds={"load_model": time.monotonic() - started},
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Apply the difference, draw, and return the step; its result comes after ``step_ms``."""
        self._num_steps += 1
        if self._num_steps == self._exit_at_step:
            os._exit(1)
        if self._num_steps == self._fail_at_step:
            raise RuntimeError(f"scripted failure at step {self._num_steps}")
        self._apply_difference(scheduler_output)
        output = self._draw(scheduler_output)
        self._record(scheduler_output, output)
        self._busy_until = max(self._busy_until, time.monotonic()) + self._step_ms / 1e3
        return _Step(output, self._busy_until, self._gate_path)

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call one of the methods named in :class:`ScriptedExecutor`; the list has one value."""
        if method not in _RPC_METHODS:
            raise AttributeError(f"ScriptedExecutor has no method {method!r}; it has {sorted(_RPC_METHODS)}")
        return [getattr(self, method)(*args, **(kwargs or {}))]

    def shutdown(self) -> None:
        """Forget everything."""
        self._rows.clear()
        self._history.clear()

    def check_health(self) -> None:
        """Return: a script is always well."""

    # ------------------------------------------------------------------------------------------ through collective_rpc
    def history(self) -> list[dict[str, Any]]:
        """Return per step: id, requests, tokens scheduled, tokens drawn, admitted requests, freed slots."""
        return list(self._history)

    def clear_history(self) -> None:
        """Forget the steps so far."""
        self._history.clear()

    def rows(self) -> dict[int, int]:
        """Return slot → request id of the rows held now."""
        return {slot: row.request_id for slot, row in self._rows.items()}

    def set_script(self, options: Mapping[str, Any]) -> None:
        """Play ``options`` from now on; a request that is running keeps its reply, step counts go on from here as 1."""
        known = {
            "replies", "scripts", "tokens", "step_ms", "start_ms", "gate_path", "fail_at_start", "fail_at_step",
            "exit_at_step", "fail_request",
        }  # fmt: skip
        if unknown := options.keys() - known:
            raise ScriptError(f"there is no script option {sorted(unknown)}; there are {sorted(known)}")
        self._scripts: list[tuple[str, Any]] = [
            *((_as_key(key.encode()), reply) for key, reply in options.get("replies", {}).items()),
            *((_as_key(key), reply) for key, reply in options.get("scripts", ())),
        ]
        self._tokens: list[int] = list(options.get("tokens") or ())
        self._step_ms: float = options.get("step_ms", 0)
        self._start_ms: float = options.get("start_ms", 0)
        self._gate_path: str | None = options.get("gate_path")
        self._fail_at_start: str | None = options.get("fail_at_start")
        self._fail_at_step: int | None = options.get("fail_at_step")
        self._exit_at_step: int | None = options.get("exit_at_step")
        self._fail_key, self._fail_position = _failing_request(options.get("fail_request"))
        self._num_steps = 0

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        """Return the arguments."""
        return {"args": list(args), "kwargs": kwargs} if kwargs else list(args)

    def fail(self, message: str = "scripted failure") -> None:
        """Raise RuntimeError(message)."""
        raise RuntimeError(message)

    def sleep_ms(self, duration_ms: float) -> float:
        """Block the engine's busy loop for this long."""
        time.sleep(duration_ms / 1e3)
        return duration_ms

    def start_profile(self, directory: str = "") -> None:
        """Do nothing: there is nothing to profile."""

    def stop_profile(self) -> list[str]:
        """Return no trace files."""
        return []

    def sleep(self, level: int = 1) -> None:
        """Forget all rows, as a worker forgets its KV blocks; no step may come until :meth:`wake_up`."""
        self._rows.clear()
        self._sleep_level = max(self._sleep_level, level)

    def wake_up(self) -> None:
        """Take steps again."""
        self._sleep_level = 0

    # ----------------------------------------------------------------------------------------------- the worker's part
    def _apply_difference(self, step: SchedulerOutput) -> None:
        rows = self._rows
        if self._sleep_level:
            raise ScriptError(f"step {step.step_id} comes while the workers sleep")
        for slot in step.freed_slots:
            if rows.pop(slot, None) is None:
                raise ScriptError(f"step {step.step_id} frees slot {slot}, which is empty")
        for new in step.new_requests:
            if new.slot in rows:
                raise ScriptError(
                    f"step {step.step_id} gives slot {new.slot} to request {new.request_id}, "
                    f"but request {rows[new.slot].request_id} holds it"
                )
            if not new.num_computed_tokens < len(new.token_ids):
                raise ScriptError(f"request {new.request_id} has nothing left to compute")
            rows[new.slot] = _Row(new, self._reply(new))
        for slot, block_ids in zip(step.block_slots, step.block_ids, strict=True):
            rows[slot].blocks.extend(block_ids)
        for slot, num_computed in zip(step.rewound_slots, step.rewound_num_computed, strict=True):
            rows[slot].computed, rows[slot].known = num_computed, num_computed + 1
        for slot, drafts in zip(step.draft_slots, step.draft_token_ids, strict=True):
            rows[slot].drafts = drafts
            rows[slot].known += len(drafts)
        if step.new_requests or step.copied_blocks:
            self._check_copies(step)

    def _check_copies(self, step: SchedulerOutput) -> None:
        """Raise unless each copy goes to the block of a new request that holds what it has beyond whole blocks."""
        size = self.config.cache.tokens_per_block
        begun = [new for new in step.new_requests if new.num_computed_tokens % size]
        targets = {new.block_ids[new.num_computed_tokens // size] for new in begun}
        if set(step.copied_blocks[1::2]) != targets:
            raise ScriptError(f"step {step.step_id} copies blocks {step.copied_blocks}; wanted are copies to {targets}")

    def _draw(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = ModelRunnerOutput(step.step_id, [])
        block_size = self.config.cache.tokens_per_block
        for slot, num_scheduled in zip(step.slots, step.num_scheduled_tokens, strict=True):
            row = self._rows.get(slot)
            if row is None:
                raise ScriptError(f"step {step.step_id} runs slot {slot}, which is empty")
            start = row.computed
            row.computed += num_scheduled
            if num_scheduled < 1 or row.computed > row.known:
                raise ScriptError(f"request {row.request_id}: {num_scheduled} tokens from {start} of {row.known}")
            if row.computed > len(row.blocks) * block_size:
                raise ScriptError(f"request {row.request_id}: {row.computed} tokens in {len(row.blocks)} blocks")
            if row.sampling.prompt_logprobs >= 0 and start < row.num_prompt - 1:
                output.prompt_logprobs[slot] = self._prompt_rows(row, start)
            output.token_ids.append(self._next_token(slot, row, output) if row.computed == row.known else -1)
        for place, slot in enumerate(step.slots) if step.masks else ():
            if slot in step.masks and output.token_ids[place] >= 0:
                output.token_ids[place] = _allowed(output.token_ids[place], step.masks[slot])
        return output

    def _next_token(self, slot: int, row: _Row, output: ModelRunnerOutput) -> int:
        position = row.known - row.num_prompt
        if row.drafts:
            position -= len(row.drafts)
        row.known += 1
        if position == self._fail_position and self._fail_key in _as_key(row.prompt):
            output.failed[slot] = f"scripted: logits at output position {position} are not finite"
            row.drafts = ()
            return -1
        reply, tokens = row.reply, None
        if position < len(reply):
            token = reply[position]
        else:
            token = self._tokens[position % len(self._tokens)] if reply is self._tokens else self._eos
        if row.drafts:
            tokens = self._confirm(slot, row, position, token, output)
        if row.sampling.logprobs >= 0:
            tokens = tokens or [token]
            output.logprobs[slot] = self._candidates(tokens, row.sampling.logprobs, row.sampling.logprob_token_ids)
        return token

    def _confirm(self, slot: int, row: _Row, position: int, token: int, output: ModelRunnerOutput) -> list[int]:
        """Return ``token`` at ``position`` and those that follow it as far as the drafts are right."""
        tokens, reply = [token], row.reply
        fails_at = self._fail_position if self._fail_key in _as_key(row.prompt) else -1
        for draft in row.drafts:
            position += 1
            if draft != tokens[-1] or position == fails_at:
                break
            is_beyond = position >= len(reply)
            others = self._tokens[position % len(self._tokens)] if reply is self._tokens else self._eos
            tokens.append(others if is_beyond else reply[position])
        row.drafts = ()
        output.more_token_ids[slot] = tokens[1:]
        return tokens

    def _reply(self, new: NewRequest) -> list[int]:
        prompt = _as_key(new.token_ids[: new.num_prompt_tokens])
        best: tuple[int, int] = (-1, -1)
        found: Any = None
        for key, reply in self._scripts:
            at = prompt.rfind(key)
            if at >= 0 and (at + len(key), len(key)) > best:
                best, found = (at + len(key), len(key)), reply
        if found is not None:
            return _as_ids(found, new.sampling)
        if self._tokens:
            return self._tokens
        return new.token_ids[: new.num_prompt_tokens]

    def _candidates(self, token_ids: Sequence[int], num_top: int, requested: Sequence[int] = ()) -> LogprobRows:
        """Return made-up candidates: the drawn token is the most likely one, then its successors in the vocabulary."""
        rows = LogprobRows(1 + num_top + len(requested), [], [], [])
        for token in token_ids:
            top = [(token + i) % self._vocab_size for i in range(num_top)]
            steps = [(token_id - token) % self._vocab_size for token_id in requested]
            rows.token_ids += [token, *top, *requested]
            rows.logprobs += [-0.5, *(-0.5 - i for i in range(num_top)), *(-0.5 - i for i in steps)]
            rows.ranks += [1, *range(1, num_top + 1), *(i + 1 for i in steps)]
        return rows

    def _prompt_rows(self, row: _Row, start: int) -> LogprobRows:
        return self._candidates(row.prompt[start + 1 : row.computed + 1], row.sampling.prompt_logprobs)

    def _record(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        rows = self._rows
        self._history.append(
            {
                "step_id": step.step_id,
                "request_ids": [rows[slot].request_id for slot in step.slots],
                "num_scheduled_tokens": list(step.num_scheduled_tokens),
                "token_ids": list(output.token_ids),
                "more_token_ids": {rows[slot].request_id: ids for slot, ids in output.more_token_ids.items()},
                "new": [new.request_id for new in step.new_requests],
                "freed": list(step.freed_slots),
            }
        )


_RPC_METHODS = frozenset(
    {
        "history",
        "clear_history",
        "rows",
        "set_script",
        "echo",
        "fail",
        "sleep_ms",
        "start_profile",
        "stop_profile",
        "sleep",
        "wake_up",
    }
)


def _allowed(token: int, mask: bytes) -> int:
    """Return ``token`` if the mask allows it, else the lowest id that it does."""
    if mask[token >> 3] >> (token & 7) & 1:
        return token
    return next(8 * index + (byte & -byte).bit_length() - 1 for index, byte in enumerate(mask) if byte)


def _as_key(token_ids: Sequence[int]) -> str:
    """Return ids as a string of code points, so that searching a list in a list is ``str.find``."""
    return "".join(map(chr, token_ids))


def _as_ids(reply: Any, sampling: EngineSampling) -> list[int]:
    if isinstance(reply, (list, tuple)) and reply and isinstance(reply[0], str):
        texts = cast("Sequence[str]", reply)
        reply = texts[sampling.sample_index % len(texts)]
    return list(reply.encode()) if isinstance(reply, str) else [int(token) for token in cast("Sequence[int]", reply)]


def _failing_request(value: Any) -> tuple[str, int]:
    if value is None:
        return "", -1
    key, position = value
    return _as_key(key.encode() if isinstance(key, str) else key), position
