"""Every error this package raises on purpose.

    AsyncLLMError
    ├── ConfigError (ValueError)               an engine option is wrong
    ├── UsageError (RuntimeError)              a call that cannot work (closed engine, second event loop)
    ├── ModelError                             the checkpoint cannot be used
    │   ├── ModelNotFoundError                 nothing there
    │   ├── UnsupportedModelError              architecture, tokenizer or weight format that we do not run
    │   └── CheckpointError                    files that contradict each other or are damaged
    ├── RequestError (ValueError)              this request is refused before anything is sent; nothing else is harmed
    │   ├── InvalidParameterError              a sampling parameter or prompt is out of range
    │   │   ├── UnknownParameterError (TypeError)  no parameter has this name; says which one may be meant
    │   │   └── ChatTemplateError              the model's chat template refuses the messages, or fails on them
    │   ├── PromptTooLongError                 the prompt leaves no room for an output token
    │   ├── RequestTooLargeError               can never fit the KV blocks of this engine
    │   └── DuplicateRequestError              a live request has this id
    ├── RequestFailedError                     the engine accepted this request, then failed on it alone
    ├── MissingDependencyError (ImportError)   this request needs an optional package that is not installed
    ├── UtilityError (RuntimeError)            a call into the engine (``collective_rpc`` …) failed there
    └── EngineError (RuntimeError)
        ├── EngineStartError                   the engine never became ready
        │   ├── EngineStartTimeoutError        … within ``startup_timeout_s``
        │   └── InsufficientMemoryError        … for want of memory; says which ``max_model_len`` would fit
        └── EngineDeadError                    the engine process ended while it was in use

Invariant: an error keeps its type, message and fields across a process border (:meth:`AsyncLLMError.to_info` /
:meth:`AsyncLLMError.from_info`), and names the parameter, its value and the limit wherever there is one.
"""

from __future__ import annotations

import traceback
from typing import Any, ClassVar, Self

import msgspec

__all__ = [
    "AsyncLLMError",
    "ChatTemplateError",
    "CheckpointError",
    "ConfigError",
    "DuplicateRequestError",
    "EngineDeadError",
    "EngineError",
    "EngineStartError",
    "EngineStartTimeoutError",
    "ErrorInfo",
    "InsufficientMemoryError",
    "InvalidParameterError",
    "MissingDependencyError",
    "ModelError",
    "ModelNotFoundError",
    "PromptTooLongError",
    "RequestError",
    "RequestFailedError",
    "RequestTooLargeError",
    "UnknownParameterError",
    "UnsupportedModelError",
    "UsageError",
    "UtilityError",
    "describe_error",
    "shown",
]


WIRE_INTEGERS = range(-(2**63), 2**64)
MAX_SHOWN_BITS = 1000
"""Integers of some thousands of digits cannot be printed at all."""


class ErrorInfo(msgspec.Struct, array_like=True, frozen=True):
    """An exception as it crosses a process border: class name, message, plain fields, remote traceback."""

    kind: str
    message: str
    fields: dict[str, str | int | float | bool | None] = {}
    traceback: str = ""


class AsyncLLMError(Exception):
    """Base of every error this package raises on purpose.

    ``fields`` names the attributes that a subclass carries; each is a keyword of the constructor, else ``None``.
    """

    fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str, **fields: str | int | float | bool | None) -> None:
        unknown = fields.keys() - set(self.fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {sorted(unknown)}; it has {self.fields}")
        super().__init__(message)
        self.message = message
        for name in self.fields:
            setattr(self, name, fields.get(name))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, {name: getattr(self, name) for name in self.fields})

    def to_info(self) -> ErrorInfo:
        """Return this error as plain data; :meth:`from_info` makes the same type from it in another process."""
        fields = {name: _wire_value(getattr(self, name)) for name in self.fields}
        return ErrorInfo(type(self).__name__, _encodable(self.message), fields, _format_traceback(self))

    def fresh(self) -> Self:
        """Return a copy to be raised: one object raised in many tasks would collect all their tracebacks."""
        copy = type(self)(self.message, **{name: getattr(self, name) for name in self.fields})
        copy.__cause__ = self.__cause__
        for note in getattr(self, "__notes__", ()):
            copy.add_note(note)
        return copy

    @staticmethod
    def from_info(info: ErrorInfo, otherwise: type[AsyncLLMError] | None = None) -> AsyncLLMError:
        """Return the error that ``info`` describes; the remote traceback becomes a note.

        An unknown ``kind`` (an exception that is not ours) becomes ``otherwise`` (default :class:`UtilityError`)
        with the original class name in its message.
        """
        known = _error_classes().get(info.kind)
        if known is None:
            error = (otherwise or UtilityError)(f"{info.kind}: {info.message}")
        else:
            error = known(info.message, **{k: v for k, v in info.fields.items() if k in known.fields})
        if info.traceback:
            error.add_note("In the engine process:\n" + info.traceback.rstrip())
        return error


def describe_error(error: BaseException) -> ErrorInfo:
    """Return any exception as plain data: ours with its fields, others by class name, message and traceback."""
    if isinstance(error, AsyncLLMError):
        return error.to_info()
    return ErrorInfo(type(error).__name__, _encodable(str(error)), {}, _format_traceback(error))


