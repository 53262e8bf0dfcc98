"""A chat with a tool: the model calls it, the program answers, the model goes on. Reasoning would be shown dimmed.

python examples/tools.py MODEL
"""

import json
import sys

import asyncllm

TEMPLATE = """\
{%- for message in messages %}
    {{- "<|im_start|>" + (message.role if message.role != "tool" else "user") + "\n" + (message.content or "") }}
    {%- if loop.first and tools %}
        {{- "\n\nA call is <tool_call>{\\"name\\": ..., \\"arguments\\": {...}}</tool_call>. Functions:" }}
        {%- for tool in tools %}{{- "\n" + (tool.function | tojson) }}{%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set function = {"name": call.function.name, "arguments": call.function.arguments} %}
        {{- "<tool_call>" + (function | tojson) + "</tool_call>" }}
    {%- endfor %}
    {{- "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n" }}{%- endif %}
"""
"""For models whose own template knows no tools, such as SmolLM2-135M; leave it away for one that does."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def get_weather(city: str) -> str:
    return json.dumps({"city": city, "weather": "light rain", "celsius": 12})


def turn(city: str, weather: str, celsius: int) -> list[dict[str, object]]:
    """Return a question, the call, its result and the answer."""
    result = json.dumps({"city": city, "weather": weather, "celsius": celsius})
    call = {"id": "example01", "type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "example01", "content": result},
        {"role": "assistant", "content": f"In {city}: {weather}, {celsius} degrees."},
    ]


async def main() -> None:
    messages = [
        {"role": "system", "content": "You answer with the help of functions."},
        *turn("Rome", "sunny", 21),  # a small model needs examples
        *turn("Oslo", "snow", -3),
        {"role": "user", "content": "What is the weather in Paris?"},
    ]
    async with asyncllm.AsyncLLM(sys.argv[1]) as llm:
        for _ in range(3):
            stream = llm.chat(messages, tools=[WEATHER], chat_template=TEMPLATE, temperature=0, max_tokens=64)
            async for delta in stream:
                if delta.channel == "content":
                    print(delta.text, end="", flush=True)
                elif delta.channel == "reasoning":
                    print(f"\033[2m{delta.text}\033[0m", end="", flush=True)
            done = await stream.completion()
            messages.append(done.to_message())
            if done.finish_reason != "tool_calls":
                break
            for call in done.tool_calls:
                result = get_weather(**call.arguments)
                print(f"{call.name}({call.arguments}) -> {result}")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print()


if len(sys.argv) != 2:
    sys.exit(__doc__)
asyncllm.run(main)
