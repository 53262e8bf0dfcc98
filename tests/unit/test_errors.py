"""The error tree: its printed form, its fields, and its way across a process border."""

from __future__ import annotations

import pickle
import re

import msgspec
import pytest

from asyncllm import errors
from asyncllm.errors import (
    AsyncLLMError,
    EngineDeadError,
    ErrorInfo,
    InsufficientMemoryError,
    InvalidParameterError,
    ModelNotFoundError,
    UtilityError,
    describe_error,
)

ALL = [getattr(errors, name) for name in errors.__all__ if name not in ("ErrorInfo", "describe_error", "shown")]


def test_the_docstring_prints_every_error_and_no_other() -> None:
    printed = re.findall(r"\b\w+Error\b", errors.__doc__ or "")
    builtin = {"ValueError", "RuntimeError", "FileNotFoundError", "ImportError", "TypeError"}
    assert set(printed) - builtin == {cls.__name__ for cls in ALL}


@pytest.mark.parametrize("cls", ALL)
def test_every_error_crosses_the_border_as_itself(cls: type[AsyncLLMError]) -> None:
    sent = cls("what happened", **dict.fromkeys(cls.fields, 7))
    received = AsyncLLMError.from_info(sent.to_info())
    assert type(received) is cls
    assert str(received) == "what happened"
    assert [getattr(received, name) for name in cls.fields] == [7] * len(cls.fields)


def test_fields_not_given_are_none_and_unknown_ones_are_refused() -> None:
    assert EngineDeadError("gone").exit_code is None
    with pytest.raises(TypeError, match="no field"):
        EngineDeadError("gone", colour="red")


def test_a_foreign_exception_keeps_its_name_message_and_traceback() -> None:
    try:
        raise KeyError("rank 3")
    except KeyError as error:
        info = describe_error(error)
    received = AsyncLLMError.from_info(info)
    assert isinstance(received, UtilityError)
    assert "KeyError" in str(received)
    assert "rank 3" in str(received)
    assert "test_errors.py" in "".join(received.__notes__)
    assert isinstance(AsyncLLMError.from_info(info, otherwise=EngineDeadError), EngineDeadError)


def test_a_newer_engine_may_send_fields_we_do_not_know() -> None:
    info = ErrorInfo("InvalidParameterError", "no", {"parameter": "n", "invented_later": 1})
    error = AsyncLLMError.from_info(info)
    assert isinstance(error, InvalidParameterError)
    assert error.parameter == "n"


def test_errors_are_also_the_builtin_a_caller_would_catch() -> None:
    assert issubclass(InvalidParameterError, ValueError)
    assert issubclass(ModelNotFoundError, FileNotFoundError)
    assert issubclass(EngineDeadError, RuntimeError)
    assert str(ModelNotFoundError("no such folder", model="x")) == "no such folder"


def test_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(InsufficientMemoryError("too big", max_model_len_fit=512)))
    assert error.max_model_len_fit == 512


def test_an_error_with_half_a_surrogate_pair_or_a_huge_number_can_be_sent() -> None:
    error = errors.ConfigError("no file '\ud800'", parameter="n", value=2**70)
    info = msgspec.msgpack.decode(msgspec.msgpack.encode(error.to_info()), type=ErrorInfo)
    assert info.message == r"no file '\ud800'"
    assert info.fields["value"] == str(2**70)
    msgspec.msgpack.encode(describe_error(ValueError("\ud800")))