def shown(value: object, *, max_chars: int | None = 200) -> str | int | float | bool | None:
    """Return ``value`` as an error can carry and print it: plain data, text cut to ``max_chars``. Never raises."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int) and value.bit_length() <= MAX_SHOWN_BITS:
        return value
    if not isinstance(value, str):
        try:
            value = repr(value)
        except Exception:  # a number of too many digits, alone or in a list; a broken __repr__
            value = f"<{type(value).__name__}>"
    return _encodable(value)[:max_chars]


def _wire_value(value: object) -> str | int | float | bool | None:
    value = shown(value, max_chars=None)
    return str(value) if isinstance(value, int) and value not in WIRE_INTEGERS else value


def _format_traceback(error: BaseException) -> str:
    return _encodable("".join(traceback.format_exception(error)))


def _encodable(text: str) -> str:
    """Return ``text`` with lone surrogates, which no message can carry, written out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _rebuild(cls: type[AsyncLLMError], message: str, fields: dict[str, Any]) -> AsyncLLMError:
    return cls(message, **fields)


def _error_classes() -> dict[str, type[AsyncLLMError]]:
    found: dict[str, type[AsyncLLMError]] = {}
    todo: list[type[AsyncLLMError]] = [AsyncLLMError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    return found


class ConfigError(AsyncLLMError, ValueError):
    """An engine option is unknown, out of range or contradicts another one."""

    fields = ("parameter", "value", "limit")
    parameter: str | None
    value: str | int | float | None
    limit: str | int | float | None


class UsageError(AsyncLLMError, RuntimeError):
    """The API was called in a way that cannot work, such as a stream on a closed engine or from a second event loop."""


class ModelError(AsyncLLMError):
    """The checkpoint cannot be used."""

    fields = ("model",)
    model: str | None


class ModelNotFoundError(ModelError, FileNotFoundError):
    """There is no model at the given path, and no such id in the local Hugging Face cache."""

    def __str__(self) -> str:  # OSError would print its errno form
        return self.message


class UnsupportedModelError(ModelError):
    """The architecture, tokenizer or weight format is not one that this package runs."""

    fields = ("model", "feature")
    feature: str | None


class CheckpointError(ModelError):
    """Files of the checkpoint are missing, damaged or contradict each other."""

    fields = ("model", "file")
    file: str | None


class RequestError(AsyncLLMError, ValueError):
    """This request is refused; nothing was sent to the engine, other requests are not affected."""

    fields = ("parameter", "value", "limit", "request_id")
    parameter: str | None
    value: str | int | float | bool | None
    limit: str | int | float | None
    request_id: str | None


class InvalidParameterError(RequestError):
    """A sampling parameter or a prompt is of the wrong type or out of its range."""


class UnknownParameterError(InvalidParameterError, TypeError):
    """There is no sampling parameter of this name; also a TypeError, as it is for a function's keywords."""


class ChatTemplateError(InvalidParameterError):
    """The chat template refuses the messages; ``reason`` is what it says (``None``: it failed on them by accident)."""

    fields = (*RequestError.fields, "reason")
    reason: str | None


class PromptTooLongError(RequestError):
    """The prompt leaves no room for a single output token within ``max_model_len``."""


class RequestTooLargeError(RequestError):
    """The request needs more KV blocks than the engine has, so it could never run."""


class DuplicateRequestError(RequestError):
    """A request with this id is still running."""


class RequestFailedError(AsyncLLMError, RuntimeError):
    """The engine accepted this request and then failed on it alone; the engine and its other requests go on."""

    fields = ("request_id",)
    request_id: str | None


class MissingDependencyError(AsyncLLMError, ImportError):
    """An optional package that this request needs is not installed; the message says how to install it."""

    fields = ("package", "request_id")
    package: str | None
    request_id: str | None


class UtilityError(AsyncLLMError, RuntimeError):
    """A call into the engine failed there; the engine goes on. The remote traceback is a note of this error."""

    fields = ("method",)
    method: str | None


class EngineError(AsyncLLMError, RuntimeError):
    """The engine as a whole cannot do its work."""


class EngineStartError(EngineError):
    """The engine process did not become ready; ``log_tail`` holds the last lines it wrote."""

    fields = ("phase", "exit_code", "log_tail")
    phase: str | None
    exit_code: int | None
    log_tail: str | None


class EngineStartTimeoutError(EngineStartError):
    """The engine process was still starting after ``startup_timeout_s``."""


class InsufficientMemoryError(EngineStartError):
    """Memory does not hold one request of ``max_model_len``; ``max_model_len_fit`` is what would fit."""

    fields = ("phase", "exit_code", "log_tail", "max_model_len_fit", "needed_bytes", "available_bytes")
    max_model_len_fit: int | None
    needed_bytes: int | None
    available_bytes: int | None


class EngineDeadError(EngineError):
    """The engine process ended while it was in use.

    ``exit_code`` is negative for a signal (-9: SIGKILL), ``None`` if not known; the cause, where the engine could still
    name it, is ``__cause__``; ``log_tail`` holds the last lines it wrote.
    """

    fields = ("exit_code", "log_tail")
    exit_code: int | None
    log_tail: str | None
