"""Templates render as transformers renders them; what is wrong with messages is said by name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from asyncllm.checkpoint import open_checkpoint
from asyncllm.errors import InvalidParameterError, UnsupportedModelError
from asyncllm.frontend.chat_template import ChatTemplate
from asyncllm.testing import write_tiny_checkpoint

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant!") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
        {%- continue %}
    {%- endif %}
    {% generation %}
    {{- " " + message["content"] + eos_token }}
    {% endgeneration %}
{%- endfor %}
"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
"""

TURNS = [
    {"role": "user", "content": " What is <b>café</b>? 🙂 "},
    {"role": "assistant", "content": 'A "place"\nto drink.'},
    {"role": "user", "content": "Thanks\n"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Wetter für <Ort>", "parameters": {}}}]


def reference(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template(conversations=[messages], chat_template=template, **SPECIAL, **variables)[0][0]


def ours(template: str, messages: Any, **variables: Any) -> str:
    return ChatTemplate(template, special_tokens=SPECIAL, model="test").render(messages, **variables)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, GEMMA], ids=["chatml", "llama3", "mistral", "gemma"])
@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_rendering_equals_transformers(template: str, system: bool, add_generation_prompt: bool) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *TURNS] if system else TURNS
    expected = reference(template, messages, add_generation_prompt=add_generation_prompt)
    assert ours(template, messages, add_generation_prompt=add_generation_prompt) == expected


def test_tools_and_tool_calls_equal_transformers() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}
    messages = [TURNS[0], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "fine"}]
    expected = reference(LLAMA3, messages, tools=TOOLS, add_generation_prompt=True, date_string="1 Jan 2030")
    assert ours(LLAMA3, messages, tools=TOOLS, date_string="1 Jan 2030") == expected
    assert "Zürich" in expected
    assert "<Ort>" in expected


@pytest.mark.model
def test_smollm2_template_equals_transformers(smollm2_folder: Path, smollm2_gguf: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    for messages in (TURNS, [{"role": "system", "content": "Be brief."}, *TURNS]):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for model in (smollm2_folder, smollm2_gguf):
            assert ChatTemplate.from_checkpoint(open_checkpoint(str(model))).render(messages) == expected


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ours(CHATML, [{"role": "user", "content": parts}]) == ours(CHATML, [{"role": "user", "content": "ab"}])
    image = [{"type": "image"}, {"type": "text", "text": "a"}]
    assert "<start_of_image>a" in ours(GEMMA, [{"role": "user", "content": image}])


@dataclasses.dataclass
class Message:
    role: str
    content: str


class Pydantic:
    def model_dump(self) -> dict[str, Any]:
        return {"role": "user", "content": "hi", "refusal": None}


@pytest.mark.parametrize("message", [Message("user", "hi"), Pydantic()])
def test_message_objects_are_taken(message: object) -> None:
    assert ours(CHATML, [message]) == ours(CHATML, [{"role": "user", "content": "hi"}])


def test_reasoning_is_found_under_the_names_that_templates_read() -> None:
    template = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    message = {"role": "assistant", "content": "x", "reasoning": "because"}
    assert ours(template, [message]) == "because|because" == reference(template, [message])


@pytest.mark.parametrize("template", [CHATML, GEMMA], ids=["plain", "trims"])
@pytest.mark.parametrize("last", ["The answer", "The answer "])
def test_continue_final_message_equals_transformers(template: str, last: str) -> None:
    messages = [TURNS[0], {"role": "assistant", "content": last}]
    expected = reference(template, messages, continue_final_message=True)
    text = ours(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == expected
    assert text.endswith("The answer") or template is CHATML
    with pytest.raises(InvalidParameterError, match="add_generation_prompt=False"):
        ours(template, messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "parameter"),
    [
        ("hi", "messages"),
        ([], "messages"),
        ({"role": "user", "content": "hi"}, "messages"),
        (["hi"], "messages[0]"),
        ([TURNS[0], {"content": "hi"}], "messages[1].role"),
        ([{"role": 1, "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages: Any, parameter: str) -> None:
    with pytest.raises(InvalidParameterError, match=re.escape(parameter)) as caught:
        ours(CHATML, messages)
    assert caught.value.parameter == parameter


def test_tools_have_to_be_schemas() -> None:
    with pytest.raises(InvalidParameterError, match="JSON schemas"):
        ours(LLAMA3, TURNS, tools=[len])


def test_refusal_of_the_template_names_messages_and_reason() -> None:
    with pytest.raises(InvalidParameterError, match="must alternate") as caught:
        ours(GEMMA, [TURNS[0], TURNS[0]])
    assert caught.value.parameter == "messages"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__ }}{{ 1/0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_template_runs_in_a_sandbox(attack: str) -> None:
    with pytest.raises(InvalidParameterError, match="chat template"):
        ours(attack, TURNS)


def test_objects_reach_the_template_as_plain_data() -> None:
    class Sneaky(str):
        __slots__ = ()

        def save(self) -> str:
            return "saved"

    with pytest.raises(InvalidParameterError):
        ours("{{ messages[0].content.save() }}", [{"role": "user", "content": Sneaky("x")}])
    assert ours("{{ thing }}", TURNS, thing=object()) == "<object>"


def test_missing_template_says_what_to_do(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, chat_template=None)
    template = ChatTemplate.from_checkpoint(open_checkpoint(str(folder)))
    with pytest.raises(InvalidParameterError, match=r"no chat template.*`chat_template=`"):
        template.render(TURNS)


def test_option_replaces_the_models_template(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny_checkpoint(tmp_path)))
    assert ChatTemplate.from_checkpoint(checkpoint, "{{ eos_token }}").render(TURNS) == "<|endoftext|>"
    assert ChatTemplate.from_checkpoint(checkpoint).render(TURNS[:1]).startswith("<|im_start|>user\n")


def test_tool_use_template_is_taken_where_tools_are_given() -> None:
    template = ChatTemplate("plain", named={"tool_use": "with tools"})
    assert template.render(TURNS) == "plain"
    assert template.render(TURNS, tools=TOOLS) == "with tools"


def test_invalid_template_is_an_unsupported_model() -> None:
    with pytest.raises(UnsupportedModelError, match="line 2"):
        ours("ok\n{% if %}", TURNS)


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    ours(CHATML, messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]


@pytest.mark.parametrize("tools", [5, "x", {"a": {}}, [5], object()])
def test_tools_that_are_no_list_of_dicts_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidParameterError, match="tools is"):
        ours("{{ tools }}", [{"role": "user", "content": "x"}], tools=tools)


def test_messages_inside_themselves_are_refused() -> None:
    part: dict[str, Any] = {"type": "image"}
    part["image"] = [part]
    with pytest.raises(InvalidParameterError, match="nested less deeply"):
        ours("{{ messages }}", [{"role": "user", "content": [part]}])
