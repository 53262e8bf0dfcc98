"""From the text of a grammar to a matcher, on a thread of its own: the busy loop goes on meanwhile.

    submit ──thread──> compiled, or why not ──take──> (request, matcher or error)

Grammars are kept by content, so that of equal ones the first alone is compiled. Everything but the compiling itself
belongs to the busy loop's thread. Invariant: each submitted request is taken exactly once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from asyncllm.checkpoint import open_checkpoint
from asyncllm.errors import AsyncLLMError, InvalidParameterError, MissingDependencyError, RequestFailedError, shown
from asyncllm.structured.matcher import Matcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from llguidance import LLMatcher

    from asyncllm.config import EngineConfig
    from asyncllm.structured.vocabulary import Vocabulary
    from asyncllm.wire.messages import EngineCoreRequest, Grammar

__all__ = ["GrammarCompiler"]

MAX_KEPT = 256
"""Compiled grammars that are kept; of a schema of some properties one takes about 100 kB."""
MAX_SHOWN_CHARS = 500
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON on one line. Where white space is free, a small model may write it for ever."""


class GrammarCompiler:
    """Compiles the grammars of requests. ``on_ready`` is called, on any thread, whenever one can be taken."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._on_ready = on_ready
        self._thread = ThreadPoolExecutor(1, "asyncllm-grammar")
        self._vocabulary: Vocabulary | None = None  # made on the thread, with the first grammar
        self._kept: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._ready: deque[tuple[EngineCoreRequest, Future[LLMatcher]]] = deque()
        self._num_pending = 0
        self._wakeup = threading.Condition()

    @property
    def has_ready(self) -> bool:
        """Return whether :meth:`take` has something to give."""
        return bool(self._ready)

    def submit(self, request: EngineCoreRequest) -> None:
        """Have the grammar of ``request`` compiled, unless an equal one is or was."""
        grammar = request.sampling.grammar
        assert grammar is not None
        compiled = self._kept.get(grammar)
        if compiled is None:
            compiled = self._kept[grammar] = self._thread.submit(self._compile, grammar)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        self._num_pending += 1
        compiled.add_done_callback(lambda done: self._put(request, done))

    def take(self) -> Iterator[tuple[int, Matcher | AsyncLLMError]]:
        """Yield each request id whose grammar is there, with a matcher of its own or the reason why it has none."""
        while self._ready:
            request, compiled = self._ready.popleft()
            self._num_pending -= 1
            yield request.request_id, self._matcher_of(request, compiled)

    def wait(self) -> bool:
        """Block until something can be taken; ``False`` if nothing was submitted."""
        with self._wakeup:
            self._wakeup.wait_for(lambda: self._ready or not self._num_pending)
        return bool(self._ready)

    def shutdown(self) -> None:
        """End the thread, after the grammar that it is at."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    # -------------------------------------------------------------------------------------------------- on its thread
    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Return the compiled grammar.

        :raises InvalidParameterError: the library refuses it.
        """
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise MissingDependencyError(
                f"{grammar.parameter} needs the package llguidance: pip install 'llguidance>=1.7,<2'",
                package="llguidance",
            ) from error
        if self._vocabulary is None:
            from asyncllm.structured.vocabulary import load_vocabulary

            checkpoint = open_checkpoint(self._config.model.model)
            self._vocabulary = load_vocabulary(
                self._config, checkpoint, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
            )
        try:
            compiled = LLMatcher(self._vocabulary.library, _source(grammar), log_level=0)
        except (TypeError, ValueError) as error:
            raise _refused(grammar, str(error)) from error
        if compiled.is_error():
            raise _refused(grammar, compiled.get_error())
        return compiled

    def _put(self, request: EngineCoreRequest, compiled: Future[LLMatcher]) -> None:
        with self._wakeup:
            self._ready.append((request, compiled))
            self._wakeup.notify_all()
        if self._on_ready is not None:
            self._on_ready()

    # ------------------------------------------------------------------------------------------------------------------
    def _matcher_of(self, request: EngineCoreRequest, compiled: Future[LLMatcher]) -> Matcher | AsyncLLMError:
        sampling = request.sampling
        try:
            grammar = compiled.result()
            # What else excludes tokens might exclude those on the way to the end.
            is_free = not (sampling.bad_words or sampling.allowed_token_ids or sampling.logit_bias)
            return Matcher(
                grammar.deep_copy(),
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos_token_ids,
                max_tokens=sampling.max_tokens,
                ignore_eos=sampling.ignore_eos,
                closing=self._vocabulary.closing if is_free and self._vocabulary is not None else (),
            )
        except AsyncLLMError as error:
            self._forget(request)
            return error
        except Exception as error:  # whatever the library does, this request alone is wrong
            self._forget(request)
            return RequestFailedError(f"the grammar of this request cannot be used: {type(error).__name__}: {error}")

    def _forget(self, request: EngineCoreRequest) -> None:
        """Have the next request with this grammar try anew."""
        if request.sampling.grammar is not None:
            self._kept.pop(request.sampling.grammar, None)


def _source(grammar: Grammar) -> str:
    """Return ``grammar`` as the library reads it.

    :raises ValueError: it cannot be brought to that form.
    """
    from llguidance import LLMatcher

    if grammar.kind == "schema":
        return LLMatcher.grammar_from_json_schema(grammar.text, defaults=JSON_LAYOUT)  # pyright: ignore[reportArgumentType]
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(_as_lark(grammar.text))


def _as_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # the converter raises what it likes
        raise ValueError(f"it is no GBNF: {error}") from error


def _refused(grammar: Grammar, reason: str) -> InvalidParameterError:
    name, text = grammar.parameter, shown(grammar.text)
    return InvalidParameterError(
        f"{name} is {text!r}, of which no grammar can be made: {reason.strip()[:MAX_SHOWN_CHARS]}",
        parameter=name,
        value=text,
    )
