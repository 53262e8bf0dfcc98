"""Templates of the shapes that public models have render byte for byte as transformers' apply_chat_template does it.

What transformers refuses is refused; what only OpenAI's clients send, and transformers would render wrongly, is brought
to the form that the template reads.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from asyncllm.errors import ChatTemplateError, InvalidParameterError
from asyncllm.frontend.chat_template import ChatTemplate
from asyncllm.testing import write_tiny_checkpoint

FOLDER = Path(__file__).resolve().parents[2] / "support" / "chat_templates"
SHAPES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
WITH_TOOLS = ["hermes", "llama3", "mistral", "qwen3"]
SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für <Ort> & Umgebung",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
            "required": ["city"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}},
}
ARGUMENTS = {"city": "Zürich <\"'>", "days": [1, 2]}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(arguments: Any, name: str = "get_weather", call_id: str = "abcdefgh1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, call_id: str = "abcdefgh1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": "get_weather", "content": text}


SYSTEM = {"role": "system", "content": " Be brief. "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [user(" What is <b>café</b>? 🙂 ")],
    "turns": [user("Hi"), {"role": "assistant", "content": 'A "place"\n'}, user("Thanks\n")],
    "system": [SYSTEM, user("Hi"), {"role": "assistant", "content": "Ho"}, user("Thanks")],
}
TOOL_CHATS: dict[str, list[dict[str, Any]]] = {
    "call": [user("Weather?"), {"role": "assistant", "content": "", "tool_calls": [call(ARGUMENTS)]}],
    "call without content": [user("Weather?"), {"role": "assistant", "content": None, "tool_calls": [call(ARGUMENTS)]}],
    "result": [
        SYSTEM,
        user("Weather?"),
        {"role": "assistant", "tool_calls": [call({"city": "Bern"})]},
        result('{"t": 3}'),
    ],
    "answer after it": [
        user("Weather?"),
        {"role": "assistant", "tool_calls": [call({"city": "Bern"})]},
        result("3"),
        {"role": "assistant", "content": "Cold."},
        user("And now?"),
    ],
}
TWO_CALLS = [
    user("Both?"),
    {"role": "assistant", "content": "", "tool_calls": [call(ARGUMENTS), call({}, "now", "abcdefgh2")]},
    result("3"),
    result("noon", "abcdefgh2"),
]


@cache
def source(shape: str) -> str:
    return (FOLDER / f"{shape}.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def ours(shape: str, messages: Any, **options: Any) -> str:
    template = ChatTemplate(source(shape), special_tokens=SPECIAL, model="test")
    return template.render(messages, **{"add_generation_prompt": False, **options})


def assert_same(tokenizer: Any, shape: str, messages: Any, **options: Any) -> str:
    before = copy.deepcopy(messages)
    text = ours(shape, messages, **options)
    assert messages == before
    assert text == tokenizer.apply_chat_template(messages, chat_template=source(shape), tokenize=False, **options)
    return text


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_turns(tokenizer: Any, shape: str, chat: str, add_generation_prompt: bool) -> None:
    assert_same(tokenizer, shape, CHATS[chat], add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("shape", WITH_TOOLS)
@pytest.mark.parametrize("chat", TOOL_CHATS)
@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER, TIME]], ids=["no tools", "one", "two"])
def test_tools_calls_and_results(tokenizer: Any, shape: str, chat: str, tools: Any) -> None:
    text = assert_same(tokenizer, shape, TOOL_CHATS[chat], tools=tools, add_generation_prompt=True)
    assert tools is None or "für <Ort> & Umgebung" in text


@pytest.mark.parametrize("shape", ["hermes", "mistral", "qwen3"])
def test_several_calls_in_one_turn(tokenizer: Any, shape: str) -> None:
    assert_same(tokenizer, shape, TWO_CALLS, tools=[WEATHER, TIME], add_generation_prompt=True)


def test_llama_variables(tokenizer: Any) -> None:
    for variables in (
        {"tools_in_user_message": False, "date_string": "1 Jan 2030"},
        {"builtin_tools": ["brave_search", "code_interpreter", "get_weather"]},
    ):
        messages = [user("Weather?"), {"role": "assistant", "tool_calls": [call({"city": "Bern"})]}]
        assert_same(tokenizer, "llama3", messages, tools=[WEATHER], **variables)


@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_qwen_reasoning(tokenizer: Any, thinking: dict[str, Any]) -> None:
    told = {"role": "assistant", "reasoning_content": "\nhm\n", "content": "\nYes", "tool_calls": [call(ARGUMENTS)]}
    inline = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}
    other_name = {"role": "assistant", "reasoning": "hm", "content": "Yes"}
    for last in (told, inline, other_name):
        for messages in ([user("a"), last], [user("a"), last, result("3")], [user("a"), last, user("b")]):
            assert_same(tokenizer, "qwen3", messages, add_generation_prompt=True, **thinking)


def test_parts_of_text_where_the_template_reads_parts(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": " a "}, {"type": "image"}, {"type": "text", "text": "b "}]
    texts = [part for part in parts if part["type"] == "text"]
    system = {"role": "system", "content": [{"type": "text", "text": "S"}]}
    for messages in ([user(parts)], [user(texts)], [system, user(texts)]):
        assert_same(tokenizer, "gemma3", messages, add_generation_prompt=True)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "gemma3"])
def test_parts_of_text_are_joined_where_it_reads_a_text(shape: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ours(shape, [user(parts)]) == ours(shape, [user("ab")])


@pytest.mark.parametrize("shape", WITH_TOOLS)
def test_arguments_that_are_json_text(tokenizer: Any, shape: str) -> None:
    """As OpenAI's API has them. Qwen's template reads them as they are; the others get the object."""
    written = '{"city":"Bern"}'
    as_text = [user("Weather?"), {"role": "assistant", "content": "", "tool_calls": [call(written)]}]
    as_object = [user("Weather?"), {"role": "assistant", "content": "", "tool_calls": [call({"city": "Bern"})]}]
    if shape == "qwen3":
        assert written in assert_same(tokenizer, shape, as_text)
        return
    assert ours(shape, as_text) == ours(shape, as_object)
    broken = [user("Weather?"), {"role": "assistant", "content": "", "tool_calls": [call("{city")]}]
    with pytest.raises(InvalidParameterError, match=r"messages\[1\].tool_calls\[0\].function.arguments"):
        ours(shape, broken)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("last", ["The answer", "The answer ", " is\n"])
def test_continue_final_message(tokenizer: Any, shape: str, last: str) -> None:
    messages = [user("Hi"), {"role": "assistant", "content": last}]
    text = assert_same(tokenizer, shape, messages, continue_final_message=True)
    assert text.rstrip().endswith(last.strip())


def test_continue_final_message_of_parts(tokenizer: Any) -> None:
    messages = [
        user("Hi"),
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]},
    ]
    assert assert_same(tokenizer, "gemma3", messages, continue_final_message=True).endswith("ab")


def test_continue_final_message_that_the_template_takes_apart(tokenizer: Any) -> None:
    messages = [user("Hi"), {"role": "assistant", "content": "<think>hm</think>Yes"}]
    with pytest.raises(ValueError, match="does not appear"):
        tokenizer.apply_chat_template(
            messages, chat_template=source("qwen3"), tokenize=False, continue_final_message=True
        )
    with pytest.raises(InvalidParameterError, match="continue_final_message"):
        ours("qwen3", messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("shape", "messages", "reason"),
    [
        ("gemma3", [user("a"), user("b")], "Conversation roles must alternate user/assistant/user/assistant/..."),
        ("hermes", [{"role": "poet", "content": "a"}], "Unexpected message role: poet"),
        (
            "llama3",
            [user("a"), {"role": "assistant", "tool_calls": [call({}), call({})]}],
            "This model only supports single tool-calls at once!",
        ),
        (
            "mistral",
            [user("a"), {"role": "assistant", "tool_calls": [call({}, call_id="x")]}],
            "Tool call IDs should be alphanumeric strings with length 9!",
        ),
    ],
)
def test_what_a_template_refuses(tokenizer: Any, shape: str, messages: Any, reason: str) -> None:
    import jinja2

    with pytest.raises(jinja2.TemplateError, match=reason[:20]):
        tokenizer.apply_chat_template(messages, chat_template=source(shape), tokenize=False)
    with pytest.raises(ChatTemplateError) as caught:
        ours(shape, messages)
    assert caught.value.reason == reason
    assert caught.value.parameter == "messages"
    assert "refuses these messages" in str(caught.value)


def test_a_template_that_fails_by_accident_has_no_reason() -> None:
    with pytest.raises(ChatTemplateError, match="fails on these messages") as caught:
        ChatTemplate("{{ messages[0].content.nothing.at_all }}").render([user("a")])
    assert caught.value.reason is None
