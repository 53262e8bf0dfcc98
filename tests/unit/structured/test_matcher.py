"""Following a grammar token by token: what may come next, when the end may, and when it must."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncllm.errors import AsyncLLMError, InvalidParameterError, MissingDependencyError, RequestFailedError
from asyncllm.frontend.structured import make_grammar
from asyncllm.sampling_params import SamplingParams
from asyncllm.structured.compiler import MAX_KEPT, GrammarCompiler
from asyncllm.structured.matcher import Matcher
from asyncllm.testing.tiny_checkpoint import EOS, IM_END
from asyncllm.wire.messages import EngineCoreRequest, EngineSampling, RareSampling
from tests.support.engines import scripted_config

VOCAB = 260
MANY = 10_000


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(scripted_config(tmp_path), vocab_size=VOCAB, eos_token_ids=[EOS, IM_END])
    yield made
    made.shutdown()


def request(request_id: int = 1, *, ignore_eos: bool = False, **params: object) -> EngineCoreRequest:
    grammar = make_grammar(SamplingParams(**params))  # pyright: ignore[reportArgumentType]
    return EngineCoreRequest(
        request_id, [1], EngineSampling(MANY, ignore_eos=ignore_eos, rare=RareSampling(grammar=grammar))
    )


def found(compiler: GrammarCompiler, message: EngineCoreRequest) -> Matcher | AsyncLLMError:
    compiler.submit(message)
    assert compiler.wait()
    ((request_id, matcher),) = compiler.take()
    assert request_id == message.request_id
    return matcher


def matcher_of(compiler: GrammarCompiler, *, ignore_eos: bool = False, **params: object) -> Matcher:
    matcher = found(compiler, request(ignore_eos=ignore_eos, **params))
    assert isinstance(matcher, Matcher), matcher
    return matcher


def allowed(matcher: Matcher) -> set[int]:
    return {token for token in range(VOCAB) if matcher.mask[token >> 3] >> (token & 7) & 1}


def letters(text: str) -> set[int]:
    return set(text.encode())


def follow(matcher: Matcher, text: str) -> bool:
    """Follow all of a text; return whether nothing may come after it, and never before."""
    *before, last = text.encode()
    assert not any(matcher.follow(token, MANY) for token in before)
    return matcher.follow(last, MANY)


def test_the_end_is_allowed_exactly_when_the_grammar_may_end(compiler: GrammarCompiler) -> None:
    matcher = matcher_of(compiler, regex="ab?")
    assert (allowed(matcher), matcher.may_end) == (letters("a"), False)
    assert not matcher.follow(ord("a"), MANY)
    assert (allowed(matcher), matcher.may_end) == ({*letters("b"), EOS, IM_END}, True)
    assert matcher.follow(ord("b"), MANY)


def test_nothing_may_follow_a_whole_document(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    matcher = matcher_of(compiler, schema={**schema, "additionalProperties": False})
    assert follow(matcher, '{"a": true}')


def test_json_stands_on_one_line(compiler: GrammarCompiler) -> None:
    matcher = matcher_of(compiler, schema={"type": "array", "items": {"type": "null"}})
    assert letters("]n") == allowed_after(matcher, "[")
    assert letters(" n") == allowed_after(matcher, "null,")
    assert letters("n") == allowed_after(matcher, " ")


def allowed_after(matcher: Matcher, text: str) -> set[int]:
    assert not follow(matcher, text)
    return allowed(matcher)


def test_ignore_eos_excludes_the_end_while_something_else_may_come(compiler: GrammarCompiler) -> None:
    matcher = matcher_of(compiler, regex="a{1,2}", ignore_eos=True)
    assert not matcher.follow(ord("a"), MANY)
    assert allowed(matcher) == letters("a")
    assert matcher.follow(ord("a"), MANY)


def test_a_token_that_does_not_fit_is_a_failure_of_the_request(compiler: GrammarCompiler) -> None:
    matcher = matcher_of(compiler, regex="a+")
    with pytest.raises(RequestFailedError, match="does not fit its grammar"):
        matcher.follow(ord("b"), MANY)


@pytest.mark.parametrize("text", ["yes", "a.b(c)*", "x y\n", "é“", "</s>"])
def test_a_choice_is_itself_and_nothing_else(compiler: GrammarCompiler, text: str) -> None:
    matcher = matcher_of(compiler, choice=[text])
    assert follow(matcher, text)


def test_a_choice_may_begin_another(compiler: GrammarCompiler) -> None:
    matcher = matcher_of(compiler, choice=["no", "none"])
    assert not follow(matcher, "no")
    assert allowed(matcher) == {*letters("n"), EOS, IM_END}


@pytest.mark.parametrize("grammar", ['start: "a" B\nB: /b/', 'root ::= "a" bee\nbee ::= "b"'], ids=["lark", "gbnf"])
def test_grammars_of_both_notations(compiler: GrammarCompiler, grammar: str) -> None:
    assert follow(matcher_of(compiler, grammar=grammar), "ab")


def test_matchers_of_one_grammar_go_their_own_ways(compiler: GrammarCompiler) -> None:
    one, other = matcher_of(compiler, regex="ab|cd"), matcher_of(compiler, regex="ab|cd")
    assert not one.follow(ord("a"), MANY)
    assert (allowed(one), allowed(other)) == (letters("b"), letters("ac"))


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": "start: other"}, "unknown name"),
        ({"grammar": 'root ::= "a'}, "no grammar can be made"),
        ({"schema": {"type": "object", "not": {}}}, "Unimplemented keys"),
        ({"schema": {"type": "nothing"}}, "no grammar can be made"),
    ],
)
def test_a_bad_grammar_is_an_error_that_names_the_parameter(
    compiler: GrammarCompiler, params: dict[str, object], says: str
) -> None:
    error = found(compiler, request(**params))
    assert isinstance(error, InvalidParameterError)
    assert error.parameter == next(iter(params))
    assert says in str(error)
    assert "<state>" not in str(error)


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    once = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda grammar: (compiled.append(grammar.text), once(grammar))[1])
    for regex in ("a", "b", "a", "a"):
        matcher_of(compiler, regex=regex)
    assert compiled == ["a", "b"]
    for number in range(MAX_KEPT):
        matcher_of(compiler, regex=str(number))
    matcher_of(compiler, regex="a")
    assert compiled.count("a") == 2  # the oldest is forgotten
    for _ in range(2):
        assert isinstance(found(compiler, request(regex="(")), InvalidParameterError)
    assert compiled.count("(") == 2  # errors are not kept


def test_without_the_library_the_request_is_told_what_to_install(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    error = found(compiler, request(regex="a"))
    assert isinstance(error, MissingDependencyError)
    with open(Path(__file__).parents[3] / "pyproject.toml", "rb") as file:
        (needed,) = tomllib.load(file)["project"]["optional-dependencies"]["structured"]
    assert f"pip install '{needed}'" in str(error)  # not asyncllm[...]: on PyPI that name is a stranger's


def test_waiting_without_anything_submitted_returns_at_once(compiler: GrammarCompiler) -> None:
    assert not compiler.wait()
    assert not compiler.has_ready
